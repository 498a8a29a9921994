// Streams: creation, properties, waiting, callbacks, memory operations.
#include <cuda.h>

#include "address_space.hpp"
#include "api.hpp"
#include "capture.hpp"
#include "process.hpp"
#include "stream_api.hpp"
#include "submit.hpp"

namespace simgpu {
namespace {

void create_stream(CUstream *result, unsigned flags, int priority) {
    auto context = require_context();
    require(result != nullptr && (flags & ~static_cast<unsigned>(CU_STREAM_NON_BLOCKING)) == 0);
    auto stream = std::make_shared<Stream>(context, Stream::Kind::kCreated, flags, std::clamp(priority, -5, 0));
    context->add_stream(stream);
    *result = reinterpret_cast<CUstream>(stream_table().add(stream));
}

bool wide(CUstreamBatchMemOpType type) {
    return type == CU_STREAM_MEM_OP_WAIT_VALUE_64 || type == CU_STREAM_MEM_OP_WRITE_VALUE_64;
}

} // namespace

CUresult api_memory_operations(CUstream handle, unsigned count, const CUstreamBatchMemOpParams *list) {
    return call_in_context([&](Context &context) {
        require(list != nullptr && count > 0 && count <= 256); // 256 is the documented maximum
        auto stream = resolve_stream(handle);
        auto spans = AddressSpace::instance().spans();
        for (unsigned i = 0; i < count; ++i) {
            auto type = list[i].operation;
            if (type == CU_STREAM_MEM_OP_FLUSH_REMOTE_WRITES || type == CU_STREAM_MEM_OP_BARRIER)
                continue;
            size_t size = wide(type) ? 8 : 4;
            CUdeviceptr address = list[i].writeValue.address; // at the same place in the wait
            bool writes = type == CU_STREAM_MEM_OP_WRITE_VALUE_32 || type == CU_STREAM_MEM_OP_WRITE_VALUE_64;
            require(address % size == 0 && accessible(*spans, address, size, context.device, writes));
        }
        submit(*stream, std::make_shared<MemoryOperationWork>(std::vector(list, list + count)));
    });
}

CUresult api_wait_value(CUstream stream, CUdeviceptr address, cuuint64_t value, unsigned flags, bool is_wide) {
    CUstreamBatchMemOpParams operation{};
    operation.waitValue.operation = is_wide ? CU_STREAM_MEM_OP_WAIT_VALUE_64 : CU_STREAM_MEM_OP_WAIT_VALUE_32;
    operation.waitValue.address = address;
    operation.waitValue.value64 = value;
    operation.waitValue.flags = flags;
    return api_memory_operations(stream, 1, &operation);
}

CUresult api_write_value(CUstream stream, CUdeviceptr address, cuuint64_t value, unsigned flags, bool is_wide) {
    CUstreamBatchMemOpParams operation{};
    operation.writeValue.operation = is_wide ? CU_STREAM_MEM_OP_WRITE_VALUE_64 : CU_STREAM_MEM_OP_WRITE_VALUE_32;
    operation.writeValue.address = address;
    operation.writeValue.value64 = value;
    operation.writeValue.flags = flags;
    return api_memory_operations(stream, 1, &operation);
}

} // namespace simgpu

using namespace simgpu;

