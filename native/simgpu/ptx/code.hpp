// The decoded form of a function: an array of operations with resolved operands and branch targets.
// An operand is the byte offset of a row in the frame of a warp; a row holds one value for each of the 32 lanes, in the
// natural width of its type (a predicate row is one 32-bit mask). Constants and special registers are rows as well, so
// that every handler reads its operands in the same way. Immutable after decoding.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "syntax.hpp"

namespace simgpu::ptx {

class Warp;
struct Op;

/// One bit for each lane of a warp.
using Mask = std::uint32_t;
constexpr unsigned warp_size = 32;
constexpr Mask all_lanes = ~Mask{0};

using Handler = void (*)(Warp &, const Op &, Mask);

struct Op {
    Handler run = nullptr;
    std::uint32_t d = 0, a = 0, b = 0, c = 0, e = 0;
    std::uint32_t guard = 0;  ///< predicate row; 0: always
    std::uint32_t target = 0; ///< operation index of a branch; index of a call site or branch table
    std::uint32_t line = 0;
    std::int64_t immediate = 0;
    void (*helper)() = nullptr; ///< a second function of the handler's own choosing, cast to its real type there
    std::uint16_t detail = 0;   ///< meaning depends on the handler
    std::uint8_t extra = 0;     ///< meaning depends on the handler
    bool guard_negated = false;
};

/// Rows every frame begins with.
constexpr std::uint32_t no_row = 0;    ///< never a valid operand
constexpr std::uint32_t carry_row = 4; ///< the condition code of add.cc and its kin, a predicate row
constexpr std::uint32_t first_free_row = 64;

struct ConstantRow {
    std::uint32_t offset;
    std::uint8_t width; ///< 1, 2, 4, 8 bytes; 0 is a predicate (bits 0 or 1)
    std::uint64_t bits;
};

struct SymbolRow {
    enum class Kind : std::uint8_t { variable, shared, dynamic_shared };
    std::uint32_t offset;
    std::uint8_t width;
    Kind kind;
    std::uint32_t index; ///< into ModuleSyntax::variables, or the program's shared variables
    std::int64_t addend;
};

enum class Special : std::uint8_t {
    tid_x,
    tid_y,
    tid_z,
    ntid_x,
    ntid_y,
    ntid_z,
    ctaid_x,
    ctaid_y,
    ctaid_z,
    nctaid_x,
    nctaid_y,
    nctaid_z,
    laneid,
    warpid,
    nwarpid,
    smid,
    nsmid,
    gridid,
    lanemask_eq,
    lanemask_le,
    lanemask_lt,
    lanemask_ge,
    lanemask_gt,
    dynamic_smem_size,
    total_smem_size,
    clusterid_x,
    clusterid_y,
    clusterid_z,
    nclusterid_x,
    nclusterid_y,
    nclusterid_z,
    cluster_ctaid_x,
    cluster_ctaid_y,
    cluster_ctaid_z,
    cluster_nctaid_x,
    cluster_nctaid_y,
    cluster_nctaid_z,
    cluster_ctarank,
    cluster_nctarank,
    envreg1,
    envreg2,
    reserved_smem_0,
    reserved_smem_1,
    reserved_smem_end,
    zero32,
    zero64,
    is_explicit_cluster
};

struct SpecialRow {
    std::uint32_t offset;
    std::uint8_t width; ///< 4 or 8; 0 is a predicate
    Special special;
};

/// Where a function's parameter, or a variable of the .param space in its body, lies.
struct Slot {
    bool is_register = false;
    std::uint32_t offset = 0; ///< of the row, or within the frame's local memory
    std::uint32_t size_bytes = 0;
};

enum class Builtin : std::uint8_t { none, vprintf, assert_fail, heap_allocate, heap_free };

struct CallSite {
    std::uint32_t callee = 0; ///< function index of a direct call
    bool is_indirect = false; ///< the callee's address is in row `Op::a`
    Builtin builtin = Builtin::none;
    std::vector<Slot> arguments;
    std::vector<Slot> results;
};

struct Function {
    std::string name;
    std::uint32_t index = 0;
    bool is_entry = false;
    std::vector<Op> ops;
    std::uint32_t frame_bytes = first_free_row;
    std::uint32_t local_bytes = 0; ///< local memory of a lane in this frame
    std::vector<ConstantRow> constants;
    std::vector<SymbolRow> symbols;
    std::vector<SpecialRow> specials;
    std::vector<Slot> parameters; ///< of a device function
    std::vector<Slot> returns;
    std::vector<CallSite> calls;
    std::vector<std::vector<std::uint32_t>> branch_tables;
    std::vector<std::uint32_t> vector_rows; ///< operand lists longer than an Op holds
    std::vector<std::string> texts;         ///< messages of operations that always fault

    unsigned unsupported_line = 0; ///< of the first instruction that cannot be executed; 0: none
    std::string unsupported_text;
    bool must_run_in_order = false; ///< results could depend on the order of blocks (or it prints, or allocates)
};

} // namespace simgpu::ptx
