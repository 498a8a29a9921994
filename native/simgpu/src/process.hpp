// The state of the simulated driver in this process: initialised or not, forked or not, and the gate.
#pragma once

#include <atomic>

#include "gate.hpp"

namespace simgpu {

struct Process {
    static Process &instance();

    std::atomic<bool> initialised{false};
    // Set in the child of a fork, which has no CUDA and must not touch a lock of its parent's.
    std::atomic<bool> forked{false};
    Gate gate;
};

// Marks the calling thread as the driver's own: the gate does not hold it up.
void mark_internal_thread();
// Marks the calling thread as running a callback of the application, which may not call the driver.
struct CallbackScope {
    CallbackScope();
    ~CallbackScope();
};

// One call of the API: passes the gate on the way in and out. Throws Error when the process may not call.
class ApiCall {
  public:
    ApiCall();
    ~ApiCall();
    ApiCall(const ApiCall &) = delete;
    ApiCall &operator=(const ApiCall &) = delete;

  private:
    bool entered_ = false;
};

// cuInit. Returns CUDA_ERROR_NO_DEVICE when the machine has none.
int initialise_process();

} // namespace simgpu
