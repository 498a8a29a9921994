"""Where the time goes while a target stands still: the daemon's by name, the agents' by driver call.

What the driver's own checkpoint and restore take is not in it (FrozenTarget.driver_s). Times only; changes nothing, and
must never make an operation fail.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from woodfrog.errors import WoodfrogError

if TYPE_CHECKING:
    from woodfrog.operations.members import Member

log = logging.getLogger(__name__)

AgentTimes = dict[str, dict[str, tuple[float, int]]]


class Stall:
    """Seconds of the daemon's thread that the target waits for, by part, in the order of their first use. Parts do not
    overlap; those named after a command of wire.h include the agent's share of it."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.agents: list[AgentTimes] = []  # one for each process

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """The body is that part."""
        begun = time.monotonic()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - begun

    def ask(self, members: Sequence[Member]) -> None:
        """Ask the agents for theirs. Once the targets run again: asking costs a message."""
        self.agents = []
        for member in members:
            try:
                self.agents.append(member.link().spent())
            except WoodfrogError as failure:  # it ended, or is away
                log.info("what the agent of process %d spent is not known: %s", member.pid, failure.reason)

    def to_dict(self) -> dict[str, Any]:
        """For a result: seconds; of the agents seconds and how often, by command and spending."""
        return {"daemon": dict(self.seconds), "agents": self.agents}
