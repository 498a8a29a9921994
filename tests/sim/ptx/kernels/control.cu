// Control flow: divergence, calls of every kind, barriers in divergent code, lanes and blocks that wait for each other.
#include <cassert>
#include <cstdio>

extern "C" __global__ void nested_loops(const int *in, int *out, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n)
        return;
    unsigned sum = 0;
    for (int a = 0; a < in[i] % 13; ++a) {
        if (a == 7)
            continue;
        for (int b = a; b < i % 11; ++b) {
            if ((a ^ b) == 5)
                break;
            sum = sum * 3 + a * b + (b & 1 ? i : -i);
        }
        while (sum % 5 == 2 && sum > 100)
            sum /= 3;
    }
    out[i] = static_cast<int>(sum);
}

extern "C" __global__ void big_switch(const int *in, int *out) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    int value = in[i];
    switch (value % 12) {
    case 0:
        value += 11;
        break;
    case 1:
        value *= 3;
        [[fallthrough]];
    case 2:
        value ^= 0x55;
        break;
    case 3:
        value = -value;
        break;
    case 4:
        value <<= 2;
        break;
    case 5:
        value -= 1000;
        [[fallthrough]];
    case 6:
        value /= 3;
        break;
    case 7:
        value = value * value;
        break;
    case 8:
        value |= 1 << (value & 7);
        break;
    case 9:
        value = ~value;
        break;
    case 10:
        value += i;
        break;
    default:
        value = 42;
    }
    out[i] = value;
}

__device__ __noinline__ int fibonacci(int n) {
    return n < 2 ? n : fibonacci(n - 1) + fibonacci(n - 2);
}
__device__ __noinline__ unsigned ackermann(unsigned m, unsigned n) {
    if (m == 0)
        return n + 1;
    if (n == 0)
        return ackermann(m - 1, 1);
    return ackermann(m - 1, ackermann(m, n - 1));
}
extern "C" __global__ void recursion(int *out) {
    const int i = threadIdx.x;
    out[i] = i % 3 == 0 ? fibonacci(i % 12) : static_cast<int>(ackermann(i % 3, i % 4));
}
__device__ __noinline__ int endless(int n) {
    if (n == -1)
        return 0;
    const int below = endless(n + 1);
    return below * below + n; // no form that a compiler turns into a loop
}
extern "C" __global__ void endless_recursion(int *out) {
    out[0] = endless(0);
}

typedef int (*Function)(int);
__device__ __noinline__ int twice(int x) {
    return x * 2;
}
__device__ __noinline__ int square(int x) {
    return x * x;
}
__device__ __noinline__ int negative(int x) {
    return -x;
}
__device__ Function functions[3] = {twice, square, negative};
extern "C" __global__ void function_pointers(const int *choice, int *out) {
    const int i = threadIdx.x;
    Function chosen = functions[choice[i] % 3];
    out[i] = chosen(i) + functions[(i / 8) % 3](choice[i]);
}
extern "C" __global__ void wild_call(unsigned long long address, int *out) {
    out[0] = reinterpret_cast<Function>(address)(3);
}

struct Shape {
    __device__ virtual double area() const = 0;
    __device__ virtual int corners() const { return 0; }
    __device__ virtual ~Shape() {}
};
struct Square : Shape {
    double side;
    __device__ explicit Square(double s) : side(s) {}
    __device__ double area() const override { return side * side; }
    __device__ int corners() const override { return 4; }
};
struct Circle : Shape {
    double radius;
    __device__ explicit Circle(double r) : radius(r) {}
    __device__ double area() const override { return radius * radius * 3.0; }
};
extern "C" __global__ void virtual_functions(double *out) {
    const int i = threadIdx.x;
    Square square_shape(i);
    Circle circle(i + 1);
    const Shape *shape = i % 2 == 0 ? static_cast<const Shape *>(&square_shape) : &circle;
    out[i] = shape->area() + shape->corners();
}

struct Pair {
    long long first;
    short second;
};
__device__ __noinline__ Pair make_pair(int a, Pair b) {
    Pair result;
    result.first = b.first * a;
    result.second = static_cast<short>(b.second - a);
    return result;
}
extern "C" __global__ void structs_through_calls(long long *out) {
    const int i = threadIdx.x;
    Pair pair{i, static_cast<short>(i * 2)};
    for (int k = 1; k < 4; ++k)
        pair = make_pair(k + i % 2, pair);
    out[i] = pair.first * 100000 + pair.second;
}

