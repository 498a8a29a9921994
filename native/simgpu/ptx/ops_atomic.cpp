// atom and red. Global memory is shared with other host threads, so every operation is a real host atomic; lanes of a
// warp take their turns in ascending order.
#include <atomic>
#include <bit>

#include "addressing.hpp"
#include "decode.hpp"
#include "float_values.hpp"
#include "half.hpp"
#include "lanes.hpp"

namespace simgpu::ptx {

namespace {

// Each functor computes the new value from the old one and the operands, as bits of the storage type.
template <class T> struct Add {
    static T apply(T old, T b, T) { return static_cast<T>(old + b); }
};
template <class T> struct Exchange {
    static T apply(T, T b, T) { return b; }
};
template <class T> struct CompareSwap {
    static T apply(T old, T b, T c) { return old == b ? c : old; }
};
template <class T> struct And {
    static T apply(T old, T b, T) { return old & b; }
};
template <class T> struct Or {
    static T apply(T old, T b, T) { return old | b; }
};
template <class T> struct Xor {
    static T apply(T old, T b, T) { return old ^ b; }
};
template <class T> struct Minimum {
    static T apply(T old, T b, T) { return old < b ? old : b; }
};
template <class T> struct Maximum {
    static T apply(T old, T b, T) { return old < b ? b : old; }
};
template <class T> struct MinimumSigned {
    using S = std::make_signed_t<T>;
    static T apply(T old, T b, T) { return static_cast<S>(old) < static_cast<S>(b) ? old : b; }
};
template <class T> struct MaximumSigned {
    using S = std::make_signed_t<T>;
    static T apply(T old, T b, T) { return static_cast<S>(old) < static_cast<S>(b) ? b : old; }
};
struct Increment {
    static std::uint32_t apply(std::uint32_t old, std::uint32_t b, std::uint32_t) { return old >= b ? 0 : old + 1; }
};
struct Decrement {
    static std::uint32_t apply(std::uint32_t old, std::uint32_t b, std::uint32_t) {
        return old == 0 || old > b ? b : old - 1;
    }
};
template <class F, class T> struct FloatAdd {
    static T apply(T old, T b, T) { return std::bit_cast<T>(canonical(std::bit_cast<F>(old) + std::bit_cast<F>(b))); }
};
struct Half {
    static double from(std::uint16_t bits) { return static_cast<double>(float_from_half(bits)); }
    static std::uint16_t to(double value) { return half_from_double(value, Rounding::nearest); }
};
struct BFloat {
    static double from(std::uint16_t bits) { return static_cast<double>(float_from_bfloat(bits)); }
    static std::uint16_t to(double value) { return bfloat_from_double(value, Rounding::nearest); }
};
enum class Choice : std::uint8_t { add, minimum, maximum };
template <class Format, Choice choice> struct Half16 {
    static std::uint16_t apply(std::uint16_t old, std::uint16_t b, std::uint16_t) {
        const double x = Format::from(old);
        const double y = Format::from(b);
        if constexpr (choice == Choice::add)
            return Format::to(x + y);
        if constexpr (choice == Choice::minimum)
            return Format::to(minimum(x, y));
        return Format::to(maximum(x, y));
    }
};
template <class Format, Choice choice> struct Half32 {
    static std::uint32_t apply(std::uint32_t old, std::uint32_t b, std::uint32_t) {
        const auto low =
            Half16<Format, choice>::apply(static_cast<std::uint16_t>(old), static_cast<std::uint16_t>(b), 0);
        const auto high = Half16<Format, choice>::apply(static_cast<std::uint16_t>(old >> 16),
                                                        static_cast<std::uint16_t>(b >> 16), 0);
        return std::uint32_t{high} << 16 | low;
    }
};

// d: old values, or none; a: address row; b, c: operands; detail: AddressKind; extra: 1 when addresses are 64 bits
// wide.
template <class T, class F> void run_atomic(Warp &warp, const Op &op, Mask mask) {
    Pointers pointers;
    find_pointers(warp, op, mask, static_cast<AddressKind>(op.detail), op.extra != 0, op.a, op.immediate, sizeof(T),
                  Access::atomic, pointers);
    T *d = row<T>(warp, op.d);
    const T *b = row<T>(warp, op.b);
    const T *c = row<T>(warp, op.c);
    each_lane(mask, [&](unsigned lane) {
        std::atomic_ref<T> place(*reinterpret_cast<T *>(pointers[lane]));
        T old = place.load(std::memory_order_relaxed);
        const T operand = b[lane];
        const T other = c[lane];
        while (!place.compare_exchange_weak(old, F::apply(old, operand, other), std::memory_order_seq_cst,
                                            std::memory_order_relaxed)) {
        }
        if (op.d != no_row)
            d[lane] = old;
    });
}

template <class T> Handler integer_handler(std::string_view name, bool is_signed_type) {
    if (name == "add")
        return &run_atomic<T, Add<T>>;
    if (name == "exch")
        return &run_atomic<T, Exchange<T>>;
    if (name == "cas")
        return &run_atomic<T, CompareSwap<T>>;
    if (name == "and")
        return &run_atomic<T, And<T>>;
    if (name == "or")
        return &run_atomic<T, Or<T>>;
    if (name == "xor")
        return &run_atomic<T, Xor<T>>;
    if (name == "min")
        return is_signed_type ? &run_atomic<T, MinimumSigned<T>> : &run_atomic<T, Minimum<T>>;
    if (name == "max")
        return is_signed_type ? &run_atomic<T, MaximumSigned<T>> : &run_atomic<T, Maximum<T>>;
    if constexpr (sizeof(T) == 4) {
        if (name == "inc")
            return &run_atomic<T, Increment>;
        if (name == "dec")
            return &run_atomic<T, Decrement>;
    }
    throw Unsupported{"this operation on this type"};
}

template <class Format> Handler half_handler(std::string_view name, bool packed) {
    if (name == "add")
        return packed ? &run_atomic<std::uint32_t, Half32<Format, Choice::add>>
                      : &run_atomic<std::uint16_t, Half16<Format, Choice::add>>;
    if (name == "min")
        return packed ? &run_atomic<std::uint32_t, Half32<Format, Choice::minimum>>
                      : &run_atomic<std::uint16_t, Half16<Format, Choice::minimum>>;
    if (name == "max")
        return packed ? &run_atomic<std::uint32_t, Half32<Format, Choice::maximum>>
                      : &run_atomic<std::uint16_t, Half16<Format, Choice::maximum>>;
    throw Unsupported{"this operation on this type"};
}

Handler atomic_handler(std::string_view name, Type type) {
    switch (type) {
    case Type::b16:
    case Type::u16:
    case Type::s16:
        require(name == "cas" || name == "exch", "this operation on this type");
        return integer_handler<std::uint16_t>(name, false);
    case Type::b32:
    case Type::u32:
    case Type::s32:
        return integer_handler<std::uint32_t>(name, type == Type::s32);
    case Type::b64:
    case Type::u64:
    case Type::s64:
        return integer_handler<std::uint64_t>(name, type == Type::s64);
    case Type::f32:
        if (name == "exch")
            return &run_atomic<std::uint32_t, Exchange<std::uint32_t>>;
        require(name == "add", "this operation on this type");
        return &run_atomic<std::uint32_t, FloatAdd<float, std::uint32_t>>;
    case Type::f64:
        if (name == "exch")
            return &run_atomic<std::uint64_t, Exchange<std::uint64_t>>;
        require(name == "add", "this operation on this type");
        return &run_atomic<std::uint64_t, FloatAdd<double, std::uint64_t>>;
    case Type::f16:
        return half_handler<Half>(name, false);
    case Type::f16x2:
        return half_handler<Half>(name, true);
    case Type::bf16:
        return half_handler<BFloat>(name, false);
    case Type::bf16x2:
        return half_handler<BFloat>(name, true);
    default:
        throw Unsupported{"this type"};
    }
}

} // namespace

bool decode_atomic(Decoder &decoder, const Instruction &i) {
    const bool returns = i.opcode == "atom";
    if (!returns && i.opcode != "red")
        return false;
    static constexpr std::string_view operations[] = {"add", "exch", "cas", "and", "or",
                                                      "xor", "min",  "max", "inc", "dec"};
    std::string_view operation;
    for (const auto &modifier : i.modifiers) {
        if (modifier.starts_with("L2::") || modifier == "level::cache_hint")
            continue;
        bool known = type_named(std::string_view(modifier.data() - 1, modifier.size() + 1)) != Type::none;
        for (const auto &name : operations) {
            if (modifier == name) {
                operation = name;
                known = true;
            }
        }
        for (const std::string_view name :
             {"global", "shared", "shared::cta", "shared::cluster", "relaxed", "acquire", "release", "acq_rel", "cta",
              "cluster", "gpu", "sys", "noftz", "v2", "v4", "v8"})
            known = known || modifier == name;
        if (!known)
            throw Unsupported{"modifier ." + std::string(modifier)};
    }
    const Type type = types_of(i).first;
    const Handler handler = atomic_handler(operation, type);
    const std::size_t first = returns ? 1 : 0;
    const bool swaps = operation == "cas";
    require(i.operands.size() > first + (swaps ? 2u : 1u), "this number of operands");
    const Operand &values = i.operands[first + 1];
    const bool is_vector = values.kind == Operand::Kind::vector;
    const std::size_t count = is_vector ? values.elements.size() : 1;
    require(!is_vector || !returns || i.operands[0].kind == Operand::Kind::vector, "this form");
    require(!is_vector || !returns || i.operands[0].elements.size() == count, "this form");
    require(!(is_vector && swaps), "this form");

    const AddressKind kind = address_kind(decoder, i);
    Decoder::Address address = decoder.address(i.operands[first]);
    require(!address.is_kernel_parameter, "an atomic on a kernel parameter");
    if (address.is_slot)
        throw Unsupported{"an atomic on a local variable by name"};
    if (address.is_constant)
        address.row = decoder.constant(8, 0);
    for (std::size_t k = 0; k < count; ++k) {
        const std::uint32_t b = decoder.source(is_vector ? values.elements[k] : values, type);
        const std::uint32_t c = swaps ? decoder.source(i.operands[first + 2], type) : b;
        std::uint32_t d = no_row;
        bool is_read = false;
        if (returns) {
            const Operand &old =
                i.operands[0].kind == Operand::Kind::vector ? i.operands[0].elements[k] : i.operands[0];
            is_read = old.kind != Operand::Kind::sink && decoder.is_read(old);
            if (old.kind != Operand::Kind::sink)
                d = decoder.destination(old, type);
        }
        Op &op = decoder.emit(handler, d, address.row, b, c);
        op.detail = static_cast<std::uint16_t>(kind);
        op.extra = address.is_constant || address.width_bytes == 8 ? 1 : 0;
        op.immediate = address.offset + static_cast<std::int64_t>(k * size_of(type));
        // Which block comes first shows in old values, in what an exchange leaves, and in the rounding of sums.
        const bool commutes =
            !is_float(type) && operation != "exch" && operation != "cas" && operation != "inc" && operation != "dec";
        if (kind != AddressKind::shared && (is_read || !commutes))
            decoder.function().must_run_in_order = true;
    }
    return true;
}

} // namespace simgpu::ptx
