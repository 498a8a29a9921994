"""Reads the few of CRIU's image files that woodfrog needs: the process tree, open regular files, unix sockets.

Only the handful of fields named below are read; everything else is passed over, so newer CRIU releases that add fields
are fine. Whatever does not parse is a BadImageError. This module never writes; changes for a restore are rewrite.py's.
"""

from __future__ import annotations

import re
import stat
from dataclasses import dataclass
from pathlib import Path

from woodfrog.cpu.protobuf import Fields, damaged, nested, numbers, optional, records, required

# criu/include/magic.h
_PSTREE_MAGIC = 0x50273030
FILES_MAGIC = 0x56303138
_REMAP_MAGIC = 0x59133954

# images/fdinfo.proto, regfile.proto, sk-inet.proto, sk-unix.proto, pstree.proto, remap-file-path.proto: field numbers
_FILE_TYPE, FILE_REG, FILE_INET, _FILE_UNIX = 1, 3, 4, 16
_TYPE_REG, _TYPE_INET, _TYPE_UNIX = 1, 4, 5
_INET_PROTOCOL, _INET_STATE, INET_PORT, _INET_ADDRESS = 5, 6, 7, 11
_TCP, _LISTENING = 6, 10  # netinet/in.h, include/net/tcp_states.h
_UNIX_NAME, _UNIX_PERMS = 11, 13
_PERMS_UID, _PERMS_GID = 2, 3
REG_ID, _REG_FLAGS, _REG_POS, REG_NAME, REG_SIZE, _REG_EXT, _REG_MODE = 1, 2, 3, 6, 8, 9, 10
_TREE_PID, _TREE_PPID, _TREE_PGID, _TREE_SID, _TREE_THREADS = 1, 2, 3, 4, 5
_REMAP_ORIGINAL, _REMAP_TARGET, _REMAP_TYPE = 1, 2, 3
_REMAP_LINKED = 0

_PAGES = re.compile(r"pages-[0-9]+\.img")  # criu/include/image-desc.h

_NO_POSITION = 2**64 - 1  # CRIU's "has no file position"


@dataclass(frozen=True)
class Task:
    """One process of a dumped tree, with the numbers that it must get again."""

    pid: int
    parent_pid: int
    group_id: int
    session_id: int
    threads: tuple[int, ...]


@dataclass(frozen=True)
class OpenFile:
    """A regular file that some process of the dumped tree had open or mapped, as CRIU will look for it."""

    file_id: int
    path: str
    flags: int  # as for open(2)
    position: int | None
    size_bytes: int | None  # None: CRIU does not compare it (files that are only appended to)
    mode: int


@dataclass(frozen=True)
class SocketFile:
    """A unix socket of the dumped tree that is bound to an absolute path; CRIU binds it there again."""

    path: str
    uid: int
    gid: int


@dataclass(frozen=True, order=True)
class Listening:
    """A TCP address that is listened on, written as in /proc/net/tcp."""

    address: str
    port: int

    @property
    def is_any(self) -> bool:
        return not self.address.strip("0")

    def is_met_by(self, other: Listening) -> bool:
        """Whether connections that come to one could have been meant for the other."""
        return self.port == other.port and (self.address == other.address or self.is_any or other.is_any)


def is_pages(name: str) -> bool:
    """Whether that file of CRIU's is one of pages. CRIU opens them in the processes that it makes, not before."""
    return _PAGES.fullmatch(name) is not None


def tasks(directory: Path) -> list[Task]:
    """The dumped process tree, root first."""
    path = directory / "pstree.img"
    found = []
    for fields in records(path, _PSTREE_MAGIC):
        found.append(
            Task(
                pid=required(path, fields, _TREE_PID),
                parent_pid=required(path, fields, _TREE_PPID),
                group_id=required(path, fields, _TREE_PGID),
                session_id=required(path, fields, _TREE_SID),
                threads=tuple(numbers(fields, _TREE_THREADS)),
            )
        )
    if not found:
        raise damaged(path, "it holds no process")
    return found


def file_records(directory: Path) -> list[Fields]:
    """CRIU's list of open files, for whoever asks several of the functions below: a large program has many hundred of
    them, mapped libraries included, and they are read in Python."""
    return list(records(directory / "files.img", FILES_MAGIC))


