// BLAKE3 over vector lanes: WF_LANES leaves, or WF_LANES parent nodes, at once. Included by one source file per
// instruction set (blake3_portable.cpp, blake3_avx2.cpp, blake3_avx512.cpp), each of which sets WF_LANES and its target
// first. Everything here has internal linkage: a copy compiled for AVX-512 must never be chosen by the linker for a
// machine without it.
#pragma once
#include "blake3_core.hpp"
#include "blake3_kernels.hpp"

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace woodfrog::blake3 {

#if WF_LANES == 8
// AVX2 has no rotate, but by whole bytes it is one shuffle instead of three instructions. (AVX-512 has one, which the
// compiler finds by itself.)
template <unsigned bits>
    requires(bits % 8 == 0)
struct Rotate<uint32_t __attribute__((vector_size(32))), bits> {
    typedef uint32_t Words __attribute__((vector_size(32)));
    typedef uint8_t Bytes __attribute__((vector_size(32)));
    static WF_HOST_DEVICE Words right(const Words &x) {
        Bytes mask;
        for (unsigned i = 0; i < 32; i++)
            mask[i] = static_cast<uint8_t>(i / 4 * 4 + (i + bits / 8) % 4);
        return reinterpret_cast<Words>(__builtin_shuffle(reinterpret_cast<Bytes>(x), mask));
    }
};
#endif

namespace {

constexpr unsigned lanes = WF_LANES;
typedef uint32_t Vector __attribute__((vector_size(4 * WF_LANES)));

template <typename Index> WF_HOST_DEVICE Vector shuffle(const Vector &a, const Vector &b, Index index) {
    Vector mask;
    for (unsigned i = 0; i < lanes; i++)
        mask[i] = index(i);
    return __builtin_shuffle(a, b, mask);
}

WF_HOST_DEVICE Vector broadcast(uint32_t value) {
    return Vector{} + value;
}

// Vectors are loaded from memory of any alignment; words are little-endian (asserted in blake3.cpp).
WF_HOST_DEVICE Vector load(const uint8_t *from) {
    Vector result;
    std::memcpy(&result, from, sizeof(result));
    return result;
}

// Four rows of which each 128-bit group holds 4 words: afterwards rows[c] holds, in group g, word c of group g of each
// of the four rows.
WF_HOST_DEVICE void transpose_groups(Vector &r0, Vector &r1, Vector &r2, Vector &r3) {
    auto low32 = [](unsigned i) { return (i & ~3u) + (i & 3) / 2 + (i & 1 ? lanes : 0); };
    auto high32 = [](unsigned i) { return (i & ~3u) + 2 + (i & 3) / 2 + (i & 1 ? lanes : 0); };
    auto low64 = [](unsigned i) { return (i & ~3u) + (i & 1) + (i & 2 ? lanes : 0); };
    auto high64 = [](unsigned i) { return (i & ~3u) + 2 + (i & 1) + (i & 2 ? lanes : 0); };
    const Vector a = shuffle(r0, r1, low32), b = shuffle(r0, r1, high32);
    const Vector c = shuffle(r2, r3, low32), d = shuffle(r2, r3, high32);
    r0 = shuffle(a, c, low64);
    r1 = shuffle(a, c, high64);
    r2 = shuffle(b, d, low64);
    r3 = shuffle(b, d, high64);
}

// m[i] becomes word i of the 64-byte block at each of the `lanes` pointers, one lane a pointer.
template <unsigned count>
WF_HOST_DEVICE void load_blocks(Vector (&m)[16], const uint8_t *const (&blocks)[count], size_t offset) {
    if constexpr (count == 4) {
        for (unsigned part = 0; part < 4; part++) {
            Vector *row = m + 4 * part;
            for (unsigned lane = 0; lane < 4; lane++)
                row[lane] = load(blocks[lane] + offset + 16 * part);
            transpose_groups(row[0], row[1], row[2], row[3]);
        }
    } else if constexpr (count == 8) {
        auto low = [](unsigned i) { return i < 4 ? i : i - 4 + lanes; };
        auto high = [](unsigned i) { return i < 4 ? i + 4 : i + lanes; };
        for (unsigned half = 0; half < 2; half++) {
            Vector row[8];
            for (unsigned lane = 0; lane < 8; lane++)
                row[lane] = load(blocks[lane] + offset + 32 * half);
            transpose_groups(row[0], row[1], row[2], row[3]);
            transpose_groups(row[4], row[5], row[6], row[7]);
            for (unsigned word = 0; word < 4; word++) {
                m[8 * half + word] = shuffle(row[word], row[4 + word], low);
                m[8 * half + 4 + word] = shuffle(row[word], row[4 + word], high);
            }
        }
    } else {
        static_assert(count == 16);
        // Groups of 128 bits: even ones of a then of b, odd ones of a then of b.
        auto even = [](unsigned i) { return (i / 4 % 2) * 8 + i % 4 + (i < 8 ? 0 : lanes); };
        auto odd = [](unsigned i) { return (i / 4 % 2) * 8 + 4 + i % 4 + (i < 8 ? 0 : lanes); };
        Vector row[16];
        for (unsigned lane = 0; lane < 16; lane++)
            row[lane] = load(blocks[lane] + offset);
        for (unsigned first = 0; first < 16; first += 4)
            transpose_groups(row[first], row[first + 1], row[first + 2], row[first + 3]);
        for (unsigned word = 0; word < 4; word++) {
            // row[4k + word] holds in group g word 4g+word of lanes 4k to 4k+3: a 4 by 4 transposition of groups.
            const Vector e01 = shuffle(row[word], row[4 + word], even), o01 = shuffle(row[word], row[4 + word], odd);
            const Vector e23 = shuffle(row[8 + word], row[12 + word], even);
            const Vector o23 = shuffle(row[8 + word], row[12 + word], odd);
            m[word] = shuffle(e01, e23, even);
            m[4 + word] = shuffle(o01, o23, even);
            m[8 + word] = shuffle(e01, e23, odd);
            m[12 + word] = shuffle(o01, o23, odd);
        }
    }
}

WF_HOST_DEVICE void store_values(const Vector (&cv)[key_words], size_t count, Value *out) {
    for (size_t lane = 0; lane < count; lane++)
        for (unsigned word = 0; word < key_words; word++)
            out[lane][word] = cv[word][lane];
}

// Chaining values of `count` whole leaves that follow each other at `input`; the first has index `counter`.
void hash_leaves(const uint8_t *input, size_t count, uint64_t counter, Value *out) {
    for (size_t done = 0; done < count; done += lanes) {
        const size_t here = count - done < lanes ? count - done : lanes;
        const uint8_t *blocks[lanes];
        Vector counter_low, counter_high;
        for (unsigned lane = 0; lane < lanes; lane++) { // lanes without a leaf repeat the last one
            const size_t leaf = done + (lane < here ? lane : here - 1);
            blocks[lane] = input + leaf * leaf_bytes;
            counter_low[lane] = static_cast<uint32_t>(counter + leaf);
            counter_high[lane] = static_cast<uint32_t>((counter + leaf) >> 32);
        }
        Vector cv[key_words];
        for (unsigned word = 0; word < key_words; word++)
            cv[word] = broadcast(initial_value(word));
        for (unsigned block = 0; block < blocks_per_leaf; block++) {
            const uint32_t flags =
                (block == 0 ? flag_chunk_start : 0) | (block == blocks_per_leaf - 1 ? flag_chunk_end : 0);
            Vector m[16];
            load_blocks(m, blocks, size_t{block} * block_bytes);
            // The next leaves, a line of each: the processor sees too many streams too close together to fetch ahead by
            // itself. Behind the end of the input this reads nothing.
            for (unsigned lane = 0; lane < lanes; lane++)
                __builtin_prefetch(blocks[lane] + size_t{lanes} * leaf_bytes + size_t{block} * block_bytes);
            compress(cv, m, counter_low, counter_high, broadcast(block_bytes), broadcast(flags));
        }
        store_values(cv, here, out + done);
    }
}

// out[i] becomes the parent of children[2i] and children[2i+1]; out may be children.
void hash_parents(const Value *children, size_t count, Value *out) {
    for (size_t done = 0; done < count; done += lanes) {
        const size_t here = count - done < lanes ? count - done : lanes;
        const uint8_t *blocks[lanes];
        for (unsigned lane = 0; lane < lanes; lane++)
            blocks[lane] = reinterpret_cast<const uint8_t *>(children[2 * (done + (lane < here ? lane : here - 1))]);
        Vector cv[key_words];
        for (unsigned word = 0; word < key_words; word++)
            cv[word] = broadcast(initial_value(word));
        Vector m[16];
        load_blocks(m, blocks, 0);
        compress(cv, m, broadcast(0), broadcast(0), broadcast(block_bytes), broadcast(flag_parent));
        store_values(cv, here, out + done);
    }
}

} // namespace
} // namespace woodfrog::blake3
