// Reordering of arrays of 2-byte elements: all bytes at even offsets, then all at odd ones, and back. Floats of similar
// size have similar high bytes, which compress well once they stand together.
#pragma once
#include <cstddef>
#include <cstdint>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace woodfrog::packs {

inline void split_bytes(const uint8_t *from, size_t size, uint8_t *to) {
    uint8_t *even = to, *odd = to + (size + 1) / 2;
    size_t i = 0;
#if defined(__SSE2__)
    const __m128i low = _mm_set1_epi16(0x00ff);
    for (; i + 32 <= size; i += 32) {
        const __m128i a = _mm_loadu_si128(reinterpret_cast<const __m128i *>(from + i));
        const __m128i b = _mm_loadu_si128(reinterpret_cast<const __m128i *>(from + i + 16));
        const __m128i evens = _mm_packus_epi16(_mm_and_si128(a, low), _mm_and_si128(b, low));
        const __m128i odds = _mm_packus_epi16(_mm_srli_epi16(a, 8), _mm_srli_epi16(b, 8));
        _mm_storeu_si128(reinterpret_cast<__m128i *>(even + i / 2), evens);
        _mm_storeu_si128(reinterpret_cast<__m128i *>(odd + i / 2), odds);
    }
#endif
    for (; i < size; i++)
        (i % 2 == 0 ? even : odd)[i / 2] = from[i];
}

inline void join_bytes(const uint8_t *from, size_t size, uint8_t *to) {
    const uint8_t *even = from, *odd = from + (size + 1) / 2;
    size_t i = 0;
#if defined(__SSE2__)
    for (; i + 32 <= size; i += 32) {
        const __m128i evens = _mm_loadu_si128(reinterpret_cast<const __m128i *>(even + i / 2));
        const __m128i odds = _mm_loadu_si128(reinterpret_cast<const __m128i *>(odd + i / 2));
        _mm_storeu_si128(reinterpret_cast<__m128i *>(to + i), _mm_unpacklo_epi8(evens, odds));
        _mm_storeu_si128(reinterpret_cast<__m128i *>(to + i + 16), _mm_unpackhi_epi8(evens, odds));
    }
#endif
    for (; i < size; i++)
        to[i] = (i % 2 == 0 ? even : odd)[i / 2];
}

} // namespace woodfrog::packs
