// The integer points of a launch: variables with bounds, linear forms, linear constraints. The same algorithm as
// space.py, which explains it; the two are compared launch by launch in the tests.
#pragma once

#include <optional>
#include <utility>

#include "form.hpp"

namespace access_templates {

/// All variables of one set of points. A copy() shares nothing that either side changes later.
///
/// What allows no point is noted in `infeasible`, not thrown: it is common, and throwing costs more than all the rest.
/// From then on results mean nothing, and whoever asked for the points looks at it before he uses any.
class Space {
  public:
    struct Variable {
        Number low, high;
        const Kept *replaced; // what a variable that was split is now, or nullptr
        int member_of;        // in how many sums
        bool hull;            // it stands for values of which only bounds are known
    };

    explicit Space(Arena &arena) : arena_(&arena) {}
    Space copy() const {
        Space result = *this;
        result.variables = variables.copy(*arena_);
        result.composites_ = composites_.copy(*arena_);
        return result;
    }

    Row<Variable> variables;
    bool loose = false;
    bool infeasible = false;

    Variable &at(int variable) { return variables[static_cast<std::size_t>(variable)]; }
    const Variable &at(int variable) const { return variables[static_cast<std::size_t>(variable)]; }

    Form variable(Number from, Number to, bool is_hull = false) {
        if (from > to) {
            infeasible = true;
            return {};
        }
        if (from == to)
            return constant_form(from);
        Form form;
        form.terms.push_back({append(from, to, is_hull), 1});
        return form;
    }
    Form reduced(const Form &form) const;
    Bounds bounds(const Form &form) const {
        Bounds result{form.constant, form.constant};
        for (const Term &term : form.terms) {
            const Variable &v = at(term.variable);
            Number a = bound_product(term.coefficient, v.low), b = bound_product(term.coefficient, v.high);
            result.low = saturated(result.low + std::min(a, b));
            result.high = saturated(result.high + std::max(a, b));
        }
        return result;
    }
    bool is_entangled(const Form &form) const {
        for (const Term &term : form.terms)
            if (at(term.variable).member_of != 0)
                return true;
        return false;
    }
    bool has_hull(const Form &form) const {
        for (const Term &term : form.terms)
            if (at(term.variable).hull)
                return true;
        return false;
    }
    void require_nonpositive(const Form &form);
    Form quotient(const Form &form, Number divisor);
    std::optional<Number> possible_bits(const Form &form) const;

  private:
    /// A sum of variables, and the variable that is that sum.
    struct Composite {
        Terms parts;
        int total;
    };
    struct Dense {
        Number divisor;
        Terms parts;
        Number least, greatest;
    };

    int append(Number from, Number to, bool is_hull) {
        variables.push_back(*arena_, {from, to, nullptr, 0, is_hull});
        return static_cast<int>(variables.size()) - 1;
    }
    void tighten_sums(const Form &changed);
    int compose(const Terms &parts, Number least, Number greatest);
    std::optional<Dense> dense(const Form &form) const;
    std::optional<Form> split(Form rest, Number divisor);

