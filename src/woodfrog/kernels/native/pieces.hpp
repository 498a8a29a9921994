// Byte ranges: from a linear form to what it covers, and the joining of ranges. The same as footprint.py.
#pragma once

#include "space.hpp"

namespace access_templates {

struct Piece {
    Number start, size;
    std::uint32_t exactness; // 0 exact, 1 bounded, 2 whole, 3 everything
    bool operator<(const Piece &other) const {
        if (start != other.start)
            return start < other.start;
        return size != other.size ? size < other.size : exactness < other.exactness;
    }
};
using Pieces = Row<Piece>;

struct Covered {
    Number start, size;
};

constexpr Number kBoundedRanges = 128;

inline void merge(Pieces &pieces) {
    if (!std::is_sorted(pieces.begin(), pieces.end()))
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

/// Appends what accesses of `length` bytes cover, in at most `ranges` pieces; false when gaps had to be filled.
/// `exact`: whether all values of the address are known to occur.
inline bool cover(Arena &arena, const Form &address, const Space &space, Number length, bool exact,
                  Number ranges, Row<Covered> &out) {
    struct Stride {
        Number stride, last;
    };
    Stride steps[Terms::kCapacity];
    std::size_t count = 0, outer = 0;
    Number start = address.constant;
    for (const Term &term : address.terms) {
        const Space::Variable &v = space.at(term.variable);
        start += term.coefficient * (term.coefficient > 0 ? v.low : v.high);
        Stride one{magnitude(term.coefficient), v.high - v.low};
        std::size_t i = count++;
        for (; i > 0 && (one.stride < steps[i - 1].stride ||
                         (one.stride == steps[i - 1].stride && one.last < steps[i - 1].last));
             --i)
            steps[i] = steps[i - 1];
        steps[i] = one;
    }
    Number run = length, total = 1, most = exact ? ranges : kBoundedRanges;
    while (outer < count && steps[outer].stride <= run) {
        run += steps[outer].stride * steps[outer].last;
        ++outer;
    }
    for (std::size_t i = outer; i < count; ++i)
        total = bound_product(total, steps[i].last + 1);
    while (total > most) {
        run += steps[outer].stride * steps[outer].last;
        ++outer;
        total = 1;
        for (std::size_t i = outer; i < count; ++i)
            total = bound_product(total, steps[i].last + 1);
        exact = false;
    }
    if (outer == count) {
        out.push_back(arena, {start, run});
        return exact;
    }
    Number *starts = arena.take<Number>(static_cast<std::size_t>(total));
    std::size_t made = 0;
    starts[made++] = start;
    for (std::size_t i = outer; i < count; ++i) {
        std::size_t before = made;
        for (Number k = 1; k <= steps[i].last; ++k)
            for (std::size_t j = 0; j < before; ++j)
                starts[made++] = starts[j] + steps[i].stride * k;
    }
    if (!std::is_sorted(starts, starts + made)) // they are, unless strides overlap
        std::sort(starts, starts + made);
    std::size_t begin = out.size();
    for (std::size_t i = 0; i < made; ++i) {
        if (out.size() > begin && starts[i] <= out.back().start + out.back().size)
            out.back().size = std::max(out.back().size, starts[i] + run - out.back().start);
        else
            out.push_back(arena, {starts[i], run});
    }
    return exact;
}

} // namespace access_templates
