"""One directory being written into a DiskStore, and its publishing (docs/format.md, "How an image comes to be").

Until the rename in `publish` nothing can be seen of it, and a crash leaves a directory that the store removes. The
order of the steps is the safety: it must never be changed for speed.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from woodfrog.errors import RefusedError, UsageError, WoodfrogError
from woodfrog.faults import fault_point
from woodfrog.store import files, names, space

if TYPE_CHECKING:
    from woodfrog.store.disk import DiskStore


class DiskWriter:
    """Made by `DiskStore.begin`; see Writer. Owns the temporary directory with its lock, and the files it created."""

    def __init__(self, store: DiskStore, name: str, number: int, temporary: str, dir_fd: int) -> None:
        self._store = store
        self._name = name
        self._number = number
        self._temporary = temporary
        self._dir_fd = dir_fd  # locked: this is what tells the store that we live
        self._created: list[int] = []

    @property
    def reference(self) -> str:
        return f"{self._name}@{self._number}"

    @property
    def name(self) -> str:
        return self._name

    @property
    def number(self) -> int:
        return self._number

    @property
    def directory(self) -> Path:
        return self._store.path / names.TMP / self._temporary

    @property
    def dir_fd(self) -> int:
        return self._dir_fd

    def create_file(self, filename: str) -> int:
        self._check_open()
        descriptor = files.create_file(filename, dir_fd=self._dir_fd)
        self._created.append(descriptor)
        return descriptor

    def publish(self, manifest: Callable[[], bytes]) -> None:
        self._check_open()
        try:
            fault_point("store.commit.begin")
            data = manifest()
            files.sync_tree(self._dir_fd)
            fault_point("store.commit.files_durable")
            self._write_manifest(data)
            fault_point("store.commit.manifest_durable")
            with self._store.lock():
                files.rename_no_replace(self._temporary, self._store.tmp_fd, self.reference, self._store.dir_fd)
        except FileExistsError as error:
            self.abort()
            raise RefusedError(
                f"the store has an image {self.reference} already, although that number was reserved",
                advice="something else writes into the store: give each its own",
            ) from error
        except OSError as error:
            self.abort()
            if error.errno in space.FULL:
                raise space.full(self._store.path, error) from error
            raise
        except BaseException:
            self.abort()
            raise
        # From here on it exists; whatever fails now, it must not be taken away again.
        try:
            fault_point("store.commit.renamed")
            os.fsync(self._store.dir_fd)
            os.fsync(self._store.tmp_fd)
            fault_point("store.commit.durable")
        except OSError as error:
            raise WoodfrogError(
                f"{self.reference} is complete, but its name may not survive a power cut ({error.strerror})",
                advice=f"see to the disk, then `woodfrog verify {self.reference}`",
                details={"image": self.reference},
            ) from error
        finally:
            self._close()

    def abort(self) -> None:
        if self._dir_fd >= 0:
            self._close()
            files.remove_tree(self._temporary, dir_fd=self._store.tmp_fd)

    def __enter__(self) -> DiskWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort()

    def _check_open(self) -> None:
        if self._dir_fd < 0:
            raise UsageError(f"the writer of {self.reference} has ended already")

    def _write_manifest(self, data: bytes) -> None:
        descriptor = files.create_file(names.MANIFEST_TMP, dir_fd=self._dir_fd)
        try:
            files.write_all(descriptor, data)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        fault_point("store.commit.manifest_written")
        os.rename(names.MANIFEST_TMP, names.MANIFEST, src_dir_fd=self._dir_fd, dst_dir_fd=self._dir_fd)
        os.fsync(self._dir_fd)

    def _close(self) -> None:
        for descriptor in self._created:
            os.close(descriptor)
        self._created.clear()
        if self._dir_fd >= 0:
            os.close(self._dir_fd)
            self._dir_fd = -1
