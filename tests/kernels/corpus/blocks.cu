// Kernels whose blocks work together: transposes, reductions, scans, stencils, matrices, softmax, attention.
#include <cstdint>

constexpr int kTile = 16;

extern "C" __global__ void transpose(int width, int height, const float *in, float *out) {
    __shared__ float tile[kTile][kTile + 1];
    int x = blockIdx.x * kTile + threadIdx.x, y = blockIdx.y * kTile + threadIdx.y;
    if (x < width && y < height)
        tile[threadIdx.y][threadIdx.x] = in[y * width + x];
    __syncthreads();
    x = blockIdx.y * kTile + threadIdx.x;
    y = blockIdx.x * kTile + threadIdx.y;
    if (x < height && y < width)
        out[y * height + x] = tile[threadIdx.x][threadIdx.y];
}

extern "C" __global__ void transpose_naive(int width, int height, const float *in, float *out) {
    int x = blockIdx.x * blockDim.x + threadIdx.x, y = blockIdx.y * blockDim.y + threadIdx.y;
    if (x < width && y < height)
        out[x * height + y] = in[y * width + x];
}

extern "C" __global__ void reduce_block(int n, const float *in, float *out) {
    extern __shared__ float part[];
    float sum = 0;
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += blockDim.x * gridDim.x)
        sum += in[i];
    part[threadIdx.x] = sum;
    __syncthreads();
    for (unsigned s = blockDim.x / 2; s > 0; s >>= 1) {
        if (threadIdx.x < s)
            part[threadIdx.x] += part[threadIdx.x + s];
        __syncthreads();
    }
    if (threadIdx.x == 0)
        out[blockIdx.x] = part[0];
}

extern "C" __global__ void reduce_warp_atomic(int n, const float *in, float *out) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    float v = i < n ? in[i] : 0;
    for (int offset = 16; offset > 0; offset /= 2)
        v += __shfl_down_sync(0xffffffffu, v, offset);
    if ((threadIdx.x & 31) == 0)
        atomicAdd(out, v);
}

extern "C" __global__ void scan_block(int n, const int *in, int *out, int *sums) {
    __shared__ int values[256];
    int i = blockIdx.x * 256 + threadIdx.x;
    values[threadIdx.x] = i < n ? in[i] : 0;
    __syncthreads();
    for (int step = 1; step < 256; step *= 2) {
        int v = threadIdx.x >= step ? values[threadIdx.x - step] : 0;
        __syncthreads();
        values[threadIdx.x] += v;
        __syncthreads();
    }
    if (i < n)
        out[i] = values[threadIdx.x];
    if (threadIdx.x == 255)
        sums[blockIdx.x] = values[255];
}

extern "C" __global__ void scan_add(int n, const int *sums, int *out) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (blockIdx.x > 0 && i < n)
        out[i] += sums[blockIdx.x - 1];
}

extern "C" __global__ void stencil_1d(int n, const float *in, float *out) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i > 0 && i < n - 1)
        out[i] = 0.25f * in[i - 1] + 0.5f * in[i] + 0.25f * in[i + 1];
}

extern "C" __global__ void stencil_2d(int width, int height, const float *in, float *out) {
    int x = blockIdx.x * blockDim.x + threadIdx.x + 1, y = blockIdx.y * blockDim.y + threadIdx.y + 1;
    if (x < width - 1 && y < height - 1) {
        int i = y * width + x;
        out[i] = in[i] + in[i - 1] + in[i + 1] + in[i - width] + in[i + width];
    }
}

extern "C" __global__ void stencil_3d_sweep(int nx, int ny, int nz, const float *in, float *out) {
    int x = blockIdx.x * blockDim.x + threadIdx.x, y = blockIdx.y * blockDim.y + threadIdx.y;
    if (x >= nx || y >= ny)
        return;
    int plane = nx * ny, i = y * nx + x;
    float below = in[i], here = in[i + plane];
    for (int z = 1; z < nz - 1; ++z) {
        float above = in[i + (z + 1) * plane];
        out[i + z * plane] = below + here + above;
        below = here;
        here = above;
    }
}

extern "C" __global__ void convolution_rows(int width, int height, int radius, const float *in, const float *taps,
                                            float *out) {
    int x = blockIdx.x * blockDim.x + threadIdx.x, y = blockIdx.y;
    if (x >= width)
        return;
    float sum = 0;
    for (int d = -radius; d <= radius; ++d) {
        int at = x + d;
        if (at >= 0 && at < width)
            sum += in[y * width + at] * taps[d + radius];
    }
    out[y * width + x] = sum;
}

extern "C" __global__ void matmul_naive(const float *a, const float *b, float *c, int m, int n, int k) {
    int row = blockIdx.y * blockDim.y + threadIdx.y, column = blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= m || column >= n)
        return;
    float sum = 0;
    for (int i = 0; i < k; ++i)
        sum += a[row * k + i] * b[i * n + column];
    c[row * n + column] = sum;
}

