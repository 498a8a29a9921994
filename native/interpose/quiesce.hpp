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

// For processes that come to rest together: one whose work waits for another process must not be waited for, so each
// step is short, and who decides sees all of them (operations/cut.py).
struct Held {
    bool idle = false;      // the gate is closed, nobody is inside, and no context has work
    bool capturing = false; // a stream capture is active; the gate is open still
    uint32_t waiting = 0;   // threads at the closed gate
    uint32_t submitted = 0; // how often threads that were admitted gave the GPU work
};
// Closes the gate as soon as no capture is active; then up to `admit` times lets each waiting thread give the GPU work
// once, as long as the process is idle again within `look` each time (else its work may wait for another process); then
// looks until it is idle, for `look` at most. On any other outcome than ok the gate is open.
Outcome hold(std::chrono::milliseconds look, uint32_t admit, Held *held);

} // namespace woodfrog::interpose
