// Moves without arithmetic: mov with packing and unpacking, symbol addresses, cvta, isspacep, slct, clocks.
#include <chrono>

#include "decode.hpp"
#include "float_values.hpp"
#include "lanes.hpp"
#include "typed.hpp"

namespace simgpu::ptx {

namespace {

template <class T> struct Same {
    static T apply(T a) { return a; }
};

struct Wide128 {
    std::uint64_t low, high;
};

template <class From, class To> struct Extend {
    static To apply(From a) { return static_cast<To>(a); }
};

/// d = lo | hi << bits
template <class Part, class Whole> struct Pack2 {
    static Whole apply(Part low, Part high) {
        return static_cast<Whole>(static_cast<Whole>(low) | static_cast<Whole>(high) << (8 * sizeof(Part)));
    }
};
template <class Part, class Whole> void pack4(Warp &warp, const Op &op, Mask mask) {
    Whole *d = row<Whole>(warp, op.d);
    const Part *part[4] = {row<Part>(warp, op.a), row<Part>(warp, op.b), row<Part>(warp, op.c), row<Part>(warp, op.e)};
    each_lane(mask, [&](unsigned lane) {
        Whole result = 0;
        for (unsigned k = 0; k < 4; ++k)
            result |= static_cast<Whole>(part[k][lane]) << (8 * sizeof(Part) * k);
        d[lane] = result;
    });
}
/// d = part number op.detail of a
template <class Part, class Whole> void unpack(Warp &warp, const Op &op, Mask mask) {
    Part *d = row<Part>(warp, op.d);
    const Whole *a = row<Whole>(warp, op.a);
    const unsigned shift = 8 * sizeof(Part) * op.detail;
    if (is_dense(warp, mask)) {
#pragma GCC ivdep
        for (unsigned lane = 0; lane < warp_size; ++lane)
            d[lane] = static_cast<Part>(a[lane] >> shift);
    } else {
        each_lane(mask, [&](unsigned lane) { d[lane] = static_cast<Part>(a[lane] >> shift); });
    }
}
void pack128(Warp &warp, const Op &op, Mask mask) {
    auto *d = row<Wide128>(warp, op.d);
    const auto *a = row<std::uint64_t>(warp, op.a);
    const auto *b = row<std::uint64_t>(warp, op.b);
    each_lane(mask, [&](unsigned lane) { d[lane] = {a[lane], b[lane]}; });
}
void unpack128(Warp &warp, const Op &op, Mask mask) {
    auto *d = row<std::uint64_t>(warp, op.d);
    const auto *a = row<Wide128>(warp, op.a);
    each_lane(mask, [&](unsigned lane) { d[lane] = op.detail == 0 ? a[lane].low : a[lane].high; });
}
void move128(Warp &warp, const Op &op, Mask mask) {
    auto *d = row<Wide128>(warp, op.d);
    const auto *a = row<Wide128>(warp, op.a);
    each_lane(mask, [&](unsigned lane) { d[lane] = a[lane]; });
}

Type bits_of(std::size_t width) {
    switch (width) {
    case 1:
        return Type::b8;
    case 2:
        return Type::b16;
    case 4:
        return Type::b32;
    case 8:
        return Type::b64;
    default:
        throw Unsupported{"operands of this width"};
    }
}

template <class Part, class Whole> Handler pack_handler(std::size_t count) {
    if (count == 2)
        return &binary<Whole, Part, Part, Pack2<Part, Whole>>;
    return &pack4<Part, Whole>;
}

void decode_pack(Decoder &decoder, const Instruction &i, std::size_t whole) {
    const auto &parts = i.operands[1].elements;
    require(parts.size() == 2 || parts.size() == 4, "packing of this many values");
    const std::size_t part = whole / parts.size();
    std::uint32_t rows[4] = {0, 0, 0, 0};
    if (whole == 16) {
        require(part == 8, "packing of this many values");
        for (std::size_t k = 0; k < 2; ++k)
            rows[k] = decoder.source(parts[k], Type::b64);
        Decoder::Register d{};
        require(decoder.find_register(i.operands[0], d) && d.width_bytes == 16, "a destination of another width");
        decoder.emit(&pack128, d.offset, rows[0], rows[1]);
        return;
    }
    for (std::size_t k = 0; k < parts.size(); ++k)
        rows[k] = decoder.source(parts[k], bits_of(part));
    Handler handler = nullptr;
    if (part == 1 && whole == 2)
        handler = pack_handler<std::uint8_t, std::uint16_t>(parts.size());
    if (part == 1 && whole == 4)
        handler = pack_handler<std::uint8_t, std::uint32_t>(parts.size());
    if (part == 2 && whole == 4)
        handler = pack_handler<std::uint16_t, std::uint32_t>(parts.size());
    if (part == 2 && whole == 8)
        handler = pack_handler<std::uint16_t, std::uint64_t>(parts.size());
    if (part == 4 && whole == 8)
        handler = pack_handler<std::uint32_t, std::uint64_t>(parts.size());
    require(handler != nullptr, "packing of these widths");
    decoder.emit(handler, decoder.destination(i.operands[0], bits_of(whole)), rows[0], rows[1], rows[2], rows[3]);
}

void decode_unpack(Decoder &decoder, const Instruction &i, std::size_t whole) {
    const auto &parts = i.operands[0].elements;
    require(parts.size() == 2 || parts.size() == 4, "unpacking of this many values");
    const std::size_t part = whole / parts.size();
    std::uint32_t a = 0;
    if (whole == 16) {
        Decoder::Register from{};
        require(part == 8 && decoder.find_register(i.operands[1], from) && from.width_bytes == 16,
                "unpacking of this form");
        a = from.offset;
    } else {
        a = decoder.source(i.operands[1], bits_of(whole));
    }
    Handler handler = nullptr;
    if (whole == 16)
        handler = &unpack128;
    if (part == 1 && whole == 2)
        handler = &unpack<std::uint8_t, std::uint16_t>;
    if (part == 1 && whole == 4)
        handler = &unpack<std::uint8_t, std::uint32_t>;
    if (part == 2 && whole == 4)
        handler = &unpack<std::uint16_t, std::uint32_t>;
    if (part == 2 && whole == 8)
        handler = &unpack<std::uint16_t, std::uint64_t>;
    if (part == 4 && whole == 8)
        handler = &unpack<std::uint32_t, std::uint64_t>;
    require(handler != nullptr, "unpacking of these widths");
    for (std::size_t k = 0; k < parts.size(); ++k) {
        if (parts[k].kind == Operand::Kind::sink)
            continue;
        decoder.emit(handler, decoder.destination(parts[k], bits_of(part)), a).detail = static_cast<std::uint16_t>(k);
    }
}

// --- clocks
// ------------------------------------------------------------------------------------------------------------

enum class Clock : std::uint16_t { cycles, cycles_high, nanoseconds, nanoseconds_high };

template <class T> void read_clock(Warp &warp, const Op &op, Mask mask) {
    const auto which = static_cast<Clock>(op.detail);
    std::uint64_t value = warp.clock;
    if (which == Clock::nanoseconds || which == Clock::nanoseconds_high) {
        value = static_cast<std::uint64_t>(
            std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::system_clock::now().time_since_epoch())
                .count());
    } else {
        // %clock must advance between two reads, however close.
        warp.clock += 8;
    }
    if (which == Clock::cycles_high || which == Clock::nanoseconds_high)
        value >>= 32;
    T *d = row<T>(warp, op.d);
    each_lane(mask, [&](unsigned lane) { d[lane] = static_cast<T>(value); });
}

bool decode_clock(Decoder &decoder, const Instruction &i, Type type) {
    const Operand &from = i.operands[1];
    if (from.kind != Operand::Kind::name)
        return false;
    Clock which = Clock::cycles;
    if (from.name == "%clock_hi")
        which = Clock::cycles_high;
    else if (from.name == "%globaltimer" || from.name == "%globaltimer_lo")
        which = Clock::nanoseconds;
    else if (from.name == "%globaltimer_hi")
        which = Clock::nanoseconds_high;
    else if (from.name != "%clock" && from.name != "%clock64")
        return false;
    decoder
        .emit(size_of(type) == 8 ? &read_clock<std::uint64_t> : &read_clock<std::uint32_t>,
              decoder.destination(i.operands[0], size_of(type) == 8 ? Type::b64 : Type::b32))
        .detail = static_cast<std::uint16_t>(which);
    return true;
}

// --- address spaces
// ------------------------------------------------------------------------------------------------------

std::uint64_t window_of(Decoder &decoder, const Instruction &i) {
    if (i.has("shared") || i.has("shared::cta") || i.has("shared::cluster"))
        return window_base(window_shared);
    if (i.has("local"))
        return window_base(window_local);
    if (i.has("param") || i.has("param::entry") || i.has("param::func")) {
        // A device function's parameters lie in its frame's local memory.
        return window_base(decoder.syntax().is_entry && !i.has("param::func") ? window_parameter : window_local);
    }
    if (i.has("global") || i.has("const"))
        return 0;
    throw Unsupported{"this state space"};
}

struct AddWindow {
    static std::uint64_t apply(std::uint64_t a, std::uint64_t b) { return a + b; }
};
struct TakeWindow {
    static std::uint64_t apply(std::uint64_t a, std::uint64_t b) { return a - b; }
};

void in_window(Warp &warp, const Op &op, Mask mask) {
    const auto *a = row<std::uint64_t>(warp, op.a);
    Mask result = 0;
    const auto window = static_cast<std::uint64_t>(op.immediate);
    each_lane(mask, [&](unsigned lane) {
        bool inside = a[lane] >> window_shift == window;
        // shared::cta is the own block's part of the cluster's shared window.
        if (op.detail != 0 && inside)
            inside = (a[lane] >> shared_rank_shift & 0xff) == 0;
        result |= static_cast<Mask>(inside) << lane;
    });
    write_predicate(warp, op.d, mask, result);
}

void decode_cvta(Decoder &decoder, const Instruction &i, Type type) {
    check_form(i,
               {"to", "global", "shared", "shared::cta", "shared::cluster", "local", "const", "param", "param::entry",
                "param::func"},
               2);
    require(size_of(type) == 8, "32-bit generic addresses");
    const std::uint64_t base = window_of(decoder, i);
    Operand from = i.operands[1];
    const std::uint32_t a = decoder.source(from, type);
    decoder.emit(i.has("to") ? &binary_same<std::uint64_t, TakeWindow> : &binary_same<std::uint64_t, AddWindow>,
                 decoder.destination(i.operands[0], type), a, decoder.constant(8, base));
}

void decode_isspacep(Decoder &decoder, const Instruction &i) {
    check_form(i,
               {"global", "shared", "shared::cta", "shared::cluster", "local", "const", "param", "param::entry",
                "param::func"},
               2);
    const std::uint32_t a = decoder.source(i.operands[1], Type::u64);
    if (i.has("const")) {
        // Constants live in global memory here, and a pointer cannot be both.
        decoder.emit(&in_window, decoder.predicate_destination(i.operands[0]), a).immediate = 0xff;
        return;
    }
    Op &op = decoder.emit(&in_window, decoder.predicate_destination(i.operands[0]), a);
    op.immediate = static_cast<std::int64_t>(window_of(decoder, i) >> window_shift);
    op.detail = i.has("shared") || i.has("shared::cta") ? 1 : 0;
}

template <class T, class C, bool ftz> struct SelectBySign {
    static T apply(T a, T b, C c) {
        if constexpr (ftz)
            c = flush(c);
        return c >= C{0} ? a : b;
    }
};

void decode_slct(Decoder &decoder, const Instruction &i, const Types &types) {
    check_form(i, {"ftz"}, 4);
    const Type type = types.first;
    const std::uint32_t a = decoder.source(i.operands[1], type);
    const std::uint32_t b = decoder.source(i.operands[2], type);
    const std::uint32_t c = decoder.source(i.operands[3], types.second);
    const bool by_float = types.second == Type::f32;
    const bool ftz = i.has("ftz");
    require(by_float || types.second == Type::s32, "this type");
    const Handler handler = for_width(size_of(type), [by_float, ftz]<class T>() -> Handler {
        if (!by_float)
            return &ternary<T, T, T, std::int32_t, SelectBySign<T, std::int32_t, false>>;
        return ftz ? &ternary<T, T, T, float, SelectBySign<T, float, true>>
                   : &ternary<T, T, T, float, SelectBySign<T, float, false>>;
    });
    decoder.emit(handler, decoder.destination(i.operands[0], type), a, b, c);
}

} // namespace

