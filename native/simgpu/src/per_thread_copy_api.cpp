// The _ptds and _ptsz variants of copies and memsets: the same with the per-thread default stream.
#define __CUDA_API_VERSION_INTERNAL // makes cuda.h declare every version
#include "copy_api.hpp"

using namespace simgpu;

namespace {

const CUstream kPerThread = CU_STREAM_PER_THREAD;

} // namespace

extern "C" {

CUresult CUDAAPI cuMemcpy_ptds(CUdeviceptr to, CUdeviceptr from, size_t size) {
    return api_copy(flat_copy(kUnified, to, kUnified, from, size), kPerThread, Waiting::kWaits);
}
CUresult CUDAAPI cuMemcpyPeer_ptds(CUdeviceptr to, CUcontext, CUdeviceptr from, CUcontext, size_t size) {
    return api_copy(flat_copy(kDevice, to, kDevice, from, size), kPerThread, Waiting::kWaits);
}
CUresult CUDAAPI cuMemcpyHtoD_v2_ptds(CUdeviceptr to, const void *from, size_t size) {
    return api_copy(flat_copy(kDevice, to, kHost, number(from), size), kPerThread, Waiting::kWaits);
}
CUresult CUDAAPI cuMemcpyDtoH_v2_ptds(void *to, CUdeviceptr from, size_t size) {
    return api_copy(flat_copy(kHost, number(to), kDevice, from, size), kPerThread, Waiting::kWaits);
}
CUresult CUDAAPI cuMemcpyDtoD_v2_ptds(CUdeviceptr to, CUdeviceptr from, size_t size) {
    return api_copy(flat_copy(kDevice, to, kDevice, from, size), kPerThread, Waiting::kWaits);
}
CUresult CUDAAPI cuMemcpy2D_v2_ptds(const CUDA_MEMCPY2D *d) {
    return api_copy_2d(d, kPerThread, Waiting::kWaits);
}
CUresult CUDAAPI cuMemcpy2DUnaligned_v2_ptds(const CUDA_MEMCPY2D *d) {
    return api_copy_2d(d, kPerThread, Waiting::kWaits);
}
CUresult CUDAAPI cuMemcpy3D_v2_ptds(const CUDA_MEMCPY3D *d) {
    return api_copy_3d(d, kPerThread, Waiting::kWaits);
}
CUresult CUDAAPI cuMemcpy3DPeer_ptds(const CUDA_MEMCPY3D_PEER *d) {
    return api_copy_peer(d, kPerThread, Waiting::kWaits);
}

CUresult CUDAAPI cuMemsetD8_v2_ptds(CUdeviceptr to, unsigned char value, size_t n) {
    return api_memset(to, 0, 1, value, n, 1, kPerThread, Waiting::kWaits);
}
CUresult CUDAAPI cuMemsetD16_v2_ptds(CUdeviceptr to, unsigned short value, size_t n) {
    return api_memset(to, 0, 2, value, n, 1, kPerThread, Waiting::kWaits);
}
CUresult CUDAAPI cuMemsetD32_v2_ptds(CUdeviceptr to, unsigned int value, size_t n) {
    return api_memset(to, 0, 4, value, n, 1, kPerThread, Waiting::kWaits);
}
CUresult CUDAAPI cuMemsetD2D8_v2_ptds(CUdeviceptr to, size_t pitch, unsigned char value, size_t width, size_t height) {
    return api_memset(to, pitch, 1, value, width, height, kPerThread, Waiting::kWaits);
}
CUresult CUDAAPI cuMemsetD2D16_v2_ptds(CUdeviceptr to, size_t pitch, unsigned short value, size_t width,
                                       size_t height) {
    return api_memset(to, pitch, 2, value, width, height, kPerThread, Waiting::kWaits);
}
CUresult CUDAAPI cuMemsetD2D32_v2_ptds(CUdeviceptr to, size_t pitch, unsigned int value, size_t width, size_t height) {
    return api_memset(to, pitch, 4, value, width, height, kPerThread, Waiting::kWaits);
}

} // extern "C"
