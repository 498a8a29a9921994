// The steps of a quiesce; see quiesce.hpp.
//
// No driver call made here may block without bound: a kernel or a host function of the application may never end. Work
// is therefore looked at, not waited for, until it is over.
#include "quiesce.hpp"

#include "capture.hpp"
#include "contexts.hpp"
#include "debug.hpp"
#include "ending.hpp"
#include "memory.hpp"
#include "spent.hpp"

#include <algorithm>
#include <cstdio>
#include <ctime>
#include <fcntl.h>
#include <unistd.h>

namespace woodfrog::interpose {
namespace {

// First look again soon, most work is short; then at a rate that costs nothing.
constexpr long kFirstPauseNs = 20'000;
constexpr long kLongestPauseNs = 1'000'000;
// Of steps taken in one round: others have to be looked at now and then.
constexpr std::chrono::milliseconds kLongestRound{50};
// A process that is far behind would wait for a wake-up, for its GPU and for the agent at each of hundreds of steps:
// some 0.45 ms on an H200's machine, where it takes 0.1 ms by itself. So a long round is made of bursts, with a look
// after each.
constexpr uint32_t kBurstsInRound = 8;
constexpr uint32_t kLongestBurst = 16;

std::string thread_name(int32_t tid) {
    char path[64], name[32] = {};
    snprintf(path, sizeof(path), "/proc/self/task/%d/comm", tid);
    const int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return "ended";
    const ssize_t length = read(fd, name, sizeof(name) - 1);
    close(fd);
    return length > 1 ? std::string(name, static_cast<size_t>(length - 1)) : "unnamed";
}

// An event behind all that was submitted to the context's blocking streams (per-thread ones included), which the legacy
// stream waits for.
class LegacyMark {
  public:
    CUresult set() {
        CUresult result = WF_REAL(cuEventCreate)(&event_, CU_EVENT_DISABLE_TIMING);
        if (result == CUDA_SUCCESS)
            result = WF_REAL(cuEventRecord)(event_, CU_STREAM_LEGACY);
        return result;
    }
    CUresult query() const { return WF_REAL(cuEventQuery)(event_); }
    ~LegacyMark() {
        if (event_ != nullptr)
            WF_REAL(cuEventDestroy_v2)(event_);
    }

