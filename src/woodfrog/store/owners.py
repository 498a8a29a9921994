"""Who holds a lock: what is written into a lock object, for judging whether its holder lives and for telling a person.

The same object on every tier. On a local disk it only tells; there the lock itself is an flock.
"""

from __future__ import annotations

import json
import os
import socket
import time
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class Owner:
    """One holder. `boot_id`, `pid_namespace` and `start_ticks` tell a process from a later one with its number."""

    exclusive: bool
    purpose: str
    host: str
    pid: int
    boot_id: str
    pid_namespace: int
    start_ticks: int
    since_unix_s: float

    def encode(self) -> bytes:
        return json.dumps(asdict(self)).encode() + b"\n"

    def describe(self) -> str:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since_unix_s))
        return f"process {self.pid} on {self.host} ({self.purpose}, since {since})"

    def is_dead(self) -> bool:
        """Whether it surely is no more: a process of this boot and this PID namespace that is not there now."""
        if self.boot_id != _boot_id() or self.pid_namespace != _pid_namespace():
            return False
        return _start_ticks(self.pid) != self.start_ticks


def this_process(*, exclusive: bool, purpose: str) -> Owner:
    return Owner(
        exclusive=exclusive,
        purpose=purpose,
        host=socket.gethostname(),
        pid=os.getpid(),
        boot_id=_boot_id(),
        pid_namespace=_pid_namespace(),
        start_ticks=_start_ticks(os.getpid()) or 0,
        since_unix_s=time.time(),
    )


def decode(data: bytes) -> Owner | None:
    """None for what is no lock object: it cannot be judged, so only its age counts."""
    try:
        fields = json.loads(data)
        owner = Owner(**fields)
        kinds = {"exclusive": bool, "purpose": str, "host": str, "pid": int, "boot_id": str, "pid_namespace": int}
        kinds["start_ticks"] = int
        right = all(isinstance(fields[name], kind) for name, kind in kinds.items())
        return owner if right and isinstance(fields["since_unix_s"], (int, float)) else None
    except (ValueError, TypeError):
        return None


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _pid_namespace() -> int:
    return Path("/proc/self/ns/pid").stat().st_ino


def _start_ticks(pid: int) -> int | None:
    """None when there is no such process, or only its remains."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # Field 22 (proc_pid_stat(5)); the name in parentheses may hold anything, so count from its end.
    fields = status.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else int(fields[19])
