"""The driver's saved state in memory of the daemon's: files on a tmpfs that the target maps and CRIU passes over.

The driver keeps what it saves of a process in one mapping of the process. Where that is such a file, a dump needs not
copy it, and a restore maps it again while the daemon still fills it; its chunks are in the image as any file's are.
Each checkpoint and each restore has files of its own, without a name and new: they are clear, nobody else has them, and
they are gone with the last who maps them, so there is nothing to be undone or recovered. Time depends on them, never
correctness: where one cannot be had, the target uses memory of its own.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from woodfrog.cpu import options
from woodfrog.image.image import Image
from woodfrog.image.manifest import FileRecord
from woodfrog.image.writer import MappedFile, MappedFileChangedError
from woodfrog.store import files
from woodfrog.target import pid_namespace, procfs
from woodfrog.target.link import AgentLink

log = logging.getLogger(__name__)

SHARED_MEMORY = Path("/dev/shm")  # tmpfs(5)
PERMISSIONS = 0o600  # CRIU compares those of the dump with those of what it is handed
# Of the free space of a tmpfs: what is left to its other users.
RESERVE_FRACTION = 1 / 4
# More than any control state: data that the driver keeps (pools) is in it then, and would have to be populated at once.
MOST_BYTES = 8 << 30


@dataclass
class _File:
    pid: int
    fd: int
    size_bytes: int
    digests: bytes = b""


class ControlFiles:
    """Those of one checkpoint, by process; owns the descriptors until `close`. `unfit`: no more of them are made."""

    def __init__(self, runtime_directory: Path, unfit: threading.Event) -> None:
        self._runtime_directory = runtime_directory
        self._unfit = unfit
        self._files: dict[int, _File] = {}
        self._lock = threading.Lock()  # processes are offered theirs side by side

    def offer(self, link: AgentLink, expected_bytes: int) -> int:
        """A new file for a process that runs; how many bytes it has ready then. 0 where there is no place for so many,
        and when the process declines."""
        # In a mount namespace of its own CRIU would not find the mount that a file of ours is on.
        if self._unfit.is_set() or pid_namespace.init_of(link.pid) is not None:
            return 0
        size_bytes = link.wanted_control_memory(expected_bytes)
        fd = open_in_memory(self._runtime_directory, size_bytes) if 0 < size_bytes <= MOST_BYTES else None
        if fd is None:
            return 0
        with self._lock:
            self._files[link.pid] = _File(link.pid, fd, size_bytes)
        ready_bytes = link.offer_control_memory(size_bytes, fd)
        if not ready_bytes:
            self._drop(link.pid)
        return ready_bytes

    def _drop(self, pid: int) -> None:
        with self._lock:
            dropped = self._files.pop(pid)
        os.close(dropped.fd)

    def names(self) -> list[str]:
        """CRIU's names for all that were offered, whether the driver will have put its state there or not."""
        with self._lock:
            return [options.file_name(one.fd) for one in self._files.values()]

    @contextmanager
    def saved(self, chunk_bytes: int, *, runs_on: bool) -> Iterator[list[str]]:
        """Around CRIU's dump of the target: what it is to pass over, by its names for it. Of a target that `runs_on`
        afterwards the digests are taken meanwhile: when its driver restores it, it may write there again."""
        for one in list(self._files.values()):
            if not is_mapped(one.pid, one.fd):
                self._drop(one.pid)
        with _aside(partial(self._hash, chunk_bytes) if runs_on else None):
            yield self.names()

    def _hash(self, chunk_bytes: int) -> None:
        from woodfrog._native import transfer

        for one in self._files.values():
            one.digests = transfer.hash_pieces([(one.fd, 0, one.size_bytes)], chunk_bytes=chunk_bytes)

    @contextmanager
    def checked(self) -> Iterator[None]:
        """Around the commit: a driver that did write there gets no such file again."""
        try:
            yield
        except MappedFileChangedError:
            self._unfit.set()
            raise

    def for_image(self) -> list[MappedFile]:
        """For ImageWriter.commit, which reads them."""
        return [
            MappedFile(
                f"control-{one.pid}.mem", one.fd, one.size_bytes, options.file_name(one.fd), one.pid, one.digests
            )
            for one in self._files.values()
        ]

    def close(self) -> None:
        """Safe to repeat."""
        for pid in list(self._files):
            self._drop(pid)


