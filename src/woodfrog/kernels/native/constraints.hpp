// Conditions and loops as constraints on the points of a launch: constraints.py, which explains the steps.
#pragma once

#include "operations.hpp"

namespace access_templates {

inline int Numbers::decided(int index, bool negated) {
    const Condition &c = table_->conditions[index];
    switch (c.op) {
    case Op::yes:
        return negated ? 0 : 1;
    case Op::no:
        return negated ? 1 : 0;
    case Op::unknown:
        return -1;
    case Op::all:
    case Op::any: {
        int deciding = (c.op == Op::any) != negated ? 1 : 0, result = 1 - deciding;
        for (int i = 0; i < c.b; ++i) {
            int known = decided(table_->lists[c.a + i], negated);
            if (known == deciding)
                return deciding;
            if (known < 0)
                result = -1;
        }
        return result;
    }
    case Op::compare:
        break;
    }
    Form left = read_as(form(c.a), c.width, c.is_signed), right = read_as(form(c.b), c.width, c.is_signed);
    Bounds d = space.bounds(space.reduced(left.plus(right, -1)));
    bool always = false, never = false;
    switch (negated ? opposite(c.relation) : c.relation) {
    case Relation::lt:
        always = d.high < 0, never = d.low >= 0;
        break;
    case Relation::le:
        always = d.high <= 0, never = d.low > 0;
        break;
    case Relation::gt:
        always = d.low > 0, never = d.high <= 0;
        break;
    case Relation::ge:
        always = d.low >= 0, never = d.high < 0;
        break;
    case Relation::eq:
        always = d.low == 0 && d.high == 0, never = d.low > 0 || d.high < 0;
        break;
    case Relation::ne:
        always = d.low > 0 || d.high < 0, never = d.low == 0 && d.high == 0;
        break;
    }
    return always ? 1 : never ? 0 : -1;
}

inline void Numbers::require(int index, bool negated) {
    const Condition &c = table_->conditions[index];
    if (c.op == Op::unknown) {
        space.loose = true;
    } else if (c.op == Op::yes || c.op == Op::no) {
        if ((c.op == Op::no) != negated)
            space.infeasible = true;
    } else if (c.op == Op::compare) {
        compare(c, negated ? opposite(c.relation) : c.relation);
    } else if ((c.op == Op::all) != negated) {
        for (int i = 0; i < c.b && !stopped(); ++i)
            require(table_->lists[c.a + i], negated);
    } else {
        int open = 0, last = -1;
        for (int i = 0; i < c.b; ++i) {
            int known = decided(table_->lists[c.a + i], negated);
            if (known == 1)
                return;
            if (known < 0) {
                ++open;
                last = table_->lists[c.a + i];
            }
        }
        if (open == 0)
            space.infeasible = true;
        else if (open == 1)
            require(last, negated);
        else
            space.loose = true;
    }
}

inline void Numbers::compare(const Condition &c, Relation relation) {
    int left_poly = c.a, right_poly = c.b;
    if (relation == Relation::gt || relation == Relation::ge) {
        relation = swapped(relation);
        std::swap(left_poly, right_poly);
    }
    Form raw = space.reduced(form(left_poly));
    Form right = read_as(form(right_poly), c.width, c.is_signed);
    if (!c.is_signed && (relation == Relation::lt || relation == Relation::le)) {
        Bounds at = space.bounds(raw);
        Number most = space.bounds(space.reduced(right)).high, whole = Number{1} << c.width;
        if (at.low < 0 && at.low + whole > most && at.high < whole) {
            space.require_nonpositive(raw.scaled(-1));
            space.require_nonpositive(raw.plus(right, -1).shifted(relation == Relation::lt ? 1 : 0));
            return;
        }
    }
    Form difference = read_as(raw, c.width, c.is_signed).plus(right, -1);
    if (relation == Relation::lt) {
        space.require_nonpositive(difference.shifted(1));
    } else if (relation == Relation::le) {
        space.require_nonpositive(difference);
    } else if (relation == Relation::eq) {
        space.require_nonpositive(difference);
        space.require_nonpositive(difference.scaled(-1));
    } else {
        difference = space.reduced(difference);
        Bounds at = space.bounds(difference);
        if (at.low > 0 || at.high < 0)
            return;
        if (at.low == 0 && at.high == 0)
            space.infeasible = true;
        else if (at.low == 0)
            space.require_nonpositive(difference.scaled(-1).shifted(1));
        else if (at.high == 0)
            space.require_nonpositive(difference.shifted(1));
        else if (difference.terms.size() == 1 && !divides(difference.terms.front().coefficient, difference.constant))
            return;
        else
            space.loose = true;
    }
}

// Loops.

inline int Numbers::counter(int loop) {
    auto at = static_cast<std::size_t>(loop);
    if (counters_[at] < 0) {
        counters_[at] = space.variable(0, kUnbounded).terms.front().variable;
        const Loop &fact = table_->loops[loop];
        for (int i = 0; i < fact.count; ++i)
            if (table_->conditions[table_->lists[fact.first + i]].op == Op::compare &&
                !bound_doublings(table_->lists[fact.first + i], loop, counters_[at]))
                bound(table_->lists[fact.first + i], counters_[at], nullptr);
    }
    return counters_[at];
}

inline void Numbers::require_loop(int loop) {
    int variable = counter(loop);
    if (stopped() || space.at(variable).high == 0)
        return;
    const Loop &fact = table_->loops[loop];
    if (!fact.complete)
        space.loose = true;
    Row<const Kept *> exact;
    for (int i = 0; i < fact.count; ++i) {
        int condition = table_->lists[fact.first + i];
        Form form;
        if (table_->conditions[condition].op == Op::compare && bound(condition, variable, &form))
            exact.push_back(*arena_, Kept::of(*arena_, form));
        else
            space.loose = true;
    }
    for (const Kept *kept : exact) {
        if (stopped())
            return;
        Form form = kept->form(), at_zero;
        at_zero.constant = form.constant;
        for (const Term &term : form.terms)
            if (term.variable != variable)
                at_zero.terms.push_back(term);
        if (space.bounds(space.reduced(at_zero)).high <= 0)
            space.require_nonpositive(form);
        else
            space.loose = true;
    }
}

inline bool Numbers::is_doubling(int poly, int loop, Number &factor, Number &each) const {
    const Poly &one = table_->polys[poly];
    if (one.count != 1)
        return false;
    const Monomial &monomial = table_->monomials[one.first];
    if (monomial.count != 1 || monomial.coefficient < 1)
        return false;
    const Atom &power = table_->atoms[table_->lists[monomial.first]];
    if (power.kind != AtomKind::pow2 || power.b != 0 || table_->polys[power.a].count != 2)
        return false;
    factor = monomial.coefficient;
    each = 0;
    Number constant = 0;
    for (int i = 0; i < 2; ++i) {
        const Monomial &part = table_->monomials[table_->polys[power.a].first + i];
        if (part.count == 0) {
            constant = part.coefficient;
        } else if (part.count == 1) {
            const Atom &atom = table_->atoms[table_->lists[part.first]];
            if (atom.kind == AtomKind::loop && atom.a == loop)
                each = part.coefficient;
        }
    }
    return each >= 1 && constant == -each;
}

inline bool Numbers::bound_doublings(int condition, int loop, int variable) {
    const Condition &c = table_->conditions[condition];
    for (bool swap : {false, true}) {
        Number factor = 0, each = 0;
        Relation relation = swap ? swapped(c.relation) : c.relation;
        if ((relation != Relation::lt && relation != Relation::le) ||
            !is_doubling(swap ? c.b : c.a, loop, factor, each))
            continue;
        Form fixed = read_as(form(swap ? c.a : c.b), c.width, c.is_signed);
        Number limit = space.bounds(space.reduced(fixed)).high - (relation == Relation::lt);
        Number top = (Number{1} << (c.width - c.is_signed)) - 1;
        if (factor > top || each > 64 || bound_product(limit, Number{1} << static_cast<int>(each)) > top)
            return false;
        Number most = 0;
        if (limit >= factor)
            most = floor_quotient(bit_length(floor_quotient(limit, factor)) - 1, each) + 1;
        space.at(variable).high = std::min(space.at(variable).high, most);
        return true;
    }
    return false;
}

inline bool Numbers::bound(int condition, int variable, Form *out) {
    const Condition &c = table_->conditions[condition];
    Relation relation = c.relation;
    int fixed_poly = c.b;
    Form moving = space.reduced(form(c.a));
    if (moving.find(variable) == nullptr) {
        relation = swapped(relation);
        fixed_poly = c.a;
        moving = space.reduced(form(c.b));
    }
    Form fixed = space.reduced(read_as(form(fixed_poly), c.width, c.is_signed));
    const Term *term = moving.find(variable);
    if (term == nullptr || fixed.find(variable) != nullptr)
        return false;
    Number stride = term->coefficient, whole = Number{1} << c.width, least = c.is_signed ? -(whole >> 1) : 0;
    Form first;
    first.constant = sum(moving.constant, stride);
    for (const Term &other : moving.terms)
        if (other.variable != variable)
            first.terms.push_back(other);
    Bounds at = space.bounds(space.reduced(first));
    if (at.low < -kFar || at.high > kFar)
        return false;
    Number turns = floor_quotient(at.low - least, whole);
    if (at.high - turns * whole >= least + whole)
        return false;
    first = first.shifted(-turns * whole);
    moving = moving.shifted(-turns * whole);
    Number top = least + whole - 1;
    if (stride < 0) {
        first = first.scaled(-1);
        moving = moving.scaled(-1);
        fixed = fixed.scaled(-1);
        stride = -stride;
        relation = swapped(relation);
        top = -least;
    }
    Number low = space.bounds(space.reduced(first)).low, limit = space.bounds(fixed).high;
    Form result;
    if (relation == Relation::lt || relation == Relation::le) {
        limit -= relation == Relation::lt;
        if (limit + stride > top)
            return false;
        result = moving.plus(fixed, -1).shifted(relation == Relation::lt ? 1 : 0);
    } else if (relation == Relation::ne) {
        Form gap = space.reduced(first.plus(fixed, -1));
        if (space.bounds(gap).high > 0)
            return false;
        if (stride != 1) {
            if (!divides(stride, gap.constant))
                return false;
            for (const Term &one : gap.terms)
                if (!divides(stride, one.coefficient))
                    return false;
        }
        limit -= stride;
        result = moving.plus(fixed, -1).shifted(stride);
    } else {
        return false;
    }
    Number &most = space.at(variable).high;
    most = std::min(most, std::max(Number{0}, floor_quotient(limit - low, stride) + 1));
    if (out != nullptr)
        *out = result;
    return true;
}

} // namespace access_templates
