// Module level of the parser: directives, variables with their initial values, function headings.
#include "parser.hpp"

#include <bit>
#include <cstring>

namespace simgpu::ptx {

namespace {

// Caps against hostile input; each is far above what a GPU could hold.
constexpr std::uint64_t max_variable_bytes = std::uint64_t{1} << 36;
constexpr std::size_t max_initial_bytes = std::size_t{1} << 30;
constexpr std::uint64_t max_alignment_bytes = 1u << 20;
constexpr std::uint64_t max_register_range = 1u << 20;
constexpr std::size_t max_dimensions = 8;

constexpr std::uint64_t function_window = std::uint64_t{4} << 56;

} // namespace

std::uint64_t function_address(std::uint32_t function_index) noexcept {
    return function_window | (std::uint64_t{function_index} + 1) << 4;
}

ModuleSyntax parse_module(std::string_view text) {
    return Parser(text).run();
}

void Parser::fail(const Token &at, const std::string &message) const {
    throw ParseError(at.line, at.column, message);
}

Token Parser::expect(char c) {
    const Token &token = lexer_.peek();
    if (!token.is(c)) {
        fail(token, std::string("expected '") + c + "', found " +
                        (token.kind == Token::Kind::end ? "the end of the text" : "'" + std::string(token.text) + "'"));
    }
    return lexer_.take();
}

Token Parser::expect_word(const char *what) {
    const Token &token = lexer_.peek();
    if (token.kind != Token::Kind::word) {
        fail(token, std::string("expected ") + what + ", found " +
                        (token.kind == Token::Kind::end ? "the end of the text" : "'" + std::string(token.text) + "'"));
    }
    return lexer_.take();
}

std::uint64_t Parser::expect_integer(const char *what, std::uint64_t cap) {
    const Token &token = lexer_.peek();
    if (token.kind != Token::Kind::integer)
        fail(token, std::string("expected ") + what);
    if (token.bits > cap)
        fail(token, std::string(what) + " is larger than " + std::to_string(cap));
    return lexer_.take().bits;
}

bool Parser::accept(char c) {
    if (!lexer_.peek().is(c))
        return false;
    lexer_.take();
    return true;
}

bool Parser::accept(std::string_view word) {
    if (!lexer_.peek().is(word))
        return false;
    lexer_.take();
    return true;
}

ModuleSyntax Parser::run() {
    if (!lexer_.peek().is(".version"))
        fail(lexer_.peek(), "PTX text must begin with .version");
    while (lexer_.peek().kind != Token::Kind::end)
        module_item();
    for (const auto &[alias_name, target] : aliases_) {
        const auto found = module_.function_index.find(target);
        if (found != module_.function_index.end())
            module_.function_index[alias_name] = found->second;
    }
    resolve_relocations();
    return std::move(module_);
}

void Parser::module_item() {
    const Token token = lexer_.peek();
    if (accept(';'))
        return;
    if (accept(".version")) {
        const Token number = lexer_.take();
        unsigned major = 0;
        std::size_t i = 0;
        for (; i < number.text.size() && i < 3 && number.text[i] >= '0' && number.text[i] <= '9'; ++i)
            major = major * 10 + static_cast<unsigned>(number.text[i] - '0');
        if (number.kind != Token::Kind::real64 || i + 2 != number.text.size())
            fail(number, "malformed .version");
        module_.version = major * 10 + static_cast<unsigned>(number.text[i + 1] - '0');
        return;
    }
    if (accept(".target")) {
        module_.target = expect_word("a target").text;
        while (accept(','))
            expect_word("a target option");
        return;
    }
    if (accept(".address_size")) {
        if (expect_integer("an address size", 64) != 64)
            fail(token, "only .address_size 64 is supported");
        return;
    }
    if (accept(".file") || accept(".loc")) {
        if (lexer_.peek().line == token.line)
            lexer_.skip_line();
        return;
    }
    if (accept(".section"))
        return skip_section();
    if (accept(".alias"))
        return alias();
    if (accept(".pragma")) {
        while (!lexer_.peek().is(';') && lexer_.peek().kind != Token::Kind::end)
            lexer_.take();
        expect(';');
        return;
    }
    bool is_extern = false;
    for (;;) {
        if (accept(".extern"))
            is_extern = true;
        else if (!accept(".visible") && !accept(".weak") && !accept(".common"))
            break;
    }
    if (accept(".entry"))
        return function(true, is_extern);
    if (accept(".func"))
        return function(false, is_extern);
    if (accept(".global") || accept(".tex"))
        return module_variable(Space::global, is_extern);
    if (accept(".const"))
        return module_variable(Space::constant, is_extern);
    if (accept(".shared"))
        return module_variable(Space::shared, is_extern);
    fail(token, token.kind == Token::Kind::end ? std::string("unexpected end of the text")
                                               : "unexpected '" + std::string(token.text) + "' at module level");
}

void Parser::skip_section() {
    while (!lexer_.peek().is('{')) {
        if (lexer_.peek().kind == Token::Kind::end)
            fail(lexer_.peek(), "section without contents");
        lexer_.take();
    }
    std::size_t depth = 0;
    do {
        const Token token = lexer_.take();
        if (token.kind == Token::Kind::end)
            fail(token, "section without end");
        if (token.is('{'))
            ++depth;
        if (token.is('}'))
            --depth;
    } while (depth != 0);
}

void Parser::alias() {
    const std::string_view from = expect_word("a function name").text;
    expect(',');
    aliases_.emplace_back(from, expect_word("a function name").text);
    expect(';');
}

Declaration Parser::declarator(Space space) {
    Declaration result;
    result.space = space;
    std::size_t alignment = 0;
    for (;;) {
        const Token token = lexer_.peek();
        if (token.kind != Token::Kind::directive)
            break;
        lexer_.take();
        if (token.text == ".align") {
            alignment = expect_integer("an alignment", max_alignment_bytes);
            if (!std::has_single_bit(alignment))
                fail(token, "an alignment must be a power of two");
        } else if (token.text == ".v2" || token.text == ".v4" || token.text == ".v8") {
            result.vector_width = static_cast<unsigned>(token.text[2] - '0');
        } else if (token.text == ".ptr") {
            // `.ptr .global .align 16`: what a pointer parameter points to. The alignment is not the parameter's own.
            while (lexer_.peek().kind == Token::Kind::directive) {
                if (lexer_.take().text == ".align")
                    expect_integer("an alignment", max_alignment_bytes);
            }
        } else if (token.text == ".attribute") {
            expect('(');
            while (!accept(')')) {
                if (lexer_.peek().kind == Token::Kind::end)
                    fail(token, "attribute without end");
                lexer_.take();
            }
        } else if (const Type type = type_named(token.text); type != Type::none) {
            result.type = type;
        } else {
            fail(token, "unexpected '" + std::string(token.text) + "' in a declaration");
        }
    }
    if (result.type == Type::none)
        fail(lexer_.peek(), "declaration without a type");
    const Token name = expect_word("a name");
    result.name = name.text;
    result.line = name.line;

    std::uint64_t bytes = size_of(result.type) * result.vector_width;
    result.alignment_bytes = alignment != 0 ? alignment : bytes;
    last_dimensions_.clear();
    if (space == Space::reg) {
        if (accept('<')) {
            result.range = static_cast<std::uint32_t>(expect_integer("a register count", max_register_range));
            expect('>');
        }
    } else {
        while (accept('[')) {
            if (last_dimensions_.size() == max_dimensions)
                fail(name, "too many array dimensions");
            result.is_array = true;
            const std::uint64_t count = lexer_.peek().is(']') ? 0 : expect_integer("an array size", max_variable_bytes);
            expect(']');
            last_dimensions_.push_back(count);
            if (count != 0 && bytes > max_variable_bytes / count)
                fail(name, "variable too large");
            bytes *= count;
        }
    }
    result.size_bytes = bytes;
    return result;
}

void Parser::module_variable(Space space, bool is_extern) {
    do {
        const Token where = lexer_.peek();
        Declaration declaration = declarator(space);
        declaration.is_extern = is_extern;
        if (space == Space::shared) {
            const auto [found, is_new] =
                module_.shared_index.try_emplace(declaration.name, static_cast<std::uint32_t>(module_.shared.size()));
            if (is_new)
                module_.shared.push_back(declaration);
            else if (module_.shared[found->second].is_extern)
                module_.shared[found->second] = declaration;
            continue;
        }
        Variable variable;
        variable.name = std::string(declaration.name);
        variable.space = space == Space::constant ? Variable::Space::constant : Variable::Space::global;
        variable.alignment_bytes = declaration.alignment_bytes;
        variable.size_bytes = declaration.size_bytes;
        variable.is_extern = is_extern;
        const auto [found, is_new] =
            module_.variable_index.try_emplace(declaration.name, static_cast<std::uint32_t>(module_.variables.size()));
        if (!is_new && !module_.variables[found->second].is_extern && !is_extern)
            fail(where, "variable " + variable.name + " is defined twice");
        if (is_new)
            module_.variables.emplace_back();
        const std::size_t index = found->second;
        // The initialiser needs the variable's place in the module for its relocations.
        if (is_new || module_.variables[index].is_extern)
            module_.variables[index] = std::move(variable);
        if (accept('='))
            initializer(module_.variables[index], declaration, last_dimensions_);
    } while (accept(','));
    expect(';');
}

void Parser::initializer(Variable &variable, const Declaration &declaration,
                         const std::vector<std::size_t> &dimensions) {
    std::vector<std::size_t> levels = dimensions;
    if (declaration.vector_width > 1)
        levels.push_back(declaration.vector_width);
    if (levels.empty()) {
        initializer_element(variable, declaration.type, 0);
        return;
    }
    if (levels.front() == 0) {
        // An unsized array takes its size from the initialiser.
        std::size_t rest = size_of(declaration.type);
        for (std::size_t i = 1; i < levels.size(); ++i)
            rest *= levels[i];
        variable.size_bytes = max_initial_bytes;
        initializer_level(variable, declaration.type, levels, 0, 0, max_initial_bytes);
        if (rest == 0)
            rest = 1;
        variable.size_bytes = (variable.initial.size() + rest - 1) / rest * rest;
        return;
    }
    initializer_level(variable, declaration.type, levels, 0, 0, variable.size_bytes);
}

void Parser::initializer_level(Variable &variable, Type type, const std::vector<std::size_t> &dimensions,
                               std::size_t depth, std::size_t base, std::size_t span) {
    const Token open = expect('{');
    const bool innermost = depth + 1 >= dimensions.size();
    std::size_t step = size_of(type);
    for (std::size_t i = depth + 1; i < dimensions.size(); ++i)
        step *= dimensions[i];
    std::size_t offset = 0;
    while (!accept('}')) {
        const bool nested = lexer_.peek().is('{');
        if (nested && innermost)
            fail(lexer_.peek(), "initialiser nested too deeply");
        const std::size_t width = nested ? step : size_of(type);
        if (width == 0 || offset + width > span)
            fail(open, "more initial values than the variable has room for");
        if (nested)
            initializer_level(variable, type, dimensions, depth + 1, base + offset, step);
        else
            initializer_element(variable, type, base + offset);
        offset += width;
        if (!accept(',') && !lexer_.peek().is('}'))
            fail(lexer_.peek(), "expected ',' or '}' in an initialiser");
    }
}

void Parser::initializer_element(Variable &variable, Type type, std::size_t offset) {
    const std::size_t width = size_of(type);
    const Token token = lexer_.peek();
    if (width > 8 || type == Type::opaque)
        fail(token, "initial values of this type are not supported");
    if (offset + width > max_initial_bytes)
        fail(token, "initial values are too large");
    std::uint64_t bits = 0;
    if (token.kind == Token::Kind::word) {
        lexer_.take();
        PendingRelocation entry{module_.variables.size() - 1, {}, token.line, token.column};
        for (std::size_t i = 0; i < module_.variables.size(); ++i)
            if (&module_.variables[i] == &variable)
                entry.variable = i;
        entry.relocation.offset_bytes = offset;
        entry.relocation.size_bytes = width;
        std::string_view symbol = token.text;
        if (symbol == "generic" && accept('(')) {
            symbol = expect_word("a symbol").text;
            expect(')');
        }
        entry.relocation.symbol = std::string(symbol);
        while (lexer_.peek().is('+') || lexer_.peek().is('-')) {
            bool negative = lexer_.take().is('-');
            if (accept('-'))
                negative = !negative;
            const std::uint64_t addend = expect_integer("an addend", std::uint64_t{1} << 40);
            entry.relocation.addend +=
                negative ? -static_cast<std::int64_t>(addend) : static_cast<std::int64_t>(addend);
            if (entry.relocation.addend > (std::int64_t{1} << 40) || entry.relocation.addend < -(std::int64_t{1} << 40))
                fail(token, "addend too large");
        }
        if (width < 4)
            fail(token, "a symbol needs 4 or 8 bytes");
        pending_.push_back(std::move(entry));
    } else {
        const bool negative = accept('-');
        const Operand value = number(negative);
        if (lexer_.peek().is('('))
            fail(token, "byte masks of symbols are not supported in initial values");
        bits = value.bits;
        if (is_float(type) && value.kind != Operand::Kind::integer) {
            if (type == Type::f32 && value.kind == Operand::Kind::real64)
                bits = std::bit_cast<std::uint32_t>(static_cast<float>(std::bit_cast<double>(bits)));
            if (type == Type::f64 && value.kind == Operand::Kind::real32)
                bits = std::bit_cast<std::uint64_t>(
                    static_cast<double>(std::bit_cast<float>(static_cast<std::uint32_t>(bits))));
        }
    }
    if (variable.initial.size() < offset + width)
        variable.initial.resize(offset + width);
    for (std::size_t i = 0; i < width; ++i)
        variable.initial[offset + i] = static_cast<std::byte>(bits >> (8 * i));
}

void Parser::resolve_relocations() {
    for (auto &entry : pending_) {
        Variable &variable = module_.variables[entry.variable];
        const Relocation &relocation = entry.relocation;
        const auto function = module_.function_index.find(relocation.symbol);
        if (function != module_.function_index.end()) {
            const std::uint64_t value =
                function_address(function->second) + static_cast<std::uint64_t>(relocation.addend);
            for (std::size_t i = 0; i < relocation.size_bytes; ++i)
                variable.initial[relocation.offset_bytes + i] = static_cast<std::byte>(value >> (8 * i));
        } else if (module_.variable_index.contains(relocation.symbol)) {
            variable.relocations.push_back(std::move(entry.relocation));
        } else {
            throw ParseError(entry.line, entry.column, "unknown symbol " + relocation.symbol + " in an initial value");
        }
    }
}

void Parser::parameter_list(FunctionSyntax &function, std::vector<std::uint32_t> &into) {
    expect('(');
    if (accept(')'))
        return;
    do {
        const Token where = lexer_.peek();
        Space space = Space::parameter;
        if (accept(".reg"))
            space = Space::reg;
        else if (!accept(".param"))
            fail(where, "expected .param or .reg");
        const Declaration declaration = declarator(space);
        const auto index = static_cast<std::uint32_t>(function.declarations.size());
        function.declarations.push_back(declaration);
        if (declaration.name != "_")
            declare(function, 0, declaration.name, {Symbol::Kind::variable, index}, where);
        into.push_back(index);
    } while (accept(','));
    expect(')');
}

void Parser::performance_directives(FunctionSyntax &function) {
    const auto triple = [&](std::array<unsigned, 3> &into) {
        into = {1, 1, 1};
        for (std::size_t i = 0; i < 3; ++i) {
            into[i] = static_cast<unsigned>(expect_integer("a block dimension", 1u << 16));
            if (!accept(','))
                break;
        }
    };
    for (;;) {
        const Token token = lexer_.peek();
        if (token.kind != Token::Kind::directive)
            return;
        lexer_.take();
        if (token.text == ".maxntid")
            triple(function.maximum_block);
        else if (token.text == ".reqntid")
            triple(function.required_block);
        else if (token.text == ".reqnctapercluster")
            triple(function.required_cluster);
        else if (token.text == ".pragma") {
            while (!lexer_.peek().is(';') && lexer_.peek().kind != Token::Kind::end)
                lexer_.take();
            expect(';');
        } else if (token.text == ".noreturn" || token.text == ".explicitcluster" ||
                   token.text == ".blocksareclusters") {
        } else if (token.text == ".maxnreg" || token.text == ".minnctapersm" || token.text == ".maxnctapersm" ||
                   token.text == ".maxclusterrank") {
            expect_integer("a number", 1u << 20);
        } else {
            fail(token, "unexpected '" + std::string(token.text) + "' after a function's heading");
        }
    }
}

void Parser::function(bool is_entry, bool is_extern) {
    (void)is_extern;
    FunctionSyntax result;
    result.is_entry = is_entry;
    result.scopes.emplace_back();
    while (accept(".attribute")) {
        expect('(');
        while (!accept(')')) {
            if (lexer_.peek().kind == Token::Kind::end)
                fail(lexer_.peek(), "attribute without end");
            lexer_.take();
        }
    }
    if (!is_entry && lexer_.peek().is('('))
        parameter_list(result, result.returns);
    const Token name = expect_word("a function name");
    result.name = name.text;
    result.line = name.line;
    if (lexer_.peek().is('('))
        parameter_list(result, result.parameters);
    performance_directives(result);
    if (!accept(';')) {
        if (!lexer_.peek().is('{'))
            fail(lexer_.peek(), "expected ';' or a function body");
        result.has_body = true;
        body(result);
    }
    const auto [found, is_new] =
        module_.function_index.try_emplace(name.text, static_cast<std::uint32_t>(module_.functions.size()));
    if (is_new) {
        module_.functions.push_back(std::move(result));
    } else if (result.has_body) {
        if (module_.functions[found->second].has_body)
            fail(name, "function " + std::string(name.text) + " is defined twice");
        module_.functions[found->second] = std::move(result);
    }
}

} // namespace simgpu::ptx
