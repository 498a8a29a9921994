"""A test program that takes orders of one letter on its standard input and answers each by a line."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from typing import Any


class OrderedProgram:
    """It runs, and has said `ready`, its number and that of the thread that does the work."""

    def __init__(self, command: Sequence[str], **options: Any) -> None:
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, **options)
        words = self.line().split()
        assert words[0] == "ready", words
        self.pid, self.thread = int(words[1]), int(words[2])

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def order(self, letter: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(letter)
        self.process.stdin.flush()

    def ask(self, letter: str) -> str:
        """One order, and its answer."""
        self.order(letter)
        return self.line()
