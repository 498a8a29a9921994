// Host functions that the driver runs in stream order. They run on threads of the driver while a quiesce waits for that
// very work, so the gate must not stop them, whatever they call.
//
// Functions captured into a graph are left alone: they may run any number of times, and nobody tells when they are done
// with. A call that one of those makes while the gate is closed waits, and the quiesce runs into its time-out.
#include "capture.hpp"
#include "gate.hpp"
#include "memory.hpp"

#include <memory>

namespace woodfrog::interpose {
namespace {

struct HostCall {
    CUhostFn function;
    void *data;
};

struct StreamCall {
    CUstreamCallback function;
    void *data;
};

void run_host_call(void *pointer) {
    const std::unique_ptr<HostCall> call(static_cast<HostCall *>(pointer));
    const PassScope pass;
    call->function(call->data);
}

void run_stream_call(CUstream stream, CUresult status, void *pointer) {
    const std::unique_ptr<StreamCall> call(static_cast<StreamCall *>(pointer));
    const PassScope pass;
    call->function(stream, status, call->data);
}

bool captured(CUstream stream, CUresult (*is_capturing)(CUstream, CUstreamCaptureStatus *)) {
    CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
    // The first capture may be beginning on another stream, but on this one it is this thread's own doing.
    return capture_active() &&
           (is_capturing(stream, &status) != CUDA_SUCCESS || status != CU_STREAM_CAPTURE_STATUS_NONE);
}

CUresult launch_host(CUstream stream, CUhostFn function, void *data, CUresult (*real)(CUstream, CUhostFn, void *),
                     CUresult (*is_capturing)(CUstream, CUstreamCaptureStatus *)) {
    if (function == nullptr || driver_only() || captured(stream, is_capturing))
        return real(stream, function, data);
    auto call = std::make_unique<HostCall>(HostCall{function, data});
    const CUresult result = real(stream, &run_host_call, call.get());
    if (result == CUDA_SUCCESS)
        static_cast<void>(call.release()); // the call frees it
    return result;
}

CUresult add_callback(CUstream stream, CUstreamCallback function, void *data, unsigned flags,
                      CUresult (*real)(CUstream, CUstreamCallback, void *, unsigned),
                      CUresult (*is_capturing)(CUstream, CUstreamCaptureStatus *)) {
    if (function == nullptr || driver_only() || captured(stream, is_capturing))
        return real(stream, function, data, flags);
    auto call = std::make_unique<StreamCall>(StreamCall{function, data});
    const CUresult result = real(stream, &run_stream_call, call.get(), flags);
    if (result == CUDA_SUCCESS)
        static_cast<void>(call.release());
    return result;
}

} // namespace
} // namespace woodfrog::interpose

using namespace woodfrog::interpose;

WF_HOOK(cuLaunchHostFunc, CUstream hStream, CUhostFn fn, void *userData) {
    GateScope scope(Symbol::cuLaunchHostFunc);
    return launch_host(hStream, fn, userData, WF_REAL(cuLaunchHostFunc), WF_REAL(cuStreamIsCapturing));
}

WF_HOOK(cuLaunchHostFunc_ptsz, CUstream hStream, CUhostFn fn, void *userData) {
    GateScope scope(Symbol::cuLaunchHostFunc_ptsz);
    return launch_host(hStream, fn, userData, WF_REAL(cuLaunchHostFunc_ptsz), WF_REAL(cuStreamIsCapturing_ptsz));
}

WF_HOOK(cuStreamAddCallback, CUstream hStream, CUstreamCallback callback, void *userData, unsigned int flags) {
    GateScope scope(Symbol::cuStreamAddCallback);
    return add_callback(hStream, callback, userData, flags, WF_REAL(cuStreamAddCallback), WF_REAL(cuStreamIsCapturing));
}

WF_HOOK(cuStreamAddCallback_ptsz, CUstream hStream, CUstreamCallback callback, void *userData, unsigned int flags) {
    GateScope scope(Symbol::cuStreamAddCallback_ptsz);
    return add_callback(hStream, callback, userData, flags, WF_REAL(cuStreamAddCallback_ptsz),
                        WF_REAL(cuStreamIsCapturing_ptsz));
}
