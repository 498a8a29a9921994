// What the targets written against the CUDA runtime share: error checks. It must stay a thin skin over cudart.
#pragma once

#include <cuda_runtime.h>
#include <string>

#include "protocol.hpp"

namespace target {

inline void check(cudaError_t result, const char *call, const char *file, int line) {
    if (result != cudaSuccess)
        fail(std::string(file) + ":" + std::to_string(line) + ": " + call + " gave " + cudaGetErrorName(result) + " (" +
             std::to_string(static_cast<int>(result)) + ")");
}

#define TARGET_CHECK(call) ::target::check((call), #call, __FILE__, __LINE__)
// After a launch: an error of the launch itself shows here, one of the kernel at the next wait.
#define TARGET_CHECK_LAUNCH() ::target::check(cudaGetLastError(), "kernel launch", __FILE__, __LINE__)

} // namespace target
