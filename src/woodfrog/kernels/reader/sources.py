"""Where GPU code comes from: a file, a folder of files, a wheel, or the files that a process has mapped.

In a folder, a wheel or a process, files without GPU code are passed over; what is damaged or cannot be read is noted
and does not keep the rest from being read.
"""

from __future__ import annotations

import os
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from woodfrog.errors import NotFoundError, RefusedError, TargetState
from woodfrog.kernels import limits
from woodfrog.kernels.error import KernelFileError, NoGpuCodeError
from woodfrog.kernels.reader.code import CodeObject
from woodfrog.kernels.reader.open import read_file

_SUFFIXES = (".ptx", ".cubin", ".fatbin", ".so", ".a", ".o", ".whl")
_COPY_BYTES = 1 << 20


@dataclass
class Found:
    """The GPU code of one source, and what kept some of it from being read (a sentence each)."""

    code: list[CodeObject] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def read_source(what: Path | str) -> Found:
    """The GPU code of a file, folder, wheel or process (a number that is no file's name).

    Raises KernelFileError where there is none, NotFoundError for a process that is not there, and RefusedError for one
    that may not be looked at.
    """
    path = Path(what)
    if str(what).isdigit() and not path.exists():
        return _several(_mapped(int(str(what))), f"process {what} maps no file with GPU code")
    if path.is_dir():
        return _several(_files(path), f"{path} has no file with GPU code in it")
    if path.suffix == ".whl" and zipfile.is_zipfile(path):
        return _wheel(path)
    return Found(read_file(path))


def _several(files: Iterator[tuple[Path, str]], nothing: str) -> Found:
    found = Found()
    for path, name in files:
        _take(found, name, lambda path=path: _wheel(path).code if path.suffix == ".whl" else read_file(path))  # type: ignore[misc]
    return _not_empty(found, nothing)


def _not_empty(found: Found, nothing: str) -> Found:
    if not found.code:
        raise KernelFileError(nothing + (f"; {found.problems[0]}" if found.problems else ""))
    return found


def _take(found: Found, name: str, read: Callable[[], list[CodeObject]]) -> None:
    try:
        found.code += [replace(one, origin=f"{name}: {one.origin}") for one in read()]
    except NoGpuCodeError:
        return
    except KernelFileError as error:
        found.problems.append(error.reason)


def _files(folder: Path) -> Iterator[tuple[Path, str]]:
    """Files that may have GPU code, by name and in order. Links to folders are not followed."""
    seen = 0
    for parent, folders, names in os.walk(folder):
        folders.sort()
        for name in sorted(names):
            seen += 1
            if seen > limits.FOLDER_FILES:
                raise KernelFileError(f"{folder} has more than {limits.FOLDER_FILES} files", advice="Name fewer.")
            path = Path(parent) / name
            if (name.endswith(_SUFFIXES) or ".so." in name) and path.is_file():
                yield path, str(path.relative_to(folder))


def _wheel(path: Path) -> Found:
    """The GPU code of the members of a wheel. Each is unpacked to a file: they may be larger than memory."""
    found = Found()
    try:
        with zipfile.ZipFile(path) as archive, tempfile.TemporaryDirectory() as folder:
            members = archive.infolist()
            if len(members) > limits.FOLDER_FILES:
                raise KernelFileError(f"{path} has more than {limits.FOLDER_FILES} members")
            for member in members:
                name = member.filename
                if member.is_dir() or not (name.endswith(_SUFFIXES[:-1]) or ".so." in name):
                    continue
                if member.file_size > limits.FILE_BYTES:
                    raise KernelFileError(f"{name} in {path} is larger than {limits.FILE_BYTES} bytes")
                unpacked = Path(folder) / f"member{Path(name).suffix}"
                _unpack(archive, member, unpacked)
                _take(found, name, lambda unpacked=unpacked: read_file(unpacked))  # type: ignore[misc]
                unpacked.unlink()
    except (zipfile.BadZipFile, zlib.error, EOFError, OSError, NotImplementedError, RuntimeError) as error:
        raise KernelFileError(f"{path} cannot be read as a wheel: {error}") from None
    return _not_empty(found, f"{path} has no member with GPU code")


def _unpack(archive: zipfile.ZipFile, member: zipfile.ZipInfo, to: Path) -> None:
    left = member.file_size  # a member that is longer than it says is damaged
    with archive.open(member) as source, open(to, "wb") as target:
        while piece := source.read(_COPY_BYTES):
            left -= len(piece)
            if left < 0:
                raise KernelFileError(f"{member.filename} is longer than the wheel says")
            target.write(piece)


def _mapped(pid: int) -> Iterator[tuple[Path, str]]:
    """The files that a process maps, as it sees them (it may have a root of its own)."""
    process = Path("/proc") / str(pid)
    try:
        with open(process / "maps", "rb") as file:
            text = file.read(limits.MAPS_BYTES)
        root = process / "root"
        root.stat()
    except PermissionError:
        raise RefusedError(
            f"process {pid} belongs to another user, and what it maps may not be looked at",
            advice="Run this as its user or as root.",
            target_state=TargetState.UNTOUCHED,
        ) from None
    except (FileNotFoundError, ProcessLookupError):
        raise NotFoundError(
            f"there is no process {pid} and no file of that name",
            advice="`woodfrog ps` shows targets.",
            target_state=TargetState.NONE,
        ) from None
    names: dict[str, None] = {}
    for line in text.decode(errors="surrogateescape").splitlines():
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and fields[4] != "0" and fields[5].startswith("/"):
            names[fields[5]] = None
            if len(names) > limits.MAPPED_FILES:
                raise KernelFileError(f"process {pid} maps more than {limits.MAPPED_FILES} files")
    for name in names:
        if not name.endswith(" (deleted)") and not name.startswith(("/dev/", "/memfd:")):
            yield Path(f"{root}{name}"), name
