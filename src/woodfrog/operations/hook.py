"""The restore hook: a command of the user's between CRIU's restore and the moment the target's gate opens.

It runs as the target's user, who could have run it as well, with what it may need to know in its environment. That it
fails, or takes too long, ends the restore. Must never outlive its time limit.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pwd
import signal
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from woodfrog.errors import RefusedError, TimeoutExceededError, WoodfrogError
from woodfrog.operations.notes import Notes

log = logging.getLogger(__name__)

DEFAULT_TIMEOUT_S = 30.0
PHASE = "hook"
SHOWN_BYTES = 4096  # of its output, the end


def run_hook(
    command: str, notes: Notes, operation: str, environment: Mapping[str, str], timeout_s: float = DEFAULT_TIMEOUT_S
) -> None:
    """`sh -c command`, to its end. WoodfrogError when its status is not 0, TimeoutExceededError."""
    with tempfile.TemporaryFile() as output:
        try:
            child = subprocess.Popen(
                ["/bin/sh", "-c", command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd="/",
                env=_environment(notes, operation, environment),
                start_new_session=True,
                **_as_user(notes),
            )
        except (OSError, subprocess.SubprocessError) as failure:
            raise WoodfrogError(f"the hook cannot be run: {failure}", phase=PHASE) from failure
        try:
            status: int | None = child.wait(timeout_s)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            # What it left running in the background goes as well: the target is about to run.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
            _reap_group(child.pid)
        output.seek(max(0, output.tell() - SHOWN_BYTES))
        said = output.read().decode(errors="replace")
    if said:
        log.info("the hook of %s said: %s", notes.name, said)
    if status == 0:
        return
    details = {"output": said, "command": command}
    if status is None:
        raise TimeoutExceededError(
            f"the hook did not end within {timeout_s:g} s and was killed",
            advice="give it more with --hook-timeout",
            phase=PHASE,
            details=details,
        )
    how = f"status {status}" if status > 0 else f"signal {-status}"
    last = next((line for line in reversed(said.splitlines()) if line.strip()), "it said nothing")
    raise WoodfrogError(f"the hook ended with {how}: {last}", advice="see daemon.log", phase=PHASE, details=details)


def _reap_group(group: int) -> None:
    """Orphans of the hook, which have been killed and are this process's children where it is a subreaper."""
    with contextlib.suppress(ChildProcessError):
        while True:
            os.waitid(os.P_PGID, group, os.WEXITED)


def _environment(notes: Notes, operation: str, given: Mapping[str, str]) -> dict[str, str]:
    own = {name: value for name, value in os.environ.items() if name in ("PATH", "LANG", "TMPDIR")}
    try:
        directory = str(Path(f"/proc/{notes.root_pid}/cwd").readlink())
    except OSError:
        directory = ""
    return {
        **own,
        **given,
        "WOODFROG_OPERATION": operation,
        "WOODFROG_PID": str(notes.pid),
        "WOODFROG_ROOT_PID": str(notes.root_pid),
        "WOODFROG_NAME": notes.name,
        "WOODFROG_IMAGE": notes.image,
        "WOODFROG_INSTANCE": notes.instance,
        "WOODFROG_DIRECTORY": directory,
        "WOODFROG_LOG": notes.log_path,
        "WOODFROG_PORTS": " ".join(f"{old}={new}" for old, new in sorted(notes.ports.items())),
    }


def _as_user(notes: Notes) -> dict[str, Any]:
    """For Popen: the target's user and groups, when they are not ours."""
    try:
        status = Path(f"/proc/{notes.root_pid}").stat()
    except FileNotFoundError:
        raise WoodfrogError("the restored target ended before its hook could run", phase=PHASE) from None
    if status.st_uid == os.geteuid():
        return {}
    if os.geteuid() != 0:
        raise RefusedError(f"the target belongs to user {status.st_uid}, and so does its hook", phase=PHASE)
    try:
        groups = os.getgrouplist(pwd.getpwuid(status.st_uid).pw_name, status.st_gid)
    except KeyError:
        groups = [status.st_gid]
    return {"user": status.st_uid, "group": status.st_gid, "extra_groups": groups}
