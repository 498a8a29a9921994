// Events between processes (cuIpcGetEventHandle, cuIpcOpenEventHandle): the driver's checkpoint does not keep them, so
// the driver never makes one.
//
// What such an event promises is that whoever waits for it sees the work before its last record. Here that work is over
// when the record returns: recording an event that has a handle, or came from one, waits for it. So a wait in another
// process, for an event of its own that nothing has recorded, is right as it is. PyTorch records an event once and then
// asks for its handle; the rare program that records again pays with a wait.
#include "debug.hpp"
#include "gate.hpp"
#include "memory.hpp"

#include <cstring>

namespace woodfrog::interpose {
namespace {

constexpr uint64_t kMagic = 0x3145504947524657ULL; // "WFRGIPE1"

struct Events {
    std::mutex mutex;
    std::set<CUevent> capable;    // made with CU_EVENT_INTERPROCESS
    std::set<CUevent> between;    // of these, those that have a handle, and those that came from one
    std::atomic<bool> any{false}; // in `between`: nothing is looked up before
};

Events &events() {
    static Events *const instance = new Events;
    return *instance;
}

bool is_between(CUevent event) {
    if (!events().any.load(std::memory_order_acquire))
        return false;
    std::lock_guard lock(events().mutex);
    return events().between.count(event) != 0;
}

void forget(CUevent event) {
    std::lock_guard lock(events().mutex);
    events().capable.erase(event);
    events().between.erase(event);
}

CUresult make_handle(CUipcEventHandle *out, CUevent event, bool *ours) {
    {
        std::lock_guard lock(events().mutex);
        *ours = events().capable.count(event) != 0;
        if (!*ours)
            return CUDA_SUCCESS;
        events().between.insert(event);
        events().any.store(true, std::memory_order_release);
    }
    if (out == nullptr)
        return CUDA_ERROR_INVALID_VALUE;
    // What was recorded before is over before anybody can have the handle.
    if (const CUresult result = WF_REAL(cuEventSynchronize)(event); result != CUDA_SUCCESS)
        return result;
    memset(out, 0, sizeof(*out));
    memcpy(out, &kMagic, sizeof(kMagic));
    return CUDA_SUCCESS;
}

// After a record that succeeded. Not while the stream is being captured: then nothing was recorded yet.
CUresult finish_record(CUevent event, CUstream stream, bool per_thread) {
    if (driver_only() || !is_between(event))
        return CUDA_SUCCESS;
    CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
    const CUresult asked =
        per_thread ? WF_REAL(cuStreamIsCapturing_ptsz)(stream, &status) : WF_REAL(cuStreamIsCapturing)(stream, &status);
    if (asked == CUDA_SUCCESS && status != CU_STREAM_CAPTURE_STATUS_NONE) {
        debug("an event between processes is recorded in a capture: its waits in other processes see nothing of it");
        return CUDA_SUCCESS;
    }
    return WF_REAL(cuEventSynchronize)(event);
}

template <typename Record> CUresult record(CUevent event, CUstream stream, bool per_thread, Record real) {
    const CUresult result = real();
    return result == CUDA_SUCCESS ? finish_record(event, stream, per_thread) : result;
}

} // namespace
} // namespace woodfrog::interpose

using namespace woodfrog::interpose;

WF_HOOK(cuEventCreate, CUevent *phEvent, unsigned int Flags) {
    GateScope scope(Symbol::cuEventCreate);
    // The driver judges the flags (such an event must be without timing), and then makes an ordinary one.
    if ((Flags & CU_EVENT_INTERPROCESS) == 0 || (Flags & CU_EVENT_DISABLE_TIMING) == 0 || driver_only())
        return WF_REAL(cuEventCreate)(phEvent, Flags);
    const CUresult result = WF_REAL(cuEventCreate)(phEvent, Flags & ~static_cast<unsigned>(CU_EVENT_INTERPROCESS));
    if (result == CUDA_SUCCESS) {
        std::lock_guard lock(events().mutex);
        events().capable.insert(*phEvent);
    }
    return result;
}

WF_HOOK(cuEventDestroy, CUevent hEvent) {
    GateScope scope(Symbol::cuEventDestroy);
    forget(hEvent);
    return WF_REAL(cuEventDestroy)(hEvent);
}

WF_HOOK(cuEventDestroy_v2, CUevent hEvent) {
    GateScope scope(Symbol::cuEventDestroy_v2);
    forget(hEvent);
    return WF_REAL(cuEventDestroy_v2)(hEvent);
}

WF_HOOK(cuEventRecord, CUevent hEvent, CUstream hStream) {
    GateScope scope(Symbol::cuEventRecord);
    return record(hEvent, hStream, false, [&] { return WF_REAL(cuEventRecord)(hEvent, hStream); });
}

WF_HOOK(cuEventRecord_ptsz, CUevent hEvent, CUstream hStream) {
    GateScope scope(Symbol::cuEventRecord_ptsz);
    return record(hEvent, hStream, true, [&] { return WF_REAL(cuEventRecord_ptsz)(hEvent, hStream); });
}

WF_HOOK(cuEventRecordWithFlags, CUevent hEvent, CUstream hStream, unsigned int flags) {
    GateScope scope(Symbol::cuEventRecordWithFlags);
    return record(hEvent, hStream, false, [&] { return WF_REAL(cuEventRecordWithFlags)(hEvent, hStream, flags); });
}

WF_HOOK(cuEventRecordWithFlags_ptsz, CUevent hEvent, CUstream hStream, unsigned int flags) {
    GateScope scope(Symbol::cuEventRecordWithFlags_ptsz);
    return record(hEvent, hStream, true, [&] { return WF_REAL(cuEventRecordWithFlags_ptsz)(hEvent, hStream, flags); });
}

WF_HOOK(cuIpcGetEventHandle, CUipcEventHandle *pHandle, CUevent event) {
    GateScope scope(Symbol::cuIpcGetEventHandle);
    if (!driver_only()) {
        bool ours = false;
        const CUresult result = make_handle(pHandle, event, &ours);
        if (ours)
            return result;
    }
    return WF_REAL(cuIpcGetEventHandle)(pHandle, event);
}

WF_HOOK(cuIpcOpenEventHandle, CUevent *phEvent, CUipcEventHandle handle) {
    GateScope scope(Symbol::cuIpcOpenEventHandle);
    uint64_t magic = 0;
    memcpy(&magic, &handle, sizeof(magic));
    if (driver_only() || magic != kMagic)
        return WF_REAL(cuIpcOpenEventHandle)(phEvent, handle);
    const CUresult result = WF_REAL(cuEventCreate)(phEvent, CU_EVENT_DISABLE_TIMING);
    if (result == CUDA_SUCCESS) {
        std::lock_guard lock(events().mutex);
        events().between.insert(*phEvent);
        events().any.store(true, std::memory_order_release);
    }
    return result;
}
