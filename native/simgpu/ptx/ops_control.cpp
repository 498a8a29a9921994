// Control flow: branches, calls, returns, block and cluster barriers, fences, traps.
#include <atomic>
#include <bit>
#include <cstring>

#include "builtins.hpp"
#include "decode.hpp"
#include "lanes.hpp"
#include "program.hpp"

namespace simgpu::ptx {

namespace {

void branch(Warp &warp, const Op &op, Mask mask) {
    if (mask == warp.mask) {
        warp.next += op.immediate;
        return;
    }
    const Op *target = warp.next + op.immediate;
    each_lane(mask, [&](unsigned lane) { warp.position[lane] = target; });
    warp.regroup(warp.mask & ~mask);
}

void branch_indexed(Warp &warp, const Op &op, Mask mask) {
    const Function &function = *warp.frame->linked->function;
    const auto &table = function.branch_tables[op.target];
    const auto *a = row<std::uint32_t>(warp, op.a);
    each_lane(mask, [&](unsigned lane) {
        if (a[lane] >= table.size())
            warp.fault(Fault::Kind::illegal_instruction, op, lane, 0,
                       "branch index " + std::to_string(a[lane]) + " has no target");
        warp.position[lane] = function.ops.data() + table[a[lane]];
    });
    warp.regroup(warp.mask & ~mask);
}

void leave_kernel(Warp &warp, Mask mask) {
    warp.regroup(warp.mask & ~mask);
    warp.exit_lanes(mask);
}

void run_exit(Warp &warp, const Op &, Mask mask) {
    leave_kernel(warp, mask);
}

void copy_slot(Warp &warp, unsigned lane, const Frame &from_frame, const Slot &from, const Frame &to_frame,
               const Slot &to) {
    const std::size_t bytes = from.size_bytes < to.size_bytes ? from.size_bytes : to.size_bytes;
    const std::byte *source = from.is_register
                                  ? from_frame.rows.get() + from.offset + std::size_t{lane} * from.size_bytes
                                  : warp.local_memory(lane) + from_frame.local_base[lane] + from.offset;
    std::byte *target = to.is_register ? to_frame.rows.get() + to.offset + std::size_t{lane} * to.size_bytes
                                       : warp.local_memory(lane) + to_frame.local_base[lane] + to.offset;
    std::memcpy(target, source, bytes);
}

void run_return(Warp &warp, const Op &, Mask mask) {
    Frame &frame = *warp.frame;
    if (frame.parent == nullptr)
        return leave_kernel(warp, mask);
    const Function &function = *frame.linked->function;
    const auto &results = frame.site->results;
    const std::size_t count = results.size() < function.returns.size() ? results.size() : function.returns.size();
    for (std::size_t k = 0; k < count; ++k)
        each_lane(mask,
                  [&](unsigned lane) { copy_slot(warp, lane, frame, function.returns[k], *frame.parent, results[k]); });
    warp.regroup(warp.mask & ~mask);
    warp.leave(mask);
}

void enter_function(Warp &warp, const Op &op, Mask mask, std::uint32_t callee, const CallSite &site) {
    Linked &linked = warp.context->link(callee);
    const Function &function = *linked.function;
    if (function.parameters.size() > site.arguments.size()) {
        warp.fault(Fault::Kind::illegal_instruction, op, static_cast<unsigned>(std::countr_zero(mask)), 0,
                   "a call of " + function.name + " with too few arguments");
    }
    Frame *caller = warp.frame;
    Frame *frame = warp.enter(linked, mask, warp.next, &site, op);
    for (std::size_t k = 0; k < function.parameters.size(); ++k)
        each_lane(mask, [&](unsigned lane) {
            copy_slot(warp, lane, *caller, site.arguments[k], *frame, function.parameters[k]);
        });
}

void call_direct(Warp &warp, const Op &op, Mask mask) {
    const CallSite &site = warp.frame->linked->function->calls[op.target];
    warp.regroup(warp.mask & ~mask);
    enter_function(warp, op, mask, site.callee, site);
}

void call_builtin(Warp &warp, const Op &op, Mask mask) {
    run_builtin(warp, op, mask, warp.frame->linked->function->calls[op.target]);
}

void call_indirect(Warp &warp, const Op &op, Mask mask) {
    const Function &caller = *warp.frame->linked->function;
    const CallSite &site = caller.calls[op.target];
    const auto *a = row<std::uint64_t>(warp, op.a);
    const auto &functions = warp.context->program.syntax().functions;
    warp.regroup(warp.mask & ~mask);
    std::array<std::uint64_t, warp_size> addresses{};
    each_lane(mask, [&](unsigned lane) { addresses[lane] = a[lane]; });
    // Lanes that call the same function go together.
    for (Mask rest = mask; rest != 0;) {
        const auto first = static_cast<unsigned>(std::countr_zero(rest));
        Mask same = 0;
        each_lane(rest, [&](unsigned lane) { same |= static_cast<Mask>(addresses[lane] == addresses[first]) << lane; });
        rest &= ~same;
        const std::uint64_t index = ((addresses[first] & ((std::uint64_t{1} << window_shift) - 1)) >> 4) - 1;
        if (index >= functions.size() || addresses[first] != function_address(static_cast<std::uint32_t>(index)) ||
            functions[index].is_entry || !functions[index].has_body) {
            warp.fault(Fault::Kind::illegal_instruction, op, first, addresses[first],
                       "a call of an address that is no function of this module");
        }
        // A function reached only through its address may hold what the check at launch did not see.
        const Function *function = warp.context->program.function(static_cast<std::uint32_t>(index));
        if (function->unsupported_line != 0) {
            Op where = op;
            where.line = function->unsupported_line;
            warp.fault(Fault::Kind::unsupported, where, first, 0, function->unsupported_text);
        }
        enter_function(warp, op, same, static_cast<std::uint32_t>(index), site);
    }
}

// --- barriers of a block
// ---------------------------------------------------------------------------------------------------

// a: row of the barrier's number; b: row of the thread count or none; c: predicate of a reduction; d: its result;
// detail: 0 wait, 1 arrive only; extra: the reduction (0 none, 1 and, 2 or, 3 count).
void block_barrier(Warp &warp, const Op &op, Mask mask) {
    Block &block = *warp.block;
    const auto *ids = row<std::uint32_t>(warp, op.a);
    const auto *counts = row<std::uint32_t>(warp, op.b);
    const bool waits = op.detail == 0;
    if (waits)
        warp.regroup(warp.mask & ~mask);
    Mask touched = 0;
    each_lane(mask, [&](unsigned lane) {
        const std::uint32_t id = ids[lane];
        if (id >= Block::barrier_count)
            warp.fault(Fault::Kind::illegal_instruction, op, lane, 0,
                       "barrier " + std::to_string(id) + " does not exist");
        Barrier &barrier = block.barriers[id];
        const std::uint32_t expected = op.b != no_row ? counts[lane] : 0;
        if (barrier.arrived == 0)
            barrier.expected = expected;
        ++barrier.arrived;
        if (op.extra != 0) {
            const bool value = (*row<Mask>(warp, op.c) >> lane & 1) != 0;
            barrier.all &= value ? all_lanes : 0;
            barrier.any |= value ? 1 : 0;
            barrier.count += value ? 1 : 0;
        }
        touched |= Mask{1} << id;
        if (waits) {
            warp.barrier_id[lane] = static_cast<std::uint8_t>(id);
            warp.position[lane] = warp.next;
            warp.at_barrier |= Mask{1} << lane;
            warp.ready &= ~(Mask{1} << lane);
        }
    });
    each_lane(touched, [&](unsigned id) { block.release_if_complete(id); });
}

void decode_barrier(Decoder &decoder, const Instruction &i) {
    const bool reduces = i.has("red");
    const bool arrives = i.has("arrive");
    for (const auto &modifier : i.modifiers) {
        static constexpr std::string_view known[] = {"cta", "sync", "arrive", "red", "popc", "and", "or", "aligned"};
        bool found = type_named(std::string_view(modifier.data() - 1, modifier.size() + 1)) != Type::none;
        for (const auto &candidate : known)
            found = found || candidate == modifier;
        require(found, "this form");
    }
    const std::size_t first = reduces ? 1 : 0;
    const std::size_t last = i.operands.size() - (reduces ? 1 : 0);
    require(i.operands.size() > first && last > first && last - first <= 2, "this number of operands");
    const std::uint32_t id = decoder.source(i.operands[first], Type::u32);
    const std::uint32_t count = last - first == 2 ? decoder.source(i.operands[first + 1], Type::u32) : no_row;
    const std::uint32_t value = reduces ? decoder.predicate(i.operands.back()) : no_row;
    std::uint32_t result = no_row;
    if (reduces)
        result = i.has("popc") ? decoder.destination(i.operands[0], Type::u32)
                               : decoder.predicate_destination(i.operands[0]);
    Op &op = decoder.emit(&block_barrier, result, id, count, value);
    op.detail = arrives ? 1 : 0;
    op.extra = static_cast<std::uint8_t>(!reduces ? 0 : i.has("and") ? 1 : i.has("or") ? 2 : 3);
}

// --- barriers of a cluster
// -------------------------------------------------------------------------------------------------

void cluster_arrive(Warp &warp, const Op &, Mask mask) {
    Cluster &cluster = *warp.block->cluster;
    each_lane(mask, [&](unsigned lane) { warp.cluster_phase[lane] = cluster.phase; });
    cluster.arrived += static_cast<std::uint32_t>(std::popcount(mask));
    cluster.release_if_complete();
}
void cluster_wait(Warp &warp, const Op &, Mask mask) {
    const std::uint32_t phase = warp.block->cluster->phase;
    warp.regroup(warp.mask & ~mask);
    each_lane(mask, [&](unsigned lane) {
        warp.position[lane] = warp.next;
        if (warp.cluster_phase[lane] != phase)
            return;
        warp.at_cluster |= Mask{1} << lane;
        warp.ready &= ~(Mask{1} << lane);
    });
}

/// The address of `a` in the shared memory of block `b` of the cluster.
template <class T> void map_shared(Warp &warp, const Op &op, Mask mask) {
    T *d = row<T>(warp, op.d);
    const T *a = row<T>(warp, op.a);
    const auto *b = row<std::uint32_t>(warp, op.b);
    each_lane(mask, [&](unsigned lane) {
        const std::uint64_t rank = (std::uint64_t{b[lane]} + 1) << shared_rank_shift;
        d[lane] = static_cast<T>((a[lane] & ~(std::uint64_t{0xff} << shared_rank_shift)) | rank);
    });
}
template <class T> void rank_of_shared(Warp &warp, const Op &op, Mask mask) {
    auto *d = row<std::uint32_t>(warp, op.d);
    const T *a = row<T>(warp, op.a);
    each_lane(mask, [&](unsigned lane) {
        const auto rank = static_cast<std::uint32_t>(a[lane] >> shared_rank_shift & 0xff);
        d[lane] = rank == 0 ? warp.block->rank : rank - 1;
    });
}

// --- the rest
// ----------------------------------------------------------------------------------------------------------------

// A fence is one read-modify-write of a word that all fences share: what happened before the earlier of two fences
// happens before what follows the later one. Race detectors understand this, which they do not for a bare fence.
std::atomic<unsigned> fence_order{0};
void run_fence(Warp &, const Op &, Mask) {
    fence_order.fetch_add(1, std::memory_order_seq_cst);
}
void run_sleep(Warp &warp, const Op &, Mask) {
    warp.yield();
}
void run_trap(Warp &warp, const Op &op, Mask mask) {
    warp.fault(Fault::Kind::trap, op, static_cast<unsigned>(std::countr_zero(mask)), 0);
}

Slot call_slot(Decoder &decoder, const Operand &operand) {
    Slot slot;
    if (decoder.find_slot(operand, slot))
        return slot;
    Decoder::Register found{};
    if (decoder.find_register(operand, found)) {
        require(found.width_bytes != 0, "a predicate as an argument");
        return {true, found.offset, static_cast<std::uint32_t>(found.width_bytes)};
    }
    if (operand.kind == Operand::Kind::integer)
        return {true, decoder.constant(8, operand.bits), 8};
    throw Unsupported{"this kind of argument"};
}

Builtin builtin_named(std::string_view name) {
    if (name == "vprintf")
        return Builtin::vprintf;
    if (name == "__assertfail")
        return Builtin::assert_fail;
    if (name == "malloc")
        return Builtin::heap_allocate;
    if (name == "free")
        return Builtin::heap_free;
    return Builtin::none;
}

void decode_call(Decoder &decoder, const Instruction &i) {
    check_form(i, {"uni"}, -1);
    std::size_t at = 0;
    const Operand *results = nullptr;
    const Operand *arguments = nullptr;
    if (i.operands[at].kind == Operand::Kind::list)
        results = &i.operands[at++];
    require(at < i.operands.size() && i.operands[at].kind == Operand::Kind::name, "a call of nothing");
    const Operand &callee = i.operands[at++];
    if (at < i.operands.size() && i.operands[at].kind == Operand::Kind::list)
        arguments = &i.operands[at++];

    CallSite site;
    if (results != nullptr)
        for (const auto &each : results->elements)
            site.results.push_back(call_slot(decoder, each));
    if (arguments != nullptr)
        for (const auto &each : arguments->elements)
            site.arguments.push_back(call_slot(decoder, each));

    Handler handler = &call_direct;
    std::uint32_t address = no_row;
    Decoder::Register found{};
    if (decoder.find_register(callee, found)) {
        require(found.width_bytes == 8, "a 32-bit function address");
        site.is_indirect = true;
        address = found.offset;
        handler = &call_indirect;
    } else {
        const std::int64_t index = decoder.function_named(callee);
        if (index < 0)
            throw Unsupported{"unknown function " + std::string(callee.name)};
        site.callee = static_cast<std::uint32_t>(index);
        const FunctionSyntax &target = decoder.program().syntax().functions[site.callee];
        require(!target.is_entry, "a launch of a kernel by a kernel");
        if (!target.has_body) {
            site.builtin = builtin_named(target.name);
            if (site.builtin == Builtin::none)
                throw Unsupported{"function " + std::string(target.name) + " is declared but nowhere defined"};
            check_builtin(site);
            decoder.function().must_run_in_order = true;
            handler = &call_builtin;
        }
    }
    Op &op = decoder.emit(handler, no_row, address);
    op.target = static_cast<std::uint32_t>(decoder.function().calls.size());
    decoder.function().calls.push_back(std::move(site));
}

bool decode_cluster(Decoder &decoder, const Instruction &i) {
    const std::string_view name = i.opcode;
    if (name == "barrier" && i.has("cluster")) {
        check_form(i, {"cluster", "arrive", "wait", "release", "acquire", "relaxed", "aligned"}, 0);
        decoder.emit(i.has("arrive") ? &cluster_arrive : &cluster_wait);
    } else if (name == "mapa") {
        check_form(i, {"shared::cluster"}, 3);
        const Type type = types_of(i).first;
        const std::uint32_t a = decoder.source(i.operands[1], type);
        const std::uint32_t b = decoder.source(i.operands[2], Type::u32);
        decoder.emit(size_of(type) == 8 ? &map_shared<std::uint64_t> : &map_shared<std::uint32_t>,
                     decoder.destination(i.operands[0], type), a, b);
    } else if (name == "getctarank") {
        check_form(i, {"shared::cluster"}, 2);
        const Type type = types_of(i).first;
        const std::uint32_t a = decoder.source(i.operands[1], type);
        decoder.emit(size_of(type) == 8 ? &rank_of_shared<std::uint64_t> : &rank_of_shared<std::uint32_t>,
                     decoder.destination(i.operands[0], Type::u32), a);
    } else {
        return false;
    }
    return true;
}

} // namespace

void run_unsupported(Warp &warp, const Op &op, Mask mask) {
    warp.fault(Fault::Kind::unsupported, op, static_cast<unsigned>(std::countr_zero(mask)), 0,
               warp.frame->linked->function->texts[op.target]);
}

bool decode_control(Decoder &decoder, const Instruction &i) {
    const std::string_view name = i.opcode;
    if (name == "bra") {
        check_form(i, {"uni"}, 1);
        decoder.fix_branch(decoder.position(), decoder.label(i, i.operands[0]));
        decoder.emit(&branch);
    } else if (name == "brx") {
        check_form(i, {"idx", "uni"}, 2);
        const std::uint32_t a = decoder.source(i.operands[0], Type::u32);
        auto table = decoder.branch_table(i, i.operands[1]);
        decoder.emit(&branch_indexed, no_row, a).target =
            static_cast<std::uint32_t>(decoder.function().branch_tables.size());
        decoder.function().branch_tables.push_back(std::move(table));
    } else if (name == "call") {
        decode_call(decoder, i);
    } else if (name == "ret") {
        check_form(i, {"uni"}, 0);
        decoder.emit(&run_return);
    } else if (name == "exit") {
        check_form(i, {}, 0);
        decoder.emit(&run_exit);
    } else if (name == "trap" || name == "brkpt") {
        check_form(i, {}, 0);
        decoder.emit(&run_trap);
    } else if (decode_cluster(decoder, i)) {
        return true;
    } else if ((name == "bar" && !i.has("warp")) || name == "barrier") {
        decode_barrier(decoder, i);
    } else if (name == "membar" || name == "fence") {
        require(i.operands.empty(), "this form");
        decoder.emit(&run_fence);
    } else if (name == "nanosleep") {
        check_form(i, {}, 1);
        decoder.emit(&run_sleep);
    } else if (name == "pmevent" || name == "griddepcontrol" || name == "setmaxnreg") {
        decoder.emit(&run_nothing);
    } else {
        return false;
    }
    return true;
}

} // namespace simgpu::ptx
