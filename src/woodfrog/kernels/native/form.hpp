// Linear forms over numbered variables.
#pragma once

#include "arena.hpp"
#include "number.hpp"

namespace access_templates {

struct Term {
    int variable;
    Number coefficient;
};

/// A few terms in place, so that evaluating allocates little. More than that is TooLarge.
class Terms {
  public:
    static constexpr int kCapacity = 16;

    Terms() = default;
    Terms(const Terms &other) { *this = other; }
    Terms &operator=(const Terms &other) {
        size_ = other.size_;
        for (int i = 0; i < size_; ++i) // a handful: a loop is faster than a call
            items_[i] = other.items_[i];
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
    void add(const Form &other, Number factor = 1) {
        constant = sum(constant, product(factor, other.constant));
        for (const Term &term : other.terms)
            add(term.variable, product(term.coefficient, factor));
    }
    Form plus(const Form &other, Number factor = 1) const {
        Form result = *this;
        result.add(other, factor);
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

/// A form kept in an arena, in no more room than it needs.
struct Kept {
    Number constant;
    int count;

    static const Kept *of(Arena &arena, const Form &form) {
        char *memory = arena.take<char>(sizeof(Kept) + form.terms.size() * sizeof(Term));
        Kept *kept = new (memory) Kept{form.constant, static_cast<int>(form.terms.size())};
        std::copy(form.terms.begin(), form.terms.end(), reinterpret_cast<Term *>(kept + 1));
        return kept;
    }
    void add_to(Form &form, Number factor) const {
        form.constant = sum(form.constant, product(factor, constant));
        const Term *terms = reinterpret_cast<const Term *>(this + 1);
        for (int i = 0; i < count; ++i)
            form.add(terms[i].variable, product(terms[i].coefficient, factor));
    }
    Form form() const {
        Form result;
        result.constant = constant;
        const Term *terms = reinterpret_cast<const Term *>(this + 1);
        for (int i = 0; i < count; ++i)
            result.terms.push_back(terms[i]);
        return result;
    }
};

} // namespace access_templates
