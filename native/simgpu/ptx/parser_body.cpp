// Function level of the parser: scopes, declarations, labels, instructions and their operands.
#include <bit>

#include "parser.hpp"

namespace simgpu::ptx {

namespace {

constexpr unsigned max_nesting = 200;
constexpr std::size_t max_operands = 4096; // a branch-target list or a call may be long; nothing sane is longer

} // namespace

const Symbol *FunctionSyntax::find(std::uint32_t scope, std::string_view symbol_name,
                                   std::uint32_t *register_index) const noexcept {
    std::string_view stem = symbol_name;
    while (!stem.empty() && stem.back() >= '0' && stem.back() <= '9')
        stem.remove_suffix(1);
    const std::string_view digits = symbol_name.substr(stem.size());
    std::uint32_t number = 0;
    bool is_member = !digits.empty() && digits.size() <= 8 && (digits.size() == 1 || digits.front() != '0');
    for (const char c : digits.substr(0, 8))
        number = number * 10 + static_cast<std::uint32_t>(c - '0');

    for (;;) {
        const Scope &here = scopes[scope];
        if (const auto found = here.symbols.find(symbol_name); found != here.symbols.end()) {
            const bool range =
                found->second.kind == Symbol::Kind::variable && declarations[found->second.index].range != 0;
            if (!range) {
                if (register_index != nullptr)
                    *register_index = 0;
                return &found->second;
            }
        }
        if (is_member) {
            const auto found = here.symbols.find(stem);
            if (found != here.symbols.end() && found->second.kind == Symbol::Kind::variable &&
                number < declarations[found->second.index].range) {
                if (register_index != nullptr)
                    *register_index = number;
                return &found->second;
            }
        }
        if (scope == here.parent)
            return nullptr;
        scope = here.parent;
    }
}

void Parser::declare(FunctionSyntax &function, std::uint32_t scope, std::string_view name, Symbol symbol,
                     const Token &where) {
    if (!function.scopes[scope].symbols.try_emplace(name, symbol).second)
        fail(where, "'" + std::string(name) + "' is declared twice");
}

void Parser::body(FunctionSyntax &function) {
    scope_ = 0;
    depth_ = 0;
    const Token open = expect('{');
    std::vector<std::uint32_t> enclosing;
    for (;;) {
        const Token &token = lexer_.peek();
        if (token.kind == Token::Kind::end)
            fail(open, "function body without end");
        if (accept('}')) {
            if (enclosing.empty())
                return;
            scope_ = enclosing.back();
            enclosing.pop_back();
        } else if (token.is('{')) {
            if (enclosing.size() == max_nesting)
                fail(token, "blocks nested too deeply");
            lexer_.take();
            enclosing.push_back(scope_);
            Scope inner;
            inner.parent = scope_;
            scope_ = static_cast<std::uint32_t>(function.scopes.size());
            function.scopes.push_back(std::move(inner));
        } else {
            statement(function);
        }
    }
}

void Parser::statement(FunctionSyntax &function) {
    const Token token = lexer_.peek();
    if (accept(';'))
        return;
    if (token.kind == Token::Kind::directive) {
        lexer_.take();
        if (token.text == ".reg")
            return local_declaration(function, Space::reg);
        if (token.text == ".local")
            return local_declaration(function, Space::local);
        if (token.text == ".shared")
            return local_declaration(function, Space::shared);
        if (token.text == ".param")
            return local_declaration(function, Space::parameter);
        if (token.text == ".loc" || token.text == ".file") {
            if (lexer_.peek().line == token.line)
                lexer_.skip_line();
            return;
        }
        if (token.text == ".pragma") {
            while (!lexer_.peek().is(';') && lexer_.peek().kind != Token::Kind::end)
                lexer_.take();
            expect(';');
            return;
        }
        if (token.text == ".global")
            return module_variable(Space::global, false);
        if (token.text == ".const")
            return module_variable(Space::constant, false);
        if (token.text == ".section")
            return skip_section();
        fail(token, "unexpected '" + std::string(token.text) + "' in a function body");
    }
    if (token.kind == Token::Kind::word || token.is('@'))
        return instruction(function);
    fail(token, "unexpected '" + std::string(token.text) + "' in a function body");
}

void Parser::local_declaration(FunctionSyntax &function, Space space) {
    // `.reg .b32 a, b<4>;` gives one type to several names, so the declarator's type is kept for the names that follow.
    const Token where = lexer_.peek();
    Declaration declaration = declarator(space);
    for (;;) {
        const auto index = static_cast<std::uint32_t>(function.declarations.size());
        function.declarations.push_back(declaration);
        declare(function, scope_, declaration.name, {Symbol::Kind::variable, index}, where);
        if (!accept(','))
            break;
        if (space != Space::reg)
            fail(lexer_.peek(), "one variable a declaration, please");
        const Token name = expect_word("a register name");
        declaration.name = name.text;
        declaration.line = name.line;
        declaration.range = 0;
        if (accept('<')) {
            declaration.range = static_cast<std::uint32_t>(expect_integer("a register count", 1u << 20));
            expect('>');
        }
    }
    expect(';');
}

void Parser::instruction(FunctionSyntax &function) {
    Instruction result;
    result.scope = scope_;
    if (accept('@')) {
        result.guard_negated = accept('!');
        result.guard = expect_word("a guard predicate").text;
    }
    const Token head = expect_word("an instruction");
    if (result.guard.empty() && lexer_.peek().is(':')) {
        lexer_.take();
        const auto here = static_cast<std::uint32_t>(function.instructions.size());
        if (accept(".branchtargets")) {
            const auto index = static_cast<std::uint32_t>(function.branch_targets.size());
            auto &targets = function.branch_targets.emplace_back();
            do {
                targets.push_back(expect_word("a label").text);
                if (targets.size() > max_operands)
                    fail(head, "too many branch targets");
            } while (accept(','));
            expect(';');
            declare(function, scope_, head.text, {Symbol::Kind::targets, index}, head);
        } else if (accept(".callprototype") || accept(".calltargets")) {
            // Calls pass the variables they name, so nothing in a prototype is needed.
            while (!lexer_.peek().is(';')) {
                if (lexer_.peek().kind == Token::Kind::end)
                    fail(head, "prototype without end");
                lexer_.take();
            }
            expect(';');
            declare(function, scope_, head.text, {Symbol::Kind::prototype, 0}, head);
        } else {
            declare(function, scope_, head.text, {Symbol::Kind::label, here}, head);
        }
        return;
    }

    result.line = head.line;
    result.column = head.column;
    result.text = head.text;
    std::string_view rest = head.text;
    for (bool first = true;; first = false) {
        const auto dot = rest.find('.');
        const std::string_view piece = rest.substr(0, dot);
        if (first)
            result.opcode = piece;
        else
            result.modifiers.push_back(piece);
        if (dot == std::string_view::npos)
            break;
        rest.remove_prefix(dot + 1);
    }
    while (!accept(';')) {
        result.operands.push_back(operand(0));
        if (result.operands.size() > max_operands)
            fail(head, "too many operands");
        if (!accept(',') && !lexer_.peek().is(';')) {
            const Token &token = lexer_.peek();
            fail(token, token.kind == Token::Kind::end
                            ? std::string("instruction without ';'")
                            : "expected ',' or ';', found '" + std::string(token.text) + "'");
        }
    }
    function.instructions.push_back(std::move(result));
}

Operand Parser::number(bool negative) {
    Operand result;
    const Token token = lexer_.take();
    result.bits = token.bits;
    switch (token.kind) {
    case Token::Kind::integer:
        result.kind = Operand::Kind::integer;
        if (negative)
            result.bits = ~result.bits + 1;
        break;
    case Token::Kind::real32:
        result.kind = Operand::Kind::real32;
        if (negative)
            result.bits ^= 0x80000000u;
        break;
    case Token::Kind::real64:
        result.kind = Operand::Kind::real64;
        if (negative)
            result.bits ^= std::uint64_t{1} << 63;
        break;
    default:
        fail(token, token.kind == Token::Kind::end ? std::string("unexpected end of the text")
                                                   : "expected a number, found '" + std::string(token.text) + "'");
    }
    return result;
}

Operand Parser::operand(unsigned depth) {
    const Token token = lexer_.peek();
    if (depth > 8)
        fail(token, "operands nested too deeply");
    Operand result;
    if (token.kind == Token::Kind::word) {
        lexer_.take();
        if (token.text != "_") {
            result.kind = Operand::Kind::name;
            result.name = token.text;
        }
        if (lexer_.peek().is('+') || lexer_.peek().is('-')) {
            bool negative = lexer_.take().is('-');
            if (accept('-'))
                negative = !negative;
            const std::uint64_t offset = expect_integer("an offset", std::uint64_t{1} << 40);
            result.offset = negative ? -static_cast<std::int64_t>(offset) : static_cast<std::int64_t>(offset);
        }
        if (accept('|')) {
            Operand pair;
            pair.kind = Operand::Kind::pair;
            pair.elements.push_back(std::move(result));
            pair.elements.push_back(operand(depth + 1));
            return pair;
        }
        return result;
    }
    if (token.is('{') || token.is('(')) {
        const char close = token.is('{') ? '}' : ')';
        lexer_.take();
        result.kind = token.is('{') ? Operand::Kind::vector : Operand::Kind::list;
        while (!accept(close)) {
            result.elements.push_back(operand(depth + 1));
            if (result.elements.size() > max_operands)
                fail(token, "too many operands");
            if (!accept(',') && !lexer_.peek().is(close))
                fail(lexer_.peek(), "expected ',' or a closing bracket");
        }
        return result;
    }
    if (token.is('['))
        return address(depth);
    if (token.is('!')) {
        lexer_.take();
        result = operand(depth + 1);
        result.negated = !result.negated;
        return result;
    }
    if (token.is('-')) {
        lexer_.take();
        return number(true);
    }
    if (token.is('+'))
        lexer_.take();
    return number(false);
}

Operand Parser::address(unsigned depth) {
    Operand result;
    result.kind = Operand::Kind::address;
    const Token open = expect('[');
    const Token token = lexer_.peek();
    if (token.kind == Token::Kind::word) {
        Operand base;
        base.kind = Operand::Kind::name;
        base.name = lexer_.take().text;
        result.elements.push_back(std::move(base));
    } else if (token.kind == Token::Kind::integer) {
        result.offset = static_cast<std::int64_t>(lexer_.take().bits);
    } else {
        fail(token, "malformed address");
    }
    while (lexer_.peek().is('+') || lexer_.peek().is('-')) {
        bool negative = lexer_.take().is('-');
        if (accept('-'))
            negative = !negative;
        const std::uint64_t offset = expect_integer("an offset", ~std::uint64_t{0});
        result.offset =
            static_cast<std::int64_t>(static_cast<std::uint64_t>(result.offset) + (negative ? ~offset + 1 : offset));
    }
    while (accept(',')) {
        result.elements.push_back(operand(depth + 1));
        if (result.elements.size() > 16)
            fail(open, "too many coordinates");
    }
    expect(']');
    return result;
}

} // namespace simgpu::ptx
