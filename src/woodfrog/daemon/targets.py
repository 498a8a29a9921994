"""The table of targets: who is meant by a name or a pid, what state they are in, and one operation at a time for each.

What can be asked (processes, agents, the driver) is asked each time; kept here is only what nobody else knows: which
targets are suspended, which could not be brought back, and the names of restored ones without an agent.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from woodfrog.daemon.agents import Agents
from woodfrog.errors import NotFoundError, TargetState, UsageError, WoodfrogError
from woodfrog.operations.notes import Notes
from woodfrog.operations.survey import Numbering, log_path_of
from woodfrog.target import discovery, pid_namespace, procfs
from woodfrog.target.identity import Identity

if TYPE_CHECKING:
    from woodfrog.image.manifest import Manifest
    from woodfrog.operations.restore_plan import RestoreRequest

Key = tuple[int, int]
MAX_NAME = 63  # store.names


@dataclass(frozen=True)
class Resolved:
    """Who is meant. `root_pid` is the root of the tree that is dumped; `pid` uses the GPU, of several processes the
    first (0: not known yet)."""

    name: str
    pid: int
    start_ticks: int
    root_pid: int
    state: str
    members: tuple[Key, ...] = ()  # all of its processes that use the GPU, by pid

    @property
    def key(self) -> Key:
        return (self.pid, self.start_ticks)


class Targets:
    """Thread-safe."""

    def __init__(self, agents: Agents) -> None:
        self._agents = agents
        self._lock = threading.Lock()
        self._busy: dict[int, threading.Lock] = {}
        self._names: dict[Identity, str] = {}
        self._turns = count(1)  # below 0: of operations that need not wait for any other
        self._new_names: set[str] = set()  # of targets that are being made
        self.operations: dict[int, str] = {}  # root pid -> the operation under way
        self.suspended: dict[Key, Notes] = {}
        self.frozen: dict[Key, Notes] = {}

    def remember_name(self, identity: Identity, name: str) -> None:
        with self._lock:
            self._names[identity] = name

    def name_of(self, identity: Identity) -> str:
        with self._lock:
            return self._names.get(identity, "")

    def resolve(self, reference: int | str) -> Resolved:
        """The target with this pid (of any of its GPU processes, or of its root) or name: one process of a job stands
        for the whole job. NotFoundError, UsageError."""
        if isinstance(reference, str) and reference.isdigit():
            reference = int(reference)
        rows = self._known()
        if isinstance(reference, int):
            if reference < 1:
                raise UsageError(f"{reference} is no process id")
            for row in rows:
                if reference in (row.pid, row.root_pid, *(pid for pid, _ in row.members)):
                    return row
            stat = procfs.stat(reference)
            if stat is None or stat.state in "ZX":
                raise NotFoundError(
                    f"there is no process {reference}", advice="see `woodfrog ps`", target_state=TargetState.GONE
                )
            return Resolved(f"pid-{reference}", reference, stat.start_ticks, reference, TargetState.RUNNING)
        found = [row for row in rows if row.name == reference]
        if not found:
            raise NotFoundError(f"there is no target named {reference!r}", advice="see `woodfrog ps`")
        if len(found) > 1:
            pids = ", ".join(str(row.pid) for row in found)
            raise UsageError(f"several targets are named {reference!r}: {pids}", advice="give the pid")
        return found[0]

    @contextlib.contextmanager
    def new_name(self, wanted: str, *, exactly: bool) -> Iterator[str]:
        """A name that no target has, and nobody else gets within: `wanted`, or with -2, -3 … behind it. UsageError when
        it must be that one `exactly` and somebody has it."""
        known = {row.name for row in self._known()}
        with self._lock:
            taken = known | self._new_names
            name = next(one for one in names_like(wanted) if one not in taken)
            if exactly and name != wanted:
                raise UsageError(f"there is a target named {wanted!r} already", advice="choose another --name")
            self._new_names.add(name)
        try:
            yield name
        finally:
            with self._lock:
                self._new_names.discard(name)

    @contextlib.contextmanager
    def for_restore(self, request: RestoreRequest, manifest: Manifest) -> Iterator[tuple[int, RestoreRequest]]:
        """Whose turn a restore waits for (restores to the same numbers take turns), and the request with a name."""
        if not request.new_pid_namespace:
            yield manifest.cpu.root_pid if manifest.cpu else manifest.gpu_pid, request
            return
        wanted = request.name or manifest.target_name or manifest.name
        with self.new_name(wanted, exactly=bool(request.name)) as name:
            yield -next(self._turns), replace(request, name=name)

    @contextlib.contextmanager
    def one_at_a_time(self, root_pid: int, operation: str) -> Iterator[None]:
        """Operations on one target take turns."""
        with self._lock:
            turn = self._busy.setdefault(root_pid, threading.Lock())
        with turn:
            self.operations[root_pid] = operation
            try:
                yield
            finally:
                self.operations.pop(root_pid, None)
                if root_pid < 0:
                    self._busy.pop(root_pid, None)

    def rows(self) -> list[dict[str, Any]]:
        """For `ps`, by pid."""
        result = []
        links = self._agents.links()
        for row in self._known():
            notes = self.suspended.get(row.key) or self.frozen.get(row.key)
            managed = notes.managed if notes else row.pid in links or discovery.agent_of(row.pid) is not None
            operation = self.operations.get(row.root_pid, "")
            gpu_bytes = sum(handle.size for handle in notes.handles) if notes else 0
            devices = set(notes.devices) if notes else set()
            numbering = Numbering()
            launches = 0
            ranks = []
            for pid, _ in row.members:
                mine: list[str] = []
                link = links.get(pid)
                if link is not None and not notes and not operation:
                    with contextlib.suppress(WoodfrogError):  # it ended, or it is busy: then the row says less
                        answer = link.survey(timeout_s=2.0)
                        gpu_bytes += answer.owned_bytes + answer.driver_owned_bytes
                        launches += answer.launches
                        mine = sorted(device.uuid.hex() for device in answer.devices if device.owned_bytes)
                        numbering.add(answer)
                ranks.append({"pid": pid, "gpus": mine})
            devices |= {device.ordinal for device in numbering.devices()}
            result.append(
                {
                    "pid": row.pid,
                    "root_pid": row.root_pid,
                    "gpu_processes": ranks,
                    "name": row.name,
                    "state": row.state,
                    "managed": managed,
                    "gpu_bytes": gpu_bytes,
                    "devices": sorted(devices),
                    "gpu_pids": [pid for pid, _ in row.members] or [row.pid],
                    "launches": launches,
                    "command": " ".join(procfs.command_line(row.pid))[:400],
                    "log": log_path_of(row.pid),
                    "operation": operation,
                    "image": notes.image if notes and notes.hold else "",
                    "hold": notes.hold if notes else "",
                }
            )
        return result

    def waiting(self) -> Iterator[tuple[str, Key, Notes]]:
        """Targets that do not run: their state, their key, and what is noted of them."""
        for key, notes in list(self.suspended.items()):
            yield TargetState.STANDBY if notes.hold else TargetState.SUSPENDED, key, notes
        for key, notes in list(self.frozen.items()):
            yield TargetState.FROZEN, key, notes

    def forget_dead(self) -> list[Notes]:
        """Suspended targets whose process has ended; they are out of the table now."""
        dead = [key for key, notes in list(self.suspended.items()) if not notes.alive]
        return [self.suspended.pop(key) for key in dead]

    def _known(self) -> list[Resolved]:
        rows: dict[Key, Resolved] = {}
        for state, key, notes in self.waiting():
            if notes.alive:
                members = tuple((one.pid, one.start_ticks) for one in notes.gpu_processes)
                rows[key] = Resolved(notes.name, notes.pid, notes.start_ticks, notes.root_pid, state, members)
        for link in self._agents.links().values():
            with contextlib.suppress(WoodfrogError):
                identity = link.identity
                self._add(rows, identity.pid, identity.start_ticks, link.hello.name)
        for agent in discovery.managed_targets():
            if self._agents.is_ours(agent.pid):
                self._add(rows, agent.pid, agent.start_ticks, agent.name)
        with self._lock:
            self._names = {identity: name for identity, name in self._names.items() if identity.is_alive()}
            names = dict(self._names)
        for identity, name in names.items():
            self._add(rows, identity.pid, identity.start_ticks, name)
        return sorted(_jobs(rows.values()), key=lambda row: row.pid)

    def _add(self, rows: dict[Key, Resolved], pid: int, start_ticks: int, name: str) -> None:
        key = (pid, start_ticks)
        if key not in rows and Identity(pid, start_ticks).is_alive():
            shown = pid_namespace.name_of(pid) or name or self.name_of(Identity(pid, start_ticks)) or f"pid-{pid}"
            rows[key] = Resolved(shown, pid, start_ticks, root_of(pid), TargetState.RUNNING, (key,))


def _jobs(rows: Iterable[Resolved]) -> list[Resolved]:
    """Rows of one tree as one: operations take all of its processes that use the GPU, or none."""
    trees: dict[int, list[Resolved]] = {}
    for row in rows:
        trees.setdefault(row.root_pid, []).append(row)
    result = []
    for found in trees.values():
        # What the notes of a suspended or frozen target say goes before what its processes look like.
        known = [row for row in found if row.state != TargetState.RUNNING]
        if known:
            result += known
            continue
        first, *others = sorted(found, key=lambda row: row.pid)
        members = sorted({member for row in (first, *others) for member in row.members})
        result.append(replace(first, members=tuple(members)))
    return result


def names_like(wanted: str) -> Iterator[str]:
    """`wanted`, and with -2, -3 … behind it, within the length that a name may have."""
    yield wanted
    for number in count(2):
        suffix = f"-{number}"
        yield wanted[: MAX_NAME - len(suffix)] + suffix


def root_of(pid: int) -> int:
    """The root of the tree to dump: the first ancestor that `woodfrog run` started under this target's name, else the
    process itself.

    `woodfrog run` starts every target as the leader of a session of its own, whether that is the program itself or a
    shell script around it. Launchers put each rank into a session of its own below that. Somebody's own shell is no
    part of the target: it has no WOODFROG_NAME.
    """
    root = _session_root(pid)
    name = _name_of(root)
    while name is not None:
        stat = procfs.stat(root)
        if stat is None or _name_of(stat.parent_pid) != name:
            break
        above = _session_root(stat.parent_pid)
        if above == stat.parent_pid and (parent := procfs.stat(above)) is not None and parent.session_id != above:
            break  # its session's leader is somebody else's
        root = above
    return root


def _session_root(pid: int) -> int:
    """The leader of the process's session when it is among its ancestors and was started by woodfrog, else itself."""
    stat = procfs.stat(pid)
    if stat is None:
        return pid
    ancestor: procfs.Stat | None = stat
    while ancestor is not None and ancestor.session_id == stat.session_id:
        if ancestor.pid == stat.session_id:
            return ancestor.pid if b"\0WOODFROG_NAME=" in _environment(ancestor.pid) else pid
        ancestor = procfs.stat(ancestor.parent_pid)
    return pid


def _name_of(pid: int) -> bytes | None:
    """What the process's environment has as the name of its target."""
    entries = _environment(pid).split(b"\0")
    return next((one for one in entries if one.startswith(b"WOODFROG_NAME=")), None)


def _environment(pid: int) -> bytes:
    try:
        return b"\0" + Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return b""
