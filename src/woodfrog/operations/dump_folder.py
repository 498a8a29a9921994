"""The folder that CRIU works in during a dump: in the runtime directory, so that what a killed daemon left is found.

CRIU's log of a dump that worked is part of the image; that of the last one that failed stays in the runtime directory.
Must never remove a folder that a CRIU is still at work in.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from woodfrog.cpu.options import DUMP_LOG
from woodfrog.cpu.run import still_running
from woodfrog.errors import WoodfrogError
from woodfrog.operations.notes import Notes

KEPT_LOG = "criu-dump.log"


def folder_of(runtime_directory: Path, notes: Notes) -> Path:
    """Where the dump of this target is at work; CRIU's own folder is one below it."""
    return runtime_directory / f"checkpoint-{notes.pid}-{notes.start_ticks}"


@contextmanager
def dump_folder(runtime_directory: Path, notes: Notes) -> Iterator[Path]:
    """A path for Criu.dump's `log_directory`, removed afterwards. An error of the dump names where its log was put."""
    folder = folder_of(runtime_directory, notes)
    try:
        yield folder
    except WoodfrogError as failure:
        log = folder / DUMP_LOG
        if log.exists():
            kept = log.replace(runtime_directory / KEPT_LOG)
            failure.advice = failure.advice.replace(str(log), str(kept))
            failure.details["log"] = str(kept)
        raise
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def remove_abandoned(runtime_directory: Path) -> None:
    """Remove the folders of dumps and restores whose daemon died in them; none is under way when this is called."""
    for pattern in ("checkpoint-*-*", "restore-*-*"):
        for folder in runtime_directory.glob(pattern):
            if all(still_running(work) is None for work in folder.glob("criu-*")):
                shutil.rmtree(folder, ignore_errors=True)
