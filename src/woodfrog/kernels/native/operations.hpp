// What the functions that atoms stand for make of linear forms: readings of bits, divisions, bits, extremes, powers. The
// same as in numbers.py.
#pragma once

#include "numbers.hpp"

namespace access_templates {

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
    if (multiplier < 3 || !divides(multiplier, form.constant))
        return false;
    Form original = form;
    original.constant = floor_quotient(original.constant, multiplier);
    for (Term &term : original.terms)
        term.coefficient = floor_quotient(term.coefficient, multiplier);
    Bounds at = space.bounds(original);
    for (Number factor = 1; factor <= 1024; factor *= 2) {
        if (!divides(factor, multiplier))
            break;
        Number m = floor_quotient(multiplier, factor), divisor = -floor_quotient(-power, m);
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
