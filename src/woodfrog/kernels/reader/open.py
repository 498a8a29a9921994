"""Tells by their first bytes what files are, and takes them apart down to cubins and PTX text.

Files are mapped, not read; only code that was found is copied. One damaged piece makes the whole file an error.
"""

from __future__ import annotations

import mmap
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path

from woodfrog.kernels import limits
from woodfrog.kernels.error import KernelFileError, NoGpuCodeError
from woodfrog.kernels.reader import archive, elf, fatbin
from woodfrog.kernels.reader.code import CodeObject

_PTX_VERSION = re.compile(rb"^\s*\.version\s+\d", re.MULTILINE)
_PTX_TARGET = re.compile(rb"^\s*\.target\s+(sm_\w+)", re.MULTILINE)
_HEAD_BYTES = 1 << 16  # comments before `.version` are a few hundred bytes
_NO_CODE = "it is no executable, shared object, object, archive, fatbin, cubin or PTX text with GPU code"


def read_file(path: Path | str) -> list[CodeObject]:
    """All GPU code in a file. KernelFileError when there is none, or when the file cannot be read or is damaged."""
    path = Path(path)
    try:
        # Not blocking: what has the name of a file may be a pipe that nobody writes to.
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise KernelFileError(f"{path} is not a regular file")
            if status.st_size > limits.FILE_BYTES:
                raise KernelFileError(f"{path} has {status.st_size} bytes, more than the {limits.FILE_BYTES} allowed")
            if status.st_size == 0:
                raise NoGpuCodeError(f"{path} is empty")
            # Unmapped with its last view: an error's traceback may hold some, and closing under them is an error too.
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        return list(_code(memoryview(mapped), path.name, depth=0))
    except OSError as error:
        raise KernelFileError(f"{path} cannot be read: {error.strerror}") from None


def read_bytes(data: bytes, origin: str = "the data") -> list[CodeObject]:
    """All GPU code in `data`, which may be anything that a file may be."""
    if len(data) > limits.FILE_BYTES:
        raise KernelFileError(f"{origin} has {len(data)} bytes, more than the {limits.FILE_BYTES} allowed")
    return list(_code(memoryview(data), origin, depth=0))


def _code(data: memoryview, origin: str, *, depth: int) -> Iterator[CodeObject]:
    head = bytes(data[:8])
    if head[:4] == elf.MAGIC:
        yield from _elf(data, origin)
    elif head[:4] == fatbin.MAGIC_BYTES:
        yield from _with_architecture(fatbin.containers(data, origin))
    elif head == archive.MAGIC and depth == 0:
        for name, content in archive.members(data, origin):
            if bytes(content[:4]) == elf.MAGIC:
                yield from _elf(content, f"{origin}({name})", required=False)
    elif _PTX_VERSION.search(bytes(data[:_HEAD_BYTES])):
        if len(data) > limits.PTX_BYTES:
            raise KernelFileError(f"{origin} has {len(data)} bytes of PTX, more than the {limits.PTX_BYTES} allowed")
        text = bytes(data).split(b"\0", 1)[0]
        target = _PTX_TARGET.search(text[:_HEAD_BYTES])
        yield CodeObject("ptx", target[1].decode() if target else "unknown", "none", len(text), text, origin)
    else:
        raise NoGpuCodeError(f"{origin} holds no GPU code: {_NO_CODE}")


def _elf(data: memoryview, origin: str, *, required: bool = True) -> Iterator[CodeObject]:
    if elf.machine(data) == elf.MACHINE_CUDA:
        if len(data) > limits.CODE_BYTES:
            raise KernelFileError(f"{origin} has {len(data)} bytes, more than the {limits.CODE_BYTES} allowed")
        cubin = bytes(data)
        yield CodeObject("cubin", elf.architecture(cubin, origin), "none", len(cubin), cubin, origin)
        return
    sections = list(elf.fatbin_sections(data, origin))
    if not sections and required:
        raise NoGpuCodeError(f"{origin} holds no GPU code: it has no section with a fatbin")
    for name, content in sections:
        yield from _with_architecture(fatbin.containers(content, f"{origin}, section {name}"))


def _with_architecture(found: Iterator[CodeObject]) -> Iterator[CodeObject]:
    """The fatbin's own word for the architecture lacks the letter of sm_90a; PTX says it itself."""
    for code in found:
        target = _PTX_TARGET.search(code.data[:_HEAD_BYTES]) if code.kind == "ptx" else None
        if target:
            yield CodeObject(code.kind, target[1].decode(), code.compression, code.stored_bytes, code.data, code.origin)
        else:
            yield code
