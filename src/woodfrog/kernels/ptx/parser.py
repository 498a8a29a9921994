"""A hand-written parser for PTX modules: what nvcc, NVRTC and Triton emit, inline assembly included.

Unknown instructions and directives are carried or skipped, never fatal; broken structure is a PtxError with its place.
Registers and labels that an inner { } declares get names of their own, so that a function body is one flat list.
"""

from __future__ import annotations

import re

from woodfrog.kernels import limits
from woodfrog.kernels.ptx import lexer
from woodfrog.kernels.ptx.instruction_parser import InstructionParser, Scope
from woodfrog.kernels.ptx.lexer import DIRECTIVE, END, NUMBER, STRING, WORD
from woodfrog.kernels.ptx.syntax import (
    Function,
    Instruction,
    Label,
    Module,
    ParameterDeclaration,
    SourceLine,
    Statement,
    Targets,
    Variable,
)

_TYPE_BYTES = {"pred": 1, "b128": 16, "texref": 8, "samplerref": 8, "surfref": 8}
_TYPE = re.compile(r"([busf]|bf|e\dm\d|tf)(\d+)(x\d)?$")
_SPACES = {"global", "const", "shared", "local", "param"}
_LINKAGE = {"visible", "extern", "weak", "common"}
_PERFORMANCE = {
    "maxntid",
    "reqntid",
    "minnctapersm",
    "maxnreg",
    "maxclusterrank",
    "reqnctapercluster",
    "blocksareclusters",
}


def parse(text: str | bytes) -> Module:
    """The module that a PTX text describes. Raises PtxError, or KernelFileError for text beyond the caps."""
    if isinstance(text, bytes):
        text = text.split(b"\0", 1)[0].decode("utf-8", "replace")
    return _Parser(text).module()