extern "C" {

CUresult CUDAAPI cuStreamCreate(CUstream *result, unsigned int flags) {
    return call_in_context([&](Context &) { create_stream(result, flags, 0); });
}

CUresult CUDAAPI cuStreamCreateWithPriority(CUstream *result, unsigned int flags, int priority) {
    return call_in_context([&](Context &) { create_stream(result, flags, priority); });
}

CUresult CUDAAPI cuStreamDestroy(CUstream handle) {
    return call([&] {
        auto stream = stream_table().get(handle);
        if (capture_status(*stream) != CU_STREAM_CAPTURE_STATUS_NONE)
            forbid_on_capturing(*stream);
        stream_table().remove(handle);
        stream->retire(); // what was submitted is still done
    });
}

CUresult CUDAAPI cuStreamGetPriority(CUstream handle, int *priority) {
    return call([&] {
        require(priority != nullptr);
        *priority = resolve_stream(handle)->priority();
    });
}

CUresult CUDAAPI cuStreamGetFlags(CUstream handle, unsigned int *flags) {
    return call([&] {
        require(flags != nullptr);
        *flags = resolve_stream(handle)->flags();
    });
}

CUresult CUDAAPI cuStreamGetId(CUstream handle, unsigned long long *id) {
    return call([&] {
        require(id != nullptr);
        *id = resolve_stream(handle)->id();
    });
}

CUresult CUDAAPI cuStreamGetDevice(CUstream handle, CUdevice *device) {
    return call([&] {
        require(device != nullptr);
        *device = resolve_stream(handle)->context()->device;
    });
}

CUresult CUDAAPI cuStreamGetCtx(CUstream handle, CUcontext *context) {
    return call([&] {
        require(context != nullptr);
        *context = resolve_stream(handle)->context()->handle();
    });
}

CUresult CUDAAPI cuStreamGetCtx_v2(CUstream handle, CUcontext *context, CUgreenCtx *green) {
    return call([&] {
        require(context != nullptr);
        *context = resolve_stream(handle)->context()->handle();
        put(green, nullptr);
    });
}

CUresult CUDAAPI cuStreamWaitEvent(CUstream handle, CUevent event, unsigned int flags) {
    return call([&] {
        auto stream = resolve_stream(handle);
        wait_event(*stream, events().get(event), flags);
    });
}

CUresult CUDAAPI cuStreamSynchronize(CUstream handle) {
    return call([&] {
        auto stream = resolve_stream(handle);
        forbid_on_capturing(*stream);
        auto context = stream->context();
        last_including_implicit(*stream).wait();
        require(context->failure.load() == CUDA_SUCCESS, context->failure.load());
    });
}

CUresult CUDAAPI cuStreamQuery(CUstream handle) {
    return call([&] {
        auto stream = resolve_stream(handle);
        forbid_on_capturing(*stream);
        require(last_including_implicit(*stream).done(), CUDA_ERROR_NOT_READY);
    });
}

CUresult CUDAAPI cuStreamAddCallback(CUstream handle, CUstreamCallback callback, void *data, unsigned int flags) {
    return call([&] {
        require(callback != nullptr && flags == 0);
        auto stream = resolve_stream(handle);
        forbid_on_capturing(*stream);
        submit(*stream, std::make_shared<InternalWork>([=](Context &context) {
            CallbackScope scope;
            callback(handle, context.failure.load(), data);
        }));
    });
}

CUresult CUDAAPI cuLaunchHostFunc(CUstream handle, CUhostFn function, void *data) {
    return call([&] {
        require(function != nullptr);
        CUDA_HOST_NODE_PARAMS parameters{};
        parameters.fn = function;
        parameters.userData = data;
        submit(*resolve_stream(handle), std::make_shared<HostWork>(parameters));
    });
}

CUresult CUDAAPI cuStreamWaitValue32(CUstream stream, CUdeviceptr address, cuuint32_t value, unsigned int flags) {
    return api_wait_value(stream, address, value, flags, false);
}

CUresult CUDAAPI cuStreamWaitValue64(CUstream stream, CUdeviceptr address, cuuint64_t value, unsigned int flags) {
    return api_wait_value(stream, address, value, flags, true);
}

CUresult CUDAAPI cuStreamWriteValue32(CUstream stream, CUdeviceptr address, cuuint32_t value, unsigned int flags) {
    return api_write_value(stream, address, value, flags, false);
}

CUresult CUDAAPI cuStreamWriteValue64(CUstream stream, CUdeviceptr address, cuuint64_t value, unsigned int flags) {
    return api_write_value(stream, address, value, flags, true);
}

CUresult CUDAAPI cuStreamBatchMemOp(CUstream stream, unsigned int count, CUstreamBatchMemOpParams *list,
                                    unsigned int flags) {
    if (flags != 0)
        return CUDA_ERROR_INVALID_VALUE;
    return api_memory_operations(stream, count, list);
}

CUresult CUDAAPI cuStreamAttachMemAsync(CUstream handle, CUdeviceptr, size_t, unsigned int) {
    return call([&] { resolve_stream(handle); });
}

CUresult CUDAAPI cuStreamCopyAttributes(CUstream to, CUstream from) {
    return call([&] {
        resolve_stream(to);
        resolve_stream(from);
    });
}

CUresult CUDAAPI cuStreamGetAttribute(CUstream handle, CUstreamAttrID attribute, CUstreamAttrValue *value) {
    return call([&] {
        require(value != nullptr);
        auto stream = resolve_stream(handle);
        *value = {};
        if (attribute == CU_LAUNCH_ATTRIBUTE_PRIORITY)
            value->priority = stream->priority();
        if (attribute == CU_LAUNCH_ATTRIBUTE_SYNCHRONIZATION_POLICY)
            value->syncPolicy = CU_SYNC_POLICY_AUTO;
    });
}

CUresult CUDAAPI cuStreamSetAttribute(CUstream handle, CUstreamAttrID, const CUstreamAttrValue *value) {
    return call([&] {
        require(value != nullptr);
        resolve_stream(handle);
    });
}

} // extern "C"
