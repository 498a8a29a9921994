// The integer points of a launch: variables with bounds, linear forms, linear constraints. The same algorithm as
// space.py, which explains it; the two are compared launch by launch in the tests.
#pragma once

#include <optional>
#include <utility>
#include <vector>

#include "number.hpp"

namespace access_templates {

/// The constraints allow no point.
struct Infeasible {};

struct Term {
    int variable;
    Number coefficient;
};

/// A few terms in place, so that evaluating allocates little. More than that is TooLarge.
class Terms {
  public:
    static constexpr int kCapacity = 16;

    Terms() = default;
    Terms(const Terms &other) : size_(other.size_) { std::copy_n(other.items_, size_, items_); }
    Terms &operator=(const Terms &other) {
        size_ = other.size_;
        std::copy_n(other.items_, size_, items_);
        return *this;
    }
    Term *begin() { return items_; }
    Term *end() { return items_ + size_; }
    const Term *begin() const { return items_; }
    const Term *end() const { return items_ + size_; }
    std::size_t size() const { return static_cast<std::size_t>(size_); }
    bool empty() const { return size_ == 0; }
    Term &operator[](std::size_t i) { return items_[i]; }
    const Term &operator[](std::size_t i) const { return items_[i]; }
    const Term &front() const { return items_[0]; }
    void push_back(const Term &term) {
        if (size_ == kCapacity)
            throw TooLarge{};
        items_[size_++] = term;
    }
    void erase(std::size_t i) {
        std::copy(items_ + i + 1, items_ + size_, items_ + i);
        --size_;
    }

  private:
    Term items_[kCapacity];
    int size_ = 0;
};

/// constant + Σ coefficient * variable, terms in the order in which they came.
struct Form {
    Number constant = 0;
    Terms terms;

    const Term *find(int variable) const {
        for (const Term &term : terms)
            if (term.variable == variable)
                return &term;
        return nullptr;
    }
    void add(int variable, Number coefficient) {
        for (std::size_t i = 0; i < terms.size(); ++i) {
            if (terms[i].variable != variable)
                continue;
            terms[i].coefficient = sum(terms[i].coefficient, coefficient);
            if (terms[i].coefficient == 0)
                terms.erase(i);
            return;
        }
        if (coefficient != 0)
            terms.push_back({variable, coefficient});
    }
    Form plus(const Form &other, Number factor = 1) const {
        Form result = *this;
        result.constant = sum(result.constant, product(factor, other.constant));
        for (const Term &term : other.terms)
            result.add(term.variable, product(term.coefficient, factor));
        return result;
    }
    Form scaled(Number factor) const {
        Form result;
        if (factor == 0)
            return result;
        result.constant = product(constant, factor);
        for (const Term &term : terms)
            result.terms.push_back({term.variable, product(term.coefficient, factor)});
        return result;
    }
    Form shifted(Number amount) const {
        Form result = *this;
        result.constant = sum(result.constant, amount);
        return result;
    }
};

inline Form constant_form(Number value) {
    if (value > kFar || value < -kFar)
        throw TooLarge{};
    Form form;
    form.constant = value;
    return form;
}

struct Bounds {
    Number low;
    Number high;
};

class Space {
  public:
    std::vector<Number> low, high;
    std::vector<char> hull;
    bool loose = false;

    Form variable(Number from, Number to, bool is_hull = false) {
        if (from > to)
            throw Infeasible{};
        if (from == to)
            return constant_form(from);
        Form form;
        form.terms.push_back({append(from, to, is_hull), 1});
        return form;
    }
    Form reduced(Form form) const;
    Bounds bounds(const Form &form) const {
        Bounds result{form.constant, form.constant};
        for (const Term &term : form.terms) {
            auto v = static_cast<std::size_t>(term.variable);
            Number a = bound_product(term.coefficient, low[v]), b = bound_product(term.coefficient, high[v]);
            result.low = saturated(result.low + std::min(a, b));
            result.high = saturated(result.high + std::max(a, b));
        }
        return result;
    }
    bool is_entangled(const Form &form) const {
        for (const Term &term : form.terms)
            if (member_of_[static_cast<std::size_t>(term.variable)] != 0)
                return true;
        return false;
    }
    bool has_hull(const Form &form) const {
        for (const Term &term : form.terms)
            if (hull[static_cast<std::size_t>(term.variable)])
                return true;
        return false;
    }
    void require_nonpositive(const Form &form);
    Form quotient(const Form &form, Number divisor);
    std::optional<Number> possible_bits(const Form &form) const;

  private:
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
        low.push_back(from);
        high.push_back(to);
        hull.push_back(is_hull);
        member_of_.push_back(0);
        replaced_.emplace_back();
        return static_cast<int>(low.size()) - 1;
    }
    void tighten_sums(const std::vector<int> &changed);
    int compose(Terms parts, Number least, Number greatest);
    std::optional<Dense> dense(const Form &form) const;
    std::optional<Form> split(Form rest, Number divisor);

