// Polynomials as linear forms: numbers.py, which explains the steps. What the functions of an atom are is in
// operations.hpp, the members for conditions are in constraints.hpp.
#pragma once

#include <array>
#include <cstring>

#include "space.hpp"
#include "tables.hpp"

namespace access_templates {

struct Allocation {
    std::uint64_t address, size_bytes;
};

struct Launch {
    std::array<std::uint32_t, 3> grid, block;
    const unsigned char *parameters;
    std::int64_t parameters_bytes;
    const Allocation *allocations; // sorted by address
    std::int64_t allocation_count;
    const std::uint64_t *symbols; // addresses, 0: not known
};

/// An address has alternatives: each must be evaluated by itself. atom -1: it has not.
struct Choice {
    int atom, count;
};

/// The values that a load is taken to give, in a list; see contents.hpp.
struct Loaded {
    int atom;
    Number low, high;
    const Loaded *next;
};

/// An alternative that was chosen.
struct Chosen {
    int atom, alternative;
};

constexpr int kAlternatives = 24;
constexpr int kLargestShift = 118; // bounds beyond are infinite anyway

/// The forms of atoms, in pages that copies share until one of them writes.
class Forms {
  public:
    Forms(Arena &arena, int atoms)
        : count_((static_cast<std::size_t>(atoms) + kPage - 1) / kPage), pages_(arena.take<Page *>(count_)),
          owned_(arena.take<bool>(count_)) {
        std::memset(pages_, 0, count_ * sizeof(Page *));
        std::memset(owned_, 0, count_);
    }
    Forms copy(Arena &arena) {
        Forms result = *this;
        result.pages_ = arena.take<Page *>(count_);
        std::memcpy(result.pages_, pages_, count_ * sizeof(Page *));
        result.owned_ = arena.take<bool>(count_);
        std::memset(result.owned_, 0, count_);
        std::memset(owned_, 0, count_); // shared from now on
        return result;
    }
    const Kept *find(int atom) const {
        auto at = static_cast<std::size_t>(atom);
        const Page *page = pages_[at / kPage];
        return page == nullptr ? nullptr : page->forms[at % kPage];
    }
    void keep(Arena &arena, int atom, const Form &form) {
        auto at = static_cast<std::size_t>(atom);
        Page *&page = pages_[at / kPage];
        if (!owned_[at / kPage]) {
            Page *mine = arena.take<Page>(1);
            if (page == nullptr)
                std::memset(mine, 0, sizeof(Page));
            else
                std::memcpy(mine, page, sizeof(Page));
            page = mine;
            owned_[at / kPage] = true;
        }
        page->forms[at % kPage] = Kept::of(arena, form);
    }

  private:
    static constexpr std::size_t kPage = 16;
    struct Page {
        const Kept *forms[kPage];
    };
    std::size_t count_;
    Page **pages_;
    bool *owned_;
};

/// What a launch makes of a template's polynomials. `space.infeasible` and `choice` say that it stopped: results mean
/// nothing from then on.
class Numbers {
  public:
    Numbers(const Template &table, const Launch &launch, Arena &arena, const Loaded *loaded)
        : space(arena), table_(&table), launch_(&launch), arena_(&arena), loaded_(loaded),
          counters_(arena.take<int>(static_cast<std::size_t>(table.loop_count))), forms_(arena, table.atom_count) {
        std::fill_n(counters_, table.loop_count, -1);
    }

    Space space;
    Row<Chosen> chosen;
    Row<Step> conditions; // of the alternatives that were chosen
    Choice choice{-1, 0};
    bool splits = false;
    bool inexact = false;

    Numbers fresh_copy() {
        Numbers result = *this;
        auto loops = static_cast<std::size_t>(table_->loop_count);
        result.space = space.copy();
        result.counters_ = arena_->take<int>(loops);
        std::copy_n(counters_, loops, result.counters_);
        result.forms_ = forms_.copy(*arena_);
        result.chosen = {};
        result.conditions = {};
        result.splits = false;
        return result;
    }
    bool stopped() const { return space.infeasible || choice.atom >= 0; }
    void choose(const Choice &what, int index) {
        chosen.push_back(*arena_, {what.atom, index});
        const Atom &atom = table_->atoms[what.atom];
        if (atom.kind == AtomKind::select)
            conditions.push_back(*arena_, {index == 0 ? -1 : -2, atom.a});
        if (const Gate *gate = gate_of(atom, index))
            conditions.append(*arena_, table_->steps + gate->first, static_cast<std::size_t>(gate->count));
    }
    void require_chosen() {
        for (const Step &one : conditions)
            if (!stopped())
                step(one);
    }
    void step(const Step &one) {
        if (one.loop >= 0)
            require_loop(one.loop);
        else
            require(one.condition, one.loop == -2);
    }

