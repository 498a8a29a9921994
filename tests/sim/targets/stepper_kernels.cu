// Kernels of the stepper target: every element of a buffer is known at every step, so that each step checks the whole
// buffer before it changes it. Compiled to PTX, run through the driver API.
#include <cstdint>

// A counter in the module's own global memory: it is the driver's to save, not the interposer's.
__device__ unsigned long long stepper_steps;

// The value of element `index` of buffer `seed` before any step.
__device__ uint32_t pattern(uint32_t seed, uint32_t index) {
    uint32_t value = index * 2654435761u + seed * 40503u;
    value ^= value >> 15;
    return value * 2246822519u;
}

extern "C" __global__ void fill(uint32_t *buffer, uint32_t count, uint32_t seed) {
    for (uint32_t index = blockIdx.x * blockDim.x + threadIdx.x; index < count; index += gridDim.x * blockDim.x) {
        buffer[index] = pattern(seed, index);
    }
}

// Adds one to every element that has its value of step `step`, and counts the others in `errors`.
extern "C" __global__ void step(uint32_t *buffer, uint32_t count, uint32_t seed, uint32_t step, uint32_t *errors) {
    for (uint32_t index = blockIdx.x * blockDim.x + threadIdx.x; index < count; index += gridDim.x * blockDim.x) {
        const uint32_t value = buffer[index];
        if (value != pattern(seed, index) + step) {
            atomicAdd(errors, 1u);
        }
        buffer[index] = value + 1;
    }
    if (blockIdx.x == 0 && threadIdx.x == 0) {
        atomicAdd(&stepper_steps, 1ull);
    }
}

extern "C" __global__ void check(const uint32_t *buffer, uint32_t count, uint32_t seed, uint32_t step,
                                 uint32_t *errors) {
    for (uint32_t index = blockIdx.x * blockDim.x + threadIdx.x; index < count; index += gridDim.x * blockDim.x) {
        if (buffer[index] != pattern(seed, index) + step) {
            atomicAdd(errors, 1u);
        }
    }
}

extern "C" __global__ void tiny(uint32_t *counter) {
    if (threadIdx.x == 0) {
        *counter += 1;
    }
}
