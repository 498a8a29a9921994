"""Pages that a restore leaves to woodfrog's threads: CRIU's lazy pages, all filled before anything of the tree runs.

CRIU reads a process's memory with one thread, page fault by page fault, which is most of a restore's time. With
--lazy-pages it makes the process without its private anonymous memory, hands over a userfaultfd for that, and stops at
its script of the stage post-restore (native/gate), where everything is there and stands still. Then many threads put
the pages there (transfer.fill_pages). What CRIU's own code in the processes touches before is answered page by page.

Must never let CRIU go on before all pages are there: a userfaultfd that is closed leaves zeros. The script waits for a
byte that only this process can send, so when it dies CRIU ends with nothing restored.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import resource
import select
import socket
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from woodfrog.cpu import gate, pagemap, pages_by
from woodfrog.cpu.images import Task
from woodfrog.cpu.pagemap import LAZY, Entry
from woodfrog.errors import BadImageError

if TYPE_CHECKING:
    from woodfrog._native.transfer import Progress

log = logging.getLogger(__name__)

VARIABLE = "WOODFROG_FILL"  # native/gate/gate.c
OPTIONS = ("--lazy-pages",)
# criu/uffd.c: its name for the socket in its work directory, and what it sends there instead of a process number when
# it has finished. Of a process that had ended at the dump it sends the number, negative, and nothing behind it.
_SOCKET = "lazy-pages.socket"
_FINISHED = 0x52535446
_CREDENTIALS = struct.Struct("=iII")  # struct ucred, unix(7)
# For CRIU to end, once it may go on and a process that it has made ended: it resumes them and is done, in milliseconds.
_END_S = 10.0
# For each process that is restored, of this one's: userfaultfd, pidfd, file of pages; and for all else that it opens.
_DESCRIPTORS_EACH, _OTHER_DESCRIPTORS = 3, 256


@dataclass
class _Process:
    """Whose pages are left out; `pieces` as for transfer.fill_pages."""

    pages_file: Path
    pieces: bytes
    size_bytes: int
    uffd: int = -1
    answering: threading.Thread | None = None
    pidfd: int = -1


class LazyPages:
    """Those of one restore. After `begin` and within its context, CRIU's restore may run with OPTIONS, `descriptors`,
    and VARIABLE set to `variable`; `failure` is what kept the pages from being filled."""

    def __init__(self, directory: Path, tasks: Sequence[Task]) -> None:
        """BadImageError for a pagemap that cannot be read. Opens nothing yet."""
        from woodfrog._native import transfer

        self.replaced: dict[str, bytes] = {}  # pagemaps to be used instead of those in `directory`
        self.failure: BaseException | None = None
        self.seconds = 0.0  # what the filling took
        self._processes: dict[int, _Process] = {}
        self._descriptors: list[int] = []
        self._thread: threading.Thread | None = None
        self._progress: Progress = transfer.Progress()
        entries: dict[int, list[Entry]] = {}
        names: dict[int, str] = {}
        paths = pagemap.paths(directory)
        for task in tasks:
            if task.pid in paths:
                names[task.pid], found = pagemap.read(paths[task.pid])
                entries[task.pid] = list(found)
        for pid, shared in _shared_with_relatives(tasks, entries).items():
            if shared:
                self.replaced[paths[pid].name] = pagemap.with_flags(paths[pid], partial(_flags, shared))
            lazy = [(entry, offset) for entry, offset in pagemap.placed(entries[pid]) if _flags(shared, entry) & LAZY]
            if lazy:
                pieces = pagemap.pieces(lazy)
                size_bytes = sum(size for _, size, _ in struct.iter_unpack("=QQQ", pieces))
                self._processes[pid] = _Process(directory / names[pid], pieces, size_bytes)

    @classmethod
    def of(cls, directory: Path, tasks: Sequence[Task]) -> LazyPages | None:
        """None where CRIU is to read them all: it was wished, there are none, or it can be known already that it is not
        possible. What the kernel refuses later fails the restore: half of it is there then."""
        from woodfrog._native import transfer

        if pages_by.by_criu_alone() or not gate.is_possible():
            return None
        if trouble := transfer.userfaultfd_trouble():
            log.warning("CRIU reads the pages itself, which takes longer: no userfaultfd (%s)", trouble)
            return None
        try:
            lazy = cls(directory, tasks)
        except BadImageError as failure:
            log.warning("CRIU reads the pages itself, which takes longer: %s", failure)
            return None
        if not _descriptors_suffice(len(lazy._processes)):
            log.warning("CRIU reads the pages itself, which takes longer: this process may not open enough files")
            return None
        return lazy if lazy._processes else None

    @property
    def size_bytes(self) -> int:
        return sum(process.size_bytes for process in self._processes.values())

    # ── for CRIU ────────────────────────────────────────────────────────────────────────────────────────────────

    def begin(self, work: Path) -> None:
        """`work`: CRIU's work directory."""
        arrived, self._arrived = self._pipe()
        self._filled, filled = self._pipe()
        ended, self._end = self._pipe()
        self.hung, self._is_hung = self._pipe()
        self.descriptors = (self._arrived, self._filled)
        self.variable = ",".join(map(str, self.descriptors))
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        directory = os.open(work, os.O_PATH | os.O_CLOEXEC)
        try:
            # A socket's path has at most 107 characters; `work` may be deep.
            listening.bind(f"/proc/self/fd/{directory}/{_SOCKET}")
        finally:
            os.close(directory)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)  # of the connection, too
        listening.listen(1)
        thread = threading.Thread(
            target=self._run, args=(listening, arrived, filled, ended), name="restore-lazy-pages", daemon=True
        )
        thread.start()
        self._thread = thread

    def __enter__(self) -> LazyPages:
        return self

    def give_up(self) -> None:
        """The time is over: nothing is filled any more, and what CRIU has made is to end."""
        self._progress.cancel()

    def __exit__(self, *_: object) -> None:
        """Once CRIU has ended, however."""
        self.give_up()
        if self._thread is not None:
            os.close(self._end)
            self._descriptors.remove(self._end)
            self._thread.join()
            self._thread = None
        descriptors, self._descriptors = self._descriptors, []
        for one in descriptors:
            os.close(one)

    def _opened(self, fd: int) -> int:
        self._descriptors.append(fd)
        return fd

    def _pipe(self) -> tuple[int, int]:
        ends = os.pipe2(os.O_CLOEXEC)
        self._descriptors += ends
        return ends

    # ── on the thread ───────────────────────────────────────────────────────────────────────────────────────────

    def _run(self, listening: socket.socket, arrived: int, filled: int, ended: int) -> None:
        try:
            with listening:
                connection = self._accept(listening, ended)
            if connection is None:
                return
            with connection:
                with self._answering_ended():
                    if not self._collect(connection, arrived, ended):
                        return
                    self._fill()
                    if self.failure is not None:  # of a thread that answered
                        return
                if self._all_alive():
                    # Only now: what a process that runs gives back and takes again is to be zero, not what it was.
                    os.write(filled, b"1")
                    self._wait_for_criu(ended)  # it says on the connection that it has finished, so it must be there
        except BaseException as failure:  # noqa: BLE001 (told to who waits for CRIU, whatever it is)
            self._note(failure)
        finally:
            os.close(filled)  # without a byte before: CRIU is to end
            self._descriptors.remove(filled)

    def _all_alive(self) -> bool:
        """Whether all processes are still there. One that ends is seen by CRIU until it goes on, and not afterwards."""
        return not _wait(self._pidfds(), timeout_s=0)

    def _wait_for_criu(self, ended: int) -> None:
        """Until it has ended. One that ended a process before CRIU took leave of it makes CRIU wait for ever."""
        if ended not in _wait([ended, *self._pidfds()]) and not _wait([ended], timeout_s=_END_S):
            os.write(self._is_hung, b"1")
            _wait([ended])

    def _pidfds(self) -> list[int]:
        return [process.pidfd for process in self._processes.values() if process.pidfd >= 0]

    def _accept(self, listening: socket.socket, ended: int) -> socket.socket | None:
        if ended in _wait([listening.fileno(), ended]):
            return None
        return listening.accept()[0]

    def _collect(self, connection: socket.socket, arrived: int, ended: int) -> bool:
        """Takes the processes' userfaultfds until CRIU has arrived at its script; False: it ended before."""
        while True:
            ready = _wait([connection.fileno(), arrived, ended])
            if connection.fileno() in ready:
                word = connection.recv(4, socket.MSG_WAITALL)
                (number,) = struct.unpack("=i", word) if len(word) == 4 else (0,)
                if number < 0 or number == _FINISHED:
                    continue
                if number == 0 or not self._take(number, connection):
                    _wait([ended])  # CRIU has failed, and says why
                    return False
            else:
                return arrived in ready

    def _take(self, pid: int, connection: socket.socket) -> bool:
        """False: CRIU ended instead."""
        if (received := _receive(connection)) is None:
            return False
        uffd, sender = received
        if uffd < 0:
            raise RuntimeError(f"CRIU sent no userfaultfd for process {pid}")
        process = self._processes.setdefault(pid, _Process(Path(os.devnull), b"", 0))
        process.uffd = uffd
        process.pidfd = self._opened(os.pidfd_open(sender))
        process.answering = threading.Thread(
            target=self._answer, args=(process,), name=f"restore-faults-{pid}", daemon=True
        )
        process.answering.start()
        return True

    def _answer(self, process: _Process) -> None:
        from woodfrog._native import transfer

        try:
            with process.pages_file.open("rb") as file:
                transfer.answer_page_faults(process.uffd, file.fileno(), process.pieces, self._stop)
        except BaseException as failure:  # noqa: BLE001 (told to who waits for CRIU, whatever it is)
            self._note(failure)
            # Whoever waits goes on, to CRIU's script, and not past it. Its number stays taken: another restore's
            # userfaultfd could get it, and this one's pages with it.
            with open(os.devnull, "rb") as nothing:
                os.dup2(nothing.fileno(), process.uffd, inheritable=False)

    def _note(self, failure: BaseException) -> None:
        """The first failure is told, unless it is that a process has ended: then CRIU says why."""
        from woodfrog._native import transfer

        if isinstance(failure, transfer.CancelledError | ProcessLookupError):
            return
        if not (isinstance(failure, transfer.TransferError) and failure.code == -errno.ESRCH):
            self.failure = self.failure or failure

    @contextlib.contextmanager
    def _answering_ended(self) -> Iterator[None]:
        """Within it, threads that answer; afterwards their userfaultfds are closed."""
        self._stop, stop = self._pipe()
        try:
            yield
        finally:
            os.close(stop)
            self._descriptors.remove(stop)
            for process in self._processes.values():
                if process.answering is not None:
                    process.answering.join()
                if process.uffd >= 0:
                    os.close(process.uffd)

    def _fill(self) -> None:
        from woodfrog._native import transfer

        begin, processors_s = time.monotonic(), time.process_time()
        for pid, process in self._processes.items():
            if process.uffd < 0:
                raise self.failure or RuntimeError(f"there is no userfaultfd of process {pid}")
            if process.pieces:
                with process.pages_file.open("rb") as file:
                    transfer.fill_pages(process.uffd, file.fileno(), process.pieces, progress=self._progress)
        self.seconds = time.monotonic() - begin
        ranges = sum(len(process.pieces) for process in self._processes.values()) // pagemap.PIECE_BYTES
        log.info(
            "%.0f MB of pages filled in %.3f s: %d ranges, %.2f s of processors",
            self.size_bytes / 1e6,
            self.seconds,
            ranges,
            time.process_time() - processors_s,
        )


