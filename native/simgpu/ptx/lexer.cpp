// The tokeniser; see lexer.hpp.
#include "lexer.hpp"

#include <bit>
#include <cstdlib>
#include <string>

#include "ptx.hpp"

namespace simgpu::ptx {

namespace {

bool is_digit(char c) {
    return c >= '0' && c <= '9';
}
bool is_word_start(char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_' || c == '$' || c == '%';
}
bool is_word(char c) {
    return is_word_start(c) || is_digit(c);
}

int hexadecimal_digit(char c) {
    if (is_digit(c))
        return c - '0';
    if (c >= 'a' && c <= 'f')
        return c - 'a' + 10;
    if (c >= 'A' && c <= 'F')
        return c - 'A' + 10;
    return -1;
}

} // namespace

Lexer::Lexer(std::string_view text) : text_(text.substr(0, text.find('\0'))) {
    advance();
}

Token Lexer::take() {
    Token token = current_;
    advance();
    return token;
}

void Lexer::skip_line() {
    const unsigned line = current_.line;
    while (current_.kind != Token::Kind::end && current_.line == line) {
        // The rest of the line may hold anything, so it is skipped as bytes, not as tokens.
        if (line_ == line) {
            const auto end = text_.find('\n', position_);
            position_ = end == std::string_view::npos ? text_.size() : end;
        }
        advance();
    }
}

void Lexer::fail(const char *message) const {
    throw ParseError(line_, static_cast<unsigned>(position_ - line_start_ + 1), message);
}

void Lexer::skip_blanks() {
    for (;;) {
        const char c = at(position_);
        if (c == '\n') {
            ++position_;
            ++line_;
            line_start_ = position_;
        } else if (c == ' ' || c == '\t' || c == '\r' || c == '\f' || c == '\v') {
            ++position_;
        } else if (c == '/' && at(position_ + 1) == '/') {
            const auto end = text_.find('\n', position_);
            position_ = end == std::string_view::npos ? text_.size() : end;
        } else if (c == '/' && at(position_ + 1) == '*') {
            const auto end = text_.find("*/", position_ + 2);
            if (end == std::string_view::npos)
                fail("comment without end");
            for (; position_ < end + 2; ++position_) {
                if (text_[position_] == '\n') {
                    ++line_;
                    line_start_ = position_ + 1;
                }
            }
        } else {
            return;
        }
    }
}

void Lexer::advance() {
    skip_blanks();
    current_ = Token{};
    current_.line = line_;
    current_.column = static_cast<unsigned>(position_ - line_start_ + 1);
    if (position_ >= text_.size())
        return;

    const std::size_t start = position_;
    const char c = text_[start];
    if (is_word_start(c)) {
        current_.kind = Token::Kind::word;
        for (;;) {
            const char next = at(position_);
            if (is_word(next) || (next == '.' && is_word(at(position_ + 1)))) {
                ++position_;
            } else if (next == ':' && at(position_ + 1) == ':' && is_word(at(position_ + 2))) {
                position_ += 2;
            } else {
                break;
            }
        }
    } else if (c == '.' && is_word(at(start + 1)) && !is_digit(at(start + 1))) {
        current_.kind = Token::Kind::directive;
        ++position_;
        while (is_word(at(position_)) ||
               (at(position_) == ':' && at(position_ + 1) == ':' && is_word(at(position_ + 2)))) {
            position_ += at(position_) == ':' ? 2 : 1;
        }
    } else if (is_digit(c) || (c == '.' && is_digit(at(start + 1)))) {
        lex_number();
        return;
    } else if (c == '"') {
        current_.kind = Token::Kind::string;
        ++position_;
        while (at(position_) != '"') {
            if (position_ >= text_.size() || text_[position_] == '\n')
                fail("string without end");
            position_ += at(position_) == '\\' ? 2 : 1;
        }
        current_.text = text_.substr(start + 1, position_ - start - 1);
        ++position_;
        return;
    } else if (c > ' ' && c < 0x7f) {
        current_.kind = Token::Kind::punctuation;
        ++position_;
    } else {
        fail("a byte that cannot appear in PTX");
    }
    current_.text = text_.substr(start, position_ - start);
}

void Lexer::lex_number() {
    const std::size_t start = position_;
    const char marker = at(start) == '0' ? at(start + 1) : '\0';
    const auto finish = [&](Token::Kind kind, std::uint64_t bits) {
        if (is_word(at(position_)))
            fail("malformed number");
        current_.kind = kind;
        current_.bits = bits;
        current_.text = text_.substr(start, position_ - start);
    };

    if (marker == 'f' || marker == 'F' || marker == 'd' || marker == 'D') {
        const bool wide = marker == 'd' || marker == 'D';
        const int digits = wide ? 16 : 8;
        std::uint64_t bits = 0;
        position_ = start + 2;
        for (int i = 0; i < digits; ++i, ++position_) {
            const int digit = hexadecimal_digit(at(position_));
            if (digit < 0)
                fail(wide ? "0d needs 16 hexadecimal digits" : "0f needs 8 hexadecimal digits");
            bits = bits << 4 | static_cast<unsigned>(digit);
        }
        finish(wide ? Token::Kind::real64 : Token::Kind::real32, bits);
        return;
    }

    unsigned base = 10;
    if (marker == 'x' || marker == 'X')
        base = 16;
    if (marker == 'b' || marker == 'B')
        base = 2;
    if (is_digit(marker))
        base = 8;
    std::size_t end = start;
    if (base == 10 || base == 8) {
        while (is_digit(at(end)))
            ++end;
        const bool exponent =
            (at(end) == 'e' || at(end) == 'E') &&
            (is_digit(at(end + 1)) || ((at(end + 1) == '-' || at(end + 1) == '+') && is_digit(at(end + 2))));
        if (at(end) == '.' || exponent) {
            if (at(end) == '.')
                ++end;
            while (is_digit(at(end)))
                ++end;
            if (at(end) == 'e' || at(end) == 'E') {
                ++end;
                if (at(end) == '-' || at(end) == '+')
                    ++end;
                while (is_digit(at(end)))
                    ++end;
            }
            if (end - start > 400)
                fail("number too long");
            const std::string copy(text_.substr(start, end - start));
            position_ = end;
            finish(Token::Kind::real64, std::bit_cast<std::uint64_t>(std::strtod(copy.c_str(), nullptr)));
            return;
        }
    }
    position_ = start + (base == 16 || base == 2 ? 2 : 0);
    std::uint64_t value = 0;
    std::size_t digits = 0;
    for (;; ++position_, ++digits) {
        const int digit = hexadecimal_digit(at(position_));
        if (digit < 0 || digit >= static_cast<int>(base))
            break;
        if (value > (~std::uint64_t{0} - static_cast<unsigned>(digit)) / base)
            fail("integer does not fit 64 bits");
        value = value * base + static_cast<unsigned>(digit);
    }
    if (digits == 0)
        fail("malformed number");
    if (at(position_) == 'U' || at(position_) == 'u')
        ++position_;
    finish(Token::Kind::integer, value);
}

} // namespace simgpu::ptx
