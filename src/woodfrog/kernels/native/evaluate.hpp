// From a launch to ranges: evaluate.py and footprint.py, which explain the steps.
#pragma once

#include <cstddef>

#include "constraints.hpp"

namespace access_templates {

struct Range {
    std::uint64_t address, size_bytes; // size 0: 2**64 bytes
    std::uint32_t exactness;           // 0 exact, 1 bounded, 2 whole, 3 everything
    std::uint32_t reserved;
};

struct Piece {
    Number start, size;
    std::uint32_t exactness;
    bool operator<(const Piece &other) const {
        if (start != other.start)
            return start < other.start;
        return size != other.size ? size < other.size : exactness < other.exactness;
    }
};
using Pieces = std::vector<Piece>;

constexpr int kCases = 64;
constexpr Number kRanges = 4096;
constexpr Number kAddresses = Number{1} << 64;
constexpr Number kSmallestPointer = 1 << 16;

inline void merge(Pieces &pieces) {
    std::sort(pieces.begin(), pieces.end());
    std::size_t count = 0;
    for (const Piece &one : pieces) {
        if (count > 0) {
            Piece &last = pieces[count - 1];
            Number end = last.start + last.size;
            if (one.start < end || (one.start == end && one.exactness == last.exactness)) {
                last.size = std::max(end, one.start + one.size) - last.start;
                last.exactness = std::max(last.exactness, one.exactness);
                continue;
            }
        }
        pieces[count++] = one;
    }
    pieces.resize(count);
}

/// Appends what accesses of `length` bytes cover; false when gaps had to be filled.
inline bool cover(const Form &address, const Space &space, Number length, std::vector<std::pair<Number, Number>> &out) {
    Number start = address.constant;
    std::vector<std::pair<Number, Number>> steps; // stride, count - 1
    for (const Term &term : address.terms) {
        auto v = static_cast<std::size_t>(term.variable);
        start += term.coefficient * (term.coefficient > 0 ? space.low[v] : space.high[v]);
        steps.emplace_back(magnitude(term.coefficient), space.high[v] - space.low[v]);
    }
    std::sort(steps.begin(), steps.end());
    bool exact = true;
    Number run = length, total = 1;
    std::size_t outer = 0;
    while (outer < steps.size() && steps[outer].first <= run) {
        run += steps[outer].first * steps[outer].second;
        ++outer;
    }
    for (std::size_t i = outer; i < steps.size(); ++i)
        total = bound_product(total, steps[i].second + 1);
    while (total > kRanges) {
        run += steps[outer].first * steps[outer].second;
        ++outer;
        total = 1;
        for (std::size_t i = outer; i < steps.size(); ++i)
            total = bound_product(total, steps[i].second + 1);
        exact = false;
    }
    std::vector<Number> starts{start};
    for (std::size_t i = outer; i < steps.size(); ++i) {
        std::size_t before = starts.size();
        for (Number k = 1; k <= steps[i].second; ++k)
            for (std::size_t j = 0; j < before; ++j)
                starts.push_back(starts[j] + steps[i].first * k);
    }
    std::sort(starts.begin(), starts.end());
    std::size_t begin = out.size();
    for (Number s : starts) {
        if (out.size() > begin && s <= out.back().first + out.back().second)
            out.back().second = std::max(out.back().second, s + run - out.back().first);
        else
            out.emplace_back(s, run);
    }
    return exact;
}

class Evaluation {
  public:
    Evaluation(const Template &table, const Launch &launch)
        : table_(table), launch_(launch), root_(table, launch), known_(static_cast<std::size_t>(table.node_count)),
          spaces_(static_cast<std::size_t>(table.node_count)) {}

    void ranges(const Access &access, Pieces &out) {
        const Numbers *numbers = after(access.node);
        if (numbers == nullptr)
            return;
        Pieces found;
        try {
            if (access.address < 0)
                everything(found);
            else
                all_cases(access, *numbers, found);
        } catch (const TooLarge &) {
            found.clear();
            everything(found);
        }
        merge(found);
        out.insert(out.end(), found.begin(), found.end());
    }

