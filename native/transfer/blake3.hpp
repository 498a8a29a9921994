// BLAKE3 (hash mode, 32 bytes) of memory, on one thread with the widest vectors this processor has. The same digest
// as any other implementation gives; a chunk's digest is its address in the store and its integrity check.
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace woodfrog::blake3 {

using Digest = std::array<uint8_t, 32>;

// The digest of [data, data+size). Uses 32 bytes of heap for each MiB of data; throws only std::bad_alloc.
Digest hash(const void *data, size_t size);

// The same with one named implementation ("portable", "avx2", "avx512"), for tests and measurements.
// std::invalid_argument when this processor lacks it.
Digest hash_with(const std::string &implementation, const void *data, size_t size);

// What this processor can run, the chosen one first.
std::vector<std::string> implementations();

} // namespace woodfrog::blake3
