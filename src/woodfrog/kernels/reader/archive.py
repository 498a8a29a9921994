"""Members of `ar` archives (System V, GNU, and BSD long names). Reads headers only; members stay views of the file."""

from __future__ import annotations

from collections.abc import Iterator

from woodfrog.kernels import limits
from woodfrog.kernels.error import KernelFileError

MAGIC = b"!<arch>\n"
_HEADER_BYTES = 60
_INDEX_NAMES = ("/", "/SYM64/", "__.SYMDEF", "__.SYMDEF SORTED")


def members(data: memoryview, origin: str) -> Iterator[tuple[str, memoryview]]:
    """Name and content of each member that is not the archive's own index."""
    position, number, long_names = len(MAGIC), 0, b""
    while position < len(data):
        number += 1
        if number > limits.ARCHIVE_MEMBERS:
            raise KernelFileError(f"{origin} holds more than {limits.ARCHIVE_MEMBERS} members")
        header = bytes(data[position : position + _HEADER_BYTES])
        if len(header) < _HEADER_BYTES or header[58:60] != b"`\n":
            raise KernelFileError(f"{origin}: offset {position} holds no member header")
        digits = header[48:58].strip()
        if not digits.isdigit():
            raise KernelFileError(f"{origin}: the member at offset {position} has no readable size")
        size_bytes = int(digits)
        start = position + _HEADER_BYTES
        if size_bytes > len(data) - start:
            raise KernelFileError(f"{origin}: the member at offset {position} reaches beyond the archive")
        content = data[start : start + size_bytes]
        position = start + size_bytes + (size_bytes & 1)
        name = header[:16].decode("utf-8", "replace").strip()
        if name == "//":
            long_names = bytes(content)
            continue
        if name in _INDEX_NAMES:
            continue
        if name.startswith("#1/") and name[3:].isdigit():
            length = int(name[3:])
            name = bytes(content[:length]).rstrip(b"\0").decode("utf-8", "replace")
            content = content[length:]
        elif name.startswith("/") and name[1:].isdigit():
            at = int(name[1:])
            name = long_names[at : at + 4096].split(b"/\n", 1)[0].split(b"\n", 1)[0].decode("utf-8", "replace")
        yield name.rstrip("/"), content
