"""The client of daemon.sock, and how a daemon comes to be there.

`ensure_daemon` starts `woodfrog-keeper -- python -m woodfrog.daemon` in a session of its own when nobody answers. It
waits for the daemon's word that it is ready (the sd_notify protocol, which systemd speaks as well), never by polling.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import select
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from woodfrog import errors
from woodfrog.daemon import interrupt, runtime_dir, wire
from woodfrog.errors import NoDaemonError

# The keeper starts a dead daemon at once, and after repeated deaths with a pause that grows to about a second.
RESTART_TIMEOUT_S = 10.0
RESTART_INTERVAL_S = 0.05
START_TIMEOUT_S = 60.0  # importing and recovering take about a second; a loaded machine takes longer


class Client:
    """One connection to the daemon. Not shared between threads; close it, or use it as a context manager."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._next_id = 1

    @classmethod
    def connect(cls, directory: Path | None = None) -> Client:
        """A client of the daemon that runs; NoDaemonError when there is none."""
        path = runtime_dir.daemon_socket(directory or runtime_dir.path())
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.connect(str(path))
        except OSError as failure:
            connection.close()
            raise NoDaemonError(
                f"no node daemon answers at {path}: {failure.strerror or failure}",
                advice="start one with `woodfrog daemon start`",
            ) from failure
        return cls(connection)

    def call(
        self, verb: str, params: dict[str, Any] | None = None, on_event: Callable[[dict[str, Any]], None] | None = None
    ) -> Any:
        """Do `verb` and return its result; events go to `on_event` as they come. Raises the error that the daemon met.

        On a KeyboardInterrupt the daemon is asked to cancel the operation, and the interruption goes on once the daemon
        has answered, or at the next one. Where it can, it waits for the end of a message (daemon/interrupt.py).
        """
        identifier = self._next_id
        self._next_id += 1
        with interrupt.deferred() as interruption:
            try:
                try:
                    wire.send(self._connection, wire.Request(identifier, verb, params or {}))
                except OSError as failure:
                    raise _went_away(verb, failure.strerror or str(failure)) from failure
                return self._wait(identifier, verb, on_event, interruption)
            except KeyboardInterrupt:
                self._cancel(identifier, interruption)
                raise

    def _wait(
        self,
        identifier: int,
        verb: str,
        on_event: Callable[[dict[str, Any]], None] | None,
        interruption: interrupt.Interrupt,
    ) -> Any:
        while True:
            interruption.wait(self._connection)
            try:
                answer = wire.receive_answer(self._connection)
            except OSError as failure:
                raise _went_away(verb, failure.strerror or str(failure)) from failure
            if answer is None:
                raise _went_away(verb, "it closed the connection")
            if answer.id != identifier:
                continue  # of a request that was cancelled
            if answer.error is not None:
                raise errors.from_dict(answer.error)
            if answer.last:
                return answer.result
            if answer.event is not None and on_event is not None:
                on_event(answer.event)

    def _cancel(self, identifier: int, interruption: interrupt.Interrupt) -> None:
        with contextlib.suppress(OSError, errors.WoodfrogError):
            wire.send(self._connection, wire.Request(self._next_id, "cancel", {"request": identifier}))
            self._next_id += 1
            self._wait(identifier, "cancel", None, interruption)

    def close(self) -> None:
        self._connection.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _went_away(verb: str, why: str) -> NoDaemonError:
    return NoDaemonError(
        f"the node daemon went away during {verb}: {why}",
        advice="the keeper starts it again, and it brings back what it had in hand; look with `woodfrog ps`",
    )


def ensure_daemon(
    directory: Path | None = None, *, arguments: Sequence[str] = (), environment: Mapping[str, str] | None = None
) -> Client:
    """A client of the daemon of `directory`, started if there is none. `arguments` and `environment` (None: ours) go to
    a daemon that is started."""
    chosen = runtime_dir.ensure(directory)
    with contextlib.suppress(NoDaemonError):
        return Client.connect(chosen)
    with _start_lock(chosen):
        with contextlib.suppress(NoDaemonError):  # somebody else was quicker
            return Client.connect(chosen)
        if _keeper_lives(chosen):
            # Its daemon died a moment ago and is being started again, or was told to end while something is held.
            if (client := _await_restart(chosen)) is not None:
                return client
            _start(chosen, arguments, environment, with_keeper=False)
        else:
            _start(chosen, arguments, environment, with_keeper=True)
        return Client.connect(chosen)


