// BLAKE3 of many chunks of device memory in one launch. A thread hashes a leaf of 1 KiB; a block hashes a tile, which
// is as many neighbouring leaves as it has threads, and joins their chaining values in shared memory as far as chunks
// reach: small chunks end here, of larger ones a node a tile is left, which a second kernel joins. README.md says why
// it is so and what it may cost. It must never read a byte outside its rows.
#include "../blake3_core.hpp"
#include "tables.hpp"

using namespace woodfrog::blake3;
using namespace woodfrog::kernels;

namespace {

using Word = uint32_t;

__device__ __forceinline__ void initialise(Word (&cv)[key_words]) {
#pragma unroll
    for (unsigned i = 0; i < key_words; i++)
        cv[i] = initial_value(i);
}

// 16 bytes that nobody writes meanwhile; the second half of the 128 bytes around them will be wanted next.
__device__ __forceinline__ uint4 load_vector(uint64_t address) {
    uint4 v;
    asm volatile("ld.global.nc.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(address));
    return v;
}

__device__ __forceinline__ void put(Word (&m)[16], unsigned part, const uint4 &v) {
    m[4 * part] = v.x;
    m[4 * part + 1] = v.y;
    m[4 * part + 2] = v.z;
    m[4 * part + 3] = v.w;
}

// `size` bytes from 0 to 64 at any address; the rest of the block is zero.
__device__ __noinline__ void load_bytes(Word (&m)[16], uint64_t address, unsigned size) {
#pragma unroll
    for (unsigned i = 0; i < 16; i++) {
        Word word = 0;
#pragma unroll
        for (unsigned byte = 0; byte < 4; byte++)
            if (4 * i + byte < size)
                word |= Word{*reinterpret_cast<const uint8_t *>(address + 4 * i + byte)} << (8 * byte);
        m[i] = word;
    }
}

// A leaf of `size` bytes, 0 < size <= 1024, block by block from where it lies.
__device__ __forceinline__ void hash_leaf(Word (&cv)[key_words], uint64_t address, unsigned size, unsigned counter,
                                          bool root) {
    const bool aligned = address % sizeof(uint4) == 0;
#pragma unroll 1
    for (unsigned offset = 0; offset < size; offset += block_bytes) {
        const unsigned here = min(size - offset, block_bytes);
        const bool last = size - offset <= block_bytes;
        Word m[16];
        if (aligned && here == block_bytes) {
#pragma unroll
            for (unsigned part = 0; part < 4; part++)
                put(m, part, load_vector(address + offset + part * sizeof(uint4)));
        } else {
            Word rest[16]; // apart from m, which so stays in registers
            load_bytes(rest, address + offset, here);
#pragma unroll
            for (unsigned i = 0; i < 16; i++)
                m[i] = rest[i];
        }
        const Word flags =
            (offset == 0 ? flag_chunk_start : 0) | (last ? flag_chunk_end : 0) | (last && root ? flag_root : 0);
        compress<Word>(cv, m, counter, 0u, here, flags);
    }
}

// ── 32 whole leaves of a warp, fetched together ──────────────────────────────────────────────────────────────────

// Two buffers, each for `blocks` blocks of the 32 leaves. Neighbouring lanes fetch neighbouring 16-byte words, so that
// each request to memory is of whole sectors; the words of a leaf are swapped about (swizzled) so that neither writing
// nor reading meets a bank twice.
template <unsigned blocks> struct Stage {
    static constexpr unsigned words = 4 * blocks; // of 16 bytes, of a leaf
    uint4 data[2][32 * words];

    static __device__ __forceinline__ unsigned place(unsigned leaf, unsigned word) {
        const unsigned swap = (words == 4 ? leaf / 2 : leaf) % words;
        return leaf * words + (word ^ swap);
    }

    __device__ __forceinline__ void fetch(unsigned buffer, uint64_t leaves, unsigned first_block) {
        const unsigned lane = threadIdx.x % 32;
        const unsigned word = lane % words;
#pragma unroll
        for (unsigned i = 0; i < words; i++) {
            const unsigned leaf = i * (32 / words) + lane / words;
            const uint64_t from = leaves + leaf * leaf_bytes + first_block * block_bytes + word * sizeof(uint4);
            const auto to = static_cast<uint32_t>(__cvta_generic_to_shared(&data[buffer][place(leaf, word)]));
            asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
        }
        asm volatile("cp.async.commit_group;" ::: "memory");
    }

    __device__ __forceinline__ void read(Word (&m)[16], unsigned buffer, unsigned block) const {
#pragma unroll
        for (unsigned part = 0; part < 4; part++)
            put(m, part, data[buffer][place(threadIdx.x % 32, 4 * block + part)]);
    }
};

// The leaf of each lane; `leaves` is the address of the first lane's.
template <unsigned blocks>
__device__ __forceinline__ void hash_leaves(Word (&cv)[key_words], Stage<blocks> &stage, uint64_t leaves,
                                            unsigned counter) {
    stage.fetch(0, leaves, 0);
#pragma unroll 1
    for (unsigned first = 0; first < blocks_per_leaf; first += blocks) {
        const unsigned buffer = first / blocks % 2;
        if (first + blocks < blocks_per_leaf) {
            stage.fetch(buffer ^ 1, leaves, first + blocks);
            asm volatile("cp.async.wait_group 1;" ::: "memory");
        } else {
            asm volatile("cp.async.wait_group 0;" ::: "memory");
        }
        __syncwarp(); // the others' words have come too
#pragma unroll 1
        for (unsigned block = 0; block < blocks; block++) {
            Word m[16];
            stage.read(m, buffer, block);
            const unsigned number = first + block;
            const Word flags =
                (number == 0 ? flag_chunk_start : 0) | (number == blocks_per_leaf - 1 ? flag_chunk_end : 0);
            compress<Word>(cv, m, counter, 0u, Word{block_bytes}, flags);
        }
        __syncwarp(); // all have read before the buffer is filled again
    }
}

// ── the tree ─────────────────────────────────────────────────────────────────────────────────────────────────────

// Nodes of a block: word w of node i at [w][i], so that neighbouring threads use neighbouring banks.
template <unsigned capacity> struct Nodes {
    Word words[2][key_words][capacity]; // a level, and the next one

    __device__ __forceinline__ void set(unsigned i, const Word (&cv)[key_words]) {
#pragma unroll
        for (unsigned w = 0; w < key_words; w++)
            words[0][w][i] = cv[w];
    }
};

// What is joined: `count` nodes in segments of 1 << segment_log2, of which the last may have fewer (a segment is a
// chunk or, if `whole` is false, a part of one). A node without a neighbour goes up unchanged: that gives BLAKE3's
// tree. Afterwards node s of the level returned is segment s's. Called by all threads of the block; only warp 0 returns
// from it, with true.
template <unsigned capacity>
__device__ __forceinline__ bool join(Nodes<capacity> &nodes, unsigned count, unsigned segment_log2, bool whole,
                                     unsigned &level) {
    const unsigned last_segment = (count - 1) >> segment_log2;
    unsigned last_count = count - (last_segment << segment_log2);
    bool alone = false; // warp 0 goes on by itself
#pragma unroll 1
    for (level = 0;; level++) {
        if (alone) {
            __syncwarp();
        } else {
            __syncthreads();
            if (count <= 64 || level == segment_log2) {
                if (threadIdx.x >= 32)
                    return false;
                alone = true;
            }
        }
        if (level == segment_log2)
            return true;
        const auto &from = nodes.words[level % 2];
        auto &to = nodes.words[(level + 1) % 2];
        const unsigned i = threadIdx.x;
        if (2 * i + 1 < count) {
            Word m[16], cv[key_words];
#pragma unroll
            for (unsigned w = 0; w < key_words; w++) {
                const uint2 pair = *reinterpret_cast<const uint2 *>(&from[w][2 * i]);
                m[w] = pair.x;
                m[w + key_words] = pair.y;
            }
            initialise(cv);
            const unsigned here =
                (2 * i) >> (segment_log2 - level) == last_segment ? last_count : 1u << (segment_log2 - level);
            compress<Word>(cv, m, 0, 0u, Word{block_bytes}, flag_parent | (whole && here == 2 ? flag_root : 0));
#pragma unroll
            for (unsigned w = 0; w < key_words; w++)
                to[w][i] = cv[w];
        } else if (2 * i < count) {
#pragma unroll
            for (unsigned w = 0; w < key_words; w++)
                to[w][i] = from[w][2 * i];
        }
        count = (count + 1) / 2;
        last_count = (last_count + 1) / 2;
    }
}

// Warp 0 writes the first `count` nodes of a level.
template <unsigned capacity>
__device__ __forceinline__ void write_nodes(const Nodes<capacity> &nodes, unsigned level, unsigned count, Word *to) {
    for (unsigned i = threadIdx.x; i < count * key_words; i += 32)
        to[i] = nodes.words[level % 2][i % key_words][i / key_words];
}

// The last row whose `first` is not above `number`.
template <uint32_t HashRow::*first>
__device__ __forceinline__ HashRow find_row(const HashRow *rows, uint32_t row_count, uint32_t number) {
    uint32_t low = 0, high = row_count;
    while (high - low > 1) {
        const uint32_t middle = (low + high) / 2;
        if (rows[middle].*first <= number)
            low = middle;
        else
            high = middle;
    }
    return rows[low];
}

// ── kernels ──────────────────────────────────────────────────────────────────────────────────────────────────────

// stage_blocks 0: each thread reads its leaf from where it lies.
template <unsigned threads, unsigned stage_blocks>
__device__ __forceinline__ void hash_tile(const HashRow *rows, uint32_t row_count, uint32_t chunk_log2, Word *tiles,
                                          Word *digests) {
    static_assert(threads == 128 || threads == 256);
    __shared__ Nodes<threads> nodes;
    constexpr unsigned tile_log2 = threads == 128 ? 7 : 8;
    const HashRow row = find_row<&HashRow::first_tile>(rows, row_count, blockIdx.x);
    const uint32_t first_leaf = (blockIdx.x - row.first_tile) << tile_log2;
    const auto leaf_count = static_cast<uint32_t>((row.size_bytes + leaf_bytes - 1) / leaf_bytes);
    const uint32_t count = min(threads, leaf_count - first_leaf); // of this tile
    const uint32_t chunk_mask = (1u << chunk_log2) - 1;

    const uint32_t leaf = first_leaf + threadIdx.x;
    Word cv[key_words];
    initialise(cv);
    bool done = false;
    if constexpr (stage_blocks > 0) {
        __shared__ Stage<stage_blocks> stages[threads / 32];
        const uint32_t warp_leaf = leaf - threadIdx.x % 32;
        const uint64_t address = row.address + uint64_t{warp_leaf} * leaf_bytes;
        if (row.address % sizeof(uint4) == 0 && uint64_t{warp_leaf + 32} * leaf_bytes <= row.size_bytes) {
            hash_leaves(cv, stages[threadIdx.x / 32], address, leaf & chunk_mask);
            done = true;
        }
    }
    if (!done && threadIdx.x < count) {
        const uint64_t offset = uint64_t{leaf} * leaf_bytes;
        const auto size = static_cast<unsigned>(min(row.size_bytes - offset, uint64_t{leaf_bytes}));
        const bool root = (leaf & chunk_mask) == 0 && leaf + 1 == leaf_count; // a chunk of one leaf
        hash_leaf(cv, row.address + offset, size, leaf & chunk_mask, root);
    }
    if (threadIdx.x < count)
        nodes.set(threadIdx.x, cv);

    // A chunk that reaches beyond this tile leaves a node; all others end here.
    const uint32_t chunk_first = first_leaf & ~chunk_mask;
    const bool whole = chunk_log2 <= tile_log2 || (chunk_first == first_leaf && leaf_count - first_leaf <= threads);
    const unsigned segment_log2 = min(chunk_log2, tile_log2);
    unsigned level;
    if (!join(nodes, count, segment_log2, whole, level))
        return;
    const unsigned segments = ((count - 1) >> segment_log2) + 1;
    if (whole)
        write_nodes(nodes, level, segments,
                    digests + uint64_t{row.first_chunk + (first_leaf >> chunk_log2)} * key_words);
    else
        write_nodes(nodes, level, 1, tiles + uint64_t{blockIdx.x} * key_words);
}

} // namespace

// Joins the tiles of a chunk, one block a chunk. A chunk of one tile has its digest already.
extern "C" __global__ void __launch_bounds__(join_threads)
    woodfrog_join_tiles(const HashRow *rows, uint32_t row_count, uint32_t chunk_log2, uint32_t tile_log2,
                        const Word *tiles, Word *digests) {
    __shared__ Nodes<most_hash_leaves / fewest_tile_leaves> nodes;
    const HashRow row = find_row<&HashRow::first_chunk>(rows, row_count, blockIdx.x);
    const unsigned tiles_log2 = chunk_log2 - tile_log2; // of a whole chunk
    const uint32_t first = (blockIdx.x - row.first_chunk) << tiles_log2;
    const uint64_t tile_bytes = uint64_t{leaf_bytes} << tile_log2;
    const auto row_tiles = static_cast<uint32_t>((row.size_bytes + tile_bytes - 1) / tile_bytes);
    const unsigned count = min(1u << tiles_log2, row_tiles - first);
    if (count < 2)
        return;
    const Word *from = tiles + uint64_t{row.first_tile + first} * key_words;
    for (unsigned i = threadIdx.x; i < count * key_words; i += join_threads)
        nodes.words[0][i % key_words][i / key_words] = from[i];
    unsigned level;
    if (join(nodes, count, tiles_log2, true, level))
        write_nodes(nodes, level, 1, digests + uint64_t{blockIdx.x} * key_words);
}

// The name says how: leaves are fetched by the warp together (staged), or read from where they lie (direct); threads of
// a block. Rotations by multiplication and by byte permutation were tried too, and were 1 to 5 % slower on an H200.
#define WF_HASH_KERNEL(name, stage_blocks, threads, blocks_a_multiprocessor)                                           \
    extern "C" __global__ void __launch_bounds__(threads, blocks_a_multiprocessor) woodfrog_hash_##name##_##threads(   \
        const HashRow *rows, uint32_t row_count, uint32_t chunk_log2, Word *tiles, Word *digests) {                    \
        hash_tile<threads, stage_blocks>(rows, row_count, chunk_log2, tiles, digests);                                 \
    }
WF_HASH_KERNEL(staged, 1, 256, 4)
WF_HASH_KERNEL(direct, 0, 128, 8)
