// cuMemcpy* and cuMemset*. The _ptds and _ptsz variants are in per_thread_copy_api.cpp.
#include "copy_api.hpp"

using namespace simgpu;

extern "C" {

CUresult CUDAAPI cuMemcpy(CUdeviceptr to, CUdeviceptr from, size_t size) {
    return api_copy(flat_copy(kUnified, to, kUnified, from, size), nullptr, Waiting::kWaits);
}
CUresult CUDAAPI cuMemcpyPeer(CUdeviceptr to, CUcontext, CUdeviceptr from, CUcontext, size_t size) {
    return api_copy(flat_copy(kDevice, to, kDevice, from, size), nullptr, Waiting::kWaits);
}
CUresult CUDAAPI cuMemcpyHtoD(CUdeviceptr to, const void *from, size_t size) {
    return api_copy(flat_copy(kDevice, to, kHost, number(from), size), nullptr, Waiting::kWaits);
}
CUresult CUDAAPI cuMemcpyDtoH(void *to, CUdeviceptr from, size_t size) {
    return api_copy(flat_copy(kHost, number(to), kDevice, from, size), nullptr, Waiting::kWaits);
}
CUresult CUDAAPI cuMemcpyDtoD(CUdeviceptr to, CUdeviceptr from, size_t size) {
    return api_copy(flat_copy(kDevice, to, kDevice, from, size), nullptr, Waiting::kWaits);
}
CUresult CUDAAPI cuMemcpy2D(const CUDA_MEMCPY2D *d) {
    return api_copy_2d(d, nullptr, Waiting::kWaits);
}
CUresult CUDAAPI cuMemcpy2DUnaligned(const CUDA_MEMCPY2D *d) {
    return api_copy_2d(d, nullptr, Waiting::kWaits);
}
CUresult CUDAAPI cuMemcpy3D(const CUDA_MEMCPY3D *d) {
    return api_copy_3d(d, nullptr, Waiting::kWaits);
}
CUresult CUDAAPI cuMemcpy3DPeer(const CUDA_MEMCPY3D_PEER *d) {
    return api_copy_peer(d, nullptr, Waiting::kWaits);
}

CUresult CUDAAPI cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, size_t size, CUstream stream) {
    return api_copy(flat_copy(kUnified, to, kUnified, from, size), stream, Waiting::kReturns);
}
CUresult CUDAAPI cuMemcpyPeerAsync(CUdeviceptr to, CUcontext, CUdeviceptr from, CUcontext, size_t size,
                                   CUstream stream) {
    return api_copy(flat_copy(kDevice, to, kDevice, from, size), stream, Waiting::kReturns);
}
CUresult CUDAAPI cuMemcpyHtoDAsync(CUdeviceptr to, const void *from, size_t size, CUstream stream) {
    return api_copy(flat_copy(kDevice, to, kHost, number(from), size), stream, Waiting::kReturns);
}
CUresult CUDAAPI cuMemcpyDtoHAsync(void *to, CUdeviceptr from, size_t size, CUstream stream) {
    return api_copy(flat_copy(kHost, number(to), kDevice, from, size), stream, Waiting::kReturns);
}
CUresult CUDAAPI cuMemcpyDtoDAsync(CUdeviceptr to, CUdeviceptr from, size_t size, CUstream stream) {
    return api_copy(flat_copy(kDevice, to, kDevice, from, size), stream, Waiting::kReturns);
}
CUresult CUDAAPI cuMemcpy2DAsync(const CUDA_MEMCPY2D *d, CUstream stream) {
    return api_copy_2d(d, stream, Waiting::kReturns);
}
CUresult CUDAAPI cuMemcpy3DAsync(const CUDA_MEMCPY3D *d, CUstream stream) {
    return api_copy_3d(d, stream, Waiting::kReturns);
}
CUresult CUDAAPI cuMemcpy3DPeerAsync(const CUDA_MEMCPY3D_PEER *d, CUstream stream) {
    return api_copy_peer(d, stream, Waiting::kReturns);
}

CUresult CUDAAPI cuMemsetD8(CUdeviceptr to, unsigned char value, size_t n) {
    return api_memset(to, 0, 1, value, n, 1, nullptr, Waiting::kWaits);
}
CUresult CUDAAPI cuMemsetD16(CUdeviceptr to, unsigned short value, size_t n) {
    return api_memset(to, 0, 2, value, n, 1, nullptr, Waiting::kWaits);
}
CUresult CUDAAPI cuMemsetD32(CUdeviceptr to, unsigned int value, size_t n) {
    return api_memset(to, 0, 4, value, n, 1, nullptr, Waiting::kWaits);
}
CUresult CUDAAPI cuMemsetD2D8(CUdeviceptr to, size_t pitch, unsigned char value, size_t width, size_t height) {
    return api_memset(to, pitch, 1, value, width, height, nullptr, Waiting::kWaits);
}
CUresult CUDAAPI cuMemsetD2D16(CUdeviceptr to, size_t pitch, unsigned short value, size_t width, size_t height) {
    return api_memset(to, pitch, 2, value, width, height, nullptr, Waiting::kWaits);
}
CUresult CUDAAPI cuMemsetD2D32(CUdeviceptr to, size_t pitch, unsigned int value, size_t width, size_t height) {
    return api_memset(to, pitch, 4, value, width, height, nullptr, Waiting::kWaits);
}
CUresult CUDAAPI cuMemsetD8Async(CUdeviceptr to, unsigned char value, size_t n, CUstream stream) {
    return api_memset(to, 0, 1, value, n, 1, stream, Waiting::kReturns);
}
CUresult CUDAAPI cuMemsetD16Async(CUdeviceptr to, unsigned short value, size_t n, CUstream stream) {
    return api_memset(to, 0, 2, value, n, 1, stream, Waiting::kReturns);
}
CUresult CUDAAPI cuMemsetD32Async(CUdeviceptr to, unsigned int value, size_t n, CUstream stream) {
    return api_memset(to, 0, 4, value, n, 1, stream, Waiting::kReturns);
}
CUresult CUDAAPI cuMemsetD2D8Async(CUdeviceptr to, size_t pitch, unsigned char value, size_t width, size_t height,
                                   CUstream stream) {
    return api_memset(to, pitch, 1, value, width, height, stream, Waiting::kReturns);
}
CUresult CUDAAPI cuMemsetD2D16Async(CUdeviceptr to, size_t pitch, unsigned short value, size_t width, size_t height,
                                    CUstream stream) {
    return api_memset(to, pitch, 2, value, width, height, stream, Waiting::kReturns);
}
CUresult CUDAAPI cuMemsetD2D32Async(CUdeviceptr to, size_t pitch, unsigned int value, size_t width, size_t height,
                                    CUstream stream) {
    return api_memset(to, pitch, 4, value, width, height, stream, Waiting::kReturns);
}

} // extern "C"
