// Conversions between float, double and the 16-bit formats, exact and with every rounding direction. Header only
// because every arithmetic handler inlines them; pure functions of their arguments, independent of the processor's
// rounding mode.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

namespace simgpu::ptx {

enum class Rounding : std::uint8_t { nearest, zero, down, up, nearest_away };

/// Rounds a double to a binary format with `fraction_bits` and `exponent_bits`. A NaN becomes the canonical one (all
/// fraction bits set, positive). `saturate_to_finite` turns overflow into the largest finite value.
template <unsigned exponent_bits, unsigned fraction_bits>
constexpr std::uint32_t round_to_format(double value, Rounding rounding, bool saturate_to_finite = false) {
    constexpr int bias = (1 << (exponent_bits - 1)) - 1;
    constexpr std::uint32_t infinity = ((1u << exponent_bits) - 1) << fraction_bits;
    constexpr std::uint32_t largest = infinity - 1;
    const auto bits = std::bit_cast<std::uint64_t>(value);
    const std::uint32_t sign = static_cast<std::uint32_t>(bits >> 63) << (exponent_bits + fraction_bits);
    const int exponent = static_cast<int>(bits >> 52 & 0x7ff);
    std::uint64_t fraction = bits & ((std::uint64_t{1} << 52) - 1);
    if (exponent == 0x7ff)
        return fraction != 0 ? infinity | ((1u << fraction_bits) - 1) : sign | infinity;
    if (exponent == 0 && fraction == 0)
        return sign;
    if (exponent != 0)
        fraction |= std::uint64_t{1} << 52;
    // value = fraction * 2^(exponent - 1075); a double's own subnormals are far below every target format.
    int target_exponent = exponent - 1023 + bias;
    unsigned drop = 52 - fraction_bits;
    if (target_exponent <= 0) {
        const int more = 1 - target_exponent;
        drop = more > 64 ? 63 : drop + static_cast<unsigned>(more);
        if (drop > 63)
            drop = 63;
        target_exponent = 0;
    }
    std::uint64_t kept = fraction >> drop;
    const std::uint64_t rest = fraction & ((std::uint64_t{1} << drop) - 1);
    const std::uint64_t half = std::uint64_t{1} << (drop - 1);
    bool away = false;
    switch (rounding) {
    case Rounding::nearest:
        away = rest > half || (rest == half && (kept & 1) != 0);
        break;
    case Rounding::nearest_away:
        away = rest >= half;
        break;
    case Rounding::zero:
        break;
    case Rounding::down:
        away = sign != 0 && rest != 0;
        break;
    case Rounding::up:
        away = sign == 0 && rest != 0;
        break;
    }
    kept += away ? 1 : 0;
    std::uint64_t result = 0;
    if (target_exponent == 0) {
        result = kept; // a carry into the exponent gives the smallest normal number
    } else {
        result = (static_cast<std::uint64_t>(target_exponent) << fraction_bits) +
                 (kept - (std::uint64_t{1} << fraction_bits));
    }
    if (result >= infinity) {
        const bool to_largest = saturate_to_finite || rounding == Rounding::zero ||
                                (rounding == Rounding::down && sign == 0) || (rounding == Rounding::up && sign != 0);
        result = to_largest ? largest : infinity;
    }
    return sign | static_cast<std::uint32_t>(result);
}

inline std::uint16_t half_from_double(double value, Rounding rounding) {
    return static_cast<std::uint16_t>(round_to_format<5, 10>(value, rounding));
}
inline std::uint16_t bfloat_from_double(double value, Rounding rounding) {
    return static_cast<std::uint16_t>(round_to_format<8, 7>(value, rounding));
}

inline float float_from_half(std::uint16_t half) noexcept {
    const std::uint32_t sign = static_cast<std::uint32_t>(half & 0x8000u) << 16;
    const std::uint32_t magnitude = half & 0x7fffu;
    if (magnitude >= 0x7c00u)
        return std::bit_cast<float>(sign | 0x7f800000u | (magnitude & 0x3ffu) << 13);
    if (magnitude >= 0x0400u)
        return std::bit_cast<float>(sign | ((magnitude << 13) + (112u << 23)));
    // A subnormal is an integer multiple of 2^-24.
    const float value = static_cast<float>(magnitude) * 0x1p-24f;
    return std::bit_cast<float>(std::bit_cast<std::uint32_t>(value) | sign);
}

inline float float_from_bfloat(std::uint16_t value) noexcept {
    return std::bit_cast<float>(static_cast<std::uint32_t>(value) << 16);
}

/// a * b + c of numbers with at most 11 significant bits, as a double that rounds to any 16-bit format as the exact
/// value would: the product is exact, and the sum is rounded to odd, which leaves a sticky bit for the next rounding.
inline double fma_for_half(double a, double b, double c) noexcept {
    const double product = a * b;
    const double sum = product + c;
    if (!std::isfinite(sum))
        return sum;
    const double virtual_c = sum - product;
    const double error = (product - (sum - virtual_c)) + (c - virtual_c);
    if (error == 0.0)
        return sum;
    auto bits = std::bit_cast<std::uint64_t>(sum);
    if ((bits & 1) == 0) {
        if (std::signbit(error) == std::signbit(sum))
            bits |= 1;
        else
            bits -= 1;
    }
    return std::bit_cast<double>(bits);
}

} // namespace simgpu::ptx
