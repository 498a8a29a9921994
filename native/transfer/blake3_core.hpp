// The BLAKE3 compression function and its constants, written once for every place that hashes: one message at a time
// (Word = uint32_t, on a CPU or in a CUDA kernel) or one message a vector lane (Word = a vector of uint32_t).
// From the BLAKE3 paper (O'Connor, Aumasson, Neves, Wilcox-O'Hearn: "BLAKE3: one function, fast everywhere"),
// sections 2.1 to 2.4, hash mode only. It must never allocate, branch on data, or use anything of the standard library
// that device code does not have.
#pragma once
#include <cstdint>

#if defined(__CUDACC__)
#define WF_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define WF_HOST_DEVICE inline __attribute__((always_inline))
#endif

namespace woodfrog::blake3 {

constexpr unsigned block_bytes = 64;
constexpr unsigned leaf_bytes = 1024; // what BLAKE3 calls a chunk; "chunk" means something else in woodfrog
constexpr unsigned blocks_per_leaf = leaf_bytes / block_bytes;
constexpr unsigned key_words = 8; // words of a chaining value
constexpr unsigned digest_bytes = 32;
constexpr unsigned rounds = 7;

constexpr uint32_t flag_chunk_start = 1u << 0;
constexpr uint32_t flag_chunk_end = 1u << 1;
constexpr uint32_t flag_parent = 1u << 2;
constexpr uint32_t flag_root = 1u << 3;

// Word `i` of the initial value: the same as SHA-256's.
WF_HOST_DEVICE constexpr uint32_t initial_value(unsigned i) {
    constexpr uint32_t values[key_words] = {0x6A09E667, 0xBB67AE85, 0x3C6EF372, 0xA54FF53A,
                                            0x510E527F, 0x9B05688C, 0x1F83D9AB, 0x5BE0CD19};
    return values[i];
}

// Which message word stands at place `i` in round `round`: the paper's permutation, applied `round` times.
WF_HOST_DEVICE constexpr unsigned message_word(unsigned round, unsigned i) {
    constexpr uint8_t permutation[16] = {2, 6, 3, 10, 7, 0, 4, 13, 1, 11, 12, 5, 9, 14, 15, 8};
    for (unsigned r = 0; r < round; r++)
        i = permutation[i];
    return i;
}

// Right rotation of each word; specialised where a vector type has something better (blake3_lanes.hpp).
template <typename Word, unsigned bits> struct Rotate {
    static WF_HOST_DEVICE Word right(const Word &x) { return (x >> bits) | (x << (32 - bits)); }
};

// The quarter round.
template <typename Word>
WF_HOST_DEVICE void mix(Word &a, Word &b, Word &c, Word &d, const Word &first, const Word &second) {
    a = a + b + first;
    d = Rotate<Word, 16>::right(d ^ a);
    c = c + d;
    b = Rotate<Word, 12>::right(b ^ c);
    a = a + b + second;
    d = Rotate<Word, 8>::right(d ^ a);
    c = c + d;
    b = Rotate<Word, 7>::right(b ^ c);
}

template <unsigned round, typename Word> WF_HOST_DEVICE void mix_round(Word (&v)[16], const Word (&m)[16]) {
    mix(v[0], v[4], v[8], v[12], m[message_word(round, 0)], m[message_word(round, 1)]);
    mix(v[1], v[5], v[9], v[13], m[message_word(round, 2)], m[message_word(round, 3)]);
    mix(v[2], v[6], v[10], v[14], m[message_word(round, 4)], m[message_word(round, 5)]);
    mix(v[3], v[7], v[11], v[15], m[message_word(round, 6)], m[message_word(round, 7)]);
    mix(v[0], v[5], v[10], v[15], m[message_word(round, 8)], m[message_word(round, 9)]);
    mix(v[1], v[6], v[11], v[12], m[message_word(round, 10)], m[message_word(round, 11)]);
    mix(v[2], v[7], v[8], v[13], m[message_word(round, 12)], m[message_word(round, 13)]);
    mix(v[3], v[4], v[9], v[14], m[message_word(round, 14)], m[message_word(round, 15)]);
}

// cv becomes the chaining value of (cv, message block). counter_low and counter_high are the leaf's index.
template <typename Word>
WF_HOST_DEVICE void compress(Word (&cv)[key_words], const Word (&m)[16], const Word &counter_low,
                             const Word &counter_high, const Word &block_length, const Word &flags) {
    const Word zero = counter_low ^ counter_low;
    Word v[16] = {cv[0],
                  cv[1],
                  cv[2],
                  cv[3],
                  cv[4],
                  cv[5],
                  cv[6],
                  cv[7],
                  zero + initial_value(0),
                  zero + initial_value(1),
                  zero + initial_value(2),
                  zero + initial_value(3),
                  counter_low,
                  counter_high,
                  block_length,
                  flags};
    mix_round<0>(v, m);
    mix_round<1>(v, m);
    mix_round<2>(v, m);
    mix_round<3>(v, m);
    mix_round<4>(v, m);
    mix_round<5>(v, m);
    mix_round<6>(v, m);
    for (unsigned i = 0; i < key_words; i++)
        cv[i] = v[i] ^ v[i + 8];
}

} // namespace woodfrog::blake3
