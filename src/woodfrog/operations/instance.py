"""What makes one restored process differ from another of the same image: its PID namespace, name, log and ports.

Without a new PID namespace a process is what it was: same numbers, same name, same log. With one it has a random number
(`Instance.number`) by which its namespace's process 1 is found, a name that no living target has, and a log of its own.
Must never touch a process that is not of this instance.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from woodfrog.cpu import pid_namespace as namespaces
from woodfrog.cpu.pid_namespace import NewNamespace
from woodfrog.cpu.rewrite import Changes
from woodfrog.errors import BadImageError, NotFoundError, RefusedError, TargetLostError
from woodfrog.operations.context import Context
from woodfrog.operations.notes import Notes
from woodfrog.target import pid_namespace
from woodfrog.target.identity import Identity, ProcessHandle
from woodfrog.target.reaper import Reaper

if TYPE_CHECKING:
    from woodfrog.cpu.criu import Restored
    from woodfrog.image.manifest import Manifest
    from woodfrog.operations.restore_plan import RestoreRequest

NUMBER_BYTES = 8
REAP_TIMEOUT_S = 5.0


@dataclass
class Instance:
    """One restore's own. Made by `plan`; `number` is empty for a process that gets its old numbers."""

    number: str = ""
    name: str = ""
    log_path: str = ""
    changes: Changes = field(default_factory=Changes)
    binds: tuple[tuple[str, str], ...] = ()
    init: Identity | None = None  # process 1 of its namespace, once that is there

    @classmethod
    def plan(cls, context: Context, manifest: Manifest, request: RestoreRequest) -> Instance:
        """What this restore makes. RefusedError when it cannot be."""
        ports = choose_ports(request.ports)
        if not request.new_pid_namespace:
            return cls(changes=Changes(ports=ports))
        name = request.name or manifest.target_name or manifest.name
        for bind in request.binds:
            require_bind(*bind)
        namespaces.require_privilege("a new PID namespace")
        if any(process.pid == 1 for process in manifest.processes):
            raise RefusedError(
                "the image has a process 1, and in a new PID namespace that is woodfrog's own",
                advice="take the image of the programs below it, or restore it without --new-pid-namespace",
            )
        log_path, paths = manifest.environment.log_path, {}
        if log_path and name != (manifest.target_name or manifest.name):
            paths = {log_path: str(context.runtime_directory / "logs" / f"{name}.log")}
            (context.runtime_directory / "logs").mkdir(mode=0o700, exist_ok=True)
        return cls(
            number=os.urandom(NUMBER_BYTES).hex(),
            name=name,
            log_path=paths.get(log_path, log_path),
            changes=Changes(paths, ports, (manifest.environment.uid, manifest.environment.gid)),
            binds=request.binds,
        )

    @property
    def namespace(self) -> NewNamespace | None:
        return NewNamespace(self.number, self.name, self.binds) if self.number else None

    @property
    def record_number(self) -> int:
        """For the record of the restore in the keeper."""
        return int(self.number or "0", 16)

    def found(self, reaper: Reaper, restored: Restored, notes: Notes) -> None:
        """CRIU is done: from now on `notes` have the numbers that the processes have here."""
        if not self.number:
            return
        # Even one that has ended by now: nobody else would reap it.
        self.init = next(iter(reaper.adopt([restored.init_pid])), None)
        init = pid_namespace.find(self.number)
        if init is None:
            raise TargetLostError("the restored target ended at once", advice="see its log and criu-restore.log")
        use_outer_numbers(notes, pid_namespace.outer_numbers(init))

    def end(self, reaper: Reaper) -> None:
        """Nothing of the namespace is left when this returns. Safe to repeat."""
        if self.init is not None:
            end_namespace(reaper, self.init)


def choose_ports(wanted: Mapping[int, int]) -> dict[int, int]:
    """`wanted` with a free port for every 0. It stays free until CRIU takes it or somebody else is faster, which CRIU
    then tells."""
    with contextlib.ExitStack() as held:
        chosen = {}
        for old, new in wanted.items():
            if new == 0:
                probe = held.enter_context(socket.socket())
                probe.bind(("", 0))
                new = probe.getsockname()[1]
            chosen[old] = new
    return chosen


def require_bind(here: str, there: str) -> None:
    """RefusedError unless one path can be bound over the other."""
    for path in (here, there):
        if not Path(path).is_absolute():
            raise RefusedError(f"a path to bind must be absolute: {path}")
        if not Path(path).exists():
            raise RefusedError(f"{path} does not exist", advice="--bind HERE:THERE needs both")
    if Path(here).is_dir() != Path(there).is_dir():
        raise RefusedError(f"of {here} and {there} one is a directory and the other is not")


def end_namespace(reaper: Reaper, init: Identity) -> None:
    """Kill process 1 of a namespace, and with it all that is in there; wait until it has been reaped by us, if we are
    its parent."""
    with contextlib.suppress(NotFoundError, TargetLostError), ProcessHandle(init.pid, init.start_ticks) as handle:
        handle.kill()
    if reaper.is_watched(init):
        reaper.wait(init, REAP_TIMEOUT_S)


def use_outer_numbers(notes: Notes, numbers: dict[int, int]) -> None:
    """Replace the numbers of an image in `notes` by those that its processes have here. BadImageError when one that
    matters is not there."""
    wanted = {notes.pid, notes.root_pid, *(member.pid for member in notes.members)}
    if missing := wanted - numbers.keys():
        raise BadImageError(f"CRIU restored the tree without process {min(missing)}")
    notes.pid, notes.root_pid = numbers[notes.pid], numbers[notes.root_pid]
    for member in notes.members:
        member.pid = numbers[member.pid]
    kept = [(numbers[pid], command) for pid, command in zip(notes.tree, notes.commands, strict=True) if pid in numbers]
    notes.tree, notes.commands = [pid for pid, _ in kept], [command for _, command in kept]
