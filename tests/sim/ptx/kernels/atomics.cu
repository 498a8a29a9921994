// Atomics of every kind on global and shared memory.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

template <class T> __device__ void integer_atomics(T *cells, T *old, T value) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    old[i] = atomicAdd(&cells[0], value);
    atomicMin(&cells[1], value);
    atomicMax(&cells[2], value);
    atomicAnd(&cells[3], ~(static_cast<T>(1) << (i % 30)));
    atomicOr(&cells[4], static_cast<T>(1) << (i % 31));
    atomicXor(&cells[5], value);
    atomicExch(&cells[6], static_cast<T>(7));
    atomicCAS(&cells[7], static_cast<T>(i), static_cast<T>(i + 1));
}
extern "C" __global__ void atomics_s32(int *cells, int *old) {
    integer_atomics(cells, old, static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x) * 17 - 300);
}
extern "C" __global__ void atomics_u64(unsigned long long *cells, unsigned long long *old) {
    integer_atomics(cells, old, (blockIdx.x * blockDim.x + threadIdx.x) * 0x100000001ull);
}
extern "C" __global__ void atomics_s64(long long *cells) {
    const int i = threadIdx.x;
    atomicMin(&cells[0], static_cast<long long>(i) * -3000000000ll);
    atomicMax(&cells[1], static_cast<long long>(i) * 3000000000ll);
}
extern "C" __global__ void atomics_wrapping(unsigned *cells) {
    atomicInc(&cells[0], 10u);
    atomicDec(&cells[1], 12u);
}
extern "C" __global__ void atomics_float(float *f, double *d, __half2 *h, __nv_bfloat16 *b) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    atomicAdd(f, 0.5f + i);
    atomicAdd(d, 0.25 * i);
    atomicAdd(h, __floats2half2_rn(1.0f, 0.5f));
    atomicAdd(b, __float2bfloat16(1.0f));
}
extern "C" __global__ void atomics_shared(const int *in, int *out) {
    __shared__ int bins[16];
    __shared__ unsigned long long total;
    const int i = threadIdx.x;
    if (i < 16)
        bins[i] = 0;
    if (i == 0)
        total = 0;
    __syncthreads();
    atomicAdd(&bins[in[i] & 15], 1);
    atomicAdd(&total, static_cast<unsigned long long>(in[i]));
    __syncthreads();
    if (i < 16)
        out[i] = bins[i];
    if (i == 16)
        out[16] = static_cast<int>(total);
}
__device__ double add_by_swapping(double *cell, double value) {
    unsigned long long *bits = reinterpret_cast<unsigned long long *>(cell);
    unsigned long long old = *bits, assumed;
    do {
        assumed = old;
        old = atomicCAS(bits, assumed, __double_as_longlong(value + __longlong_as_double(assumed)));
    } while (assumed != old);
    return __longlong_as_double(old);
}
extern "C" __global__ void atomics_by_swapping(double *cell) {
    add_by_swapping(cell, 1.0 + threadIdx.x);
}
extern "C" __global__ void histogram(const unsigned char *in, unsigned *bins, int n) {
    __shared__ unsigned local[256];
    for (int k = threadIdx.x; k < 256; k += blockDim.x)
        local[k] = 0;
    __syncthreads();
    for (int k = blockIdx.x * blockDim.x + threadIdx.x; k < n; k += gridDim.x * blockDim.x)
        atomicAdd(&local[in[k]], 1u);
    __syncthreads();
    for (int k = threadIdx.x; k < 256; k += blockDim.x)
        atomicAdd(&bins[k], local[k]);
}
__device__ unsigned finished = 0;
extern "C" __global__ void last_block_sums(const int *in, int *partial, int *out, int n) {
    __shared__ bool last;
    int sum = 0;
    for (int k = blockIdx.x * blockDim.x + threadIdx.x; k < n; k += gridDim.x * blockDim.x)
        sum += in[k];
    atomicAdd(&partial[blockIdx.x], sum);
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0)
        last = atomicInc(&finished, gridDim.x - 1) == gridDim.x - 1;
    __syncthreads();
    if (last && threadIdx.x == 0) {
        int total = 0;
        for (unsigned k = 0; k < gridDim.x; ++k)
            total += partial[k];
        out[0] = total;
    }
}
