// Turns the syntax of one function into operations. The families of instructions are in files of their own; each offers
// `bool decode_…(Decoder&, const Instruction&)`, which returns false when the opcode is not one of its own and throws
// Unsupported for a form it does not implement.
#pragma once

#include <initializer_list>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "code.hpp"

namespace simgpu::ptx {

class Program;

/// This instruction cannot be executed. It becomes an operation that faults, and the function is marked.
struct Unsupported {
    std::string reason;
};

class Decoder {
  public:
    Decoder(Program &program, const FunctionSyntax &syntax, Function &into);
    void run();

    // --- what families use -------------------------------------------------------------------------------------------
    const FunctionSyntax &syntax() const noexcept { return syntax_; }
    Function &function() noexcept { return function_; }
    bool is_entry() const noexcept { return syntax_.is_entry; }
    Program &program() noexcept { return program_; }

    /// Appends an operation guarded like the current instruction.
    Op &emit(Handler run, std::uint32_t d = 0, std::uint32_t a = 0, std::uint32_t b = 0, std::uint32_t c = 0,
             std::uint32_t e = 0);

    /// Row with the operand's value in the width of `type`; literals are converted to the type.
    std::uint32_t source(const Operand &operand, Type type);
    /// Row the operation must write in the width of `type`. A wider register is filled after the operation by sign or
    /// zero extension. A sink gets a row nobody reads.
    std::uint32_t destination(const Operand &operand, Type type);
    /// Predicate row of `p` or `!p`.
    std::uint32_t predicate(const Operand &operand);
    std::uint32_t predicate_destination(const Operand &operand);

    std::uint32_t temporary(std::size_t width_bytes);
    std::uint32_t temporary_predicate();
    std::uint32_t constant(std::size_t width_bytes, std::uint64_t bits);
    std::uint32_t special(Special which, std::size_t width_bytes);

    struct Register {
        std::uint32_t offset;
        std::size_t width_bytes; ///< 0: predicate
    };
    /// The register an operand names, or nothing.
    bool find_register(const Operand &operand, Register &found);
    /// A variable of the .local or .param space in this function: its slot. False when the name is something else.
    bool find_slot(const Operand &operand, Slot &found);
    bool find_symbol(const Operand &operand, SymbolRow &found);
    /// Row with the address of a symbol, register + offset or number, `width` bytes wide (4 or 8).
    struct Address {
        std::uint32_t row = 0;
        std::size_t width_bytes = 8;
        std::int64_t offset = 0;
        bool is_constant = false;         ///< no row: `offset` is the whole address
        bool is_slot = false;             ///< the base is the frame's local memory and `offset` counts from there
        bool is_kernel_parameter = false; ///< `offset` counts from the kernel's parameter block
    };
    Address address(const Operand &operand);
    /// Row (8 bytes) with the generic or space-relative address that naming the symbol yields.
    std::uint32_t address_of(const Operand &operand, std::size_t width_bytes);

    std::uint32_t label(const Instruction &instruction, const Operand &operand);
    std::vector<std::uint32_t> branch_table(const Instruction &instruction, const Operand &operand);
    /// Index of the function an operand names, -1 for none.
    std::int64_t function_named(const Operand &operand) const;
    void fix_branch(std::uint32_t op_index, std::uint32_t instruction_index);

    const Instruction &current() const noexcept { return *current_; }
    std::uint32_t position() const noexcept { return static_cast<std::uint32_t>(function_.ops.size()); }
    bool is_read(const Operand &operand); ///< does any instruction read the register?

  private:
    struct Extension {
        std::uint32_t from, to;
        std::size_t from_bytes, to_bytes;
        bool is_signed;
    };
    void declare_slots();
    void instruction(const Instruction &instruction);
    std::uint32_t allocate(std::size_t bytes, std::size_t alignment);
    void count_reads();

    Program &program_;
    const FunctionSyntax &syntax_;
    Function &function_;
    const Instruction *current_ = nullptr;
    std::uint32_t guard_ = 0;
    std::vector<Extension> extensions_;
    std::map<std::pair<std::uint32_t, std::uint32_t>, std::uint32_t> registers_; ///< (declaration, index) → row
    std::map<std::uint32_t, Slot> slots_;                                        ///< declaration → slot
    std::map<std::pair<std::size_t, std::uint64_t>, std::uint32_t> constants_;
    std::map<std::pair<Special, std::size_t>, std::uint32_t> specials_;
    std::map<std::pair<std::uint32_t, std::uint32_t>, std::uint32_t> reads_;
    std::vector<std::uint32_t> instruction_start_;                  ///< operation index of each instruction
    std::vector<std::pair<std::uint32_t, std::uint32_t>> branches_; ///< operation, instruction index
    bool reads_counted_ = false;
};

/// The instruction's types, in order; Type::none where there are fewer.
struct Types {
    Type first = Type::none, second = Type::none, third = Type::none;
};
Types types_of(const Instruction &instruction) noexcept;
/// Throws Unsupported for a modifier that is neither a type nor in `allowed`, and unless there are `count` operands
/// (negative: at least -count).
void check_form(const Instruction &instruction, std::initializer_list<std::string_view> allowed, int count);
void require(bool condition, const char *reason);

bool decode_integer(Decoder &decoder, const Instruction &instruction);
bool decode_bitwise(Decoder &decoder, const Instruction &instruction);
bool decode_float(Decoder &decoder, const Instruction &instruction);
bool decode_half(Decoder &decoder, const Instruction &instruction);
bool decode_compare(Decoder &decoder, const Instruction &instruction);
bool decode_convert(Decoder &decoder, const Instruction &instruction);
bool decode_move(Decoder &decoder, const Instruction &instruction);
bool decode_memory(Decoder &decoder, const Instruction &instruction);
bool decode_atomic(Decoder &decoder, const Instruction &instruction);
bool decode_control(Decoder &decoder, const Instruction &instruction);
bool decode_warp(Decoder &decoder, const Instruction &instruction);

/// The address space that a memory instruction names.
enum class AddressKind : std::uint8_t;
AddressKind address_kind(const Decoder &decoder, const Instruction &instruction);

// Handlers used by several files.
Handler copy_handler(std::size_t width_bytes);
void run_nothing(Warp &warp, const Op &op, Mask mask);
Handler extend_handler(std::size_t from_bytes, std::size_t to_bytes, bool is_signed);
Handler narrow_handler(std::size_t from_bytes, std::size_t to_bytes);
void run_unsupported(Warp &warp, const Op &op, Mask mask);
void run_slot_address(Warp &warp, const Op &op, Mask mask);
void run_predicate_not(Warp &warp, const Op &op, Mask mask);

} // namespace simgpu::ptx
