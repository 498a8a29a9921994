// Kernels whose addresses come out of memory, structures and tables, and control flow that does not follow a pattern.
#include <cstdint>

struct Views {
    float *out;
    int n;
    const float *sources[4];
};

struct Tensor {
    float *data;
    int sizes[3];
    int strides[3];
};

struct Node {
    Node *next;
    int value;
    int unused;
};

extern "C" __global__ void gather(int n, const int *index, const float *in, float *out) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n)
        out[i] = in[index[i]];
}

extern "C" __global__ void scatter(int n, const long long *index, const float *in, float *out) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n)
        out[index[i]] = in[i];
}

extern "C" __global__ void embedding(int tokens, int width, const int *ids, const float *table, float *out) {
    for (int j = threadIdx.x; j < width; j += blockDim.x)
        out[blockIdx.x * width + j] = table[static_cast<long long>(ids[blockIdx.x]) * width + j];
}

extern "C" __global__ void embedding_backward(int tokens, int width, const int *ids, const float *gradient,
                                              float *table) {
    for (int j = threadIdx.x; j < width; j += blockDim.x)
        atomicAdd(&table[ids[blockIdx.x] * width + j], gradient[blockIdx.x * width + j]);
}

extern "C" __global__ void histogram_bytes(int n, const std::uint8_t *in, unsigned *bins) {
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x)
        atomicAdd(&bins[in[i]], 1u);
}

extern "C" __global__ void histogram_shared(int n, int bins_count, const int *in, int *bins) {
    extern __shared__ int local[];
    for (int i = threadIdx.x; i < bins_count; i += blockDim.x)
        local[i] = 0;
    __syncthreads();
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x)
        atomicAdd(&local[in[i]], 1);
    __syncthreads();
    for (int i = threadIdx.x; i < bins_count; i += blockDim.x)
        atomicAdd(&bins[i], local[i]);
}

extern "C" __global__ void bitonic_step(int n, int j, int k, int *data) {
    int i = blockIdx.x * blockDim.x + threadIdx.x, other = i ^ j;
    if (i < n && other > i && other < n) {
        int a = data[i], b = data[other];
        if (((i & k) == 0) == (a > b)) {
            data[i] = b;
            data[other] = a;
        }
    }
}

extern "C" __global__ void sparse_rows(int rows, const int *row_start, const int *columns, const float *values,
                                       const float *x, float *y) {
    int row = blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= rows)
        return;
    float sum = 0;
    for (int j = row_start[row]; j < row_start[row + 1]; ++j)
        sum += values[j] * x[columns[j]];
    y[row] = sum;
}

extern "C" __global__ void hash_insert(int n, unsigned mask, const unsigned *keys, unsigned *table) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n)
        return;
    unsigned key = keys[i] | 1u, slot = (key * 2654435761u) & mask;
    while (true) {
        unsigned old = atomicCAS(&table[slot], 0u, key);
        if (old == 0u || old == key)
            return;
        slot = (slot + 1) & mask;
    }
}

extern "C" __global__ void list_sum(int lists, Node *const *heads, int *out) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= lists)
        return;
    int sum = 0;
    for (const Node *at = heads[i]; at != nullptr; at = at->next)
        sum += at->value;
    out[i] = sum;
}

extern "C" __global__ void binary_search(int n, int queries, const int *sorted, const int *wanted, int *out) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= queries)
        return;
    int low = 0, high = n;
    while (low < high) {
        int middle = (low + high) / 2;
        if (sorted[middle] < wanted[i])
            low = middle + 1;
        else
            high = middle;
    }
    out[i] = low;
}

extern "C" __global__ void struct_views(Views views, int which) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < views.n)
        views.out[i] = views.sources[which][i];
}

extern "C" __global__ void struct_views_mixed(const __grid_constant__ Views views) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < views.n)
        views.out[i] = views.sources[i & 3][i];
}

extern "C" __global__ void struct_tensor(Tensor in, Tensor out) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    int c = i % in.sizes[2], b = i / in.sizes[2] % in.sizes[1], a = i / in.sizes[2] / in.sizes[1];
    if (a < in.sizes[0])
        out.data[a * out.strides[0] + b * out.strides[1] + c * out.strides[2]] =
            in.data[a * in.strides[0] + b * in.strides[1] + c * in.strides[2]];
}

extern "C" __global__ void pointer_table(int n, float *const *table, float value) {
    int i = threadIdx.x;
    if (i < n)
        table[blockIdx.x][i] = value;
}

extern "C" __global__ void kv_cache_write(int heads, int size, int block_size, const float *key, const long long *slots,
                                          float *cache) {
    long long slot = slots[blockIdx.x];
    if (slot < 0)
        return;
    long long block = slot / block_size, offset = slot % block_size;
    for (int i = threadIdx.x; i < heads * size; i += blockDim.x) {
        int head = i / size, e = i % size;
        cache[((block * heads + head) * block_size + offset) * size + e] = key[blockIdx.x * heads * size + i];
    }
}

