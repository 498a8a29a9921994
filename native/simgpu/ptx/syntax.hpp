// What the parser makes of PTX text: functions, variables, instructions, with positions and scopes but no meaning.
// All string_views point into the module's own copy of the text. Plain data; no behaviour beyond look-ups.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "ptx.hpp"

namespace simgpu::ptx {

enum class Type : std::uint8_t {
    none,
    pred,
    b8,
    b16,
    b32,
    b64,
    b128,
    u8,
    u16,
    u32,
    u64,
    s8,
    s16,
    s32,
    s64,
    f16,
    f16x2,
    bf16,
    bf16x2,
    tf32,
    f32,
    f64,
    u16x2,
    s16x2,
    e4m3x2,
    e5m2x2,
    opaque ///< .texref, .samplerref, .surfref
};

enum class Space : std::uint8_t { generic, reg, global, constant, local, shared, parameter };

/// `text` with its dot, e.g. ".u32"; Type::none when it is no type.
Type type_named(std::string_view text) noexcept;
std::size_t size_of(Type type) noexcept; ///< bytes; a predicate counts 1
bool is_float(Type type) noexcept;       ///< any floating type, packed or not
bool is_signed(Type type) noexcept;      ///< s8 … s64

struct Operand {
    enum class Kind : std::uint8_t {
        name,    ///< register, special register, variable, label or function
        integer, ///< bits, two's complement
        real32,  ///< bits
        real64,  ///< bits
        vector,  ///< {a, b}; elements
        list,    ///< (a, b); elements
        address, ///< [base + offset]; elements[0] is the base when there is one, further elements are extra coordinates
        pair,    ///< a|b; elements
        sink     ///< _
    };

    Kind kind = Kind::sink;
    bool negated = false; ///< !p
    std::string_view name;
    std::uint64_t bits = 0;
    std::int64_t offset = 0;
    std::vector<Operand> elements;
};

struct Instruction {
    unsigned line = 0;
    unsigned column = 0;
    std::uint32_t scope = 0;
    std::string_view guard; ///< empty: always executed
    bool guard_negated = false;
    std::string_view text;                   ///< opcode with modifiers, as written
    std::string_view opcode;                 ///< the first piece
    std::vector<std::string_view> modifiers; ///< the other pieces, without dots
    std::vector<Operand> operands;

    bool has(std::string_view modifier) const noexcept {
        for (const auto &m : modifiers)
            if (m == modifier)
                return true;
        return false;
    }
};

struct Declaration {
    std::string_view name;
    Space space = Space::reg;
    Type type = Type::none;
    unsigned vector_width = 1;
    std::uint32_t range = 0; ///< %r<N>: N registers name0 … name(N-1); 0: one register
    std::size_t alignment_bytes = 1;
    std::size_t size_bytes = 0;
    bool is_array = false;
    bool is_extern = false;
    unsigned line = 0;
};

struct Symbol {
    enum class Kind : std::uint8_t { variable, label, targets, prototype };
    Kind kind = Kind::variable;
    std::uint32_t index = 0; ///< into declarations, instructions (label) or branch_targets
};

struct Scope {
    std::uint32_t parent = 0; ///< the outermost scope is its own parent
    std::unordered_map<std::string_view, Symbol> symbols;
};

struct FunctionSyntax {
    std::string_view name;
    unsigned line = 0;
    bool is_entry = false;
    bool has_body = false;
    std::vector<std::uint32_t> returns;    ///< into declarations
    std::vector<std::uint32_t> parameters; ///< into declarations
    std::vector<Declaration> declarations;
    std::vector<Instruction> instructions;
    std::vector<std::vector<std::string_view>> branch_targets;
    std::vector<Scope> scopes;
    std::array<unsigned, 3> maximum_block{};
    std::array<unsigned, 3> required_block{};
    std::array<unsigned, 3> required_cluster{};

    /// The symbol `name` as seen from `scope`; `register_index` is set for a member of a register range. nullptr:
    /// unknown.
    const Symbol *find(std::uint32_t scope, std::string_view symbol_name, std::uint32_t *register_index) const noexcept;
};

struct ModuleSyntax {
    unsigned version = 0;
    std::string_view target;
    std::vector<Variable> variables;       ///< .global and .const
    std::vector<Declaration> shared;       ///< module-scope .shared
    std::vector<FunctionSyntax> functions; ///< one per name; a definition replaces its declaration
    std::unordered_map<std::string_view, std::uint32_t> function_index;
    std::unordered_map<std::string_view, std::uint32_t> variable_index;
    std::unordered_map<std::string_view, std::uint32_t> shared_index;
};

/// Parses a whole module. `text` must outlive the result. Throws ParseError.
ModuleSyntax parse_module(std::string_view text);

/// The number that stands for a function in 64-bit registers and memory (an address that Memory never sees).
std::uint64_t function_address(std::uint32_t function_index) noexcept;

} // namespace simgpu::ptx
