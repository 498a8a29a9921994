// f32 and f64 arithmetic. IEEE operations are correctly rounded in the requested direction; the approximate ones are
// computed in double and rounded once, which is within the hardware's error bounds but not bit-identical to it.
#include <cfenv>
#include <cmath>

#include "decode.hpp"
#include "float_values.hpp"
#include "lanes.hpp"

#if defined(__x86_64__)
#define SIMGPU_HAS_X86_FMA 1
#endif

namespace simgpu::ptx {

namespace {

struct Add {
    template <class T> static T apply(T a, T b) { return a + b; }
};
struct Subtract {
    template <class T> static T apply(T a, T b) { return a - b; }
};
struct Multiply {
    template <class T> static T apply(T a, T b) { return a * b; }
};
struct Divide {
    template <class T> static T apply(T a, T b) { return a / b; }
};
struct Minimum {
    template <class T> static T apply(T a, T b) { return minimum(a, b); }
};
struct Maximum {
    template <class T> static T apply(T a, T b) { return maximum(a, b); }
};
struct MinimumNan {
    template <class T> static T apply(T a, T b) { return a != a || b != b ? a + b : minimum(a, b); }
};
struct MaximumNan {
    template <class T> static T apply(T a, T b) { return a != a || b != b ? a + b : maximum(a, b); }
};
struct FusedMultiplyAdd {
    template <class T> static T apply(T a, T b, T c) { return std::fma(a, b, c); }
};

struct Reciprocal {
    template <class T> static T apply(T a) { return T{1} / a; }
};
struct SquareRoot {
    template <class T> static T apply(T a) { return std::sqrt(a); }
};
struct ReciprocalRoot {
    template <class T> static T apply(T a) {
        if (a == T{0})
            return std::copysign(static_cast<T>(HUGE_VAL), a);
        return static_cast<T>(1.0 / std::sqrt(static_cast<double>(a)));
    }
};
struct Sine {
    template <class T> static T apply(T a) { return static_cast<T>(std::sin(static_cast<double>(a))); }
};
struct Cosine {
    template <class T> static T apply(T a) { return static_cast<T>(std::cos(static_cast<double>(a))); }
};
struct Logarithm2 {
    template <class T> static T apply(T a) { return static_cast<T>(std::log2(static_cast<double>(a))); }
};
struct Exponential2 {
    template <class T> static T apply(T a) { return static_cast<T>(std::exp2(static_cast<double>(a))); }
};
struct HyperbolicTangent {
    template <class T> static T apply(T a) { return static_cast<T>(std::tanh(static_cast<double>(a))); }
};

template <bool ftz, bool sat, class T> inline T finish(T value) {
    if constexpr (ftz)
        value = flush(value);
    if constexpr (sat)
        return saturate(value);
    return canonical(value);
}
template <bool ftz, class T> inline T take(T value) {
    if constexpr (ftz)
        return flush(value);
    return value;
}

template <class T, class F, bool ftz, bool sat> struct One {
    static T apply(T a) { return finish<ftz, sat>(F::apply(take<ftz>(a))); }
};
template <class T, class F, bool ftz, bool sat> struct Two {
    static T apply(T a, T b) { return finish<ftz, sat>(F::apply(take<ftz>(a), take<ftz>(b))); }
};
template <class T, class F, bool ftz, bool sat> struct Three {
    static T apply(T a, T b, T c) { return finish<ftz, sat>(F::apply(take<ftz>(a), take<ftz>(b), take<ftz>(c))); }
};
/// The smaller or larger magnitude, with the product of the signs.
template <class F, bool ftz> struct XorSign {
    static float apply(float a, float b) {
        const float magnitude = F::apply(std::fabs(take<ftz>(a)), std::fabs(take<ftz>(b)));
        const std::uint32_t sign = (std::bit_cast<std::uint32_t>(a) ^ std::bit_cast<std::uint32_t>(b)) & 0x80000000u;
        return canonical(std::bit_cast<float>(std::bit_cast<std::uint32_t>(std::fabs(magnitude)) | sign));
    }
};

template <class T, bool ftz> struct Absolute {
    static T apply(T a) { return take<ftz>(std::fabs(a)); }
};
template <class T, bool ftz> struct Negate {
    static T apply(T a) { return take<ftz>(-a); }
};
template <class T> struct CopySign {
    static T apply(T a, T b) { return std::copysign(b, a); }
};

// Runs a handler with another rounding direction. The values it works on come from and go to memory that the compiler
// must assume fesetround can see, so no operation moves across the calls.
template <Handler inner, int direction> void rounded(Warp &warp, const Op &op, Mask mask) {
    std::fesetround(direction);
    inner(warp, op, mask);
    std::fesetround(FE_TONEAREST);
}

int direction_of(const Instruction &i) {
    if (i.has("rz"))
        return FE_TOWARDZERO;
    if (i.has("rm"))
        return FE_DOWNWARD;
    if (i.has("rp"))
        return FE_UPWARD;
    return FE_TONEAREST;
}

template <Handler inner> Handler with_direction(int direction) {
    if (direction == FE_TOWARDZERO)
        return &rounded<inner, FE_TOWARDZERO>;
    if (direction == FE_DOWNWARD)
        return &rounded<inner, FE_DOWNWARD>;
    if (direction == FE_UPWARD)
        return &rounded<inner, FE_UPWARD>;
    return inner;
}

#ifdef SIMGPU_HAS_X86_FMA
// std::fma is a function call for each lane on baseline x86-64. The instruction computes the same correctly rounded
// result, so which of the two runs makes no difference to any byte.
template <class T, bool ftz, bool sat>
__attribute__((target("avx2,fma"))) void fma_by_instruction(Warp &warp, const Op &op, Mask mask) {
    T *d = row<T>(warp, op.d);
    const T *a = row<T>(warp, op.a);
    const T *b = row<T>(warp, op.b);
    const T *c = row<T>(warp, op.c);
    const auto one = [](T x, T y, T z) __attribute__((target("avx2,fma"), always_inline)) {
        if constexpr (sizeof(T) == 4)
            return __builtin_fmaf(x, y, z);
        else
            return __builtin_fma(x, y, z);
    };
    if (is_dense(warp, mask)) {
#pragma GCC ivdep
        for (unsigned lane = 0; lane < warp_size; ++lane)
            d[lane] = finish<ftz, sat>(one(take<ftz>(a[lane]), take<ftz>(b[lane]), take<ftz>(c[lane])));
    } else {
        for (Mask rest = mask; rest != 0; rest &= rest - 1) {
            const auto lane = static_cast<unsigned>(std::countr_zero(rest));
            d[lane] = finish<ftz, sat>(one(take<ftz>(a[lane]), take<ftz>(b[lane]), take<ftz>(c[lane])));
        }
    }
}
bool has_fma_instruction() {
    static const bool answer = __builtin_cpu_supports("avx2") != 0 && __builtin_cpu_supports("fma") != 0;
    return answer;
}
#endif

template <class T, bool ftz, bool sat> Handler fma_handler(int direction) {
#ifdef SIMGPU_HAS_X86_FMA
    if (has_fma_instruction())
        return with_direction<&fma_by_instruction<T, ftz, sat>>(direction);
#endif
    return with_direction<&ternary_same<T, Three<T, FusedMultiplyAdd, ftz, sat>>>(direction);
}

template <class T, class F, bool ftz, bool sat> Handler binary_handler(int direction) {
    return with_direction<&binary_same<T, Two<T, F, ftz, sat>>>(direction);
}
template <class T, class F, bool ftz> Handler unary_handler(int direction) {
    return with_direction<&unary_same<T, One<T, F, ftz, false>>>(direction);
}

template <class F> Handler choose_binary(const Instruction &i, Type type) {
    const int direction = direction_of(i);
    if (type == Type::f64)
        return binary_handler<double, F, false, false>(direction);
    const bool ftz = i.has("ftz");
    if (i.has("sat"))
        return ftz ? binary_handler<float, F, true, true>(direction) : binary_handler<float, F, false, true>(direction);
    return ftz ? binary_handler<float, F, true, false>(direction) : binary_handler<float, F, false, false>(direction);
}
Handler choose_fma(const Instruction &i, Type type) {
    const int direction = direction_of(i);
    if (type == Type::f64)
        return fma_handler<double, false, false>(direction);
    const bool ftz = i.has("ftz");
    if (i.has("sat"))
        return ftz ? fma_handler<float, true, true>(direction) : fma_handler<float, false, true>(direction);
    return ftz ? fma_handler<float, true, false>(direction) : fma_handler<float, false, false>(direction);
}
template <class F> Handler choose_unary(const Instruction &i, Type type) {
    const int direction = direction_of(i);
    if (type == Type::f64)
        return unary_handler<double, F, false>(direction);
    return i.has("ftz") ? unary_handler<float, F, true>(direction) : unary_handler<float, F, false>(direction);
}

void emit_binary(Decoder &decoder, const Instruction &i, Type type, Handler handler) {
    const std::uint32_t a = decoder.source(i.operands[1], type);
    const std::uint32_t b = decoder.source(i.operands[2], type);
    decoder.emit(handler, decoder.destination(i.operands[0], type), a, b);
}
void emit_unary(Decoder &decoder, const Instruction &i, Type type, Handler handler) {
    const std::uint32_t a = decoder.source(i.operands[1], type);
    decoder.emit(handler, decoder.destination(i.operands[0], type), a);
}

void decode_extremum(Decoder &decoder, const Instruction &i, Type type) {
    check_form(i, {"ftz", "NaN", "xorsign", "abs"}, 3);
    const bool low = i.opcode == "min";
    const bool ftz = i.has("ftz");
    Handler handler = nullptr;
    if (i.has("xorsign")) {
        require(type == Type::f32, "this type");
        if (i.has("NaN"))
            handler =
                low ? &binary_same<float, XorSign<MinimumNan, false>> : &binary_same<float, XorSign<MaximumNan, false>>;
        else
            handler = low ? &binary_same<float, XorSign<Minimum, false>> : &binary_same<float, XorSign<Maximum, false>>;
        if (ftz) {
            if (i.has("NaN"))
                handler = low ? &binary_same<float, XorSign<MinimumNan, true>>
                              : &binary_same<float, XorSign<MaximumNan, true>>;
            else
                handler =
                    low ? &binary_same<float, XorSign<Minimum, true>> : &binary_same<float, XorSign<Maximum, true>>;
        }
    } else if (i.has("NaN")) {
        handler = low ? choose_binary<MinimumNan>(i, type) : choose_binary<MaximumNan>(i, type);
    } else {
        handler = low ? choose_binary<Minimum>(i, type) : choose_binary<Maximum>(i, type);
    }
    emit_binary(decoder, i, type, handler);
}

} // namespace

bool decode_float(Decoder &decoder, const Instruction &i) {
    const Type type = types_of(i).first;
    if (type != Type::f32 && type != Type::f64)
        return false;
    const std::string_view name = i.opcode;
    if (name == "add" || name == "sub" || name == "mul") {
        check_form(i, {"rn", "rz", "rm", "rp", "ftz", "sat"}, 3);
        require(types_of(i).second == Type::none, "mixed precision");
        emit_binary(decoder, i, type,
                    name == "add"   ? choose_binary<Add>(i, type)
                    : name == "sub" ? choose_binary<Subtract>(i, type)
                                    : choose_binary<Multiply>(i, type));
    } else if (name == "fma" || name == "mad") {
        check_form(i, {"rn", "rz", "rm", "rp", "ftz", "sat"}, 4);
        require(types_of(i).second == Type::none, "mixed precision");
        const std::uint32_t a = decoder.source(i.operands[1], type);
        const std::uint32_t b = decoder.source(i.operands[2], type);
        const std::uint32_t c = decoder.source(i.operands[3], type);
        decoder.emit(choose_fma(i, type), decoder.destination(i.operands[0], type), a, b, c);
    } else if (name == "div") {
        check_form(i, {"rn", "rz", "rm", "rp", "ftz", "approx", "full"}, 3);
        emit_binary(decoder, i, type, choose_binary<Divide>(i, type));
    } else if (name == "min" || name == "max") {
        decode_extremum(decoder, i, type);
    } else if (name == "abs") {
        check_form(i, {"ftz"}, 2);
        emit_unary(decoder, i, type,
                   type == Type::f64 ? &unary_same<double, Absolute<double, false>>
                   : i.has("ftz")    ? &unary_same<float, Absolute<float, true>>
                                     : &unary_same<float, Absolute<float, false>>);
    } else if (name == "neg") {
        check_form(i, {"ftz"}, 2);
        emit_unary(decoder, i, type,
                   type == Type::f64 ? &unary_same<double, Negate<double, false>>
                   : i.has("ftz")    ? &unary_same<float, Negate<float, true>>
                                     : &unary_same<float, Negate<float, false>>);
    } else if (name == "copysign") {
        check_form(i, {}, 3);
        emit_binary(decoder, i, type,
                    type == Type::f64 ? &binary_same<double, CopySign<double>> : &binary_same<float, CopySign<float>>);
    } else if (name == "rcp") {
        check_form(i, {"approx", "rn", "rz", "rm", "rp", "ftz"}, 2);
        emit_unary(decoder, i, type, choose_unary<Reciprocal>(i, type));
    } else if (name == "sqrt") {
        check_form(i, {"approx", "rn", "rz", "rm", "rp", "ftz"}, 2);
        emit_unary(decoder, i, type, choose_unary<SquareRoot>(i, type));
    } else if (name == "rsqrt" || name == "sin" || name == "cos" || name == "lg2" || name == "ex2" || name == "tanh") {
        check_form(i, {"approx", "ftz"}, 2);
        require(type == Type::f32 || name == "rsqrt", "this type");
        emit_unary(decoder, i, type,
                   name == "rsqrt" ? choose_unary<ReciprocalRoot>(i, type)
                   : name == "sin" ? choose_unary<Sine>(i, type)
                   : name == "cos" ? choose_unary<Cosine>(i, type)
                   : name == "lg2" ? choose_unary<Logarithm2>(i, type)
                   : name == "ex2" ? choose_unary<Exponential2>(i, type)
                                   : choose_unary<HyperbolicTangent>(i, type));
    } else {
        return false;
    }
    return true;
}

} // namespace simgpu::ptx