def _descriptors_suffice(processes: int) -> bool:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    there = sum(1 for _ in Path("/proc/self/fd").iterdir())
    wanted = there + _DESCRIPTORS_EACH * processes + _OTHER_DESCRIPTORS
    return limit == resource.RLIM_INFINITY or wanted <= limit


def _receive(connection: socket.socket) -> tuple[int, int] | None:
    """A descriptor that CRIU sends, -1 if there is none, and the number here of the process that sent it. None: nobody
    sends any more."""
    space = socket.CMSG_SPACE(_CREDENTIALS.size) + socket.CMSG_SPACE(4)
    data, messages, _, _ = connection.recvmsg(1, space, socket.MSG_CMSG_CLOEXEC)
    if not data:
        return None
    found = {kind: data for _, kind, data in messages}
    (fd,) = struct.unpack_from("=i", found.get(socket.SCM_RIGHTS, b"\xff" * 4))
    pid, _, _ = _CREDENTIALS.unpack(found[socket.SCM_CREDENTIALS])
    return fd, pid


def _wait(descriptors: list[int], timeout_s: float | None = None) -> list[int]:
    """Those that can be read, or whose other end is closed; waits for one."""
    poll = select.poll()
    for one in descriptors:
        poll.register(one, select.POLLIN)
    return [one for one, _ in poll.poll(None if timeout_s is None else timeout_s * 1000)]


