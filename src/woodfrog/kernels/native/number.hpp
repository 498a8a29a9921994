// Integers that saturate: beyond `kUnbounded` a bound means "none". Coefficients never saturate silently, they throw.
#pragma once

#include <algorithm>
#include <cstdint>

namespace access_templates {

using Number = __int128;

constexpr Number kUnbounded = Number{1} << 120; // infinity; addresses are below 2**64
constexpr Number kFar = Number{1} << 100;

/// A number is too large to be computed with; the access is then taken to be everywhere.
struct TooLarge {};

inline Number saturated(Number value) {
    return std::clamp(value, -kUnbounded, kUnbounded);
}

/// For bounds: an overflow is infinity of its sign.
inline Number bound_product(Number a, Number b) {
    Number result;
    if (__builtin_mul_overflow(a, b, &result))
        return (a < 0) == (b < 0) ? kUnbounded : -kUnbounded;
    return saturated(result);
}

/// For coefficients and constants: an overflow has no meaning.
inline Number product(Number a, Number b) {
    Number result;
    if (__builtin_mul_overflow(a, b, &result) || result > kFar || result < -kFar)
        throw TooLarge{};
    return result;
}

inline Number sum(Number a, Number b) {
    Number result = a + b; // both within kFar
    if (result > kFar || result < -kFar)
        throw TooLarge{};
    return result;
}

inline Number floor_quotient(Number a, Number b) {
    Number quotient = a / b;
    return a % b != 0 && (a < 0) != (b < 0) ? quotient - 1 : quotient;
}

inline Number remainder(Number a, Number b) {
    return a - floor_quotient(a, b) * b;
}

inline Number magnitude(Number a) {
    return a < 0 ? -a : a;
}

inline Number common_divisor(Number a, Number b) {
    a = magnitude(a);
    b = magnitude(b);
    while (b != 0) {
        Number rest = a % b;
        a = b;
        b = rest;
    }
    return a;
}

inline int bit_length(Number a) {
    int bits = 0;
    for (a = magnitude(a); a != 0; a >>= 1)
        ++bits;
    return bits;
}

inline int trailing_zeros(Number a) {
    int bits = 0;
    while (a != 0 && (a & 1) == 0) {
        a >>= 1;
        ++bits;
    }
    return bits;
}

} // namespace access_templates
