// Blocks and clusters: their barriers and the turns of their warps. Also the per-launch linking of functions.
#include <algorithm>
#include <bit>
#include <cstring>

#include "lanes.hpp"
#include "program.hpp"
#include "warp.hpp"

namespace simgpu::ptx {

namespace {

// Operations that a warp may run before the next one of its block gets its turn: large, because a change costs cache
// misses, but bounded, because a warp may spin on what another one writes.
constexpr std::int64_t warp_turn = 20'000;

/// The operation that a lane waiting at a barrier is at: the one before its position.
const Op &waiting_op(const Warp &warp, unsigned lane) {
    return warp.position[lane][-1];
}

} // namespace

void Block::start(const std::array<unsigned, 3> &block_id, Linked &entry) {
    id = block_id;
    const auto &size = context->launch.block;
    thread_count = size[0] * size[1] * size[2];
    live_threads = thread_count;
    barriers.fill({});
    std::memset(shared.get() + reserved_offset, 0, shared_bytes - reserved_offset);
    const unsigned count = (thread_count + warp_size - 1) / warp_size;
    while (warps.size() < count)
        warps.push_back(std::make_unique<Warp>());
    for (unsigned w = 0; w < count; ++w) {
        const unsigned lanes = std::min(warp_size, thread_count - w * warp_size);
        warps[w]->start(*this, w, lanes == warp_size ? all_lanes : (Mask{1} << lanes) - 1, entry);
    }
}

Block::Outcome Block::run(std::int64_t budget) {
    bool progress = true;
    while (progress && budget > 0) {
        progress = false;
        for (auto &warp : warps) {
            if (warp->ready == 0)
                continue;
            progress = true;
            const std::int64_t turn = std::min(warp_turn, budget);
            std::int64_t left = turn;
            warp->run(left);
            budget -= turn - left;
            context->operations += static_cast<std::uint64_t>(turn - left);
            if (budget <= 0)
                break;
        }
        if (live_threads == 0)
            return Outcome::done;
    }
    return progress ? Outcome::exhausted : Outcome::blocked;
}

void Block::release_if_complete(unsigned barrier_id) {
    Barrier &barrier = barriers[barrier_id];
    const std::uint32_t expected = barrier.expected != 0 ? barrier.expected : live_threads;
    if (barrier.arrived == 0 || barrier.arrived < expected)
        return;
    for (auto &warp : warps) {
        each_lane(warp->at_barrier, [&](unsigned lane) {
            if (warp->barrier_id[lane] != barrier_id)
                return;
            const Op &op = waiting_op(*warp, lane);
            std::byte *rows = warp->lane_frame[lane]->rows.get();
            // op.extra of a reducing barrier: 1 and, 2 or, 3 count; see ops_control.cpp.
            if (op.extra == 3)
                reinterpret_cast<std::uint32_t *>(rows + op.d)[lane] = barrier.count;
            if (op.extra == 1 || op.extra == 2) {
                const bool value = op.extra == 1 ? barrier.all != 0 : barrier.any != 0;
                Mask &predicate = *reinterpret_cast<Mask *>(rows + op.d);
                predicate = (predicate & ~(Mask{1} << lane)) | static_cast<Mask>(value) << lane;
            }
            warp->at_barrier &= ~(Mask{1} << lane);
            warp->ready |= Mask{1} << lane;
        });
    }
    barrier = {};
}

void Block::threads_exited(unsigned count) {
    live_threads -= count;
    for (unsigned barrier = 0; barrier < barrier_count; ++barrier)
        if (barriers[barrier].arrived != 0 && barriers[barrier].expected == 0)
            release_if_complete(barrier);
    if (cluster->blocks.size() > 1)
        cluster->release_if_complete();
}

void Cluster::release_if_complete() {
    std::uint32_t expected = 0;
    for (const auto &block : blocks)
        expected += block->live_threads;
    if (arrived == 0 || arrived < expected)
        return;
    arrived = 0;
    ++phase;
    for (auto &block : blocks) {
        for (auto &warp : block->warps) {
            warp->ready |= warp->at_cluster;
            warp->at_cluster = 0;
        }
    }
}

Context::Context(const Kernel &launched_kernel, const Launch &launch_data, Program &decoded,
                 const EntryPlan &entry_plan, Memory &device_memory)
    : kernel(launched_kernel), launch(launch_data), program(decoded), memory(device_memory), plan(entry_plan) {
    parameters.assign(launch.parameters, launch.parameters + launch.parameters_bytes);
    linked.resize(program.syntax().functions.size());
}

std::uint64_t Context::symbol_value(const SymbolRow &symbol) {
    if (symbol.kind == SymbolRow::Kind::variable) {
        const std::string &name = program.syntax().variables[symbol.index].name;
        const std::uint64_t address = memory.symbol_address(*program.module, name);
        if (address == 0) {
            throw Fault(Fault::Kind::illegal_address, kernel.name(), 0, 0, {}, {},
                        "variable " + name + " has no address; the module that defines it is not loaded");
        }
        return address + static_cast<std::uint64_t>(symbol.addend);
    }
    const auto &variable = program.shared[symbol.index];
    const std::uint64_t offset =
        variable.is_dynamic ? plan.dynamic_offset(variable.alignment_bytes) : plan.shared_offsets[symbol.index];
    return offset + static_cast<std::uint64_t>(symbol.addend);
}

Linked &Context::link(std::uint32_t function_index) {
    auto &slot = linked[function_index];
    if (slot == nullptr) {
        auto fresh = std::make_unique<Linked>();
        fresh->function = program.function(function_index);
        for (const SymbolRow &symbol : fresh->function->symbols)
            fresh->symbol_values.push_back(symbol_value(symbol));
        slot = std::move(fresh);
    }
    return *slot;
}

std::unique_ptr<Frame> Context::make_frame(Linked &owner) {
    auto frame = std::make_unique<Frame>();
    frame->linked = &owner;
    frame->rows = allocate_aligned(owner.function->frame_bytes);
    const auto fill = [&](std::uint32_t offset, unsigned width, std::uint64_t bits) {
        std::byte *at = frame->rows.get() + offset;
        switch (width) {
        case 0:
            *reinterpret_cast<Mask *>(at) = bits != 0 ? all_lanes : 0;
            break;
        case 1:
            std::fill_n(reinterpret_cast<std::uint8_t *>(at), warp_size, static_cast<std::uint8_t>(bits));
            break;
        case 2:
            std::fill_n(reinterpret_cast<std::uint16_t *>(at), warp_size, static_cast<std::uint16_t>(bits));
            break;
        case 4:
            std::fill_n(reinterpret_cast<std::uint32_t *>(at), warp_size, static_cast<std::uint32_t>(bits));
            break;
        default:
            std::fill_n(reinterpret_cast<std::uint64_t *>(at), warp_size, bits);
            break;
        }
    };
    for (const ConstantRow &constant : owner.function->constants)
        fill(constant.offset, constant.width, constant.bits);
    for (std::size_t i = 0; i < owner.function->symbols.size(); ++i) {
        const SymbolRow &symbol = owner.function->symbols[i];
        fill(symbol.offset, symbol.width, owner.symbol_values[i]);
    }
    return frame;
}

} // namespace simgpu::ptx
