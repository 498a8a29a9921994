"""The CPU side of a checkpoint: where CRIU's files go, the dump itself, and why it failed.

They go to a folder in memory where there is one (memory_folder.py), else beside the image on its disk. Must never leave
a target without saying that it runs: CRIU's own undo sees to that.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from woodfrog.cpu import lazy_dump, pagemap
from woodfrog.cpu.gate import Gate, is_possible
from woodfrog.operations.dump_folder import dump_folder
from woodfrog.operations.memory_folder import MemoryFolder
from woodfrog.target import connections, pid_namespace

if TYPE_CHECKING:
    from woodfrog.cpu.criu import Criu, Dumped
    from woodfrog.image.writer import ImageWriter
    from woodfrog.operations.context import Context
    from woodfrog.operations.frozen import FrozenTarget
    from woodfrog.operations.notes import Notes
    from woodfrog.operations.survey import Surveyed

log = logging.getLogger(__name__)


class CpuDump:
    """That of one checkpoint; `close` it once the image is committed or given up. `dumped`: None before `dump`."""

    def __init__(self, context: Context) -> None:
        self._runtime_directory = context.runtime_directory
        self.criu: Criu = context.criu()
        self.dumped: Dumped | None = None
        self._folder: MemoryFolder | None = None
        self._pages_ahead: Path | None = None
        self._gate: Gate | None = None
        self._starter: ThreadPoolExecutor | None = None
        self._begun: Future[Dumped] | None = None

    def prepare(self, surveyed: Surveyed, writer: ImageWriter) -> None:
        """Decides where the files go, which `writer` then takes from there."""
        # CRIU in another PID namespace would not find it: its path leads over this process's number.
        if pid_namespace.inner_root(surveyed.root_pid) is None:
            self._folder = MemoryFolder.make(surveyed.resident_bytes + surveyed.control_state_bytes)
        if self._folder is not None:
            writer.cpu_directory = self._folder.path / "cpu"
            ahead = self._folder.path / "pages"
            self._pages_ahead = ahead if lazy_dump.reserve(surveyed.root_pid, ahead) else None
        log.info("CRIU's files go to %s", writer.cpu_directory)

    def begin(
        self,
        target: FrozenTarget,
        writer: ImageWriter,
        passed_over: Sequence[str],
        *,
        stop: bool,
        timeout_s: float,
        wait_s: float,
    ) -> None:
        """Start CRIU already, where it can be made to wait: it does nothing to the tree before `dump`, with the same
        arguments. `passed_over`: all that the target may have then. It waits until `dump`, `close`, or for `wait_s`."""
        if self._folder is None or not is_possible():
            return
        self._gate = Gate()
        self._starter = ThreadPoolExecutor(1, thread_name_prefix="criu-dump")
        self._begun = self._starter.submit(
            self._run, target.notes, writer, passed_over, stop=stop, timeout_s=timeout_s, gate=self._gate, wait_s=wait_s
        )

    def dump(
        self, target: FrozenTarget, writer: ImageWriter, passed_over: Sequence[str], *, stop: bool, timeout_s: float
    ) -> None:
        """The whole tree; with `stop` it stands still afterwards. Raises what Criu.dump raises; then it runs on."""
        if self._begun is not None and self._gate is not None:
            self._gate.open()  # too late: the dump says so
            self.dumped = self._begun.result()
        else:
            self.dumped = self._run(target.notes, writer, passed_over, stop=stop, timeout_s=timeout_s)
        # A process that died before the dump is not in it: an image of the others would be none of the target.
        target.check_alive()

    def _run(
        self,
        notes: Notes,
        writer: ImageWriter,
        passed_over: Sequence[str],
        *,
        stop: bool,
        timeout_s: float,
        gate: Gate | None = None,
        wait_s: float = 0.0,
    ) -> Dumped:
        told = self._folder.told() if self._folder is not None else nullcontext()
        with told, dump_folder(self._runtime_directory, notes) as log_folder:
            return self.criu.dump(
                notes.root_pid,
                writer.cpu_directory,
                inner_pid=pid_namespace.inner_root(notes.root_pid),
                leave_running=not stop,
                connections=connections.of_tree(notes.tree).closed_circle,
                timeout_s=timeout_s,
                log_directory=log_folder,
                passed_over=passed_over,
                pages_ahead=self._pages_ahead,
                gate=gate,
                gate_s=wait_s,
            )

    def pages_cuts(self, writer: ImageWriter) -> dict[str, pagemap.PagesCut]:
        """How CRIU's files of pages are cut into chunks."""
        return pagemap.cuts(writer.cpu_directory, min(pagemap.WINDOW_BYTES, writer.chunk_bytes)) if self.dumped else {}

    def close(self) -> None:
        """A dump that was begun and did not come to pass is none. Safe to repeat."""
        if self._starter is not None and self._gate is not None:
            self._gate.shut()
            self._starter.shutdown()  # as long as CRIU takes to end: cpu.run bounds it (SHUT_S)
            self._gate.close()
        if self._folder is not None:
            self._folder.close()
