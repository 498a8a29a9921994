// The implementations that blake3.cpp chooses from at run time. Private to BLAKE3. It must not include blake3_core.hpp:
// that has to be compiled for the instruction set that the including file chooses after it.
#pragma once
#include <cstddef>
#include <cstdint>

namespace woodfrog::blake3 {

using Value = uint32_t[8]; // a chaining value

struct Kernels {
    unsigned lanes;
    const char *name;
    void (*hash_leaves)(const uint8_t *input, size_t count, uint64_t counter, Value *out);
    void (*hash_parents)(const Value *children, size_t count, Value *out);
};

extern const Kernels kernels_portable;
#if defined(__x86_64__)
extern const Kernels kernels_avx2;
extern const Kernels kernels_avx512;
#endif

} // namespace woodfrog::blake3
