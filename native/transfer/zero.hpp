// Zeroing of large memory past the caches: what a user left in the arena must not stay there, and the daemon's caches
// must not be filled with zeros for it.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace woodfrog::transfer {

inline void write_zeros(uint8_t *to, size_t size) {
#if defined(__SSE2__)
    constexpr size_t line = 64;
    const size_t head = (line - reinterpret_cast<uintptr_t>(to) % line) % line;
    if (size < head + line) {
        std::memset(to, 0, size);
        return;
    }
    std::memset(to, 0, head);
    to += head;
    size -= head;
    const __m128i zero = _mm_setzero_si128();
    for (; size >= line; size -= line, to += line)
        for (size_t part = 0; part < line; part += 16)
            _mm_stream_si128(reinterpret_cast<__m128i *>(to + part), zero);
    _mm_sfence(); // before anybody is told that it is done
#endif
    std::memset(to, 0, size); // the tail; elsewhere libc's own way (aarch64 zeroes whole lines without reading them)
}

} // namespace woodfrog::transfer
