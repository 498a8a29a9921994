"""A process whose thread maps as a driver does at a checkpoint, on demand (tests/sim/enter/mapper.cpp)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ordered_program import OrderedProgram


class Mapper(OrderedProgram):
    """tests/sim/enter/mapper.cpp as a process; see there."""

    def __init__(self, program: Path, mebibytes: int, before: Sequence[str] = (), **options: Any) -> None:
        super().__init__([*before, str(program), str(mebibytes)], **options)

    def begin(self) -> None:
        """Has it map, fill and check; `line` tells of the end."""
        self.order("m")

    def check(self) -> None:
        """A whole round, which must be right: the memory clear and then as written, registers and signals kept."""
        self.begin()
        assert self.line() == "right"

    def states(self) -> dict[int, tuple[str, str]]:
        """Of each thread: its state, and the process that traces it."""
        found = {}
        for status in Path(f"/proc/{self.pid}/task").glob("*/status"):
            fields = dict(line.split(":", 1) for line in status.read_text().splitlines() if ":" in line)
            found[int(status.parent.name)] = (fields["State"].split()[0], fields["TracerPid"].strip())
        return found

    def check_free(self) -> None:
        """Nobody traces it, nothing stopped it, and a round is right."""
        assert all(state not in "Tt" and tracer == "0" for state, tracer in self.states().values()), self.states()
        self.check()

    def close(self) -> None:
        self.process.kill()
        self.process.wait(30)
