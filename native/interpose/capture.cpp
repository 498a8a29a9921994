// Following stream captures; see capture.hpp.
#include "capture.hpp"

#include "allocate.hpp"
#include "memory.hpp"

#include <algorithm>
#include <cstdio>
#include <mutex>
#include <sys/syscall.h>
#include <unistd.h>
#include <vector>

namespace woodfrog::interpose {

namespace detail {
constinit std::atomic<uint32_t> g_active_captures{0};
}

namespace {

struct Capture {
    CUstream stream;
    CUcontext context;
    CUstreamCaptureMode mode;
    int32_t tid;
};

struct Captures {
    std::mutex mutex;
    std::vector<Capture> active;
    uint32_t beginning = 0; // begin calls inside the driver
    std::atomic<uint32_t> held{0};
    std::atomic<uint32_t> changes{0}; // a quiesce sleeps on it
};

Captures &captures() {
    static Captures *const instance = new Captures;
    return *instance;
}

int32_t this_tid() {
    return static_cast<int32_t>(syscall(SYS_gettid));
}

// With the lock held.
void publish() {
    detail::g_active_captures.store(static_cast<uint32_t>(captures().active.size()), std::memory_order_release);
    captures().changes.fetch_add(1, std::memory_order_acq_rel);
}

// Waits while a quiesce holds new captures back. A thread with a capture of its own goes on: the quiesce waits for it.
void wait_to_begin() {
    Captures &all = captures();
    const int32_t tid = this_tid();
    const bool passes = detail::t_record != nullptr && detail::t_record->passes.load(std::memory_order_relaxed) != 0;
    for (;;) {
        {
            std::lock_guard lock(all.mutex);
            const bool own = std::any_of(all.active.begin(), all.active.end(),
                                         [&](const Capture &capture) { return capture.tid == tid; });
            if (all.held.load(std::memory_order_relaxed) == 0 || own || passes) {
                ++all.beginning;
                return;
            }
        }
        futex_wait(&all.held, 1, nullptr);
    }
}

void begun(CUstream stream, CUstreamCaptureMode mode, bool success) {
    CUcontext context = nullptr;
    if (success && WF_REAL(cuCtxGetCurrent)(&context) != CUDA_SUCCESS)
        context = nullptr;
    Captures &all = captures();
    {
        std::lock_guard lock(all.mutex);
        --all.beginning;
        if (success)
            all.active.push_back({stream, context, mode, this_tid()});
        publish();
    }
    futex_wake_all(&all.changes);
}

template <typename Predicate> void ended(Predicate gone) {
    Captures &all = captures();
    bool last = false;
    {
        std::lock_guard lock(all.mutex);
        if (std::erase_if(all.active, gone) == 0)
            return;
        publish();
        last = all.active.empty();
    }
    futex_wake_all(&all.changes);
    if (last)
        free_what_was_put_off();
}

template <typename Begin>
CUresult begin_capture(Symbol symbol, CUstream stream, CUstreamCaptureMode mode, Begin begin) {
    if (driver_only()) {
        GateScope scope(symbol);
        return begin();
    }
    wait_to_begin(); // outside the gate: a quiesce must not wait for a thread that waits for it
    GateScope scope(symbol);
    const CUresult result = begin();
    begun(stream, mode, result == CUDA_SUCCESS);
    return result;
}

bool is_capture_of(const Capture &capture, CUstream stream) {
    // The default streams have one handle for all threads.
    return capture.stream == stream && (stream > CU_STREAM_PER_THREAD || capture.tid == this_tid());
}

template <typename End> CUresult end_capture(Symbol symbol, CUstream stream, End end) {
    GateScope scope(symbol);
    const CUresult result = end();
    if (driver_only())
        return result;
    // A capture that was invalidated ends with an error, but it ends. A call from the wrong thread does not end it.
    CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
    if (result == CUDA_SUCCESS ||
        (WF_REAL(cuStreamIsCapturing)(stream, &status) == CUDA_SUCCESS && status == CU_STREAM_CAPTURE_STATUS_NONE))
        ended([&](const Capture &capture) { return is_capture_of(capture, stream); });
    return result;
}

std::vector<CUstream> &streams_of(Context &context, bool free) {
    return free ? context.free_streams : context.blocking_streams;
}

void remember_stream(CUstream stream, unsigned flags) {
    if (driver_only())
        return;
    if (Context *context = current_context(); context != nullptr) {
        std::lock_guard lock(memory().mutex);
        streams_of(*context, (flags & CU_STREAM_NON_BLOCKING) != 0).push_back(stream);
    }
}

// The stream is forgotten first: once the driver has destroyed it, its handle may be another thread's new stream.
template <typename Destroy> CUresult destroy_stream(CUstream stream, Destroy destroy) {
    if (driver_only())
        return destroy();
    Context *owner = nullptr;
    bool free = false;
    {
        std::lock_guard lock(memory().mutex);
        for (const auto &[handle, context] : memory().contexts)
            for (const bool kind : {false, true})
                if (std::erase(streams_of(*context, kind), stream) != 0) {
                    owner = context.get();
                    free = kind;
                }
    }
    const CUresult result = destroy();
    if (result == CUDA_SUCCESS) {
        ended([&](const Capture &capture) { return capture.stream == stream; });
    } else if (owner != nullptr) {
        std::lock_guard lock(memory().mutex);
        streams_of(*owner, free).push_back(stream);
    }
    return result;
}

} // namespace

CUresult capture_refusal() {
    CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
    if (WF_REAL(cuThreadExchangeStreamCaptureMode)(&mode) != CUDA_SUCCESS)
        return CUDA_SUCCESS;
    const CUstreamCaptureMode thread_mode = mode;
    WF_REAL(cuThreadExchangeStreamCaptureMode)(&mode);
    if (thread_mode == CU_STREAM_CAPTURE_MODE_RELAXED)
        return CUDA_SUCCESS;
    bool refused = false;
    {
        const int32_t tid = this_tid();
        std::lock_guard lock(captures().mutex);
        for (const Capture &capture : captures().active) {
            const bool own = capture.tid == tid && capture.mode != CU_STREAM_CAPTURE_MODE_RELAXED;
            const bool other =
                thread_mode == CU_STREAM_CAPTURE_MODE_GLOBAL && capture.mode == CU_STREAM_CAPTURE_MODE_GLOBAL;
            refused = refused || own || other;
        }
    }
    if (!refused)
        return CUDA_SUCCESS;
    CUdeviceptr probe = 0;
    const CUresult result = WF_REAL(cuMemAlloc_v2)(&probe, kSmallAlignment);
    if (result == CUDA_SUCCESS)
        WF_REAL(cuMemFree_v2)(probe); // the driver saw no harm
    return result;
}

RelaxedScope::RelaxedScope(bool needed) {
    if (!needed)
        return;
    previous_ = CU_STREAM_CAPTURE_MODE_RELAXED;
    exchanged_ = WF_REAL(cuThreadExchangeStreamCaptureMode)(&previous_) == CUDA_SUCCESS;
}

RelaxedScope::~RelaxedScope() {
    if (exchanged_)
        WF_REAL(cuThreadExchangeStreamCaptureMode)(&previous_);
}

bool capture_hold(Deadline deadline, std::string *why) {
    Captures &all = captures();
    {
        std::lock_guard lock(all.mutex);
        all.held.store(1, std::memory_order_release);
    }
    for (;;) {
        const uint32_t seen = all.changes.load(std::memory_order_acquire);
        {
            std::lock_guard lock(all.mutex);
            if (all.active.empty() && all.beginning == 0)
                return true;
            if (std::chrono::steady_clock::now() >= deadline) {
                char text[128];
                if (all.active.empty())
                    snprintf(text, sizeof(text), "a stream capture is just beginning");
                else
                    snprintf(text, sizeof(text), "a stream capture is active (begun by thread %d)",
                             all.active.front().tid);
                *why = text;
                break;
            }
        }
        futex_wait(&all.changes, seen, &deadline);
    }
    capture_let_go();
    return false;
}

void capture_let_go() {
    captures().held.store(0, std::memory_order_release);
    futex_wake_all(&captures().held);
}

void capture_context_gone(CUcontext context) {
    if (capture_active())
        ended([&](const Capture &capture) { return capture.context == context; });
}

} // namespace woodfrog::interpose

