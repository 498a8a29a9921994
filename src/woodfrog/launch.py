"""Starting a target so that it can be checkpointed: own session, no terminal, output in a log file, interposer loaded.

CRIU cannot dump a terminal that it does not own, hence the session and the log file. It must never change the argument
vector, and nothing of the environment but what is said here.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from woodfrog.daemon import runtime_dir
from woodfrog.errors import NoSpaceError, NotFoundError, RefusedError, UsageError, WoodfrogError
from woodfrog.store.names import check_name

NAME_VARIABLE = "WOODFROG_NAME"
TRACK_VARIABLE = "WOODFROG_TRACK"


def default_name(argv: Sequence[str], taken: Iterable[str]) -> str:
    """A name out of the command line: the script's or program's, with -2, -3 … when a running target has it."""
    program = Path(argv[0]).name
    if re.fullmatch(r"python[0-9.]*", program) and len(argv) > 1:
        script = argv[2] if argv[1] == "-m" and len(argv) > 2 else argv[1]
        program = Path(script).stem if not script.startswith("-") else program
    base = re.sub(r"[^A-Za-z0-9._-]", "-", program).lstrip("._-")[:48] or "target"
    used = set(taken)
    name, count = base, 1
    while name in used:
        count += 1
        name = f"{base}-{count}"
    return name


def target_environment(
    name: str, directory: Path, base: Mapping[str, str], interposer: Path, *, track: bool = False
) -> dict[str, str]:
    """`base` with the interposer in front of LD_PRELOAD, the target's name, and the daemon's directory; with `track`
    what makes the interposer follow launches."""
    library = str(interposer)
    if re.search(r"[ :]", library):
        raise RefusedError(
            f"{library} has a space or colon in its path, which LD_PRELOAD cannot hold",
            advice="install woodfrog in another place",
        )
    environment = dict(base)
    others = [part for part in re.split(r"[ :]+", environment.get("LD_PRELOAD", "")) if part and part != library]
    environment["LD_PRELOAD"] = ":".join([library, *others])
    environment[NAME_VARIABLE] = name
    environment[runtime_dir.ENVIRONMENT] = str(directory)
    if track:
        environment[TRACK_VARIABLE] = "1"
    return environment


def open_log(path: Path) -> int:
    """The log, opened for appending (made 0600); the caller owns the descriptor."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOCTTY, 0o600)
    except OSError as error:
        reason = f"the log file {path} cannot be opened: {error.strerror}"
        raise UsageError(reason, advice="choose one with --log") from error


def start(
    argv: Sequence[str], *, name: str, log: Path, env: Mapping[str, str], cwd: str | None
) -> subprocess.Popen[bytes]:
    """Start the target. The caller owns the process."""
    check_name(name)
    descriptor = open_log(log)
    try:
        return subprocess.Popen(
            list(argv),
            stdin=subprocess.DEVNULL,
            stdout=descriptor,
            stderr=descriptor,
            env=dict(env),
            cwd=cwd,
            start_new_session=True,
        )
    except OSError as error:
        raise _not_started(argv[0], cwd, error) from error
    finally:
        os.close(descriptor)


def interposer() -> Path:
    """The interposer's path; RefusedError when woodfrog is not built."""
    try:
        from woodfrog._native import paths

        found = paths.interposer()
    except ImportError as error:
        raise RefusedError(f"woodfrog's compiled parts are missing ({error})", advice="run `make build`") from error
    if not found.is_file():
        raise RefusedError(f"the interposer {found} is missing", advice="run `make build`")
    return found


def without_io_uring(argv: Sequence[str], cwd: str | None = None) -> list[str]:
    """The command line that runs `argv`, in `cwd`, with a kernel that has no io_uring. NotFoundError when there is no
    such program: what runs it could only say so in its log."""
    if shutil.which(str(Path(cwd or "", argv[0])) if "/" in argv[0] else argv[0]) is None:
        raise _not_started(argv[0], cwd, FileNotFoundError())
    from woodfrog._native import paths

    return [str(paths.no_io_uring()), *argv]


def _not_started(program: str, cwd: str | None, error: OSError) -> WoodfrogError:
    if isinstance(error, FileNotFoundError):
        if cwd is not None and not Path(cwd).is_dir():
            return NotFoundError(f"the working directory {cwd} is not there")
        return NotFoundError(f"there is no program {program}", advice="give its path, or put it on PATH")
    if isinstance(error, PermissionError):
        return UsageError(f"{program} may not be executed", advice="chmod +x it, or run it through its interpreter")
    if isinstance(error, BlockingIOError):
        return NoSpaceError(f"{program} cannot be started: no process is left ({error.strerror})")
    return UsageError(f"{program} cannot be started: {error.strerror}")