    std::vector<int> member_of_;
    std::vector<std::optional<Form>> replaced_;
    std::vector<Composite> composites_;
    bool any_replaced_ = false;
};

inline Form Space::reduced(Form form) const {
    for (bool changed = true; changed;) {
        changed = false;
        if (any_replaced_) {
            bool found = false;
            for (const Term &term : form.terms)
                found = found || replaced_[static_cast<std::size_t>(term.variable)].has_value();
            if (found) {
                Form result;
                result.constant = form.constant;
                for (const Term &term : form.terms) {
                    const auto &replacement = replaced_[static_cast<std::size_t>(term.variable)];
                    if (replacement)
                        result = result.plus(*replacement, term.coefficient);
                    else
                        result.add(term.variable, term.coefficient);
                }
                form = std::move(result);
                changed = true;
            }
        }
        for (const Composite &composite : composites_) {
            Terms moving;
            Number fixed = 0;
            for (const Term &part : composite.parts) {
                auto v = static_cast<std::size_t>(part.variable);
                if (low[v] == high[v])
                    fixed = sum(fixed, product(part.coefficient, low[v]));
                else
                    moving.push_back(part);
            }
            if (moving.empty())
                continue;
            if (const Term *total = form.find(composite.total)) {
                bool beside = false;
                for (const Term &part : moving)
                    beside = beside || form.find(part.variable) != nullptr;
                if (beside) {
                    Number factor = total->coefficient;
                    form.add(composite.total, -factor);
                    for (const Term &part : composite.parts)
                        form.add(part.variable, product(part.coefficient, factor));
                }
            }
            const Term *first = form.find(moving.front().variable);
            if (first == nullptr || first->coefficient % moving.front().coefficient != 0)
                continue;
            Number factor = first->coefficient / moving.front().coefficient;
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
            rest.add(composite.total, factor);
            form = std::move(rest);
            changed = true;
        }
    }
    Form result;
    result.constant = form.constant;
    for (const Term &term : form.terms) {
        auto v = static_cast<std::size_t>(term.variable);
        if (low[v] == high[v])
            result.constant = sum(result.constant, product(term.coefficient, low[v]));
        else
            result.terms.push_back(term);
    }
    return result;
}

inline void Space::require_nonpositive(const Form &unreduced) {
    Form form = reduced(unreduced);
    Bounds at = bounds(form);
    if (at.high <= 0)
        return;
    if (at.low > 0)
        throw Infeasible{};
    if (at.low < -kFar) {
        loose = true;
        return;
    }
    if (has_hull(form))
        loose = true;
    std::optional<Dense> sums = form.terms.size() > 1 ? dense(form) : std::nullopt;
    bool changed_member = false;
    std::vector<int> changed;
    for (const Term &term : form.terms) {
        auto v = static_cast<std::size_t>(term.variable);
        Number c = term.coefficient, old_low = low[v], old_high = high[v];
        if (c > 0)
            high[v] = std::min(high[v], floor_quotient(-(at.low - bound_product(c, old_low)), c));
        else
            low[v] = std::max(low[v], -floor_quotient(-(at.low - bound_product(c, old_high)), -c));
        if (low[v] > high[v])
            throw Infeasible{};
        if (low[v] == old_low && high[v] == old_high)
            continue;
        changed.push_back(term.variable);
        changed_member = changed_member || member_of_[v] != 0;
    }
    if (changed_member) {
        loose = true;
        tighten_sums(changed);
    }
    if (form.terms.size() == 1 || bounds(form).high <= 0)
        return;
    if (!sums || is_entangled(form)) {
        loose = true;
        return;
    }
    compose(sums->parts, sums->least, std::min(sums->greatest, floor_quotient(-form.constant, sums->divisor)));
}

inline void Space::tighten_sums(const std::vector<int> &changed) {
    for (const Composite &composite : composites_) {
        Form parts;
        parts.terms = composite.parts;
        bool affected = false;
        for (int variable : changed)
            affected = affected || parts.find(variable) != nullptr;
        if (!affected)
            continue;
        Bounds at = bounds(parts);
        auto total = static_cast<std::size_t>(composite.total);
        low[total] = std::max(low[total], at.low);
        high[total] = std::min(high[total], at.high);
        if (low[total] > high[total])
            throw Infeasible{};
    }
}

inline int Space::compose(Terms parts, Number least, Number greatest) {
    if (least > greatest)
        throw Infeasible{};
    bool is_hull = false;
    for (const Term &part : parts)
        is_hull = is_hull || hull[static_cast<std::size_t>(part.variable)];
    int total = append(least, greatest, is_hull);
    for (const Term &part : parts)
        ++member_of_[static_cast<std::size_t>(part.variable)];
    composites_.push_back({parts, total});
    return total;
}