    Form address(int poly, Row<Number> &bases);
    Form form(int poly);
    Bounds bounds(int poly) { return space.bounds(space.reduced(form(poly))); }

  private:
    const Gate *gate_of(const Atom &atom, int index) const {
        if (atom.kind != AtomKind::either || atom.c < 0)
            return nullptr;
        int gate = table_->lists[atom.c + index];
        return gate < 0 ? nullptr : &table_->gates[gate];
    }
    Form hull(Number low, Number high) { return space.variable(saturated(low), saturated(high), true); }
    Form monomial(const Monomial &one);
    Form times(const Form &left, const Form &right);
    /// The value of a parameter that the block has.
    bool parameter(int index, std::uint64_t &value) const;
    Form atom(int index);
    Form make_kept(int index);
    Form make(int index);
    /// 0: a polynomial in `poly`; 1: a number in `value`; 2: bounds must do; 3: it stopped.
    int alternative(int index, int &poly, Number &value);
    Form alternatives(int index);
    bool gated_bounds(const Atom &atom, int index, int poly, Bounds &result);
    bool parameter_values(const Atom &atom, std::array<Number, kAlternatives> &values, int &count);
    Form read_as(const Form &unreduced, int width, bool is_signed);
    Form floor_division(const Atom &atom);
    bool magic(const Form &form, Number power, Form &result);
    const Atom *only_atom(int poly) const;
    /// (x // p) // d as x // (p * d).
    bool nested(int poly, Number divisor, Form &result);
    Form truncating_division(const Atom &atom);
    Form bitwise(const Atom &atom);
    Form extreme(const Atom &atom);
    Form power(const Atom &atom);

    int decided(int condition, bool negated = false); // 1 always, 0 never, -1 it depends
    void require(int condition, bool negated = false);
    void compare(const Condition &c, Relation relation);
    void require_loop(int loop);
    int counter(int loop);
    bool bound(int condition, int counter, Form *form);
    /// Whether a polynomial is factor * 2**(each * (k - 1)), where k is a loop's counter.
    bool is_doubling(int poly, int loop, Number &factor, Number &each) const;
    bool bound_doublings(int condition, int loop, int counter);

