// Splits PTX text into tokens with positions. Knows nothing of the grammar; must survive any bytes whatever.
#pragma once

#include <cstdint>
#include <string_view>

namespace simgpu::ptx {

struct Token {
    enum class Kind : std::uint8_t {
        end,
        word,      ///< identifier, register, opcode with its modifiers: `%r1`, `ld.global.u32`, `$L__BB0_1`
        directive, ///< one dotted piece at the start of a word: `.reg`
        integer,   ///< value in `bits`
        real32,    ///< 0fXXXXXXXX: IEEE bits in `bits`
        real64,    ///< 0dXXXXXXXXXXXXXXXX or a decimal fraction: IEEE bits of a double in `bits`
        string,    ///< without its quotes
        punctuation
    };

    Kind kind = Kind::end;
    std::string_view text;
    std::uint64_t bits = 0;
    unsigned line = 1;
    unsigned column = 1;

    bool is(char c) const noexcept { return kind == Kind::punctuation && text.front() == c; }
    bool is(std::string_view word) const noexcept {
        return (kind == Kind::word || kind == Kind::directive) && text == word;
    }
};

class Lexer {
  public:
    /// `text` must outlive the lexer and every token. A NUL ends it.
    explicit Lexer(std::string_view text);

    const Token &peek() const noexcept { return current_; }
    /// Returns the current token and moves on. Throws ParseError for bytes that form no token.
    Token take();
    /// Drops everything up to the end of the current token's line (for .loc and .file).
    void skip_line();

  private:
    void advance();
    void skip_blanks();
    void lex_number();
    char at(std::size_t position) const noexcept { return position < text_.size() ? text_[position] : '\0'; }
    [[noreturn]] void fail(const char *message) const;

    std::string_view text_;
    std::size_t position_ = 0;
    std::size_t line_start_ = 0;
    unsigned line_ = 1;
    Token current_;
};

} // namespace simgpu::ptx
