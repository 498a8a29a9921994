// Contexts: primary, created, current; their limits and flags.
#include <cuda.h>

#include "api.hpp"
#include "capture.hpp"
#include "device.hpp"
#include "event.hpp"
#include "submit.hpp"

using namespace simgpu;

namespace {

constexpr unsigned kKnownFlags = CU_CTX_FLAGS_MASK;

void create_context(CUcontext *result, unsigned flags, CUdevice device) {
    require(result != nullptr && (flags & ~kKnownFlags) == 0);
    device_at(device);
    auto context = std::make_shared<Context>(device, false, flags);
    contexts().add(context);
    context_stack().push_back(context);
    *result = context->handle();
}

void reset_primary(CUdevice device) {
    std::shared_ptr<Context> context;
    {
        std::lock_guard lock(primary_mutex());
        context = primary_of(device).context;
    }
    if (!context || !context->alive.load())
        return;
    context->tear_down();
    context->failure.store(CUDA_SUCCESS);
}

std::shared_ptr<Context> context_argument(CUcontext handle) {
    if (handle == nullptr)
        return require_context();
    return contexts().get(handle, CUDA_ERROR_INVALID_CONTEXT);
}

} // namespace

extern "C" {

CUresult CUDAAPI cuDevicePrimaryCtxRetain(CUcontext *result, CUdevice device) {
    return call([&] {
        require(result != nullptr);
        device_at(device);
        std::lock_guard lock(primary_mutex());
        PrimaryContext &primary = primary_of(device);
        if (!primary.context) {
            primary.context = std::make_shared<Context>(device, true, primary.flags);
            contexts().add(primary.context);
        }
        primary.context->alive.store(true);
        primary.context->flags = primary.flags;
        ++primary.retained;
        *result = primary.context->handle();
    });
}

CUresult CUDAAPI cuDevicePrimaryCtxRelease(CUdevice device) {
    return call([&] {
        device_at(device);
        bool last = false;
        {
            std::lock_guard lock(primary_mutex());
            PrimaryContext &primary = primary_of(device);
            require(primary.retained > 0, CUDA_ERROR_INVALID_CONTEXT);
            last = --primary.retained == 0;
        }
        if (last)
            reset_primary(device);
    });
}

CUresult CUDAAPI cuDevicePrimaryCtxReset(CUdevice device) {
    return call([&] {
        device_at(device);
        reset_primary(device);
        std::lock_guard lock(primary_mutex());
        PrimaryContext &primary = primary_of(device);
        if (primary.context && primary.retained > 0)
            primary.context->alive.store(true);
    });
}

CUresult CUDAAPI cuDevicePrimaryCtxSetFlags(CUdevice device, unsigned int flags) {
    return call([&] {
        device_at(device);
        require((flags & ~kKnownFlags) == 0);
        std::lock_guard lock(primary_mutex());
        primary_of(device).flags = flags;
        if (primary_of(device).context)
            primary_of(device).context->flags = flags;
    });
}

CUresult CUDAAPI cuDevicePrimaryCtxGetState(CUdevice device, unsigned int *flags, int *active) {
    return call([&] {
        require(flags != nullptr && active != nullptr);
        device_at(device);
        std::lock_guard lock(primary_mutex());
        const PrimaryContext &primary = primary_of(device);
        *flags = primary.flags;
        *active = primary.context && primary.context->alive.load() ? 1 : 0;
    });
}

CUresult CUDAAPI cuCtxCreate_v4(CUcontext *result, CUctxCreateParams *parameters, unsigned flags, CUdevice device) {
    return call([&] {
        require(parameters == nullptr || parameters->numExecAffinityParams == 0, CUDA_ERROR_NOT_SUPPORTED);
        create_context(result, flags, device);
    });
}

// Declared by no header of CUDA 13, but exported by its driver for programs built with older ones.
CUresult CUDAAPI cuCtxCreate_v3(CUcontext *result, CUexecAffinityParam *, int count, unsigned flags, CUdevice device) {
    return call([&] {
        require(count == 0, CUDA_ERROR_NOT_SUPPORTED);
        create_context(result, flags, device);
    });
}

CUresult CUDAAPI cuCtxCreate_v2(CUcontext *result, unsigned flags, CUdevice device) {
    return call([&] { create_context(result, flags, device); });
}

CUresult CUDAAPI cuCtxDestroy(CUcontext handle) {
    return call([&] {
        auto context = contexts().get(handle, CUDA_ERROR_INVALID_CONTEXT);
        require(!context->primary, CUDA_ERROR_INVALID_CONTEXT);
        contexts().remove(handle);
        auto &stack = context_stack();
        if (!stack.empty() && stack.back() == context)
            stack.pop_back();
        context->tear_down();
    });
}

CUresult CUDAAPI cuCtxPushCurrent(CUcontext handle) {
    return call([&] { context_stack().push_back(contexts().get(handle, CUDA_ERROR_INVALID_CONTEXT)); });
}

CUresult CUDAAPI cuCtxPopCurrent(CUcontext *result) {
    return call([&] {
        auto &stack = context_stack();
        require(!stack.empty() && stack.back(), CUDA_ERROR_INVALID_CONTEXT);
        put(result, stack.back()->handle());
        stack.pop_back();
    });
}

CUresult CUDAAPI cuCtxSetCurrent(CUcontext handle) {
    return call([&] {
        auto &stack = context_stack();
        auto context = handle == nullptr ? nullptr : contexts().get(handle, CUDA_ERROR_INVALID_CONTEXT);
        if (!stack.empty())
            stack.pop_back();
        if (context)
            stack.push_back(context);
    });
}

CUresult CUDAAPI cuCtxGetCurrent(CUcontext *result) {
    return call([&] {
        require(result != nullptr);
        auto context = current_context();
        *result = context ? context->handle() : nullptr;
    });
}

CUresult CUDAAPI cuCtxGetDevice(CUdevice *device) {
    return call([&] {
        require(device != nullptr);
        *device = require_context()->device;
    });
}

CUresult CUDAAPI cuCtxGetDevice_v2(CUdevice *device, CUcontext handle) {
    return call([&] {
        require(device != nullptr);
        *device = context_argument(handle)->device;
    });
}

CUresult CUDAAPI cuCtxGetFlags(unsigned int *flags) {
    return call([&] {
        require(flags != nullptr);
        *flags = require_context()->flags;
    });
}

CUresult CUDAAPI cuCtxSetFlags(unsigned int flags) {
    return call([&] {
        require((flags & ~kKnownFlags) == 0);
        require_context()->flags = flags;
    });
}

CUresult CUDAAPI cuCtxGetId(CUcontext handle, unsigned long long *id) {
    return call([&] {
        require(id != nullptr);
        *id = context_argument(handle)->id;
    });
}

CUresult CUDAAPI cuCtxSynchronize() {
    return call_in_context([](Context &context) {
        forbid_during_capture();
        context.synchronize();
        require(context.failure.load() == CUDA_SUCCESS, context.failure.load());
    });
}

CUresult CUDAAPI cuCtxSynchronize_v2(CUcontext handle) {
    return call([&] {
        auto context = context_argument(handle);
        require(context->failure.load() == CUDA_SUCCESS, context->failure.load());
        forbid_during_capture();
        context->synchronize();
        require(context->failure.load() == CUDA_SUCCESS, context->failure.load());
    });
}

CUresult CUDAAPI cuCtxSetLimit(CUlimit limit, size_t value) {
    return call_in_context([&](Context &context) {
        std::lock_guard lock(context.limits_mutex);
        require(context.limits.contains(limit), CUDA_ERROR_UNSUPPORTED_LIMIT);
        context.limits[limit] = value;
    });
}

CUresult CUDAAPI cuCtxGetLimit(size_t *value, CUlimit limit) {
    return call_in_context([&](Context &context) {
        require(value != nullptr);
        std::lock_guard lock(context.limits_mutex);
        require(context.limits.contains(limit), CUDA_ERROR_UNSUPPORTED_LIMIT);
        *value = context.limits[limit];
    });
}

CUresult CUDAAPI cuCtxGetCacheConfig(CUfunc_cache *config) {
    return call_in_context([&](Context &context) {
        require(config != nullptr);
        *config = context.cache_config;
    });
}

CUresult CUDAAPI cuCtxSetCacheConfig(CUfunc_cache config) {
    return call_in_context([&](Context &context) { context.cache_config = config; });
}

CUresult CUDAAPI cuCtxGetApiVersion(CUcontext handle, unsigned int *version) {
    return call([&] {
        require(version != nullptr);
        context_argument(handle);
        *version = 3020; // what every driver since 3.2 answers for a context of the _v2 interface
    });
}

CUresult CUDAAPI cuCtxGetStreamPriorityRange(int *least, int *greatest) {
    return call_in_context([&](Context &) {
        put(least, 0);
        put(greatest, -5); // as on compute capability 9.0; priorities change nothing here
    });
}

CUresult CUDAAPI cuCtxResetPersistingL2Cache() {
    return call_in_context([](Context &) {});
}

CUresult CUDAAPI cuCtxGetExecAffinity(CUexecAffinityParam *, CUexecAffinityType) {
    return CUDA_ERROR_UNSUPPORTED_EXEC_AFFINITY;
}

CUresult CUDAAPI cuCtxEnablePeerAccess(CUcontext peer, unsigned int flags) {
    return call_in_context([&](Context &context) {
        require(flags == 0);
        auto other = contexts().get(peer, CUDA_ERROR_INVALID_CONTEXT);
        require(other->device != context.device, CUDA_ERROR_INVALID_DEVICE);
        std::lock_guard lock(context.limits_mutex);
        require(context.peers.insert(other->id).second, CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED);
    });
}

CUresult CUDAAPI cuCtxDisablePeerAccess(CUcontext peer) {
    return call_in_context([&](Context &context) {
        auto other = contexts().get(peer, CUDA_ERROR_INVALID_CONTEXT);
        std::lock_guard lock(context.limits_mutex);
        require(context.peers.erase(other->id) == 1, CUDA_ERROR_PEER_ACCESS_NOT_ENABLED);
    });
}

CUresult CUDAAPI cuCtxRecordEvent(CUcontext, CUevent) {
    return CUDA_ERROR_NOT_SUPPORTED;
}
CUresult CUDAAPI cuCtxWaitEvent(CUcontext, CUevent) {
    return CUDA_ERROR_NOT_SUPPORTED;
}

} // extern "C"
