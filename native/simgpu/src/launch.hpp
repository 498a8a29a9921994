// Kernel launches: from the arguments of a launch call, or of a graph node, to a piece of work.
#pragma once

#include <memory>

#include <cuda.h>

#include "module.hpp"
#include "work.hpp"

namespace simgpu {

// Copies the parameters that either `parameters` (a pointer for each) or `extra` (a packed buffer) gives. Throws the
// CUresult a real driver answers for a launch that does not fit the kernel or the device.
std::shared_ptr<KernelWork> make_kernel_work(std::shared_ptr<Function> function, const unsigned grid[3],
                                             const unsigned block[3], unsigned dynamic_shared_bytes, void **parameters,
                                             void **extra);
void check_cooperative(const KernelWork &work);
// How many blocks of the kernel fit on one multiprocessor.
int active_blocks(const Function &function, int block_threads, size_t dynamic_shared_bytes);

} // namespace simgpu
