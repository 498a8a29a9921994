// Integer arithmetic: what the hardware does for every input, division by zero and overflow included.
#include <bit>
#include <limits>
#include <type_traits>

#include "decode.hpp"
#include "lanes.hpp"
#include "typed.hpp"

namespace simgpu::ptx {

namespace {

template <class T> using Unsigned = std::make_unsigned_t<T>;
// Arithmetic in at least `unsigned`, so that 16-bit operands do not become signed int.
template <class T> using Wide = std::conditional_t<sizeof(T) == 8, std::uint64_t, std::uint32_t>;

template <class T> struct Twice;
template <> struct Twice<std::uint16_t> {
    using Type = std::uint32_t;
};
template <> struct Twice<std::int16_t> {
    using Type = std::int32_t;
};
template <> struct Twice<std::uint32_t> {
    using Type = std::uint64_t;
};
template <> struct Twice<std::int32_t> {
    using Type = std::int64_t;
};
template <> struct Twice<std::uint64_t> {
    using Type = unsigned __int128;
};
template <> struct Twice<std::int64_t> {
    using Type = __int128;
};

template <class T> struct Add {
    static T apply(T a, T b) { return static_cast<T>(static_cast<Wide<T>>(a) + static_cast<Wide<T>>(b)); }
};
template <class T> struct Subtract {
    static T apply(T a, T b) { return static_cast<T>(static_cast<Wide<T>>(a) - static_cast<Wide<T>>(b)); }
};
template <class T> struct MultiplyLow {
    static T apply(T a, T b) { return static_cast<T>(static_cast<Wide<T>>(a) * static_cast<Wide<T>>(b)); }
};
template <class T> struct MultiplyHigh {
    static T apply(T a, T b) {
        using Two = typename Twice<T>::Type;
        return static_cast<T>(static_cast<Two>(a) * static_cast<Two>(b) >> (8 * sizeof(T)));
    }
};
template <class T> struct MultiplyWide {
    using Two = typename Twice<T>::Type;
    static Two apply(T a, T b) { return static_cast<Two>(a) * static_cast<Two>(b); }
};
template <class T> struct MultiplyAddLow {
    static T apply(T a, T b, T c) { return Add<T>::apply(MultiplyLow<T>::apply(a, b), c); }
};
template <class T> struct MultiplyAddHigh {
    static T apply(T a, T b, T c) { return Add<T>::apply(MultiplyHigh<T>::apply(a, b), c); }
};
template <class T> struct MultiplyAddWide {
    using Two = typename Twice<T>::Type;
    static Two apply(T a, T b, Two c) {
        using Bits = Unsigned<Two>;
        return static_cast<Two>(static_cast<Bits>(MultiplyWide<T>::apply(a, b)) + static_cast<Bits>(c));
    }
};
struct AddSaturating {
    static std::int32_t apply(std::int32_t a, std::int32_t b) {
        const std::int64_t sum = std::int64_t{a} + b;
        return static_cast<std::int32_t>(sum < INT32_MIN ? INT32_MIN : sum > INT32_MAX ? INT32_MAX : sum);
    }
};
struct SubtractSaturating {
    static std::int32_t apply(std::int32_t a, std::int32_t b) {
        const std::int64_t sum = std::int64_t{a} - b;
        return static_cast<std::int32_t>(sum < INT32_MIN ? INT32_MIN : sum > INT32_MAX ? INT32_MAX : sum);
    }
};
struct MultiplyAddHighSaturating {
    static std::int32_t apply(std::int32_t a, std::int32_t b, std::int32_t c) {
        return AddSaturating::apply(MultiplyHigh<std::int32_t>::apply(a, b), c);
    }
};

template <class T> struct Divide {
    static T apply(T a, T b) {
        if (b == 0)
            return static_cast<T>(-1);
        if constexpr (std::is_signed_v<T>) {
            if (b == -1)
                return Subtract<T>::apply(0, a);
        }
        return static_cast<T>(a / b);
    }
};
template <class T> struct Remainder {
    static T apply(T a, T b) {
        if (b == 0)
            return a;
        if constexpr (std::is_signed_v<T>) {
            if (b == -1)
                return 0;
        }
        return static_cast<T>(a % b);
    }
};
template <class T> struct Minimum {
    static T apply(T a, T b) { return a < b ? a : b; }
};
template <class T> struct Maximum {
    static T apply(T a, T b) { return a < b ? b : a; }
};
template <class T> struct MinimumRelu {
    static T apply(T a, T b) { return Maximum<T>::apply(Minimum<T>::apply(a, b), 0); }
};
template <class T> struct MaximumRelu {
    static T apply(T a, T b) { return Maximum<T>::apply(Maximum<T>::apply(a, b), 0); }
};
template <class T> struct Absolute {
    static T apply(T a) { return a < 0 ? Subtract<T>::apply(0, a) : a; }
};
template <class T> struct Negate {
    static T apply(T a) { return Subtract<T>::apply(0, a); }
};
template <class T> struct AbsoluteDifferenceSum {
    static T apply(T a, T b, T c) {
        return Add<T>::apply(c, a < b ? Subtract<T>::apply(b, a) : Subtract<T>::apply(a, b));
    }
};

/// d = a + b (or a - b) with the carry row as input, output, or both. op.detail: 1 use, 2 write; op.extra: subtract.
template <class T> void add_with_carry(Warp &warp, const Op &op, Mask mask) {
    T *d = row<T>(warp, op.d);
    const T *a = row<T>(warp, op.a);
    const T *b = row<T>(warp, op.b);
    const Mask carry_in = (op.detail & 1) != 0 ? *row<Mask>(warp, carry_row) : 0;
    Mask carry_out = 0;
    each_lane(mask, [&](unsigned lane) {
        const T in = carry_in >> lane & 1;
        const T x = a[lane];
        const T y = b[lane];
        if (op.extra != 0) {
            // The carry flag holds the borrow.
            carry_out |= static_cast<Mask>(x < y || (x == y && in != 0)) << lane;
            d[lane] = x - y - in;
        } else {
            const T sum = x + y;
            const T result = sum + in;
            carry_out |= static_cast<Mask>(sum < x || result < sum) << lane;
            d[lane] = result;
        }
    });
    if ((op.detail & 2) != 0)
        write_predicate(warp, carry_row, mask, carry_out);
}

template <template <class> class F> struct Packed {
    template <class T> struct Lanes {
        static std::uint32_t apply(std::uint32_t a, std::uint32_t b) {
            const auto low = static_cast<std::uint16_t>(F<T>::apply(static_cast<T>(a), static_cast<T>(b)));
            const auto high = static_cast<std::uint16_t>(F<T>::apply(static_cast<T>(a >> 16), static_cast<T>(b >> 16)));
            return std::uint32_t{high} << 16 | low;
        }
    };
    static Handler handler(Type type) {
        if (type == Type::u16x2)
            return &binary_same<std::uint32_t, Lanes<std::uint16_t>>;
        return &binary_same<std::uint32_t, Lanes<std::int16_t>>;
    }
};

Type double_width(Type type) {
    switch (type) {
    case Type::u16:
        return Type::u32;
    case Type::s16:
        return Type::s32;
    case Type::u32:
        return Type::u64;
    case Type::s32:
        return Type::s64;
    default:
        throw Unsupported{"this type"};
    }
}

template <template <class> class F, bool with_addend> Handler wide_handler(Type type) {
    const auto make = []<class T>() -> Handler {
        using Two = typename Twice<T>::Type;
        if constexpr (with_addend)
            return &ternary<Two, T, T, Two, F<T>>;
        else
            return &binary<Two, T, T, F<T>>;
    };
    switch (type) {
    case Type::u16:
        return make.template operator()<std::uint16_t>();
    case Type::s16:
        return make.template operator()<std::int16_t>();
    case Type::u32:
        return make.template operator()<std::uint32_t>();
    case Type::s32:
        return make.template operator()<std::int32_t>();
    default:
        throw Unsupported{"this type"};
    }
}

void emit_binary(Decoder &decoder, const Instruction &i, Type type, Handler handler) {
    const std::uint32_t a = decoder.source(i.operands[1], type);
    const std::uint32_t b = decoder.source(i.operands[2], type);
    decoder.emit(handler, decoder.destination(i.operands[0], type), a, b);
}

void decode_carry(Decoder &decoder, const Instruction &i, Type type) {
    check_form(i, {"cc"}, 3);
    require(size_of(type) >= 4, "this type");
    const std::uint32_t a = decoder.source(i.operands[1], type);
    const std::uint32_t b = decoder.source(i.operands[2], type);
    Op &op = decoder.emit(size_of(type) == 4 ? &add_with_carry<std::uint32_t> : &add_with_carry<std::uint64_t>,
                          decoder.destination(i.operands[0], type), a, b);
    op.detail = static_cast<std::uint16_t>((i.opcode == "addc" || i.opcode == "subc" ? 1 : 0) | (i.has("cc") ? 2 : 0));
    op.extra = i.opcode.starts_with("sub") ? 1 : 0;
}

void decode_multiply(Decoder &decoder, const Instruction &i, Type type) {
    const bool mad = i.opcode == "mad" || i.opcode == "madc";
    const bool chained = i.opcode == "madc" || i.has("cc");
    check_form(i, {"lo", "hi", "wide", "sat", "cc"}, mad ? 4 : 3);
    const std::uint32_t a = decoder.source(i.operands[1], type);
    const std::uint32_t b = decoder.source(i.operands[2], type);
    if (i.has("wide")) {
        require(!chained, "this form");
        const Type two = double_width(type);
        if (mad) {
            const std::uint32_t c = decoder.source(i.operands[3], two);
            decoder.emit(wide_handler<MultiplyAddWide, true>(type), decoder.destination(i.operands[0], two), a, b, c);
        } else {
            decoder.emit(wide_handler<MultiplyWide, false>(type), decoder.destination(i.operands[0], two), a, b);
        }
        return;
    }
    const bool high = i.has("hi");
    require(high || i.has("lo"), "a multiplication without .lo, .hi or .wide");
    if (!mad) {
        decoder.emit(high ? binary_handler<MultiplyHigh>(type) : binary_handler<MultiplyLow>(type),
                     decoder.destination(i.operands[0], type), a, b);
        return;
    }
    const std::uint32_t c = decoder.source(i.operands[3], type);
    if (chained) {
        require(size_of(type) >= 4, "this type");
        const std::uint32_t product = decoder.temporary(size_of(type));
        decoder.emit(high ? binary_handler<MultiplyHigh>(type) : binary_handler<MultiplyLow>(type), product, a, b);
        Op &op = decoder.emit(size_of(type) == 4 ? &add_with_carry<std::uint32_t> : &add_with_carry<std::uint64_t>,
                              decoder.destination(i.operands[0], type), product, c);
        op.detail = static_cast<std::uint16_t>((i.opcode == "madc" ? 1 : 0) | (i.has("cc") ? 2 : 0));
        return;
    }
    Handler handler = high ? ternary_handler<MultiplyAddHigh>(type) : ternary_handler<MultiplyAddLow>(type);
    if (i.has("sat")) {
        require(high && type == Type::s32, "saturation of this type");
        handler = &ternary_same<std::int32_t, MultiplyAddHighSaturating>;
    }
    decoder.emit(handler, decoder.destination(i.operands[0], type), a, b, c);
}

template <bool is_signed_type> std::uint32_t multiply24(std::uint32_t a, std::uint32_t b, bool high) {
    std::int64_t x = a & 0xffffff;
    std::int64_t y = b & 0xffffff;
    if (is_signed_type) {
        x = (x ^ 0x800000) - 0x800000;
        y = (y ^ 0x800000) - 0x800000;
    }
    return static_cast<std::uint32_t>(high ? (x * y) >> 16 : x * y);
}
template <bool is_signed_type> void run_multiply24(Warp &warp, const Op &op, Mask mask) {
    auto *d = row<std::uint32_t>(warp, op.d);
    const auto *a = row<std::uint32_t>(warp, op.a);
    const auto *b = row<std::uint32_t>(warp, op.b);
    const auto *c = row<std::uint32_t>(warp, op.c);
    each_lane(mask, [&](unsigned lane) {
        d[lane] = multiply24<is_signed_type>(a[lane], b[lane], op.extra != 0) + (op.detail != 0 ? c[lane] : 0);
    });
}

void decode_multiply24(Decoder &decoder, const Instruction &i, Type type) {
    const bool mad = i.opcode == "mad24";
    check_form(i, {"lo", "hi"}, mad ? 4 : 3);
    require(size_of(type) == 4, "this type");
    const std::uint32_t a = decoder.source(i.operands[1], type);
    const std::uint32_t b = decoder.source(i.operands[2], type);
    const std::uint32_t c = mad ? decoder.source(i.operands[3], type) : a;
    Op &op = decoder.emit(type == Type::s32 ? &run_multiply24<true> : &run_multiply24<false>,
                          decoder.destination(i.operands[0], type), a, b, c);
    op.extra = i.has("hi") ? 1 : 0;
    op.detail = mad ? 1 : 0;
}

} // namespace

bool decode_integer(Decoder &decoder, const Instruction &i) {
    const Types types = types_of(i);
    const Type type = types.first;
    const std::string_view name = i.opcode;
    if ((name == "add" || name == "sub") && is_packed_integer(type)) {
        check_form(i, {}, 3);
        emit_binary(decoder, i, type, name == "add" ? Packed<Add>::handler(type) : Packed<Subtract>::handler(type));
    } else if ((name == "min" || name == "max") && is_packed_integer(type)) {
        check_form(i, {"relu"}, 3);
        const bool relu = i.has("relu");
        emit_binary(decoder, i, type,
                    name == "min" ? (relu ? Packed<MinimumRelu>::handler(type) : Packed<Minimum>::handler(type))
                                  : (relu ? Packed<MaximumRelu>::handler(type) : Packed<Maximum>::handler(type)));
    } else if (name == "addc" || name == "subc" || ((name == "add" || name == "sub") && i.has("cc"))) {
        decode_carry(decoder, i, type);
    } else if (name == "add" || name == "sub") {
        check_form(i, {"sat"}, 3);
        const bool add = name == "add";
        if (i.has("sat")) {
            require(type == Type::s32, "saturation of this type");
            emit_binary(decoder, i, type,
                        add ? &binary_same<std::int32_t, AddSaturating>
                            : &binary_same<std::int32_t, SubtractSaturating>);
        } else {
            emit_binary(decoder, i, type, add ? binary_handler<Add>(type) : binary_handler<Subtract>(type));
        }
    } else if (name == "mul" || name == "mad" || name == "madc") {
        decode_multiply(decoder, i, type);
    } else if (name == "mul24" || name == "mad24") {
        decode_multiply24(decoder, i, type);
    } else if (name == "sad") {
        check_form(i, {}, 4);
        const std::uint32_t a = decoder.source(i.operands[1], type);
        const std::uint32_t b = decoder.source(i.operands[2], type);
        const std::uint32_t c = decoder.source(i.operands[3], type);
        decoder.emit(ternary_handler<AbsoluteDifferenceSum>(type), decoder.destination(i.operands[0], type), a, b, c);
    } else if (name == "div" || name == "rem") {
        check_form(i, {}, 3);
        emit_binary(decoder, i, type, name == "div" ? binary_handler<Divide>(type) : binary_handler<Remainder>(type));
    } else if (name == "min" || name == "max") {
        check_form(i, {"relu"}, 3);
        const bool relu = i.has("relu");
        emit_binary(decoder, i, type,
                    name == "min" ? (relu ? binary_handler<MinimumRelu>(type) : binary_handler<Minimum>(type))
                                  : (relu ? binary_handler<MaximumRelu>(type) : binary_handler<Maximum>(type)));
    } else if (name == "abs" || name == "neg") {
        check_form(i, {}, 2);
        require(is_signed(type), "this type");
        const std::uint32_t a = decoder.source(i.operands[1], type);
        decoder.emit(name == "abs" ? unary_handler<Absolute>(type) : unary_handler<Negate>(type),
                     decoder.destination(i.operands[0], type), a);
    } else {
        return false;
    }
    return true;
}

} // namespace simgpu::ptx
