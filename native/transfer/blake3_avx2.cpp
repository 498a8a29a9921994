// BLAKE3 with eight lanes for AVX2; to be called only where the processor has it (blake3.cpp asks).
#if defined(__x86_64__)
#include "blake3_kernels.hpp"

#include <cstddef>
#include <cstdint>
#include <cstring>

#pragma GCC target("avx2")
#define WF_LANES 8
#include "blake3_lanes.hpp"

namespace woodfrog::blake3 {

const Kernels kernels_avx2{lanes, "avx2", hash_leaves, hash_parents};

} // namespace woodfrog::blake3
#endif
