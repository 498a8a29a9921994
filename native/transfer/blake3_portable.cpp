// BLAKE3 with four lanes, in what every x86-64 and aarch64 has.
#include "blake3_kernels.hpp"

#include <cstddef>
#include <cstdint>
#include <cstring>

#define WF_LANES 4
#include "blake3_lanes.hpp"

namespace woodfrog::blake3 {

const Kernels kernels_portable{lanes, "portable", hash_leaves, hash_parents};

} // namespace woodfrog::blake3
