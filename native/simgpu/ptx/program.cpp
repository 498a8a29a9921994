// Decoding on demand, and what launches need to know of each kernel; see program.hpp. Also the public Module and
// Kernel.
#include "program.hpp"

#include <algorithm>

#include "decode.hpp"
#include "ptx.hpp"

namespace simgpu::ptx {

namespace {

constexpr std::uint32_t not_shared = ~0u;
constexpr std::size_t largest_text = std::size_t{512} << 20;

} // namespace

Program::Program(std::string_view text) : text_(text.substr(0, text.find('\0'))), syntax_(parse_module(text_)) {
    target = std::string(syntax_.target);
    functions_.resize(syntax_.functions.size());
    plans_.resize(syntax_.functions.size());
    for (const Declaration &declaration : syntax_.shared)
        shared.push_back({declaration.size_bytes, declaration.alignment_bytes, declaration.is_extern});
    function_shared_.resize(syntax_.functions.size());
    for (std::size_t f = 0; f < syntax_.functions.size(); ++f) {
        for (const Declaration &declaration : syntax_.functions[f].declarations) {
            const bool is_shared = declaration.space == Space::shared;
            function_shared_[f].push_back(is_shared ? static_cast<std::uint32_t>(shared.size()) : not_shared);
            if (is_shared)
                shared.push_back({declaration.size_bytes, declaration.alignment_bytes, false});
        }
    }
}

std::uint32_t Program::shared_of_function(std::uint32_t function, std::uint32_t declaration) const {
    return function_shared_[function][declaration];
}

const Function *Program::decode(std::uint32_t index) {
    auto &slot = functions_[index];
    if (slot == nullptr) {
        const FunctionSyntax &syntax = syntax_.functions[index];
        auto fresh = std::make_unique<Function>();
        fresh->name = std::string(syntax.name);
        fresh->index = index;
        fresh->is_entry = syntax.is_entry;
        Decoder(*this, syntax, *fresh).run();
        slot = std::move(fresh);
    }
    return slot.get();
}

const Function *Program::function(std::uint32_t index) {
    const std::lock_guard lock(mutex_);
    return decode(index);
}

std::vector<const Function *> Program::reachable(std::uint32_t entry) {
    std::vector<const Function *> result;
    std::vector<bool> seen(syntax_.functions.size());
    std::vector<std::uint32_t> open{entry};
    seen[entry] = true;
    const auto add = [&](std::uint32_t index) {
        if (seen[index] || !syntax_.functions[index].has_body)
            return;
        seen[index] = true;
        open.push_back(index);
    };
    while (!open.empty()) {
        const Function *here = decode(open.back());
        open.pop_back();
        result.push_back(here);
        bool is_indirect = false;
        for (const CallSite &site : here->calls) {
            is_indirect = is_indirect || site.is_indirect;
            if (!site.is_indirect && site.builtin == Builtin::none)
                add(site.callee);
        }
        // An address may have come from anywhere, so any device function may be the callee.
        if (is_indirect) {
            for (std::uint32_t f = 0; f < syntax_.functions.size(); ++f)
                if (!syntax_.functions[f].is_entry)
                    add(f);
        }
    }
    return result;
}

const EntryPlan &Program::plan(std::uint32_t entry) {
    const std::lock_guard lock(mutex_);
    auto &slot = plans_[entry];
    if (slot != nullptr)
        return *slot;
    auto plan = std::make_unique<EntryPlan>();
    plan->entry = entry;
    plan->shared_offsets.assign(shared.size(), not_shared);
    const std::vector<const Function *> functions = reachable(entry);

    // Functions that only an indirect call can reach may hold what cannot be executed: then the call itself faults.
    std::vector<bool> direct(syntax_.functions.size());
    std::vector<std::uint32_t> open{entry};
    direct[entry] = true;
    while (!open.empty()) {
        const Function *here = decode(open.back());
        open.pop_back();
        for (const CallSite &site : here->calls) {
            if (site.is_indirect || site.builtin != Builtin::none || direct[site.callee])
                continue;
            direct[site.callee] = true;
            open.push_back(site.callee);
        }
    }

    std::size_t bytes = 0;
    for (const Function *function : functions) {
        plan->must_run_in_order = plan->must_run_in_order || function->must_run_in_order;
        if (function->unsupported_line != 0 && plan->unsupported_line == 0 && direct[function->index]) {
            plan->unsupported_line = function->unsupported_line;
            plan->unsupported_text = function->unsupported_text;
        }
        for (const SpecialRow &special : function->specials) {
            plan->uses_reserved_shared = plan->uses_reserved_shared || (special.special >= Special::reserved_smem_0 &&
                                                                        special.special <= Special::reserved_smem_end);
        }
        for (const SymbolRow &symbol : function->symbols) {
            if (symbol.kind != SymbolRow::Kind::shared || plan->shared_offsets[symbol.index] != not_shared)
                continue;
            const SharedVariable &variable = shared[symbol.index];
            if (variable.is_dynamic)
                continue;
            const std::size_t alignment = std::max<std::size_t>(variable.alignment_bytes, 1);
            bytes = (bytes + alignment - 1) & ~(alignment - 1);
            plan->shared_offsets[symbol.index] = static_cast<std::uint32_t>(bytes);
            bytes += variable.size_bytes;
        }
    }
    plan->static_shared_bytes = bytes;
    plan->frame_bytes = functions.front()->frame_bytes;
    for (const Declaration &declaration : syntax_.functions[entry].declarations) {
        if (declaration.space != Space::reg || declaration.type == Type::pred)
            continue;
        plan->registers += std::max<std::size_t>(declaration.range, 1) * (size_of(declaration.type) > 4 ? 2 : 1);
    }
    slot = std::move(plan);
    return *slot;
}

// --- the public classes
// ----------------------------------------------------------------------------------------------------

std::size_t Kernel::parameters_bytes() const noexcept {
    return parameters_.empty() ? 0 : parameters_.back().offset_bytes + parameters_.back().size_bytes;
}

Module::Module() = default;
Module::~Module() = default;

std::shared_ptr<const Module> Module::parse(std::string_view text) {
    if (text.size() > largest_text)
        throw ParseError(1, 1, "the text is larger than any PTX module");
    const std::shared_ptr<Module> module(new Module());
    module->program_ = std::make_unique<Program>(text);
    module->program_->module = module.get();
    module->self_ = module;
    return module;
}

std::vector<std::string> Module::kernel_names() const {
    std::vector<std::string> names;
    for (const FunctionSyntax &function : program_->syntax().functions)
        if (function.is_entry && function.has_body)
            names.emplace_back(function.name);
    return names;
}

bool Module::has_kernel(std::string_view name) const noexcept {
    const ModuleSyntax &syntax = program_->syntax();
    const auto found = syntax.function_index.find(name);
    if (found == syntax.function_index.end())
        return false;
    const FunctionSyntax &function = syntax.functions[found->second];
    return function.is_entry && function.has_body;
}

Kernel Module::kernel(std::string_view name) const {
    if (!has_kernel(name))
        throw std::out_of_range("the module has no kernel " + std::string(name));
    const std::uint32_t index = program_->syntax().function_index.at(name);
    const FunctionSyntax &syntax = program_->syntax().functions[index];
    const Function &function = *program_->function(index);
    const EntryPlan &plan = program_->plan(index);
    Kernel kernel;
    kernel.module_ = self_.lock();
    kernel.name_ = std::string(name);
    kernel.index_ = index;
    for (std::size_t k = 0; k < function.parameters.size(); ++k) {
        const Declaration &declaration = syntax.declarations[syntax.parameters[k]];
        kernel.parameters_.push_back({function.parameters[k].offset, function.parameters[k].size_bytes,
                                      std::max<std::size_t>(declaration.alignment_bytes, 1)});
    }
    kernel.static_shared_bytes_ = plan.static_shared_bytes;
    const auto product = [](const std::array<unsigned, 3> &sizes) {
        const std::uint64_t threads = std::uint64_t{sizes[0]} * sizes[1] * sizes[2];
        return threads == 0 || threads > 1024 ? 1024u : static_cast<unsigned>(threads);
    };
    kernel.max_threads_ = std::min(product(syntax.maximum_block), product(syntax.required_block));
    kernel.required_block_ = syntax.required_block;
    kernel.required_cluster_ = syntax.required_cluster;
    kernel.local_bytes_ = function.local_bytes;
    // Virtual registers are far more than an assembler needs; an eighth of them is near what ptxas finds for small
    // kernels.
    kernel.registers_ = static_cast<unsigned>(std::clamp<std::size_t>(plan.registers / 8 + 8, 16, 255));
    return kernel;
}

const std::vector<Variable> &Module::globals() const noexcept {
    return program_->syntax().variables;
}

const std::string &Module::target() const noexcept {
    return program_->target;
}

unsigned Module::version() const noexcept {
    return program_->syntax().version;
}

} // namespace simgpu::ptx
