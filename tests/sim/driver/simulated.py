"""Simulated machines, processes on them, and a process that makes checkpoint calls: what the tests here work with."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent

# CUprocessState and CUresult as numbers.
RUNNING, LOCKED, CHECKPOINTED, FAILED = range(4)
SUCCESS, INVALID_VALUE, OUT_OF_MEMORY, NOT_INITIALIZED = 0, 1, 2, 3
ILLEGAL_STATE, NOT_READY, NOT_SUPPORTED = 401, 600, 801


def library_directory() -> Path:
    """The folder with `libcuda.so.1`: of the installed package, or the one that SIMGPU_DIR names."""
    if named := os.environ.get("SIMGPU_DIR"):
        return Path(named).resolve()
    from woodfrog._native import paths

    return paths.simgpu_dir()


@dataclass(frozen=True)
class Machine:
    """A simulated machine: the environment that makes a process see it."""

    library_directory: Path
    environment: Mapping[str, str]

    def with_environment(self, **more: str) -> Machine:
        return Machine(self.library_directory, {**self.environment, **more})

    def popen(self, command: Sequence[str | Path], **options: Any) -> subprocess.Popen[str]:
        """Start a program whose standard streams are pipes, unless `options` say otherwise."""
        streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        arguments: dict[str, Any] = {"env": dict(self.environment), "text": True, **streams, **options}
        process: subprocess.Popen[str] = subprocess.Popen([str(part) for part in command], **arguments)
        return process

    def run(self, command: Sequence[str | Path], timeout_s: float = 60) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(part) for part in command],
            env=dict(self.environment),
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )

    def python(self, code: str, *arguments: str, timeout_s: float = 60) -> subprocess.CompletedProcess[str]:
        """Run Python code that may `from driver import …` the helpers of the folder inside/."""
        return self.run([sys.executable, "-c", code, *arguments], timeout_s)


def cuda_include() -> list[str]:
    """The -I option for cuda.h: of the headers' wheel beside this Python, else of an installed toolkit."""
    candidates = [Path(entry) / "nvidia/cu13/include" for entry in sys.path]
    candidates += [Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "include"]
    for candidate in candidates:
        if (candidate / "cuda.h").exists():
            return [f"-I{candidate}"]
    raise AssertionError("cuda.h was not found")


class Controller:
    """A process apart that makes the calls; see inside/control.py."""

    def __init__(self, machine: Machine) -> None:
        script = Path(machine.environment["PYTHONPATH"]) / "control.py"
        self.process = machine.popen([sys.executable, script])

    def ask(self, action: str, pid: int, *arguments: object) -> list[int]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(action, pid, *arguments, file=self.process.stdin, flush=True)
        return [int(word) for word in self.process.stdout.readline().split()]

    def __call__(self, action: str, pid: int, *arguments: object) -> int:
        return self.ask(action, pid, *arguments)[0]

    def state(self, pid: int) -> int:
        result, state = self.ask("state", pid)
        assert result == SUCCESS
        return state

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(30)


class Target:
    """Python code in a process of its own. It must print a line when it is ready; lines sent to it wake its input()."""

    def __init__(self, machine: Machine, code: str) -> None:
        self.process = machine.popen([sys.executable, "-c", "from driver import *\nstart(0)\n" + code])
        self.pid = self.process.pid
        self.first_line = self.line()

    def line(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.process.stderr.read() if self.process.stderr else ""
        return line.strip()

    def tell(self) -> None:
        assert self.process.stdin is not None
        print(file=self.process.stdin, flush=True)

    def go_on(self) -> str:
        self.tell()
        return self.line()

    def finish(self) -> None:
        out, err = self.process.communicate("\n", timeout=60)
        assert self.process.returncode == 0, out + err

    def device_files(self) -> int:
        """Open descriptors and mappings of device memory."""
        links = [str(entry.readlink()) for entry in Path(f"/proc/{self.pid}/fd").iterdir()]
        maps = Path(f"/proc/{self.pid}/maps").read_text()
        return sum("memfd:simgpu" in link for link in links) + maps.count("memfd:simgpu")


def free_mib(machine: Machine) -> int:
    done = machine.python("from driver import *; start(0); print(free_bytes() >> 20)")
    assert done.returncode == 0, done.stderr
    return int(done.stdout)
