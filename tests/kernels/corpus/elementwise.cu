// Kernels that touch each element once: the shapes in which compilers and libraries write them.
#include <cstddef>
#include <cstdint>

extern "C" __global__ void saxpy(int n, float a, const float *x, float *y) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n)
        y[i] = a * x[i] + y[i];
}

extern "C" __global__ void fill_grid_stride(int n, float value, float *out) {
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x)
        out[i] = value;
}

extern "C" __global__ void add_long_index(std::size_t n, const float *a, const float *b, float *out) {
    for (std::size_t i = blockIdx.x * static_cast<std::size_t>(blockDim.x) + threadIdx.x; i < n;
         i += static_cast<std::size_t>(gridDim.x) * blockDim.x)
        out[i] = a[i] + b[i];
}

extern "C" __global__ void add_vector4(int n4, const float4 *a, float4 *out) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n4) {
        float4 v = a[i];
        out[i] = make_float4(v.x + 1, v.y + 2, v.z + 3, v.w + 4);
    }
}

extern "C" __global__ void unrolled_by_four(int n, const float *in, float *out) {
    int base = blockIdx.x * blockDim.x * 4 + threadIdx.x;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        int i = base + j * blockDim.x;
        if (i < n)
            out[i] = in[i] * 2;
    }
}

extern "C" __global__ void chunk_a_thread(int n, int chunk, const int *in, int *out) {
    int first = (blockIdx.x * blockDim.x + threadIdx.x) * chunk;
    for (int j = 0; j < chunk; ++j)
        if (first + j < n)
            out[first + j] = in[first + j] + 1;
}

extern "C" __global__ void strided(int n, int stride, const float *in, float *out) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n)
        out[i * stride] = in[i * stride + 1];
}

extern "C" __global__ void reversed(int n, const float *in, float *out) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n)
        out[n - 1 - i] = in[i];
}

extern "C" __global__ void bytes_to_words(int n, const std::uint8_t *in, std::uint32_t *out) {
    unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < static_cast<unsigned>(n))
        out[i] = in[i] * 3u;
}

extern "C" __global__ void interleave(int n, const double *re, const double *im, double2 *out) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n)
        return;
    out[i].x = re[i];
    out[i].y = im[i];
}

extern "C" __global__ void every_second(int n, const short *in, short *out) {
    int i = 2 * (blockIdx.x * blockDim.x + threadIdx.x);
    if (i < n)
        out[i] = in[i];
}

extern "C" __global__ void two_dimensions(int width, int height, int pitch, const float *in, float *out) {
    int x = blockIdx.x * blockDim.x + threadIdx.x, y = blockIdx.y * blockDim.y + threadIdx.y;
    if (x < width && y < height)
        out[y * pitch + x] = in[y * pitch + x] + 1;
}

extern "C" __global__ void three_dimensions(int nx, int ny, int nz, const float *in, float *out) {
    int x = blockIdx.x * blockDim.x + threadIdx.x, y = blockIdx.y * blockDim.y + threadIdx.y;
    int z = blockIdx.z * blockDim.z + threadIdx.z;
    if (x >= nx || y >= ny || z >= nz)
        return;
    std::size_t i = (static_cast<std::size_t>(z) * ny + y) * nx + x;
    out[i] = in[i] * 0.5f;
}

extern "C" __global__ void split_index(int n, int width, int pitch, const float *in, float *out) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n)
        out[(i / width) * pitch + i % width] = in[i];
}

extern "C" __global__ void divided_by_seven(unsigned n, const float *in, float *out) {
    unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n)
        out[i] = in[i / 7];
}

extern "C" __global__ void clamped(int n, int m, const float *in, float *out) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n)
        out[i] = in[min(i, m - 1)];
}

extern "C" __global__ void guarded_range(int n, const float *in, float *out) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= 1 && i < n - 1)
        out[i] = in[i];
}

extern "C" __global__ void one_thread(float *out, int index) {
    if (threadIdx.x == 0 && blockIdx.x == 0)
        out[index] = 1;
}

extern "C" __global__ void select_source(int n, int first, const float *a, const float *b, float *out) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    const float *source = i < first ? a : b;
    if (i < n)
        out[i] = source[i];
}

extern "C" __global__ void backwards(int n, float *out) {
    for (int i = n - 1 - static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x); i >= 0;
         i -= static_cast<int>(gridDim.x * blockDim.x))
        out[i] = 3;
}