  private:
    void all_cases(const Access &access, const Numbers &numbers, Pieces &out) {
        std::vector<Numbers> pending;
        pending.push_back(numbers.fresh_copy());
        int cases = 0;
        while (!pending.empty()) {
            Numbers current = std::move(pending.back());
            pending.pop_back();
            auto chosen = current.chosen;
            auto conditions = current.conditions;
            ++cases;
            try {
                one_case(access, current, true, out);
            } catch (const Choice &choice) {
                if (cases + static_cast<int>(pending.size()) + choice.count > kCases) {
                    out.clear();
                    joined(access, numbers.fresh_copy(), out);
                    return;
                }
                for (int i = 0; i < choice.count; ++i) {
                    Numbers branch = numbers.fresh_copy();
                    branch.chosen = chosen;
                    branch.conditions = conditions;
                    branch.choose(choice, i);
                    pending.push_back(std::move(branch));
                }
            } catch (const Infeasible &) {
                continue;
            }
        }
    }
    void joined(const Access &access, Numbers numbers, Pieces &out) {
        try {
            one_case(access, numbers, false, out);
        } catch (const Choice &) {
            everything(out);
        } catch (const Infeasible &) {
            return;
        }
    }
    void one_case(const Access &access, Numbers &numbers, bool splits, Pieces &out) {
        numbers.require_chosen();
        numbers.splits = splits;
        std::vector<Number> bases;
        Form form = numbers.address(access.address, bases);
        numbers.splits = false;
        Space &space = numbers.space;
        form = space.reduced(form);
        Bounds length = space.bounds(space.reduced(numbers.form(access.size)));
        if (length.high <= 0)
            return;
        bool exact = access.complete && !space.loose && !space.has_hull(form) && !numbers.inexact &&
                     !space.is_entangled(form) && length.low == length.high;
        Bounds at = space.bounds(form);
        Number shift = at.low - remainder(at.low, kAddresses);
        if (at.high - at.low >= kAddresses || at.high + length.high - at.low > kAddresses ||
            at.high - shift + length.high > kAddresses) {
            whole(bases, out);
            return;
        }
        std::vector<std::pair<Number, Number>> covered;
        bool kept = cover(form.shifted(-shift), space, length.high, covered);
        std::uint32_t exactness = exact && kept ? 0 : 1;
        if (exactness == 0) {
            for (const auto &[start, size] : covered)
                out.push_back({start, size, 0});
            return;
        }
        std::vector<const Allocation *> allocations = of(bases);
        for (const auto &[start, size] : covered) {
            Number end = start + size;
            const Allocation *inside = nullptr;
            for (const Allocation *one : allocations)
                if (inside == nullptr && Number{one->address} < end && start < Number{one->address} + one->size_bytes)
                    inside = one;
            if (inside == nullptr || allocations.size() > 1) {
                out.push_back({start, size, exactness});
                continue;
            }
            Number a = inside->address, b = a + inside->size_bytes;
            if (a <= start && end <= b) {
                out.push_back({start, size, exactness});
                continue;
            }
            Number from = std::max(a, start), to = std::min(end, b);
            out.push_back({from, to - from, from == a && to == b ? 2u : exactness});
        }
    }
    void everything(Pieces &out) const {
        for (std::int64_t i = 0; i < launch_.allocation_count; ++i)
            out.push_back({launch_.allocations[i].address, launch_.allocations[i].size_bytes, 3});
        if (launch_.allocation_count == 0)
            out.push_back({0, kAddresses, 3});
    }
    void whole(const std::vector<Number> &bases, Pieces &out) const {
        std::vector<const Allocation *> found = of(bases);
        if (found.empty())
            everything(out);
        for (const Allocation *one : found)
            out.push_back({one->address, one->size_bytes, 2});
    }
    std::vector<const Allocation *> of(const std::vector<Number> &bases) const {
        std::vector<const Allocation *> found;
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
                if (Number{one->address} <= base && base <= Number{one->address} + one->size_bytes &&
                    std::find(found.begin(), found.end(), one) == found.end())
                    found.push_back(one);
            }
        }
        return found;
    }
    /// The numbers of points where all steps up to a node hold; nullptr when there are none.
    const Numbers *after(int node) {
        if (node < 0)
            return &root_;
        auto at = static_cast<std::size_t>(node);
        if (!known_[at]) {
            known_[at] = true;
            const Node &one = table_.nodes[node];
            const Numbers *before = after(one.parent);
            if (before != nullptr) {
                spaces_[at].emplace(before->fresh_copy());
                try {
                    spaces_[at]->step(one.step);
                } catch (const Infeasible &) {
                    spaces_[at].reset();
                } catch (const TooLarge &) {
                    spaces_[at].emplace(before->fresh_copy());
                    spaces_[at]->space.loose = true;
                }
            }
        }
        return spaces_[at] ? &*spaces_[at] : nullptr;
    }

    const Template &table_;
    const Launch &launch_;
    Numbers root_;
    std::vector<char> known_;
    std::vector<std::optional<Numbers>> spaces_;
};

/// The ranges of all accesses whose kind is in the mask `kinds` (bit 0 loads, 1 stores, 2 atomics). Returns their
/// number, of which at most `capacity` are written; -1 when the launch does not fit the kernel.
inline std::int64_t evaluate(const Template &table, const Launch &launch, unsigned kinds, Range *out,
                             std::int64_t capacity) {
    if (launch.parameters_bytes < table.parameters_bytes)
        return -1;
    for (std::uint32_t extent :
         {launch.grid[0], launch.grid[1], launch.grid[2], launch.block[0], launch.block[1], launch.block[2]})
        if (extent == 0)
            return -1;
    Evaluation evaluation(table, launch);
    Pieces pieces;
    for (int i = 0; i < table.access_count; ++i)
        if ((kinds >> table.accesses[i].kind & 1) != 0)
            evaluation.ranges(table.accesses[i], pieces);
    merge(pieces);
    for (std::size_t i = 0; i < pieces.size() && static_cast<std::int64_t>(i) < capacity; ++i)
        out[i] = {static_cast<std::uint64_t>(pieces[i].start), static_cast<std::uint64_t>(pieces[i].size),
                  pieces[i].exactness, 0};
    return static_cast<std::int64_t>(pieces.size());
}

} // namespace access_templates
