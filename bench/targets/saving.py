"""Baselines inside a training target: it saves its own model and optimizer when SIGUSR2 asks for it.

``torch``: ``torch.save`` of both state dicts between two steps. ``async``: ``torch.distributed.checkpoint.async_save``,
which copies them to host memory between two steps and writes them on a thread while the training goes on. Lines of the
log: ``{"saving": n}`` when it begins, ``{"saved": n, "seconds": s}`` when everything is in the file system.
"""

from __future__ import annotations

import shutil
import signal
import time
from pathlib import Path
from typing import Any

import protocol


class Saver:
    """Call `between_steps` after every step."""

    def __init__(self, mode: str, folder: str, model: Any, optimizer: Any, log: protocol.Log) -> None:
        """`mode`: none, torch or async. `folder` is made, and what is saved in it replaced each time."""
        self._mode = mode
        self._folder = Path(folder)
        self._model, self._optimizer = model, optimizer
        self._log = log
        self._asked = self._begun = 0
        self._begin_s = 0.0
        self._pending: Any = None
        if mode != "none":
            self._folder.mkdir(parents=True, exist_ok=True)
            signal.signal(signal.SIGUSR2, lambda number, frame: self._ask())

    def _ask(self) -> None:
        self._asked += 1

    def between_steps(self) -> None:
        """Begin what was asked for, and tell of what has ended."""
        if self._pending is not None and self._pending.done():
            self._pending.result()
            self._pending = None
            self._saved()
        if self._asked > self._begun and self._pending is None:
            self._begun += 1
            self._begin_s = time.time()
            self._log.note(saving=self._begun, time_s=self._begin_s)
            self._save()

    def _save(self) -> None:
        import torch

        state = {"model": self._model.state_dict(), "optimizer": self._optimizer.state_dict()}
        place = self._folder / "state"
        shutil.rmtree(place, ignore_errors=True)
        if self._mode == "async":
            from torch.distributed import checkpoint

            self._pending = checkpoint.async_save(state, checkpoint_id=str(place))
            return
        place.mkdir()
        torch.save(state, place / "state.pt")
        self._saved()

    def _saved(self) -> None:
        now_s = time.time()
        self._log.note(saved=self._begun, time_s=now_s, seconds=now_s - self._begin_s)