  private:
    CUevent event_ = nullptr;
};

// Looks until `query` no longer answers "not ready", or until the deadline.
template <typename Query> CUresult poll(Query query, Deadline deadline) {
    long pause_ns = kFirstPauseNs;
    for (;;) {
        const CUresult result = query();
        if (result != CUDA_ERROR_NOT_READY || std::chrono::steady_clock::now() >= deadline)
            return result;
        const timespec pause{0, pause_ns};
        nanosleep(&pause, nullptr);
        pause_ns = pause_ns * 2 > kLongestPauseNs ? kLongestPauseNs : pause_ns * 2;
    }
}

Outcome work_outcome(CUresult result, const Context &context, const char *where) {
    char text[160];
    if (result == CUDA_ERROR_NOT_READY) {
        snprintf(text, sizeof(text), "work in %s of device %d is still running", where, context.device);
        return {wire::Status::timeout, CUDA_SUCCESS, 0, text};
    }
    snprintf(text, sizeof(text), "the work in %s of device %d ended with an error", where, context.device);
    return driver_failure(result, text);
}

// A primary context that was reset and not used since, or one destroyed in a way we did not see, has no work.
bool is_gone(CUresult result) {
    return result == CUDA_ERROR_CONTEXT_IS_DESTROYED || result == CUDA_ERROR_INVALID_CONTEXT;
}

// Whether the context has work, without any call that could wait for it: one that gives the GPU work of its own, be it
// an event, waits where the queue is full. What is left out are per-thread default streams; `quiesce` sees those.
CUresult look_at_context(const Context &context) {
    const CurrentScope current(context.handle);
    if (is_gone(current.result()))
        return CUDA_SUCCESS;
    if (current.result() != CUDA_SUCCESS)
        return current.result();
    for (const std::vector<CUstream> *streams : {&context.free_streams, &context.blocking_streams})
        for (const CUstream stream : *streams)
            if (const CUresult result = WF_REAL(cuStreamQuery)(stream); result != CUDA_SUCCESS)
                return result;
    if (context.green)
        return CUDA_SUCCESS;
    const CUresult result = WF_REAL(cuStreamQuery)(CU_STREAM_LEGACY);
    return is_gone(result) ? CUDA_SUCCESS : result;
}

Outcome wait_for_context(const Context &context, Deadline deadline) {
    const CurrentScope current(context.handle);
    if (is_gone(current.result()))
        return {};
    if (current.result() != CUDA_SUCCESS)
        return driver_failure(current.result(), "a context cannot be made current");
    for (const CUstream stream : context.free_streams) {
        const CUresult result = poll([&] { return WF_REAL(cuStreamQuery)(stream); }, deadline);
        if (result != CUDA_SUCCESS)
            return work_outcome(result, context, "a non-blocking stream");
    }
    if (context.green)
        return {}; // its other work is the primary context's
    LegacyMark mark;
    CUresult result = mark.set();
    if (result == CUDA_SUCCESS)
        result = poll([&] { return mark.query(); }, deadline);
    if (is_gone(result))
        return {};
    if (result != CUDA_SUCCESS)
        return work_outcome(result, context, "the streams");
    // What is left can only be the end of what has been seen finished.
    result = WF_REAL(cuCtxSynchronize)();
    return result == CUDA_SUCCESS ? Outcome{} : work_outcome(result, context, "a context");
}

} // namespace

Outcome driver_failure(CUresult result, const std::string &what, uint64_t value) {
    const char *name = nullptr;
    if (WF_REAL(cuGetErrorName)(result, &name) != CUDA_SUCCESS || name == nullptr)
        name = "an unknown error";
    return {wire::Status::driver_error, result, value, what + ": " + name};
}

Outcome quiesce(Deadline deadline) {
    std::string why;
    if (!capture_hold(deadline, &why))
        return {wire::Status::timeout, CUDA_SUCCESS, 0, why};
    Straggler straggler;
    switch (spent::timed(spent::What::gate, [&] { return gate_close(deadline, &straggler); })) {
    case CloseResult::closed:
        break;
    case CloseResult::timeout: {
        capture_let_go();
        char text[160];
        snprintf(text, sizeof(text), "%s is still running in thread %d (%s)", symbol_name(straggler.symbol),
                 straggler.tid, thread_name(straggler.tid).c_str());
        return {wire::Status::timeout, CUDA_SUCCESS, static_cast<uint64_t>(straggler.tid), text};
    }
    case CloseResult::refused:
        capture_let_go();
        return {wire::Status::unsupported, CUDA_SUCCESS, 0, "the kernel refuses membarrier to this process"};
    }
    // With the gate closed the end cannot begin any more: its handler goes through the gate.
    if (is_ending()) {
        resume();
        return {wire::Status::unsupported, CUDA_ERROR_DEINITIALIZED, 0, "the process is ending"};
    }
    for (const Context *context : live_contexts()) {
        Outcome outcome = spent::timed(spent::What::idle, [&] { return wait_for_context(*context, deadline); });
        if (!outcome.ok()) {
            resume();
            return outcome;
        }
    }
    return {};
}

namespace {

// Whether the process is idle at this moment, with the gate closed: CUDA_SUCCESS or CUDA_ERROR_NOT_READY, else the
// context whose streams failed.
CUresult look_once(Held *held, Context **failed) {
    const GateLook look = gate_look();
    held->waiting = look.waiting;
    if (look.inside != 0)
        return CUDA_ERROR_NOT_READY;
    for (Context *context : live_contexts()) {
        const CUresult result = look_at_context(*context);
        if (result == CUDA_SUCCESS)
            continue;
        *failed = result == CUDA_ERROR_NOT_READY ? nullptr : context;
        return result;
    }
    return CUDA_SUCCESS;
}

// Looks until the process is idle or the deadline has come.
Outcome look_until(Deadline deadline, Held *held) {
    for (;;) {
        Context *failed = nullptr;
        const CUresult result = look_once(held, &failed);
        if (failed != nullptr) {
            resume();
            return work_outcome(result, *failed, "the streams");
        }
        held->idle = result == CUDA_SUCCESS;
        if (held->idle || std::chrono::steady_clock::now() >= deadline)
            return {};
        const timespec pause{0, kFirstPauseNs};
        nanosleep(&pause, nullptr);
    }
}

} // namespace

Outcome hold(std::chrono::milliseconds look, uint32_t admit, Held *held) {
    const auto now = [] { return std::chrono::steady_clock::now(); };
    std::string why;
    if (!gate_is_shut()) {
        if (!capture_hold(now() + look, &why)) {
            held->capturing = true;
            return {};
        }
        if (!gate_shut()) {
            capture_let_go();
            return {wire::Status::unsupported, CUDA_SUCCESS, 0, "the kernel refuses membarrier to this process"};
        }
    }
    if (is_ending()) {
        resume();
        return {wire::Status::unsupported, CUDA_ERROR_DEINITIALIZED, 0, "the process is ending"};
    }
    const auto end = now() + kLongestRound;
    const uint32_t burst = std::clamp(admit / kBurstsInRound, 1U, kLongestBurst);
    for (uint32_t left = admit; left > 0;) {
        const uint32_t submitted = gate_admit(std::min(burst, left), now() + look);
        held->submitted += submitted;
        left -= std::min(submitted, left);
        if (left == 0 || submitted == 0 || now() >= end)
            break;
        if (Outcome outcome = look_until(now() + look, held); !outcome.ok() || !held->idle)
            return outcome;
    }
    return look_until(now() + look, held);
}

void resume() {
    gate_open();
    capture_let_go();
}

} // namespace woodfrog::interpose
