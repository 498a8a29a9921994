// The generated part of a catalogue: templates as tables of numbers. All indices are into the tables of one template.
#pragma once

#include <cstdint>

#include "number.hpp"

namespace access_templates {

enum class AtomKind {
    param,
    paramat,
    special,
    lane,
    loop,
    unknown,
    load,
    either,
    select,
    ext,
    floordiv,
    truncdiv,
    bit_and,
    bit_or,
    bit_xor,
    min,
    max,
    pow2,
    upto,
    symbol,
    window
};
enum class Op { yes, no, unknown, all, any, compare };
enum class Relation { lt, le, gt, ge, eq, ne };

/// param: a offset, b bytes. paramat: a polynomial, b bytes. special: a register (0 tid, 1 ntid, 2 ctaid, 3 nctaid), b
/// axis. lane: a values from 0 on. loop: a number. unknown: low, high. load: a polynomial,
/// b bytes, c signed, low, high. either: a first in lists, b count of polynomials, c first gate in lists or
/// -1. select: a condition, b and c polynomials. ext: a polynomial, b width, c signed. pow2: a polynomial, b width.
/// symbol: a number. Others: a and b polynomials.
struct Atom {
    AtomKind kind;
    int a, b, c;
    Number low, high;
};

struct Monomial {
    Number coefficient;
    int first, count; // atoms, in lists
};

struct Poly {
    int first, count; // in monomials
};

/// all, any: a first in lists, b count of conditions. compare: a, b polynomials.
struct Condition {
    Op op;
    int a, b;
    Relation relation;
    int width;
    bool is_signed;
};

/// A condition, or a loop where loop >= 0.
struct Step {
    int loop, condition;
};

struct Loop {
    int first, count; // conditions, in lists
    bool complete;
};

struct Gate {
    int first, count; // in steps
    bool complete;
};

struct Access {
    int kind;          // 0 load, 1 store, 2 atomic
    int address, size; // polynomials, -1: anywhere
    int node;          // the last of its steps, -1: none
    bool complete;
    int first_load, load_count; // pairs of a load that it depends on and the load's size, in lists; inner ones first
    Number offset;              // to be added to the address
    int first_part, part_count; // accesses that it stands for, which are looked at where it is not exact itself
};

/// Steps as a tree: accesses share the steps that they begin with.
struct Node {
    int parent; // -1: none
    Step step;
};

struct Template {
    const Atom *atoms;
    int atom_count;
    const Monomial *monomials;
    const Poly *polys;
    const Condition *conditions;
    const Step *steps;
    const Loop *loops;
    int loop_count;
    const Gate *gates;
    const Node *nodes;
    int node_count;
    const Access *accesses;
    int access_count; // parts of others, which come behind, do not count
    const int *lists;
    std::int64_t parameters_bytes;
    int ranges_each;        // that one access is split into at most
    std::uint32_t block[3]; // the dimensions that blocks must have; zeros: any
};

} // namespace access_templates
