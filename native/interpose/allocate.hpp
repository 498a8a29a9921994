// cuMemAlloc and its family, answered with memory that can be taken away and given back behind its address.
#pragma once

#include "driver.hpp"
#include "memory.hpp"

namespace woodfrog::interpose {

enum class Answer { ours, driver, refused };

// `ours`: *address is a new allocation of `size_bytes` in the current context. `driver`: this one is the driver's to
// answer (nothing was done). `refused`: *result is the answer.
Answer allocate(size_t size_bytes, CUdeviceptr *address, CUresult *result);

// Frees an allocation of ours after all work that may use it. `*ours` is false when the address is none of ours and
// nothing was done.
CUresult free_allocation(CUdeviceptr address, bool *ours);

// Frees that were put off because a capture was active. Called when the last one has ended.
void free_what_was_put_off();

// The most free memory of a device that is kept for the next allocation.
inline constexpr size_t kSpareBytes = size_t{32} << 20;
// Making a block costs about the same whatever its size: many small ones save more calls than one large one.
inline constexpr size_t kLargestSpareBytes = size_t{8} << 20;

} // namespace woodfrog::interpose
