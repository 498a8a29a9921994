// The end of the process; see ending.hpp.
#include "ending.hpp"

#include "driver.hpp"
#include "gate.hpp"

#include <atomic>
#include <cstdlib>

namespace woodfrog::interpose {
namespace {

constinit std::atomic<bool> exiting{false};

} // namespace

void watch_for_the_end() {
    // Through the gate: a process that is quiesced waits here with its end until it runs again, wherever that is.
    // atexit fails only without memory; the driver's own word is left then.
    (void)atexit([] {
        GateScope scope(Symbol::cuInit);
        exiting.store(true, std::memory_order_release);
    });
}

bool is_ending() {
    int count = 0;
    return exiting.load(std::memory_order_acquire) || WF_REAL(cuDeviceGetCount)(&count) == CUDA_ERROR_DEINITIALIZED;
}

} // namespace woodfrog::interpose
