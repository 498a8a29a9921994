// Finding the PTX in what applications give to cuModuleLoadData: PTX text itself, or a fatbin container as nvcc makes
// it, compressed or not. A machine-code image (cubin) is of no use to an interpreter.
#pragma once

#include <string>

#include <cuda.h>

namespace simgpu {

// Copies the PTX out of `image`, which has no length: its own headers or a final NUL bound it. Throws
// CUDA_ERROR_NO_BINARY_FOR_GPU when there is no PTX that this device can run, CUDA_ERROR_INVALID_IMAGE when it is
// nothing known; both say why on stderr.
std::string ptx_of_image(const void *image);

} // namespace simgpu