void run_nothing(Warp &, const Op &, Mask) {}

Handler copy_handler(std::size_t width_bytes) {
    return for_width(width_bytes, []<class T>() -> Handler { return &unary_same<T, Same<T>>; });
}

void run_slot_address(Warp &warp, const Op &op, Mask mask) {
    const auto &base = warp.frame->local_base;
    if (op.extra == 4) {
        auto *d = row<std::uint32_t>(warp, op.d);
        each_lane(mask, [&](unsigned lane) { d[lane] = base[lane] + static_cast<std::uint32_t>(op.immediate); });
    } else {
        auto *d = row<std::uint64_t>(warp, op.d);
        each_lane(mask, [&](unsigned lane) { d[lane] = base[lane] + static_cast<std::uint64_t>(op.immediate); });
    }
}

Handler extend_handler(std::size_t from_bytes, std::size_t to_bytes, bool is_signed) {
    const auto choose = [&]<class From>() -> Handler {
        switch (to_bytes) {
        case 2:
            return &unary<std::uint16_t, From, Extend<From, std::uint16_t>>;
        case 4:
            return &unary<std::uint32_t, From, Extend<From, std::uint32_t>>;
        case 8:
            return &unary<std::uint64_t, From, Extend<From, std::uint64_t>>;
        default:
            throw Unsupported{"a destination of this width"};
        }
    };
    switch (from_bytes) {
    case 1:
        return is_signed ? choose.operator()<std::int8_t>() : choose.operator()<std::uint8_t>();
    case 2:
        return is_signed ? choose.operator()<std::int16_t>() : choose.operator()<std::uint16_t>();
    case 4:
        return is_signed ? choose.operator()<std::int32_t>() : choose.operator()<std::uint32_t>();
    default:
        throw Unsupported{"a destination of this width"};
    }
}

