"""A node daemon as small as it can be, and targets that connect to it.

The daemon's end of the protocol is the product's own (woodfrog.target.link); what is left out is everything behind it.
"""

from __future__ import annotations

import itertools
import os
import select
import signal
import socket
import subprocess
from pathlib import Path
from types import TracebackType

import interposer_support as support

from woodfrog.target.link import AgentLink

DEADLINE_S = 60.0  # far beyond what anything here takes, on a machine that is busy with other things
_machines = itertools.count()
WAKE_SIGNAL = signal.SIGRTMAX - 3


class Listener:
    """agent.sock in a runtime directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.bind(str(directory / "agent.sock"))
        self.socket.listen(8)
        self.socket.settimeout(DEADLINE_S)

    def accept(self) -> AgentLink:
        """The next agent that connects."""
        connection, _ = self.socket.accept()
        return AgentLink(connection, hello_timeout_s=DEADLINE_S)

    def nobody_connects(self, within_s: float) -> bool:
        readable, _, _ = select.select([self.socket], [], [], within_s)
        return not readable

    def close(self) -> None:
        self.socket.close()
        (self.directory / "agent.sock").unlink(missing_ok=True)


RT_SIGTIMEDWAIT = {"x86_64": 128, "aarch64": 137}[os.uname().machine]  # its number as a system call


class Target:
    """A process of programs/target.cpp."""

    def __init__(self, program: Path, runtime_directory: Path, *wrapper: str, **settings: str) -> None:
        self.process = subprocess.Popen(
            [*wrapper, program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=support.environment(
                {
                    "WOODFROG_RUNTIME_DIR": str(runtime_directory),
                    # A machine of its own: simulated GPUs are shared by the processes of one machine, as real ones are.
                    "WOODFROG_SIMGPU_MACHINE": f"interpose-{os.getpid()}-{next(_machines)}",
                }
                | settings
            ),
        )
        self._pending = b""
        self.pid = int(self.answer().split()[1])

    def send(self, command: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(command.encode() + b"\n")
        self.process.stdin.flush()

    def answer(self, within_s: float = DEADLINE_S) -> str:
        """The next line it prints."""
        assert self.process.stdout is not None
        while b"\n" not in self._pending:
            readable, _, _ = select.select([self.process.stdout], [], [], within_s)
            assert readable, f"the target said nothing for {within_s} s"
            data = os.read(self.process.stdout.fileno(), 65536)
            assert data, f"the target ended with {self.process.wait()}: {self._pending!r}"
            self._pending += data
        line, _, self._pending = self._pending.partition(b"\n")
        return line.decode()

    def silent(self, for_s: float) -> bool:
        """Whether it prints nothing for that long."""
        assert self.process.stdout is not None
        return not self._pending and not select.select([self.process.stdout], [], [], for_s)[0]

    def ask(self, command: str) -> str:
        self.send(command)
        return self.answer()

    def _agent(self) -> Path:
        """The agent's folder in /proc."""
        tasks = Path(f"/proc/{self.pid}/task").iterdir()
        [agent] = [task for task in tasks if (task / "comm").read_text().strip() == "woodfrog-agent"]
        return agent

    def agent_sleeps(self) -> bool:
        """Whether its agent waits to be woken (in rt_sigtimedwait), so has looked for a daemon already."""
        return (self._agent() / "syscall").read_text().split()[0] == str(RT_SIGTIMEDWAIT)

    def wake(self) -> None:
        """What the daemon does to an agent that sleeps."""
        result = _tgkill(self.pid, int(self._agent().name), WAKE_SIGNAL)
        assert result == 0

    def descriptors(self) -> dict[int, str]:
        """Its open files."""
        found = {}
        for entry in Path(f"/proc/{self.pid}/fd").iterdir():
            try:
                found[int(entry.name)] = str(entry.readlink())
            except FileNotFoundError:
                continue
        return found

    def close(self) -> int:
        """Ends it in the ordinary way."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        return self.process.wait(timeout=DEADLINE_S)

    def __enter__(self) -> Target:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            assert self.close() == 0
        else:
            self.process.kill()
            self.process.wait()


def _tgkill(pid: int, tid: int, number: int) -> int:
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    return int(libc.tgkill(pid, tid, int(number)))
