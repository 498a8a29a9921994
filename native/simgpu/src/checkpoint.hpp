// The driver's own checkpoint of this process: the state machine that another process drives through the service.
//
//   running → lock → locked → checkpoint → checkpointed → restore → locked → unlock → running
//
// Called by the service thread only, one call at a time. A call in the wrong state changes nothing.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include <cuda.h>

namespace simgpu {

using GpuPairs = std::vector<std::pair<CUuuid, CUuuid>>; // old → new

CUprocessState checkpoint_state();
// Closes the gate and waits for all submitted work. CUDA_ERROR_NOT_READY, and running on, after `timeout_ms`; 0 waits
// for ever.
CUresult checkpoint_lock(unsigned timeout_ms);
// Takes all device memory away. CUDA_ERROR_NOT_SUPPORTED, still locked, when there is managed memory.
CUresult checkpoint_save();
// Brings it back, onto other devices if `pairs` say so. CUDA_ERROR_OUT_OF_MEMORY, still checkpointed, when a device has
// no room; CUDA_ERROR_NOT_SUPPORTED, the process lost, when imported memory was mapped at the checkpoint.
CUresult checkpoint_load(const GpuPairs &pairs);
CUresult checkpoint_unlock();

// Custom storage (CUDA 13.4). From lend to complete the caller has copies of the descriptors of all device memory,
// which it closes; the process is `checkpointing` or `restoring` meanwhile. What was saved that way comes back that way
// only.
inline constexpr auto kCheckpointing = static_cast<CUprocessState>(4); // of CUDA 13.4's CUprocessState
inline constexpr auto kRestoring = static_cast<CUprocessState>(5);
CUresult checkpoint_lend(std::vector<int> &descriptors);
CUresult checkpoint_lend_back(const GpuPairs &pairs, std::vector<int> &descriptors);
CUresult checkpoint_complete();
// Back to where lend or lend_back began.
CUresult checkpoint_abandon();
// Which loan this is: each has a number of its own.
unsigned checkpoint_loan();

} // namespace simgpu
