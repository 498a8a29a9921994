// Comparisons and predicate logic: setp, set, testp, and/or/xor/not/mov of predicates.
#include <cmath>

#include "decode.hpp"
#include "float_values.hpp"
#include "half.hpp"
#include "lanes.hpp"
#include "typed.hpp"

namespace simgpu::ptx {

namespace {

enum class Combine : std::uint16_t { none, logical_and, logical_or, logical_xor };

Mask combine(Combine how, Mask value, Mask other) {
    switch (how) {
    case Combine::none:
        return value;
    case Combine::logical_and:
        return value & other;
    case Combine::logical_or:
        return value | other;
    case Combine::logical_xor:
        return value ^ other;
    }
    return value;
}

/// d = (a ? b) combined with c; e, when it is a row, gets the negated comparison combined with c.
template <class T, class F> void set_predicate(Warp &warp, const Op &op, Mask mask) {
    const Mask value = compare_lanes<T, T, F>(warp, op, mask);
    const auto how = static_cast<Combine>(op.detail);
    const Mask other = how == Combine::none ? 0 : *row<Mask>(warp, op.c);
    write_predicate(warp, op.d, mask, combine(how, value, other));
    if (op.e != no_row)
        write_predicate(warp, op.e, mask, combine(how, ~value, other));
}

// Integer values compare with the operators of their C++ type.
struct Equal {
    template <class T> static bool apply(T a, T b) { return a == b; }
};
struct NotEqual {
    template <class T> static bool apply(T a, T b) { return a != b; }
};
struct Less {
    template <class T> static bool apply(T a, T b) { return a < b; }
};
struct LessEqual {
    template <class T> static bool apply(T a, T b) { return a <= b; }
};
struct Greater {
    template <class T> static bool apply(T a, T b) { return a > b; }
};
struct GreaterEqual {
    template <class T> static bool apply(T a, T b) { return a >= b; }
};
// Floating ones come ordered (false when there is a NaN) and unordered (true then).
struct OrderedNotEqual {
    template <class T> static bool apply(T a, T b) { return a < b || a > b; }
};
struct UnorderedEqual {
    template <class T> static bool apply(T a, T b) { return !(a < b || a > b); }
};
struct UnorderedLess {
    template <class T> static bool apply(T a, T b) { return !(a >= b); }
};
struct UnorderedLessEqual {
    template <class T> static bool apply(T a, T b) { return !(a > b); }
};
struct UnorderedGreater {
    template <class T> static bool apply(T a, T b) { return !(a <= b); }
};
struct UnorderedGreaterEqual {
    template <class T> static bool apply(T a, T b) { return !(a < b); }
};
struct BothNumbers {
    template <class T> static bool apply(T a, T b) { return a == a && b == b; }
};
struct AnyNan {
    template <class T> static bool apply(T a, T b) { return a != a || b != b; }
};

template <class F> struct FlushedFirst {
    static bool apply(float a, float b) { return F::template apply<float>(flush(a), flush(b)); }
};
template <class F> struct AsHalf {
    static bool apply(std::uint16_t a, std::uint16_t b) {
        return F::template apply<float>(float_from_half(a), float_from_half(b));
    }
};
template <class F> struct AsBFloat {
    static bool apply(std::uint16_t a, std::uint16_t b) {
        return F::template apply<float>(float_from_bfloat(a), float_from_bfloat(b));
    }
};

template <class F> Handler float_compare(Type type, bool ftz) {
    switch (type) {
    case Type::f64:
        return &set_predicate<double, F>;
    case Type::f32:
        return ftz ? &set_predicate<float, FlushedFirst<F>> : &set_predicate<float, F>;
    case Type::f16:
        return &set_predicate<std::uint16_t, AsHalf<F>>;
    case Type::bf16:
        return &set_predicate<std::uint16_t, AsBFloat<F>>;
    default:
        throw Unsupported{"this type"};
    }
}

Handler compare_handler(std::string_view name, Type type, bool ftz) {
    if (is_float(type)) {
        if (name == "eq")
            return float_compare<Equal>(type, ftz);
        if (name == "ne")
            return float_compare<OrderedNotEqual>(type, ftz);
        if (name == "lt")
            return float_compare<Less>(type, ftz);
        if (name == "le")
            return float_compare<LessEqual>(type, ftz);
        if (name == "gt")
            return float_compare<Greater>(type, ftz);
        if (name == "ge")
            return float_compare<GreaterEqual>(type, ftz);
        if (name == "equ")
            return float_compare<UnorderedEqual>(type, ftz);
        if (name == "neu")
            return float_compare<NotEqual>(type, ftz);
        if (name == "ltu")
            return float_compare<UnorderedLess>(type, ftz);
        if (name == "leu")
            return float_compare<UnorderedLessEqual>(type, ftz);
        if (name == "gtu")
            return float_compare<UnorderedGreater>(type, ftz);
        if (name == "geu")
            return float_compare<UnorderedGreaterEqual>(type, ftz);
        if (name == "num")
            return float_compare<BothNumbers>(type, ftz);
        if (name == "nan")
            return float_compare<AnyNan>(type, ftz);
        throw Unsupported{"this comparison"};
    }
    const auto integer = [type]<class F>(F) {
        return for_integer(type, []<class T>() -> Handler { return &set_predicate<T, F>; });
    };
    if (name == "eq")
        return integer(Equal{});
    if (name == "ne")
        return integer(NotEqual{});
    if (name == "lt" || name == "lo")
        return integer(Less{});
    if (name == "le" || name == "ls")
        return integer(LessEqual{});
    if (name == "gt" || name == "hi")
        return integer(Greater{});
    if (name == "ge" || name == "hs")
        return integer(GreaterEqual{});
    throw Unsupported{"this comparison"};
}

Type unsigned_for(std::string_view comparison, Type type) {
    // lo, ls, hi and hs compare unsigned whatever the type says.
    if (comparison != "lo" && comparison != "ls" && comparison != "hi" && comparison != "hs")
        return type;
    switch (type) {
    case Type::s16:
        return Type::u16;
    case Type::s32:
        return Type::u32;
    case Type::s64:
        return Type::u64;
    default:
        return type;
    }
}

Combine combine_of(const Instruction &i) {
    if (i.has("and"))
        return Combine::logical_and;
    if (i.has("or"))
        return Combine::logical_or;
    if (i.has("xor"))
        return Combine::logical_xor;
    return Combine::none;
}

void check_comparison(const Instruction &i, int operands) {
    check_form(i, {"eq",  "ne",  "lt",  "le",  "gt",  "ge",  "lo",  "ls",  "hi", "hs",  "equ",
                   "neu", "ltu", "leu", "gtu", "geu", "num", "nan", "and", "or", "xor", "ftz"},
               operands);
}

template <unsigned shift> struct TakeHalf {
    static std::uint16_t apply(std::uint32_t a) { return static_cast<std::uint16_t>(a >> shift); }
};

struct Halves {
    std::uint32_t low, high;
};
Halves split(Decoder &decoder, std::uint32_t packed) {
    const Halves result{decoder.temporary(2), decoder.temporary(2)};
    decoder.emit(&unary<std::uint16_t, std::uint32_t, TakeHalf<0>>, result.low, packed);
    decoder.emit(&unary<std::uint16_t, std::uint32_t, TakeHalf<16>>, result.high, packed);
    return result;
}

bool is_packed(Type type) {
    return type == Type::f16x2 || type == Type::bf16x2;
}
Type element_of(Type type) {
    return type == Type::f16x2 ? Type::f16 : Type::bf16;
}

void decode_setp(Decoder &decoder, const Instruction &i) {
    const Combine how = combine_of(i);
    check_comparison(i, how == Combine::none ? 3 : 4);
    require(!i.modifiers.empty(), "a comparison without an operator");
    const std::string_view comparison = i.modifiers.front();
    const Type type = unsigned_for(comparison, types_of(i).first);
    const bool has_pair = i.operands[0].kind == Operand::Kind::pair;
    const Operand &first = has_pair ? i.operands[0].elements[0] : i.operands[0];
    const std::uint32_t other = how == Combine::none ? 0 : decoder.predicate(i.operands[3]);
    const std::uint32_t a = decoder.source(i.operands[1], type);
    const std::uint32_t b = decoder.source(i.operands[2], type);
    const std::uint32_t p = decoder.predicate_destination(first);
    const std::uint32_t q = has_pair ? decoder.predicate_destination(i.operands[0].elements[1]) : 0;
    if (is_packed(type)) {
        // p and q are the comparisons of the two halves.
        const Handler handler = compare_handler(comparison, element_of(type), i.has("ftz"));
        const Halves x = split(decoder, a);
        const Halves y = split(decoder, b);
        decoder.emit(handler, p, x.low, y.low, other).detail = static_cast<std::uint16_t>(how);
        if (has_pair)
            decoder.emit(handler, q, x.high, y.high, other).detail = static_cast<std::uint16_t>(how);
        return;
    }
    decoder.emit(compare_handler(comparison, type, i.has("ftz")), p, a, b, other, q).detail =
        static_cast<std::uint16_t>(how);
}

/// d = c ? a : b by width, a and b rows.
template <class T> void select_by_predicate(Warp &warp, const Op &op, Mask mask) {
    T *d = row<T>(warp, op.d);
    const T *a = row<T>(warp, op.a);
    const T *b = row<T>(warp, op.b);
    const Mask chosen = *row<Mask>(warp, op.c);
    if (is_dense(warp, mask)) {
#pragma GCC ivdep
        for (unsigned lane = 0; lane < warp_size; ++lane) {
            const T keep = static_cast<T>(T{0} - static_cast<T>(chosen >> lane & 1));
            d[lane] = static_cast<T>((a[lane] & keep) | (b[lane] & static_cast<T>(~keep)));
        }
    } else {
        each_lane(mask, [&](unsigned lane) { d[lane] = (chosen >> lane & 1) != 0 ? a[lane] : b[lane]; });
    }
}

Handler select_handler(std::size_t width) {
    return for_width(width, []<class T>() -> Handler { return &select_by_predicate<T>; });
}

void join_halves(Warp &warp, const Op &op, Mask mask) {
    auto *d = row<std::uint32_t>(warp, op.d);
    const auto *a = row<std::uint16_t>(warp, op.a);
    const auto *b = row<std::uint16_t>(warp, op.b);
    each_lane(mask, [&](unsigned lane) { d[lane] = std::uint32_t{b[lane]} << 16 | a[lane]; });
}

std::uint64_t true_value(Type type) {
    switch (type) {
    case Type::f32:
        return 0x3f800000u;
    case Type::f16:
    case Type::f16x2:
        return 0x3c00u;
    case Type::bf16:
    case Type::bf16x2:
        return 0x3f80u;
    default:
        return ~std::uint64_t{0};
    }
}

void decode_set(Decoder &decoder, const Instruction &i) {
    const Combine how = combine_of(i);
    check_comparison(i, how == Combine::none ? 3 : 4);
    const Types types = types_of(i);
    require(types.second != Type::none && !i.modifiers.empty(), "a comparison without two types");
    const std::string_view comparison = i.modifiers.front();
    const Type type = unsigned_for(comparison, types.second);
    const std::uint32_t other = how == Combine::none ? 0 : decoder.predicate(i.operands[3]);
    const std::uint32_t a = decoder.source(i.operands[1], type);
    const std::uint32_t b = decoder.source(i.operands[2], type);
    const std::uint32_t d = decoder.destination(i.operands[0], types.first);
    const auto choose = [&](std::uint32_t into, std::size_t width, std::uint32_t x, std::uint32_t y, Type compared) {
        const std::uint32_t chosen = decoder.temporary_predicate();
        decoder.emit(compare_handler(comparison, compared, i.has("ftz")), chosen, x, y, other).detail =
            static_cast<std::uint16_t>(how);
        decoder.emit(select_handler(width), into, decoder.constant(width, true_value(types.first)),
                     decoder.constant(width, 0), chosen);
    };
    if (is_packed(type)) {
        const Halves x = split(decoder, a);
        const Halves y = split(decoder, b);
        const Halves result{decoder.temporary(2), decoder.temporary(2)};
        choose(result.low, 2, x.low, y.low, element_of(type));
        choose(result.high, 2, x.high, y.high, element_of(type));
        decoder.emit(&join_halves, d, result.low, result.high);
        return;
    }
    choose(d, size_of(types.first), a, b, type);
}

template <class T> void test_property(Warp &warp, const Op &op, Mask mask) {
    const T *a = row<T>(warp, op.a);
    Mask result = 0;
    each_lane(mask, [&](unsigned lane) {
        const int kind = std::fpclassify(a[lane]);
        bool holds = false;
        switch (op.detail) {
        case 0:
            holds = kind != FP_INFINITE && kind != FP_NAN;
            break;
        case 1:
            holds = kind == FP_INFINITE;
            break;
        case 2:
            holds = kind != FP_NAN;
            break;
        case 3:
            holds = kind == FP_NAN;
            break;
        case 4:
            holds = kind == FP_NORMAL || kind == FP_ZERO;
            break;
        default:
            holds = kind == FP_SUBNORMAL;
            break;
        }
        result |= static_cast<Mask>(holds) << lane;
    });
    write_predicate(warp, op.d, mask, result);
}

void decode_testp(Decoder &decoder, const Instruction &i) {
    static constexpr std::string_view properties[] = {"finite",     "infinite", "number",
                                                      "notanumber", "normal",   "subnormal"};
    check_form(i, {"finite", "infinite", "number", "notanumber", "normal", "subnormal"}, 2);
    const Type type = types_of(i).first;
    require(type == Type::f32 || type == Type::f64, "this type");
    const std::uint32_t a = decoder.source(i.operands[1], type);
    Op &op = decoder.emit(type == Type::f64 ? &test_property<double> : &test_property<float>,
                          decoder.predicate_destination(i.operands[0]), a);
    for (std::uint16_t k = 0; k < std::size(properties); ++k)
        if (i.has(properties[k]))
            op.detail = k;
}

enum class Logic : std::uint16_t { copy, negate, both, either, exclusive };

void predicate_logic(Warp &warp, const Op &op, Mask mask) {
    const Mask a = *row<Mask>(warp, op.a);
    const Mask b = *row<Mask>(warp, op.b);
    Mask result = a;
    switch (static_cast<Logic>(op.detail)) {
    case Logic::copy:
        break;
    case Logic::negate:
        result = ~a;
        break;
    case Logic::both:
        result = a & b;
        break;
    case Logic::either:
        result = a | b;
        break;
    case Logic::exclusive:
        result = a ^ b;
        break;
    }
    write_predicate(warp, op.d, mask, result);
}

} // namespace

void run_predicate_not(Warp &warp, const Op &op, Mask mask) {
    write_predicate(warp, op.d, mask, ~*row<Mask>(warp, op.a));
}

bool decode_compare(Decoder &decoder, const Instruction &i) {
    const std::string_view name = i.opcode;
    const Type type = types_of(i).first;
    if (name == "setp")
        decode_setp(decoder, i);
    else if (name == "set")
        decode_set(decoder, i);
    else if (name == "testp")
        decode_testp(decoder, i);
    else if (name == "selp") {
        check_form(i, {}, 4);
        require(type != Type::pred, "this type");
        const std::uint32_t a = decoder.source(i.operands[1], type);
        const std::uint32_t b = decoder.source(i.operands[2], type);
        const std::uint32_t c = decoder.predicate(i.operands[3]);
        decoder.emit(select_handler(size_of(type)), decoder.destination(i.operands[0], type), a, b, c);
    } else if (type == Type::pred) {
        Logic logic = Logic::copy;
        if (name == "not")
            logic = Logic::negate;
        else if (name == "and")
            logic = Logic::both;
        else if (name == "or")
            logic = Logic::either;
        else if (name == "xor")
            logic = Logic::exclusive;
        else if (name != "mov")
            return false;
        const bool two = name == "and" || name == "or" || name == "xor";
        check_form(i, {}, two ? 3 : 2);
        const std::uint32_t a = decoder.predicate(i.operands[1]);
        const std::uint32_t b = two ? decoder.predicate(i.operands[2]) : a;
        decoder.emit(&predicate_logic, decoder.predicate_destination(i.operands[0]), a, b).detail =
            static_cast<std::uint16_t>(logic);
    } else {
        return false;
    }
    return true;
}

} // namespace simgpu::ptx
