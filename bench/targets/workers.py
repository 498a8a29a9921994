"""Processes that a target starts itself, each with a pipe to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Workers:
    """``count`` processes that run ``work(number, connection, arguments)``: it answers each message but None, which
    ends it. ``multiprocessing``: the module, Python's or PyTorch's."""

    def __init__(self, multiprocessing: Any, count: int, work: Callable[..., None], arguments: Any) -> None:
        context = multiprocessing.get_context("spawn")  # a forked child has no CUDA
        self._connections, self._processes = [], []
        for number in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(target=work, args=(number, theirs, arguments), daemon=True)
            process.start()
            theirs.close()
            self._connections.append(ours)
            self._processes.append(process)

    def ask(self, message: Any) -> list[Any]:
        """All at once; what they answer, in their order."""
        for connection in self._connections:
            connection.send(message)
        return [connection.recv() for connection in self._connections]

    def end(self) -> None:
        """They have ended when this returns."""
        for connection, process in zip(self._connections, self._processes, strict=True):
            connection.send(None)
            process.join()
