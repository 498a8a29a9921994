// Operands: from names, literals and addresses to the rows that operations read and write.
#include <bit>
#include <utility>

#include "decode.hpp"
#include "half.hpp"
#include "program.hpp"

namespace simgpu::ptx {

namespace {

/// The special register of this name, or nullptr. A plain table, so that threads may use it while the program exits.
const Special *find_special(std::string_view wanted) {
    static constexpr std::pair<std::string_view, Special> names[] = {
        {"%tid.x", Special::tid_x},
        {"%tid.y", Special::tid_y},
        {"%tid.z", Special::tid_z},
        {"%ntid.x", Special::ntid_x},
        {"%ntid.y", Special::ntid_y},
        {"%ntid.z", Special::ntid_z},
        {"%ctaid.x", Special::ctaid_x},
        {"%ctaid.y", Special::ctaid_y},
        {"%ctaid.z", Special::ctaid_z},
        {"%nctaid.x", Special::nctaid_x},
        {"%nctaid.y", Special::nctaid_y},
        {"%nctaid.z", Special::nctaid_z},
        {"%laneid", Special::laneid},
        {"%warpid", Special::warpid},
        {"%nwarpid", Special::nwarpid},
        {"%smid", Special::smid},
        {"%nsmid", Special::nsmid},
        {"%gridid", Special::gridid},
        {"%lanemask_eq", Special::lanemask_eq},
        {"%lanemask_le", Special::lanemask_le},
        {"%lanemask_lt", Special::lanemask_lt},
        {"%lanemask_ge", Special::lanemask_ge},
        {"%lanemask_gt", Special::lanemask_gt},
        {"%dynamic_smem_size", Special::dynamic_smem_size},
        {"%total_smem_size", Special::total_smem_size},
        {"%aggr_smem_size", Special::total_smem_size},
        {"%clusterid.x", Special::clusterid_x},
        {"%clusterid.y", Special::clusterid_y},
        {"%clusterid.z", Special::clusterid_z},
        {"%nclusterid.x", Special::nclusterid_x},
        {"%nclusterid.y", Special::nclusterid_y},
        {"%nclusterid.z", Special::nclusterid_z},
        {"%cluster_ctaid.x", Special::cluster_ctaid_x},
        {"%cluster_ctaid.y", Special::cluster_ctaid_y},
        {"%cluster_ctaid.z", Special::cluster_ctaid_z},
        {"%cluster_nctaid.x", Special::cluster_nctaid_x},
        {"%cluster_nctaid.y", Special::cluster_nctaid_y},
        {"%cluster_nctaid.z", Special::cluster_nctaid_z},
        {"%cluster_ctarank", Special::cluster_ctarank},
        {"%cluster_nctarank", Special::cluster_nctarank},
        {"%is_explicit_cluster", Special::is_explicit_cluster},
        {"%envreg1", Special::envreg1},
        {"%envreg2", Special::envreg2},
        {"%current_graph_exec", Special::zero64},
        {"%reserved_smem_offset_begin", Special::reserved_smem_0},
        {"%reserved_smem_offset_0", Special::reserved_smem_0},
        {"%reserved_smem_offset_1", Special::reserved_smem_1},
        {"%reserved_smem_offset_end", Special::reserved_smem_end},
        {"%reserved_smem_offset_cap", Special::reserved_smem_end}};
    for (const auto &[name, special] : names)
        if (name == wanted)
            return &special;
    return nullptr;
}

/// The bits of a literal in an instruction of this type.
std::uint64_t literal_bits(const Operand &operand, Type type) {
    if (operand.kind == Operand::Kind::integer) {
        if (type == Type::f32)
            return std::bit_cast<std::uint32_t>(static_cast<float>(static_cast<std::int64_t>(operand.bits)));
        if (type == Type::f64)
            return std::bit_cast<std::uint64_t>(static_cast<double>(static_cast<std::int64_t>(operand.bits)));
        return operand.bits;
    }
    const double value = operand.kind == Operand::Kind::real32
                             ? static_cast<double>(std::bit_cast<float>(static_cast<std::uint32_t>(operand.bits)))
                             : std::bit_cast<double>(operand.bits);
    switch (type) {
    case Type::f16:
        return half_from_double(value, Rounding::nearest);
    case Type::bf16:
        return bfloat_from_double(value, Rounding::nearest);
    case Type::f64:
        return operand.kind == Operand::Kind::real64 ? operand.bits : std::bit_cast<std::uint64_t>(value);
    case Type::f32:
    case Type::tf32:
    case Type::b32:
        return operand.kind == Operand::Kind::real32 ? operand.bits
                                                     : std::bit_cast<std::uint32_t>(static_cast<float>(value));
    default:
        return operand.bits;
    }
}

} // namespace

bool Decoder::find_register(const Operand &operand, Register &found) {
    if (operand.kind != Operand::Kind::name || operand.offset != 0)
        return false;
    std::uint32_t member = 0;
    const Symbol *symbol = syntax_.find(current_->scope, operand.name, &member);
    if (symbol == nullptr || symbol->kind != Symbol::Kind::variable)
        return false;
    const Declaration &declaration = syntax_.declarations[symbol->index];
    if (declaration.space != Space::reg)
        return false;
    require(declaration.vector_width == 1, "vector registers");
    const std::size_t width = declaration.type == Type::pred ? 0 : size_of(declaration.type);
    const auto [place, is_new] = registers_.try_emplace({symbol->index, member}, 0);
    if (is_new)
        place->second = width == 0 ? temporary_predicate() : temporary(width);
    found = {place->second, width};
    return true;
}

bool Decoder::find_slot(const Operand &operand, Slot &found) {
    if (operand.kind != Operand::Kind::name)
        return false;
    const Symbol *symbol = syntax_.find(current_->scope, operand.name, nullptr);
    if (symbol == nullptr || symbol->kind != Symbol::Kind::variable)
        return false;
    const auto slot = slots_.find(symbol->index);
    if (slot == slots_.end())
        return false;
    found = slot->second;
    return true;
}

bool Decoder::find_symbol(const Operand &operand, SymbolRow &found) {
    if (operand.kind != Operand::Kind::name)
        return false;
    if (const Symbol *symbol = syntax_.find(current_->scope, operand.name, nullptr)) {
        if (symbol->kind != Symbol::Kind::variable)
            return false;
        if (syntax_.declarations[symbol->index].space != Space::shared)
            return false;
        const std::uint32_t shared = program_.shared_of_function(function_.index, symbol->index);
        found = {0, 8, SymbolRow::Kind::shared, shared, 0};
        return true;
    }
    const ModuleSyntax &module = program_.syntax();
    if (const auto variable = module.variable_index.find(operand.name); variable != module.variable_index.end()) {
        found = {0, 8, SymbolRow::Kind::variable, variable->second, 0};
        return true;
    }
    if (const auto shared = module.shared_index.find(operand.name); shared != module.shared_index.end()) {
        found = {0, 8, SymbolRow::Kind::shared, program_.shared_of_module(shared->second), 0};
        return true;
    }
    return false;
}

std::int64_t Decoder::function_named(const Operand &operand) const {
    if (operand.kind != Operand::Kind::name)
        return -1;
    const auto &index = program_.syntax().function_index;
    const auto found = index.find(operand.name);
    return found == index.end() ? -1 : static_cast<std::int64_t>(found->second);
}

std::uint32_t Decoder::address_of(const Operand &operand, std::size_t width_bytes) {
    Slot slot;
    if (find_slot(operand, slot)) {
        const std::uint32_t into = temporary(width_bytes);
        Op &op = emit(run_slot_address, into);
        op.immediate = static_cast<std::int64_t>(slot.offset) + operand.offset;
        op.extra = static_cast<std::uint8_t>(width_bytes);
        return into;
    }
    if (const Symbol *symbol = syntax_.find(current_->scope, operand.name, nullptr);
        symbol != nullptr && symbol->kind == Symbol::Kind::variable &&
        syntax_.declarations[symbol->index].space == Space::parameter && syntax_.is_entry) {
        for (std::size_t i = 0; i < syntax_.parameters.size(); ++i) {
            if (syntax_.parameters[i] == symbol->index)
                return constant(width_bytes,
                                static_cast<std::uint64_t>(function_.parameters[i].offset + operand.offset));
        }
    }
    SymbolRow symbol{};
    if (find_symbol(operand, symbol)) {
        symbol.width = static_cast<std::uint8_t>(width_bytes);
        symbol.addend = operand.offset;
        for (const SymbolRow &known : function_.symbols) {
            if (known.kind == symbol.kind && known.index == symbol.index && known.width == symbol.width &&
                known.addend == symbol.addend)
                return known.offset;
        }
        symbol.offset = temporary(width_bytes);
        function_.symbols.push_back(symbol);
        return symbol.offset;
    }
    if (const std::int64_t callee = function_named(operand); callee >= 0)
        return constant(width_bytes, function_address(static_cast<std::uint32_t>(callee)));
    throw Unsupported{"unknown name " + std::string(operand.name)};
}

Decoder::Address Decoder::address(const Operand &operand) {
    Address result;
    require(operand.kind == Operand::Kind::address, "an operand that is no address");
    result.offset = operand.offset;
    if (operand.elements.empty()) {
        result.is_constant = true;
        return result;
    }
    const Operand &base = operand.elements.front();
    Register found{};
    if (find_register(base, found)) {
        require(found.width_bytes == 4 || found.width_bytes == 8,
                "an address register that is neither 32 nor 64 bits wide");
        result.row = found.offset;
        result.width_bytes = found.width_bytes;
        return result;
    }
    Slot slot;
    if (find_slot(base, slot)) {
        require(!slot.is_register, "the address of a register");
        result.is_slot = true;
        result.offset += slot.offset;
        return result;
    }
    if (const Symbol *symbol = syntax_.find(current_->scope, base.name, nullptr);
        symbol != nullptr && symbol->kind == Symbol::Kind::variable && syntax_.is_entry &&
        syntax_.declarations[symbol->index].space == Space::parameter) {
        for (std::size_t i = 0; i < syntax_.parameters.size(); ++i) {
            if (syntax_.parameters[i] == symbol->index) {
                result.is_kernel_parameter = true;
                result.offset += function_.parameters[i].offset;
                return result;
            }
        }
    }
    result.row = address_of(base, 8);
    return result;
}

std::uint32_t Decoder::source(const Operand &operand, Type type) {
    const std::size_t width = size_of(type);
    if (type == Type::pred)
        return predicate(operand);
    require(width != 0, "an operand without a type");
    switch (operand.kind) {
    case Operand::Kind::integer:
    case Operand::Kind::real32:
    case Operand::Kind::real64:
        return constant(width, literal_bits(operand, type));
    case Operand::Kind::name:
        break;
    default:
        throw Unsupported{"this kind of operand"};
    }
    Register found{};
    if (find_register(operand, found)) {
        if (found.width_bytes == width)
            return found.offset;
        require(found.width_bytes > width, "an operand narrower than the instruction's type");
        const std::uint32_t into = temporary(width);
        emit(narrow_handler(found.width_bytes, width), into, found.offset);
        return into;
    }
    if (operand.name == "WARP_SZ")
        return constant(width, warp_size);
    if (const Special *which = find_special(operand.name)) {
        if (width == 4 || width == 8)
            return special(*which, width);
        require(width == 2, "a special register of this width");
        const std::uint32_t into = temporary(width);
        emit(narrow_handler(4, width), into, special(*which, 4));
        return into;
    }
    if (operand.name.starts_with("%envreg"))
        return constant(width, 0);
    require(!operand.name.starts_with('%'), "this register or special register");
    return address_of(operand, width);
}

std::uint32_t Decoder::predicate(const Operand &operand) {
    if (operand.kind == Operand::Kind::integer)
        return constant(0, operand.bits != 0 ? 1 : 0);
    Register found{};
    if (!find_register(operand, found)) {
        require(operand.kind == Operand::Kind::name && operand.name == "%is_explicit_cluster",
                "an operand that is no predicate");
        found = {special(Special::is_explicit_cluster, 0), 0};
    }
    require(found.width_bytes == 0, "an operand that is no predicate");
    if (!operand.negated)
        return found.offset;
    const std::uint32_t into = temporary_predicate();
    emit(run_predicate_not, into, found.offset);
    return into;
}

std::uint32_t Decoder::predicate_destination(const Operand &operand) {
    if (operand.kind == Operand::Kind::sink)
        return temporary_predicate();
    Register found{};
    require(find_register(operand, found) && found.width_bytes == 0, "a destination that is no predicate");
    return found.offset;
}

std::uint32_t Decoder::destination(const Operand &operand, Type type) {
    const std::size_t width = size_of(type);
    if (type == Type::pred)
        return predicate_destination(operand);
    require(width != 0, "a destination without a type");
    if (operand.kind == Operand::Kind::sink)
        return temporary(width);
    Register found{};
    require(find_register(operand, found), "a destination that is no register");
    if (found.width_bytes == width)
        return found.offset;
    require(found.width_bytes > width, "a destination narrower than the instruction's type");
    const std::uint32_t from = temporary(width);
    extensions_.push_back({from, found.offset, width, found.width_bytes, is_signed(type)});
    return from;
}

std::uint32_t Decoder::label(const Instruction &instruction, const Operand &operand) {
    require(operand.kind == Operand::Kind::name, "a branch target that is no label");
    const Symbol *symbol = syntax_.find(instruction.scope, operand.name, nullptr);
    if (symbol == nullptr || symbol->kind != Symbol::Kind::label)
        throw Unsupported{"unknown label " + std::string(operand.name)};
    return symbol->index;
}

std::vector<std::uint32_t> Decoder::branch_table(const Instruction &instruction, const Operand &operand) {
    const Symbol *symbol =
        operand.kind == Operand::Kind::name ? syntax_.find(instruction.scope, operand.name, nullptr) : nullptr;
    require(symbol != nullptr && symbol->kind == Symbol::Kind::targets, "a branch without a list of targets");
    std::vector<std::uint32_t> result;
    for (const auto &target : syntax_.branch_targets[symbol->index]) {
        Operand name;
        name.kind = Operand::Kind::name;
        name.name = target;
        result.push_back(label(instruction, name));
    }
    return result;
}

} // namespace simgpu::ptx
