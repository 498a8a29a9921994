// Host memory that the application registered with the driver (cuMemHostRegister) and shares with other processes.
//
// The driver saves private registered memory with its own checkpoint; with shared memory (NCCL's SHM transport in
// /dev/shm) its restore fails. So that is unregistered before and registered again afterwards, at the same addresses;
// the bytes are the CPU side's business all the time.
#pragma once

#include "quiesce.hpp"

namespace woodfrog::interpose {

// Whether all of it can be registered again as it was. Changes nothing.
Outcome check_registered();
// Takes the registrations back; `*changed` becomes true when one was.
Outcome unregister_shared(bool *changed);
// What was taken back is made again; safe to repeat.
Outcome register_again();

} // namespace woodfrog::interpose
