"""What the tests of the compiled parts share: a keeper of their own, and waiting for what another process does."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "support"))

import file_ways

from woodfrog._native import paths
from woodfrog.daemon.keeper_client import KeeperClient

DEADLINE_S = 30.0


@pytest.fixture(params=file_ways.WAYS)
def file_way(request: pytest.FixtureRequest) -> Iterator[str]:
    """Packs are read and written by io_uring, and again by threads."""
    with file_ways.chosen(request.param) as way:
        yield way


class Keeper:
    """The real keeper, in a directory of its own, supervising `argv` (its standard output is a pipe to the test)."""

    def __init__(
        self, directory: Path, argv: Sequence[str], options: Sequence[str], program: Sequence[str] = ()
    ) -> None:
        self.directory = directory
        self.socket = directory / "keeper.sock"
        self.seen: list[int] = []  # pids that the supervised program has said
        self.process = subprocess.Popen(
            [*(program or [str(paths.keeper())]), "--socket", str(self.socket), *options, "--", *argv],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
        )

    def line(self) -> str:
        """The next line that the supervised program prints."""
        assert self.process.stdout
        readable, _, _ = select.select([self.process.stdout], [], [], DEADLINE_S)
        assert readable, "the supervised program said nothing"
        said = os.read(self.process.stdout.fileno(), 1000).decode().strip()
        if said.isdigit():
            self.seen.append(int(said))
        return said

    def client(self) -> KeeperClient:
        return KeeperClient(self.socket)

    def fd_count(self) -> int:
        return len(list(Path(f"/proc/{self.process.pid}/fd").iterdir()))

    def stderr(self) -> str:
        """Everything it said; waits for its end."""
        assert self.process.stderr
        return self.process.stderr.read().decode()

    def end(self) -> None:
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        if self.process.poll() is None:
            pids = [int(pid) for pid in children.read_text().split()]
        else:  # it left its daemon behind, as it does after `stop`
            pids = [pid for pid in self.seen if _is_shell(pid)]
        self.process.kill()
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.communicate()


def _is_shell(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"/bin/sh")
    except FileNotFoundError:
        return False


StartKeeper = Callable[..., Keeper]

# Says its pid when it starts and when it is asked to end, which it then does.
DAEMON = ["/bin/sh", "-c", "trap 'echo terminated; exit 0' TERM; echo $$; while :; do read x <&9; done 9<>$0", "FIFO"]


@pytest.fixture
def start_keeper() -> Iterator[StartKeeper]:
    """Starts keepers; with no argv, one that supervises a program that only waits, and returns when it serves."""
    keepers: list[Keeper] = []
    with tempfile.TemporaryDirectory(prefix="wf") as base:

        def start(
            *argv: str, options: Sequence[str] = (), directory: str = "run", program: Sequence[str] = ()
        ) -> Keeper:
            fifo = Path(base) / "fifo"
            if not fifo.exists():
                os.mkfifo(fifo)
            waiting = [*DAEMON[:-1], str(fifo)]
            keepers.append(Keeper(Path(base) / directory, argv or waiting, options, program))
            if not argv:
                keepers[-1].line()
            return keepers[-1]

        yield start
        for keeper in keepers:
            keeper.end()


@pytest.fixture
def keeper(start_keeper: StartKeeper) -> Keeper:
    return start_keeper()


def eventually(condition: Callable[[], bool], what: str) -> None:
    """Waits for what another process does in its own time, and fails if it does not."""
    end = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end, f"did not come about: {what}"
        time.sleep(0.01)


def memfd(content: bytes) -> int:
    """A descriptor of its own for `content`; the caller closes it."""
    fd = os.memfd_create("test")
    os.write(fd, content)
    return fd


def content(fd: int) -> bytes:
    """What is behind `fd`, which is closed."""
    try:
        return os.pread(fd, 1 << 20, 0)
    finally:
        os.close(fd)