inline std::optional<Space::Dense> Space::dense(const Form &form) const {
    Dense result{0, form.terms, 0, 0};
    for (const Term &term : form.terms)
        result.divisor = common_divisor(result.divisor, term.coefficient);
    if (result.divisor == 0)
        return std::nullopt;
    for (Term &part : result.parts)
        part.coefficient /= result.divisor;
    Terms ordered = result.parts;
    std::stable_sort(ordered.begin(), ordered.end(),
                     [](const Term &a, const Term &b) { return magnitude(a.coefficient) < magnitude(b.coefficient); });
    Number reach = 1;
    for (const Term &part : ordered) {
        auto v = static_cast<std::size_t>(part.variable);
        if (magnitude(part.coefficient) > reach)
            return std::nullopt;
        reach = saturated(reach + bound_product(magnitude(part.coefficient), saturated(high[v] - low[v])));
    }
    Form parts;
    parts.terms = result.parts;
    Bounds at = bounds(parts);
    result.least = at.low;
    result.greatest = at.high;
    return result;
}

inline Form Space::quotient(const Form &unreduced, Number divisor) {
    Form form = reduced(unreduced);
    Form base, rest;
    base.constant = floor_quotient(form.constant, divisor);
    rest.constant = remainder(form.constant, divisor);
    for (const Term &term : form.terms) {
        if (term.coefficient % divisor == 0)
            base.terms.push_back({term.variable, term.coefficient / divisor});
        else
            rest.terms.push_back(term);
    }
    if (rest.terms.empty())
        return base;
    Bounds at = bounds(rest);
    if (floor_quotient(at.low, divisor) == floor_quotient(at.high, divisor))
        return base.shifted(floor_quotient(at.low, divisor));
    if (std::optional<Form> parts = split(rest, divisor))
        return base.plus(*parts);
    if (at.high - at.low > kFar)
        return base.plus(variable(-kUnbounded, kUnbounded, true));
    return base.plus(variable(floor_quotient(at.low, divisor), floor_quotient(at.high, divisor), true));
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
    auto at = static_cast<std::size_t>(v);
    Number c = rest.terms.front().coefficient;
    if (c < 0 || divisor % c != 0 || hull[at] || high[at] > kFar || low[at] < -kFar)
        return std::nullopt;
    Number step = divisor / c;
    if (floor_quotient(rest.constant, c) != 0)
        return std::nullopt;
    Number from = low[at], to = high[at];
    Form single;
    single.terms.push_back({v, 1});
    if (step == 1)
        return single;
    Form whole = variable(floor_quotient(from, step), floor_quotient(to, step));
    if (whole.terms.empty())
        return whole;
    Form part = variable(0, step - 1);
    int q = whole.terms.front().variable, r = part.terms.front().variable;
    replaced_[at] = whole.scaled(step).plus(part);
    any_replaced_ = true;
    for (Composite &composite : composites_) {
        for (std::size_t i = 0; i < composite.parts.size(); ++i) {
            if (composite.parts[i].variable != v)
                continue;
            Number p = composite.parts[i].coefficient;
            composite.parts.erase(i);
            composite.parts.push_back({q, product(p, step)});
            composite.parts.push_back({r, p});
            ++member_of_[static_cast<std::size_t>(q)];
            ++member_of_[static_cast<std::size_t>(r)];
            break;
        }
    }
    if (remainder(from, step) != 0 || remainder(to + 1, step) != 0) {
        Terms parts;
        parts.push_back({r, 1});
        parts.push_back({q, step});
        compose(parts, from, to);
    }
    return whole;
}

inline std::optional<Number> Space::possible_bits(const Form &form) const {
    Bounds at = bounds(form);
    if (at.low < 0 || at.high > kFar)
        return std::nullopt;
    bool simple = form.constant >= 0;
    Number mask = simple ? form.constant : 0, ends = form.constant;
    for (const Term &term : form.terms) {
        ends |= term.coefficient;
        auto v = static_cast<std::size_t>(term.variable);
        if (term.coefficient < 0 || low[v] < 0)
            simple = false;
        if (!simple)
            continue;
        Number piece =
            (Number{1} << bit_length(term.coefficient * high[v])) - (Number{1} << trailing_zeros(term.coefficient));
        if ((mask & piece) != 0)
            simple = false;
        mask |= piece;
    }
    if (simple)
        return mask;
    int lowest = trailing_zeros(ends), length = bit_length(at.high);
    return length > lowest ? (Number{1} << length) - (Number{1} << lowest) : 0;
}

} // namespace access_templates
