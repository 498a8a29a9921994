// Byte ranges: from a linear form to what it covers, and the joining of ranges. The same as footprint.py.
#pragma once

#include "space.hpp"

namespace access_templates {

/// Bytes start to last.
struct Piece {
    std::uint64_t start, last;
    std::uint32_t exactness; // 0 exact, 1 bounded, 2 whole, 3 everything

    Number size() const { return Number{last} - start + 1; }
    bool operator<(const Piece &other) const {
        if (start != other.start)
            return start < other.start;
        return last != other.last ? last < other.last : exactness < other.exactness;
    }
};
using Pieces = Row<Piece>;

/// Of what an access covers, from its lowest byte on; size is above 0.
struct Covered {
    std::uint64_t start, size;
};

constexpr Number kBoundedRanges = 128;

/// Sorts and joins the pieces from number `begin` on.
inline void merge(Pieces &pieces, std::size_t begin = 0) {
    if (pieces.size() - begin < 2)
        return;
    if (!std::is_sorted(pieces.begin() + begin, pieces.end()))
        std::sort(pieces.begin() + begin, pieces.end());
    std::size_t count = begin + 1;
    for (std::size_t i = begin + 1; i < pieces.size(); ++i) {
        const Piece &one = pieces[i];
        Piece &before = pieces[count - 1];
        if (one.start <= before.last || (one.start - 1 == before.last && one.exactness == before.exactness)) {
            before.last = std::max(before.last, one.last);
            before.exactness = std::max(before.exactness, one.exactness);
        } else {
            pieces[count++] = one;
        }
    }
    pieces.resize(count);
}

/// Appends what accesses of `length` bytes cover, in at most `ranges` pieces; false when gaps had to be filled.
/// `exact`: whether all values of the address are known to occur. All together is less than 2**64 bytes.
inline bool cover(Arena &arena, const Form &address, const Space &space, Number length, bool exact,
                  Number ranges, Row<Covered> &out) {
    struct Stride {
        std::uint64_t stride, last;
    };
    Stride steps[Terms::kCapacity];
    std::size_t count = 0, outer = 0;
    for (const Term &term : address.terms) {
        const Space::Variable &v = space.at(term.variable);
        Stride one{static_cast<std::uint64_t>(magnitude(term.coefficient)), static_cast<std::uint64_t>(v.high - v.low)};
        std::size_t i = count++;
        for (; i > 0 && (one.stride < steps[i - 1].stride ||
                         (one.stride == steps[i - 1].stride && one.last < steps[i - 1].last));
             --i)
            steps[i] = steps[i - 1];
        steps[i] = one;
    }
    auto run = static_cast<std::uint64_t>(length);
    while (outer < count && steps[outer].stride <= run) {
        run += steps[outer].stride * steps[outer].last;
        ++outer;
    }
    Number most = exact ? ranges : kBoundedRanges, total = 0;
    while (true) {
        total = 1;
        for (std::size_t i = outer; i < count; ++i)
            total = bound_product(total, Number{steps[i].last} + 1);
        if (total <= most)
            break;
        run += steps[outer].stride * steps[outer].last;
        ++outer;
        exact = false;
    }
    if (outer == count) {
        out.push_back(arena, {0, run});
        return exact;
    }
    auto *starts = arena.take<std::uint64_t>(static_cast<std::size_t>(total));
    std::size_t made = 0;
    starts[made++] = 0;
    for (std::size_t i = outer; i < count; ++i) {
        std::size_t before = made;
        for (std::uint64_t k = 1; k <= steps[i].last; ++k)
            for (std::size_t j = 0; j < before; ++j)
                starts[made++] = starts[j] + steps[i].stride * k;
    }
    if (!std::is_sorted(starts, starts + made)) // they are, unless strides overlap
        std::sort(starts, starts + made);
    std::size_t begin = out.size();
    out.reserve(arena, begin + made);
    for (std::size_t i = 0; i < made; ++i) {
        if (out.size() > begin && starts[i] <= out.back().start + out.back().size)
            out.back().size = std::max(out.back().size, starts[i] + run - out.back().start);
        else
            out.push_back(arena, {starts[i], run});
    }
    return exact;
}

} // namespace access_templates
