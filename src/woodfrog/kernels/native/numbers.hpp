// Polynomials as linear forms: numbers.py, which explains the steps. The members for conditions are in constraints.hpp.
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

/// An address has alternatives: each must be evaluated by itself.
struct Choice {
    int atom, count;
};

constexpr int kAlternatives = 24;
constexpr int kLargestShift = 118; // bounds beyond are infinite anyway

class Numbers {
  public:
    Numbers(const Template &table, const Launch &launch)
        : table_(&table), launch_(&launch), counters_(static_cast<std::size_t>(table.loop_count), -1) {}

    Space space;
    std::vector<std::pair<int, int>> chosen; // atom, alternative
    std::vector<Step> conditions;            // of the alternatives that were chosen
    bool splits = false;
    bool inexact = false;

    Numbers fresh_copy() const {
        Numbers copy(*table_, *launch_);
        copy.space = space;
        copy.inexact = inexact;
        copy.counters_ = counters_;
        copy.forms_ = forms_;
        return copy;
    }
    void choose(const Choice &choice, int index) {
        chosen.emplace_back(choice.atom, index);
        const Atom &atom = table_->atoms[choice.atom];
        if (atom.kind == AtomKind::select)
            conditions.push_back({index == 0 ? -1 : -2, atom.a});
        if (const Gate *gate = gate_of(atom, index))
            conditions.insert(conditions.end(), table_->steps + gate->first, table_->steps + gate->first + gate->count);
    }
    void require_chosen() {
        for (const Step &one : conditions)
            step(one);
    }
    void step(const Step &one) {
        if (one.loop >= 0)
            require_loop(one.loop);
        else
            require(one.condition, one.loop == -2);
    }

    Form address(int poly, std::vector<Number> &bases);
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
    Form atom(int index);
    Form make(int index);
    /// 0: a polynomial in `poly`; 1: a number in `value`; 2: bounds must do.
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

    const Template *table_;
    const Launch *launch_;
    std::vector<int> counters_;
    std::vector<std::pair<int, Form>> forms_;
};

constexpr Relation swapped(Relation r) {
    constexpr Relation other[] = {Relation::gt, Relation::ge, Relation::lt, Relation::le, Relation::eq, Relation::ne};
    return other[static_cast<int>(r)];
}
constexpr Relation opposite(Relation r) {
    constexpr Relation other[] = {Relation::ge, Relation::gt, Relation::le, Relation::lt, Relation::ne, Relation::eq};
    return other[static_cast<int>(r)];
}

inline Form Numbers::address(int index, std::vector<Number> &bases) {
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
                if (what == 0) {
                    result = result.plus(address(part, bases));
                    continue;
                }
                if (what == 1) {
                    bases.push_back(value);
                    result = result.shifted(value);
                    continue;
                }
            }
            Form form = atom(number);
            if (form.terms.empty() && (kind == AtomKind::param || kind == AtomKind::symbol))
                bases.push_back(form.constant);
            result = result.plus(form);
        } else {
            result = result.plus(monomial(one), one.coefficient);
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
            result = result.shifted(one.coefficient);
        else
            result = result.plus(monomial(one), one.coefficient);
    }
    return result;
}

