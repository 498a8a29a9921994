"""Steps that call the driver through woodfrog's interposer and steps that call it directly, within one process.

See driver_calls.cpp for how. The program must be warm: what it looks up or allocates later is not covered. Without an
interposer in the process it ends with a reason, for there would be nothing to compare.
"""

from __future__ import annotations

import ctypes
import os
import time
from pathlib import Path
from typing import Any


class DriverCalls:
    """All addresses of driver functions that this process holds, which can be switched. Use one per process."""

    def __init__(self) -> None:
        folder = os.environ.get("WOODFROG_BENCH_BINARIES") or Path(__file__).parents[2] / "build" / "bench"
        self._library = ctypes.CDLL(str(Path(folder) / "libdriver_calls.so"))
        for function in (self._library.driver_calls_find, self._library.driver_calls_use):
            function.restype = ctypes.c_long
        self.places = int(self._library.driver_calls_find())
        if self.places <= 0:
            raise SystemExit("driver_calls: no calls of the driver go through an interposer in this process")

    def use(self, direct: bool) -> None:
        """From now on calls go past the interposer, or through it. No thread may be inside the driver."""
        if failed := self._library.driver_calls_use(int(direct)):
            raise SystemExit(f"driver_calls: {failed} of {self.places} addresses could not be written")


class Alternating:
    """Switches after every ``steps`` steps, in the order through, past, past, through, so that a drift of the machine
    falls on both alike; ``steps`` 0: never. The first step after a switch is marked, since it finds its caches cold."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._calls = DriverCalls() if steps else None
        self._number = 0
        self._direct = False
        self._begin_s = 0.0

    @property
    def places(self) -> int:
        """How many addresses are switched."""
        return self._calls.places if self._calls else 0

    def begin(self) -> None:
        """Before a step; the GPU must be idle."""
        if self._calls:
            self._direct = (self._number // self._steps) % 4 in (1, 2)
            if self._number % self._steps == 0:
                self._calls.use(self._direct)
        self._begin_s = time.perf_counter()

    def end(self) -> dict[str, Any]:
        """After it, when its result is there: members for its line in the log."""
        took_s = time.perf_counter() - self._begin_s
        if not self._calls:
            return {}
        block, place = divmod(self._number, self._steps)
        self._number += 1
        return {"block": block, "cold": place == 0, "direct": self._direct, "took_s": took_s}
