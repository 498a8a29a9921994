"""Starting a target so that it can be checkpointed: own session, no terminal, output in a log file, interposer loaded.

CRIU cannot dump a terminal that it does not own, hence the session and the log file. It must never change the argument
vector, and nothing of the environment but what is said here.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
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
    argv: Sequence[str],
    *,
    name: str,
    log: Path,
    env: Mapping[str, str],
    cwd: str | None,
    io_uring: bool | None = None,
) -> subprocess.Popen[bytes]:
    """Start the target. The caller owns the process.

    `io_uring`: whether the kernel has one for it. None: not where that costs the target nothing, that is where the
    caller has CAP_SYS_ADMIN; else False makes it and all of its children unable to gain privileges (no_new_privs).
    """
    check_name(name)
    descriptor = open_log(log)

    def begin(command: Sequence[str], pass_fds: tuple[int, ...] = ()) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=descriptor,
            stderr=descriptor,
            env=dict(env),
            cwd=cwd,
            start_new_session=True,
            pass_fds=pass_fds,
        )

    try:
        return begin(argv) if io_uring else _without_io_uring(begin, argv, where_free=io_uring is None)
    except OSError as error:
        raise _not_started(argv[0], cwd, error) from error
    finally:
        os.close(descriptor)


def _without_io_uring(
    begin: Callable[[Sequence[str], tuple[int, ...]], subprocess.Popen[bytes]], argv: Sequence[str], *, where_free: bool
) -> subprocess.Popen[bytes]:
    """The process, once the program runs in it; OSError when it cannot be run, as of Popen."""
    read_end, write_end = os.pipe()
    try:
        options = ["--where-free"] if where_free else []
        command = [str(_no_io_uring()), *options, "--report", str(write_end), *argv]
        try:
            process = begin(command, (write_end,))
        finally:
            os.close(write_end)
        said = os.read(read_end, 4)  # ends when the program runs: the exec closes the other end
    finally:
        os.close(read_end)
    if not said:
        return process
    process.wait()
    reason = int.from_bytes(said, sys.byteorder, signed=True)
    if reason > 0:
        raise OSError(reason, os.strerror(reason))
    raise RefusedError(
        f"io_uring cannot be taken away from the target: there are no seccomp filters here ({os.strerror(-reason)})",
        advice="leave out --no-io-uring",
    )


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


def _no_io_uring() -> Path:
    from woodfrog._native import paths

    found = paths.no_io_uring()
    if not found.is_file():
        raise RefusedError(f"the program {found} is missing", advice="run `make build`")
    return found


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
