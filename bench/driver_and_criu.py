"""The way without woodfrog: the driver's checkpoint takes all data into the process, CRIU saves the process.

That is what cuda-checkpoint and CRIU do together (CRIUgpu, Dynamo). The image lies in memory, of large pages where this
process may mount. A restore is CRIU, which reads all of the data, and the driver, which copies it to the GPU. CRIU is
called with the options that woodfrog uses when it leaves all pages to CRIU, which cost nothing that matters here. Ends
only processes that it restored itself.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

import driver_baseline
import target_process
from woodfrog.cpu import criu, pages_by
from woodfrog.operations.memory_folder import MemoryFolder
from woodfrog.target.identity import Identity
from woodfrog.target.reaper import Reaper, become_subreaper

PLACE = Path("/dev/shm")
# Of the data: once in the image, once in the restored process; and what a server has beside it.
ROOM_FACTOR, ROOM_BESIDE = 2, 8 << 30
TIMEOUT_S = 300.0


class NoRoomError(Exception):
    """This machine has too little memory for it; the text says how much is wanted."""


@dataclass(frozen=True)
class Saved:
    """An image in `folder`, and what it took to make it."""

    folder: Path
    lock_s: float
    driver_checkpoint_s: float
    dump_s: float
    image_bytes: int


@dataclass(frozen=True)
class Back:
    """One restore: when it began (time.time()), and the seconds of its parts."""

    begin_s: float
    call_s: float
    criu_s: float
    driver_restore_s: float
    driver_unlock_s: float


class Restored:
    """A process that CRIU brought back, as TargetRun wants its handles."""

    def __init__(self, reaper: Reaper, identity: Identity, pid: int) -> None:
        self._reaper = reaper
        self._identity = identity
        self.pid = pid

    def poll(self) -> bool:
        """Whether it runs."""
        return psutil.pid_exists(self.pid) and psutil.Process(self.pid).status() != psutil.STATUS_ZOMBIE

    def wait(self, timeout_s: float) -> None:
        """Returns when it has ended and its number is free."""
        if self._reaper.wait(self._identity, timeout_s=timeout_s) is None:
            raise target_process.TargetError(f"process {self.pid} has not ended")

    def kill(self) -> None:
        """Ends it."""
        os.kill(self.pid, signal.SIGKILL)


@contextmanager
def session() -> Iterator[Reaper]:
    """What CRIU restores within it is this process's to reap."""
    become_subreaper()
    before = os.environ.get(pages_by.VARIABLE, "")
    os.environ[pages_by.VARIABLE] = "criu"
    try:
        with Reaper() as reaper:
            yield reaper
    finally:
        os.environ[pages_by.VARIABLE] = before
        ctypes.CDLL(None).prctl(36, ctypes.c_ulong(0), 0, 0, 0)  # PR_SET_CHILD_SUBREAPER


def require_room(data_bytes: int) -> None:
    """NoRoomError where the image and a restored process with that much data do not fit at once."""
    wanted = ROOM_FACTOR * data_bytes + ROOM_BESIDE
    available = psutil.virtual_memory().available
    free = shutil.disk_usage(PLACE).free
    if available < wanted or free < data_bytes + ROOM_BESIDE // 2:
        raise NoRoomError(
            f"needs {wanted >> 30} GiB of memory, half of it in {PLACE}; free are {available >> 30} and {free >> 30}"
        )


@contextmanager
def saved(target: target_process.TargetRun, label: str, data_bytes: int) -> Iterator[Saved]:
    """Saves the target, with about so much on the GPU; it is gone then; its image is there until the block ends."""
    memory = MemoryFolder.make(psutil.Process(target.pid).memory_info().rss + data_bytes)
    folder = (memory.path if memory is not None else PLACE) / f"woodfrog-bench-{os.getpid()}-{label}"
    try:
        lock_s, checkpoint_s = driver_baseline.driver_out(target.pid)
        begin_s = time.time()
        dumped = criu.find().dump(target.pid, folder, leave_running=False, timeout_s=TIMEOUT_S)
        dump_s = time.time() - begin_s
        os.kill(target.pid, signal.SIGKILL)
        target.wait_ended()
        yield Saved(folder, lock_s, checkpoint_s, dump_s, dumped.size_bytes)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if memory is not None:
            memory.close()


def restore(reaper: Reaper, image: Saved) -> tuple[Restored, Back]:
    """CRIU, then the driver; the process runs."""
    begin_s = time.time()
    restored = criu.find().restore(image.folder, timeout_s=TIMEOUT_S)
    criu_s = time.time() - begin_s
    (identity,) = reaper.adopt([restored.pid])
    restore_s, unlock_s = driver_baseline.driver_in(restored.pid)
    back = Back(begin_s, time.time() - begin_s, criu_s, restore_s, unlock_s)
    return Restored(reaper, identity, restored.pid), back
