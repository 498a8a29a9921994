"""Prepares the files that a dumped tree had open for its restore.

CRIU compares the size of open files with the one at the dump and refuses on any difference, except for files that are
only appended to. That is right for what the tree reads (a changed library, another data set) and wrong for what it
writes: the output of a target that ran on after its checkpoint, or that was restored before, has grown. For files that
the tree itself had open for writing the recorded size is brought up to date, in a copy of CRIU's file list; the image
itself is never changed. The file's content is never touched either: a target that appends goes on at the end, one that
does not writes on from the position that it had. A log that is gone (rotated away) is created empty.

Deleted files that still had another name are kept by CRIU as hard links, which a restore uses up. `kept_links` keeps
them for the next one.

Directories of unix sockets that are gone are made again, for their owner only: a program removes its temporary folder
when it ends, and an image of its middle is restored after that. (Seen with Python's multiprocessing.)

Files that no restore can do without are looked for here, before CRIU is called, so that a refusal names them all.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from woodfrog.cpu import images, time_wait
from woodfrog.cpu.pid_namespace import NewNamespace
from woodfrog.cpu.protobuf import Fields
from woodfrog.cpu.rewrite import Changes, rewritten
from woodfrog.errors import BadImageError, RefusedError, TargetState

_LINK = re.compile(r"link_remap\.[0-9]+")  # criu/files-reg.c, create_link_remap
_KEPT = ".woodfrog"  # suffix of the second link that outlives a restore


@dataclass
class FilePlan:
    """What has to be done about open files before a restore. `problems` non-empty: it cannot be restored like this."""

    sizes: dict[int, int] = field(default_factory=dict)  # CRIU file id → size now, for files that the tree writes
    recreate: dict[str, int] = field(default_factory=dict)  # path → permission bits, of logs that are gone
    directories: dict[str, tuple[int, int]] = field(default_factory=dict)  # missing ones of sockets → (uid, gid)
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def plan(
    directory: Path,
    changes: Changes | None = None,
    namespace: NewNamespace | None = None,
    listed: list[Fields] | None = None,
) -> FilePlan:
    """Compare the open files of the dump in `directory` with the filesystem as it is now; touches nothing. `changes`:
    other files are opened instead of some. With `namespace`, files are those that are bound there. `listed`:
    images.file_records of it."""
    paths = changes.paths if changes is not None else {}
    found = [replace(file, path=paths.get(file.path, file.path)) for file in images.open_files(directory, listed)]
    written = {file.path for file in found if _writes(file.flags)}
    result = FilePlan()
    for file in found:
        try:
            status = Path(namespace.seen_from_here(file.path) if namespace else file.path).stat()
        except FileNotFoundError:
            if file.path in written and _appends_only(file.flags) and Path(file.path).parent.is_dir():
                result.recreate[file.path] = stat.S_IMODE(file.mode)
                result.notes.append(f"{file.path} is gone; an empty one is created for the target to append to")
            else:
                result.problems.append(f"{file.path}, which the target had open, does not exist here")
            continue
        except PermissionError:
            result.problems.append(f"{file.path}, which the target had open, may not be read by this user")
            continue
        if file.size_bytes is None or status.st_size == file.size_bytes:
            continue
        change = f"{file.path} had {file.size_bytes} bytes at the checkpoint and has {status.st_size} now"
        if file.path not in written:
            result.problems.append(f"{change}, and the target only read it")
        elif status.st_size < file.size_bytes:
            result.problems.append(f"{change}: content that the target counts on is gone")
        else:
            result.sizes[file.file_id] = status.st_size
            result.notes.append(f"{change}; the target writes on in it")
    for socket in images.socket_files(directory, listed):
        path = namespace.seen_from_here(socket.path) if namespace else socket.path
        if namespace and path == socket.path and path in _bound_sockets():
            # CRIU would take the name from whoever has it, most likely another instance.
            result.problems.append(f"the Unix socket {path}, which the target was bound to, is in use")
            continue
        folder = Path(path).parent
        if str(folder) not in result.directories and not folder.exists():
            result.directories[str(folder)] = (socket.uid, socket.gid)
            result.notes.append(f"{folder} is gone; it is made again for the socket {Path(socket.path).name}")
    return result


def prepare(
    directory: Path,
    scratch: Path,
    changes: Changes | None = None,
    namespace: NewNamespace | None = None,
    replaced: Mapping[str, bytes] | None = None,
) -> tuple[Path, FilePlan]:
    """The folder to restore from: `directory` itself, or one in `scratch` whose file list has the sizes of now, and the
    changes; files that are `replaced`, by name, have other contents there.

    Raises RefusedError naming every file that stands in the way. `scratch` must exist and belong to the caller.
    """
    changes = changes or Changes()
    listed = images.file_records(directory)
    ports = changes.require_ports(directory, listed)
    result = plan(directory, changes, namespace, listed)
    if result.problems:
        raise RefusedError(
            "The target's files are not as they were at the checkpoint: " + "; ".join(result.problems) + ".",
            advice="Put these files back as they were, at the same paths, and restore again.",
            target_state=TargetState.NONE,
            details={"files": result.problems},
        )
    time_wait.free(ports)
    for folder, (uid, gid) in result.directories.items():
        _make_directory(Path(folder), uid, gid)
    for path, mode in result.recreate.items():
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        if changes.owner is not None and path in changes.paths.values() and os.geteuid() == 0:
            os.fchown(descriptor, *changes.owner)
        os.fchmod(descriptor, mode)  # CRIU compares the permission bits too
        os.close(descriptor)
    contents = dict(replaced or {})
    if result.sizes or changes.paths or changes.ports:
        contents["files.img"] = rewritten((directory / "files.img").read_bytes(), changes, result.sizes)
    if not contents:
        return directory, result
    overlay = scratch / "images"
    overlay.mkdir(mode=0o700)
    for entry in os.scandir(directory):
        if entry.name not in contents:
            (overlay / entry.name).symlink_to(Path(entry.path).absolute())
    for name, content in contents.items():
        (overlay / name).write_bytes(content)
    return overlay, result


@contextlib.contextmanager
def kept_links(directory: Path) -> Iterator[None]:
    """Within it, a restore may use up the hard links of the image in `directory`; afterwards they are there again.

    RefusedError when one is missing. What a daemon left that died within is put right by the next one that comes here.
    """
    links = [(Path(path), Path(path + _KEPT)) for path in images.linked_remaps(directory)]
    for link, kept in links:
        if kept.exists() and not link.exists():
            kept.rename(link)
        if not link.exists():
            raise RefusedError(
                f"A deleted file that the target had open is gone for good: its last link {link} was removed.",
                advice="Use another image.",
                target_state=TargetState.NONE,
            )
    for link, kept in links:
        kept.unlink(missing_ok=True)
        kept.hardlink_to(link)
    try:
        yield
    finally:
        for link, kept in links:
            kept.replace(link)


# CRIU's files that `remove_links` reads: the directory that it gets needs no others.
LINK_FILES = ("files.img", "remap-fpath.img")


def remove_links(directory: Path) -> None:
    """Remove the hard links that belong to the image in `directory`: for whoever removes the image itself.

    BadImageError, with nothing removed, when one has another name than CRIU gives such links: an image must not be able
    to have other files removed.
    """
    paths = images.linked_remaps(directory)
    for path in paths:
        if not _LINK.fullmatch(Path(path).name):
            raise BadImageError(
                f"The image calls {path} a hard link of its own, and its name is not that of one.",
                advice="The file was left alone.",
            )
    for path in paths:
        for link in (Path(path), Path(path + _KEPT)):
            link.unlink(missing_ok=True)


def _make_directory(folder: Path, uid: int, gid: int) -> None:
    for missing in reversed([one for one in (folder, *folder.parents) if not one.exists()]):
        missing.mkdir(mode=0o700)
        if os.geteuid() == 0:
            os.chown(missing, uid, gid, follow_symlinks=False)


def _bound_sockets() -> set[str]:
    """Paths that a Unix socket of this network namespace is bound to."""
    lines = Path("/proc/net/unix").read_text(errors="surrogateescape").splitlines()[1:]
    return {fields[7] for line in lines if len(fields := line.split(maxsplit=7)) == 8 and fields[7].startswith("/")}


def _writes(flags: int) -> bool:
    return flags & os.O_ACCMODE in (os.O_WRONLY, os.O_RDWR)


def _appends_only(flags: int) -> bool:
    return flags & os.O_ACCMODE == os.O_WRONLY and bool(flags & os.O_APPEND)
