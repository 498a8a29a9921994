// Bringing the whole process to a stop at the driver, and letting it go on.
#pragma once

#include "gate.hpp"
#include "wire.h"

#include <string>

namespace woodfrog::interpose {

// How an operation of the agent ended, in the terms of the wire.
struct Outcome {
    wire::Status status = wire::Status::ok;
    CUresult driver_result = CUDA_SUCCESS;
    uint64_t value = 0; // the handle or the number it is about
    std::string message;
    bool ok() const { return status == wire::Status::ok; }
};

Outcome driver_failure(CUresult result, const std::string &what, uint64_t value = 0);

// Lets captures finish, closes the gate, waits for every thread inside and for all work of every context. On any other
// outcome than ok the process runs on as before.
Outcome quiesce(Deadline deadline);
void resume();

} // namespace woodfrog::interpose
