"""What a person wants to know of a file's kernels: a list, how good the templates are, one template in words.

Static judgements hold for any launch and are therefore cautious: "bounded" here may well be exact for a given launch.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from woodfrog.errors import NotFoundError, TargetState
from woodfrog.kernels import limits
from woodfrog.kernels.analysis import templates
from woodfrog.kernels.error import KernelFileError
from woodfrog.kernels.reader import CodeObject
from woodfrog.kernels.reader.elf import kernels as cubin_kernels
from woodfrog.kernels.reader.sources import Found, read_source
from woodfrog.kernels.template import Access, Exactness, LoopFact, Template
from woodfrog.kernels.values import Atom, Condition, Poly, show, show_condition


@dataclass(frozen=True)
class Listed:
    """One kernel of one piece of code."""

    kernel: str
    kind: str
    architecture: str
    compression: str
    parameters: tuple[tuple[int, int], ...] | None  # offset, size
    origin: str


@dataclass(frozen=True)
class Judged:
    """How well one kernel is understood. `reads` and `writes` are None when it has none."""

    template: Template
    architecture: str
    origin: str
    reads: Exactness | None
    writes: Exactness | None
    reason: str  # of the worst of them, "" when all is exact

    @property
    def has_template(self) -> bool:
        """Whether every write has bounds of its own."""
        return self.writes is None or self.writes <= Exactness.BOUNDED


def listed(source: Found) -> list[Listed]:
    """All kernels of a source, machine code and PTX. Raises KernelFileError."""
    found: list[Listed] = []
    for code in source.code:
        if code.kind == "cubin":
            for kernel in cubin_kernels(code.data, code.origin):
                parameters = None
                if kernel.parameters is not None:
                    parameters = tuple((p.offset_bytes, p.size_bytes) for p in kernel.parameters)
                found.append(_listed(kernel.name, parameters, code))
        else:
            from woodfrog.kernels.ptx import parse

            for function in parse(code.data).kernels:
                layout = tuple((p.offset_bytes, p.size_bytes) for p in function.parameters)
                found.append(_listed(function.name, layout, code))
    return found


def _listed(name: str, parameters: tuple[tuple[int, int], ...] | None, code: CodeObject) -> Listed:
    return Listed(name, code.kind, code.architecture, code.compression, parameters, code.origin)


def judged(path: Path | str) -> tuple[list[Judged], list[str]]:
    """judged_code() of a file, folder, wheel or process. Raises KernelFileError."""
    return judged_code(read_source(path))


def judged_code(source: Found) -> tuple[list[Judged], list[str]]:
    """The templates of a source's PTX with their quality, and the kernels that are there as machine code only."""
    found: list[Judged] = []
    machine_code: dict[str, None] = {}
    for code in source.code:
        if code.kind == "cubin":
            machine_code.update(dict.fromkeys(k.name for k in cubin_kernels(code.data, code.origin)))
            continue
        for template in templates(code.data):
            reads = [(quality(a), a) for a in template.accesses if a.kind.loads]
            writes = [(quality(a), a) for a in template.accesses if a.kind.stores]
            worst = max(reads + writes, key=lambda one: one[0], default=None)
            reason = "" if worst is None or worst[0] is Exactness.EXACT else _reason(worst[1])
            found.append(
                Judged(
                    template,
                    code.architecture,
                    code.origin,
                    max((q for q, _ in reads), default=None),
                    max((q for q, _ in writes), default=None),
                    template.fallback or reason,
                )
            )
    known = {one.template.kernel for one in found}
    return found, [name for name in machine_code if name not in known]


def worst_of(template: Template, *, stores: bool) -> Exactness | None:
    """The least exact that the reads or the writes of a kernel can turn out; None: it has none."""
    chosen = [a for a in template.accesses if (a.kind.stores if stores else a.kind.loads)]
    return max((quality(access) for access in chosen), default=None)


def quality(access: Access) -> Exactness:
    """The least exact that an access can turn out for a launch with sensible arguments."""
    if access.address is None:
        return Exactness.EVERYTHING
    if not access.steps_complete or any(_unclear(step) for step in access.steps):
        rest = Exactness.BOUNDED
    else:
        rest = Exactness.EXACT
    size = Exactness.WHOLE if access.size is None else _address_quality(access.size, is_address=False)
    return max(rest, size, _address_quality(access.address, is_address=True))


def _unclear(step: Condition | LoopFact) -> bool:
    if isinstance(step, LoopFact):
        return not step.complete
    return step.op == "unknown" or any(isinstance(part, Condition) and _unclear(part) for part in step.args)