    Arena *arena_;
    Row<const Composite *> composites_; // never changed in place: copies share them
};

inline Form Space::reduced(const Form &unreduced) const {
    bool as_it_is = true;
    for (const Term &term : unreduced.terms) {
        const Variable &v = at(term.variable);
        as_it_is = as_it_is && v.replaced == nullptr && v.member_of == 0 && v.low != v.high;
    }
    if (as_it_is)
        return unreduced;
    Form form = unreduced;
    for (bool changed = true; changed;) {
        changed = false;
        bool any_replaced = false;
        for (const Term &term : form.terms)
            any_replaced = any_replaced || at(term.variable).replaced != nullptr;
        if (any_replaced) {
            Form result;
            result.constant = form.constant;
            for (const Term &term : form.terms) {
                const Kept *replacement = at(term.variable).replaced;
                if (replacement != nullptr)
                    result = result.plus(replacement->form(), term.coefficient);
                else
                    result.add(term.variable, term.coefficient);
            }
            form = result;
            changed = true;
        }
        for (const Composite *composite : composites_) {
            Terms moving;
            Number fixed = 0;
            for (const Term &part : composite->parts) {
                const Variable &v = at(part.variable);
                if (v.low == v.high)
                    fixed = sum(fixed, product(part.coefficient, v.low));
                else
                    moving.push_back(part);
            }
            if (moving.empty())
                continue;
            if (const Term *total = form.find(composite->total)) {
                bool beside = false;
                for (const Term &part : moving)
                    beside = beside || form.find(part.variable) != nullptr;
                if (beside) {
                    Number factor = total->coefficient;
                    form.add(composite->total, -factor);
                    for (const Term &part : composite->parts)
                        form.add(part.variable, product(part.coefficient, factor));
                }
            }
            const Term *first = form.find(moving.front().variable);
            if (first == nullptr || !divides(moving.front().coefficient, first->coefficient))
                continue;
            Number factor = floor_quotient(first->coefficient, moving.front().coefficient);
            bool all = true;
            for (const Term &part : moving) {
                const Term *term = form.find(part.variable);
                all = all && term != nullptr && term->coefficient == factor * part.coefficient;
            }
            if (!all)
                continue;
            Form rest;
            rest.constant = sum(form.constant, -product(factor, fixed));
            for (const Term &term : form.terms) {
                bool is_part = false;
                for (const Term &part : moving)
                    is_part = is_part || part.variable == term.variable;
                if (!is_part)
                    rest.terms.push_back(term);
            }
            rest.add(composite->total, factor);
            form = rest;
            changed = true;
        }
    }
    Form result;
    result.constant = form.constant;
    for (const Term &term : form.terms) {
        const Variable &v = at(term.variable);
        if (v.low == v.high)
            result.constant = sum(result.constant, product(term.coefficient, v.low));
        else
            result.terms.push_back(term);
    }
    return result;
}

inline void Space::require_nonpositive(const Form &unreduced) {
    Form form = reduced(unreduced);
    Bounds range = bounds(form);
    if (range.high <= 0)
        return;
    if (range.low > 0) {
        infeasible = true;
        return;
    }
    if (range.low < -kFar) {
        loose = true;
        return;
    }
    if (has_hull(form))
        loose = true;
    std::optional<Dense> sums = form.terms.size() > 1 ? dense(form) : std::nullopt;
    bool changed_member = false;
    Form changed;
    for (const Term &term : form.terms) {
        Variable &v = at(term.variable);
        Number c = term.coefficient, old_low = v.low, old_high = v.high;
        if (c > 0)
            v.high = std::min(v.high, floor_quotient(-(range.low - bound_product(c, old_low)), c));
        else
            v.low = std::max(v.low, -floor_quotient(-(range.low - bound_product(c, old_high)), -c));
        if (v.low > v.high) {
            infeasible = true;
            return;
        }
        if (v.low == old_low && v.high == old_high)
            continue;
        changed.terms.push_back(term);
        changed_member = changed_member || v.member_of != 0;
    }
    if (changed_member) {
        loose = true;
        tighten_sums(changed);
    }
    if (infeasible || form.terms.size() == 1 || bounds(form).high <= 0)
        return;
    if (!sums || is_entangled(form)) {
        loose = true;
        return;
    }
    compose(sums->parts, sums->least, std::min(sums->greatest, floor_quotient(-form.constant, sums->divisor)));
}

/// Bounds the sums that variables with new bounds are part of.
inline void Space::tighten_sums(const Form &changed) {
    for (const Composite *composite : composites_) {
        bool affected = false;
        for (const Term &part : composite->parts)
            affected = affected || changed.find(part.variable) != nullptr;
        if (!affected)
            continue;
        Form parts;
        parts.terms = composite->parts;
        Bounds range = bounds(parts);
        Variable &total = at(composite->total);
        total.low = std::max(total.low, range.low);
        total.high = std::min(total.high, range.high);
        if (total.low > total.high) {
            infeasible = true;
            return;
        }
    }
}

inline int Space::compose(const Terms &parts, Number least, Number greatest) {
    if (least > greatest)
        infeasible = true;
    bool is_hull = false;
    for (const Term &part : parts)
        is_hull = is_hull || at(part.variable).hull;
    int total = append(least, greatest, is_hull);
    for (const Term &part : parts)
        ++at(part.variable).member_of;
    composites_.push_back(*arena_, new (arena_->take<Composite>(1)) Composite{parts, total});
    return total;
}

inline std::optional<Space::Dense> Space::dense(const Form &form) const {
    Dense result{0, form.terms, 0, 0};
    for (const Term &term : form.terms)
        result.divisor = common_divisor(result.divisor, term.coefficient);
    if (result.divisor == 0)
        return std::nullopt;
    for (Term &part : result.parts)
        part.coefficient = floor_quotient(part.coefficient, result.divisor); // without a remainder
    Terms ordered;
    for (const Term &part : result.parts) { // by magnitude; sorting a handful of them by insertion
        ordered.push_back(part);
        for (std::size_t i = ordered.size() - 1; i > 0; --i) {
            if (magnitude(ordered[i - 1].coefficient) <= magnitude(ordered[i].coefficient))
                break;
            std::swap(ordered[i - 1], ordered[i]);
        }
    }
    Number reach = 1;
    for (const Term &part : ordered) {
        const Variable &v = at(part.variable);
        if (magnitude(part.coefficient) > reach)
            return std::nullopt;
        reach = saturated(reach + bound_product(magnitude(part.coefficient), saturated(v.high - v.low)));
    }
    Form parts;
    parts.terms = result.parts;
    Bounds range = bounds(parts);
    result.least = range.low;
    result.greatest = range.high;
    return result;
}

inline Form Space::quotient(const Form &unreduced, Number divisor) {
    Form form = reduced(unreduced);
    Form base, rest;
    base.constant = floor_quotient(form.constant, divisor);
    rest.constant = remainder(form.constant, divisor);
    for (const Term &term : form.terms) {
        if (divides(divisor, term.coefficient))
            base.terms.push_back({term.variable, floor_quotient(term.coefficient, divisor)});
        else
            rest.terms.push_back(term);
    }
    if (rest.terms.empty())
        return base;
    Bounds range = bounds(rest);
    Number first = floor_quotient(range.low, divisor), last = floor_quotient(range.high, divisor);
    if (first == last)
        return base.shifted(first);
    if (std::optional<Form> parts = split(rest, divisor))
        return base.plus(*parts);
    if (range.high - range.low > kFar)
        return base.plus(variable(-kUnbounded, kUnbounded, true));
    return base.plus(variable(first, last, true));
}

inline std::optional<Form> Space::split(Form rest, Number divisor) {
    if (rest.terms.size() > 1) {
        std::optional<Dense> sums = dense(rest);
        if (!sums || is_entangled(rest))
            return std::nullopt;
        Form whole;
        whole.constant = rest.constant;
        whole.terms.push_back({compose(sums->parts, sums->least, sums->greatest), sums->divisor});
        rest = std::move(whole);
    }
    int v = rest.terms.front().variable;
    const Variable old = at(v);
    Number c = rest.terms.front().coefficient;
    if (c < 0 || !divides(c, divisor) || old.hull || old.high > kFar || old.low < -kFar)
        return std::nullopt;
    Number step = floor_quotient(divisor, c);
    if (floor_quotient(rest.constant, c) != 0)
        return std::nullopt;
    Form single;
    single.terms.push_back({v, 1});
    if (step == 1)
        return single;
    Form whole = variable(floor_quotient(old.low, step), floor_quotient(old.high, step));
    if (whole.terms.empty())
        return whole;
    Form part = variable(0, step - 1);
    int q = whole.terms.front().variable, r = part.terms.front().variable;
    at(v).replaced = Kept::of(*arena_, whole.scaled(step).plus(part));
    for (const Composite *&composite : composites_) {
        for (std::size_t i = 0; i < composite->parts.size(); ++i) {
            if (composite->parts[i].variable != v)
                continue;
            auto *changed = new (arena_->take<Composite>(1)) Composite(*composite);
            Number p = changed->parts[i].coefficient;
            changed->parts.erase(i);
            changed->parts.push_back({q, product(p, step)});
            changed->parts.push_back({r, p});
            ++at(q).member_of;
            ++at(r).member_of;
            composite = changed;
            break;
        }
    }
    if (remainder(old.low, step) != 0 || remainder(old.high + 1, step) != 0) {
        Terms parts;
        parts.push_back({r, 1});
        parts.push_back({q, step});
        compose(parts, old.low, old.high);
    }
    return whole;
}

inline std::optional<Number> Space::possible_bits(const Form &form) const {
    Bounds range = bounds(form);
    if (range.low < 0 || range.high > kFar)
        return std::nullopt;
    bool simple = form.constant >= 0;
    Number mask = simple ? form.constant : 0, ends = form.constant;
    for (const Term &term : form.terms) {
        ends |= term.coefficient;
        const Variable &v = at(term.variable);
        if (term.coefficient < 0 || v.low < 0)
            simple = false;
        if (!simple)
            continue;
        Number piece =
            (Number{1} << bit_length(term.coefficient * v.high)) - (Number{1} << trailing_zeros(term.coefficient));
        if ((mask & piece) != 0)
            simple = false;
        mask |= piece;
    }
    if (simple)
        return mask;
    int lowest = trailing_zeros(ends), length = bit_length(range.high);
    return length > lowest ? (Number{1} << length) - (Number{1} << lowest) : 0;
}

} // namespace access_templates
