// f16 and bf16 arithmetic, one value or two packed in 32 bits. Every operation is computed in double so that the single
// rounding to 16 bits is the correct one.
#include <cmath>

#include "decode.hpp"
#include "half.hpp"
#include "lanes.hpp"

namespace simgpu::ptx {

namespace {

struct Half {
    static constexpr std::uint16_t exponent = 0x7c00;
    static constexpr std::uint16_t nan = 0x7fff;
    static double from(std::uint16_t bits) { return static_cast<double>(float_from_half(bits)); }
    static std::uint16_t to(double value) { return half_from_double(value, Rounding::nearest); }
};
struct BFloat {
    static constexpr std::uint16_t exponent = 0x7f80;
    static constexpr std::uint16_t nan = 0x7fff;
    static double from(std::uint16_t bits) { return static_cast<double>(float_from_bfloat(bits)); }
    static std::uint16_t to(double value) { return bfloat_from_double(value, Rounding::nearest); }
};

struct Options {
    bool ftz = false, sat = false, relu = false;
};

template <class Format> bool is_nan(std::uint16_t bits) {
    return (bits & 0x7fff) > Format::exponent;
}
template <class Format> std::uint16_t flushed(std::uint16_t bits) {
    return (bits & Format::exponent) == 0 ? static_cast<std::uint16_t>(bits & 0x8000) : bits;
}

enum class Operation : std::uint8_t {
    add,
    subtract,
    multiply,
    fma,
    minimum,
    maximum,
    minimum_nan,
    maximum_nan,
    xor_minimum,
    xor_maximum,
    negate,
    absolute,
    exp2,
    tanh
};

template <class Format> std::uint16_t extremum(Operation operation, std::uint16_t a, std::uint16_t b) {
    const bool any_nan = is_nan<Format>(a) || is_nan<Format>(b);
    if (any_nan) {
        const bool propagate = operation == Operation::minimum_nan || operation == Operation::maximum_nan;
        if (propagate || (is_nan<Format>(a) && is_nan<Format>(b)))
            return Format::nan;
        return is_nan<Format>(a) ? b : a;
    }
    const bool low = operation == Operation::minimum || operation == Operation::minimum_nan;
    const double x = Format::from(a);
    const double y = Format::from(b);
    if (x == y)
        return ((a & 0x8000) != 0) == low ? a : b;
    return (x < y) == low ? a : b;
}

template <class Format>
std::uint16_t compute(Operation operation, const Options &options, std::uint16_t a, std::uint16_t b, std::uint16_t c) {
    if (options.ftz) {
        a = flushed<Format>(a);
        b = flushed<Format>(b);
        c = flushed<Format>(c);
    }
    std::uint16_t result = 0;
    switch (operation) {
    case Operation::add:
        result = Format::to(Format::from(a) + Format::from(b));
        break;
    case Operation::subtract:
        result = Format::to(Format::from(a) - Format::from(b));
        break;
    case Operation::multiply:
        result = Format::to(Format::from(a) * Format::from(b));
        break;
    case Operation::fma:
        result = Format::to(fma_for_half(Format::from(a), Format::from(b), Format::from(c)));
        break;
    case Operation::minimum:
    case Operation::maximum:
    case Operation::minimum_nan:
    case Operation::maximum_nan:
        result = extremum<Format>(operation, a, b);
        break;
    case Operation::xor_minimum:
    case Operation::xor_maximum: {
        const auto kind = operation == Operation::xor_minimum ? Operation::minimum : Operation::maximum;
        const auto magnitude = extremum<Format>(kind, a & 0x7fff, b & 0x7fff);
        result = static_cast<std::uint16_t>((magnitude & 0x7fff) | ((a ^ b) & 0x8000));
        break;
    }
    case Operation::negate:
        return static_cast<std::uint16_t>(a ^ 0x8000);
    case Operation::absolute:
        return static_cast<std::uint16_t>(a & 0x7fff);
    case Operation::exp2:
        result = Format::to(std::exp2(Format::from(a)));
        break;
    case Operation::tanh:
        result = Format::to(std::tanh(Format::from(a)));
        break;
    }
    if (options.ftz)
        result = flushed<Format>(result);
    if (options.sat) {
        const double value = Format::from(result);
        result = value > 0.0 ? (value < 1.0 ? result : Format::to(1.0)) : std::uint16_t{0};
    }
    if (options.relu) {
        if (is_nan<Format>(result))
            result = Format::nan;
        else if ((result & 0x8000) != 0)
            result = 0;
    }
    return result;
}

template <class Format, Operation operation, bool packed> void run(Warp &warp, const Op &op, Mask mask) {
    const Options options{(op.detail & 1) != 0, (op.detail & 2) != 0, (op.detail & 4) != 0};
    if constexpr (packed) {
        auto *d = row<std::uint32_t>(warp, op.d);
        const auto *a = row<std::uint32_t>(warp, op.a);
        const auto *b = row<std::uint32_t>(warp, op.b);
        const auto *c = row<std::uint32_t>(warp, op.c);
        each_lane(mask, [&](unsigned lane) {
            const auto low = compute<Format>(operation, options, static_cast<std::uint16_t>(a[lane]),
                                             static_cast<std::uint16_t>(b[lane]), static_cast<std::uint16_t>(c[lane]));
            const auto high =
                compute<Format>(operation, options, static_cast<std::uint16_t>(a[lane] >> 16),
                                static_cast<std::uint16_t>(b[lane] >> 16), static_cast<std::uint16_t>(c[lane] >> 16));
            d[lane] = std::uint32_t{high} << 16 | low;
        });
    } else {
        auto *d = row<std::uint16_t>(warp, op.d);
        const auto *a = row<std::uint16_t>(warp, op.a);
        const auto *b = row<std::uint16_t>(warp, op.b);
        const auto *c = row<std::uint16_t>(warp, op.c);
        each_lane(mask,
                  [&](unsigned lane) { d[lane] = compute<Format>(operation, options, a[lane], b[lane], c[lane]); });
    }
}

template <Operation operation> Handler handler_for(Type type) {
    switch (type) {
    case Type::f16:
        return &run<Half, operation, false>;
    case Type::f16x2:
        return &run<Half, operation, true>;
    case Type::bf16:
        return &run<BFloat, operation, false>;
    default:
        return &run<BFloat, operation, true>;
    }
}

} // namespace

bool decode_half(Decoder &decoder, const Instruction &i) {
    const Types types = types_of(i);
    const Type type = types.first;
    if (type != Type::f16 && type != Type::f16x2 && type != Type::bf16 && type != Type::bf16x2)
        return false;
    const std::string_view name = i.opcode;
    std::size_t sources = 2;
    Handler handler = nullptr;
    if (name == "add")
        handler = handler_for<Operation::add>(type);
    else if (name == "sub")
        handler = handler_for<Operation::subtract>(type);
    else if (name == "mul")
        handler = handler_for<Operation::multiply>(type);
    else if (name == "fma") {
        handler = handler_for<Operation::fma>(type);
        sources = 3;
    } else if (name == "min" || name == "max") {
        const bool low = name == "min";
        if (i.has("xorsign")) {
            require(!i.has("NaN"), "this form");
            handler = low ? handler_for<Operation::xor_minimum>(type) : handler_for<Operation::xor_maximum>(type);
        } else if (i.has("NaN")) {
            handler = low ? handler_for<Operation::minimum_nan>(type) : handler_for<Operation::maximum_nan>(type);
        } else {
            handler = low ? handler_for<Operation::minimum>(type) : handler_for<Operation::maximum>(type);
        }
    } else {
        sources = 1;
        if (name == "neg")
            handler = handler_for<Operation::negate>(type);
        else if (name == "abs")
            handler = handler_for<Operation::absolute>(type);
        else if (name == "ex2")
            handler = handler_for<Operation::exp2>(type);
        else if (name == "tanh")
            handler = handler_for<Operation::tanh>(type);
        else
            return false;
    }
    check_form(i, {"rn", "ftz", "sat", "relu", "NaN", "xorsign", "abs", "approx"}, static_cast<int>(sources) + 1);
    require(types.second == Type::none, "mixed precision");
    const std::uint32_t a = decoder.source(i.operands[1], type);
    const std::uint32_t b = sources > 1 ? decoder.source(i.operands[2], type) : a;
    const std::uint32_t c = sources > 2 ? decoder.source(i.operands[3], type) : a;
    Op &op = decoder.emit(handler, decoder.destination(i.operands[0], type), a, b, c);
    op.detail = static_cast<std::uint16_t>((i.has("ftz") ? 1 : 0) | (i.has("sat") ? 2 : 0) | (i.has("relu") ? 4 : 0));
    return true;
}

} // namespace simgpu::ptx