def _address_quality(value: Poly, *, is_address: bool) -> Exactness:
    """What the atoms of an address allow; without a base among them it is a pointer out of memory."""
    worst = Exactness.EXACT
    has_base = not is_address
    for monomial, coefficient in value.terms.items():
        for atom in monomial:
            if atom.kind in ("param", "symbol", "paramat") and coefficient == 1 and len(monomial) == 1:
                has_base = True
            if atom.kind in ("either", "select") and coefficient == 1 and len(monomial) == 1:
                parts = atom.args[0] if atom.kind == "either" else atom.args[1:]
                inner = [_address_quality(part, is_address=is_address) for part in parts]  # type: ignore[attr-defined]
                has_base = has_base or Exactness.EVERYTHING not in inner
                worst = max(worst, *(q for q in inner if q is not Exactness.EVERYTHING), Exactness.EXACT)
                continue
            worst = max(worst, _atom_quality(atom))
    return worst if has_base else Exactness.EVERYTHING


def _atom_quality(atom: Atom) -> Exactness:
    if atom.kind == "load":
        return Exactness.BOUNDED if cast(int, atom.args[1]) < 4 else Exactness.WHOLE
    if atom.kind == "unknown":
        low, high = int(atom.args[1]), int(atom.args[2])  # type: ignore[call-overload]
        return Exactness.BOUNDED if high - low < 1 << 17 else Exactness.WHOLE
    if atom.kind in ("and", "min", "or", "xor", "upto", "max", "pow2"):
        return Exactness.BOUNDED
    worst = Exactness.EXACT
    for arg in atom.args:
        for part in arg if isinstance(arg, tuple) else (arg,):
            if isinstance(part, Poly):
                worst = max(worst, _address_quality(part, is_address=False))
    return worst


def _reason(access: Access) -> str:
    place = f"PTX line {access.line}"
    if access.reason:
        return f"{place}: {access.reason}"
    if not access.steps_complete or any(_unclear(step) for step in access.steps):
        return f"{place}: a condition that is not followed decides it"
    return f"{place}: whether its bits or extremes are exact depends on the launch"


def explained(path: Path | str, kernel: str) -> list[Template]:
    """The templates of the kernels of that name. Raises NotFoundError when the file has none with PTX."""
    found = []
    names: dict[str, None] = {}
    for code in read_source(path).code:
        if code.kind == "ptx":
            for template in templates(code.data):
                names[template.kernel] = None
                if template.kernel == kernel:
                    found.append(template)
    if not found:
        some = ", ".join(list(names)[:10]) + (", …" if len(names) > 10 else "")
        raise NotFoundError(
            f"{path} has no kernel {kernel!r} as PTX",
            advice=f"Kernels with PTX in it: {some}" if names else "None of its kernels comes with PTX.",
            target_state=TargetState.NONE,
        )
    return found


class SourceLines:
    """Lines of the files that a PTX text names, where they are there to be read."""

    def __init__(self, files: Mapping[int, str]) -> None:
        self._files = files
        self._lines: dict[int, list[str]] = {}

    def line(self, place: tuple[int, int]) -> str:
        """The text of a line, "" when it is not to be had."""
        file, number = place
        if file not in self._lines:
            self._lines[file] = _lines_of(self._files.get(file, ""))
        lines = self._lines[file]
        return lines[number - 1].strip() if 0 < number <= len(lines) else ""


def _lines_of(name: str) -> list[str]:
    try:
        with open(os.open(name, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), errors="replace") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                return []
            return file.read(limits.SOURCE_BYTES).splitlines()
    except (OSError, ValueError):
        return []


def lines(template: Template) -> list[str]:
    """A template in readable form, each access with its line of source where that is there."""
    sources = SourceLines(template.files)
    text = [f"kernel {template.kernel}"]
    for parameter in template.parameters:
        text.append(f"  parameter at {parameter.offset_bytes}, {parameter.size_bytes} bytes: {parameter.name}")
    if template.fallback:
        text.append(f"  no template: {template.fallback}; it is taken to touch all memory")
        return text
    for access in template.accesses:
        place = f"PTX line {access.line}"
        if access.source[1]:
            file = template.files.get(access.source[0], f"file {access.source[0]}")
            place += f", {Path(file).name}:{access.source[1]}"
        where = "anywhere" if access.address is None else f"[{show(access.address)}]"
        size = "" if access.size is None else f" {show(access.size)} bytes"
        text.append(f"  {access.kind.name.lower()}{size} at {where}   ({quality(access).name.lower()}; {place})")
        if source := sources.line(access.source):
            text.append(f"      | {source}")
        for step in access.steps:
            if isinstance(step, LoopFact):
                again = " and ".join(show_condition(c) for c in step.again) or "not known when it ends"
                text.append(f"      loop {step.loop}: k{step.loop} = 0, then while {again}")
            else:
                text.append(f"      where {show_condition(step)}")
        if access.reason:
            text.append(f"      {access.reason}")
    return text


__all__ = ["Judged", "KernelFileError", "Listed", "explained", "judged", "lines", "listed", "quality"]
