// The forms in which copies are asked for, turned into the three-dimensional one. See copy_api.hpp.
#include "copy_api.hpp"

namespace simgpu {

CUresult api_copy(const CUDA_MEMCPY3D &description, CUstream stream, Waiting waiting) {
    return call_in_context([&](Context &) { submit_copy(description, stream, waiting); });
}

CUresult api_copy_2d(const CUDA_MEMCPY2D *d, CUstream stream, Waiting waiting) {
    return call_in_context([&](Context &) {
        require(d != nullptr);
        CUDA_MEMCPY3D full{};
        full.srcXInBytes = d->srcXInBytes;
        full.srcY = d->srcY;
        full.srcMemoryType = d->srcMemoryType;
        full.srcHost = d->srcHost;
        full.srcDevice = d->srcDevice;
        full.srcPitch = d->srcPitch;
        full.dstXInBytes = d->dstXInBytes;
        full.dstY = d->dstY;
        full.dstMemoryType = d->dstMemoryType;
        full.dstHost = d->dstHost;
        full.dstDevice = d->dstDevice;
        full.dstPitch = d->dstPitch;
        full.WidthInBytes = d->WidthInBytes;
        full.Height = d->Height;
        full.Depth = 1;
        submit_copy(full, stream, waiting);
    });
}

CUresult api_copy_3d(const CUDA_MEMCPY3D *description, CUstream stream, Waiting waiting) {
    return call_in_context([&](Context &) {
        require(description != nullptr && description->srcLOD == 0 && description->dstLOD == 0);
        submit_copy(*description, stream, waiting);
    });
}

CUresult api_copy_peer(const CUDA_MEMCPY3D_PEER *d, CUstream stream, Waiting waiting) {
    return call_in_context([&](Context &) {
        require(d != nullptr && d->srcLOD == 0 && d->dstLOD == 0);
        CUDA_MEMCPY3D full{};
        full.srcXInBytes = d->srcXInBytes;
        full.srcY = d->srcY;
        full.srcZ = d->srcZ;
        full.srcMemoryType = d->srcMemoryType;
        full.srcHost = d->srcHost;
        full.srcDevice = d->srcDevice;
        full.srcPitch = d->srcPitch;
        full.srcHeight = d->srcHeight;
        full.dstXInBytes = d->dstXInBytes;
        full.dstY = d->dstY;
        full.dstZ = d->dstZ;
        full.dstMemoryType = d->dstMemoryType;
        full.dstHost = d->dstHost;
        full.dstDevice = d->dstDevice;
        full.dstPitch = d->dstPitch;
        full.dstHeight = d->dstHeight;
        full.WidthInBytes = d->WidthInBytes;
        full.Height = d->Height;
        full.Depth = d->Depth;
        submit_copy(full, stream, waiting);
    });
}

CUresult api_memset(CUdeviceptr to, size_t pitch, unsigned element, unsigned value, size_t width, size_t height,
                    CUstream stream, Waiting waiting) {
    return call_in_context([&](Context &) {
        CUDA_MEMSET_NODE_PARAMS parameters{};
        parameters.dst = to;
        parameters.pitch = pitch;
        parameters.elementSize = element;
        parameters.value = value;
        parameters.width = width;
        parameters.height = height;
        submit_memset(parameters, stream, waiting);
    });
}

} // namespace simgpu
