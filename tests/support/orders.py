"""A target that takes orders (tests/sim/targets/orders.hpp), each answered before the next one is given."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from product import Stepper


class Ordered:
    """One running target, and the file that its orders are appended to."""

    def __init__(self, process: Stepper, orders: Path) -> None:
        self.process = process
        self.orders = orders
        self._count = 0

    def order(self, *words: object) -> str:
        """Give one order and wait for its answer, which is no error."""
        answer = self.try_order(*words)
        assert not answer.startswith("error"), (words, answer)
        return answer

    def try_order(self, *words: object) -> str:
        """Give one order and wait for its answer."""
        return self.answer(self.give(*words), words)

    def give(self, *words: object) -> int:
        """Give one order; its number. No other before its answer."""
        self._count += 1
        number = self._count
        with self.orders.open("a") as file:
            file.write(" ".join(map(str, words)) + "\n")
        os.kill(self.process.pid, signal.SIGUSR1)
        return number

    def answer(self, number: int, words: object) -> str:
        """Wait for the answer to that order."""
        prefix = f"{number} "
        self.process.wait_for(lambda lines: any(line.startswith(prefix) for line in lines), f"answer to {words}")
        return next(line for line in self.process.lines() if line.startswith(prefix)).removeprefix(prefix)
