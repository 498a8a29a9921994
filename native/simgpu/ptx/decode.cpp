// The part of decoding that all instructions share: rows for registers, constants and symbols, guards, labels.
#include "decode.hpp"

#include <bit>

#include "half.hpp"
#include "program.hpp"

namespace simgpu::ptx {

namespace {

const std::unordered_map<std::string_view, Special> &special_registers() {
    static const std::unordered_map<std::string_view, Special> names{
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
    return names;
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

void require(bool condition, const char *reason) {
    if (!condition)
        throw Unsupported{reason};
}

Types types_of(const Instruction &instruction) noexcept {
    Types result;
    for (const auto &modifier : instruction.modifiers) {
        // The modifier is a view into the text right behind its dot.
        const Type type = type_named(std::string_view(modifier.data() - 1, modifier.size() + 1));
        if (type == Type::none)
            continue;
        if (result.first == Type::none)
            result.first = type;
        else if (result.second == Type::none)
            result.second = type;
        else if (result.third == Type::none)
            result.third = type;
    }
    return result;
}

void check_form(const Instruction &instruction, std::initializer_list<std::string_view> allowed, int count) {
    for (const auto &modifier : instruction.modifiers) {
        bool known = type_named(std::string_view(modifier.data() - 1, modifier.size() + 1)) != Type::none;
        for (const auto &candidate : allowed)
            known = known || modifier == candidate;
        if (!known)
            throw Unsupported{"modifier ." + std::string(modifier)};
    }
    const int operands = static_cast<int>(instruction.operands.size());
    if (count >= 0 ? operands != count : operands < -count)
        throw Unsupported{"this number of operands"};
}

Decoder::Decoder(Program &program, const FunctionSyntax &syntax, Function &into)
    : program_(program), syntax_(syntax), function_(into) {}

std::uint32_t Decoder::allocate(std::size_t bytes, std::size_t alignment) {
    const std::size_t offset = (function_.frame_bytes + alignment - 1) & ~(alignment - 1);
    if (offset + bytes > (1u << 30))
        throw Unsupported{"more registers than a frame may have"};
    function_.frame_bytes = static_cast<std::uint32_t>(offset + bytes);
    return static_cast<std::uint32_t>(offset);
}

std::uint32_t Decoder::temporary(std::size_t width_bytes) {
    return allocate(width_bytes * warp_size, 32);
}
std::uint32_t Decoder::temporary_predicate() {
    return allocate(sizeof(Mask), sizeof(Mask));
}

std::uint32_t Decoder::constant(std::size_t width_bytes, std::uint64_t bits) {
    if (width_bytes < 8 && width_bytes != 0)
        bits &= (std::uint64_t{1} << (8 * width_bytes)) - 1;
    const auto [found, is_new] = constants_.try_emplace({width_bytes, bits}, 0);
    if (is_new) {
        found->second = width_bytes == 0 ? temporary_predicate() : temporary(width_bytes);
        function_.constants.push_back({found->second, static_cast<std::uint8_t>(width_bytes), bits});
    }
    return found->second;
}

std::uint32_t Decoder::special(Special which, std::size_t width_bytes) {
    const auto [found, is_new] = specials_.try_emplace({which, width_bytes}, 0);
    if (is_new) {
        found->second = width_bytes == 0 ? temporary_predicate() : temporary(width_bytes);
        function_.specials.push_back({found->second, static_cast<std::uint8_t>(width_bytes), which});
    }
    return found->second;
}

Op &Decoder::emit(Handler run, std::uint32_t d, std::uint32_t a, std::uint32_t b, std::uint32_t c, std::uint32_t e) {
    Op op;
    op.run = run;
    op.d = d;
    op.a = a;
    op.b = b;
    op.c = c;
    op.e = e;
    op.guard = guard_;
    op.guard_negated = current_ != nullptr && current_->guard_negated;
    op.line = current_ != nullptr ? current_->line : syntax_.line;
    function_.ops.push_back(op);
    return function_.ops.back();
}

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
    if (const auto special_register = special_registers().find(operand.name);
        special_register != special_registers().end()) {
        if (width == 4 || width == 8)
            return special(special_register->second, width);
        require(width == 2, "a special register of this width");
        const std::uint32_t into = temporary(width);
        emit(narrow_handler(4, width), into, special(special_register->second, 4));
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

void Decoder::count_reads() {
    reads_counted_ = true;
    const Instruction *keep = current_;
    const auto visit = [&](const auto &self, const Operand &operand) -> void {
        if (operand.kind == Operand::Kind::name) {
            std::uint32_t member = 0;
            const Symbol *symbol = syntax_.find(current_->scope, operand.name, &member);
            if (symbol != nullptr && symbol->kind == Symbol::Kind::variable)
                ++reads_[{symbol->index, member}];
        }
        for (const auto &element : operand.elements)
            self(self, element);
    };
    for (const auto &instruction : syntax_.instructions) {
        current_ = &instruction;
        for (const auto &operand : instruction.operands)
            visit(visit, operand);
        Operand guard;
        guard.kind = Operand::Kind::name;
        guard.name = instruction.guard;
        if (!instruction.guard.empty())
            visit(visit, guard);
    }
    current_ = keep;
}

bool Decoder::is_read(const Operand &operand) {
    if (operand.kind != Operand::Kind::name)
        return false;
    if (!reads_counted_)
        count_reads();
    std::uint32_t member = 0;
    const Symbol *symbol = syntax_.find(current_->scope, operand.name, &member);
    if (symbol == nullptr || symbol->kind != Symbol::Kind::variable)
        return true;
    // The destination itself counts once, so one appearance means that nothing reads the register.
    return reads_[{symbol->index, member}] > 1;
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

void Decoder::fix_branch(std::uint32_t op_index, std::uint32_t instruction_index) {
    branches_.emplace_back(op_index, instruction_index);
}

void Decoder::declare_slots() {
    std::size_t local = 0;
    const auto place = [&](const Declaration &declaration) {
        const std::size_t alignment = declaration.alignment_bytes == 0 ? 1 : declaration.alignment_bytes;
        local = (local + alignment - 1) & ~(alignment - 1);
        Slot slot;
        slot.offset = static_cast<std::uint32_t>(local);
        slot.size_bytes = static_cast<std::uint32_t>(declaration.size_bytes);
        local += declaration.size_bytes;
        if (local > (1u << 24))
            throw Unsupported{"more local memory than a thread can have"};
        return slot;
    };
    std::vector<bool> is_kernel_parameter(syntax_.declarations.size());
    if (syntax_.is_entry) {
        std::size_t offset = 0;
        for (const std::uint32_t index : syntax_.parameters) {
            const Declaration &declaration = syntax_.declarations[index];
            const std::size_t alignment = declaration.alignment_bytes == 0 ? 1 : declaration.alignment_bytes;
            offset = (offset + alignment - 1) & ~(alignment - 1);
            function_.parameters.push_back(
                {false, static_cast<std::uint32_t>(offset), static_cast<std::uint32_t>(declaration.size_bytes)});
            offset += declaration.size_bytes;
            is_kernel_parameter[index] = true;
        }
    }
    for (std::uint32_t i = 0; i < syntax_.declarations.size(); ++i) {
        const Declaration &declaration = syntax_.declarations[i];
        if (is_kernel_parameter[i])
            continue;
        if (declaration.space == Space::local || declaration.space == Space::parameter)
            slots_[i] = place(declaration);
    }
    const auto slot_of = [&](std::uint32_t index) {
        const Declaration &declaration = syntax_.declarations[index];
        if (declaration.space != Space::reg)
            return slots_[index];
        const std::size_t width = declaration.type == Type::pred ? 0 : size_of(declaration.type);
        const auto [found, is_new] = registers_.try_emplace({index, 0}, 0);
        if (is_new)
            found->second = width == 0 ? temporary_predicate() : temporary(width);
        return Slot{true, found->second, static_cast<std::uint32_t>(width)};
    };
    if (!syntax_.is_entry)
        for (const std::uint32_t index : syntax_.parameters)
            function_.parameters.push_back(slot_of(index));
    for (const std::uint32_t index : syntax_.returns)
        function_.returns.push_back(slot_of(index));
    function_.local_bytes = static_cast<std::uint32_t>((local + 15) & ~std::size_t{15});
}

void Decoder::instruction(const Instruction &instruction) {
    static constexpr bool (*families[])(Decoder &, const Instruction &) = {
        decode_control, decode_move,    decode_memory,  decode_half,   decode_float,
        decode_integer, decode_compare, decode_convert, decode_atomic, decode_warp};
    const std::size_t first_op = function_.ops.size();
    const std::size_t first_branch = branches_.size();
    try {
        guard_ = 0;
        if (!instruction.guard.empty()) {
            Operand guard;
            guard.kind = Operand::Kind::name;
            guard.name = instruction.guard;
            guard_ = predicate(guard);
        }
        bool done = false;
        for (const auto family : families) {
            done = family(*this, instruction);
            if (done)
                break;
        }
        if (!done)
            throw Unsupported{"this instruction"};
        for (const Extension &extension : extensions_)
            emit(extend_handler(extension.from_bytes, extension.to_bytes, extension.is_signed), extension.to,
                 extension.from);
    } catch (const Unsupported &error) {
        function_.ops.resize(first_op);
        branches_.resize(first_branch);
        Op &op = emit(run_unsupported);
        op.target = static_cast<std::uint32_t>(function_.texts.size());
        function_.texts.push_back(std::string(instruction.text) + ": " + error.reason);
        if (function_.unsupported_line == 0) {
            function_.unsupported_line = instruction.line;
            function_.unsupported_text = function_.texts.back();
        }
    }
    extensions_.clear();
}

void Decoder::run() {
    try {
        declare_slots();
    } catch (const Unsupported &error) {
        function_.unsupported_line = syntax_.line;
        function_.unsupported_text = error.reason;
    }
    instruction_start_.reserve(syntax_.instructions.size() + 1);
    for (const Instruction &each : syntax_.instructions) {
        instruction_start_.push_back(position());
        current_ = &each;
        instruction(each);
    }
    instruction_start_.push_back(position());
    // The end of the text is an implicit return.
    Instruction end;
    end.opcode = "ret";
    end.text = "ret";
    end.line = syntax_.instructions.empty() ? syntax_.line : syntax_.instructions.back().line;
    current_ = &end;
    instruction(end);
    current_ = nullptr;
    for (const auto &[op_index, target] : branches_) {
        // Relative to the operation after the branch, which is where `next` stands when the branch runs.
        function_.ops[op_index].immediate =
            static_cast<std::int64_t>(instruction_start_[target]) - static_cast<std::int64_t>(op_index) - 1;
    }
    for (auto &table : function_.branch_tables)
        for (auto &target : table)
            target = instruction_start_[target];
}

} // namespace simgpu::ptx
