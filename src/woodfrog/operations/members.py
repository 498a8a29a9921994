"""One process of a target that uses the GPU, and work on several of them side by side.

A target has one or more such processes: the ranks of a job, a server and its workers. Their handles are numbered
through: the member's number stands above the number that its own agent gave, so that notes and manifests need one list.
Must never let a failure of one member leave another member's work unfinished behind its caller's back: all are joined.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TypeVar

from woodfrog.driver.process import DriverProcess
from woodfrog.errors import TargetLostError, WoodfrogError
from woodfrog.image.manifest import MEMBER_SHIFT, member_of
from woodfrog.operations.context import Context
from woodfrog.operations.notes import HandleNote, MemberNote
from woodfrog.target.identity import Identity
from woodfrog.target.link import AgentLink
from woodfrog.target.memory import Exported, Handle, Mapping, Shared

AGENT_TIMEOUT_S = 30.0  # an agent answers within milliseconds; a machine that swaps takes longer
_OWN = (1 << MEMBER_SHIFT) - 1

__all__ = ["AGENT_TIMEOUT_S", "Member", "member_of", "side_by_side"]

Item = TypeVar("Item")
Result = TypeVar("Result")


class Member:
    """A process of the target. `number` is its place among the target's GPU processes."""

    def __init__(self, context: Context, number: int, note: MemberNote) -> None:
        self.number = number
        self.note = note
        self._mapped: Exported | None = None  # what it exported: `mappings` are made of that when they are asked for
        self._mappings: list[Mapping] | None = None
        self.shared: list[Shared] = []
        self._context = context

    @property
    def pid(self) -> int:
        return self.note.pid

    @property
    def identity(self) -> Identity:
        return Identity(self.note.pid, self.note.start_ticks)

    @property
    def alive(self) -> bool:
        return self.identity.is_alive()

    @cached_property
    def driver(self) -> DriverProcess:
        """The driver's view of the process; NotFoundError once that has ended."""
        return DriverProcess(self.note.pid)

    def link(self) -> AgentLink:
        """The agent's connection; it is woken when it sleeps. TargetLostError once the process has ended, even if its
        parent has not noticed yet: nobody would answer."""
        if not self.alive:
            raise TargetLostError(
                f"process {self.pid} ended in the middle of the operation",
                pid=self.pid,
                advice="see the target's log; restore an earlier image",
            )
        return self._context.agents.ensure(self.note.pid, AGENT_TIMEOUT_S)

    def take(self, exported: Exported) -> list[HandleNote]:
        """What this member exported, numbered through; its mappings and shared handles are kept here."""
        self._mapped, self._mappings = exported, None
        self.shared = [replace(one, handle=self._number(one.handle)) for one in exported.shared]
        host_nodes = {one.handle: one.host_node for one in exported.shared}
        return [
            HandleNote(
                self._number(one.handle),
                one.size_bytes,
                self.note.job_ordinal(one.device),
                one.kind,
                host_node=host_nodes.get(one.handle, -1),
            )
            for one in exported.handles
        ]

    @property
    def mappings(self) -> list[Mapping]:
        """What it exported, as `note` numbers handles and devices; WireError when they cannot be."""
        if self._mappings is None:
            self._mappings = [
                Mapping(
                    one.address,
                    one.size_bytes,
                    self._number(one.handle),
                    one.offset_bytes,
                    self.note.job_ordinal(one.device),
                    one.kind,
                )
                for one in (self._mapped.mappings if self._mapped is not None else ())
            ]
        return self._mappings

    def owns(self, handle: HandleNote) -> bool:
        """Whether `handle` is one of this process's."""
        return member_of(handle.handle) == self.number

    def own_handle(self, handle: HandleNote) -> Handle:
        """`handle` as its agent knows it."""
        return Handle(handle.handle & _OWN, handle.size, self.note.own_ordinal(handle.device), handle.kind)

    def number_of(self, handle: int) -> int:
        """The number that notes and images have for a handle of this member's agent."""
        return self._number(handle)

    def _number(self, handle: int) -> int:
        if handle > _OWN:
            raise WoodfrogError(f"the agent of process {self.pid} numbers a handle {handle:#x}", pid=self.pid)
        return self.number << MEMBER_SHIFT | handle


def side_by_side(items: Sequence[Item], work: Callable[[Item], Result]) -> list[Result]:
    """`work` on all items at once, each on a thread of its own. All are joined; then the first failure is raised."""
    if len(items) < 2:
        return [work(item) for item in items]
    results: dict[int, Result] = {}
    failures: list[Exception | None] = [None] * len(items)

    def run(number: int) -> None:
        try:
            results[number] = work(items[number])
        except Exception as failure:  # noqa: BLE001 - raised by the caller's thread below
            failures[number] = failure

    threads = [
        threading.Thread(target=run, args=(number,), name=f"member-{number}", daemon=True)
        for number in range(len(items))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for failure in failures:
        if failure is not None:
            raise failure
    return [results[number] for number in range(len(items))]