extern "C" __global__ void kv_cache_append(int heads, int size, int capacity, int position, const float *key,
                                           float *cache) {
    int head = blockIdx.y, token = blockIdx.x;
    for (int e = threadIdx.x; e < size; e += blockDim.x)
        cache[(static_cast<long long>(head) * capacity + position + token) * size + e] =
            key[(token * heads + head) * size + e];
}

extern "C" __global__ void kv_cache_reshape(int heads, int size, int length, const float *in, float *out) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= heads * size * length)
        return;
    int e = i % size, head = i / size % heads, t = i / (size * heads);
    out[(head * length + t) * size + e] = in[i];
}

extern "C" __global__ void paged_read(int heads, int size, int block_size, int length, const int *blocks,
                                      const float *cache, float *out) {
    int head = blockIdx.x;
    for (int t = 0; t < length; ++t) {
        int block = blocks[t / block_size];
        for (int e = threadIdx.x; e < size; e += blockDim.x)
            out[(t * heads + head) * size + e] =
                cache[((block * heads + head) * block_size + t % block_size) * size + e];
    }
}

extern "C" __global__ void early_break(int n, int limit, const int *in, int *out) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    for (int j = 0; j < n; ++j) {
        if (in[j] == limit + i)
            break;
        out[i * n + j] = j;
    }
}

extern "C" __global__ void collatz(int n, int *out) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n)
        return;
    int x = i + 1, steps = 0;
    while (x != 1 && steps < 100) {
        x = x & 1 ? 3 * x + 1 : x / 2;
        ++steps;
    }
    out[i] = steps;
}

extern "C" __global__ void compact(int n, const int *in, int *out, int *count) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n && in[i] > 0)
        out[atomicAdd(count, 1)] = in[i];
}

extern "C" __global__ void atomics_mixed(int n, int *counters, unsigned long long *most) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n)
        return;
    atomicAdd(&counters[i % 7], 1);
    atomicMax(most, static_cast<unsigned long long>(i));
    atomicExch(&counters[7 + (i & 3)], i);
}

__device__ int device_table[64];
__constant__ float device_weights[16];

extern "C" __global__ void module_variables(int n, float *out) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n)
        return;
    device_table[i & 63] = i;
    out[i] = device_weights[i % 16];
}

__device__ __noinline__ float *advance(float *from, int by) {
    return from + by;
}

extern "C" __global__ void through_function(int n, float *out) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n)
        *advance(out, i) = i;
}

extern "C" __global__ void local_array(int n, const float *in, float *out) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n)
        return;
    float window[8];
    for (int j = 0; j < 8; ++j)
        window[j] = in[i * 8 + j];
    int at = static_cast<int>(window[0]) & 7;
    out[i] = window[at];
}

extern "C" __global__ void pointer_walk(int n, float *out, const float *in) {
    float *to = out + threadIdx.x;
    const float *end = in + n;
    for (const float *at = in + threadIdx.x; at < end; at += blockDim.x, to += blockDim.x)
        *to = *at;
}

extern "C" __global__ void conditional_advance(int n, const int *flags, float *out) {
    if (threadIdx.x != 0)
        return;
    float *at = out;
    for (int i = 0; i < n; ++i)
        if (flags[i])
            *at++ = i;
}

extern "C" __global__ void triangular(int n, float *out) {
    int row = blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= n)
        return;
    for (int column = 0; column <= row; ++column)
        out[row * n + column] = 1;
}

extern "C" __global__ void wraps_around(unsigned n, unsigned shift, float *out) {
    unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    unsigned j = i - shift;
    if (j < n)
        out[j] = 1;
}

extern "C" __global__ void swizzled(int tiles_x, int tiles_y, int group, int width, float *out) {
    int id = blockIdx.x, in_group = group * tiles_y;
    int first = id / in_group * group;
    int size = min(tiles_x - first, group);
    int x = first + id % size, y = id % in_group / size;
    out[(y * 8 + threadIdx.y) * width + x * 8 + threadIdx.x] = 1;
}

extern "C" __global__ void power_of_two_steps(int n, float *out) {
    for (int s = 1; s < n; s <<= 1)
        if (threadIdx.x == 0)
            out[s] = s;
}

extern "C" __global__ void nested_loops(int a, int b, int c, float *out) {
    for (int i = blockIdx.x; i < a; i += gridDim.x)
        for (int j = threadIdx.x; j < b; j += blockDim.x)
            for (int k = 0; k < c; ++k)
                out[(i * b + j) * c + k] = k;
}