def type_bytes(name: str) -> int | None:
    """Bytes of a fundamental type, e.g. 4 of "f32"; None when it is none."""
    if name in _TYPE_BYTES:
        return _TYPE_BYTES[name]
    match = _TYPE.match(name)
    return max(1, int(match[2]) // 8) if match and int(match[2]) <= 256 else None


class _Parser(InstructionParser):
    def module(self) -> Module:
        module = Module("", "", {}, {}, {}, self._text)
        while self._kinds[self._at] != END:
            self._top_level(module)
        if not module.version:
            raise self._error("there is no .version directive, so this is no PTX module")
        return module

    # Directives of the module.

    def _top_level(self, module: Module) -> None:
        if self._kinds[self._at] != DIRECTIVE:
            if self._texts[self._at] == ";":
                self._at += 1
                return
            raise self._error(f"a directive is expected here, not {self._texts[self._at]!r}")
        linkage: set[str] = set()
        while self._texts[self._at][1:] in _LINKAGE and self._kinds[self._at] == DIRECTIVE:
            linkage.add(self._texts[self._at][1:])
            self._at += 1
        word = self._texts[self._at]
        if word == ".version":
            self._at += 1
            module.version = self._take()
        elif word == ".target":
            self._at += 1
            module.target = self._take()
            while self._accept(","):
                self._take()
        elif word == ".address_size":
            self._at += 1
            if self._take() != "64":
                self._at -= 1
                raise self._error("only 64-bit addresses are supported")
        elif word in (".entry", ".func"):
            self._function(module)
        elif word == ".file":
            self._at += 1
            number, name = lexer.integer(self._take()), self._take()
            module.files[number if number is not None else -1] = name.strip('"')
            while self._accept(","):
                self._take()
        elif word == ".section":
            while self._texts[self._at] != "{":
                self._at += 1
                self._not_end("a .section has no body")
            self._skip_braces()
        elif word[1:] in _SPACES or word in (".tex", ".surf", ".samplerref"):
            for variable in self._variables("extern" in linkage):
                module.variables[variable.name] = variable
        elif word == ".loc":
            self._loc()
        else:
            self._skip_directive()

    def _skip_directive(self) -> None:
        """`.alias a, b;`, `.pragma "…";` and directives yet to come end with a semicolon."""
        while not self._accept(";"):
            if self._texts[self._at] == "{":
                self._skip_braces()
                return
            self._not_end("a directive does not end")
            self._at += 1

    def _skip_braces(self) -> None:
        depth = 0
        while True:
            self._not_end("a { has no }")
            text = self._texts[self._at]
            self._at += 1
            depth += (text == "{") - (text == "}")
            if depth == 0:
                return

    def _loc(self) -> SourceLine:
        """`.loc file line column [, function_name label [+ n], inlined_at file line column]`: no semicolon."""
        self._at += 1
        values = [self._number("a number of .loc") for _ in range(3)]
        while self._accept(","):
            self._take()
            while self._kinds[self._at] in (NUMBER,) or self._texts[self._at] in ("+", "-"):
                self._at += 1
            if self._kinds[self._at] == WORD and self._texts[self._at - 1] == "function_name":
                self._at += 1
                while self._kinds[self._at] == NUMBER or self._texts[self._at] in ("+", "-"):
                    self._at += 1
        return SourceLine(values[0], values[1])

    # Functions.

    def _function(self, module: Module) -> None:
        position = self._positions[self._at]
        is_kernel = self._texts[self._at] == ".entry"
        self._at += 1
        while self._kinds[self._at] == DIRECTIVE:  # .attribute(...)
            self._at += 1
            if self._texts[self._at] == "(":
                self._parentheses()
        results = self._parameters() if self._texts[self._at] == "(" else []
        if self._kinds[self._at] != WORD:
            raise self._error("a function's name is expected here")
        name = self._take()
        parameters = self._parameters() if self._texts[self._at] == "(" else []
        function = Function(name, is_kernel, parameters, results, position)
        while self._kinds[self._at] == DIRECTIVE:
            directive = self._take()[1:]
            values: list[int] = []
            while self._kinds[self._at] == NUMBER:
                values.append(self._number("a number"))
                if not self._accept(","):
                    break
            if self._kinds[self._at] == STRING:
                self._at += 1
            if self._texts[self._at] == "(":
                self._parentheses()
            if directive in _PERFORMANCE:
                function.directives[directive] = tuple(values)
        if self._accept(";"):
            module.functions.setdefault(name, function)
            return
        if self._texts[self._at] != "{":
            raise self._error(f"the body of {name} is expected here, not {self._texts[self._at]!r}")
        self._at += 1
        function.body = []
        self._scopes = [Scope("")]
        self._block(function, function.body)
        module.functions[name] = function

    def _parentheses(self) -> None:
        depth = 0
        while True:
            self._not_end("a ( has no )")
            text = self._take()
            depth += (text == "(") - (text == ")")
            if depth == 0:
                return

    def _parameters(self) -> list[ParameterDeclaration]:
        found: list[ParameterDeclaration] = []
        end = 0
        self._expect("(")
        while not self._accept(")"):
            if found:
                self._expect(",")
            alignment, size, is_pointer = 0, 0, False
            while self._kinds[self._at] == DIRECTIVE:
                word = self._take()[1:]
                if word == "align":
                    given = self._number("an alignment")
                    # The alignment after .ptr is that of what it points to.
                    alignment = alignment if is_pointer else given
                elif word == "ptr":
                    is_pointer = True
                elif (bytes_of := type_bytes(word)) is not None:
                    size = bytes_of
            if self._kinds[self._at] != WORD:
                raise self._error("a parameter's name is expected here")
            name = self._take()
            alignment = alignment or size or 1
            if self._accept("["):
                count = 0 if self._texts[self._at] == "]" else self._number("an array's length")
                self._expect("]")
                size *= count
            offset = -(-end // alignment) * alignment
            end = offset + size
            if len(found) >= limits.PARAMETERS or end > limits.PARAMETER_BYTES:
                raise self._error("a function has more parameters than any GPU allows")
            found.append(ParameterDeclaration(name, offset, size, alignment, is_pointer))
        return found

    # Declarations.

    def _variables(self, is_extern: bool) -> list[Variable]:
        space = self._take()[1:]
        alignment, size, count = 0, 0, 1
        found = []
        while self._kinds[self._at] == DIRECTIVE:
            word = self._take()[1:]
            if word == "align":
                alignment = self._number("an alignment")
            elif word in ("v2", "v4", "v8"):
                count = int(word[1:])
            elif word == "attribute":
                self._parentheses()
            elif word == "ptr":
                continue
            elif (bytes_of := type_bytes(word)) is not None:
                size = bytes_of
        while True:
            if self._kinds[self._at] != WORD:
                raise self._error("a variable's name is expected here")
            name = self._take()
            total = size * count
            if self._texts[self._at] == "<":  # `.param .b32 p<4>`: numbered names
                self._at += 1
                numbered = self._number("a count")
                self._expect(">")
                if numbered > limits.PARAMETERS:
                    raise self._error("more numbered variables than anything needs")
                found += [Variable(f"{name}{i}", space, total, alignment or size, is_extern) for i in range(numbered)]
                if self._accept(","):
                    continue
                break
            while self._accept("["):
                if self._texts[self._at] == "]":
                    total = 0
                else:
                    total *= self._number("an array's length")
                self._expect("]")
            if total > 1 << 40:
                raise self._error(f"the variable {name} is larger than any memory")
            if self._accept("="):
                depth = 0
                while depth or self._texts[self._at] not in (",", ";"):
                    self._not_end("an initial value does not end")
                    depth += (self._texts[self._at] == "{") - (self._texts[self._at] == "}")
                    self._at += 1
            found.append(Variable(name, space, total, alignment or size or 1, is_extern))
            if not self._accept(","):
                break
        self._expect(";")
        return found

    def _registers(self, function: Function) -> None:
        self._at += 1
        kind = ""
        while self._kinds[self._at] == DIRECTIVE:
            kind = self._take()[1:]
        scope = self._scopes[-1]
        while True:
            if self._kinds[self._at] != WORD:
                raise self._error("a register's name is expected here")
            name = self._take()
            if self._accept("<"):
                count = self._number("a count of registers")
                self._expect(">")
                scope.prefixes[name] = count
                function.register_ranges[name + scope.suffix] = kind
            else:
                scope.names.add(name)
                function.registers[name + scope.suffix] = kind
            if not self._accept(","):
                break
        self._expect(";")

    # Statements.

    def _block(self, function: Function, body: list[Statement]) -> None:
        start = len(body)
        labels: set[str] = set()
        depth_of_scope = len(self._scopes)
        while True:
            text = self._texts[self._at]
            kind = self._kinds[self._at]
            if kind == WORD or text == "@":
                if self._texts[self._at + 1] == ":" and kind == WORD:
                    self._at += 2
                    directive = self._texts[self._at]
                    if directive in (".branchtargets", ".calltargets", ".callprototype"):
                        body.append(Targets(text, self._label_list()))
                    else:
                        labels.add(text)
                        body.append(Label(text, self._positions[self._at - 2]))
                    continue
                body.append(self._instruction())
            elif text == "}":
                self._at += 1
                break
            elif text == "{":
                self._at += 1
                if depth_of_scope >= limits.NESTING:
                    raise self._error("the braces are nested too deeply")
                self._scope_number += 1
                self._scopes.append(Scope(f"#{self._scope_number}"))
                self._block(function, body)
                self._scopes.pop()
            elif kind == DIRECTIVE:
                if text == ".reg":
                    self._registers(function)
                elif text == ".loc":
                    body.append(self._loc())
                elif text[1:] in _SPACES:
                    suffix = self._scopes[-1].suffix
                    for variable in self._variables(False):
                        if suffix:
                            self._scopes[-1].names.add(variable.name)
                            variable.name += suffix
                        function.variables[variable.name] = variable
                else:
                    self._skip_directive()
            elif text == ";":
                self._at += 1
            else:
                self._not_end(f"the body of {function.name} does not end")
                raise self._error(f"a statement cannot begin with {text!r}")
        if depth_of_scope > 1 and labels:
            _rename_labels(body, start, labels, self._scopes[-1].suffix)


def _rename_labels(body: list[Statement], start: int, labels: set[str], suffix: str) -> None:
    """Labels of an inner block are seen inside it only."""
    for statement in body[start:]:
        if isinstance(statement, Label) and statement.name in labels:
            statement.name += suffix
        elif isinstance(statement, Instruction) and statement.opcode in ("bra", "brx"):
            statement.operands = tuple(
                operand + suffix if isinstance(operand, str) and operand in labels else operand
                for operand in statement.operands
            )
        elif isinstance(statement, Targets):
            statement.labels = tuple(name + suffix if name in labels else name for name in statement.labels)
