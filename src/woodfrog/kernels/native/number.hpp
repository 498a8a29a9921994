// Integers that saturate: beyond `kUnbounded` a bound means "none". Coefficients never saturate silently, they throw.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>

namespace access_templates {

using Number = __int128;

constexpr Number kUnbounded = Number{1} << 120; // infinity; addresses are below 2**64
constexpr Number kFar = Number{1} << 100;

/// A number is too large to be computed with; the access is then taken to be everywhere.
struct TooLarge {};

inline Number saturated(Number value) {
    return std::clamp(value, -kUnbounded, kUnbounded);
}

/// Nearly all numbers are short; 128-bit products and quotients are several times slower.
inline bool is_short(Number a) {
    return a == static_cast<std::int64_t>(a);
}

/// For bounds: an overflow is infinity of its sign.
inline Number bound_product(Number a, Number b) {
    if (is_short(a) && is_short(b))
        return saturated(a * b);
    Number result;
    if (__builtin_mul_overflow(a, b, &result))
        return (a < 0) == (b < 0) ? kUnbounded : -kUnbounded;
    return saturated(result);
}

/// For coefficients and constants: an overflow has no meaning.
inline Number product(Number a, Number b) {
    Number result;
    if (is_short(a) && is_short(b))
        result = a * b;
    else if (__builtin_mul_overflow(a, b, &result))
        throw TooLarge{};
    if (result > kFar || result < -kFar)
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
    if (is_short(a) && is_short(b) && a != INT64_MIN) {
        auto dividend = static_cast<std::int64_t>(a), divisor = static_cast<std::int64_t>(b);
        if (divisor > 0 && (divisor & (divisor - 1)) == 0)
            return dividend >> __builtin_ctzll(static_cast<unsigned long long>(divisor));
        std::int64_t quotient = dividend / divisor;
        return dividend % divisor != 0 && (dividend < 0) != (divisor < 0) ? quotient - 1 : quotient;
    }
    Number quotient = a / b;
    return a % b != 0 && (a < 0) != (b < 0) ? quotient - 1 : quotient;
}

inline Number remainder(Number a, Number b) {
    return a - floor_quotient(a, b) * b;
}

inline bool divides(Number divisor, Number a) {
    if (is_short(a) && is_short(divisor) && a != INT64_MIN)
        return static_cast<std::int64_t>(a) % static_cast<std::int64_t>(divisor) == 0;
    return a % divisor == 0;
}

inline Number magnitude(Number a) {
    return a < 0 ? -a : a;
}

inline Number common_divisor(Number a, Number b) {
    a = magnitude(a);
    b = magnitude(b);
    if (is_short(a) && is_short(b))
        return std::gcd(static_cast<std::int64_t>(a), static_cast<std::int64_t>(b));
    while (b != 0) {
        Number rest = a % b;
        a = b;
        b = rest;
    }
    return a;
}

inline int bit_length(Number a) {
    auto value = static_cast<unsigned __int128>(magnitude(a));
    auto high = static_cast<unsigned long long>(value >> 64), low = static_cast<unsigned long long>(value);
    return high != 0 ? 128 - __builtin_clzll(high) : low != 0 ? 64 - __builtin_clzll(low) : 0;
}

inline int trailing_zeros(Number a) {
    auto value = static_cast<unsigned __int128>(a);
    auto high = static_cast<unsigned long long>(value >> 64), low = static_cast<unsigned long long>(value);
    return low != 0 ? __builtin_ctzll(low) : high != 0 ? 64 + __builtin_ctzll(high) : 0;
}

} // namespace access_templates
