"""Changes to CRIU's list of open files before a restore: sizes, paths and ports, in a copy of the file.

What is not named is carried over byte for byte, fields that this version does not know included. Must never change
anything else, and never an image itself.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from woodfrog.cpu import images
from woodfrog.cpu.protobuf import Fields, damaged, fields_of, optional, required, spans, tag, varint, without
from woodfrog.errors import RefusedError, TargetState

_FILE = Path("files.img")


@dataclass(frozen=True)
class Changes:
    """What a restored tree shall find other than it left it. `owner`: of files that have to be made, (uid, gid)."""

    paths: Mapping[str, str] = field(default_factory=dict)  # of open regular files: as recorded → instead
    ports: Mapping[int, int] = field(default_factory=dict)  # that it listens on, TCP
    owner: tuple[int, int] | None = None

    def require_ports(self, directory: Path, listed: list[Fields] | None = None) -> set[int]:
        """The ports that the tree dumped there will listen on. RefusedError when it does not listen on one that is to
        change, would on one twice, or on one that somebody else has. CRIU would not see the last: it binds with
        SO_REUSEPORT, and where the other was restored by CRIU as well the kernel then gives the port to both."""
        there = images.listening(directory, listed)
        known = {one.port for one in there}
        if missing := sorted(set(self.ports) - known):
            found = ", ".join(map(str, sorted(known))) or "none"
            raise _refused(
                f"the image does not listen on TCP port {missing[0]}; it listens on: {found}",
                "give --port OLD=NEW with one of these as OLD",
            )
        if len({self.ports.get(port, port) for port in known}) < len(known):
            raise _refused(f"two of the image's ports ({', '.join(map(str, sorted(known)))}) would become one", "")
        wanted = [replace(one, port=self.ports.get(one.port, one.port)) for one in there]
        here = _listening_here() if wanted else []  # slow: see time_wait.free
        taken = [one for one in wanted if any(one.is_met_by(other) for other in here)]
        if taken:
            raise _refused(
                f"TCP port {min(one.port for one in taken)}, which the target listens on, is in use",
                "end whoever has it, or restore with --port OLD=NEW (auto: any free one)",
            )
        return {one.port for one in wanted}


def _refused(reason: str, advice: str) -> RefusedError:
    return RefusedError(reason, advice=advice, phase="cpu", target_state=TargetState.NONE)


def _listening_here() -> list[images.Listening]:
    """What this network namespace listens on."""
    found = []
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(FileNotFoundError):  # a kernel without IPv6
            for line in Path("/proc/net", name).read_text().splitlines()[1:]:
                local, state = line.split()[1], line.split()[3]
                if state == "0A":
                    address, _, port = local.partition(":")
                    found.append(images.Listening(address, int(port, 16)))
    return found


def rewritten(files_image: bytes, changes: Changes, sizes: Mapping[int, int]) -> bytes:
    """`files_image` with the changes made; `sizes` are those of files by their id, as CRIU compares them."""
    out = bytearray(files_image[:8])
    for start, end in spans(_FILE, files_image, images.FILES_MAGIC):
        record = files_image[start:end]
        fields = fields_of(_FILE, record)
        if images.FILE_REG in fields:
            record = _with_part(record, images.FILE_REG, _file(_part(fields[images.FILE_REG]), changes, sizes))
        elif images.FILE_INET in fields:
            record = _with_part(record, images.FILE_INET, _socket(_part(fields[images.FILE_INET]), changes))
        out += struct.pack("<I", len(record)) + record
    return bytes(out)


def _file(raw: bytes, changes: Changes, sizes: Mapping[int, int]) -> bytes:
    fields = fields_of(_FILE, raw)
    size = sizes.get(required(_FILE, fields, images.REG_ID))
    if size is not None:
        raw = without(_FILE, raw, images.REG_SIZE) + tag(images.REG_SIZE, 0) + varint(size)
    name = fields.get(images.REG_NAME, [b""])[-1]
    path = changes.paths.get(name.decode(errors="surrogateescape")) if isinstance(name, bytes) else None
    if path is not None:
        new = path.encode(errors="surrogateescape")
        raw = without(_FILE, raw, images.REG_NAME) + tag(images.REG_NAME, 2) + varint(len(new)) + new
    return raw


def _socket(raw: bytes, changes: Changes) -> bytes:
    fields = fields_of(_FILE, raw)
    port = changes.ports.get(optional(fields, images.INET_PORT) or 0)
    if port is None or not images.is_listening(_FILE, fields):
        return raw
    return without(_FILE, raw, images.INET_PORT) + tag(images.INET_PORT, 0) + varint(port)


def _part(values: list[int | bytes]) -> bytes:
    value = values[-1]
    if not isinstance(value, bytes):
        raise damaged(_FILE, "a file's record is not a message")
    return value


def _with_part(record: bytes, number: int, part: bytes) -> bytes:
    """The record with its field `number` replaced; itself when that is the same."""
    if _part(fields_of(_FILE, record)[number]) == part:
        return record
    return without(_FILE, record, number) + tag(number, 2) + varint(len(part)) + part
