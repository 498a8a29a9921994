// Operations on the bits of integers: logic, shifts, fields, permutations, counts, and the dot products of packed
// bytes.
#include <bit>
#include <type_traits>

#include "decode.hpp"
#include "lanes.hpp"
#include "typed.hpp"

namespace simgpu::ptx {

namespace {

template <class T> using Unsigned = std::make_unsigned_t<T>;
// Arithmetic in at least `unsigned`, so that 16-bit operands do not become signed int.
template <class T> using Wide = std::conditional_t<sizeof(T) == 8, std::uint64_t, std::uint32_t>;

template <class T> struct And {
    static T apply(T a, T b) { return static_cast<T>(a & b); }
};
template <class T> struct Or {
    static T apply(T a, T b) { return static_cast<T>(a | b); }
};
template <class T> struct Xor {
    static T apply(T a, T b) { return static_cast<T>(a ^ b); }
};
template <class T> struct Not {
    static T apply(T a) { return static_cast<T>(~a); }
};
template <class T> struct LogicalNot {
    static T apply(T a) { return a == 0 ? 1 : 0; }
};

template <class T> struct ShiftLeft {
    static T apply(T a, std::uint32_t n) {
        return n >= 8 * sizeof(T) ? T{0} : static_cast<T>(static_cast<Wide<T>>(a) << n);
    }
};
template <class T> struct ShiftRight {
    static T apply(T a, std::uint32_t n) {
        constexpr std::uint32_t last = 8 * sizeof(T) - 1;
        if (n > last) {
            if constexpr (std::is_signed_v<T>)
                return static_cast<T>(a >> last);
            return 0;
        }
        return static_cast<T>(a >> n);
    }
};

template <class T> struct PopulationCount {
    static std::uint32_t apply(T a) { return static_cast<std::uint32_t>(std::popcount(a)); }
};
template <class T> struct LeadingZeros {
    static std::uint32_t apply(T a) { return static_cast<std::uint32_t>(std::countl_zero(a)); }
};
template <class T> struct ReverseBits {
    static T apply(T a) {
        T result = 0;
        for (unsigned i = 0; i < 8 * sizeof(T); ++i)
            result = static_cast<T>(result << 1 | (a >> i & 1));
        return result;
    }
};
template <class T, bool shift_amount> struct FindLeading {
    static std::uint32_t apply(T a) {
        auto bits = static_cast<Unsigned<T>>(a);
        if constexpr (std::is_signed_v<T>) {
            if (a < 0)
                bits = static_cast<Unsigned<T>>(~bits);
        }
        if (bits == 0)
            return ~0u;
        const auto zeros = static_cast<std::uint32_t>(std::countl_zero(bits));
        return shift_amount ? zeros : static_cast<std::uint32_t>(8 * sizeof(T) - 1) - zeros;
    }
};
template <class T> struct ExtractField {
    static T apply(T a, std::uint32_t b, std::uint32_t c) {
        constexpr std::uint32_t bits = 8 * sizeof(T);
        using U = Unsigned<T>;
        const std::uint32_t position = b & 0xff;
        const std::uint32_t length = c & 0xff;
        if (length == 0)
            return 0;
        U fill = 0;
        if constexpr (std::is_signed_v<T>) {
            const std::uint32_t sign_at = position + length - 1 < bits ? position + length - 1 : bits - 1;
            if (static_cast<U>(a) >> sign_at & 1)
                fill = static_cast<U>(~U{0});
        }
        if (position >= bits)
            return static_cast<T>(fill);
        const std::uint32_t available = bits - position;
        const std::uint32_t taken = length < available ? length : available;
        const U mask = taken >= bits ? static_cast<U>(~U{0}) : static_cast<U>((U{1} << taken) - 1);
        return static_cast<T>(((static_cast<U>(a) >> position) & mask) | (fill & static_cast<U>(~mask)));
    }
};

template <class T> void insert_field(Warp &warp, const Op &op, Mask mask) {
    T *d = row<T>(warp, op.d);
    const T *a = row<T>(warp, op.a);
    const T *b = row<T>(warp, op.b);
    const auto *c = row<std::uint32_t>(warp, op.c);
    const auto *e = row<std::uint32_t>(warp, op.e);
    each_lane(mask, [&](unsigned lane) {
        constexpr std::uint32_t bits = 8 * sizeof(T);
        const std::uint32_t position = c[lane] & 0xff;
        const std::uint32_t length = e[lane] & 0xff;
        T field = length >= bits ? static_cast<T>(~T{0}) : static_cast<T>((T{1} << length) - 1);
        field = position >= bits ? T{0} : static_cast<T>(field << position);
        const T inserted = position >= bits ? T{0} : static_cast<T>(a[lane] << position);
        d[lane] = static_cast<T>((b[lane] & ~field) | (inserted & field));
    });
}

struct BitMask {
    template <bool clamp> static std::uint32_t make(std::uint32_t position, std::uint32_t width) {
        if (!clamp) {
            position &= 31;
            width &= 31;
        }
        if (position >= 32)
            return 0;
        const std::uint32_t mask = width >= 32 ? ~0u : (1u << width) - 1;
        return mask << position;
    }
};
struct BitMaskClamp {
    static std::uint32_t apply(std::uint32_t a, std::uint32_t b) { return BitMask::make<true>(a, b); }
};
struct BitMaskWrap {
    static std::uint32_t apply(std::uint32_t a, std::uint32_t b) { return BitMask::make<false>(a, b); }
};

template <class T, bool clamp> struct ExtendField {
    static T apply(T a, std::uint32_t width) {
        if (!clamp)
            width &= 31;
        if (width >= 32)
            return a;
        if (width == 0)
            return 0;
        const unsigned shift = 32 - width;
        return static_cast<T>(static_cast<T>(static_cast<std::uint32_t>(a) << shift) >> shift);
    }
};

template <bool left, bool clamp> struct FunnelShift {
    static std::uint32_t apply(std::uint32_t low, std::uint32_t high, std::uint32_t amount) {
        const std::uint32_t n = clamp ? (amount > 32 ? 32 : amount) : amount & 31;
        const std::uint64_t both = std::uint64_t{high} << 32 | low;
        return left ? static_cast<std::uint32_t>(both << n >> 32) : static_cast<std::uint32_t>(both >> n);
    }
};

struct FindNthSet {
    static std::uint32_t apply(std::uint32_t mask, std::uint32_t base, std::int32_t offset) {
        if (base > 31)
            return ~0u;
        if (offset == 0)
            return mask >> base & 1 ? base : ~0u;
        const int step = offset > 0 ? 1 : -1;
        std::int64_t left = offset > 0 ? offset : -static_cast<std::int64_t>(offset);
        for (auto at = static_cast<std::int32_t>(base); at >= 0 && at < 32; at += step)
            if ((mask >> at & 1) != 0 && --left == 0)
                return static_cast<std::uint32_t>(at);
        return ~0u;
    }
};

std::uint32_t permute(std::uint32_t a, std::uint32_t b, std::uint32_t selector) {
    const std::uint64_t bytes = std::uint64_t{b} << 32 | a;
    std::uint32_t result = 0;
    for (unsigned i = 0; i < 4; ++i) {
        const std::uint32_t control = selector >> (4 * i);
        auto byte = static_cast<std::uint32_t>(bytes >> (8 * (control & 7)) & 0xff);
        if ((control & 8) != 0)
            byte = (byte & 0x80) != 0 ? 0xff : 0;
        result |= byte << (8 * i);
    }
    return result;
}
struct Permute {
    static std::uint32_t apply(std::uint32_t a, std::uint32_t b, std::uint32_t c) { return permute(a, b, c); }
};
// The special modes are permutations whose selector depends on the two low bits of c.
template <unsigned s0, unsigned s1, unsigned s2, unsigned s3> struct PermuteMode {
    static std::uint32_t apply(std::uint32_t a, std::uint32_t b, std::uint32_t c) {
        constexpr std::uint32_t selectors[4] = {s0, s1, s2, s3};
        return permute(a, b, selectors[c & 3]);
    }
};

void lookup3(Warp &warp, const Op &op, Mask mask) {
    auto *d = row<std::uint32_t>(warp, op.d);
    const auto *a = row<std::uint32_t>(warp, op.a);
    const auto *b = row<std::uint32_t>(warp, op.b);
    const auto *c = row<std::uint32_t>(warp, op.c);
    std::uint32_t term[8];
    for (unsigned i = 0; i < 8; ++i)
        term[i] = (op.immediate >> i & 1) != 0 ? ~0u : 0;
    const auto one = [&](unsigned lane) {
        const std::uint32_t x = a[lane], y = b[lane], z = c[lane];
        d[lane] = (~x & ~y & ~z & term[0]) | (~x & ~y & z & term[1]) | (~x & y & ~z & term[2]) |
                  (~x & y & z & term[3]) | (x & ~y & ~z & term[4]) | (x & ~y & z & term[5]) | (x & y & ~z & term[6]) |
                  (x & y & z & term[7]);
    };
    if (is_dense(warp, mask)) {
#pragma GCC ivdep
        for (unsigned lane = 0; lane < warp_size; ++lane)
            one(lane);
    } else {
        each_lane(mask, one);
    }
}

template <class A, class B> struct DotProduct4 {
    static std::uint32_t apply(std::uint32_t a, std::uint32_t b, std::uint32_t c) {
        for (unsigned i = 0; i < 4; ++i)
            c += static_cast<std::uint32_t>(static_cast<A>(a >> (8 * i)) * static_cast<B>(b >> (8 * i)));
        return c;
    }
};
template <class A, class B, bool high> struct DotProduct2 {
    using A16 = std::conditional_t<std::is_signed_v<A>, std::int16_t, std::uint16_t>;
    static std::uint32_t apply(std::uint32_t a, std::uint32_t b, std::uint32_t c) {
        for (unsigned i = 0; i < 2; ++i)
            c += static_cast<std::uint32_t>(static_cast<A16>(a >> (16 * i)) *
                                            static_cast<B>(b >> (8 * i + (high ? 16 : 0))));
        return c;
    }
};

void emit_binary(Decoder &decoder, const Instruction &i, Type type, Handler handler) {
    const std::uint32_t a = decoder.source(i.operands[1], type);
    const std::uint32_t b = decoder.source(i.operands[2], type);
    decoder.emit(handler, decoder.destination(i.operands[0], type), a, b);
}

template <class A, class B> Handler dot_handler(const Instruction &i) {
    if (i.opcode == "dp4a")
        return &ternary_same<std::uint32_t, DotProduct4<A, B>>;
    return i.has("hi") ? &ternary_same<std::uint32_t, DotProduct2<A, B, true>>
                       : &ternary_same<std::uint32_t, DotProduct2<A, B, false>>;
}

void decode_dot(Decoder &decoder, const Instruction &i, const Types &types) {
    check_form(i, {"lo", "hi"}, 4);
    require(size_of(types.first) == 4 && size_of(types.second) == 4, "this type");
    const bool a_signed = types.first == Type::s32;
    const bool b_signed = types.second == Type::s32;
    using S = std::int8_t;
    using U = std::uint8_t;
    const Handler handler = a_signed ? (b_signed ? dot_handler<S, S>(i) : dot_handler<S, U>(i))
                                     : (b_signed ? dot_handler<U, S>(i) : dot_handler<U, U>(i));
    const std::uint32_t a = decoder.source(i.operands[1], Type::b32);
    const std::uint32_t b = decoder.source(i.operands[2], Type::b32);
    const std::uint32_t c = decoder.source(i.operands[3], Type::b32);
    decoder.emit(handler, decoder.destination(i.operands[0], Type::b32), a, b, c);
}

void decode_shift(Decoder &decoder, const Instruction &i, Type type) {
    check_form(i, {}, 3);
    const std::uint32_t a = decoder.source(i.operands[1], type);
    const std::uint32_t n = decoder.source(i.operands[2], Type::u32);
    const bool left = i.opcode == "shl";
    const Handler handler = for_integer(type, [left]<class T>() -> Handler {
        return left ? &binary<T, T, std::uint32_t, ShiftLeft<T>> : &binary<T, T, std::uint32_t, ShiftRight<T>>;
    });
    decoder.emit(handler, decoder.destination(i.operands[0], type), a, n);
}

template <template <class> class F> void decode_count(Decoder &decoder, const Instruction &i, Type type) {
    check_form(i, {}, 2);
    const std::uint32_t a = decoder.source(i.operands[1], type);
    const Handler handler = size_of(type) == 8 ? &unary<std::uint32_t, std::uint64_t, F<std::uint64_t>>
                                               : &unary<std::uint32_t, std::uint32_t, F<std::uint32_t>>;
    require(size_of(type) >= 4, "this type");
    decoder.emit(handler, decoder.destination(i.operands[0], Type::u32), a);
}

void decode_bits(Decoder &decoder, const Instruction &i, Type type) {
    const auto &o = i.operands;
    if (i.opcode == "bfe") {
        check_form(i, {}, 4);
        const std::uint32_t a = decoder.source(o[1], type);
        const std::uint32_t b = decoder.source(o[2], Type::u32);
        const std::uint32_t c = decoder.source(o[3], Type::u32);
        const Handler handler = for_integer(
            type, []<class T>() -> Handler { return &ternary<T, T, std::uint32_t, std::uint32_t, ExtractField<T>>; });
        decoder.emit(handler, decoder.destination(o[0], type), a, b, c);
    } else if (i.opcode == "bfi") {
        check_form(i, {}, 5);
        const std::uint32_t a = decoder.source(o[1], type);
        const std::uint32_t b = decoder.source(o[2], type);
        const std::uint32_t c = decoder.source(o[3], Type::u32);
        const std::uint32_t e = decoder.source(o[4], Type::u32);
        decoder.emit(size_of(type) == 8 ? &insert_field<std::uint64_t> : &insert_field<std::uint32_t>,
                     decoder.destination(o[0], type), a, b, c, e);
    } else if (i.opcode == "bfind") {
        check_form(i, {"shiftamt"}, 2);
        const bool amount = i.has("shiftamt");
        const std::uint32_t a = decoder.source(o[1], type);
        const Handler handler = for_integer(type, [amount]<class T>() -> Handler {
            return amount ? &unary<std::uint32_t, T, FindLeading<T, true>>
                          : &unary<std::uint32_t, T, FindLeading<T, false>>;
        });
        decoder.emit(handler, decoder.destination(o[0], Type::u32), a);
    } else if (i.opcode == "bmsk") {
        check_form(i, {"clamp", "wrap"}, 3);
        emit_binary(decoder, i, Type::b32,
                    i.has("clamp") ? &binary_same<std::uint32_t, BitMaskClamp>
                                   : &binary_same<std::uint32_t, BitMaskWrap>);
    } else if (i.opcode == "szext") {
        check_form(i, {"clamp", "wrap"}, 3);
        const std::uint32_t a = decoder.source(o[1], type);
        const std::uint32_t b = decoder.source(o[2], Type::u32);
        using S = std::int32_t;
        using U = std::uint32_t;
        const bool clamp = i.has("clamp");
        const Handler handler =
            type == Type::s32
                ? (clamp ? &binary<S, S, U, ExtendField<S, true>> : &binary<S, S, U, ExtendField<S, false>>)
                : (clamp ? &binary<U, U, U, ExtendField<U, true>> : &binary<U, U, U, ExtendField<U, false>>);
        decoder.emit(handler, decoder.destination(o[0], type), a, b);
    } else if (i.opcode == "fns") {
        check_form(i, {}, 4);
        const std::uint32_t a = decoder.source(o[1], Type::b32);
        const std::uint32_t b = decoder.source(o[2], Type::b32);
        const std::uint32_t c = decoder.source(o[3], Type::s32);
        decoder.emit(&ternary<std::uint32_t, std::uint32_t, std::uint32_t, std::int32_t, FindNthSet>,
                     decoder.destination(o[0], Type::b32), a, b, c);
    } else if (i.opcode == "shf") {
        check_form(i, {"l", "r", "clamp", "wrap"}, 4);
        const bool left = i.has("l");
        const bool clamp = i.has("clamp");
        using U = std::uint32_t;
        const Handler handler =
            left ? (clamp ? &ternary_same<U, FunnelShift<true, true>> : &ternary_same<U, FunnelShift<true, false>>)
                 : (clamp ? &ternary_same<U, FunnelShift<false, true>> : &ternary_same<U, FunnelShift<false, false>>);
        const std::uint32_t a = decoder.source(o[1], Type::b32);
        const std::uint32_t b = decoder.source(o[2], Type::b32);
        const std::uint32_t c = decoder.source(o[3], Type::u32);
        decoder.emit(handler, decoder.destination(o[0], Type::b32), a, b, c);
    } else if (i.opcode == "prmt") {
        check_form(i, {"f4e", "b4e", "rc8", "ecl", "ecr", "rc16"}, 4);
        using U = std::uint32_t;
        Handler handler = &ternary_same<U, Permute>;
        if (i.has("f4e"))
            handler = &ternary_same<U, PermuteMode<0x3210, 0x4321, 0x5432, 0x6543>>;
        if (i.has("b4e"))
            handler = &ternary_same<U, PermuteMode<0x5670, 0x6701, 0x7012, 0x0123>>;
        if (i.has("rc8"))
            handler = &ternary_same<U, PermuteMode<0x0000, 0x1111, 0x2222, 0x3333>>;
        if (i.has("ecl"))
            handler = &ternary_same<U, PermuteMode<0x3210, 0x3211, 0x3222, 0x3333>>;
        if (i.has("ecr"))
            handler = &ternary_same<U, PermuteMode<0x0000, 0x1110, 0x2210, 0x3210>>;
        if (i.has("rc16"))
            handler = &ternary_same<U, PermuteMode<0x1010, 0x3232, 0x1010, 0x3232>>;
        const std::uint32_t a = decoder.source(o[1], Type::b32);
        const std::uint32_t b = decoder.source(o[2], Type::b32);
        const std::uint32_t c = decoder.source(o[3], Type::b32);
        decoder.emit(handler, decoder.destination(o[0], Type::b32), a, b, c);
    } else { // lop3
        check_form(i, {}, 5);
        const std::uint32_t a = decoder.source(o[1], Type::b32);
        const std::uint32_t b = decoder.source(o[2], Type::b32);
        const std::uint32_t c = decoder.source(o[3], Type::b32);
        require(o[4].kind == Operand::Kind::integer, "a lookup table that is no constant");
        decoder.emit(&lookup3, decoder.destination(o[0], Type::b32), a, b, c).immediate =
            static_cast<std::int64_t>(o[4].bits & 0xff);
    }
}

} // namespace

bool decode_bitwise(Decoder &decoder, const Instruction &i) {
    const Types types = types_of(i);
    const Type type = types.first;
    const std::string_view name = i.opcode;
    if ((name == "and" || name == "or" || name == "xor") && type != Type::pred) {
        check_form(i, {}, 3);
        emit_binary(decoder, i, type,
                    name == "and"  ? binary_handler<And>(type)
                    : name == "or" ? binary_handler<Or>(type)
                                   : binary_handler<Xor>(type));
    } else if ((name == "not" || name == "cnot") && type != Type::pred) {
        check_form(i, {}, 2);
        const std::uint32_t a = decoder.source(i.operands[1], type);
        decoder.emit(name == "not" ? unary_handler<Not>(type) : unary_handler<LogicalNot>(type),
                     decoder.destination(i.operands[0], type), a);
    } else if (name == "shl" || name == "shr") {
        decode_shift(decoder, i, type);
    } else if (name == "popc") {
        decode_count<PopulationCount>(decoder, i, type);
    } else if (name == "clz") {
        decode_count<LeadingZeros>(decoder, i, type);
    } else if (name == "brev") {
        check_form(i, {}, 2);
        const std::uint32_t a = decoder.source(i.operands[1], type);
        decoder.emit(size_of(type) == 8 ? &unary_same<std::uint64_t, ReverseBits<std::uint64_t>>
                                        : &unary_same<std::uint32_t, ReverseBits<std::uint32_t>>,
                     decoder.destination(i.operands[0], type), a);
    } else if (name == "dp4a" || name == "dp2a") {
        decode_dot(decoder, i, types);
    } else if (name == "bfe" || name == "bfi" || name == "bfind" || name == "bmsk" || name == "szext" ||
               name == "fns" || name == "shf" || name == "prmt" || name == "lop3") {
        decode_bits(decoder, i, type);
    } else {
        return false;
    }
    return true;
}

} // namespace simgpu::ptx
