"""A dump in which CRIU leaves the pages of private anonymous memory to us, who copy them with many threads.

With --lazy-pages CRIU writes everything else, says through a pipe that it has (--status-fd), and waits with the target
standing still for somebody to ask for pages through a socket (--ps-socket), until the other end is closed. Here nobody
asks: all pages are read from the processes into CRIU's own files of pages, which then are what CRIU alone would have
made, and its pagemaps say so. Those that CRIU has written are read once more: each has its place by its address among
the others, and the whole file is written in one go, in no more memory than it takes in the end.

Must never let CRIU wait for ever: whatever goes wrong, the socket is closed, and then the target runs on or is left
stopped, as CRIU was told. With this process's death the socket closes by itself.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import resource
import shutil
import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from woodfrog.cpu import pagemap
from woodfrog.cpu.pages_by import dump_by_threads
from woodfrog.cpu.run import Finished
from woodfrog.errors import TargetState, WoodfrogError
from woodfrog.faults import fault_point

if TYPE_CHECKING:
    from woodfrog._native.transfer import Progress

log = logging.getLogger(__name__)

FAULT_POINT = "cpu.frozen"
_PIECE_BYTES = 4 << 20
_CAP_SYS_RESOURCE = 24  # linux/capability.h
# CRIU's own, and one at a time for each descriptor of a process.
_OTHER_DESCRIPTORS = 1024


def reserve(pid: int, folder: Path) -> bool:
    """Take memory for the pages of the tree below `pid`, whose numbers are ours, while it still runs: `folder`, which
    is made, gets a file for each process, and is to be handed to `run`. It must lie in memory, in the filesystem that
    CRIU's files go to. False, and nothing is there, where that is not wished, or the memory is not to be had."""
    # Not root: a pipe of CRIU's could not be as large as it takes for it to hold on to the pages that it leaves out.
    if not dump_by_threads() or os.geteuid() != 0:
        return False
    found = _memory_of_tree(pid)
    if not _pipes_suffice(sum(found.values()), len(found)):
        log.info("CRIU writes the pages itself: it may not have as many open files as it would need otherwise")
        return False
    folder.mkdir(mode=0o700)
    try:
        for number, anonymous_bytes in found.items():
            if anonymous_bytes:
                _populate(folder / str(number), anonymous_bytes)
    except OSError as failure:
        log.warning("no memory ahead for the pages of process %d: %s", pid, failure)
        shutil.rmtree(folder)
        return False
    return True


def run(
    arguments: Sequence[str], start: Callable[..., Finished], *, images: Path, ahead: Path, handed: Sequence[int] = ()
) -> Finished:
    """`start` (cpu.run.run with `takes_back`, and all that belongs to it but the descriptors `handed`) of CRIU, with
    these `arguments` of an ordinary dump into `images`. `ahead`: what `reserve` made; its files are used up. Where CRIU
    was content and the pages could not be copied, OSError (with ENOSPC, too) or WoodfrogError says why."""
    with _Pages(images, ahead) as pages:
        finished = start([*arguments, *pages.options], pass_fds=(*handed, *pages.handed), at_timeout=pages.give_up)
        pages.end()
        if finished.returncode != 0 or pages.failure is None:
            return finished
        if pages.gave_up:
            return replace(finished, returncode=1, stopped=True)
        raise pages.failure


