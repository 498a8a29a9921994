"""A kernel with the device functions it calls put in place of the calls: one flat list of statements.

Calls that cannot be followed (indirect, recursive, of unknown functions) stay, and the analysis treats them as touching
everything.
"""

from __future__ import annotations

from collections.abc import Iterable

from woodfrog.kernels import limits
from woodfrog.kernels.error import AnalysisLimitError
from woodfrog.kernels.ptx.syntax import (
    Function,
    Instruction,
    Label,
    Memory,
    Module,
    Operand,
    SourceLine,
    Statement,
    Targets,
    Vector,
)


def inlined(kernel: Function, module: Module) -> tuple[list[Statement], dict[str, str]]:
    """The kernel's statements with calls expanded, and the space of each shared, local and .param variable."""
    expansion = _Expansion(module)
    for variable in module.variables.values():
        if variable.space in ("shared", "local"):
            expansion.variables[variable.name] = variable.space
    expansion.function(kernel, {}, "", "", (kernel.name,))
    return expansion.statements, expansion.variables


class _Expansion:
    def __init__(self, module: Module) -> None:
        self.statements: list[Statement] = []
        self.variables: dict[str, str] = {}
        self._module = module
        self._number = 0
        self._instructions = 0

    def function(
        self, function: Function, names: dict[str, str], suffix: str, end_label: str, stack: tuple[str, ...]
    ) -> None:
        """Append a function's body. `names` maps its parameters to the caller's; a `ret` goes to `end_label`."""
        mapping = dict(names)
        if suffix:
            mapping.update({name: name + suffix for name in function.registers})
            if any(not prefix.startswith("%") for prefix in function.register_ranges):
                raise AnalysisLimitError(f"{function.name}, which it calls, names its registers in an unusual way")
        for variable in function.variables.values():
            mapping[variable.name] = variable.name + suffix
            self.variables[variable.name + suffix] = variable.space
        for statement in function.body or ():
            if isinstance(statement, SourceLine):
                self.statements.append(statement)
            elif isinstance(statement, Label):
                self.statements.append(Label(statement.name + suffix, statement.position))
            elif isinstance(statement, Targets):
                labels = tuple(name + suffix for name in statement.labels)
                self.statements.append(Targets(statement.name + suffix, labels))
            else:
                self._instructions += 1
                if self._instructions > limits.INSTRUCTIONS:
                    raise AnalysisLimitError(f"it has more than {limits.INSTRUCTIONS} instructions with what it calls")
                if suffix and statement.opcode == "ret":
                    branch = Instruction(
                        "bra", (), (end_label,), statement.position, _renamed(statement.predicate, mapping, suffix),
                        statement.negated,
                    )  # fmt: skip
                    self.statements.append(branch)
                elif statement.opcode == "call" and self._call(statement, mapping, suffix, stack):
                    continue
                else:
                    self.statements.append(_rename(statement, mapping, suffix))

    def _call(self, call: Instruction, mapping: dict[str, str], suffix: str, stack: tuple[str, ...]) -> bool:
        """Expand a call if that can be done."""
        vectors = [operand for operand in call.operands if isinstance(operand, Vector)]
        names = [operand for operand in call.operands if isinstance(operand, str)]
        if not names:
            return False
        callee = self._module.functions.get(names[0])
        if callee is None or callee.body is None or callee.name in stack or len(stack) > limits.INLINE_DEPTH:
            return False
        first_is_result = bool(call.operands) and isinstance(call.operands[0], Vector)
        results = vectors[0].elements if first_is_result else ()
        arguments = vectors[1 if first_is_result else 0].elements if len(vectors) > first_is_result else ()
        if len(results) != len(callee.results) or len(arguments) != len(callee.parameters):
            return False
        inner: dict[str, str] = {}
        declared = [*callee.results, *callee.parameters]
        for declaration, given in zip(declared, (*results, *arguments), strict=True):
            name = mapping.get(given) if isinstance(given, str) else None
            if name is None or self.variables.get(name) != "param":
                return False  # a register or constant as an argument: an old way that compilers of today do not use
            inner[declaration.name] = name
        self._number += 1
        new_suffix = f"@{self._number}"
        end_label = f"$end{new_suffix}"
        if call.predicate:
            guard = _renamed(call.predicate, mapping, suffix)
            self.statements.append(Instruction("bra", (), (end_label,), call.position, guard, not call.negated))
        self.function(callee, inner, new_suffix, end_label, (*stack, callee.name))
        self.statements.append(Label(end_label, call.position))
        return True


def _rename(instruction: Instruction, mapping: dict[str, str], suffix: str) -> Instruction:
    if not suffix and not mapping:
        return instruction
    return Instruction(
        instruction.opcode,
        instruction.modifiers,
        tuple(_operand(operand, mapping, suffix, instruction.opcode) for operand in instruction.operands),
        instruction.position,
        _renamed(instruction.predicate, mapping, suffix),
        instruction.negated,
    )


def _operand(operand: Operand, mapping: dict[str, str], suffix: str, opcode: str) -> Operand:
    if isinstance(operand, str):
        if suffix and opcode in ("bra", "brx") and not operand.startswith("%"):
            return operand + suffix
        return _renamed(operand, mapping, suffix)
    if isinstance(operand, Vector):
        return Vector(tuple(_operands(operand.elements, mapping, suffix)))
    if isinstance(operand, Memory):
        mark = operand.base[:1] if operand.base[:1] in ("!", "&") else ""
        base = mark + _renamed(operand.base[len(mark) :], mapping, suffix)
        return Memory(base, operand.offset, tuple(_operands(operand.rest, mapping, suffix)))
    return operand


def _operands(operands: Iterable[Operand], mapping: dict[str, str], suffix: str) -> Iterable[Operand]:
    return (_operand(operand, mapping, suffix, "") for operand in operands)


def _renamed(name: str, mapping: dict[str, str], suffix: str) -> str:
    if not name:
        return name
    found = mapping.get(name)
    if found is not None:
        return found
    # Registers of compilers begin with %; special registers and module variables keep their names.
    return name + suffix if suffix and name.startswith("%") and "." not in name and name not in _FIXED else name


_FIXED = {
    "%laneid", "%warpid", "%nwarpid", "%smid", "%nsmid", "%gridid", "%clock", "%clock64", "%clock_hi", "%globaltimer",
    "%lanemask_eq", "%lanemask_le", "%lanemask_lt", "%lanemask_ge", "%lanemask_gt", "%dynamic_smem_size",
    "%total_smem_size", "%aggr_smem_size", "%globaltimer_lo", "%globaltimer_hi", "%current_graph_exec",
    "%cluster_ctarank", "%cluster_nctarank", "%is_explicit_cluster",
}  # fmt: skip
