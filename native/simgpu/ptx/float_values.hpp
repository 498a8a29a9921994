// Properties of f32 and f64 values that several instruction families share: flushing, canonical NaNs, saturation.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

namespace simgpu::ptx {

// What the hardware returns for every NaN result. One fixed value also keeps results independent of the order in which
// a compiler puts the operands of a commutative operation.
inline float canonical(float value) noexcept {
    return value == value ? value : std::bit_cast<float>(0x7fffffffu);
}
inline double canonical(double value) noexcept {
    return value == value ? value : std::bit_cast<double>(std::uint64_t{0xfff8000000000000});
}

/// Subnormal numbers become zeros of the same sign.
inline float flush(float value) noexcept {
    const auto bits = std::bit_cast<std::uint32_t>(value);
    const std::uint32_t kept = (bits & 0x7f800000u) != 0 ? bits : bits & 0x80000000u;
    return std::bit_cast<float>(kept);
}
inline double flush(double value) noexcept {
    return value;
}

/// [0, 1]; NaN and -0 become +0.
template <class T> inline T saturate(T value) noexcept {
    return value > T{0} ? (value < T{1} ? value : T{1}) : T{0};
}

template <class T> inline T minimum(T a, T b) noexcept {
    if (a != a)
        return b;
    if (b != b)
        return a;
    if (a == b)
        return std::signbit(a) ? a : b;
    return a < b ? a : b;
}
template <class T> inline T maximum(T a, T b) noexcept {
    if (a != a)
        return b;
    if (b != b)
        return a;
    if (a == b)
        return std::signbit(a) ? b : a;
    return a < b ? b : a;
}

} // namespace simgpu::ptx
