// Warp-wide operations: shuffles, votes, matches, reductions. Lanes named in the member mask meet here, even when they
// come from different places of the program; lanes that have exited are not waited for.
#include <bit>

#include "decode.hpp"
#include "lanes.hpp"

namespace simgpu::ptx {

namespace {

enum class Kind : std::uint16_t { barrier, shuffle, vote, match, reduce, elect };
enum class Shuffle : std::uint8_t { up, down, butterfly, index };
enum class Vote : std::uint8_t { all, any, uniform, ballot };
enum class Match : std::uint8_t { any, all };
enum class Reduce : std::uint8_t { add, minimum, maximum, minimum_signed, maximum_signed, both, either, exclusive };

// Fields of an operation: e member mask row; a, b, c sources; d result row; target predicate result row; detail Kind;
// extra the mode; immediate: 8 when the values are 64 bits wide (match).

/// What the lanes that have met bring along. `op` and `rows` differ between lanes that came from different places.
struct Meeting {
    Mask lanes;
    const Op *op[warp_size];
    std::byte *rows[warp_size];

    template <class T> T value(std::uint32_t Op::*field, unsigned lane) const {
        return reinterpret_cast<const T *>(rows[lane] + op[lane]->*field)[lane];
    }
    bool predicate(std::uint32_t Op::*field, unsigned lane) const {
        return (*reinterpret_cast<const Mask *>(rows[lane] + op[lane]->*field) >> lane & 1) != 0;
    }
    void set(unsigned lane, std::uint32_t result) const {
        reinterpret_cast<std::uint32_t *>(rows[lane] + op[lane]->d)[lane] = result;
    }
    void set_predicate(std::uint32_t row_offset, unsigned lane, bool result) const {
        if (row_offset == no_row)
            return;
        Mask &into = *reinterpret_cast<Mask *>(rows[lane] + row_offset);
        into = (into & ~(Mask{1} << lane)) | static_cast<Mask>(result) << lane;
    }
};

void shuffle(const Meeting &meeting) {
    std::uint32_t values[warp_size] = {};
    each_lane(meeting.lanes, [&](unsigned lane) { values[lane] = meeting.value<std::uint32_t>(&Op::a, lane); });
    each_lane(meeting.lanes, [&](unsigned lane) {
        const Op &op = *meeting.op[lane];
        const std::uint32_t b = meeting.value<std::uint32_t>(&Op::b, lane) & 31;
        const std::uint32_t c = meeting.value<std::uint32_t>(&Op::c, lane);
        const std::uint32_t segment = c >> 8 & 31;
        const std::uint32_t lowest = lane & segment;
        const auto highest = static_cast<std::int32_t>(lowest | (c & 31 & ~segment));
        auto from = static_cast<std::int32_t>(lane);
        bool valid = false;
        switch (static_cast<Shuffle>(op.extra)) {
        case Shuffle::up:
            from -= static_cast<std::int32_t>(b);
            valid = from >= highest;
            break;
        case Shuffle::down:
            from += static_cast<std::int32_t>(b);
            valid = from <= highest;
            break;
        case Shuffle::butterfly:
            from ^= static_cast<std::int32_t>(b);
            valid = from <= highest;
            break;
        case Shuffle::index:
            from = static_cast<std::int32_t>(lowest | (b & ~segment));
            valid = from <= highest;
            break;
        }
        if (!valid)
            from = static_cast<std::int32_t>(lane);
        // A lane that takes no part has no defined value to give; the reader keeps its own.
        const bool present = (meeting.lanes >> from & 1) != 0;
        meeting.set(lane, present ? values[from] : values[lane]);
        meeting.set_predicate(op.target, lane, valid);
    });
}

void vote(const Meeting &meeting) {
    Mask ballot = 0;
    each_lane(meeting.lanes,
              [&](unsigned lane) { ballot |= static_cast<Mask>(meeting.predicate(&Op::a, lane)) << lane; });
    each_lane(meeting.lanes, [&](unsigned lane) {
        const Op &op = *meeting.op[lane];
        switch (static_cast<Vote>(op.extra)) {
        case Vote::all:
            meeting.set_predicate(op.target, lane, ballot == meeting.lanes);
            break;
        case Vote::any:
            meeting.set_predicate(op.target, lane, ballot != 0);
            break;
        case Vote::uniform:
            meeting.set_predicate(op.target, lane, ballot == 0 || ballot == meeting.lanes);
            break;
        case Vote::ballot:
            meeting.set(lane, ballot);
            break;
        }
    });
}

void match(const Meeting &meeting) {
    std::uint64_t values[warp_size] = {};
    each_lane(meeting.lanes, [&](unsigned lane) {
        values[lane] = meeting.op[lane]->immediate == 8 ? meeting.value<std::uint64_t>(&Op::a, lane)
                                                        : meeting.value<std::uint32_t>(&Op::a, lane);
    });
    each_lane(meeting.lanes, [&](unsigned lane) {
        Mask same = 0;
        each_lane(meeting.lanes,
                  [&](unsigned other) { same |= static_cast<Mask>(values[other] == values[lane]) << other; });
        const Op &op = *meeting.op[lane];
        if (static_cast<Match>(op.extra) == Match::any) {
            meeting.set(lane, same);
        } else {
            meeting.set(lane, same == meeting.lanes ? same : 0);
            meeting.set_predicate(op.target, lane, same == meeting.lanes);
        }
    });
}

std::uint32_t combine(Reduce how, std::uint32_t a, std::uint32_t b) {
    switch (how) {
    case Reduce::add:
        return a + b;
    case Reduce::minimum:
        return a < b ? a : b;
    case Reduce::maximum:
        return a < b ? b : a;
    case Reduce::minimum_signed:
        return static_cast<std::int32_t>(a) < static_cast<std::int32_t>(b) ? a : b;
    case Reduce::maximum_signed:
        return static_cast<std::int32_t>(a) < static_cast<std::int32_t>(b) ? b : a;
    case Reduce::both:
        return a & b;
    case Reduce::either:
        return a | b;
    case Reduce::exclusive:
        return a ^ b;
    }
    return a;
}

void reduce(const Meeting &meeting) {
    const auto first = static_cast<unsigned>(std::countr_zero(meeting.lanes));
    const auto how = static_cast<Reduce>(meeting.op[first]->extra);
    std::uint32_t result = meeting.value<std::uint32_t>(&Op::a, first);
    each_lane(meeting.lanes & (meeting.lanes - 1),
              [&](unsigned lane) { result = combine(how, result, meeting.value<std::uint32_t>(&Op::a, lane)); });
    each_lane(meeting.lanes, [&](unsigned lane) { meeting.set(lane, result); });
}

void elect(const Meeting &meeting) {
    const auto leader = static_cast<unsigned>(std::countr_zero(meeting.lanes));
    each_lane(meeting.lanes, [&](unsigned lane) {
        meeting.set(lane, leader);
        meeting.set_predicate(meeting.op[lane]->target, lane, lane == leader);
    });
}

void complete(const Meeting &meeting) {
    const auto first = static_cast<unsigned>(std::countr_zero(meeting.lanes));
    switch (static_cast<Kind>(meeting.op[first]->detail)) {
    case Kind::barrier:
        break;
    case Kind::shuffle:
        shuffle(meeting);
        break;
    case Kind::vote:
        vote(meeting);
        break;
    case Kind::match:
        match(meeting);
        break;
    case Kind::reduce:
        reduce(meeting);
        break;
    case Kind::elect:
        elect(meeting);
        break;
    }
}

void meet(Warp &warp, const Op &op, Mask mask) {
    const auto *members = row<Mask>(warp, op.e);
    Mask waiting = 0;
    for (Mask rest = mask; rest != 0;) {
        const auto first = static_cast<unsigned>(std::countr_zero(rest));
        const Mask named = members[first];
        Mask same = 0;
        each_lane(rest, [&](unsigned lane) { same |= static_cast<Mask>(members[lane] == named) << lane; });
        rest &= ~same;
        if ((named & warp.live & ~same) == 0) {
            Meeting meeting;
            meeting.lanes = same;
            each_lane(same, [&](unsigned lane) {
                meeting.op[lane] = &op;
                meeting.rows[lane] = warp.rows;
            });
            complete(meeting);
        } else {
            each_lane(same, [&](unsigned lane) { warp.sync_mask[lane] = named; });
            waiting |= same;
        }
    }
    if (waiting == 0)
        return;
    warp.regroup(warp.mask & ~waiting);
    each_lane(waiting, [&](unsigned lane) { warp.position[lane] = warp.next; });
    warp.at_sync |= waiting;
    warp.ready &= ~waiting;
    warp.release_sync();
}

} // namespace

void Warp::release_sync() {
    for (Mask rest = at_sync; rest != 0;) {
        const auto first = static_cast<unsigned>(std::countr_zero(rest));
        const Op &op = position[first][-1];
        Meeting meeting;
        meeting.lanes = 0;
        each_lane(rest, [&](unsigned lane) {
            const Op &its = position[lane][-1];
            if (sync_mask[lane] != sync_mask[first] || its.detail != op.detail || its.extra != op.extra)
                return;
            meeting.lanes |= Mask{1} << lane;
            meeting.op[lane] = &its;
            meeting.rows[lane] = lane_frame[lane]->rows.get();
        });
        rest &= ~meeting.lanes;
        if ((sync_mask[first] & live & ~meeting.lanes) != 0)
            continue;
        complete(meeting);
        at_sync &= ~meeting.lanes;
        ready |= meeting.lanes;
    }
}

namespace {

void run_active_mask(Warp &warp, const Op &op, Mask mask) {
    auto *d = row<Mask>(warp, op.d);
    each_lane(mask, [&](unsigned lane) { d[lane] = mask; });
}

struct Result {
    std::uint32_t value = no_row;
    std::uint32_t predicate = no_row;
};

Result result_of(Decoder &decoder, const Operand &operand) {
    Result result;
    if (operand.kind == Operand::Kind::pair) {
        result.value = decoder.destination(operand.elements[0], Type::b32);
        result.predicate = decoder.predicate_destination(operand.elements[1]);
    } else {
        result.value = decoder.destination(operand, Type::b32);
    }
    return result;
}

void emit(Decoder &decoder, Kind kind, const Result &result, const Operand &members, std::uint8_t mode,
          std::uint32_t a = 0, std::uint32_t b = 0, std::uint32_t c = 0, std::int64_t immediate = 0) {
    const std::uint32_t e = decoder.source(members, Type::b32);
    Op &op = decoder.emit(&meet, result.value, a, b, c, e);
    op.target = result.predicate;
    op.detail = static_cast<std::uint16_t>(kind);
    op.extra = mode;
    op.immediate = immediate;
}

void decode_reduce(Decoder &decoder, const Instruction &i) {
    check_form(i, {"sync", "add", "min", "max", "and", "or", "xor"}, 3);
    const Type type = types_of(i).first;
    require(type == Type::u32 || type == Type::s32 || type == Type::b32, "this type");
    Reduce how = Reduce::add;
    if (i.has("min"))
        how = type == Type::s32 ? Reduce::minimum_signed : Reduce::minimum;
    if (i.has("max"))
        how = type == Type::s32 ? Reduce::maximum_signed : Reduce::maximum;
    if (i.has("and"))
        how = Reduce::both;
    if (i.has("or"))
        how = Reduce::either;
    if (i.has("xor"))
        how = Reduce::exclusive;
    const std::uint32_t a = decoder.source(i.operands[1], Type::b32);
    emit(decoder, Kind::reduce, result_of(decoder, i.operands[0]), i.operands[2], static_cast<std::uint8_t>(how), a);
}

} // namespace

bool decode_warp(Decoder &decoder, const Instruction &i) {
    const std::string_view name = i.opcode;
    const auto &o = i.operands;
    if (name == "shfl") {
        check_form(i, {"sync", "up", "down", "bfly", "idx"}, 5);
        require(i.has("sync"), "a shuffle without .sync");
        const Shuffle mode = i.has("up")     ? Shuffle::up
                             : i.has("down") ? Shuffle::down
                             : i.has("bfly") ? Shuffle::butterfly
                                             : Shuffle::index;
        const std::uint32_t a = decoder.source(o[1], Type::b32);
        const std::uint32_t b = decoder.source(o[2], Type::b32);
        const std::uint32_t c = decoder.source(o[3], Type::b32);
        emit(decoder, Kind::shuffle, result_of(decoder, o[0]), o[4], static_cast<std::uint8_t>(mode), a, b, c);
    } else if (name == "vote") {
        check_form(i, {"sync", "all", "any", "uni", "ballot"}, 3);
        require(i.has("sync"), "a vote without .sync");
        const Vote mode = i.has("all")   ? Vote::all
                          : i.has("any") ? Vote::any
                          : i.has("uni") ? Vote::uniform
                                         : Vote::ballot;
        const std::uint32_t a = decoder.predicate(o[1]);
        Result result;
        if (mode == Vote::ballot)
            result = result_of(decoder, o[0]);
        else
            result.predicate = decoder.predicate_destination(o[0]);
        emit(decoder, Kind::vote, result, o[2], static_cast<std::uint8_t>(mode), a);
    } else if (name == "match") {
        check_form(i, {"sync", "any", "all"}, 3);
        const Type type = types_of(i).first;
        const std::uint32_t a = decoder.source(o[1], type);
        emit(decoder, Kind::match, result_of(decoder, o[0]), o[2],
             static_cast<std::uint8_t>(i.has("any") ? Match::any : Match::all), a, 0, 0,
             static_cast<std::int64_t>(size_of(type)));
    } else if (name == "redux") {
        decode_reduce(decoder, i);
    } else if (name == "elect") {
        check_form(i, {"sync"}, 2);
        emit(decoder, Kind::elect, result_of(decoder, o[0]), o[1], 0);
    } else if (name == "activemask") {
        check_form(i, {}, 1);
        decoder.emit(&run_active_mask, decoder.destination(o[0], Type::b32));
    } else if (name == "bar" && i.has("warp")) {
        check_form(i, {"warp", "sync"}, 1);
        emit(decoder, Kind::barrier, {}, o[0], 0);
    } else {
        return false;
    }
    return true;
}

} // namespace simgpu::ptx
