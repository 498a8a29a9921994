// Evaluation with the contents of memory: contents.py, which explains when that is right.
#pragma once

#include "evaluate.hpp"

namespace access_templates {

/// Copies `size_bytes` bytes of the target's memory at `address` to `to`; false where it cannot be read.
using Read = bool (*)(void *context, std::uint64_t address, void *to, std::uint64_t size_bytes);

struct Reader {
    Read read;
    void *context;
};

constexpr Number kLoadedBytes = 1 << 20;
constexpr std::size_t kLoadedValues = 1024;

class ContentsRun {
  public:
    ContentsRun(const Template &table, const Launch &launch, const Reader &reader, bool *unsafe, Arena &results)
        : table_(table), launch_(launch), reader_(reader), unsafe_(unsafe), results_(results),
          plain_(table, launch, plain_arena_) {}

    void ranges(const Access &access, Pieces &out) {
        std::size_t begin = out.size();
        cases(access, 0, nullptr, plain_, kLoadedValues, out);
        merge(out, begin);
    }
    /// Notes the loads whose places are written to in `unsafe`; true when there are any.
    bool find_unsafe(const Pieces &written) {
        bool any = false;
        for (const Place &place : places_) {
            const Piece *at = std::upper_bound(written.begin(), written.end(), place.piece.start,
                                               [](std::uint64_t start, const Piece &one) { return start < one.start; });
            bool hit = at != written.end() && at->start <= place.piece.last;
            hit = hit || (at != written.begin() && (at - 1)->last >= place.piece.start);
            if (hit)
                unsafe_[place.atom] = any = true;
        }
        return any;
    }

  private:
    struct Place {
        int atom;
        Piece piece;
    };
    struct Run {
        Number low, high;
    };

    /// The ranges for all values of the loads from number `index` on; `known` has those before.
    void cases(const Access &access, int index, const Loaded *known, Evaluation &evaluation, std::size_t budget,
               Pieces &out) {
        while (index < access.load_count && unsafe_[load_of(access, index)])
            ++index;
        if (index >= access.load_count) {
            evaluation.ranges(access, results_, out);
            return;
        }
        Row<Run> runs;
        if (!values(access, index, evaluation, budget, runs)) {
            cases(access, index + 1, known, evaluation, budget, out);
            return;
        }
        for (const Run &run : runs) {
            Arena arena;
            Loaded one{load_of(access, index), run.low, run.high, known};
            Evaluation with(table_, launch_, arena, &one);
            cases(access, index + 1, &one, with, std::max<std::size_t>(budget / runs.size(), 1), out);
        }
    }
    int load_of(const Access &access, int index) const { return table_.lists[access.first_load + 2 * index]; }

    /// All values that a load gives, as runs from least to greatest; false when that is not known.
    bool values(const Access &access, int index, Evaluation &evaluation, std::size_t budget, Row<Run> &out) {
        int number = load_of(access, index);
        const Atom &atom = table_.atoms[number];
        Access load{0, atom.a, table_.lists[access.first_load + 2 * index + 1], access.node, false, 0, 0, 0, 0, 0};
        Pieces places;
        evaluation.forget(); // `load` lives no longer than this call
        evaluation.ranges(load, results_, places);
        evaluation.forget();
        Number total = 0;
        for (const Piece &place : places) {
            if (place.exactness == 3)
                return false;
            total += place.size();
        }
        if (total > kLoadedBytes)
            return false;
        Arena scratch;
        Row<Number> found;
        for (const Piece &place : places) {
            Number first = -floor_quotient(-Number{place.start}, atom.b) * atom.b;
            Number count = floor_quotient(Number{place.last} + 1 - first, atom.b);
            if (count < 1)
                continue;
            auto bytes = static_cast<std::size_t>(count * atom.b);
            auto *data = scratch.take<unsigned char>(bytes);
            if (!reader_.read(reader_.context, static_cast<std::uint64_t>(first), data, bytes))
                return false;
            for (std::size_t at = 0; at < bytes; at += static_cast<std::size_t>(atom.b))
                found.push_back(scratch, integer(data + at, atom));
        }
        for (const Piece &place : places)
            places_.push_back(results_, {number, place});
        std::sort(found.begin(), found.end());
        found.resize(static_cast<std::size_t>(std::unique(found.begin(), found.end()) - found.begin()));
        join(found, budget, out);
        return true;
    }
    static Number integer(const unsigned char *data, const Atom &atom) {
        std::uint64_t bits = 0;
        std::memcpy(&bits, data, static_cast<std::size_t>(atom.b));
        int unused = 64 - 8 * atom.b;
        return atom.c != 0 ? Number{static_cast<std::int64_t>(bits << unused) >> unused} : Number{bits};
    }
    /// Each value by itself; neighbours as runs where there are too many; all as one where there still are.
    void join(const Row<Number> &values, std::size_t budget, Row<Run> &out) {
        bool joins = values.size() > budget;
        for (Number value : values) {
            if (joins && !out.empty() && value == out.back().high + 1)
                out.back().high = value;
            else
                out.push_back(results_, {value, value});
        }
        if (out.size() > budget) {
            Run all{values[0], values[values.size() - 1]};
            out.clear();
            out.push_back(results_, all);
        }
    }

    const Template &table_;
    const Launch &launch_;
    Reader reader_;
    bool *unsafe_;
    Arena &results_;
    Arena plain_arena_;
    Evaluation plain_;
    Row<Place> places_;
};

/// evaluate() with the contents of memory as they are when the kernel begins to run.
inline std::int64_t evaluate_contents(const Template &table, const Launch &launch, unsigned kinds, Range *out,
                                      std::int64_t capacity, const Reader &reader) {
    constexpr unsigned kWrites = 6;
    if (!fits(table, launch))
        return -1;
    Arena unsafe_arena;
    bool *unsafe = unsafe_arena.take<bool>(static_cast<std::size_t>(table.atom_count));
    std::fill_n(unsafe, table.atom_count, false);
    while (true) {
        Arena results;
        ContentsRun run(table, launch, reader, unsafe, results);
        Pieces pieces, written;
        for (int i = 0; i < table.access_count; ++i) {
            unsigned kind = 1U << table.accesses[i].kind;
            if (((kinds | kWrites) & kind) == 0)
                continue;
            Pieces found;
            run.ranges(table.accesses[i], found);
            if ((kinds & kind) != 0)
                pieces.append(results, found.begin(), found.size());
            if ((kWrites & kind) != 0)
                written.append(results, found.begin(), found.size());
        }
        merge(written);
        if (run.find_unsafe(written))
            continue;
        merge(pieces);
        return written_out(pieces, out, capacity);
    }
}

} // namespace access_templates