@contextlib.contextmanager
def _start_lock(directory: Path) -> Iterator[None]:
    fd = os.open(directory / "start.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _keeper_lives(directory: Path) -> bool:
    """Whether a keeper holds the lock of this directory."""
    try:
        fd = os.open(directory / "keeper.lock", os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def _await_restart(directory: Path) -> Client | None:
    """The daemon that the keeper starts again; None when it does not."""
    deadline = time.monotonic() + RESTART_TIMEOUT_S
    while time.monotonic() < deadline:
        with contextlib.suppress(NoDaemonError):
            return Client.connect(directory)
        time.sleep(RESTART_INTERVAL_S)  # nobody tells us: the keeper knows no clients but its daemon
    return None


def _start(directory: Path, arguments: Sequence[str], base: Mapping[str, str] | None, *, with_keeper: bool) -> None:
    from woodfrog._native import paths

    notify_path = directory / f"notify-{os.getpid()}.sock"
    environment = _without_interposer(dict(os.environ if base is None else base), str(paths.interposer()))
    environment[runtime_dir.ENVIRONMENT] = str(directory)
    environment["NOTIFY_SOCKET"] = str(notify_path)
    command = [sys.executable, "-m", "woodfrog.daemon", *arguments]
    if with_keeper:
        command = [str(paths.keeper()), "--socket", str(runtime_dir.keeper_socket(directory)), "--", *command]
    start_log = directory / "start.log"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify:
        notify_path.unlink(missing_ok=True)
        notify.bind(str(notify_path))
        try:
            log_fd = os.open(start_log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                keeper_fd = _start_detached(command, environment, log_fd)
            finally:
                os.close(log_fd)
            try:
                _await_ready(notify, keeper_fd, start_log)
            finally:
                os.close(keeper_fd)
        finally:
            notify_path.unlink(missing_ok=True)


def _without_interposer(environment: dict[str, str], interposer: str) -> dict[str, str]:
    """The daemon uses the driver as it is, also when it is started from inside a target."""
    kept = [part for part in re.split(r"[ :]+", environment.pop("LD_PRELOAD", "")) if part and part != interposer]
    if kept:
        environment["LD_PRELOAD"] = ":".join(kept)
    return environment


def _start_detached(command: list[str], environment: dict[str, str], log_fd: int) -> int:
    """Start the keeper as nobody's child; a pidfd of it, owned by the caller.

    A target that starts the daemon (`checkpoint_self`, or a script around woodfrog) must not have it in its own process
    tree: so a shell starts it and ends.
    """
    try:
        shell = subprocess.run(
            ["/bin/sh", "-c", '"$@" >&2 & echo "$!"', "sh", *command],
            env=environment,
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log_fd,
            start_new_session=True,
            check=True,
        )
        return os.pidfd_open(int(shell.stdout))
    except (OSError, ValueError, subprocess.CalledProcessError) as failure:
        raise NoDaemonError(f"the keeper cannot be started: {failure}", advice="is woodfrog built?") from failure


def _await_ready(notify: socket.socket, keeper_fd: int, start_log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    poll = select.poll()
    poll.register(notify, select.POLLIN)
    poll.register(keeper_fd, select.POLLIN)
    while (left_s := deadline - time.monotonic()) > 0:
        ready = {fd for fd, _ in poll.poll(left_s * 1000)}
        if notify.fileno() in ready:
            message = notify.recv(4096)
            if b"READY=1" in message.split(b"\n"):
                return
            failed = [line for line in message.split(b"\n") if line.startswith(b"STATUS=failed: ")]
            if failed:
                reason = failed[0].removeprefix(b"STATUS=failed: ").decode(errors="replace")
                raise NoDaemonError(f"the node daemon did not start: {reason}", advice=f"see {start_log}")
        elif keeper_fd in ready:
            raise NoDaemonError(f"the keeper ended: {_last_line(start_log)}", advice=f"see {start_log}")
    raise NoDaemonError(f"the node daemon was not ready within {START_TIMEOUT_S:g} s", advice=f"see {start_log}")


def _last_line(path: Path) -> str:
    try:
        lines = path.read_text(errors="replace").strip().splitlines()
    except OSError as failure:
        return str(failure)
    return lines[-1] if lines else "it said nothing"
