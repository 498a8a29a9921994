// Copies that device memory makes by itself: scattered chunks side by side into a staging buffer, so that one large
// transfer takes them to the host; and a kernel that only reads, the ceiling that hashing is measured against.
#include "tables.hpp"

using namespace woodfrog::kernels;

// Block (slice, row): slice after slice of a row's chunk into slot number `row`. What the chunk leaves of its slot
// becomes zero, so that nothing of an earlier use of the buffer reaches the host. The staging buffer is aligned.
extern "C" __global__ void __launch_bounds__(gather_threads)
    woodfrog_gather(const GatherRow *rows, uint64_t slot_bytes, uint64_t staging) {
    const GatherRow row = rows[blockIdx.y];
    const uint64_t slot = staging + blockIdx.y * slot_bytes;
    const uint64_t whole = row.address % sizeof(uint4) == 0 ? row.size_bytes / sizeof(uint4) * sizeof(uint4) : 0;
    const uint64_t begin = uint64_t{blockIdx.x} * gather_slice_bytes;
    constexpr unsigned vectors = gather_slice_bytes / gather_threads / sizeof(uint4);
    uint4 words[vectors];
#pragma unroll
    for (unsigned i = 0; i < vectors; i++) { // all loads are under way before the first word is stored
        const uint64_t offset = begin + (i * gather_threads + threadIdx.x) * sizeof(uint4);
        words[i] = offset < whole ? __ldg(reinterpret_cast<const uint4 *>(row.address + offset)) : uint4{};
    }
#pragma unroll
    for (unsigned i = 0; i < vectors; i++) {
        const uint64_t offset = begin + (i * gather_threads + threadIdx.x) * sizeof(uint4);
        if (offset >= slot_bytes)
            continue;
        if (offset >= whole && offset < row.size_bytes) { // the end of a short chunk, or an address of its own kind
            uint8_t bytes[sizeof(uint4)] = {};
            for (unsigned byte = 0; byte < sizeof(uint4) && offset + byte < row.size_bytes; byte++)
                bytes[byte] = *reinterpret_cast<const uint8_t *>(row.address + offset + byte);
            for (unsigned byte = 0; byte < sizeof(uint4); byte++)
                *reinterpret_cast<uint8_t *>(slot + offset + byte) = bytes[byte];
        } else {
            *reinterpret_cast<uint4 *>(slot + offset) = words[i];
        }
    }
}

// Reads `count` 16-byte words. The sum is stored if it has a value that nobody expects of it, so the compiler must keep
// the loads.
extern "C" __global__ void __launch_bounds__(read_threads)
    woodfrog_read(uint64_t address, uint64_t count, uint64_t sink) {
    const auto *words = reinterpret_cast<const uint4 *>(address);
    const uint64_t step = uint64_t{gridDim.x} * read_threads;
    uint32_t sum = 0;
    uint64_t i = uint64_t{blockIdx.x} * read_threads + threadIdx.x;
    for (; i + 3 * step < count; i += 4 * step) {
        uint4 v[4];
#pragma unroll
        for (unsigned part = 0; part < 4; part++)
            v[part] = __ldcs(words + i + part * step);
#pragma unroll
        for (unsigned part = 0; part < 4; part++)
            sum += v[part].x ^ v[part].y ^ v[part].z ^ v[part].w;
    }
    for (; i < count; i += step) {
        const uint4 v = __ldcs(words + i);
        sum += v.x ^ v.y ^ v.z ^ v.w;
    }
    if (sum == 0x9E3779B9)
        *reinterpret_cast<uint32_t *>(sink) = sum;
}
