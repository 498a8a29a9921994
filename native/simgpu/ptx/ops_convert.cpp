// cvt and cvt.pack: every pair of integer and floating types, all rounding directions, saturation.
// Narrow integers live in wider registers; Decoder::source and Decoder::destination take care of that.
#include <cfenv>
#include <cmath>
#include <limits>
#include <type_traits>

#include "decode.hpp"
#include "float_values.hpp"
#include "half.hpp"
#include "lanes.hpp"

namespace simgpu::ptx {

namespace {

constexpr std::uint16_t flag_ftz = 1, flag_sat = 2, flag_relu = 4, flag_satfinite = 8;

// Tags for the 16-bit formats, whose storage type alone does not say what they are.
struct HalfTag {};
struct BFloatTag {};
struct Tf32Tag {};

template <class T> struct Storage {
    using Type = T;
};
template <> struct Storage<HalfTag> {
    using Type = std::uint16_t;
};
template <> struct Storage<BFloatTag> {
    using Type = std::uint16_t;
};
template <> struct Storage<Tf32Tag> {
    using Type = std::uint32_t;
};

/// Rounds to an integral value. Exact for every double.
double integral(double value, Rounding rounding) {
    if (!(std::fabs(value) < 0x1p52))
        return value;
    double result = static_cast<double>(static_cast<std::int64_t>(value));
    const double rest = value - result;
    switch (rounding) {
    case Rounding::zero:
        break;
    case Rounding::down:
        result -= rest < 0 ? 1.0 : 0.0;
        break;
    case Rounding::up:
        result += rest > 0 ? 1.0 : 0.0;
        break;
    case Rounding::nearest:
    case Rounding::nearest_away: {
        const double magnitude = std::fabs(rest);
        const bool odd = (static_cast<std::int64_t>(result) & 1) != 0;
        if (magnitude > 0.5 || (magnitude == 0.5 && (odd || rounding == Rounding::nearest_away)))
            result += value < 0 ? -1.0 : 1.0;
        break;
    }
    }
    return std::copysign(result, value);
}

template <class To> To integer_from(double value, Rounding rounding) {
    if (value != value)
        return 0;
    const double rounded = integral(value, rounding);
    // The bounds are powers of two, exact in double for every width.
    constexpr double above = static_cast<double>(std::numeric_limits<To>::max() / 2 + 1) * 2.0;
    constexpr double lowest = static_cast<double>(std::numeric_limits<To>::min());
    if (rounded >= above)
        return std::numeric_limits<To>::max();
    if (rounded < lowest)
        return std::numeric_limits<To>::min();
    return static_cast<To>(rounded);
}

template <class From> double to_double(typename Storage<From>::Type value) {
    if constexpr (std::is_same_v<From, HalfTag>)
        return static_cast<double>(float_from_half(value));
    else if constexpr (std::is_same_v<From, BFloatTag>)
        return static_cast<double>(float_from_bfloat(value));
    else if constexpr (std::is_same_v<From, Tf32Tag>)
        return static_cast<double>(std::bit_cast<float>(value));
    else if constexpr (sizeof(value) == 8 && std::is_integral_v<From>) {
        // Sticky rounding (to odd) to 53 bits keeps the next rounding, to at most 24 bits, correct.
        const bool negative = value < 0;
        std::uint64_t magnitude = negative ? ~static_cast<std::uint64_t>(value) + 1 : static_cast<std::uint64_t>(value);
        if (magnitude >> 53 != 0 && (magnitude & 0x7ff) != 0)
            magnitude = (magnitude & ~std::uint64_t{0x7ff}) | 0x800;
        const double result = static_cast<double>(magnitude);
        return negative ? -result : result;
    } else
        return static_cast<double>(value);
}

/// A float from a double in a direction, without touching the processor's mode.
float float_from(double value, Rounding rounding) {
    const float nearest = static_cast<float>(value);
    if (rounding == Rounding::nearest || value != value || std::isinf(value))
        return nearest;
    const double back = static_cast<double>(nearest);
    if (back == value)
        return nearest;
    const bool too_high = back > value;
    switch (rounding) {
    case Rounding::zero:
        if (value > 0 ? too_high : !too_high)
            return std::nextafterf(nearest, 0.0f);
        return nearest;
    case Rounding::down:
        return too_high ? std::nextafterf(nearest, -HUGE_VALF) : nearest;
    case Rounding::up:
        return too_high ? nearest : std::nextafterf(nearest, HUGE_VALF);
    default:
        return nearest;
    }
}

template <class To> typename Storage<To>::Type from_double(double value, Rounding rounding, bool satfinite) {
    if constexpr (std::is_same_v<To, HalfTag>)
        return static_cast<std::uint16_t>(round_to_format<5, 10>(value, rounding, satfinite));
    else if constexpr (std::is_same_v<To, BFloatTag>)
        return static_cast<std::uint16_t>(round_to_format<8, 7>(value, rounding, satfinite));
    else if constexpr (std::is_same_v<To, Tf32Tag>)
        return round_to_format<8, 10>(value, rounding, satfinite) << 13;
    else if constexpr (std::is_same_v<To, float>)
        return float_from(value, rounding);
    else
        return value;
}

template <class From, class To> struct IntegerToInteger {
    static To saturating(From value) {
        using Limits = std::numeric_limits<To>;
        if constexpr (std::is_signed_v<From>) {
            if constexpr (std::is_signed_v<To>) {
                if (static_cast<std::int64_t>(value) < static_cast<std::int64_t>(Limits::min()))
                    return Limits::min();
                if (static_cast<std::int64_t>(value) > static_cast<std::int64_t>(Limits::max()))
                    return Limits::max();
            } else {
                if (value < 0)
                    return 0;
                if (static_cast<std::uint64_t>(value) > static_cast<std::uint64_t>(Limits::max()))
                    return Limits::max();
            }
        } else {
            if (static_cast<std::uint64_t>(value) > static_cast<std::uint64_t>(Limits::max()))
                return Limits::max();
        }
        return static_cast<To>(value);
    }
    static void run(Warp &warp, const Op &op, Mask mask) {
        To *d = row<To>(warp, op.d);
        const From *a = row<From>(warp, op.a);
        if ((op.detail & flag_sat) != 0) {
            each_lane(mask, [&](unsigned lane) { d[lane] = saturating(a[lane]); });
        } else if (is_dense(warp, mask)) {
#pragma GCC ivdep
            for (unsigned lane = 0; lane < warp_size; ++lane)
                d[lane] = static_cast<To>(a[lane]);
        } else {
            each_lane(mask, [&](unsigned lane) { d[lane] = static_cast<To>(a[lane]); });
        }
    }
};

template <class From, class To> struct FloatToInteger {
    static void run(Warp &warp, const Op &op, Mask mask) {
        using Source = typename Storage<From>::Type;
        To *d = row<To>(warp, op.d);
        const Source *a = row<Source>(warp, op.a);
        const auto rounding = static_cast<Rounding>(op.extra);
        const bool ftz = (op.detail & flag_ftz) != 0;
        each_lane(mask, [&](unsigned lane) {
            Source value = a[lane];
            if constexpr (std::is_same_v<From, float>) {
                if (ftz)
                    value = flush(value);
            }
            d[lane] = integer_from<To>(to_double<From>(value), rounding);
        });
    }
};

template <class From, class To> struct IntegerToFloat {
    static void run(Warp &warp, const Op &op, Mask mask) {
        using Target = typename Storage<To>::Type;
        Target *d = row<Target>(warp, op.d);
        const From *a = row<From>(warp, op.a);
        const auto rounding = static_cast<Rounding>(op.extra);
        const bool sat = (op.detail & flag_sat) != 0;
        each_lane(mask, [&](unsigned lane) {
            if constexpr (std::is_same_v<To, double>) {
                double value = static_cast<double>(a[lane]);
                if (sizeof(From) == 8 && rounding != Rounding::nearest) {
                    // Only 64-bit integers are rounded at all. The compiler's own conversion obeys the mode.
                    std::fesetround(rounding == Rounding::zero   ? FE_TOWARDZERO
                                    : rounding == Rounding::down ? FE_DOWNWARD
                                                                 : FE_UPWARD);
                    volatile From input = a[lane];
                    volatile double output = static_cast<double>(input);
                    std::fesetround(FE_TONEAREST);
                    value = output;
                }
                d[lane] = sat ? saturate(value) : value;
            } else {
                double value = to_double<From>(a[lane]);
                if (sat)
                    value = saturate(value);
                d[lane] = from_double<To>(value, rounding, false);
            }
        });
    }
};

template <class From, class To> struct FloatToFloat {
    static void run(Warp &warp, const Op &op, Mask mask) {
        using Source = typename Storage<From>::Type;
        using Target = typename Storage<To>::Type;
        Target *d = row<Target>(warp, op.d);
        const Source *a = row<Source>(warp, op.a);
        const auto rounding = static_cast<Rounding>(op.extra);
        const std::uint16_t flags = op.detail;
        const bool to_integral = op.immediate != 0;
        each_lane(mask, [&](unsigned lane) {
            Source source = a[lane];
            if constexpr (std::is_same_v<From, float>) {
                if ((flags & flag_ftz) != 0)
                    source = flush(source);
            }
            double value = to_double<From>(source);
            if (to_integral)
                value = integral(value, rounding);
            if ((flags & flag_sat) != 0)
                value = saturate(value);
            if ((flags & flag_relu) != 0 && value <= 0.0)
                value = 0.0;
            Target result =
                from_double<To>(value, to_integral ? Rounding::nearest : rounding, (flags & flag_satfinite) != 0);
            if constexpr (std::is_same_v<To, float>) {
                if ((flags & flag_ftz) != 0)
                    result = flush(result);
            }
            if constexpr (std::is_floating_point_v<Target>)
                result = canonical(result);
            d[lane] = result;
        });
    }
};

template <class From, class To> Handler pair_handler() {
    constexpr bool from_integer = std::is_integral_v<From>;
    constexpr bool to_integer = std::is_integral_v<To>;
    if constexpr (from_integer && to_integer)
        return &IntegerToInteger<From, To>::run;
    else if constexpr (to_integer)
        return &FloatToInteger<From, To>::run;
    else if constexpr (from_integer)
        return &IntegerToFloat<From, To>::run;
    else
        return &FloatToFloat<From, To>::run;
}

template <class Make> Handler for_type(Type type, Make make) {
    switch (type) {
    case Type::u8:
    case Type::b8:
        return make.template operator()<std::uint8_t>();
    case Type::s8:
        return make.template operator()<std::int8_t>();
    case Type::u16:
    case Type::b16:
        return make.template operator()<std::uint16_t>();
    case Type::s16:
        return make.template operator()<std::int16_t>();
    case Type::u32:
    case Type::b32:
        return make.template operator()<std::uint32_t>();
    case Type::s32:
        return make.template operator()<std::int32_t>();
    case Type::u64:
    case Type::b64:
        return make.template operator()<std::uint64_t>();
    case Type::s64:
        return make.template operator()<std::int64_t>();
    case Type::f16:
        return make.template operator()<HalfTag>();
    case Type::bf16:
        return make.template operator()<BFloatTag>();
    case Type::f32:
        return make.template operator()<float>();
    case Type::f64:
        return make.template operator()<double>();
    default:
        throw Unsupported{"this type"};
    }
}

Handler conversion(Type to, Type from) {
    if (to == Type::tf32) {
        require(from == Type::f32, "this type");
        return &FloatToFloat<float, Tf32Tag>::run;
    }
    return for_type(from, [to]<class From>() -> Handler {
        return for_type(to, []<class To>() -> Handler { return pair_handler<From, To>(); });
    });
}

/// d = rounded(a) << 16 | rounded(b), the packed conversions of two f32.
template <class To> void pack_two(Warp &warp, const Op &op, Mask mask) {
    auto *d = row<std::uint32_t>(warp, op.d);
    const auto *a = row<float>(warp, op.a);
    const auto *b = row<float>(warp, op.b);
    const auto rounding = static_cast<Rounding>(op.extra);
    const auto one = [&](float value) -> std::uint32_t {
        double wide = static_cast<double>(value);
        if ((op.detail & flag_relu) != 0 && wide <= 0.0)
            wide = 0.0;
        return from_double<To>(wide, rounding, (op.detail & flag_satfinite) != 0);
    };
    each_lane(mask, [&](unsigned lane) { d[lane] = one(a[lane]) << 16 | one(b[lane]); });
}

/// d = c shifted left by two values, the saturated a and b in its low part.
template <class To, unsigned bits> void pack_saturated(Warp &warp, const Op &op, Mask mask) {
    auto *d = row<std::uint32_t>(warp, op.d);
    const auto *a = row<std::int32_t>(warp, op.a);
    const auto *b = row<std::int32_t>(warp, op.b);
    const auto *c = row<std::uint32_t>(warp, op.c);
    const auto one = [](std::int32_t value) -> std::uint32_t {
        const auto narrow = IntegerToInteger<std::int32_t, To>::saturating(value);
        return static_cast<std::make_unsigned_t<To>>(narrow);
    };
    each_lane(mask, [&](unsigned lane) {
        const std::uint32_t above = bits >= 16 ? 0 : c[lane] << (2 * bits % 32);
        d[lane] = above | one(a[lane]) << bits | one(b[lane]);
    });
}

void decode_pack(Decoder &decoder, const Instruction &i, const Types &types) {
    const bool wide = types.first == Type::u16 || types.first == Type::s16;
    check_form(i, {"pack", "sat"}, wide ? 3 : 4);
    require(types.second == Type::s32, "this type");
    Handler handler = nullptr;
    if (types.first == Type::u16)
        handler = &pack_saturated<std::uint16_t, 16>;
    if (types.first == Type::s16)
        handler = &pack_saturated<std::int16_t, 16>;
    if (types.first == Type::u8)
        handler = &pack_saturated<std::uint8_t, 8>;
    if (types.first == Type::s8)
        handler = &pack_saturated<std::int8_t, 8>;
    require(handler != nullptr, "this type");
    const std::uint32_t a = decoder.source(i.operands[1], Type::s32);
    const std::uint32_t b = decoder.source(i.operands[2], Type::s32);
    const std::uint32_t c = wide ? a : decoder.source(i.operands[3], Type::b32);
    decoder.emit(handler, decoder.destination(i.operands[0], Type::b32), a, b, c);
}

} // namespace

bool decode_convert(Decoder &decoder, const Instruction &i) {
    if (i.opcode != "cvt")
        return false;
    const Types types = types_of(i);
    if (i.has("pack")) {
        decode_pack(decoder, i, types);
        return true;
    }
    const bool packs = types.first == Type::f16x2 || types.first == Type::bf16x2;
    check_form(i, {"rn", "rz", "rm", "rp", "rna", "rni", "rzi", "rmi", "rpi", "ftz", "sat", "relu", "satfinite"},
               packs ? 3 : 2);
    require(types.second != Type::none, "a conversion without two types");
    Rounding rounding = Rounding::nearest;
    if (i.has("rz") || i.has("rzi"))
        rounding = Rounding::zero;
    if (i.has("rm") || i.has("rmi"))
        rounding = Rounding::down;
    if (i.has("rp") || i.has("rpi"))
        rounding = Rounding::up;
    if (i.has("rna"))
        rounding = Rounding::nearest_away;
    const auto flags =
        static_cast<std::uint16_t>((i.has("ftz") ? flag_ftz : 0) | (i.has("sat") ? flag_sat : 0) |
                                   (i.has("relu") ? flag_relu : 0) | (i.has("satfinite") ? flag_satfinite : 0));
    const std::uint32_t a = decoder.source(i.operands[1], types.second);
    if (packs) {
        require(types.second == Type::f32, "this type");
        const std::uint32_t b = decoder.source(i.operands[2], Type::f32);
        Op &op = decoder.emit(types.first == Type::f16x2 ? &pack_two<HalfTag> : &pack_two<BFloatTag>,
                              decoder.destination(i.operands[0], types.first), a, b);
        op.extra = static_cast<std::uint8_t>(rounding);
        op.detail = flags;
        return true;
    }
    Op &op = decoder.emit(conversion(types.first, types.second), decoder.destination(i.operands[0], types.first), a);
    op.extra = static_cast<std::uint8_t>(rounding);
    op.detail = flags;
    op.immediate = i.has("rni") || i.has("rzi") || i.has("rmi") || i.has("rpi") ? 1 : 0;
    return true;
}

} // namespace simgpu::ptx
