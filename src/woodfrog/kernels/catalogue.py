"""Compiled catalogues: templates as a shared object, made by the system's C++ compiler and kept by content hash.

Where there is no compiler, Catalogue.ranges interprets the same templates in Python: slower, the same ranges. A cache
folder belongs to its user alone: what is in it is loaded as code.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from woodfrog.errors import RefusedError, TargetState, UsageError
from woodfrog.kernels import codegen
from woodfrog.kernels.error import KernelFileError
from woodfrog.kernels.template import Exactness, Kind, Launch, Range, Template

_FLAGS = ("-std=c++20", "-O2", "-fPIC", "-shared", "-fvisibility=hidden", "-w")
_COMPILE_TIMEOUT_S = 300
_FIRST_CAPACITY = 256


class _Allocation(ctypes.Structure):
    _fields_ = (("address", ctypes.c_uint64), ("size_bytes", ctypes.c_uint64))


class _Launch(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("parameters", ctypes.c_char_p),
        ("parameters_bytes", ctypes.c_int64),
        ("allocations", ctypes.POINTER(_Allocation)),
        ("allocation_count", ctypes.c_int64),
        ("symbols", ctypes.POINTER(ctypes.c_uint64)),
    )


class _Range(ctypes.Structure):
    _fields_ = (
        ("address", ctypes.c_uint64),
        ("size_bytes", ctypes.c_uint64),
        ("exactness", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32),
    )


class PreparedLaunch:
    """A launch in the form the library takes; owns all memory that it points to."""

    def __init__(self, template: Template, launch: Launch) -> None:
        ordered = sorted(launch.allocations)
        self._allocations = (_Allocation * max(len(ordered), 1))(*[_Allocation(a, s) for a, s in ordered])
        addresses = [launch.symbols.get(name, (0, 0))[0] for name in template.symbols]
        self._symbols = (ctypes.c_uint64 * max(len(addresses), 1))(*addresses)
        self._parameters = bytes(launch.parameters)
        self.value = _Launch(
            (ctypes.c_uint32 * 3)(*launch.grid),
            (ctypes.c_uint32 * 3)(*launch.block),
            self._parameters,
            len(self._parameters),
            self._allocations,
            len(ordered),
            self._symbols,
        )


class Catalogue:
    """The templates of some kernels, compiled if a compiler is there. `library` is the path of the shared object."""

    def __init__(
        self,
        templates: Sequence[Template],
        *,
        cache: Path | None = None,
        compiler: str | None = None,
        flags: Sequence[str] = (),
    ) -> None:
        """Compile or find `templates`. Raises RefusedError for a cache folder that others may write to.

        `compiler` None: the one named by CXX, else c++, g++ or clang++ on PATH; "" : none, interpret. `flags`: more for
        the compiler.
        """
        self.templates = tuple(templates)
        self.library: Path | None = None
        self._function: ctypes._FuncPointer | None = None
        program = _compiler() if compiler is None else compiler
        if program:
            self.library = _build(self.templates, cache or _default_cache(), program, (*_FLAGS, *flags))
            self._function = ctypes.CDLL(str(self.library)).access_templates_evaluate
            self._function.restype = ctypes.c_int64
            self._function.argtypes = (
                ctypes.c_int64,
                ctypes.POINTER(_Launch),
                ctypes.c_uint,
                ctypes.POINTER(_Range),
                ctypes.c_int64,
            )

    def ranges(self, number: int, launch: Launch, *, kinds: Sequence[Kind] = tuple(Kind)) -> list[Range]:
        """What a launch of template `number` touches: see Template.ranges."""
        template = self.templates[number]
        if self._function is None:
            return template.ranges(launch, kinds=kinds)
        prepared = PreparedLaunch(template, launch)
        capacity = _FIRST_CAPACITY
        while True:
            out = (_Range * capacity)()
            count = self.evaluate(number, prepared, kinds, out)
            if count < 0:
                raise UsageError(
                    f"the launch does not fit {template.kernel}: too few parameters, or an empty dimension"
                )
            if count <= capacity:
                return [
                    Range(out[i].address, out[i].size_bytes or 1 << 64, Exactness(out[i].exactness))
                    for i in range(count)
                ]
            capacity = count

    def evaluate(self, number: int, prepared: PreparedLaunch, kinds: Sequence[Kind], out: ctypes.Array[_Range]) -> int:
        """Call the compiled evaluator: the number of ranges, of which the first are in `out`; -1: it does not fit."""
        assert self._function is not None, "this catalogue is interpreted"
        mask = sum(1 << int(kind) for kind in kinds)
        return int(self._function(number, ctypes.byref(prepared.value), mask, out, len(out)))


def new_ranges(count: int) -> ctypes.Array[_Range]:
    """Room for `count` ranges, for Catalogue.evaluate."""
    return (_Range * count)()


def _compiler() -> str:
    named = os.environ.get("CXX", "")
    for name in (named, "c++", "g++", "clang++"):
        found = shutil.which(name) if name else None
        if found:
            return found
    return ""


def _default_cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if base else Path.home() / ".cache") / "woodfrog" / "kernels"


def _build(templates: Sequence[Template], cache: Path, compiler: str, flags: Sequence[str]) -> Path:
    text = codegen.source(templates)
    content = hashlib.sha256()
    for part in (text.encode(), compiler.encode(), " ".join(flags).encode()):
        content.update(len(part).to_bytes(8, "little") + part)
    for header in sorted(codegen.HEADERS.glob("*.hpp")):
        content.update(header.read_bytes())
    cache.mkdir(parents=True, exist_ok=True, mode=0o700)
    status = cache.stat()
    if status.st_uid != os.getuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise RefusedError(
            f"{cache} belongs to someone else or others may write to it, and what is in it is loaded as code",
            advice="Name a folder of your own with mode 0700.",
            target_state=TargetState.NONE,
        )
    library = cache / f"{content.hexdigest()[:32]}.so"
    if library.exists():
        return library
    with tempfile.TemporaryDirectory(dir=cache) as folder:
        source, made = Path(folder) / "templates.cpp", Path(folder) / "templates.so"
        source.write_text(text)
        command = [compiler, *flags, f"-I{codegen.HEADERS}", str(source), "-o", str(made)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_COMPILE_TIMEOUT_S, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise KernelFileError(f"the templates could not be compiled: {compiler} did not run ({error})") from None
        if done.returncode:
            first = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr[:200])
            raise KernelFileError(f"the templates could not be compiled: {first}")
        made.chmod(0o700)
        made.replace(library)  # whole or not at all, also with several builders at once
    return library