class _Pages:
    """Those of one dump: a context around CRIU's run."""

    def __init__(self, images: Path, ahead: Path) -> None:
        from woodfrog._native import transfer

        self._images = images
        self._ahead = ahead
        self._ours, self._criu_socket = socket.socketpair()
        self._told, self._criu_status = os.pipe2(os.O_CLOEXEC)
        self._progress: Progress = transfer.Progress()
        self._given_up = threading.Event()
        self._failure: BaseException | None = None
        self._done = False
        self._thread = threading.Thread(target=self._run, name="dump-pages", daemon=True)

    @property
    def options(self) -> list[str]:
        """CRIU's."""
        return ["--lazy-pages", "--ps-socket", str(self._criu_socket.fileno()), "--status-fd", str(self._criu_status)]

    @property
    def handed(self) -> tuple[int, ...]:
        """Descriptors that CRIU must inherit."""
        return self._criu_socket.fileno(), self._criu_status

    @property
    def failure(self) -> BaseException | None:
        """What kept the files from being whole."""
        if self._done:
            return None
        return self._failure or WoodfrogError(
            "CRIU ended its dump without waiting for the pages that it leaves out.",
            phase="cpu",
            target_state=TargetState.RUNNING,
        )

    @property
    def gave_up(self) -> bool:
        """Whether it was `give_up`."""
        return not self._done and self._given_up.is_set()

    def __enter__(self) -> _Pages:
        try:
            self._thread.start()
        except BaseException:
            self.end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def give_up(self) -> None:
        """Let the target go now, or as soon as CRIU comes to where it waits."""
        self._given_up.set()
        self._progress.cancel()
        self._let_go()

    def end(self) -> None:
        """CRIU has ended. Safe to repeat."""
        if self._criu_status < 0:
            return
        os.close(self._criu_status)  # the last writing end: a thread that was told nothing ends now
        self._criu_status = -1
        if self._thread.ident is not None:
            self._thread.join()
        os.close(self._told)
        self._ours.close()
        self._criu_socket.close()

    def _run(self) -> None:
        try:
            if os.read(self._told, 1):
                copied = self._copy()
                self._let_go()
                for one in copied:
                    one.put_in_place()
                self._done = True
        except BaseException as failure:  # noqa: BLE001 (told to who runs CRIU, whatever it is)
            self._failure = failure
        finally:
            self._let_go()

    def _copy(self) -> list[_Copied]:
        """The pages of all processes, while they stand still."""
        fault_point(FAULT_POINT, self._given_up)
        found = []
        for pid, path in pagemap.paths(self._images).items():
            completed = pagemap.completed(path)
            if completed.left_out_bytes:
                place = self._images / completed.pages_name
                ahead = self._ahead / str(pid)
                file = ahead if ahead.exists() else place  # one that was forked since has nothing ahead
                self._save(pid, file, completed)
                found.append(_Copied(file, place, completed.size_bytes, path, completed.pagemap))
        return found

    def _save(self, pid: int, file: Path, completed: pagemap.Completed) -> None:
        from woodfrog._native import transfer

        fd = os.open(file, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            if os.fstat(fd).st_size < completed.size_bytes:
                os.ftruncate(fd, completed.size_bytes)
            transfer.save_pages(pid, fd, completed.pieces, progress=self._progress)
        except transfer.CancelledError:
            raise
        except transfer.TransferError as error:
            if error.code in (-errno.ENOSPC, -errno.EDQUOT):
                raise OSError(-error.code, os.strerror(-error.code)) from error
            ended = error.code == -errno.ESRCH
            raise WoodfrogError(
                f"Process {pid} ended while its memory was being saved."
                if ended
                else f"The memory of process {pid} could not be saved: {error}",
                phase="cpu",
                pid=pid,
                target_state=TargetState.GONE if ended else TargetState.RUNNING,
            ) from error
        finally:
            os.close(fd)

    def _let_go(self) -> None:
        # Not closed: a copy of the descriptor in a child that is being started would keep it open.
        self._ours.shutdown(socket.SHUT_RDWR)


@dataclass(frozen=True)
class _Copied:
    """All pages of a process in `file`; what is still to be done when it runs again."""

    file: Path
    place: Path
    size_bytes: int
    pagemap_path: Path
    pagemap: bytes

    def put_in_place(self) -> None:
        os.truncate(self.file, self.size_bytes)
        if self.file != self.place:
            self.file.replace(self.place)
        self.pagemap_path.write_bytes(self.pagemap)


def _memory_of_tree(pid: int) -> dict[int, int]:
    """Bytes of anonymous memory of the processes below and with `pid` that are there."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
        children = [
            int(child)
            for thread in Path(f"/proc/{pid}/task").iterdir()
            for child in (thread / "children").read_text().split()
        ]
    except (FileNotFoundError, ProcessLookupError):
        return {}
    sizes = dict(re.findall(r"^(\w+):\s*(\d+) kB$", status, re.MULTILINE))
    found = {pid: int(sizes.get("RssAnon", 0)) << 10}
    for child in children:
        found |= _memory_of_tree(child)
    return found


def _pipes_suffice(size_bytes: int, processes: int) -> bool:
    """Whether CRIU may hold on to so much of so many processes: until all is copied it does, in pipes, which it cannot
    make larger than others may unless it has CAP_SYS_RESOURCE."""
    pipe_bytes = int(Path("/proc/sys/fs/pipe-max-size").read_text())
    pipes = size_bytes // pipe_bytes * 5 // 4 + 2 * processes  # some are not full
    return 2 * pipes + _OTHER_DESCRIPTORS <= _most_descriptors()


def _most_descriptors() -> int:
    """Of CRIU: it raises its limit as far as anybody can, if it may."""
    status = Path("/proc/self/status").read_text()
    effective = next(int(line.split()[1], 16) for line in status.splitlines() if line.startswith("CapEff:"))
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if effective >> _CAP_SYS_RESOURCE & 1 or limit == resource.RLIM_INFINITY:
        return int(Path("/proc/sys/fs/nr_open").read_text())
    return limit


def _populate(path: Path, size_bytes: int) -> None:
    """A file with memory for so many bytes. OSError; then there may be a part of it."""
    zeros = bytes(min(size_bytes, _PIECE_BYTES))
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.ftruncate(fd, size_bytes)  # first: how large pages it gets depends on how large it is
        # Written: fallocate(2) would leave them to be cleared at their first use, when the target stands still.
        for offset in range(0, size_bytes, _PIECE_BYTES):
            os.pwrite(fd, memoryview(zeros)[: size_bytes - offset], offset)
    finally:
        os.close(fd)
