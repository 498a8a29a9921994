"""Where CRIU's files lie while CRIU restores from them: in memory if there is room, else on the store's disk.

The folder holds the target's memory: it is private, and gone when the restore is over. What a killed daemon leaves is
nothing (memory_folder.py), or in the restore's own folder, which recovery removes, or in the store's, which its next
user cleans.
"""

from __future__ import annotations

import os
import shutil
import threading
from pathlib import Path

from woodfrog.operations import room
from woodfrog.operations.memory_folder import MemoryFolder
from woodfrog.store import files
from woodfrog.store.store import Store


class CpuFolder:
    """Made by `make`; the caller removes it."""

    def __init__(self, path: Path, store: Store | None = None, memory: MemoryFolder | None = None) -> None:
        self.path = path
        self._store = store  # whose directory it is
        self._memory = memory  # that it is in
        self._removing: threading.Thread | None = None

    @classmethod
    def make(cls, work: Path, store: Store, size_bytes: int, *, elsewhere: bool = False) -> CpuFolder:
        """An empty folder with room for so many bytes. `work` is the restore's own directory. `elsewhere`: CRIU will be
        in another PID namespace, where this process's number leads nowhere. NoSpaceError."""
        memory = None if elsewhere else MemoryFolder.make(size_bytes)
        if memory is not None:
            return cls(memory.path, memory=memory)
        if files.is_in_memory(work) and _free_bytes(work) > 2 * size_bytes and room.host_has(2 * size_bytes):
            folder = work / "cpu"
            folder.mkdir(mode=0o700)
            return cls(folder)
        store.require(0, "the CPU side while it is restored", work_bytes=size_bytes)
        return cls(store.tier.make_directory(), store=store)

    def remove_aside(self) -> None:
        """Begin to remove it: giving back a gigabyte of pages takes a tenth of a second. `remove` has to follow."""
        self._removing = threading.Thread(target=self._remove, name="cpu-folder", daemon=True)
        self._removing.start()

    def remove(self) -> None:
        """Safe to repeat."""
        if self._removing is not None:
            self._removing.join()
        self._remove()

    def _remove(self) -> None:
        if self._memory is not None:
            self._memory.close()
            return
        store, self._store = self._store, None
        if store is not None:
            store.tier.remove_directory(self.path)
        shutil.rmtree(self.path, ignore_errors=True)


def _free_bytes(path: Path) -> int:
    status = os.statvfs(path)
    return status.f_bavail * status.f_frsize
