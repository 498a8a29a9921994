// A module's decoded functions. Functions are decoded when first needed and kept; safe to use from several threads.
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "code.hpp"
#include "syntax.hpp"

namespace simgpu::ptx {

struct EntryPlan {
    std::uint32_t entry = 0;
    std::vector<std::uint32_t> shared_offsets; ///< by number of the shared variable; ~0u: not used by this kernel
    std::size_t static_shared_bytes = 0;
    std::size_t registers = 0;    ///< 32-bit registers declared by the kernel itself
    std::string unsupported_text; ///< of the first reachable instruction that cannot be executed; empty: none
    unsigned unsupported_line = 0;
    bool must_run_in_order = false;
    bool uses_reserved_shared = false;
    std::size_t frame_bytes = 0; ///< of the entry's own frame

    /// Where dynamic shared memory of this alignment begins.
    std::size_t dynamic_offset(std::size_t alignment_bytes) const noexcept {
        return (static_shared_bytes + alignment_bytes - 1) & ~(alignment_bytes - 1);
    }
};

class Program {
  public:
    explicit Program(std::string_view text);

    const ModuleSyntax &syntax() const noexcept { return syntax_; }
    const Module *module = nullptr;
    std::string target; ///< of the .target directive

    /// The decoded function; never null, valid for the program's life.
    const Function *function(std::uint32_t index);

    /// What launches of a kernel need to know; computed once. Valid for the program's life.
    const EntryPlan &plan(std::uint32_t entry);

    // Shared variables of the module and of all functions, by number.
    struct SharedVariable {
        std::size_t size_bytes;
        std::size_t alignment_bytes;
        bool is_dynamic; ///< .extern: begins where the static part ends
    };
    std::vector<SharedVariable> shared;
    std::uint32_t shared_of_module(std::uint32_t declaration) const noexcept { return declaration; }
    std::uint32_t shared_of_function(std::uint32_t function, std::uint32_t declaration) const;

    const std::vector<Variable> &variables() const noexcept { return syntax_.variables; }

  private:
    const Function *decode(std::uint32_t index); ///< with the mutex held
    std::vector<const Function *> reachable(std::uint32_t entry);

    std::string text_; ///< what every string_view of the syntax points into
    ModuleSyntax syntax_;
    std::vector<std::vector<std::uint32_t>> function_shared_; ///< by function and declaration; ~0u: not shared
    std::mutex mutex_;
    std::vector<std::unique_ptr<Function>> functions_;
    std::vector<std::unique_ptr<EntryPlan>> plans_;
};

} // namespace simgpu::ptx
