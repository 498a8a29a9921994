// From a launch to ranges: evaluate.py, which explains the steps.
#pragma once

#include "constraints.hpp"
#include "pieces.hpp"

namespace access_templates {

struct Range {
    std::uint64_t address, size_bytes; // size 0: 2**64 bytes
    std::uint32_t exactness;           // 0 exact, 1 bounded, 2 whole, 3 everything
    std::uint32_t reserved;
};

constexpr std::int64_t kNoMemory = -2; // of an evaluation that could not be made; whoever asked takes everything
constexpr int kCases = 64;
constexpr Number kNearly = 20;
constexpr Number kAddresses = Number{1} << 64;
constexpr Number kSmallestPointer = 1 << 16;

/// What an access touches in one combination of alternatives, before its offset is added.
struct Located {
    Bounds at;
    Number length;
    bool exact;
    Row<Covered> covered;
    Row<Number> bases;
};

class Evaluation {
  public:
    Evaluation(const Template &table, const Launch &launch, Arena &arena, const Loaded *loaded = nullptr)
        : table_(table), launch_(launch), arena_(arena), loaded_(loaded), root_(table, launch, arena, loaded),
          nodes_(arena.take<Numbers *>(static_cast<std::size_t>(table.node_count))),
          known_(arena.take<bool>(static_cast<std::size_t>(table.node_count))) {
        std::fill_n(known_, table.node_count, false);
    }

    /// Appends the ranges of one access, in memory of `results`, which is another arena than that of the evaluation.
    /// Accesses that differ in kind and offset alone are best asked for in a row.
    void ranges(const Access &access, Arena &results, Pieces &out) { ranges(access, table_.ranges_each, results, out); }

    /// What was kept of the last access, for whom it does not outlive.
    void forget() { last_ = nullptr; }

