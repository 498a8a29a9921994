// Scheduling of a warp's lanes and its call frames; see warp.hpp.
#include "warp.hpp"

#include <algorithm>
#include <bit>
#include <cstring>
#include <new>

#include "lanes.hpp"

namespace simgpu::ptx {

namespace {

// How many operations lanes may run while others of their warp are ready and wait. Long enough that diverged loops of
// ordinary length are not disturbed, short enough that lanes which spin on a value from others soon see it.
constexpr std::int64_t patience = 20'000;
// How many operations a group of waiting lanes then runs before the lowest position goes first again.
constexpr std::int64_t favour = 500;
// Every call costs a lane some local memory, so that endless recursion ends in a fault and not in an exhausted host.
constexpr std::uint32_t bytes_per_call = 16;

const Op *no_limit() {
    return reinterpret_cast<const Op *>(~std::uintptr_t{0});
}

} // namespace

AlignedBytes allocate_aligned(std::size_t bytes) {
    // At least a cache line, so that vector loads of the last row stay inside.
    const std::size_t size = (bytes + 127) & ~std::size_t{63};
    auto *memory = static_cast<std::byte *>(::operator new[](size, std::align_val_t{64}));
    std::memset(memory, 0, size);
    return AlignedBytes(memory);
}

void Warp::start(Block &owner, unsigned warp_index, Mask lanes, Linked &entry) {
    block = &owner;
    context = owner.context;
    index = warp_index;
    live = lanes;
    ready = 0;
    at_barrier = at_sync = at_cluster = 0;
    clock = 0;
    waited_ = favour_left_ = 0;
    favoured_ = 0;
    last_favoured_ = 0;
    mask = 0;
    frame = nullptr;
    local_top.fill(0);
    lane_frame.fill(nullptr);
    const Op &first = entry.function->ops.front();
    enter(entry, lanes, nullptr, nullptr, first);
}

std::array<unsigned, 3> Warp::thread_of(unsigned lane) const {
    const auto &size = context->launch.block;
    const unsigned linear = index * warp_size + lane;
    return {linear % size[0], linear / size[0] % size[1], linear / size[0] / size[1]};
}

void Warp::fault(Fault::Kind kind, const Op &op, unsigned lane, std::uint64_t address, std::string text) const {
    throw Fault(kind, context->kernel.name(), op.line, address, block->id, thread_of(lane), std::move(text));
}

bool Warp::pick() {
    if (ready == 0)
        return false;
    Mask candidates = ready;
    if (waited_ > patience && (ready & ~mask) != 0) {
        // Fairness: the next lane, counted round the warp, that has been waiting goes on for a while.
        const Mask others = ready & ~mask;
        const Mask after = others & ~((Mask{2} << last_favoured_) - 1);
        last_favoured_ = static_cast<unsigned>(std::countr_zero(after != 0 ? after : others));
        const Frame *its_frame = lane_frame[last_favoured_];
        const Op *its_position = position[last_favoured_];
        favoured_ = 0;
        each_lane(ready, [&](unsigned lane) {
            if (lane_frame[lane] == its_frame && position[lane] == its_position)
                favoured_ |= Mask{1} << lane;
        });
        favour_left_ = favour;
        waited_ = 0;
    }
    if (favour_left_ <= 0)
        favoured_ = 0;
    if ((ready & favoured_) != 0)
        candidates = ready & favoured_;

    auto leader = static_cast<unsigned>(std::countr_zero(candidates));
    each_lane(candidates & (candidates - 1), [&](unsigned lane) {
        const Frame *here = lane_frame[lane];
        const Frame *best = lane_frame[leader];
        if (here == best ? position[lane] < position[leader] : here->depth > best->depth)
            leader = lane;
    });
    frame = lane_frame[leader];
    rows = frame->rows.get();
    next = position[leader];
    limit = no_limit();
    mask = 0;
    each_lane(ready, [&](unsigned lane) {
        if (lane_frame[lane] != frame)
            return;
        if (position[lane] == next)
            mask |= Mask{1} << lane;
        else if (favoured_ == 0 && position[lane] > next && position[lane] < limit)
            limit = position[lane];
    });
    slice_ = INT64_MAX;
    if (mask == ready)
        waited_ = 0;
    else
        slice_ = favoured_ != 0 ? favour_left_ : patience - waited_ + 1;
    return true;
}

Warp::Outcome Warp::run(std::int64_t &budget) {
    yielded_ = false;
    while (budget > 0) {
        if (!pick())
            return live == 0 ? Outcome::done : Outcome::blocked;
        regrouped = false;
        const std::int64_t allowed = std::min(budget, slice_);
        std::int64_t left = allowed;
        do {
            const Op &op = *next++;
            Mask executing = mask;
            if (op.guard != no_row) {
                const Mask guard = *reinterpret_cast<const Mask *>(rows + op.guard);
                executing &= op.guard_negated ? ~guard : guard;
            }
            if (executing != 0)
                op.run(*this, op, executing);
        } while (next < limit && --left > 0);
        const std::int64_t spent = allowed - left + 1;
        budget -= spent;
        clock += static_cast<std::uint64_t>(spent);
        if (slice_ != INT64_MAX) {
            if (favoured_ != 0)
                favour_left_ -= spent;
            else
                waited_ += spent;
        }
        if (!regrouped)
            each_lane(mask, [&](unsigned lane) { position[lane] = next; });
        if (yielded_) {
            waited_ = patience + 1;
            favour_left_ = 0;
            if (ready != 0)
                return Outcome::exhausted;
        }
    }
    return ready != 0 ? Outcome::exhausted : live == 0 ? Outcome::done : Outcome::blocked;
}

void Warp::regroup(Mask stay) {
    each_lane(stay, [&](unsigned lane) { position[lane] = next; });
    regrouped = true;
    limit = nullptr;
}

void Warp::yield() {
    yielded_ = true;
    limit = nullptr;
}

void Warp::reserve_local(std::size_t bytes, const Op &op) {
    if (bytes <= local_stride_)
        return;
    const std::size_t most = std::max<std::size_t>(context->launch.max_local_bytes, 1024);
    if (bytes > most) {
        const auto lane = static_cast<unsigned>(std::countr_zero(mask != 0 ? mask : live));
        fault(Fault::Kind::out_of_memory, op, lane, 0,
              "a thread needs more than " + std::to_string(most) + " bytes of local memory");
    }
    const std::size_t stride =
        std::min(std::max<std::size_t>(std::bit_ceil(bytes), 256), (most + 15) & ~std::size_t{15});
    AlignedBytes larger = allocate_aligned(stride * warp_size);
    for (unsigned lane = 0; lane < warp_size && local_stride_ != 0; ++lane)
        std::memcpy(larger.get() + lane * stride, local_.get() + lane * local_stride_, local_stride_);
    local_ = std::move(larger);
    local_stride_ = stride;
}

Frame *Warp::enter(Linked &callee, Mask lanes, const Op *return_to, const CallSite *site, const Op &op) {
    Frame *fresh = nullptr;
    if (callee.unused.empty()) {
        callee.frames.push_back(context->make_frame(callee));
        fresh = callee.frames.back().get();
    } else {
        fresh = callee.unused.back();
        callee.unused.pop_back();
    }
    fresh->parent = frame;
    fresh->depth = frame != nullptr ? frame->depth + 1 : 0;
    fresh->return_to = return_to;
    fresh->site = site;
    fresh->lanes = lanes;
    const std::uint32_t bytes =
        frame == nullptr ? callee.function->local_bytes : std::max(callee.function->local_bytes, bytes_per_call);
    std::uint32_t highest = 0;
    each_lane(lanes, [&](unsigned lane) {
        fresh->local_base[lane] = local_top[lane];
        local_top[lane] += bytes;
        highest = std::max(highest, local_top[lane]);
    });
    reserve_local(highest, op);
    fill_specials(*fresh);
    const Op *first = callee.function->ops.data();
    each_lane(lanes, [&](unsigned lane) {
        lane_frame[lane] = fresh;
        position[lane] = first;
    });
    ready |= lanes;
    return fresh;
}

void Warp::recycle(Frame *unused_frame) {
    unused_frame->linked->unused.push_back(unused_frame);
}

void Warp::leave(Mask lanes) {
    Frame *from = frame;
    each_lane(lanes, [&](unsigned lane) {
        local_top[lane] = from->local_base[lane];
        lane_frame[lane] = from->parent;
        position[lane] = from->return_to;
    });
    from->lanes &= ~lanes;
    if (from->lanes == 0)
        recycle(from);
}

void Warp::exit_lanes(Mask lanes) {
    each_lane(lanes, [&](unsigned lane) {
        for (Frame *each = lane_frame[lane]; each != nullptr;) {
            Frame *parent = each->parent;
            each->lanes &= ~(Mask{1} << lane);
            if (each->lanes == 0)
                recycle(each);
            each = parent;
        }
        lane_frame[lane] = nullptr;
    });
    live &= ~lanes;
    ready &= ~lanes;
    block->threads_exited(static_cast<unsigned>(std::popcount(lanes)));
    if (at_sync != 0)
        release_sync();
}

void Warp::fill_specials(Frame &into) {
    const auto &launch = context->launch;
    const auto &cluster = launch.cluster;
    const auto store = [&](const SpecialRow &special, auto &&value_of_lane) {
        std::byte *at = into.rows.get() + special.offset;
        if (special.width == 8) {
            auto *values = reinterpret_cast<std::uint64_t *>(at);
            for (unsigned lane = 0; lane < warp_size; ++lane)
                values[lane] = value_of_lane(lane);
        } else if (special.width == 4) {
            auto *values = reinterpret_cast<std::uint32_t *>(at);
            for (unsigned lane = 0; lane < warp_size; ++lane)
                values[lane] = static_cast<std::uint32_t>(value_of_lane(lane));
        } else {
            *reinterpret_cast<Mask *>(at) = value_of_lane(0) != 0 ? all_lanes : 0;
        }
    };
    const auto everywhere = [](std::uint64_t value) { return [value](unsigned) { return value; }; };
    const auto workspace = window_base(window_workspace);
    const unsigned threads = launch.block[0] * launch.block[1] * launch.block[2];
    for (const SpecialRow &special : into.linked->function->specials) {
        switch (special.special) {
        case Special::tid_x:
            store(special, [&](unsigned lane) { return std::uint64_t{thread_of(lane)[0]}; });
            break;
        case Special::tid_y:
            store(special, [&](unsigned lane) { return std::uint64_t{thread_of(lane)[1]}; });
            break;
        case Special::tid_z:
            store(special, [&](unsigned lane) { return std::uint64_t{thread_of(lane)[2]}; });
            break;
        case Special::ntid_x:
            store(special, everywhere(launch.block[0]));
            break;
        case Special::ntid_y:
            store(special, everywhere(launch.block[1]));
            break;
        case Special::ntid_z:
            store(special, everywhere(launch.block[2]));
            break;
        case Special::ctaid_x:
            store(special, everywhere(block->id[0]));
            break;
        case Special::ctaid_y:
            store(special, everywhere(block->id[1]));
            break;
        case Special::ctaid_z:
            store(special, everywhere(block->id[2]));
            break;
        case Special::nctaid_x:
            store(special, everywhere(launch.grid[0]));
            break;
        case Special::nctaid_y:
            store(special, everywhere(launch.grid[1]));
            break;
        case Special::nctaid_z:
            store(special, everywhere(launch.grid[2]));
            break;
        case Special::laneid:
            store(special, [](unsigned lane) { return std::uint64_t{lane}; });
            break;
        case Special::warpid:
            store(special, everywhere(index));
            break;
        case Special::nwarpid:
            store(special, everywhere((threads + warp_size - 1) / warp_size));
            break;
        case Special::smid: {
            const std::uint64_t linear =
                block->id[0] +
                std::uint64_t{launch.grid[0]} * (block->id[1] + std::uint64_t{launch.grid[1]} * block->id[2]);
            store(special, everywhere(linear % std::max(launch.multiprocessor_count, 1u)));
            break;
        }
        case Special::nsmid:
            store(special, everywhere(std::max(launch.multiprocessor_count, 1u)));
            break;
        case Special::gridid:
            store(special, everywhere(launch.grid_id));
            break;
        case Special::lanemask_eq:
            store(special, [](unsigned lane) { return std::uint64_t{1} << lane; });
            break;
        case Special::lanemask_le:
            store(special, [](unsigned lane) { return (std::uint64_t{2} << lane) - 1; });
            break;
        case Special::lanemask_lt:
            store(special, [](unsigned lane) { return (std::uint64_t{1} << lane) - 1; });
            break;
        case Special::lanemask_ge:
            store(special, [](unsigned lane) { return (~std::uint64_t{0} << lane) & all_lanes; });
            break;
        case Special::lanemask_gt:
            store(special, [](unsigned lane) { return (~std::uint64_t{1} << lane) & all_lanes; });
            break;
        case Special::dynamic_smem_size:
            store(special, everywhere(launch.dynamic_shared_bytes));
            break;
        case Special::total_smem_size:
            store(special, everywhere(block->reserved_offset));
            break;
        case Special::clusterid_x:
            store(special, everywhere(block->id[0] / cluster[0]));
            break;
        case Special::clusterid_y:
            store(special, everywhere(block->id[1] / cluster[1]));
            break;
        case Special::clusterid_z:
            store(special, everywhere(block->id[2] / cluster[2]));
            break;
        case Special::nclusterid_x:
            store(special, everywhere(launch.grid[0] / cluster[0]));
            break;
        case Special::nclusterid_y:
            store(special, everywhere(launch.grid[1] / cluster[1]));
            break;
        case Special::nclusterid_z:
            store(special, everywhere(launch.grid[2] / cluster[2]));
            break;
        case Special::cluster_ctaid_x:
            store(special, everywhere(block->id[0] % cluster[0]));
            break;
        case Special::cluster_ctaid_y:
            store(special, everywhere(block->id[1] % cluster[1]));
            break;
        case Special::cluster_ctaid_z:
            store(special, everywhere(block->id[2] % cluster[2]));
            break;
        case Special::cluster_nctaid_x:
            store(special, everywhere(cluster[0]));
            break;
        case Special::cluster_nctaid_y:
            store(special, everywhere(cluster[1]));
            break;
        case Special::cluster_nctaid_z:
            store(special, everywhere(cluster[2]));
            break;
        case Special::cluster_ctarank:
            store(special, everywhere(block->rank));
            break;
        case Special::cluster_nctarank:
            store(special, everywhere(cluster[0] * cluster[1] * cluster[2]));
            break;
        case Special::is_explicit_cluster:
            store(special, everywhere(cluster[0] * cluster[1] * cluster[2] > 1 ? 1 : 0));
            break;
        case Special::envreg1:
            store(special, everywhere(context->workspace_bytes != 0 ? workspace >> 32 : 0));
            break;
        case Special::envreg2:
            store(special, everywhere(workspace & 0xffffffff));
            break;
        case Special::reserved_smem_0:
            store(special, everywhere(block->reserved_offset));
            break;
        case Special::reserved_smem_1:
            store(special, everywhere(block->reserved_offset + reserved_shared_bytes / 2));
            break;
        case Special::reserved_smem_end:
            store(special, everywhere(block->reserved_offset + reserved_shared_bytes));
            break;
        case Special::zero32:
        case Special::zero64:
            store(special, everywhere(0));
            break;
        }
    }
}

} // namespace simgpu::ptx