    const Template *table_;
    const Launch *launch_;
    Arena *arena_;
    const Loaded *loaded_;
    int *counters_;
    Forms forms_;
};

constexpr Relation swapped(Relation r) {
    constexpr Relation other[] = {Relation::gt, Relation::ge, Relation::lt, Relation::le, Relation::eq, Relation::ne};
    return other[static_cast<int>(r)];
}
constexpr Relation opposite(Relation r) {
    constexpr Relation other[] = {Relation::ge, Relation::gt, Relation::le, Relation::lt, Relation::ne, Relation::eq};
    return other[static_cast<int>(r)];
}

inline Form Numbers::address(int index, Row<Number> &bases) {
    Form result;
    const Poly &poly = table_->polys[index];
    for (int i = 0; i < poly.count; ++i) {
        const Monomial &one = table_->monomials[poly.first + i];
        if (one.coefficient == 1 && one.count == 1) {
            int number = table_->lists[one.first];
            AtomKind kind = table_->atoms[number].kind;
            if (kind == AtomKind::either || kind == AtomKind::select || kind == AtomKind::paramat) {
                int part = -1;
                Number value = 0;
                int what = alternative(number, part, value);
                if (what == 3)
                    return result;
                if (what == 0) {
                    result.add(address(part, bases));
                    continue;
                }
                if (what == 1) {
                    bases.push_back(*arena_, value);
                    result.constant = sum(result.constant, value);
                    continue;
                }
            }
            Form form = atom(number);
            if (form.terms.empty() && (kind == AtomKind::param || kind == AtomKind::symbol))
                bases.push_back(*arena_, form.constant);
            result.add(form);
        } else {
            result.add(monomial(one), one.coefficient);
        }
    }
    return result;
}

inline Form Numbers::form(int index) {
    Form result;
    const Poly &poly = table_->polys[index];
    for (int i = 0; i < poly.count; ++i) {
        const Monomial &one = table_->monomials[poly.first + i];
        if (one.count == 0)
            result.constant = sum(result.constant, one.coefficient);
        else if (one.count > 1)
            result.add(monomial(one), one.coefficient);
        else if (std::uint64_t value = 0; parameter(table_->lists[one.first], value))
            result.constant = sum(result.constant, product(one.coefficient, value));
        else if (const Kept *kept = forms_.find(table_->lists[one.first]))
            kept->add_to(result, one.coefficient);
        else
            result.add(make_kept(table_->lists[one.first]), one.coefficient);
    }
    return result;
}

inline Form Numbers::monomial(const Monomial &one) {
    if (one.count == 0)
        return constant_form(1);
    if (one.count == 1)
        return atom(table_->lists[one.first]);
    Form result = constant_form(1);
    for (int i = 0; i < one.count; ++i) {
        int number = table_->lists[one.first + i];
        if (std::uint64_t value = 0; parameter(number, value))
            result = result.scaled(value);
        else
            result = times(result, space.reduced(atom(number)));
    }
    return result;
}

inline Form Numbers::times(const Form &left, const Form &right) {
    if (left.terms.empty())
        return right.scaled(left.constant);
    if (right.terms.empty())
        return left.scaled(right.constant);
    Bounds a = space.bounds(space.reduced(left)), b = space.bounds(right);
    Number products[] = {bound_product(a.low, b.low), bound_product(a.low, b.high), bound_product(a.high, b.low),
                         bound_product(a.high, b.high)};
    return hull(*std::min_element(products, products + 4), *std::max_element(products, products + 4));
}

inline bool Numbers::parameter(int index, std::uint64_t &value) const {
    const Atom &one = table_->atoms[index];
    if (one.kind != AtomKind::param || one.b > 8 || one.a < 0 || one.a + one.b > launch_->parameters_bytes)
        return false;
    value = 0;
    std::memcpy(&value, launch_->parameters + one.a, static_cast<std::size_t>(one.b));
    return true;
}

inline Form Numbers::atom(int index) {
    if (std::uint64_t value = 0; parameter(index, value))
        return constant_form(value);
    if (const Kept *kept = forms_.find(index))
        return kept->form();
    return make_kept(index);
}

inline Form Numbers::make_kept(int index) {
    const Atom &one = table_->atoms[index];
    Form form = make(index);
    bool is_choice = splits && (one.kind == AtomKind::either || one.kind == AtomKind::select);
    if (!is_choice && !stopped())
        forms_.keep(*arena_, index, form);
    return form;
}

inline Form Numbers::make(int index) {
    const Atom &one = table_->atoms[index];
    switch (one.kind) {
    case AtomKind::param: // not in the block; parameter() reads those that are
        return hull(0, (Number{1} << 8 * one.b) - 1);
    case AtomKind::special: {
        auto axis = static_cast<std::size_t>(one.b);
        Number extent = one.a < 2 ? launch_->block[axis] : launch_->grid[axis];
        return one.a % 2 == 1 ? constant_form(extent) : space.variable(0, extent - 1);
    }
    case AtomKind::lane:
        return space.variable(0, one.a - 1);
    case AtomKind::loop: {
        Form form;
        form.terms.push_back({counter(one.a), 1});
        return form;
    }
    case AtomKind::ext:
        return read_as(form(one.a), one.b, one.c != 0);
    case AtomKind::floordiv:
        return floor_division(one);
    case AtomKind::truncdiv:
        return truncating_division(one);
    case AtomKind::bit_and:
    case AtomKind::bit_or:
    case AtomKind::bit_xor:
        return bitwise(one);
    case AtomKind::min:
    case AtomKind::max:
        return extreme(one);
    case AtomKind::pow2:
        return power(one);
    case AtomKind::upto:
        return hull(0, std::max(Number{0}, bounds(one.a).high));
    case AtomKind::unknown:
        return hull(one.low, one.high);
    case AtomKind::load:
        for (const Loaded *known = loaded_; known != nullptr; known = known->next)
            if (known->atom == index)
                return hull(known->low, known->high);
        return hull(one.low, one.high);
    case AtomKind::symbol:
        if (launch_->symbols != nullptr && launch_->symbols[one.a] != 0)
            return constant_form(launch_->symbols[one.a]);
        break;
    case AtomKind::either:
    case AtomKind::select:
        return alternatives(index);
    case AtomKind::paramat: {
        std::array<Number, kAlternatives> values{};
        int count = 0;
        if (!parameter_values(one, values, count))
            return hull(0, (Number{1} << 8 * one.b) - 1);
        return hull(*std::min_element(values.begin(), values.begin() + count),
                    *std::max_element(values.begin(), values.begin() + count));
    }
    case AtomKind::window:
        break;
    }
    return hull(0, (Number{1} << 64) - 1);
}

inline int Numbers::alternative(int index, int &poly, Number &value) {
    const Atom &one = table_->atoms[index];
    int count = 2;
    std::array<Number, kAlternatives> values{};
    if (one.kind == AtomKind::select) {
        int known = decided(one.a);
        if (known >= 0) {
            poly = known == 1 ? one.b : one.c;
            return 0;
        }
    } else if (one.kind == AtomKind::paramat) {
        if (!parameter_values(one, values, count))
            return 2;
    } else {
        count = one.b;
    }
    int chosen_index = count == 1 ? 0 : -1;
    for (const Chosen &earlier : chosen)
        if (earlier.atom == index && count > 1)
            chosen_index = earlier.alternative;
    if (chosen_index < 0) {
        if (!stopped())
            choice = {index, count};
        return 3;
    }
    if (count > 1) {
        const Gate *gate = gate_of(one, chosen_index);
        if (one.kind != AtomKind::select && !(gate != nullptr && gate->complete))
            inexact = true;
    }
    if (one.kind == AtomKind::paramat) {
        value = values[static_cast<std::size_t>(chosen_index)];
        return 1;
    }
    if (one.kind == AtomKind::select)
        poly = chosen_index == 0 ? one.b : one.c;
    else
        poly = table_->lists[one.a + chosen_index];
    return 0;
}

inline Form Numbers::alternatives(int index) {
    const Atom &one = table_->atoms[index];
    if (splits) {
        int poly = -1;
        Number value = 0;
        return alternative(index, poly, value) == 0 ? form(poly) : Form{};
    }
    if (one.kind == AtomKind::select) {
        int known = decided(one.a);
        if (known >= 0)
            return form(known == 1 ? one.b : one.c);
    }
    int count = one.kind == AtomKind::select ? 2 : one.b;
    bool any = false;
    Bounds all{};
    for (int i = 0; i < count; ++i) {
        int poly = one.kind == AtomKind::select ? (i == 0 ? one.b : one.c) : table_->lists[one.a + i];
        Bounds part{};
        if (!gated_bounds(one, i, poly, part))
            continue;
        all = any ? Bounds{std::min(all.low, part.low), std::max(all.high, part.high)} : part;
        any = true;
    }
    if (!any || space.infeasible) {
        space.infeasible = true;
        return {};
    }
    return hull(all.low, all.high);
}

inline bool Numbers::gated_bounds(const Atom &atom, int index, int poly, Bounds &result) {
    const Gate *gate = gate_of(atom, index);
    if (gate == nullptr || gate->count == 0) {
        result = bounds(poly);
        return true;
    }
    Numbers there = fresh_copy();
    for (int i = 0; i < gate->count && !there.stopped(); ++i)
        there.step(table_->steps[gate->first + i]);
    if (!there.stopped())
        result = there.bounds(poly);
    if (there.choice.atom >= 0)
        choice = there.choice;
    return !there.stopped();
}

inline bool Numbers::parameter_values(const Atom &atom, std::array<Number, kAlternatives> &values, int &count) {
    Form offset = space.reduced(form(atom.a));
    Bounds at = space.bounds(offset);
    Number end = launch_->parameters_bytes - atom.b, step = 0;
    for (const Term &term : offset.terms)
        step = common_divisor(step, term.coefficient);
    if (step == 0)
        step = 1;
    if (at.low < 0)
        at.low = remainder(at.low, step);
    at.high = std::min(at.high, end);
    Number total = floor_quotient(at.high - at.low, step) + 1;
    if (total < 1 || total > kAlternatives)
        return false;
    count = static_cast<int>(total);
    for (int i = 0; i < count; ++i) {
        std::uint64_t value = 0;
        std::memcpy(&value, launch_->parameters + static_cast<std::int64_t>(at.low + step * i),
                    static_cast<std::size_t>(atom.b));
        values[static_cast<std::size_t>(i)] = value;
    }
    return true;
}

} // namespace access_templates