extern "C" __global__ void matmul_tiled(const float *a, const float *b, float *c, int m, int n, int k) {
    __shared__ float ta[kTile][kTile], tb[kTile][kTile];
    int row = blockIdx.y * kTile + threadIdx.y, column = blockIdx.x * kTile + threadIdx.x;
    float sum = 0;
    for (int t = 0; t < (k + kTile - 1) / kTile; ++t) {
        int ak = t * kTile + threadIdx.x, bk = t * kTile + threadIdx.y;
        ta[threadIdx.y][threadIdx.x] = row < m && ak < k ? a[row * k + ak] : 0;
        tb[threadIdx.y][threadIdx.x] = bk < k && column < n ? b[bk * n + column] : 0;
        __syncthreads();
        for (int i = 0; i < kTile; ++i)
            sum += ta[threadIdx.y][i] * tb[i][threadIdx.x];
        __syncthreads();
    }
    if (row < m && column < n)
        c[row * n + column] = sum;
}

extern "C" __global__ void softmax_rows(int columns, const float *in, float *out) {
    __shared__ float part[256];
    const float *row = in + blockIdx.x * columns;
    float *target = out + blockIdx.x * columns;
    float most = -1e30f;
    for (int j = threadIdx.x; j < columns; j += blockDim.x)
        most = fmaxf(most, row[j]);
    part[threadIdx.x] = most;
    __syncthreads();
    for (int s = blockDim.x / 2; s > 0; s >>= 1) {
        if (threadIdx.x < s)
            part[threadIdx.x] = fmaxf(part[threadIdx.x], part[threadIdx.x + s]);
        __syncthreads();
    }
    most = part[0];
    float sum = 0;
    for (int j = threadIdx.x; j < columns; j += blockDim.x)
        sum += expf(row[j] - most);
    for (int j = threadIdx.x; j < columns; j += blockDim.x)
        target[j] = expf(row[j] - most) / (sum + 1);
}

extern "C" __global__ void layer_norm(int columns, const float *in, const float *weight, const float *bias,
                                      float *out) {
    int row = blockIdx.x;
    float sum = 0, squares = 0;
    for (int j = threadIdx.x; j < columns; j += blockDim.x) {
        float v = in[static_cast<long long>(row) * columns + j];
        sum += v;
        squares += v * v;
    }
    for (int offset = 16; offset > 0; offset >>= 1) {
        sum += __shfl_xor_sync(0xffffffffu, sum, offset);
        squares += __shfl_xor_sync(0xffffffffu, squares, offset);
    }
    for (int j = threadIdx.x; j < columns; j += blockDim.x)
        out[static_cast<long long>(row) * columns + j] =
            (in[static_cast<long long>(row) * columns + j] - sum) * squares * weight[j] + bias[j];
}

extern "C" __global__ void attention_row(int heads, int length, int size, const float *q, const float *k,
                                         const float *v, float *out) {
    int head = blockIdx.y, query = blockIdx.x, d = threadIdx.x;
    if (d >= size)
        return;
    float sum = 0;
    for (int j = 0; j <= query; ++j) {
        float score = 0;
        for (int e = 0; e < size; ++e)
            score += q[(query * heads + head) * size + e] * k[(j * heads + head) * size + e];
        sum += score * v[(j * heads + head) * size + d];
    }
    out[(query * heads + head) * size + d] = sum;
}

extern "C" __global__ void rope(int heads, int half_size, const float *angles, float *x) {
    int token = blockIdx.x, head = blockIdx.y, i = threadIdx.x;
    if (i >= half_size)
        return;
    float *at = x + (token * heads + head) * 2 * half_size;
    float a = at[i], b = at[i + half_size];
    float c = angles[token * half_size + i];
    at[i] = a * c - b;
    at[i + half_size] = b * c + a;
}

extern "C" __global__ void copy_async(int n, const float4 *in, float4 *out) {
    __shared__ float4 stage[128];
    int i = blockIdx.x * 128 + threadIdx.x;
    if (i < n) {
        unsigned to = static_cast<unsigned>(__cvta_generic_to_shared(&stage[threadIdx.x]));
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;\n" ::"r"(to), "l"(in + i));
    }
    asm volatile("cp.async.commit_group;\ncp.async.wait_group 0;\n" ::);
    __syncthreads();
    if (i < n)
        out[i] = stage[threadIdx.x];
}

extern "C" __global__ void double_buffered(int n, const float *in, float *out) {
    __shared__ float stage[2][64];
    int buffer = 0;
    stage[0][threadIdx.x] = threadIdx.x < n ? in[threadIdx.x] : 0;
    for (int base = 0; base < n; base += 64) {
        __syncthreads();
        int next = base + 64 + threadIdx.x;
        if (next < n)
            stage[buffer ^ 1][threadIdx.x] = in[next];
        if (base + threadIdx.x < n)
            out[base + threadIdx.x] = stage[buffer][threadIdx.x];
        buffer ^= 1;
    }
}