using namespace woodfrog::interpose;

#define WF_BEGIN(name) begin_capture(Symbol::name, hStream, mode, [&] { return WF_REAL(name)(hStream, mode); })
#define WF_END(name) end_capture(Symbol::name, hStream, [&] { return WF_REAL(name)(hStream, phGraph); })

// The first version has no mode; the driver treats it as global.
WF_HOOK(cuStreamBeginCapture, CUstream hStream) {
    return begin_capture(Symbol::cuStreamBeginCapture, hStream, CU_STREAM_CAPTURE_MODE_GLOBAL,
                         [&] { return WF_REAL(cuStreamBeginCapture)(hStream); });
}
WF_HOOK(cuStreamBeginCapture_ptsz, CUstream hStream) {
    return begin_capture(Symbol::cuStreamBeginCapture_ptsz, hStream, CU_STREAM_CAPTURE_MODE_GLOBAL,
                         [&] { return WF_REAL(cuStreamBeginCapture_ptsz)(hStream); });
}
WF_HOOK(cuStreamBeginCapture_v2, CUstream hStream, CUstreamCaptureMode mode) {
    return WF_BEGIN(cuStreamBeginCapture_v2);
}
WF_HOOK(cuStreamBeginCapture_v2_ptsz, CUstream hStream, CUstreamCaptureMode mode) {
    return WF_BEGIN(cuStreamBeginCapture_v2_ptsz);
}
#if CUDA_VERSION >= 12030
#define WF_BEGIN_TO_GRAPH(name)                                                                                        \
    begin_capture(Symbol::name, hStream, mode,                                                                         \
                  [&] { return WF_REAL(name)(hStream, hGraph, dependencies, dependencyData, numDependencies, mode); })