  private:
    /// `most`: into how many ranges the access may be split. Appends a merged list, as all these functions do.
    void ranges(const Access &access, Number most, Arena &results, Pieces &out) {
        std::size_t begin = out.size();
        single(access, most, results, out);
        if (access.part_count == 0 || is_exact(out.begin() + begin, out.end()))
            return;
        const Access *parts = table_.accesses + access.first_part;
        Number each = std::max(floor_quotient(most, access.part_count), kBoundedRanges);
        Pieces found;
        ranges(parts[0], each, results, found);
        ranges(parts[access.part_count - 1], each, results, found);
        merge(found);
        if (!is_exact(found.begin(), found.end()) &&
            bytes(out.begin() + begin, out.end()) * (kNearly - 1) <= bytes(found.begin(), found.end()) * kNearly)
            return;
        for (int i = 1; i < access.part_count - 1; ++i)
            ranges(parts[i], each, results, found);
        merge(found);
        out.resize(begin);
        out.append(results, found.begin(), found.size());
    }
    static bool is_exact(const Piece *begin, const Piece *end) {
        return std::all_of(begin, end, [](const Piece &one) { return one.exactness == 0; });
    }
    static Number bytes(const Piece *begin, const Piece *end) {
        return std::accumulate(begin, end, Number{0}, [](Number sum, const Piece &one) { return sum + one.size(); });
    }
    void single(const Access &access, Number most, Arena &results, Pieces &out) {
        bool same = last_ != nullptr && last_->address == access.address && last_->size == access.size &&
                    last_->node == access.node && last_->complete == access.complete && most_ == most;
        if (!same) {
            last_ = &access;
            most_ = most;
            locate(access);
        }
        std::size_t begin = out.size();
        if (is_everywhere_)
            everything(results, out);
        for (const Located &one : cases_)
            place(one, access.offset, results, out);
        merge(out, begin);
    }
    /// Fills `cases_` and `is_everywhere_`.
    void locate(const Access &access) {
        cases_ = {};
        is_everywhere_ = false;
        if (is_marked_)
            arena_.release(mark_);
        Numbers *numbers = after(access.node);
        mark_ = arena_.mark(); // what comes now is of use until the next access
        is_marked_ = true;
        if (numbers == nullptr)
            return;
        try {
            if (access.address < 0)
                is_everywhere_ = true;
            else
                all_cases(access, *numbers);
        } catch (const TooLarge &) {
            cases_.clear();
            is_everywhere_ = true;
        }
    }
    void all_cases(const Access &access, Numbers &numbers) {
        Row<Numbers *> pending;
        pending.push_back(arena_, copy(numbers));
        int cases = 0;
        while (!pending.empty()) {
            Numbers &current = *pending.pop_back();
            Row<Chosen> chosen = current.chosen;
            Row<Step> conditions = current.conditions;
            ++cases;
            one_case(access, current, true);
            if (current.choice.atom < 0)
                continue;
            if (cases + static_cast<int>(pending.size()) + current.choice.count > kCases) {
                cases_.clear();
                joined(access, *copy(numbers));
                return;
            }
            for (int i = 0; i < current.choice.count; ++i) {
                Numbers *branch = copy(numbers);
                branch->chosen = chosen.copy(arena_);
                branch->conditions = conditions.copy(arena_);
                branch->choose(current.choice, i);
                pending.push_back(arena_, branch);
            }
        }
    }
    /// All alternatives joined into bounds: there are too many to look at each.
    void joined(const Access &access, Numbers &numbers) {
        one_case(access, numbers, false);
        if (numbers.choice.atom >= 0)
            is_everywhere_ = true;
    }
    void one_case(const Access &access, Numbers &numbers, bool splits) {
        numbers.require_chosen();
        if (numbers.stopped())
            return;
        numbers.splits = splits;
        Row<Number> bases;
        Form form = numbers.address(access.address, bases);
        numbers.splits = false;
        if (numbers.stopped())
            return;
        Space &space = numbers.space;
        form = space.reduced(form);
        Bounds length = space.bounds(space.reduced(numbers.form(access.size)));
        if (numbers.stopped() || length.high <= 0)
            return;
        bool exact = access.complete && loaded_ == nullptr && !space.loose && !space.has_hull(form) &&
                     !numbers.inexact && !space.is_entangled(form) && length.low == length.high;
        Located found{space.bounds(form), length.high, exact, {}, bases};
        if (found.at.high + length.high - found.at.low < kAddresses)
            found.exact = cover(arena_, form, space, length.high, exact, most_, found.covered);
        cases_.push_back(arena_, found);
    }
    void place(const Located &one, Number offset, Arena &results, Pieces &out) const {
        Number low = one.at.low + offset, high = one.at.high + offset, start = remainder(low, kAddresses);
        if (high - low >= kAddresses || high + one.length - low >= kAddresses ||
            start + (high - low) + one.length > kAddresses) {
            whole(one.bases, results, out);
            return;
        }
        auto base = static_cast<std::uint64_t>(start);
        out.reserve(results, out.size() + one.covered.size());
        if (one.exact) {
            for (const Covered &piece : one.covered)
                out.push_back(results, {base + piece.start, base + piece.start + (piece.size - 1), 0});
            return;
        }
        Row<const Allocation *> allocations = of(one.bases);
        for (const Covered &piece : one.covered) {
            Piece found{base + piece.start, base + piece.start + (piece.size - 1), 1};
            const Allocation *inside = nullptr;
            for (const Allocation *allocation : allocations)
                if (inside == nullptr && allocation->address <= found.last &&
                    found.start < Number{allocation->address} + allocation->size_bytes)
                    inside = allocation;
            if (inside != nullptr && allocations.size() == 1)
                clip(found, *inside);
            out.push_back(results, found);
        }
    }
    /// Cuts what sticks out of an allocation, of which it has a byte.
    static void clip(Piece &piece, const Allocation &to) {
        std::uint64_t first = to.address, last = to.address + (to.size_bytes - 1);
        if (first <= piece.start && piece.last <= last)
            return;
        piece.start = std::max(piece.start, first);
        piece.last = std::min(piece.last, last);
        if (piece.start == first && piece.last == last)
            piece.exactness = 2;
    }
    static void add(const Allocation &one, std::uint32_t exactness, Arena &results, Pieces &out) {
        out.push_back(results, {one.address, one.address + (one.size_bytes - 1), exactness});
    }
    void everything(Arena &results, Pieces &out) const {
        std::size_t begin = out.size();
        for (std::int64_t i = 0; i < launch_.allocation_count; ++i)
            if (launch_.allocations[i].size_bytes != 0)
                add(launch_.allocations[i], 3, results, out);
        if (out.size() == begin)
            out.push_back(results, {0, ~std::uint64_t{0}, 3});
    }
    void whole(const Row<Number> &bases, Arena &results, Pieces &out) const {
        Row<const Allocation *> found = of(bases);
        if (found.empty())
            everything(results, out);
        for (const Allocation *one : found)
            add(*one, 2, results, out);
    }
    Row<const Allocation *> of(const Row<Number> &bases) const {
        Row<const Allocation *> found;
        for (Number base : bases) {
            if (base < kSmallestPointer)
                continue;
            const Allocation *end = launch_.allocations + launch_.allocation_count;
            const Allocation *next =
                std::upper_bound(launch_.allocations, end, base,
                                 [](Number value, const Allocation &one) { return value < Number{one.address}; });
            std::ptrdiff_t index = next - launch_.allocations - 1;
            for (std::ptrdiff_t i = std::max<std::ptrdiff_t>(index - 1, 0); i <= index; ++i) {
                const Allocation *one = launch_.allocations + i;
                if (one->size_bytes != 0 && Number{one->address} <= base && base <= Number{one->address} + one->size_bytes &&
                    std::find(found.begin(), found.end(), one) == found.end())
                    found.push_back(arena_, one);
            }
        }
        return found;
    }
    Numbers *copy(Numbers &numbers) const { return new (arena_.take<Numbers>(1)) Numbers(numbers.fresh_copy()); }

