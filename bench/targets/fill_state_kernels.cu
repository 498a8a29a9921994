// Kernels of fill_state: a counter-based pattern (every word a function of its place and generation, so that it can be
// checked without a copy) and one counter in module memory that shows whether the program goes on where it stopped.

__device__ unsigned long long step_counter = 1;

// The SplitMix64 output function (Steele, Lea, Flood 2014): its output does not compress and hardly repeats.
__device__ static unsigned long long mixed(unsigned long long x) {
    x += 0x9e3779b97f4a7c15ULL;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
    return x ^ (x >> 31);
}

__device__ static unsigned long long pattern(unsigned long long index, unsigned long long generation,
                                             unsigned long long seed) {
    return mixed(index ^ (generation << 40) ^ (seed << 56));
}

extern "C" __global__ void fill(unsigned long long *data, unsigned long long words, unsigned long long first_index,
                                unsigned long long generation, unsigned long long seed) {
    const unsigned long long stride = static_cast<unsigned long long>(gridDim.x) * blockDim.x;
    for (unsigned long long i = static_cast<unsigned long long>(blockIdx.x) * blockDim.x + threadIdx.x; i < words;
         i += stride)
        data[i] = pattern(first_index + i, generation, seed);
}

// result[0] += words that are wrong; result[1] += a checksum of all words (both exact in any order).
extern "C" __global__ void verify(const unsigned long long *data, unsigned long long words,
                                  unsigned long long first_index, unsigned long long generation,
                                  unsigned long long seed, unsigned long long *result) {
    const unsigned long long stride = static_cast<unsigned long long>(gridDim.x) * blockDim.x;
    unsigned long long wrong = 0;
    unsigned long long sum = 0;
    for (unsigned long long i = static_cast<unsigned long long>(blockIdx.x) * blockDim.x + threadIdx.x; i < words;
         i += stride) {
        const unsigned long long word = data[i];
        wrong += word != pattern(first_index + i, generation, seed);
        sum += word * (2 * (first_index + i) + 1);
    }
    if (wrong != 0)
        atomicAdd(&result[0], wrong);
    if (sum != 0)
        atomicAdd(&result[1], sum);
}

// The 64-bit linear congruential step of Knuth's MMIX.
extern "C" __global__ void step(unsigned long long *result) {
    step_counter = step_counter * 6364136223846793005ULL + 1442695040888963407ULL;
    *result = step_counter;
}
