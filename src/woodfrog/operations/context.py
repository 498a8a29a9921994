"""What an operation may use of the daemon that runs it. Interfaces only: operations must never import the daemon."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from woodfrog.operations.history import Baselines, History
from woodfrog.operations.notes import Keeper, Notes

if TYPE_CHECKING:
    from woodfrog._native.transfer import Arena, Device
    from woodfrog.cpu.criu import Criu
    from woodfrog.image.repository import ImageRepository
    from woodfrog.target.identity import Identity
    from woodfrog.target.link import AgentLink
    from woodfrog.target.reaper import Reaper


class ExtentLike(Protocol):
    @property
    def node(self) -> int: ...
    @property
    def offset(self) -> int: ...
    @property
    def size(self) -> int: ...


class Arenas(Protocol):
    """Accounting of the host arenas (daemon/arena.py)."""

    @property
    def size_bytes(self) -> int: ...
    @property
    def free_bytes(self) -> int: ...
    @property
    def prepared_bytes(self) -> int: ...
    def arena(self, node: int) -> Arena: ...
    def allocate(self, size_bytes: int, *, node: int = -1, contiguous: bool = False) -> Sequence[ExtentLike]: ...
    def largest_free_bytes(self) -> int: ...
    def free(self, extents: Sequence[ExtentLike], user: int) -> None: ...
    def prepare(self, extents: Sequence[ExtentLike], user: int) -> None: ...
    def reserve(self, extents: Sequence[ExtentLike]) -> None: ...
    def grow_in_background(self, wanted_bytes: int) -> None: ...
    def close(self) -> None: ...


class Agents(Protocol):
    """Connections to the agent threads of targets (daemon/agents.py)."""

    def link(self, pid: int) -> AgentLink | None:
        """The live connection of this process, if it has one now."""

    def ensure(self, pid: int, timeout_s: float) -> AgentLink:
        """The connection of this process; its agent is woken when it sleeps. TimeoutExceededError, TargetLostError."""

    def detach(self, pid: int) -> None:
        """Let the agent close its connection and sleep, so that it holds no descriptor of ours."""


class Devices(Protocol):
    def by_uuid(self, uuid: str) -> Device: ...
    def by_ordinal(self, ordinal: int) -> str: ...
    def all(self) -> dict[str, Device]: ...
    def node_of(self, uuid: str) -> int: ...


@dataclass(frozen=True)
class Context:
    """Everything shared by the operations of one daemon. All members are thread-safe."""

    runtime_directory: Path
    keeper: Keeper
    agents: Agents
    arenas: Arenas
    devices: Devices
    reaper: Reaper
    store: Callable[[str], ImageRepository]  # by path or URL; "" is the default store
    criu: Callable[[], Criu]  # finds CRIU once; RefusedError when there is none
    name_of: Callable[[Identity], str]  # the name that a target without an agent was given, or an empty string
    suspended: dict[tuple[int, int], Notes]  # (pid, start ticks) -> notes of suspended targets
    history: History  # which image of a target came last
    baselines: Baselines  # and what was in it, for targets whose launches are followed
    # Set once this machine's driver was seen to change its saved state behind a checkpoint (control_files).
    control_files_unfit: threading.Event = field(default_factory=threading.Event)