class RestoredFiles:
    """What an image's process is to map, made anew; owns the descriptors until `close`. `lent`: records of memory that
    is to be lent, which are filled with it, and the descriptor and place of each, the caller's."""

    def __init__(
        self, records: Sequence[FileRecord], lent: Sequence[FileRecord] = (), places: Sequence[tuple[int, int]] = ()
    ) -> None:
        self._records = list(records)
        self._lent = list(lent)
        self._places = list(places)
        self._fds: list[int] = []
        try:
            for record in records:
                # What CRIU is handed need not be on a file system; only what it is to name at a dump must be.
                self._fds.append(os.memfd_create("woodfrog-control", os.MFD_CLOEXEC))
                os.truncate(self._fds[-1], record.size_bytes)
                os.fchmod(self._fds[-1], PERMISSIONS)
        except BaseException:
            self.close()
            raise

    @contextmanager
    def filled(self, image: Image, before: Callable[[], None]) -> Iterator[dict[str, int]]:
        """Around CRIU's restore, which maps them: the image's contents are there at the end, each chunk compared with
        its digest. What Criu.restore is to pass on. `before` waits for what is to have the processors first.
        BadImageError."""
        with _aside(partial(self._fill, image, before) if self._records or self._lent else None):
            yield {record.mapped_as: fd for record, fd in zip(self._records, self._fds, strict=True)}

    def _fill(self, image: Image, before: Callable[[], None]) -> None:
        before()
        places = [(fd, 0) for fd in self._fds] + self._places
        descriptors, offsets = zip(*places, strict=True)
        image.extract_files([*self._records, *self._lent], descriptors, offsets=offsets)

    def close(self) -> None:
        """Safe to repeat. What the process has mapped stays."""
        fds, self._fds = self._fds, []
        for fd in fds:
            os.close(fd)


@contextmanager
def _aside(work: Callable[[], None] | None) -> Iterator[None]:
    """`work` on a thread of its own beside the block; at the end both are done. A failure of the block goes first."""
    if work is None:
        yield
        return
    with ThreadPoolExecutor(1, thread_name_prefix="control-state") as pool:
        done = pool.submit(work)
        yield
        done.result()


def open_in_memory(runtime_directory: Path, size_bytes: int) -> int | None:
    """A descriptor, the caller's, of a new file of zeros on a tmpfs that has room for it; None where there is none. Not
    a memfd: CRIU saves those whatever it is told."""
    for place in (runtime_directory, SHARED_MEMORY):
        try:
            status = os.statvfs(place)
            if status.f_bavail * status.f_frsize * (1 - RESERVE_FRACTION) >= size_bytes and files.is_in_memory(place):
                return _open(place, size_bytes)
        except OSError as failure:
            log.info("%s takes no control state: %s", place, failure)
    log.info("no tmpfs has room for %d MiB of control state: CRIU is to save it", size_bytes >> 20)
    return None


def is_mapped(pid: int, fd: int) -> bool:
    """Whether a process has this file of ours mapped, by what the kernel tells; not if it may not be asked."""
    status = os.fstat(fd)
    wanted = (f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}", str(status.st_ino))
    try:
        lines = (procfs.text(pid, "maps") or "").splitlines()
    except OSError as failure:
        log.warning("the mappings of process %d cannot be read: %s", pid, failure)
        return False
    return any(tuple(line.split(None, 5)[3:5]) == wanted for line in lines)


def _open(place: Path, size_bytes: int) -> int:
    fd = os.open(place, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, PERMISSIONS)
    try:
        os.truncate(fd, size_bytes)  # tmpfs takes any size; its room is asked for when it is populated
    except BaseException:
        os.close(fd)
        raise
    return fd
