"""Compiled catalogues: templates as a shared object, made by the system's C++ compiler and kept by content hash.

The evaluator is the same in all catalogues and takes far longer to compile than the tables of one: it is compiled once
and kept beside them. Where there is no compiler, Catalogue.ranges interprets the same templates in Python: slower, the
same ranges. A cache folder belongs to its user alone: what is in it is loaded as code.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Protocol

from woodfrog.errors import RefusedError, TargetState, UsageError
from woodfrog.kernels import codegen
from woodfrog.kernels.error import KernelFileError
from woodfrog.kernels.template import Exactness, Kind, Launch, Range, Reader, Template

_FLAGS = ("-std=c++20", "-O2", "-fPIC", "-fvisibility=hidden", "-w")
_COMPILE_TIMEOUT_S = 300
_FIRST_CAPACITY = 256
_NO_MEMORY = -2  # of the evaluator


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


_Read = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p, ctypes.c_uint64, ctypes.c_void_p, ctypes.c_uint64)


class _Named(Protocol):
    """What is needed of a template, or of a kernel that was built ahead, to call the evaluator."""

    @property
    def kernel(self) -> str: ...
    @property
    def symbols(self) -> tuple[str, ...]: ...


class PreparedLaunch:
    """A launch in the form the library takes; owns all memory that it points to."""

    def __init__(self, template: _Named, launch: Launch) -> None:
        ordered = sorted(launch.allocations)
        self._allocations = (_Allocation * max(len(ordered), 1))(*[_Allocation(a, s) for a, s in ordered])
        addresses = [launch.symbols.get(name, (0, 0))[0] for name in template.symbols]
        self._symbols = (ctypes.c_uint64 * max(len(addresses), 1))(*addresses)
        self._parameters = bytes(launch.parameters)
        self.read = None if launch.contents is None else _Read(_reading(launch.contents))
        self.value = _Launch(
            (ctypes.c_uint32 * 3)(*launch.grid),
            (ctypes.c_uint32 * 3)(*launch.block),
            self._parameters,
            len(self._parameters),
            self._allocations,
            len(ordered),
            self._symbols,
        )


class Library:
    """A catalogue's shared object, loaded. Raises KernelFileError when it cannot be."""

    def __init__(self, path: Path) -> None:
        try:
            library = ctypes.CDLL(str(path))
            self._function = library.access_templates_evaluate
            self._with_contents = library.access_templates_evaluate_contents
        except (OSError, AttributeError) as error:
            raise KernelFileError(f"{path} is no catalogue: {error}", advice="Remove it; it is built again.") from None
        arguments = (
            ctypes.c_int64,
            ctypes.POINTER(_Launch),
            ctypes.c_uint,
            ctypes.POINTER(_Range),
            ctypes.c_int64,
        )
        self._function.restype = ctypes.c_int64
        self._function.argtypes = arguments
        self._with_contents.restype = ctypes.c_int64
        self._with_contents.argtypes = (*arguments, _Read, ctypes.c_void_p)

    def ranges(self, kernel: _Named, number: int, launch: Launch, kinds: Sequence[Kind]) -> list[Range]:
        prepared = PreparedLaunch(kernel, launch)
        capacity = _FIRST_CAPACITY
        while True:
            out = (_Range * capacity)()
            count = self.bound(number, prepared, kinds, out)()
            if count == _NO_MEMORY:
                raise MemoryError("there is no memory to evaluate a template with")
            if count < 0:
                raise UsageError(f"the launch does not fit {kernel.kernel}: too few parameters, or an empty dimension")
            if count <= capacity:
                return [
                    Range(out[i].address, out[i].size_bytes or 1 << 64, Exactness(out[i].exactness))
                    for i in range(count)
                ]
            capacity = count

    def bound(
        self, number: int, prepared: PreparedLaunch, kinds: Sequence[Kind], out: ctypes.Array[_Range]
    ) -> Callable[[], int]:
        """A call of the evaluator with its arguments converted: what is left is about what a call from C costs.

        It gives the number of ranges, of which the first are in `out`; -1: the launch does not fit; -2: no memory.
        """
        mask = ctypes.c_uint(sum(1 << int(kind) for kind in kinds))
        arguments = (ctypes.c_int64(number), ctypes.byref(prepared.value), mask, out, ctypes.c_int64(len(out)))
        if prepared.read is None:
            return partial(self._function, *arguments)
        return partial(self._with_contents, *arguments, prepared.read, None)


