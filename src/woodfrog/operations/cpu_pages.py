"""CRIU's files of pages, filled on a thread of its own while the rest of the restore begins.

They are nearly all of the CPU side, and CRIU reads them last. Until they are whole it waits at its gate.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from woodfrog.cpu import images
from woodfrog.cpu.gate import Gate
from woodfrog.image import layout
from woodfrog.image.image import FILES_AT_ONCE, Image

if TYPE_CHECKING:
    from woodfrog._native.transfer import Progress


class CpuPages:
    """Those of one restore: made at once, and filled from `begin` on. `close` it."""

    def __init__(self, image: Image, directory: Path) -> None:
        from woodfrog._native import transfer

        records = [record for record in image.own_cpu_files() if images.is_pages(record.path)]
        # More than may be open at once: they are left to whoever extracts the others.
        self._records = records if len(records) <= FILES_AT_ONCE else []
        self.progress: Progress = transfer.Progress()
        self.gate = Gate()
        self._failure: BaseException | None = None
        self._fds: list[int] = []
        self._thread: threading.Thread | None = None
        try:
            for record in self._records:
                self._fds.append(layout.create_file(directory, record.path))
            self._extract = image.files_extraction(self._records, self._fds)
        except BaseException:
            self.close()
            raise

    def begin(self) -> None:
        """Fill them from now on."""
        thread = threading.Thread(target=self._fill, name="restore-pages", daemon=True)
        thread.start()
        self._thread = thread

    @property
    def names(self) -> set[str]:
        """What is being filled here."""
        return {record.path for record in self._records}

    def _fill(self) -> None:
        try:
            self._extract(self.progress)
            self._close_files()  # their memory is given back once they are unlinked, not when the restore ends
            self.gate.open()
        except BaseException as failure:  # noqa: BLE001 (told to who waits, whatever it is)
            self._failure = failure
        finally:
            self.gate.shut()

    def join(self) -> None:
        """Until they are whole or cannot be had."""
        if self._thread is not None:
            self._thread.join()

    def wait(self) -> None:
        """Until they are whole; raises what kept them from it."""
        self.join()
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """Ends the filling if it still goes on. Safe to repeat."""
        self.progress.cancel()
        self.join()
        self.gate.close()
        self._close_files()

    def _close_files(self) -> None:
        fds, self._fds = self._fds, []
        for fd in fds:
            os.close(fd)