extern "C" __global__ void barriers_in_loops(int *out, int rounds) {
    __shared__ int values[128];
    const int i = threadIdx.x;
    values[i] = i;
    __syncthreads();
    for (int k = 0; k < rounds; ++k) {
        int next;
        // The two halves of a warp come to the barrier from different places.
        if (i % 2 == 0) {
            next = values[(i + 1) % 128] * 3;
            __syncthreads();
            values[i] = next;
        } else {
            next = values[(i + 126) % 128] + k;
            __syncthreads();
            values[i] = next;
        }
        __syncthreads();
    }
    out[i] = values[i];
}

extern "C" __global__ void early_exit(int *out) {
    __shared__ int sum;
    const int i = threadIdx.x;
    if (i == 0)
        sum = 0;
    __syncthreads();
    if (i % 5 == 3)
        return;
    atomicAdd(&sum, i);
    __syncthreads();
    out[i] = sum;
}

extern "C" __global__ void named_barriers(int *out) {
    __shared__ int values[64];
    const int i = threadIdx.x;
    // The first two warps produce, the others consume.
    if (i < 64) {
        values[i] = i * i;
        asm volatile("bar.arrive 3, 128;" ::: "memory");
        out[i] = -1;
    } else {
        asm volatile("bar.sync 3, 128;" ::: "memory");
        out[i] = values[127 - i];
    }
}

extern "C" __global__ void barrier_reductions(const int *in, int *out) {
    const int i = threadIdx.x;
    out[i * 3] = __syncthreads_count(in[i] > 10);
    out[i * 3 + 1] = __syncthreads_and(in[i] >= 0) != 0;
    out[i * 3 + 2] = __syncthreads_or(in[i] == 77) != 0;
}

extern "C" __global__ void lock_within_a_warp(int *lock, int *counter) {
    bool done = false;
    while (!done) {
        if (atomicCAS(lock, 0, 1) == 0) {
            *const_cast<volatile int *>(counter) = *const_cast<volatile int *>(counter) + 1;
            __threadfence();
            atomicExch(lock, 0);
            done = true;
        }
    }
}
// Lanes that spin on what a lane further down the program writes.
extern "C" __global__ void spin_within_a_warp(volatile int *flag, int *out) {
    const int i = threadIdx.x;
    if (i != 31) {
        while (flag[0] == 0) {
        }
        out[i] = flag[0] + i;
    } else {
        flag[0] = 5;
        out[i] = -1;
    }
}
extern "C" __global__ void spin_between_blocks(volatile int *flags, int *out) {
    // Block k waits for block k + 1, which starts later.
    const unsigned block = blockIdx.x;
    if (threadIdx.x == 0) {
        if (block + 1 < gridDim.x)
            while (flags[block + 1] == 0) {
            }
        out[block] = block + 1 < gridDim.x ? out[block + 1] + 1 : 1;
        __threadfence();
        flags[block] = 1;
    }
}
extern "C" __global__ void endless_loop(volatile int *flag) {
    while (flag[0] == 0) {
    }
}
extern "C" __global__ void deadlock(int *out) {
    if (threadIdx.x == 0)
        asm volatile("bar.sync 1, 64;" ::: "memory");
    out[threadIdx.x] = 1;
}

extern "C" __global__ void printing(int n, const char *word) {
    const int i = threadIdx.x;
    if (i < n)
        printf("%d of %u: %5.2f|%-4s|%llx|%c%%\n", i, static_cast<unsigned>(n), i * 1.25, word, 0x123456789abcull + i,
               'a' + i);
}
extern "C" __global__ void asserting(int limit) {
    assert(static_cast<int>(threadIdx.x) < limit);
}
extern "C" __global__ void trapping(int when) {
    if (static_cast<int>(threadIdx.x) == when)
        asm volatile("trap;");
}
extern "C" __global__ void thread_ids(unsigned *out) {
    const unsigned block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
    const unsigned thread = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
    const unsigned threads = blockDim.x * blockDim.y * blockDim.z;
    unsigned lane, warp;
    asm("mov.u32 %0, %%laneid;" : "=r"(lane));
    asm volatile("mov.u32 %0, %%warpid;" : "=r"(warp));
    out[block * threads + thread] = block << 16 | thread << 6 | (lane == thread % 32) << 1 | (warp == thread / 32);
}
extern "C" __global__ void uses_textures(float *out, cudaTextureObject_t texture) {
    out[0] = tex1Dfetch<float>(texture, 3);
}
extern "C" __global__ __launch_bounds__(128) void bounded(int *out) {
    out[threadIdx.x] = 1;
}