class Catalogue:
    """The templates of some kernels, compiled if a compiler is there. `library` is the path of the shared object."""

    def __init__(
        self,
        templates: Sequence[Template],
        *,
        cache: Path | None = None,
        compiler: str | None = None,
        flags: Sequence[str] = (),
        objects: Path | None = None,
    ) -> None:
        """Compile or find `templates`. Raises RefusedError for a cache folder that others may write to.

        `compiler` None: the one named by CXX, else c++, g++ or clang++ on PATH; "" : none, interpret. `flags`: more for
        the compiler. `objects`: where the compiled evaluator is kept; None: in the cache.
        """
        self.templates = tuple(templates)
        self.library: Path | None = None
        self._library: Library | None = None
        program = _compiler() if compiler is None else compiler
        if program:
            place = cache or default_cache()
            self.library = _build(self.templates, place, program, (*_FLAGS, *flags), objects or place)
            self._library = Library(self.library)

    def ranges(self, number: int, launch: Launch, *, kinds: Sequence[Kind] = tuple(Kind)) -> list[Range]:
        """What a launch of template `number` touches: see Template.ranges."""
        template = self.templates[number]
        if self._library is None:
            return template.ranges(launch, kinds=kinds)
        return self._library.ranges(template, number, launch, kinds)

    def evaluate(self, number: int, prepared: PreparedLaunch, kinds: Sequence[Kind], out: ctypes.Array[_Range]) -> int:
        """Call the compiled evaluator: the number of ranges, of which the first are in `out`; -1: it does not fit."""
        return self.bound(number, prepared, kinds, out)()

    def bound(
        self, number: int, prepared: PreparedLaunch, kinds: Sequence[Kind], out: ctypes.Array[_Range]
    ) -> Callable[[], int]:
        """See Library.bound."""
        assert self._library is not None, "this catalogue is interpreted"
        return self._library.bound(number, prepared, kinds, out)


def _reading(contents: Reader) -> Callable[[object, int, int, int], bool]:
    def read(_: object, address: int, to: int, size_bytes: int) -> bool:
        data = contents(address, size_bytes)
        if data is None or len(data) != size_bytes:
            return False
        ctypes.memmove(to, data, size_bytes)
        return True

    return read


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


def default_cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if base else Path.home() / ".cache") / "woodfrog" / "kernels"


def check_own(cache: Path) -> None:
    """Raises RefusedError for a folder that is not its user's alone."""
    status = cache.stat()
    if status.st_uid != os.getuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise RefusedError(
            f"{cache} belongs to someone else or others may write to it, and what is in it is loaded as code",
            advice="Name a folder of your own with mode 0700.",
            target_state=TargetState.NONE,
        )


def _build(templates: Sequence[Template], cache: Path, compiler: str, flags: Sequence[str], objects: Path) -> Path:
    text = codegen.source(templates)
    command = [compiler, *flags, f"-I{codegen.HEADERS}"]
    identity = [compiler.encode(), " ".join(flags).encode(), codegen.evaluator_source().encode()]
    identity += [header.read_bytes() for header in sorted(codegen.HEADERS.glob("*.hpp"))]
    library = _private(cache) / f"{_hash([text.encode(), *identity])}.so"
    if library.exists():
        return library
    evaluator = _private(objects) / f"evaluator-{_hash(identity)}.o"
    if not evaluator.exists():
        _compile([*command, "-c"], codegen.evaluator_source(), [], evaluator)
    _compile([*command, "-shared"], text, [str(evaluator)], library)
    return library


def _hash(parts: Sequence[bytes]) -> str:
    content = hashlib.sha256()
    for part in parts:
        content.update(len(part).to_bytes(8, "little") + part)
    return content.hexdigest()[:32]


def _private(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    check_own(folder)
    return folder


def _compile(command: Sequence[str], text: str, more: Sequence[str], target: Path) -> None:
    """`target`, whole or not at all, also with several builders at once."""
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        source, made = Path(folder) / "templates.cpp", Path(folder) / target.name
        source.write_text(text)
        try:
            done = subprocess.run(
                [*command, str(source), *more, "-o", str(made)],
                capture_output=True, text=True, timeout=_COMPILE_TIMEOUT_S, check=False,
            )  # fmt: skip
        except (OSError, subprocess.TimeoutExpired) as error:
            raise KernelFileError(f"the templates could not be compiled: {command[0]} did not run ({error})") from None
        if done.returncode:
            first = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr[:200])
            raise KernelFileError(f"the templates could not be compiled: {first}")
        made.chmod(0o700)
        made.replace(target)
