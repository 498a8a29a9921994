// The recursive-descent parser for PTX; internal to the parser's two source files. Input is hostile: every count, size
// and depth is capped before anything is allocated for it.
#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "lexer.hpp"
#include "syntax.hpp"

namespace simgpu::ptx {

class Parser {
  public:
    explicit Parser(std::string_view text) : lexer_(text) {}
    ModuleSyntax run();

  private:
    struct PendingRelocation {
        std::size_t variable;
        Relocation relocation;
        unsigned line;
        unsigned column;
    };
    struct Linkage {
        bool is_extern = false;
    };

    // parser.cpp: module level
    void module_item();
    void module_variable(Space space, bool is_extern);
    Declaration declarator(Space space);
    void initializer(Variable &variable, const Declaration &declaration, const std::vector<std::size_t> &dimensions);
    void initializer_level(Variable &variable, Type type, const std::vector<std::size_t> &dimensions, std::size_t depth,
                           std::size_t base, std::size_t span);
    void initializer_element(Variable &variable, Type type, std::size_t offset);
    void function(bool is_entry, bool is_extern);
    void performance_directives(FunctionSyntax &function);
    void parameter_list(FunctionSyntax &function, std::vector<std::uint32_t> &into);
    void resolve_relocations();
    void skip_section();
    void alias();

    // parser_body.cpp: function level
    void body(FunctionSyntax &function);
    void statement(FunctionSyntax &function);
    void local_declaration(FunctionSyntax &function, Space space);
    void instruction(FunctionSyntax &function);
    Operand operand(unsigned depth);
    Operand address(unsigned depth);
    Operand number(bool negative);
    void declare(FunctionSyntax &function, std::uint32_t scope, std::string_view name, Symbol symbol,
                 const Token &where);

    // shared helpers
    [[noreturn]] void fail(const Token &at, const std::string &message) const;
    Token expect(char c);
    Token expect_word(const char *what);
    std::uint64_t expect_integer(const char *what, std::uint64_t cap);
    bool accept(char c);
    bool accept(std::string_view word);

    Lexer lexer_;
    ModuleSyntax module_;
    std::vector<PendingRelocation> pending_;
    std::vector<std::pair<std::string_view, std::string_view>> aliases_;
    std::vector<std::size_t> last_dimensions_; ///< of the declarator parsed last
    std::uint32_t scope_ = 0;
    unsigned depth_ = 0;
};

} // namespace simgpu::ptx
