// cuInit: the first call that shows that this process means to use a GPU. Everything of ours that costs something
// starts here and not before.
#include "agent.hpp"
#include "gate.hpp"
#include "memory.hpp"
#include "shadow.hpp"

using namespace woodfrog::interpose;

WF_HOOK(cuInit, unsigned int Flags) {
    if (!ensure_driver())
        return CUDA_ERROR_NO_DEVICE; // reached through a weak symbol in a process without a driver
    GateScope scope(Symbol::cuInit);
    const CUresult result = WF_REAL(cuInit)(Flags);
    if (result == CUDA_SUCCESS && !driver_only()) {
        start_agent();
        shadow::start();
    }
    return result;
}
