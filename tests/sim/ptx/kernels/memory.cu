// Every state space, every width, and pointers that may point anywhere.
struct Inner {
    short a;
    double b;
    unsigned char c[5];
};
struct Record {
    int id;
    Inner inner[3];
    float4 vector;
    const int *pointer;
};

__constant__ int coefficients[8] = {3, 1, 4, 1, 5, 9, 2, 6};
__constant__ float zeros[4];
__device__ int table[6] = {10, 20, 30, 40, 50, 60};
__device__ int *middle = &table[2];
__device__ int *ends[2] = {&table[0], &table[5]};
__device__ long long counter = -7;
__device__ char text[] = "frog";
struct Named {
    const char *name;
    double weight;
};
__device__ Named named[2] = {{"wood", 1.5}, {"tree", 2.5}};

extern "C" __global__ void structs_by_value(Record record, double scale, double *out) {
    const int i = threadIdx.x;
    const Inner &inner = record.inner[i % 3];
    out[i] = record.id + inner.a + inner.b * scale + inner.c[i % 5] + record.vector.z + record.pointer[i % 2];
}

extern "C" __global__ void device_variables(long long *out) {
    const int i = threadIdx.x;
    if (i == 0)
        counter += 100;
    __syncthreads();
    out[i] = coefficients[i % 8] + middle[i % 3] + ends[i & 1][0] + counter + text[i % 5] +
             static_cast<long long>(zeros[i % 4]) + static_cast<long long>(named[i & 1].weight * 2) +
             named[i & 1].name[i % 4];
}

extern "C" __global__ void vector_accesses(const float4 *a, const short2 *b, const uchar4 *c, const double2 *d,
                                           float4 *out) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    const float4 x = a[i];
    const short2 y = b[i];
    const uchar4 z = c[i];
    const double2 w = d[i];
    out[i] =
        make_float4(x.w + y.x, x.z + z.y, x.y + static_cast<float>(w.y), x.x + z.w + y.y + static_cast<float>(w.x));
}

extern "C" __global__ void local_arrays(const int *in, int *out, int n) {
    int values[16];
    const int i = threadIdx.x;
    for (int k = 0; k < 16; ++k)
        values[k] = in[(i + k) % n];
    // Indices known only at run time keep the array in local memory.
    for (int k = 0; k < 16; ++k) {
        const int j = values[k] & 15;
        const int keep = values[j];
        values[j] = values[k] + k;
        values[k] = keep;
    }
    int sum = 0;
    for (int k = 0; k < 16; ++k)
        sum = sum * 31 + values[(k * in[i]) & 15];
    out[i] = sum;
}

__device__ __noinline__ int sum_through(const int *pointer, int count) {
    int sum = 0;
    for (int k = 0; k < count; ++k)
        sum += pointer[k];
    return sum;
}

extern "C" __global__ void generic_pointers(int *global, int *out) {
    __shared__ int shared[32];
    int local[4];
    const int i = threadIdx.x;
    shared[i] = i * 3;
    for (int k = 0; k < 4; ++k)
        local[k] = i + k * global[k];
    __syncthreads();
    const int *pointer = i % 3 == 0 ? global : i % 3 == 1 ? shared : local;
    out[i * 2] = sum_through(pointer, 4);
    out[i * 2 + 1] = (__isGlobal(pointer) ? 1 : 0) | (__isShared(pointer) ? 2 : 0) | (__isLocal(pointer) ? 4 : 0);
}

extern "C" __global__ void dynamic_shared(int *out, int n) {
    extern __shared__ double buffer[];
    int *as_integers = reinterpret_cast<int *>(buffer + n);
    __shared__ int fixed[8];
    const int i = threadIdx.x;
    if (i < 8)
        fixed[i] = i * 1000;
    buffer[i] = i * 0.5;
    as_integers[i] = i;
    __syncthreads();
    unsigned size;
    asm("mov.u32 %0, %%dynamic_smem_size;" : "=r"(size));
    out[i] = static_cast<int>(buffer[n - 1 - i] * 2) + as_integers[(i + 1) % n] + fixed[i % 8] + static_cast<int>(size);
}

extern "C" __global__ void wide_indices(const unsigned char *base, long long offset, unsigned long long *out,
                                        unsigned n) {
    const unsigned long long i = blockIdx.x * static_cast<unsigned long long>(blockDim.x) + threadIdx.x;
    if (i < n)
        out[i] =
            base[offset + static_cast<long long>(i) * 0x1000000001ll - static_cast<long long>(i) * 0x1000000000ll] * i;
}

extern "C" __global__ void asynchronous_copies(const int4 *in, int4 *out) {
    __shared__ int4 buffer[64];
    const int i = threadIdx.x;
    const unsigned to = static_cast<unsigned>(__cvta_generic_to_shared(&buffer[i]));
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(in + i) : "memory");
    asm volatile("cp.async.commit_group;" ::: "memory");
    asm volatile("cp.async.wait_group 0;" ::: "memory");
    __syncthreads();
    out[i] = buffer[63 - i];
}

extern "C" __global__ void device_heap(int *out) {
    const int i = threadIdx.x;
    int *mine = static_cast<int *>(malloc(sizeof(int) * (i + 1)));
    if (mine == nullptr) {
        out[i] = -1;
        return;
    }
    for (int k = 0; k <= i; ++k)
        mine[k] = k * i;
    int sum = 0;
    for (int k = 0; k <= i; ++k)
        sum += mine[k];
    free(mine);
    out[i] = sum;
}

extern "C" __global__ void stack_allocation(int *out) {
    const int i = threadIdx.x;
    const int count = i % 7 + 1;
    int *values = static_cast<int *>(__builtin_alloca(count * sizeof(int)));
    for (int k = 0; k < count; ++k)
        values[k] = k + i;
    int sum = 0;
    for (int k = 0; k < count; ++k)
        sum += values[(k * 3) % count];
    out[i] = sum;
}

extern "C" __global__ void out_of_bounds(int *data, long long index) {
    data[index] = 1;
}
extern "C" __global__ void out_of_shared(int *out, int index) {
    __shared__ int buffer[32];
    buffer[threadIdx.x] = out[0];
    __syncthreads();
    out[threadIdx.x] = buffer[index];
}
extern "C" __global__ void misaligned(char *data) {
    *reinterpret_cast<int *>(data + 2) = 1;
}