Handler narrow_handler(std::size_t from_bytes, std::size_t to_bytes) {
    const auto choose = [&]<class From>() -> Handler {
        switch (to_bytes) {
        case 1:
            return &unary<std::uint8_t, From, Extend<From, std::uint8_t>>;
        case 2:
            return &unary<std::uint16_t, From, Extend<From, std::uint16_t>>;
        case 4:
            return &unary<std::uint32_t, From, Extend<From, std::uint32_t>>;
        default:
            throw Unsupported{"an operand of this width"};
        }
    };
    switch (from_bytes) {
    case 2:
        return choose.operator()<std::uint16_t>();
    case 4:
        return choose.operator()<std::uint32_t>();
    case 8:
        return choose.operator()<std::uint64_t>();
    default:
        throw Unsupported{"an operand of this width"};
    }
}

bool decode_move(Decoder &decoder, const Instruction &i) {
    const Types types = types_of(i);
    const Type type = types.first;
    if (i.opcode == "mov" && type != Type::pred) {
        check_form(i, {}, 2);
        const std::size_t width = size_of(type);
        require(width != 0, "this type");
        if (i.operands[1].kind == Operand::Kind::vector) {
            decode_pack(decoder, i, width);
        } else if (i.operands[0].kind == Operand::Kind::vector) {
            decode_unpack(decoder, i, width);
        } else if (width == 16) {
            Decoder::Register d{}, a{};
            require(decoder.find_register(i.operands[0], d) && decoder.find_register(i.operands[1], a) &&
                        d.width_bytes == 16 && a.width_bytes == 16,
                    "a 128-bit move of this form");
            decoder.emit(&move128, d.offset, a.offset);
        } else if (!decode_clock(decoder, i, type)) {
            const std::uint32_t a = decoder.source(i.operands[1], type);
            decoder.emit(copy_handler(width), decoder.destination(i.operands[0], type), a);
        }
    } else if (i.opcode == "cvta") {
        decode_cvta(decoder, i, type);
    } else if (i.opcode == "isspacep") {
        decode_isspacep(decoder, i);
    } else if (i.opcode == "slct") {
        decode_slct(decoder, i, types);
    } else {
        return false;
    }
    return true;
}

} // namespace simgpu::ptx