WF_HOOK(cuStreamBeginCaptureToGraph, CUstream hStream, CUgraph hGraph, const CUgraphNode *dependencies,
        const CUgraphEdgeData *dependencyData, size_t numDependencies, CUstreamCaptureMode mode) {
    return WF_BEGIN_TO_GRAPH(cuStreamBeginCaptureToGraph);
}
WF_HOOK(cuStreamBeginCaptureToGraph_ptsz, CUstream hStream, CUgraph hGraph, const CUgraphNode *dependencies,
        const CUgraphEdgeData *dependencyData, size_t numDependencies, CUstreamCaptureMode mode) {
    return WF_BEGIN_TO_GRAPH(cuStreamBeginCaptureToGraph_ptsz);
}
#endif
WF_HOOK(cuStreamEndCapture, CUstream hStream, CUgraph *phGraph) {
    return WF_END(cuStreamEndCapture);
}
WF_HOOK(cuStreamEndCapture_ptsz, CUstream hStream, CUgraph *phGraph) {
    return WF_END(cuStreamEndCapture_ptsz);
}

WF_HOOK(cuStreamCreate, CUstream *phStream, unsigned int Flags) {
    GateScope scope(Symbol::cuStreamCreate);
    const CUresult result = WF_REAL(cuStreamCreate)(phStream, Flags);
    if (result == CUDA_SUCCESS)
        remember_stream(*phStream, Flags);
    return result;
}
WF_HOOK(cuStreamCreateWithPriority, CUstream *phStream, unsigned int flags, int priority) {
    GateScope scope(Symbol::cuStreamCreateWithPriority);
    const CUresult result = WF_REAL(cuStreamCreateWithPriority)(phStream, flags, priority);
    if (result == CUDA_SUCCESS)
        remember_stream(*phStream, flags);
    return result;
}
WF_HOOK(cuStreamDestroy, CUstream hStream) {
    GateScope scope(Symbol::cuStreamDestroy);
    return destroy_stream(hStream, [&] { return WF_REAL(cuStreamDestroy)(hStream); });
}
WF_HOOK(cuStreamDestroy_v2, CUstream hStream) {
    GateScope scope(Symbol::cuStreamDestroy_v2);
    return destroy_stream(hStream, [&] { return WF_REAL(cuStreamDestroy_v2)(hStream); });
}
#if CUDA_VERSION >= 12040
WF_HOOK(cuGreenCtxStreamCreate, CUstream *phStream, CUgreenCtx greenCtx, unsigned int flags, int priority) {
    GateScope scope(Symbol::cuGreenCtxStreamCreate);
    const CUresult result = WF_REAL(cuGreenCtxStreamCreate)(phStream, greenCtx, flags, priority);
    if (result == CUDA_SUCCESS)
        remember_stream(*phStream, flags);
    return result;
}
#endif
