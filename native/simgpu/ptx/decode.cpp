// The part of decoding that all instructions share: rows for registers, constants and symbols, guards, labels.
#include "decode.hpp"

#include "program.hpp"

namespace simgpu::ptx {

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
        decode_control, decode_move,    decode_memory,  decode_half,   decode_float, decode_integer,
        decode_bitwise, decode_compare, decode_convert, decode_atomic, decode_warp};
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
