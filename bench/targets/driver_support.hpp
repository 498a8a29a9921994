// What the targets that call the CUDA driver API directly share: error checks and a launch with typed arguments.
//
// It must stay a thin skin: these targets exist to show what woodfrog does to plain driver calls.
#pragma once

#include <array>
#include <cuda.h>
#include <string>

#include "protocol.hpp"

namespace target {

inline void check(CUresult result, const char *call, const char *file, int line) {
    if (result == CUDA_SUCCESS)
        return;
    const char *name = nullptr;
    cuGetErrorName(result, &name);
    fail(std::string(file) + ":" + std::to_string(line) + ": " + call + " gave " + (name ? name : "an unknown error") +
         " (" + std::to_string(static_cast<int>(result)) + ")");
}

#define TARGET_CHECK(call) ::target::check((call), #call, __FILE__, __LINE__)

// Launches with the arguments given, which must have exactly the kernel's parameter types.
template <typename... Arguments>
void launch(CUfunction kernel, unsigned blocks, unsigned threads, CUstream stream, Arguments... arguments) {
    std::array<void *, sizeof...(Arguments) + 1> pointers = {static_cast<void *>(&arguments)..., nullptr};
    TARGET_CHECK(cuLaunchKernel(kernel, blocks, 1, 1, threads, 1, 1, 0, stream, pointers.data(), nullptr));
}

inline CUcontext create_context(CUdevice device) {
    CUcontext context = nullptr;
#if CUDA_VERSION >= 13000
    TARGET_CHECK(cuCtxCreate(&context, nullptr, 0, device));
#else
    TARGET_CHECK(cuCtxCreate(&context, 0, device));
#endif
    return context;
}

inline void pop_context() {
    CUcontext popped = nullptr;
    TARGET_CHECK(cuCtxPopCurrent(&popped));
}

inline CUfunction kernel_of(CUmodule module, const char *name) {
    CUfunction function = nullptr;
    TARGET_CHECK(cuModuleGetFunction(&function, module, name));
    return function;
}

// Enough blocks to fill the device with threads that walk over the data in strides.
inline unsigned blocks_for(CUdevice device, uint64_t elements, unsigned threads) {
    int multiprocessors = 0;
    TARGET_CHECK(cuDeviceGetAttribute(&multiprocessors, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, device));
    const uint64_t wanted = (elements + threads - 1) / threads;
    const uint64_t full = 8ULL * static_cast<uint64_t>(multiprocessors);
    return static_cast<unsigned>(wanted < 1 ? 1 : (wanted < full ? wanted : full));
}

} // namespace target

// The PTX that nvcc made of the kernels beside a target, as a NUL-terminated text inside the program. The build gives
// its path (quoted) as TARGET_PTX.
#define TARGET_EMBED_PTX(symbol)                                                                                       \
    asm(".pushsection .rodata\n.balign 16\n.global " #symbol "\n" #symbol ":\n.incbin \"" TARGET_PTX                   \
        "\"\n.byte 0\n.popsection\n");                                                                                 \
    extern "C" const char symbol[]