def open_files(directory: Path, listed: list[Fields] | None = None) -> list[OpenFile]:
    """Regular files that CRIU opens by path at restore; deleted files are not among them."""
    path = directory / "files.img"
    remapped = {original for original, _ in _remaps(directory)}
    found = []
    for fields in file_records(directory) if listed is None else listed:
        if required(path, fields, _FILE_TYPE) != _TYPE_REG or FILE_REG not in fields:
            continue
        reg = nested(path, fields, FILE_REG)
        if required(path, reg, REG_ID) in remapped or optional(reg, _REG_EXT):
            continue
        mode = optional(reg, _REG_MODE) or 0
        if not stat.S_ISREG(mode):
            continue
        name = reg.get(REG_NAME, [b""])[-1]
        if not isinstance(name, bytes) or not name.startswith(b"/"):
            raise damaged(path, "a file in it has no absolute path")
        position = required(path, reg, _REG_POS)
        found.append(
            OpenFile(
                file_id=required(path, reg, REG_ID),
                path=name.decode(errors="surrogateescape"),
                flags=required(path, reg, _REG_FLAGS),
                position=None if position == _NO_POSITION else position,
                size_bytes=optional(reg, REG_SIZE),
                mode=mode,
            )
        )
    return found


def socket_files(directory: Path, listed: list[Fields] | None = None) -> list[SocketFile]:
    """Unix sockets bound to an absolute path of the filesystem; abstract and relative names are not among them."""
    path = directory / "files.img"
    found = []
    for fields in file_records(directory) if listed is None else listed:
        if required(path, fields, _FILE_TYPE) != _TYPE_UNIX or _FILE_UNIX not in fields:
            continue
        socket = nested(path, fields, _FILE_UNIX)
        name = socket.get(_UNIX_NAME, [b""])[-1]
        if not isinstance(name, bytes) or not name.startswith(b"/"):
            continue
        owner = nested(path, socket, _UNIX_PERMS) if _UNIX_PERMS in socket else {}
        found.append(
            SocketFile(
                path=name.rstrip(b"\0").decode(errors="surrogateescape"),
                uid=optional(owner, _PERMS_UID) or 0,
                gid=optional(owner, _PERMS_GID) or 0,
            )
        )
    return found


def listening(directory: Path, listed: list[Fields] | None = None) -> set[Listening]:
    """Where the dumped tree listened for TCP connections."""
    path = directory / "files.img"
    found = set()
    for fields in file_records(directory) if listed is None else listed:
        if required(path, fields, _FILE_TYPE) == _TYPE_INET and FILE_INET in fields:
            socket = nested(path, fields, FILE_INET)
            if is_listening(path, socket):
                words = numbers(socket, _INET_ADDRESS)
                found.add(Listening("".join(f"{word:08X}" for word in words), required(path, socket, INET_PORT)))
    return found


def is_listening(path: Path, socket: Fields) -> bool:
    """Whether an inet_sk_entry is a TCP socket that takes connections."""
    return required(path, socket, _INET_PROTOCOL) == _TCP and required(path, socket, _INET_STATE) == _LISTENING


def linked_remaps(directory: Path) -> list[str]:
    """Paths of the hard links that CRIU left for deleted files that still have another name; a restore eats them."""
    wanted = {target for _, target in _remaps(directory, kind=_REMAP_LINKED)}
    path = directory / "files.img"
    found = []
    for fields in records(path, FILES_MAGIC) if wanted else ():
        if FILE_REG not in fields:
            continue
        reg = nested(path, fields, FILE_REG)
        name = reg.get(REG_NAME, [b""])[-1]
        if required(path, reg, REG_ID) in wanted and isinstance(name, bytes):
            found.append(name.decode(errors="surrogateescape"))
    return found


def _remaps(directory: Path, kind: int | None = None) -> list[tuple[int, int]]:
    path = directory / "remap-fpath.img"
    if not path.exists():
        return []
    pairs = []
    for fields in records(path, _REMAP_MAGIC):
        if kind is None or optional(fields, _REMAP_TYPE) in (kind, None):
            pairs.append((required(path, fields, _REMAP_ORIGINAL), required(path, fields, _REMAP_TARGET)))
    return pairs
