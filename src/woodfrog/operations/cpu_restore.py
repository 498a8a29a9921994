"""The CPU side of a restore: the image's files where CRIU can read them, and the tree that it makes of them.

Everything lies in the restore's own folder or in one that is gone with its owner; `close` leaves only CRIU's log.
Must never start CRIU on files of pages that are not whole, but for one that waits at its gate.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from woodfrog.cpu import gate
from woodfrog.cpu import images as criu_images
from woodfrog.cpu.options import RESTORE_LOG
from woodfrog.errors import WoodfrogError
from woodfrog.operations.cpu_folder import CpuFolder
from woodfrog.operations.cpu_pages import CpuPages
from woodfrog.operations.data import JointProgress
from woodfrog.operations.manifest import CONNECTIONS, SHELL_JOB

if TYPE_CHECKING:
    from woodfrog.cpu.criu import Criu, Restored
    from woodfrog.image.image import Image
    from woodfrog.operations.context import Context
    from woodfrog.operations.control_files import RestoredFiles
    from woodfrog.operations.instance import Instance
    from woodfrog.operations.phases import Runner
    from woodfrog.store.store import Store

log = logging.getLogger(__name__)

KEPT_LOG = "criu-restore.log"


class CpuRestore:
    """That of one restore; `prepare`, `extract`, `restore` in this order. `close` it before the image."""

    def __init__(self, context: Context, runner: Runner) -> None:
        self._runtime_directory = context.runtime_directory
        self._runner = runner
        self.criu: Criu = context.criu()
        self.restored = False  # the tree is there
        self.waited_s = 0.0  # CRIU, for its files of pages
        self._image: Image | None = None
        self._work: Path | None = None
        self._folder: CpuFolder | None = None
        self._pages: CpuPages | None = None
        self._control_files: RestoredFiles | None = None

    def prepare(self, image: Image, work: Path, store: Store, control_files: RestoredFiles, *, elsewhere: bool) -> None:
        """`work` is the restore's own folder, removed by `close`; `control_files` is taken over. `elsewhere`: CRIU will
        be in another PID namespace. NoSpaceError."""
        self._image, self._work, self._control_files = image, work, control_files
        work.mkdir(mode=0o700, exist_ok=True)
        self._folder = CpuFolder.make(work, store, image.manifest.cpu_bytes, elsewhere=elsewhere)
        log.info("CRIU's files are read in %s", self._folder.path)

    def extract(self) -> None:
        """The files; those of pages are filled from then on."""
        from woodfrog._native import transfer

        assert self._folder is not None
        assert self._image is not None
        image, directory = self._image, self._folder.path
        self._pages = CpuPages(image, directory)
        others = {record.path for record in image.own_cpu_files()} - self._pages.names
        extracting = transfer.Progress()
        with self._runner.counting("extract", JointProgress([extracting])):
            image.extract_cpu(directory, others, extracting)
        self._pages.begin()  # not beside the few that CRIU needs first

    def tasks(self) -> list[criu_images.Task]:
        """What processes the extracted files are of."""
        assert self._folder is not None
        return criu_images.tasks(self._folder.path)

    def restore(self, instance: Instance, on_restored: Callable[[Restored], None], *, timeout_s: float) -> None:
        """Raises what Criu.restore raises, or what kept the files of pages from being whole. `on_restored` is called as
        soon as the tree is there, `restored` is set then."""
        assert self._folder is not None
        assert self._image is not None
        assert self._control_files is not None
        assert self._pages is not None
        cpu, pages = self._image.manifest.cpu, self._pages
        assert cpu is not None
        if not gate.is_possible():
            pages.wait()
        with (
            self._told(),
            self._runner.counting("cpu", JointProgress([pages.progress])),
            self._control_files.filled(self._image, pages.join) as inherited,
        ):
            restored = self.criu.restore(
                self._folder.path,
                log_directory=self._work,
                timeout_s=timeout_s,
                shell_job=SHELL_JOB in cpu.options,
                connections=CONNECTIONS in cpu.options,
                inherited=inherited,
                namespace=instance.namespace,
                changes=instance.changes,
                gate=pages.gate if gate.is_possible() else None,
            )
            self.restored = True
            self.waited_s = restored.waited_s
            on_restored(restored)
        self._folder.remove_aside()

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except WoodfrogError as failure:
            if (kept := self._keep_log()) is not None:
                failure.advice = failure.advice.replace(str(self._log), str(kept))
                failure.details["log"] = str(kept)
            if self._pages is not None:
                self._pages.wait()  # their failure is what ended CRIU
            raise

    @property
    def _log(self) -> Path:
        assert self._work is not None
        return self._work / RESTORE_LOG

    def _keep_log(self) -> Path | None:
        """CRIU's log of the last restore stays in the runtime directory, for `woodfrog doctor` and people: where."""
        if self._work is None or not self._log.exists():
            return None
        return self._log.replace(self._runtime_directory / KEPT_LOG)

    def close(self) -> None:
        """Safe to repeat."""
        if self._pages is not None:
            self._pages.close()
        self._keep_log()
        if self._control_files is not None:
            self._control_files.close()
        if self._folder is not None:
            self._folder.remove()
        if self._work is not None:
            shutil.rmtree(self._work, ignore_errors=True)
