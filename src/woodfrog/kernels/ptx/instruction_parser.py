"""Reads tokens as names, numbers, operands and instructions: what the parser of modules is built on."""

from __future__ import annotations

import re

from woodfrog.kernels import limits
from woodfrog.kernels.ptx import lexer
from woodfrog.kernels.ptx.lexer import END, NUMBER, WORD
from woodfrog.kernels.ptx.syntax import Float, Instruction, Memory, Operand, Vector

_SCOPED = re.compile(r"(.*?)(\d+)$")


class Scope:
    """Names that an inner block declares."""

    def __init__(self, suffix: str) -> None:
        self.suffix = suffix
        self.names: set[str] = set()
        self.prefixes: dict[str, int] = {}

    def declares(self, name: str) -> bool:
        if name in self.names:
            return True
        if self.prefixes:
            match = _SCOPED.match(name)
            return bool(match) and int(match[2]) < self.prefixes.get(match[1], 0) if match else False
        return False


class InstructionParser:
    """A place in a text, and the reading of what stands there."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._kinds, self._texts, self._positions = lexer.tokens(text)
        self._at = 0
        self._scopes: list[Scope] = []
        self._scope_number = 0

    def _label_list(self) -> tuple[str, ...]:
        is_branch = self._take() == ".branchtargets"
        labels = []
        while not self._accept(";"):
            self._not_end("a list of targets does not end")
            if self._kinds[self._at] == WORD:
                labels.append(self._texts[self._at])
            self._at += 1
        return tuple(labels) if is_branch else ()

    def _instruction(self) -> Instruction:
        predicate, negated = "", False
        if self._accept("@"):
            negated = self._accept("!")
            predicate = self._name()
        if self._kinds[self._at] != WORD:
            raise self._error(f"an instruction is expected here, not {self._texts[self._at]!r}")
        position = self._positions[self._at]
        opcode, *modifiers = self._take().split(".")
        operands: list[Operand] = []
        while not self._accept(";"):
            if len(operands) == 1 and self._accept("|"):
                operands[0] = Vector((operands[0], self._operand()))  # `setp p|q, …`: two results
                continue
            if operands and not self._accept(","):
                raise self._error(f"a comma or semicolon is expected here, not {self._texts[self._at]!r}")
            operands.append(self._operand())
        return Instruction(opcode, tuple(modifiers), tuple(operands), position, predicate, negated)

    def _operand(self) -> Operand:
        kind, text = self._kinds[self._at], self._texts[self._at]
        if kind == WORD:
            name = self._name()
            if self._texts[self._at] in ("+", "-") and self._kinds[self._at + 1] == NUMBER:
                # A symbol with an offset outside brackets: `mov.u64 %rd1, table+16;`.
                sign = -1 if self._take() == "-" else 1
                return Memory("&" + name, sign * self._number("an offset"))
            return name
        if kind == NUMBER:
            self._at += 1
            value = lexer.integer(text)
            return Float(text) if value is None else value
        if text == "-":
            self._at += 1
            number = self._take()
            value = lexer.integer(number) if number[:1].isdigit() else None
            return Float("-" + number) if value is None else -value
        if text == "!":
            self._at += 1
            return Memory("!" + self._name(), 0)
        if text == "[":
            return self._memory()
        if text in ("{", "("):
            return self._vector("}" if text == "{" else ")")
        raise self._error(f"an operand cannot begin with {text!r}")

    def _vector(self, closing: str) -> Vector:
        self._at += 1
        elements: list[Operand] = []
        while not self._accept(closing):
            if elements:
                self._expect(",")
            if len(self._scopes) > limits.NESTING:
                raise self._error("the braces are nested too deeply")
            if self._texts[self._at] in ("{", "("):
                raise self._error("a vector inside a vector is not known")
            elements.append(self._operand())
        return Vector(tuple(elements))

    def _memory(self) -> Memory:
        self._at += 1
        base, offset, rest = "", 0, []
        if self._kinds[self._at] == WORD:
            base = self._name()
        elif self._kinds[self._at] == NUMBER:
            offset = self._number("an address")
        else:
            raise self._error("an address is expected here")
        while not self._accept("]"):
            text = self._texts[self._at]
            if text in ("+", "-"):
                self._at += 1
                sign = -1 if text == "-" else 1
                if self._accept("-"):
                    sign = -sign
                offset += sign * self._number("an offset")
            elif text == ",":
                self._at += 1
                if self._texts[self._at] == "[":
                    raise self._error("an address inside an address is not known")
                rest.append(self._operand())
            else:
                raise self._error(f"an address cannot go on with {text!r}")
        return Memory(base, offset, tuple(rest))

    # Tokens.

    def _name(self) -> str:
        if self._kinds[self._at] != WORD:
            raise self._error(f"a name is expected here, not {self._texts[self._at]!r}")
        name = self._take()
        for scope in reversed(self._scopes):
            if scope.suffix and scope.declares(name):
                return name + scope.suffix
        return name

    def _number(self, what: str) -> int:
        value = lexer.integer(self._texts[self._at]) if self._kinds[self._at] == NUMBER else None
        if value is None:
            raise self._error(f"{what} is expected here, not {self._texts[self._at]!r}")
        self._at += 1
        return value

    def _take(self) -> str:
        self._not_end("the text ends in the middle of a statement")
        text = self._texts[self._at]
        self._at += 1
        return text

    def _accept(self, text: str) -> bool:
        if self._texts[self._at] == text and self._kinds[self._at] != END:
            self._at += 1
            return True
        return False

    def _expect(self, text: str) -> None:
        if not self._accept(text):
            raise self._error(f"{text!r} is expected here, not {self._texts[self._at]!r}")

    def _not_end(self, message: str) -> None:
        if self._kinds[self._at] == END:
            raise self._error(message)

    def _error(self, message: str) -> Exception:
        return lexer.error_at(self._text, self._positions[self._at], message)
