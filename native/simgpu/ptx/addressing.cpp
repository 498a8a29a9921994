// Address translation; see addressing.hpp.
#include "addressing.hpp"

#include <bit>

namespace simgpu::ptx {

namespace {

void observe(Warp &warp, std::uint64_t address, std::size_t bytes, Access access) {
    const auto kind = access == Access::load    ? Observer::Kind::load
                      : access == Access::store ? Observer::Kind::store
                                                : Observer::Kind::atomic;
    warp.context->observer->access(address, static_cast<std::uint32_t>(bytes), kind);
}

bool covers(const Memory::Range &range, std::uint64_t address, std::size_t bytes) {
    return address >= range.begin && address < range.end && range.end - address >= bytes;
}

/// The cached range that holds the access, fetched from Memory when needed. nullptr: ask translate().
const Memory::Range *find_range(Context &context, std::uint64_t address, std::size_t bytes, Access access) {
    const bool write = access != Access::load;
    auto &ranges = write ? context.write_ranges : context.read_ranges;
    for (const auto &range : ranges)
        if (covers(range, address, bytes))
            return &range;
    const Memory::Range fresh = context.memory.range(address, write);
    if (fresh.host == nullptr || !covers(fresh, address, bytes))
        return nullptr;
    unsigned &victim = write ? context.write_victim : context.read_victim;
    victim = (victim + 1) % Context::cached_ranges;
    ranges[victim] = fresh;
    return &ranges[victim];
}

std::byte *resolve_global(Warp &warp, const Op &op, unsigned lane, std::uint64_t address, std::size_t bytes,
                          Access access) {
    Context &context = *warp.context;
    std::byte *pointer = nullptr;
    if (const Memory::Range *range = find_range(context, address, bytes, access)) {
        pointer = range->host + (address - range->begin);
    } else {
        pointer = context.memory.translate(address, bytes, access != Access::load);
        if (pointer == nullptr) {
            warp.fault(Fault::Kind::illegal_address, op, lane, address,
                       std::string(access == Access::load    ? "a load"
                                   : access == Access::store ? "a store"
                                                             : "an atomic") +
                           " of " + std::to_string(bytes) + " bytes");
        }
    }
    if (context.observer != nullptr)
        observe(warp, address, bytes, access);
    return pointer;
}

std::byte *resolve_shared(Warp &warp, const Op &op, unsigned lane, std::uint64_t address, std::size_t bytes) {
    const std::uint64_t inside = address & ((std::uint64_t{1} << window_shift) - 1);
    const std::uint64_t offset = inside & shared_offset_mask;
    const std::uint64_t rank = inside >> shared_rank_shift;
    Block *block = warp.block;
    if (rank != 0) {
        Cluster &cluster = *block->cluster;
        if (rank > cluster.blocks.size())
            warp.fault(Fault::Kind::illegal_address, op, lane, address, "shared memory of no block of this cluster");
        block = cluster.blocks[rank - 1].get();
    }
    if (offset + bytes > block->shared_bytes) {
        warp.fault(Fault::Kind::illegal_address, op, lane, address,
                   "beyond the " + std::to_string(block->shared_bytes) + " bytes of shared memory");
    }
    return block->shared.get() + offset;
}

} // namespace

std::byte *resolve(Warp &warp, const Op &op, unsigned lane, std::uint64_t address, std::size_t bytes, Access access) {
    if ((address & (std::bit_floor(bytes) - 1)) != 0)
        warp.fault(Fault::Kind::misaligned, op, lane, address, std::to_string(bytes) + " bytes");
    const std::uint64_t inside = address & ((std::uint64_t{1} << window_shift) - 1);
    switch (address >> window_shift) {
    case 0:
        return resolve_global(warp, op, lane, address, bytes, access);
    case window_shared:
        return resolve_shared(warp, op, lane, address, bytes);
    case window_local:
        if (inside >= warp.local_stride() || warp.local_stride() - inside < bytes)
            warp.fault(Fault::Kind::illegal_address, op, lane, address, "beyond the thread's local memory");
        return warp.local_memory(lane) + inside;
    case window_parameter: {
        auto &parameters = warp.context->parameters;
        if (inside >= parameters.size() || parameters.size() - inside < bytes || access != Access::load)
            warp.fault(Fault::Kind::illegal_address, op, lane, address, "in the kernel's parameters");
        return parameters.data() + inside;
    }
    case window_workspace:
        if (inside >= warp.context->workspace_bytes || warp.context->workspace_bytes - inside < bytes)
            warp.fault(Fault::Kind::illegal_address, op, lane, address, "in the launch workspace");
        return warp.context->workspace + inside;
    default:
        warp.fault(Fault::Kind::illegal_address, op, lane, address, "in no state space");
    }
}

namespace {

/// Global pointers when all lanes fall into one cached range, which is nearly always.
template <class Word>
bool global_fast(Warp &warp, const Word *addresses, std::uint64_t offset, Mask mask, std::size_t bytes, Access access,
                 Pointers &pointers) {
    Context &context = *warp.context;
    if (context.observer != nullptr)
        return false;
    const auto first = static_cast<unsigned>(std::countr_zero(mask));
    if ((addresses[first] + offset) >> window_shift != 0)
        return false;
    const Memory::Range *range = find_range(context, addresses[first] + offset, bytes, access);
    if (range == nullptr)
        return false;
    const std::uint64_t base = range->begin;
    const std::uint64_t span = range->end - range->begin - bytes;
    std::byte *const host = range->host;
    // A set sign bit in `outside` tells that an address lies below the range or too close to its end.
    std::uint64_t outside = 0;
    std::uint64_t bits = 0;
    if (mask == all_lanes) {
        for (unsigned lane = 0; lane < warp_size; ++lane) {
            const std::uint64_t address = addresses[lane] + offset;
            const std::uint64_t distance = address - base;
            outside |= distance | (span - distance);
            bits |= address;
            pointers[lane] = host + distance;
        }
    } else {
        each_lane(mask, [&](unsigned lane) {
            const std::uint64_t address = addresses[lane] + offset;
            const std::uint64_t distance = address - base;
            outside |= distance | (span - distance);
            bits |= address;
            pointers[lane] = host + distance;
        });
    }
    return (outside >> 63) == 0 && (bits & (bytes - 1)) == 0;
}

/// Generic pointers when all lanes point into their local memory, as unoptimised code does all the time.
template <class Word>
bool generic_local_fast(Warp &warp, const Word *addresses, std::uint64_t offset, Mask mask, std::size_t bytes,
                        Pointers &pointers) {
    if (warp.local_stride() < bytes)
        return false;
    const std::uint64_t span = warp.local_stride() - bytes;
    std::uint64_t outside = 0;
    std::uint64_t bits = 0;
    each_lane(mask, [&](unsigned lane) {
        const std::uint64_t inside = addresses[lane] + offset - window_base(window_local);
        outside |= inside | (span - inside);
        bits |= inside;
        pointers[lane] = warp.local_memory(lane) + inside;
    });
    return (outside >> 63) == 0 && (bits & (bytes - 1)) == 0;
}

template <class Word>
bool shared_fast(Warp &warp, const Word *addresses, std::uint64_t offset, Mask mask, std::size_t bytes,
                 Pointers &pointers) {
    const Block &block = *warp.block;
    if (block.shared_bytes < bytes)
        return false;
    const std::uint64_t span = block.shared_bytes - bytes;
    std::byte *const host = block.shared.get();
    std::uint64_t outside = 0;
    std::uint64_t bits = 0;
    each_lane(mask, [&](unsigned lane) {
        // A 32-bit address wraps within 32 bits.
        const std::uint64_t address = static_cast<Word>(addresses[lane] + static_cast<Word>(offset));
        outside |= address | (span - address);
        bits |= address;
        pointers[lane] = host + address;
    });
    return (outside >> 63) == 0 && (bits & (bytes - 1)) == 0;
}

} // namespace

template <class Word, AddressKind kind>
void find_pointers(Warp &warp, const Op &op, Mask mask, std::size_t bytes, Access access, Pointers &pointers) {
    const Word *addresses = row<Word>(warp, op.a);
    const auto offset = static_cast<std::uint64_t>(op.immediate);
    if constexpr (kind == AddressKind::global || kind == AddressKind::generic) {
        if constexpr (kind == AddressKind::generic && sizeof(Word) == 8) {
            const auto first = static_cast<unsigned>(std::countr_zero(mask));
            const std::uint64_t window = (addresses[first] + offset) >> window_shift;
            if (window == window_local && generic_local_fast(warp, addresses, offset, mask, bytes, pointers))
                return;
        }
        if (global_fast(warp, addresses, offset, mask, bytes, access, pointers))
            return;
        each_lane(mask, [&](unsigned lane) {
            pointers[lane] = resolve(warp, op, lane, addresses[lane] + offset, bytes, access);
        });
    } else {
        if constexpr (kind == AddressKind::shared) {
            if (shared_fast(warp, addresses, offset, mask, bytes, pointers))
                return;
        }
        constexpr std::uint64_t window = window_base(kind == AddressKind::shared  ? window_shared
                                                     : kind == AddressKind::local ? window_local
                                                                                  : window_parameter);
        each_lane(mask, [&](unsigned lane) {
            std::uint64_t address = static_cast<Word>(addresses[lane] + static_cast<Word>(offset));
            // An address of the space itself has no window bits yet; anything else there is beyond the space.
            address = address >> window_shift == 0 ? address | window : address;
            pointers[lane] = resolve(warp, op, lane, address, bytes, access);
        });
    }
}

template void find_pointers<std::uint32_t, AddressKind::generic>(Warp &, const Op &, Mask, std::size_t, Access,
                                                                 Pointers &);
template void find_pointers<std::uint64_t, AddressKind::generic>(Warp &, const Op &, Mask, std::size_t, Access,
                                                                 Pointers &);
template void find_pointers<std::uint32_t, AddressKind::global>(Warp &, const Op &, Mask, std::size_t, Access,
                                                                Pointers &);
template void find_pointers<std::uint64_t, AddressKind::global>(Warp &, const Op &, Mask, std::size_t, Access,
                                                                Pointers &);
template void find_pointers<std::uint32_t, AddressKind::shared>(Warp &, const Op &, Mask, std::size_t, Access,
                                                                Pointers &);
template void find_pointers<std::uint64_t, AddressKind::shared>(Warp &, const Op &, Mask, std::size_t, Access,
                                                                Pointers &);
template void find_pointers<std::uint32_t, AddressKind::local>(Warp &, const Op &, Mask, std::size_t, Access,
                                                               Pointers &);
template void find_pointers<std::uint64_t, AddressKind::local>(Warp &, const Op &, Mask, std::size_t, Access,
                                                               Pointers &);
template void find_pointers<std::uint32_t, AddressKind::parameter>(Warp &, const Op &, Mask, std::size_t, Access,
                                                                   Pointers &);
template void find_pointers<std::uint64_t, AddressKind::parameter>(Warp &, const Op &, Mask, std::size_t, Access,
                                                                   Pointers &);

void find_pointers(Warp &warp, const Op &op, Mask mask, AddressKind kind, bool is_wide, std::uint32_t address_row,
                   std::int64_t offset, std::size_t bytes, Access access, Pointers &pointers) {
    Op view = op;
    view.a = address_row;
    view.immediate = offset;
    const auto find = [&]<AddressKind chosen>() {
        if (is_wide)
            find_pointers<std::uint64_t, chosen>(warp, view, mask, bytes, access, pointers);
        else
            find_pointers<std::uint32_t, chosen>(warp, view, mask, bytes, access, pointers);
    };
    switch (kind) {
    case AddressKind::generic:
        return find.operator()<AddressKind::generic>();
    case AddressKind::global:
        return find.operator()<AddressKind::global>();
    case AddressKind::shared:
        return find.operator()<AddressKind::shared>();
    case AddressKind::local:
        return find.operator()<AddressKind::local>();
    case AddressKind::parameter:
        return find.operator()<AddressKind::parameter>();
    }
}

} // namespace simgpu::ptx
