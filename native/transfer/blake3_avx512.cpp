// BLAKE3 with sixteen lanes for AVX-512; to be called only where the processor has it (blake3.cpp asks).
#if defined(__x86_64__)
#include "blake3_kernels.hpp"

#include <cstddef>
#include <cstdint>
#include <cstring>

#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq")
#define WF_LANES 16
#include "blake3_lanes.hpp"

namespace woodfrog::blake3 {

const Kernels kernels_avx512{lanes, "avx512", hash_leaves, hash_parents};

} // namespace woodfrog::blake3
#endif