inline Form Numbers::monomial(const Monomial &one) {
    if (one.count == 0)
        return constant_form(1);
    if (one.count == 1)
        return atom(table_->lists[one.first]);
    Form result = constant_form(1);
    for (int i = 0; i < one.count; ++i)
        result = times(result, space.reduced(atom(table_->lists[one.first + i])));
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

inline Form Numbers::atom(int index) {
    for (const auto &[number, form] : forms_)
        if (number == index)
            return form;
    Form form = make(index);
    const Atom &one = table_->atoms[index];
    bool is_choice = splits && (one.kind == AtomKind::either || one.kind == AtomKind::select);
    if (!is_choice)
        forms_.emplace_back(index, form);
    return form;
}

inline Form Numbers::make(int index) {
    const Atom &one = table_->atoms[index];
    switch (one.kind) {
    case AtomKind::param: {
        if (one.b > 8 || one.a < 0 || one.a + one.b > launch_->parameters_bytes)
            return hull(0, (Number{1} << 8 * one.b) - 1);
        std::uint64_t value = 0;
        std::memcpy(&value, launch_->parameters + one.a, static_cast<std::size_t>(one.b));
        return constant_form(value);
    }
    case AtomKind::special: {
        auto axis = static_cast<std::size_t>(one.b);
        Number extent = one.a < 2 ? launch_->block[axis] : launch_->grid[axis];
        return one.a % 2 == 1 ? constant_form(extent) : space.variable(0, extent - 1);
    }
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
    for (const auto &[atom, alternative] : chosen)
        if (atom == index && count > 1)
            chosen_index = alternative;
    if (chosen_index < 0)
        throw Choice{index, count};
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
        alternative(index, poly, value);
        return form(poly);
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
    if (!any)
        throw Infeasible{};
    return hull(all.low, all.high);
}

inline bool Numbers::gated_bounds(const Atom &atom, int index, int poly, Bounds &result) {
    const Gate *gate = gate_of(atom, index);
    if (gate == nullptr || gate->count == 0) {
        result = bounds(poly);
        return true;
    }
    Numbers there = fresh_copy();
    try {
        for (int i = 0; i < gate->count; ++i)
            there.step(table_->steps[gate->first + i]);
        result = there.bounds(poly);
    } catch (const Infeasible &) {
        return false;
    }
    return true;
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

inline Form Numbers::read_as(const Form &unreduced, int width, bool is_signed) {
    Form form = space.reduced(unreduced);
    Bounds at = space.bounds(form);
    Number whole = Number{1} << width, least = is_signed ? -(whole >> 1) : 0;
    if (at.low > -kFar && at.high < kFar) {
        Number turns = floor_quotient(at.low - least, whole);
        if (at.high - turns * whole < least + whole)
            return form.shifted(-turns * whole);
    }
    return hull(least, least + whole - 1);
}

inline Form Numbers::floor_division(const Atom &atom) {
    Form by = space.reduced(form(atom.b));
    if (by.terms.empty() && by.constant > 0) {
        Form result;
        if (nested(atom.a, by.constant, result))
            return result;
    }
    Form dividend = space.reduced(form(atom.a));
    if (by.terms.empty() && by.constant > 0) {
        Form result;
        return magic(dividend, by.constant, result) ? result : space.quotient(dividend, by.constant);
    }
    Bounds d = space.bounds(by), a = space.bounds(dividend);
    if (d.low <= 0 && d.high >= 0)
        return hull(-kUnbounded, kUnbounded);
    if (d.low <= 0) {
        Number most = std::max(magnitude(a.low), magnitude(a.high));
        return hull(-most - 1, most);
    }
    Number quotients[] = {floor_quotient(a.low, d.low), floor_quotient(a.low, d.high), floor_quotient(a.high, d.low),
                          floor_quotient(a.high, d.high)};
    return hull(*std::min_element(quotients, quotients + 4), *std::max_element(quotients, quotients + 4));
}

inline const Atom *Numbers::only_atom(int poly) const {
    const Poly &one = table_->polys[poly];
    if (one.count != 1)
        return nullptr;
    const Monomial &monomial = table_->monomials[one.first];
    return monomial.coefficient == 1 && monomial.count == 1 ? &table_->atoms[table_->lists[monomial.first]] : nullptr;
}

inline bool Numbers::nested(int poly, Number divisor, Form &result) {
    const Atom *read = only_atom(poly);
    if (read == nullptr || read->kind != AtomKind::ext)
        return false;
    const Atom *inner = only_atom(read->a);
    if (inner == nullptr || inner->kind != AtomKind::floordiv)
        return false;
    const Poly &by = table_->polys[inner->b];
    if (by.count != 1 || table_->monomials[by.first].count != 0)
        return false;
    Number power = table_->monomials[by.first].coefficient;
    if (power <= 0)
        return false;
    Number whole = Number{1} << read->b, least = read->c != 0 ? -(whole >> 1) : 0;
    Form numerator = space.reduced(form(inner->a));
    Bounds at = space.bounds(numerator);
    if (floor_quotient(at.low, power) < least || floor_quotient(at.high, power) >= least + whole)
        return false;
    Number both = product(power, divisor);
    if (!magic(numerator, both, result))
        result = space.quotient(numerator, both);
    return true;
}

inline bool Numbers::magic(const Form &form, Number power, Form &result) {
    if ((power & (power - 1)) != 0 || power < (Number{1} << 31) || form.terms.empty())
        return false;
    Number multiplier = 0;
    for (const Term &term : form.terms)
        multiplier = common_divisor(multiplier, term.coefficient);
    if (multiplier < 3 || form.constant % multiplier != 0)
        return false;
    Form original = form;
    original.constant /= multiplier;
    for (Term &term : original.terms)
        term.coefficient /= multiplier;
    Bounds at = space.bounds(original);
    for (Number factor = 1; factor <= 1024; factor *= 2) {
        if (multiplier % factor != 0)
            break;
        Number m = multiplier / factor, divisor = -floor_quotient(-power, m);
        for (Number d : {divisor, divisor - 1}) {
            Number excess = product(m, d) - power;
            if (d > 1 && excess >= 0 && at.low >= 0 && bound_product(excess, bound_product(at.high, factor)) < power) {
                result = space.quotient(original.scaled(factor), d);
                return true;
            }
        }
    }
    return false;
}

inline Form Numbers::truncating_division(const Atom &atom) {
    Form by = space.reduced(form(atom.b)), dividend = space.reduced(form(atom.a));
    Bounds a = space.bounds(dividend);
    if (by.terms.empty() && by.constant > 0) {
        if (a.low >= 0)
            return space.quotient(dividend, by.constant);
        if (a.high <= 0)
            return space.quotient(dividend.scaled(-1), by.constant).scaled(-1);
        return hull(-floor_quotient(-a.low, by.constant), floor_quotient(a.high, by.constant));
    }
    Bounds d = space.bounds(by);
    if (d.low <= 0 && d.high >= 0)
        return hull(-kUnbounded, kUnbounded);
    Number most = std::max(magnitude(a.low), magnitude(a.high));
    if (d.low > 0 && a.low >= 0)
        return hull(0, floor_quotient(a.high, d.low));
    return hull(-most, most);
}

inline Form Numbers::bitwise(const Atom &atom) {
    Form left = space.reduced(form(atom.a)), right = space.reduced(form(atom.b));
    bool is_and = atom.kind == AtomKind::bit_and, is_or = atom.kind == AtomKind::bit_or;
    if (left.terms.empty() && right.terms.empty()) {
        Number a = left.constant, b = right.constant;
        return constant_form(is_and ? a & b : is_or ? a | b : a ^ b);
    }
    std::optional<Number> a = space.possible_bits(left), b = space.possible_bits(right);
    Bounds l = space.bounds(left), r = space.bounds(right);
    if (!a || !b) {
        if (is_and && std::min(l.low, r.low) >= 0)
            return hull(0, std::min(l.high, r.high));
        return hull(0, kUnbounded);
    }
    if (is_and) {
        if (right.terms.empty() && (right.constant & *a) == *a)
            return left;
        if (left.terms.empty() && (left.constant & *b) == *b)
            return right;
        return hull(0, *a & *b);
    }
    if ((*a & *b) == 0)
        return left.plus(right);
    return hull(is_or ? std::max(l.low, r.low) : 0, *a | *b);
}

inline Form Numbers::extreme(const Atom &atom) {
    Form left = space.reduced(form(atom.a)), right = space.reduced(form(atom.b));
    bool is_min = atom.kind == AtomKind::min;
    Bounds difference = space.bounds(space.reduced(left.plus(right, -1)));
    if (difference.high <= 0)
        return is_min ? left : right;
    if (difference.low >= 0)
        return is_min ? right : left;
    Bounds a = space.bounds(left), b = space.bounds(right);
    return is_min ? hull(std::min(a.low, b.low), std::min(a.high, b.high))
                  : hull(std::max(a.low, b.low), std::max(a.high, b.high));
}

inline Form Numbers::power(const Atom &atom) {
    Bounds at = bounds(atom.a);
    int width = atom.b;
    auto raised = [width](Number exponent) {
        if (width != 0 && exponent >= width)
            return Number{0};
        return Number{1} << static_cast<int>(std::clamp(exponent, Number{0}, Number{kLargestShift}));
    };
    if (at.low == at.high) {
        Number value = raised(at.low);
        return value > kFar ? hull(value, kUnbounded) : constant_form(value);
    }
    Number least = width != 0 && at.high >= width ? 0 : raised(at.low);
    Number top = std::min(std::max(at.high, Number{0}), Number{width != 0 ? width - 1 : kLargestShift});
    return hull(least, Number{1} << static_cast<int>(top));
}

} // namespace access_templates
