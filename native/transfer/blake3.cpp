// The tree of BLAKE3 over the lane kernels. Leaves are hashed a piece of 1024 at a time, and pairs are joined level by
// level with an odd node passed up unchanged, which gives BLAKE3's tree (left subtrees are whole powers of two) without
// recursion. It must never write to the input or look past its end.
#include "blake3.hpp"

#include "blake3_core.hpp"
#include "blake3_kernels.hpp"

#include <bit>
#include <cstring>
#include <stdexcept>

static_assert(std::endian::native == std::endian::little, "words are loaded as they lie in memory");

namespace woodfrog::blake3 {
namespace {

constexpr size_t piece_leaves = 1024; // 1 MiB of input; a power of two, so that a piece is a whole subtree
constexpr size_t piece_bytes = piece_leaves * leaf_bytes;

std::vector<const Kernels *> supported() {
    std::vector<const Kernels *> found;
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512dq"))
        found.push_back(&kernels_avx512);
    if (__builtin_cpu_supports("avx2"))
        found.push_back(&kernels_avx2);
#endif
    found.push_back(&kernels_portable);
    return found;
}

const Kernels &chosen() {
    static const Kernels &best = *supported().front();
    return best;
}

// One copy of the unrolled rounds for single blocks; leaves and parents by the thousand go through the lane kernels.
__attribute__((noinline)) void compress_block(Value &cv, const uint32_t (&m)[16], uint64_t counter, uint32_t length,
                                              uint32_t flags) {
    compress(cv, m, static_cast<uint32_t>(counter), static_cast<uint32_t>(counter >> 32), length, flags);
}

// A leaf of any size from 0 to 1024 bytes, one block at a time. `root` if it is the whole input.
void hash_leaf(const uint8_t *input, size_t size, uint64_t counter, bool root, Value &cv) {
    for (unsigned word = 0; word < key_words; word++)
        cv[word] = initial_value(word);
    size_t offset = 0;
    do {
        const size_t here = size - offset < block_bytes ? size - offset : block_bytes;
        const bool last = offset + here == size;
        uint32_t m[16] = {};
        if (here > 0)
            std::memcpy(m, input + offset, here);
        const uint32_t flags =
            (offset == 0 ? flag_chunk_start : 0) | (last ? flag_chunk_end : 0) | (last && root ? flag_root : 0);
        compress_block(cv, m, counter, static_cast<uint32_t>(here), flags);
        offset += here;
    } while (offset < size);
}

// Joins neighbours until at most `until` nodes are left; returns how many there are.
size_t reduce(const Kernels &kernels, Value *nodes, size_t count, size_t until) {
    while (count > until) {
        kernels.hash_parents(nodes, count / 2, nodes);
        if (count % 2)
            std::memcpy(nodes[count / 2], nodes[count - 1], sizeof(Value));
        count = count / 2 + count % 2;
    }
    return count;
}

// All nodes of up to one piece, whose first leaf has index `counter`.
size_t hash_piece(const Kernels &kernels, const uint8_t *input, size_t size, uint64_t counter, Value *nodes) {
    const size_t whole = size / leaf_bytes;
    kernels.hash_leaves(input, whole, counter, nodes);
    if (size % leaf_bytes == 0)
        return whole;
    hash_leaf(input + whole * leaf_bytes, size % leaf_bytes, counter + whole, false, nodes[whole]);
    return whole + 1;
}

Digest to_digest(const Value &cv) {
    Digest digest;
    std::memcpy(digest.data(), cv, sizeof(cv));
    return digest;
}

Digest hash_tree(const Kernels &kernels, const uint8_t *input, size_t size) {
    Value cv;
    if (size <= leaf_bytes) {
        hash_leaf(input, size, 0, true, cv);
        return to_digest(cv);
    }
    Value piece[piece_leaves];
    Value *nodes = piece;
    size_t count;
    std::vector<uint32_t> roots; // of the pieces, if there are several
    if (size <= piece_bytes) {
        count = hash_piece(kernels, input, size, 0, piece);
    } else {
        count = (size + piece_bytes - 1) / piece_bytes;
        roots.resize(count * key_words);
        nodes = reinterpret_cast<Value *>(roots.data());
        for (size_t i = 0; i < count; i++) {
            const size_t here = size - i * piece_bytes < piece_bytes ? size - i * piece_bytes : piece_bytes;
            const size_t leaves = hash_piece(kernels, input + i * piece_bytes, here, i * piece_leaves, piece);
            reduce(kernels, piece, leaves, 1);
            std::memcpy(nodes[i], piece[0], sizeof(Value));
        }
    }
    reduce(kernels, nodes, count, 2);
    for (unsigned word = 0; word < key_words; word++)
        cv[word] = initial_value(word);
    uint32_t m[16];
    std::memcpy(m, nodes, sizeof(m));
    compress_block(cv, m, 0, block_bytes, flag_parent | flag_root);
    return to_digest(cv);
}

} // namespace

Digest hash(const void *data, size_t size) {
    return hash_tree(chosen(), static_cast<const uint8_t *>(data), size);
}

Digest hash_with(const std::string &implementation, const void *data, size_t size) {
    for (const Kernels *kernels : supported())
        if (implementation == kernels->name)
            return hash_tree(*kernels, static_cast<const uint8_t *>(data), size);
    throw std::invalid_argument("this processor cannot run the BLAKE3 implementation '" + implementation + "'");
}

std::vector<std::string> implementations() {
    std::vector<std::string> names;
    for (const Kernels *kernels : supported())
        names.emplace_back(kernels->name);
    return names;
}

} // namespace woodfrog::blake3