def _shared_with_relatives(tasks: Sequence[Task], entries: dict[int, list[Entry]]) -> dict[int, set[int]]:
    """By process, the addresses of lazy entries that overlap with such of a process above or below it. CRIU lets them
    share memory copy-on-write where it is equal, as after a fork; filled one by one each would have its own."""
    parents = {task.pid: task.parent_pid for task in tasks}
    lazy = {pid: [entry for entry in listed if entry.flags & LAZY] for pid, listed in entries.items()}
    shared: dict[int, set[int]] = {pid: set() for pid in entries}
    for pid in entries:
        above = parents.get(pid)
        seen = {pid}
        while above in parents and above not in seen:
            seen.add(above)
            if above in lazy:
                for one, other in _overlapping(lazy[pid], lazy[above]):
                    shared[pid].add(one.address)
                    shared[above].add(other.address)
            above = parents[above]
    return shared


def _flags(shared: set[int], entry: Entry) -> int:
    """Those of an entry, of which CRIU is to read the ones at the addresses `shared`."""
    return entry.flags & ~LAZY if entry.address in shared else entry.flags


def _overlapping(some: list[Entry], others: list[Entry]) -> Iterator[tuple[Entry, Entry]]:
    """Pairs that have a page in common; both ascend."""
    page_bytes = os.sysconf("SC_PAGE_SIZE")
    first = second = 0
    while first < len(some) and second < len(others):
        one, other = some[first], others[second]
        one_end = one.address + one.pages * page_bytes
        other_end = other.address + other.pages * page_bytes
        if one.address < other_end and other.address < one_end:
            yield one, other
        if one_end <= other_end:
            first += 1
        else:
            second += 1
