// Host memory of the virtual memory API while it is with the daemon: a thread that touches it waits until it is back.
//
// The gate stops calls of the driver, but such memory is read and written by the processor too (NCCL's proxies poll
// it). While some of it is away a handler of SIGSEGV is in place that lets the thread sleep and then try again; every
// other fault goes to whatever handled it before. Nothing is in place while nothing is away.
#pragma once

#include "driver.hpp"

namespace woodfrog::interpose {

// [address, address + size_bytes) is about to be unmapped. False when there are too many such ranges, and nothing was
// changed. Called by the agent.
bool host_waits_for(CUdeviceptr address, size_t size_bytes);
// All of it is mapped again.
void host_goes_on();

} // namespace woodfrog::interpose