    /// The numbers of points where all steps up to a node hold; nullptr when there are none.
    Numbers *after(int node) {
        if (node < 0)
            return &root_;
        auto at = static_cast<std::size_t>(node);
        if (!known_[at]) {
            known_[at] = true;
            nodes_[at] = nullptr;
            const Node &one = table_.nodes[node];
            Numbers *before = after(one.parent);
            if (before != nullptr) {
                Numbers *numbers = copy(*before);
                try {
                    numbers->step(one.step);
                } catch (const TooLarge &) {
                    numbers = copy(*before);
                    numbers->space.loose = true;
                }
                nodes_[at] = numbers->space.infeasible ? nullptr : numbers;
            }
        }
        return nodes_[at];
    }

    const Template &table_;
    const Launch &launch_;
    Arena &arena_;
    const Loaded *loaded_;
    Numbers root_;
    Numbers **nodes_;
    bool *known_;
    const Access *last_ = nullptr;
    Number most_ = 0; // of the last access
    Row<Located> cases_;
    bool is_everywhere_ = false;
    Arena::Mark mark_{};
    bool is_marked_ = false;
};

inline bool fits(const Template &table, const Launch &launch) {
    for (std::uint32_t extent :
         {launch.grid[0], launch.grid[1], launch.grid[2], launch.block[0], launch.block[1], launch.block[2]})
        if (extent == 0)
            return false;
    for (std::size_t i = 0; i < 3; ++i)
        if (table.block[i] != 0 && table.block[i] != launch.block[i])
            return false;
    return launch.parameters_bytes >= table.parameters_bytes;
}

inline std::int64_t written_out(const Pieces &pieces, Range *out, std::int64_t capacity) {
    for (std::size_t i = 0; i < pieces.size() && static_cast<std::int64_t>(i) < capacity; ++i)
        out[i] = {pieces[i].start, pieces[i].last - pieces[i].start + 1, pieces[i].exactness, 0};
    return static_cast<std::int64_t>(pieces.size());
}

/// The ranges of all accesses whose kind is in the mask `kinds` (bit 0 loads, 1 stores, 2 atomics). Returns their
/// number, of which at most `capacity` are written; -1 when the launch does not fit the kernel.
inline std::int64_t evaluate(const Template &table, const Launch &launch, unsigned kinds, Range *out,
                             std::int64_t capacity) {
    if (!fits(table, launch))
        return -1;
    Arena arena, results;
    Evaluation evaluation(table, launch, arena);
    Pieces pieces;
    for (int i = 0; i < table.access_count; ++i)
        if ((kinds >> table.accesses[i].kind & 1) != 0)
            evaluation.ranges(table.accesses[i], results, pieces);
    merge(pieces);
    return written_out(pieces, out, capacity);
}

} // namespace access_templates
