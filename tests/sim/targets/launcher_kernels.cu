// Kernels of the launcher target, each for one thing that following launches must get right.
#include <cstdint>

// Writes `count` words from `first` on.
extern "C" __global__ void put(uint32_t *to, uint32_t first, uint32_t count, uint32_t value) {
    for (uint32_t i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x)
        to[first + i] += value + i;
}

// The same parameters, and nothing is written: what `put` is taken for by a template that is wrong.
extern "C" __global__ void look(uint32_t *to, uint32_t first, uint32_t count, uint32_t value) {
    if (value == 1 && to[first] == count)
        __trap();
}

// Writes through pointers that lie in memory.
extern "C" __global__ void through_table(uint32_t **table, uint32_t count, uint32_t value) {
    if (threadIdx.x < count)
        *table[threadIdx.x] += value;
}

// Writes where a tensor map says; `mask` brings its address out.
struct alignas(64) Map {
    uint64_t words[16];
};
extern "C" __global__ void through_map(const __grid_constant__ Map map, uint64_t mask, uint32_t value) {
    reinterpret_cast<uint32_t *>(map.words[0] ^ mask)[threadIdx.x] += value;
}

// One word of each of many far places: many ranges to tell, which takes its time.
extern "C" __global__ void sparse(uint32_t *to, uint32_t stride, uint32_t value) {
    to[(blockIdx.x * blockDim.x + threadIdx.x) * stride] += value;
}

struct Large {
    uint32_t words[960];
};
// A large parameter block, whose last word counts launches.
extern "C" __global__ void large(uint32_t *to, Large large) {
    to[threadIdx.x * 64 + large.words[959] % 64] = large.words[threadIdx.x];
}

__device__ uint32_t in_module[4];
// Its own module's variable, which is not memory that is owned, and a buffer.
extern "C" __global__ void count_both(uint32_t *to) {
    atomicAdd(&in_module[threadIdx.x % 4], 1u);
    atomicAdd(&to[threadIdx.x], in_module[0] + 1u);
}
