// Loads and stores of every state space, asynchronous copies (done at once), stack allocation, and cache hints
// (ignored).
#include <cstring>

#include "addressing.hpp"
#include "decode.hpp"
#include "lanes.hpp"

namespace simgpu::ptx {

namespace {

// --- moving values between rows and pointers
// ---------------------------------------------------------------------------

using Mover = void (*)(std::byte *values, const Pointers &pointers, std::size_t offset, Mask mask);

template <class Stored, class Register>
void load_values(std::byte *values, const Pointers &pointers, std::size_t offset, Mask mask) {
    auto *d = reinterpret_cast<Register *>(values);
    each_lane(mask, [&](unsigned lane) {
        Stored value;
        std::memcpy(&value, pointers[lane] + offset, sizeof value);
        d[lane] = static_cast<Register>(value);
    });
}
template <class Stored, class Register>
void store_values(std::byte *values, const Pointers &pointers, std::size_t offset, Mask mask) {
    const auto *s = reinterpret_cast<const Register *>(values);
    each_lane(mask, [&](unsigned lane) {
        const auto value = static_cast<Stored>(s[lane]);
        std::memcpy(pointers[lane] + offset, &value, sizeof value);
    });
}
struct Wide128 {
    std::uint64_t low, high;
};

template <class Stored> Mover load_mover(std::size_t register_bytes) {
    switch (register_bytes) {
    case 1:
        if constexpr (sizeof(Stored) <= 1)
            return &load_values<Stored, std::uint8_t>;
        break;
    case 2:
        if constexpr (sizeof(Stored) <= 2)
            return &load_values<Stored, std::uint16_t>;
        break;
    case 4:
        if constexpr (sizeof(Stored) <= 4)
            return &load_values<Stored, std::uint32_t>;
        break;
    case 8:
        return &load_values<Stored, std::uint64_t>;
    default:
        break;
    }
    throw Unsupported{"a register narrower than what is loaded"};
}
template <class Stored> Mover store_mover(std::size_t register_bytes) {
    switch (register_bytes) {
    case 1:
        if constexpr (sizeof(Stored) <= 1)
            return &store_values<Stored, std::uint8_t>;
        break;
    case 2:
        if constexpr (sizeof(Stored) <= 2)
            return &store_values<Stored, std::uint16_t>;
        break;
    case 4:
        if constexpr (sizeof(Stored) <= 4)
            return &store_values<Stored, std::uint32_t>;
        break;
    case 8:
        return &store_values<Stored, std::uint64_t>;
    default:
        break;
    }
    throw Unsupported{"a register narrower than what is stored"};
}

Mover mover_for(Type type, std::size_t register_bytes, bool is_load) {
    if (type == Type::b128) {
        require(register_bytes == 16, "a register of another width");
        return is_load ? &load_values<Wide128, Wide128> : &store_values<Wide128, Wide128>;
    }
    switch (size_of(type)) {
    case 1:
        if (is_load)
            return is_signed(type) ? load_mover<std::int8_t>(register_bytes) : load_mover<std::uint8_t>(register_bytes);
        return store_mover<std::uint8_t>(register_bytes);
    case 2:
        if (is_load)
            return is_signed(type) ? load_mover<std::int16_t>(register_bytes)
                                   : load_mover<std::uint16_t>(register_bytes);
        return store_mover<std::uint16_t>(register_bytes);
    case 4:
        if (is_load)
            return is_signed(type) ? load_mover<std::int32_t>(register_bytes)
                                   : load_mover<std::uint32_t>(register_bytes);
        return store_mover<std::uint32_t>(register_bytes);
    case 8:
        return is_load ? load_mover<std::uint64_t>(register_bytes) : store_mover<std::uint64_t>(register_bytes);
    default:
        throw Unsupported{"this type"};
    }
}

// In loads and stores: a is the address row, immediate the offset; d, b, c, e are the value rows; detail is the
// element's size in bytes and extra the number of elements.
void move_values(Warp &warp, const Op &op, Mask mask, const Pointers &pointers) {
    const auto mover = reinterpret_cast<Mover>(op.helper);
    mover(warp.rows + op.d, pointers, 0, mask);
    if (op.extra == 1)
        return;
    mover(warp.rows + op.b, pointers, op.detail, mask);
    if (op.extra == 2)
        return;
    mover(warp.rows + op.c, pointers, std::size_t{op.detail} * 2, mask);
    mover(warp.rows + op.e, pointers, std::size_t{op.detail} * 3, mask);
}

template <class Word, AddressKind kind, Access access> void access_memory(Warp &warp, const Op &op, Mask mask) {
    Pointers pointers;
    find_pointers<Word, kind>(warp, op, mask, std::size_t{op.detail} * op.extra, access, pointers);
    if constexpr (access == Access::store && kind != AddressKind::local)
        ++warp.context->stores;
    move_values(warp, op, mask, pointers);
}

/// A variable in the frame's own local memory; its place was checked when the function was decoded.
void access_slot(Warp &warp, const Op &op, Mask mask) {
    Pointers pointers;
    const auto &base = warp.frame->local_base;
    each_lane(mask, [&](unsigned lane) { pointers[lane] = warp.local_memory(lane) + base[lane] + op.immediate; });
    move_values(warp, op, mask, pointers);
}

/// A kernel parameter: the same value for all lanes; its place was checked when the function was decoded.
void load_parameter(Warp &warp, const Op &op, Mask mask) {
    Pointers pointers;
    std::byte *const place = warp.context->parameters.data() + op.immediate;
    for (auto &pointer : pointers)
        pointer = place;
    move_values(warp, op, mask, pointers);
}

template <Access access> Handler access_handler(AddressKind kind, bool is_wide) {
    switch (kind) {
    case AddressKind::generic:
        return is_wide ? &access_memory<std::uint64_t, AddressKind::generic, access>
                       : &access_memory<std::uint32_t, AddressKind::generic, access>;
    case AddressKind::global:
        return is_wide ? &access_memory<std::uint64_t, AddressKind::global, access>
                       : &access_memory<std::uint32_t, AddressKind::global, access>;
    case AddressKind::shared:
        return is_wide ? &access_memory<std::uint64_t, AddressKind::shared, access>
                       : &access_memory<std::uint32_t, AddressKind::shared, access>;
    case AddressKind::local:
        return is_wide ? &access_memory<std::uint64_t, AddressKind::local, access>
                       : &access_memory<std::uint32_t, AddressKind::local, access>;
    case AddressKind::parameter:
        return is_wide ? &access_memory<std::uint64_t, AddressKind::parameter, access>
                       : &access_memory<std::uint32_t, AddressKind::parameter, access>;
    }
    throw Unsupported{"this state space"};
}

} // namespace

AddressKind address_kind(const Decoder &decoder, const Instruction &i) {
    for (const auto &modifier : i.modifiers) {
        if (modifier == "global" || modifier == "const")
            return AddressKind::global;
        if (modifier == "shared" || modifier == "shared::cta" || modifier == "shared::cluster")
            return AddressKind::shared;
        if (modifier == "local")
            return AddressKind::local;
        if (modifier == "param" || modifier == "param::entry" || modifier == "param::func")
            return decoder.is_entry() && modifier != "param::func" ? AddressKind::parameter : AddressKind::local;
    }
    return AddressKind::generic;
}

namespace {

void check_access_form(const Instruction &i, int operands) {
    for (const auto &modifier : i.modifiers) {
        if (modifier.starts_with("L2::") || modifier.starts_with("L1::") || modifier == "level::cache_hint")
            continue;
        static constexpr std::string_view known[] = {
            "global", "const",    "shared",       "shared::cta", "shared::cluster",
            "local",  "param",    "param::entry", "param::func", "v2",
            "v4",     "volatile", "relaxed",      "acquire",     "release",
            "weak",   "mmio",     "cta",          "cluster",     "gpu",
            "sys",    "nc",       "ca",           "cg",          "cs",
            "cv",     "lu",       "wb",           "wt",          "unified",
            "async"};
        bool found = type_named(std::string_view(modifier.data() - 1, modifier.size() + 1)) != Type::none;
        for (const auto &candidate : known)
            found = found || candidate == modifier;
        if (!found)
            throw Unsupported{"modifier ." + std::string(modifier)};
    }
    require(static_cast<int>(i.operands.size()) >= operands, "this number of operands");
}

void decode_access(Decoder &decoder, const Instruction &i, bool is_load) {
    // A trailing cache policy operand changes nothing.
    check_access_form(i, 2);
    const Type type = types_of(i).first;
    const Operand &values = i.operands[is_load ? 0 : 1];
    const Operand &place = i.operands[is_load ? 1 : 0];
    const std::size_t element = size_of(type);
    require(element != 0 && type != Type::pred, "this type");
    const std::size_t count = i.has("v4") ? 4 : i.has("v2") ? 2 : 1;
    require(values.kind == Operand::Kind::vector ? values.elements.size() == count : count == 1,
            "a vector of another size");

    // Values first: a store's literals and narrowed registers are operations of their own.
    std::uint32_t rows[4] = {0, 0, 0, 0};
    Mover mover = nullptr;
    for (std::size_t k = 0; k < count; ++k) {
        const Operand &value = values.kind == Operand::Kind::vector ? values.elements[k] : values;
        Decoder::Register found{};
        if (value.kind == Operand::Kind::sink && is_load) {
            found = {decoder.temporary(element), element};
        } else if (!decoder.find_register(value, found)) {
            require(!is_load, "a destination that is no register");
            found = {decoder.source(value, type), element};
        }
        require(found.width_bytes != 0, "a predicate in memory");
        const Mover here = mover_for(type, found.width_bytes, is_load);
        if (mover != nullptr && mover != here)
            throw Unsupported{"a vector of registers of different widths"};
        mover = here;
        rows[k] = found.offset;
    }

    const AddressKind kind = address_kind(decoder, i);
    const Decoder::Address address = decoder.address(place);
    const auto bytes = static_cast<std::int64_t>(element * count);
    std::uint32_t address_row = address.row;
    Handler handler = nullptr;
    if (address.is_slot) {
        require(address.offset >= 0 && address.offset + bytes <= decoder.function().local_bytes,
                "an access beyond the variable");
        require(kind == AddressKind::local || kind == AddressKind::parameter || kind == AddressKind::generic,
                "this state space");
        handler = &access_slot;
    } else if (address.is_kernel_parameter) {
        require(is_load, "a store to a kernel parameter");
        const Slot &last = decoder.function().parameters.back();
        require(address.offset >= 0 && address.offset + bytes <= std::int64_t{last.offset} + last.size_bytes,
                "an access beyond the parameters");
        handler = &load_parameter;
    } else {
        if (address.is_constant)
            address_row = decoder.constant(8, 0);
        const bool is_wide = address.is_constant || address.width_bytes == 8;
        handler = is_load ? access_handler<Access::load>(kind, is_wide) : access_handler<Access::store>(kind, is_wide);
    }
    Op &op = decoder.emit(handler, rows[0], address_row, rows[1], rows[2], rows[3]);
    op.immediate = address.offset;
    op.helper = reinterpret_cast<void (*)()>(mover);
    op.detail = static_cast<std::uint16_t>(element);
    op.extra = static_cast<std::uint8_t>(count);
}

// --- asynchronous copies
// -------------------------------------------------------------------------------------------------

/// d: address row of the destination (shared), a: of the source; b: row with the number of bytes to read, or none;
/// target: low half the destination's offset index in `vector_rows`; detail: bytes to write; extra: widths of
/// addresses.
void copy_at_once(Warp &warp, const Op &op, Mask mask) {
    const Function &function = *warp.frame->linked->function;
    const auto to_offset = static_cast<std::int32_t>(function.vector_rows[op.target]);
    Pointers to;
    find_pointers(warp, op, mask, AddressKind::shared, (op.extra & 1) != 0, op.d, to_offset, op.detail, Access::store,
                  to);
    const auto *read_bytes = row<std::uint32_t>(warp, op.b);
    const auto *a64 = row<std::uint64_t>(warp, op.a);
    each_lane(mask, [&](unsigned lane) {
        std::size_t bytes = op.detail;
        if (op.b != no_row && read_bytes[lane] < bytes)
            bytes = read_bytes[lane];
        if (op.c != no_row && (*row<Mask>(warp, op.c) >> lane & 1) != 0)
            bytes = 0;
        std::memset(to[lane], 0, op.detail);
        const std::uint64_t address = a64[lane] + static_cast<std::uint64_t>(op.immediate);
        if ((address & (op.detail - 1u)) != 0)
            warp.fault(Fault::Kind::misaligned, op, lane, address, "an asynchronous copy");
        // Byte by byte, because a shortened copy need not be a power of two long.
        for (std::size_t k = 0; k < bytes;) {
            const std::size_t step = bytes - k >= 4 ? 4 : 1;
            std::memcpy(to[lane] + k, resolve(warp, op, lane, address + k, step, Access::load), step);
            k += step;
        }
    });
}

void decode_copy(Decoder &decoder, const Instruction &i) {
    if (i.has("commit_group") || i.has("wait_group") || i.has("wait_all")) {
        require(!i.has("bulk"), "bulk copies");
        decoder.emit(&run_nothing);
        return;
    }
    for (const auto &modifier : i.modifiers) {
        if (modifier.starts_with("L2::") || modifier == "async" || modifier == "ca" || modifier == "cg" ||
            modifier == "shared" || modifier == "shared::cta" || modifier == "global")
            continue;
        throw Unsupported{"modifier ." + std::string(modifier)};
    }
    require(i.operands.size() >= 3 && i.operands[2].kind == Operand::Kind::integer, "this form");
    const std::uint64_t bytes = i.operands[2].bits;
    require(bytes == 4 || bytes == 8 || bytes == 16, "a copy of this size");
    const Decoder::Address to = decoder.address(i.operands[0]);
    const Decoder::Address from = decoder.address(i.operands[1]);
    require(!to.is_slot && !to.is_constant && !to.is_kernel_parameter && !from.is_slot && !from.is_constant &&
                !from.is_kernel_parameter && from.width_bytes == 8 && to.offset == static_cast<std::int32_t>(to.offset),
            "this kind of address");
    std::uint32_t read_row = 0;
    std::uint32_t ignore_row = 0;
    if (i.operands.size() > 3) {
        Decoder::Register found{};
        if (decoder.find_register(i.operands[3], found) && found.width_bytes == 0)
            ignore_row = decoder.predicate(i.operands[3]);
        else if (!i.has("L2::cache_hint") || i.operands.size() > 4)
            read_row = decoder.source(i.operands[3], Type::u32);
    }
    auto &rows = decoder.function().vector_rows;
    Op &op = decoder.emit(&copy_at_once, to.row, from.row, read_row, ignore_row);
    op.target = static_cast<std::uint32_t>(rows.size());
    rows.push_back(static_cast<std::uint32_t>(static_cast<std::int32_t>(to.offset)));
    op.immediate = from.offset;
    op.detail = static_cast<std::uint16_t>(bytes);
    op.extra = to.width_bytes == 8 ? 1 : 0;
}

// --- the stack
// -----------------------------------------------------------------------------------------------------------

/// d: the new piece's address in the local space; a: its size; immediate: alignment.
void allocate_stack(Warp &warp, const Op &op, Mask mask) {
    auto *d = row<std::uint64_t>(warp, op.d);
    const auto *a = row<std::uint64_t>(warp, op.a);
    each_lane(mask, [&](unsigned lane) {
        const auto alignment = static_cast<std::uint64_t>(op.immediate);
        const std::uint64_t start = (warp.local_top[lane] + alignment - 1) & ~(alignment - 1);
        const std::uint64_t end = a[lane] > warp.context->launch.max_local_bytes ? ~std::uint64_t{0} : start + a[lane];
        warp.reserve_local(end, op);
        warp.local_top[lane] = static_cast<std::uint32_t>((end + 15) & ~std::uint64_t{15});
        d[lane] = start;
    });
}
void save_stack(Warp &warp, const Op &op, Mask mask) {
    auto *d = row<std::uint64_t>(warp, op.d);
    each_lane(mask, [&](unsigned lane) { d[lane] = warp.local_top[lane]; });
}
void restore_stack(Warp &warp, const Op &op, Mask mask) {
    const auto *a = row<std::uint64_t>(warp, op.a);
    each_lane(mask, [&](unsigned lane) {
        if (a[lane] <= warp.local_top[lane])
            warp.local_top[lane] = static_cast<std::uint32_t>(a[lane]);
    });
}

} // namespace

bool decode_memory(Decoder &decoder, const Instruction &i) {
    const std::string_view name = i.opcode;
    if (name == "ld" || name == "ldu") {
        decode_access(decoder, i, true);
    } else if (name == "st") {
        require(!i.has("async"), "asynchronous stores");
        decode_access(decoder, i, false);
    } else if (name == "prefetch" || name == "prefetchu" || name == "applypriority" || name == "discard") {
        decoder.emit(&run_nothing);
    } else if (name == "createpolicy") {
        require(!i.operands.empty(), "this form");
        decoder.emit(copy_handler(8), decoder.destination(i.operands[0], Type::b64), decoder.constant(8, 0));
    } else if (name == "cp" && i.has("async")) {
        decode_copy(decoder, i);
    } else if (name == "alloca") {
        require(i.operands.size() >= 2, "this form");
        const Type type = types_of(i).first;
        const std::uint32_t a = decoder.source(i.operands[1], type);
        require(size_of(type) == 8, "32-bit stack addresses");
        std::uint64_t alignment = i.operands.size() > 2 ? i.operands[2].bits : 16;
        require(alignment != 0 && (alignment & (alignment - 1)) == 0 && alignment <= 4096, "this alignment");
        decoder.emit(&allocate_stack, decoder.destination(i.operands[0], type), a).immediate =
            static_cast<std::int64_t>(alignment < 16 ? 16 : alignment);
    } else if (name == "stacksave") {
        check_form(i, {}, 1);
        decoder.emit(&save_stack, decoder.destination(i.operands[0], Type::u64));
    } else if (name == "stackrestore") {
        check_form(i, {}, 1);
        decoder.emit(&restore_stack, 0, decoder.source(i.operands[0], Type::u64));
    } else {
        return false;
    }
    return true;
}

} // namespace simgpu::ptx
