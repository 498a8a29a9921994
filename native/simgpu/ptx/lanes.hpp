// Templates that turn a function of values into a handler over the lanes of a warp. They hold the one trick that makes
// the interpreter fast: when the executing lanes are all lanes of the frame, the loop runs densely over 32 values
// (lanes that do not exist are computed too, harmlessly), so the compiler can use vector instructions. Functions must
// therefore be total: no value of their arguments may trap.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>

#include "warp.hpp"

namespace simgpu::ptx {

template <class T> inline T *row(Warp &warp, std::uint32_t offset) noexcept {
    return reinterpret_cast<T *>(warp.rows + offset);
}

template <class F> inline void each_lane(Mask mask, F &&f) {
    if (mask == all_lanes) {
        for (unsigned lane = 0; lane < warp_size; ++lane)
            f(lane);
    } else {
        for (; mask != 0; mask &= mask - 1)
            f(static_cast<unsigned>(std::countr_zero(mask)));
    }
}

/// True when all lanes that use this frame execute.
inline bool is_dense(const Warp &warp, Mask mask) noexcept {
    return mask == warp.frame->lanes;
}

template <class D, class A, class F> void unary(Warp &warp, const Op &op, Mask mask) {
    D *d = row<D>(warp, op.d);
    const A *a = row<A>(warp, op.a);
    if (is_dense(warp, mask)) {
#pragma GCC ivdep
        for (unsigned lane = 0; lane < warp_size; ++lane)
            d[lane] = F::apply(a[lane]);
    } else {
        each_lane(mask, [&](unsigned lane) { d[lane] = F::apply(a[lane]); });
    }
}

template <class D, class A, class B, class F> void binary(Warp &warp, const Op &op, Mask mask) {
    D *d = row<D>(warp, op.d);
    const A *a = row<A>(warp, op.a);
    const B *b = row<B>(warp, op.b);
    if (is_dense(warp, mask)) {
#pragma GCC ivdep
        for (unsigned lane = 0; lane < warp_size; ++lane)
            d[lane] = F::apply(a[lane], b[lane]);
    } else {
        each_lane(mask, [&](unsigned lane) { d[lane] = F::apply(a[lane], b[lane]); });
    }
}

template <class D, class A, class B, class C, class F> void ternary(Warp &warp, const Op &op, Mask mask) {
    D *d = row<D>(warp, op.d);
    const A *a = row<A>(warp, op.a);
    const B *b = row<B>(warp, op.b);
    const C *c = row<C>(warp, op.c);
    if (is_dense(warp, mask)) {
#pragma GCC ivdep
        for (unsigned lane = 0; lane < warp_size; ++lane)
            d[lane] = F::apply(a[lane], b[lane], c[lane]);
    } else {
        each_lane(mask, [&](unsigned lane) { d[lane] = F::apply(a[lane], b[lane], c[lane]); });
    }
}

template <class T, class F> void unary_same(Warp &warp, const Op &op, Mask mask) {
    unary<T, T, F>(warp, op, mask);
}
template <class T, class F> void binary_same(Warp &warp, const Op &op, Mask mask) {
    binary<T, T, T, F>(warp, op, mask);
}
template <class T, class F> void ternary_same(Warp &warp, const Op &op, Mask mask) {
    ternary<T, T, T, T, F>(warp, op, mask);
}

/// Packs 32 bytes of 0 or 1 into a mask.
inline Mask pack_bits(const std::uint8_t *bytes) noexcept {
    Mask result = 0;
    for (unsigned group = 0; group < 4; ++group) {
        std::uint64_t eight = 0;
        std::memcpy(&eight, bytes + std::size_t{group} * 8, sizeof eight);
        result |= static_cast<Mask>((eight * 0x0102040810204080ull) >> 56) << (8 * group);
    }
    return result;
}

/// The mask of lanes for which F holds; lanes outside `mask` may have any value.
template <class A, class B, class F> inline Mask compare_lanes(Warp &warp, const Op &op, Mask mask) {
    const A *a = row<A>(warp, op.a);
    const B *b = row<B>(warp, op.b);
    if (is_dense(warp, mask)) {
        alignas(32) std::uint8_t bytes[warp_size];
        for (unsigned lane = 0; lane < warp_size; ++lane)
            bytes[lane] = F::apply(a[lane], b[lane]) ? 1 : 0;
        return pack_bits(bytes);
    }
    Mask result = 0;
    each_lane(mask, [&](unsigned lane) { result |= static_cast<Mask>(F::apply(a[lane], b[lane])) << lane; });
    return result;
}

inline void write_predicate(Warp &warp, std::uint32_t offset, Mask mask, Mask value) noexcept {
    Mask *d = row<Mask>(warp, offset);
    *d = (*d & ~mask) | (value & mask);
}

} // namespace simgpu::ptx
