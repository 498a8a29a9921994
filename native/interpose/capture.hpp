// Stream captures in progress.
//
// While one is active nothing of ours synchronises: frees are put off. A quiesce lets the captures that run finish,
// with all calls still passing (a captured launch touches no GPU), and holds new ones back.
#pragma once

#include "driver.hpp"
#include "gate.hpp"

#include <cstdint>
#include <string>

namespace woodfrog::interpose {

namespace detail {
extern std::atomic<uint32_t> g_active_captures;
}

// One load; false almost always.
inline bool capture_active() {
    return detail::g_active_captures.load(std::memory_order_acquire) != 0;
}

// Whether the driver would refuse a call like cuMemAlloc on this thread because of a capture (its documented rule for
// calls that are unsafe in a capture). CUDA_SUCCESS when it would not. Otherwise the driver has been made to refuse
// one, so that the capture is invalidated as it would be, and its answer is returned.
CUresult capture_refusal();

// While it lives, this thread's calls are not unsafe in any capture. Costs nothing when no capture is active.
class RelaxedScope {
  public:
    explicit RelaxedScope(bool needed = capture_active());
    ~RelaxedScope();
    RelaxedScope(const RelaxedScope &) = delete;
    RelaxedScope &operator=(const RelaxedScope &) = delete;

  private:
    bool exchanged_ = false;
    CUstreamCaptureMode previous_ = CU_STREAM_CAPTURE_MODE_GLOBAL;
};

// From now on new captures wait; returns when none is active, or false at the deadline (new ones may then begin again)
// with the reason in `why`.
bool capture_hold(Deadline deadline, std::string *why);
void capture_let_go();
// The context is about to be destroyed: its captures end with it.
void capture_context_gone(CUcontext context);

} // namespace woodfrog::interpose
