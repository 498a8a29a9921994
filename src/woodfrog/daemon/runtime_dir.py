"""The runtime directory: where the sockets, the log and the locks of one daemon and its keeper are.

It belongs to one user and admits nobody else; a directory that others could have prepared is refused.
"""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path

from woodfrog.errors import RefusedError

ENVIRONMENT = "WOODFROG_RUNTIME_DIR"


def path() -> Path:
    """Where the runtime directory is for this process's user and environment; it need not be there."""
    if chosen := os.environ.get(ENVIRONMENT):
        return Path(chosen).absolute()
    if session := os.environ.get("XDG_RUNTIME_DIR"):
        return Path(session) / "woodfrog"
    if os.geteuid() == 0:
        return Path("/run/woodfrog")
    return Path(f"/tmp/woodfrog-{os.geteuid()}")


def ensure(directory: Path | None = None) -> Path:
    """The runtime directory, made with mode 0700 if it is not there. RefusedError when it is not safely ours."""
    chosen = directory or path()
    chosen.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):  # made before, by us or by somebody else: looked at next
        chosen.mkdir(mode=0o700)
    status = chosen.lstat()
    if not stat.S_ISDIR(status.st_mode):
        raise RefusedError(f"{chosen} is not a directory", advice=f"set {ENVIRONMENT} to another path")
    if status.st_uid != os.geteuid():
        raise RefusedError(
            f"{chosen} belongs to user {status.st_uid}, not to you", advice=f"set {ENVIRONMENT} to a path of your own"
        )
    if status.st_mode & 0o077:
        raise RefusedError(f"{chosen} is open to other users", advice=f"run: chmod 700 {chosen}")
    if len(os.fsencode(chosen)) > 90:  # sun_path holds 108 bytes, and socket names follow
        raise RefusedError(f"{chosen} is too long for a unix socket", advice=f"set {ENVIRONMENT} to a shorter path")
    return chosen


def daemon_socket(directory: Path) -> Path:
    return directory / "daemon.sock"


def agent_socket(directory: Path) -> Path:
    return directory / "agent.sock"


def keeper_socket(directory: Path) -> Path:
    return directory / "keeper.sock"
