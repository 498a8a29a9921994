// Kernels of driver_api: integer arithmetic only, so that every result is exact.

__device__ unsigned int rounds_done = 0;

extern "C" __global__ void stir(unsigned int *data, unsigned int words, unsigned int round) {
    const unsigned int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < words) {
        unsigned int x = data[i] + i * 2654435761u + round; // Knuth's multiplicative constant
        x ^= x >> 16;
        x *= 0x7feb352du; // constants of a published 32-bit integer hash (C. Wellons)
        x ^= x >> 15;
        x *= 0x846ca68bu;
        data[i] = x ^ (x >> 16);
    }
    if (i == 0)
        atomicAdd(&rounds_done, 1u); // the streams run at the same time
}

// to[i] += from[(i + shift) % words]
extern "C" __global__ void blend(unsigned int *to, const unsigned int *from, unsigned int words, unsigned int shift) {
    const unsigned int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < words)
        to[i] += from[(i + shift) % words];
}

// Adds a row-pitched rectangle of words to a flat array.
extern "C" __global__ void add_rows(unsigned int *flat, const unsigned char *rows, unsigned long long pitch_bytes,
                                    unsigned int width, unsigned int height) {
    const unsigned int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= width * height)
        return;
    const unsigned char *row = rows + pitch_bytes * (i / width);
    flat[i] += reinterpret_cast<const unsigned int *>(row)[i % width];
}

// Blocks must be whole warps. Sums of integers are exact, whatever their order.
extern "C" __global__ void checksum(const unsigned int *data, unsigned int words, unsigned long long *sum) {
    const unsigned int i = blockIdx.x * blockDim.x + threadIdx.x;
    unsigned long long own = i < words ? static_cast<unsigned long long>(data[i]) * (2ULL * i + 1ULL) : 0ULL;
    for (int distance = 16; distance > 0; distance /= 2)
        own += __shfl_down_sync(0xffffffffu, own, distance);
    if (threadIdx.x % 32 == 0 && own != 0)
        atomicAdd(sum, own);
}
