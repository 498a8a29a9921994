"""What ELF files say about GPU code: fatbin sections of host objects, kernels and their parameters in cubins.

pyelftools reads the structure; this file knows the GPU's own sections. It never trusts an offset or count it has not
compared with the file.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Iterator
from typing import Any

from elftools.common.exceptions import ELFError
from elftools.construct import ConstructError
from elftools.elf.elffile import ELFFile

from woodfrog.kernels import limits
from woodfrog.kernels.error import KernelFileError
from woodfrog.kernels.reader.code import KernelInfo, Parameter

MAGIC = b"\x7fELF"
MACHINE_CUDA = 190  # EM_CUDA of the ELF registry
FATBIN_SECTIONS = (".nv_fatbin", "__nv_relfatbin")
# Whatever pyelftools raises on damaged structure.
_DAMAGE = (
    ELFError,
    ConstructError,
    struct.error,
    ValueError,
    KeyError,
    IndexError,
    TypeError,
    AttributeError,
    AssertionError,
    OverflowError,
    EOFError,
    OSError,
)
_SECTIONS = 1 << 17
# Attributes of `.nv.info.<kernel>`, read off cubins of nvcc 11 to 13: {u8 format, u8 attribute, u16 size or value}.
_FORMAT_SIZED = 4
_ATTRIBUTE_PARAMETER = 0x17  # {u32 index, u16 ordinal, u16 offset, u32 with the size from bit 18}
_ATTRIBUTE_PARAMETER_SPACE = 0x19  # u16 bytes of all parameters


def machine(data: memoryview) -> int:
    """e_machine of an ELF header, 0 where there is none."""
    if len(data) < 20 or bytes(data[:4]) != MAGIC:
        return 0
    order = ">" if data[5] == 2 else "<"
    return int(struct.unpack_from(f"{order}H", data, 18)[0])


def fatbin_sections(data: memoryview, origin: str) -> Iterator[tuple[str, memoryview]]:
    """Name and content of the sections of a host object that hold fatbin containers."""
    for section in _sections(data, origin):
        if section.name in FATBIN_SECTIONS:
            start, size = int(section["sh_offset"]), int(section["sh_size"])
            if start + size > len(data):
                raise KernelFileError(f"{origin}: section {section.name} reaches beyond the file")
            yield section.name, data[start : start + size]


def architecture(cubin: bytes, origin: str) -> str:
    """The architecture a cubin was built for, e.g. "sm_90"."""
    try:
        elf = ELFFile(io.BytesIO(cubin))
        flags = int(elf["e_flags"])
        # ABI version 8 (CUDA 13) moved the architecture up a byte.
        number = (flags >> 8) & 0xFF if int(elf["e_ident"]["EI_ABIVERSION"]) >= 8 else flags & 0xFF
    except _DAMAGE as error:
        raise _damaged(origin, error) from None
    return f"sm_{number}"


def kernels(cubin: bytes, origin: str) -> list[KernelInfo]:
    """The kernels of a cubin with their parameters, in the order of the file."""
    infos: dict[str, bytes] = {}
    names: list[str] = []
    total_bytes = 0
    view = memoryview(cubin)
    for section in _sections(view, origin):
        name = section.name
        start, size = int(section["sh_offset"]), int(section["sh_size"])
        if name.startswith(".nv.info."):
            total_bytes += size
            if start + size > len(cubin) or total_bytes > len(cubin):
                raise KernelFileError(f"{origin}: section {name} reaches beyond the file")
            infos[name[len(".nv.info.") :]] = cubin[start : start + size]
        elif name.startswith(".text."):
            names.append(name[len(".text.") :])
    if len(names) > limits.KERNELS:
        raise KernelFileError(f"{origin} says it holds {len(names)} kernels, more than the {limits.KERNELS} allowed")
    # A device function that is no kernel has a .text section too, but no parameters and no parameter space.
    found = []
    for name in names:
        if name in infos:
            parameters = _parameters(infos[name], f"{origin}, kernel {name}")
            if parameters is not None:
                found.append(KernelInfo(name, parameters))
    return found


def _parameters(info: bytes, origin: str) -> tuple[Parameter, ...] | None:
    found: dict[int, Parameter] = {}
    is_kernel = False
    position = 0
    while position + 4 <= len(info):
        form, attribute, size = struct.unpack_from("<BBH", info, position)
        position += 4
        if attribute == _ATTRIBUTE_PARAMETER_SPACE:
            is_kernel = True
        if form != _FORMAT_SIZED:
            continue
        if position + size > len(info):
            raise KernelFileError(f"{origin}: its .nv.info section is cut off")
        if attribute == _ATTRIBUTE_PARAMETER and size >= 12:
            _index, ordinal, offset, packed = struct.unpack_from("<IHHI", info, position)
            found[ordinal] = Parameter(ordinal, offset, packed >> 18)
            is_kernel = True
            if len(found) > limits.PARAMETERS:
                raise KernelFileError(f"{origin} has more than {limits.PARAMETERS} parameters")
        position += size
    return tuple(found[ordinal] for ordinal in sorted(found)) if is_kernel else None


def _sections(data: memoryview, origin: str) -> Iterator[Any]:
    try:
        elf = ELFFile(_ViewStream(data))  # type: ignore[arg-type]
        count = elf.num_sections()
        if count > _SECTIONS:
            raise KernelFileError(f"{origin} says it has {count} sections")
        # The whole table is looked at before any section is used, so that damage shows before work is done.
        sections = [section for section in elf.iter_sections() if section["sh_type"] != "SHT_NOBITS"]
        for section in sections:
            if not isinstance(section.name, str):
                raise KernelFileError(f"{origin}: a section has no readable name")
    except _DAMAGE as error:
        raise _damaged(origin, error) from None
    yield from sections


def _damaged(origin: str, error: Exception) -> KernelFileError:
    text = " ".join(str(error).split())[:200]
    return KernelFileError(f"{origin} is damaged: its ELF structure cannot be read ({text or type(error).__name__})")


class _ViewStream(io.RawIOBase):
    """A readable stream over a memoryview: a mapped file of any size is never copied as a whole."""

    def __init__(self, view: memoryview) -> None:
        super().__init__()
        self._view = view
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: len(self._view)}[whence]
        if base + offset < 0:
            raise ValueError("a position before the beginning of the file")
        self._position = base + offset
        return self._position

    def tell(self) -> int:
        return self._position

    def read(self, size: int = -1) -> bytes:
        end = len(self._view) if size < 0 else min(len(self._view), self._position + size)
        data = bytes(self._view[self._position : end])
        self._position += len(data)
        return data
