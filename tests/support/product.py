"""The whole product on the simulated GPU, for tests: a daemon of its own in a private directory, targets, their logs.

Waiting is always for something that is seen (a line in a log, an answer, the end of a process) with a deadline, never
for time to pass. Everything that is started here is ended by `Product.close`, also after a failure.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from damage import damage_chunk
from once import once, session_folder

from woodfrog import launch
from woodfrog._native import paths
from woodfrog.daemon.client import Client, ensure_daemon
from woodfrog.errors import NoDaemonError, WoodfrogError
from woodfrog.image.chunks import zero_digest
from woodfrog.image.repository import ImageRepository

ROOT = Path(__file__).resolve().parents[2]
TARGETS = ROOT / "tests" / "sim" / "targets"
DEADLINE_S = 60.0  # a machine that runs other tests beside
_NVCC = ("nvcc", "/usr/local/cuda/bin/nvcc")


class Stepper:
    """A running stepper target (tests/sim/targets/stepper.cpp), started by us or restored."""

    def __init__(self, pid: int, log: Path, process: subprocess.Popen[bytes] | None = None) -> None:
        self.pid = pid
        self.log = log
        self.process = process

    def lines(self) -> list[str]:
        """Whole lines of the log."""
        text = self.log.read_text(errors="replace")
        return text[: text.rfind("\n") + 1].splitlines()

    def steps(self) -> int:
        """The newest step that was reported."""
        numbers = [int(line.split()[1]) for line in self.lines() if line.startswith("step ")]
        return numbers[-1] if numbers else 0

    def wait_for(self, found: Callable[[list[str]], bool], what: str, deadline_s: float = DEADLINE_S) -> None:
        """Wait until the log's lines satisfy `found`."""
        with _changes_of(self.log) as changed:
            deadline = time.monotonic() + deadline_s
            while not found(self.lines()):
                left_s = deadline - time.monotonic()
                assert left_s > 0, f"no {what} within {deadline_s:g} s; the log ends: {self.lines()[-5:]}"
                changed(min(left_s, 1.0))

    def wait_steps(self, more: int = 3) -> int:
        """Wait until it has reported `more` further steps; the newest then."""
        wanted = self.steps() + more
        self.wait_for(lambda _: self.steps() >= wanted, f"step {wanted}")
        return self.steps()

    @property
    def alive(self) -> bool:
        if self.process is not None and self.process.poll() is not None:
            return False
        try:
            return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
        except (FileNotFoundError, ProcessLookupError):
            return False

    def finish(self) -> str:
        """Ask it to verify everything and end; its last line, which must be free of errors."""
        os.kill(self.pid, signal.SIGTERM)
        self.wait_for(lambda lines: any(line.startswith("done ") for line in lines), "last line")
        last = [line for line in self.lines() if line.startswith("done ")][-1]
        assert last.endswith("errors 0"), last
        wrong = [line for line in self.lines() if line.startswith("step ") and not line.endswith("errors 0")]
        assert not wrong, wrong[:3]
        if self.process is not None:
            assert self.process.wait(DEADLINE_S) == 0
        return last

    def check_runs_right(self) -> None:
        """It makes progress, and everything that it checks is right."""
        self.wait_steps(2)
        self.finish()


@dataclass
class Product:
    """One private runtime directory, store and daemon. `environment` goes to daemon and targets."""

    root: Path
    build: Path
    environment: dict[str, str] = field(default_factory=dict)
    daemon_arguments: list[str] = field(default_factory=lambda: ["--arena", "64M"])
    _targets: list[Stepper] = field(default_factory=list)
    _count: int = 0
    _closed: bool = False

    def __post_init__(self) -> None:
        self.runtime = self.root / "run"
        self.store_path = self.root / "images"
        self.runtime.mkdir(mode=0o700)
        self.environment = {
            "LD_LIBRARY_PATH": str(paths.simgpu_dir()),
            "WOODFROG_RUNTIME_DIR": str(self.runtime),
            "WOODFROG_STORE": str(self.store_path),
            "WOODFROG_SIMGPU_MACHINE": self.root.name,  # GPUs of its own, whatever else runs here
            **self.environment,
        }

    # ── daemon ──────────────────────────────────────────────────────────────────────────────────────────────────

    def client(self) -> Client:
        """A connection to the daemon, which is started with the private environment if need be."""
        environment = {**os.environ, **self.environment}
        return ensure_daemon(self.runtime, arguments=self.daemon_arguments, environment=environment)

    def call(self, verb: str, **params: Any) -> Any:
        """One verb over a connection of its own."""
        with self.client() as client:
            return client.call(verb, params)

    def daemon_pid(self) -> int:
        return int(self.call("ping")["pid"])

    def kill_daemon(self) -> None:
        """SIGKILL to the daemon, and wait for the one that the keeper starts instead."""
        old = self.daemon_pid()
        os.kill(old, signal.SIGKILL)
        self.wait_for_new_daemon(old)

    def kill_whatever_daemon(self) -> None:
        """SIGKILL to the daemon as it is now, whether it answers already or not; nothing when there is none."""
        for pid in _processes_of(self.runtime):
            with contextlib.suppress(OSError):
                if b"woodfrog.daemon" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[:4]:
                    os.kill(pid, signal.SIGKILL)

    def wait_for_new_daemon(self, old: int) -> int:
        """Wait until a daemon other than `old` has recovered what there was; its pid."""
        with _changes_of(self.runtime) as changed:
            deadline = time.monotonic() + DEADLINE_S
            while True:
                with contextlib.suppress(NoDaemonError), Client.connect(self.runtime) as client:
                    pid = int(client.call("ping")["pid"])
                    if pid != old:
                        client.call("ps")  # answers once it has recovered
                        return pid
                left_s = deadline - time.monotonic()
                assert left_s > 0, f"no new daemon within {DEADLINE_S:g} s: {self.daemon_log()[-2000:]}"
                changed(min(left_s, 1.0))

    def daemon_log(self) -> str:
        return "".join(
            path.read_text(errors="replace")
            for path in (self.runtime / "start.log", self.runtime / "daemon.log")
            if path.exists()
        )

    # ── targets ─────────────────────────────────────────────────────────────────────────────────────────────────

    def run(self, *arguments: str, name: str = "", managed: bool = True) -> Stepper:
        """Start a stepper and wait for its first steps."""
        self._count += 1
        name = name or f"stepper-{self._count}"
        log = self.root / f"{name}.log"
        environment = {**os.environ, **self.environment}
        if managed:
            environment = launch.target_environment(name, self.runtime, environment, paths.interposer())
        command = [str(self.build / "stepper"), "--ptx", str(self.build / "stepper.ptx"), *arguments]
        process = launch.start(command, name=name, log=log, env=environment, cwd=str(self.root))
        stepper = Stepper(process.pid, log, process)
        self._targets.append(stepper)
        stepper.wait_for(lambda lines: any(line.startswith("step ") for line in lines), "first step")
        return stepper

    def run_script(self, script: str) -> Stepper:
        """Start `bash -c script` as a target, with the stepper's command as its arguments."""
        self._count += 1
        name = f"script-{self._count}"
        log = self.root / f"{name}.log"
        environment = launch.target_environment(
            name, self.runtime, {**os.environ, **self.environment}, paths.interposer()
        )
        stepper_command = [str(self.build / "stepper"), "--ptx", str(self.build / "stepper.ptx")]
        command = ["bash", "-c", script, "script", *stepper_command]
        process = launch.start(command, name=name, log=log, env=environment, cwd=str(self.root))
        stepper = Stepper(process.pid, log, process)
        self._targets.append(stepper)
        stepper.wait_for(lambda lines: any(line.startswith("step ") for line in lines), "first step")
        return stepper

    def scribbler(self) -> Any:
        """Start a scribbler (tests/support/scribbler.py) and wait until it takes orders."""
        from scribbler import Scribbler

        return Scribbler(*self._ordered("scribbler", str(self.build / "stepper.ptx")))

    def launcher(self, *, track: bool = True) -> Any:
        """Start a launcher (tests/support/launcher.py) and wait until it takes orders."""
        from launcher import Launcher

        return Launcher(*self._ordered("launcher", track=track))

    def sharer(self, workers: int, *, track: bool = False, io_uring: bool | None = None) -> Any:
        """Start a sharer (tests/support/sharer.py) with so many processes that use the GPU."""
        from sharer import Sharer

        return Sharer(*self._ordered("sharer", str(workers), track=track, io_uring=io_uring), workers)

    def collective(self, ranks: int, *options: str) -> Stepper:
        """Start ranks that meet in a collective at every step (tests/sim/targets/collective.cpp)."""
        self._count += 1
        name = f"collective-{self._count}"
        log = self.root / f"{name}.log"
        environment = launch.target_environment(
            name, self.runtime, {**os.environ, **self.environment}, paths.interposer()
        )
        command = [str(self.build / "collective"), str(self.build / "collective.ptx"), str(ranks), *options]
        process = launch.start(command, name=name, log=log, env=environment, cwd=str(self.root))
        stepper = Stepper(process.pid, log, process)
        self._targets.append(stepper)
        stepper.wait_for(lambda lines: any(line.startswith("step ") for line in lines), "first step")
        return stepper

    def elastic(self, ranks: int, *, io_uring: bool | None = None) -> Stepper:
        """Start a launcher with its ranks (tests/sim/targets/elastic.py); its log has what all of them say."""
        self._count += 1
        name = f"elastic-{self._count}"
        log = self.root / f"{name}.log"
        environment = launch.target_environment(
            name, self.runtime, {**os.environ, **self.environment}, paths.interposer()
        )
        command = [sys.executable, str(TARGETS / "elastic.py"), str(ranks)]
        place = str(self.root)
        process = launch.start(command, name=name, log=log, env=environment, cwd=place, io_uring=io_uring)
        stepper = Stepper(process.pid, log, process)
        self._targets.append(stepper)
        stepper.wait_for(lambda lines: any(line.startswith("step ") for line in lines), "first step")
        return stepper

    def _ordered(
        self, program: str, *arguments: str, track: bool = False, io_uring: bool | None = None
    ) -> tuple[Stepper, Path]:
        """A target that takes orders, and the file for them."""
        self._count += 1
        name = f"{program}-{self._count}"
        log, orders = self.root / f"{name}.log", self.root / f"{name}.orders"
        orders.touch()
        environment = launch.target_environment(
            name, self.runtime, {**os.environ, **self.environment}, paths.interposer(), track=track
        )
        command = [str(self.build / program), str(orders), *arguments]
        place = str(self.root)
        process = launch.start(command, name=name, log=log, env=environment, cwd=place, io_uring=io_uring)
        stepper = Stepper(process.pid, log, process)
        self._targets.append(stepper)
        stepper.wait_for(lambda lines: "0 ready" in lines, f"ready {program}")
        return stepper, orders

    def wait_for_catalogues(self, count: int) -> None:
        """Wait until the daemon has made so many, and is not at work on another."""
        folder = self.runtime / "kernels"
        with _changes_of(folder) as changed:
            deadline = time.monotonic() + 3 * DEADLINE_S  # each is compiled
            while len(list(folder.glob("*.kernels"))) < count or list(folder.glob("*.image")):
                left_s = deadline - time.monotonic()
                assert left_s > 0, f"no {count} catalogues: {sorted(path.name for path in folder.iterdir())}"
                changed(min(left_s, 1.0))

    def end(self, stepper: Stepper) -> None:
        """Kill the whole tree, and wait until its numbers are free again."""
        pidfd = os.pidfd_open(stepper.pid)
        try:
            _kill_session(stepper.pid)
            poll = select.poll()
            poll.register(pidfd, 0)  # POLLHUP: reaped
            assert poll.poll(DEADLINE_S * 1000)
        finally:
            os.close(pidfd)

    def gpu_free_bytes(self) -> int:
        return self._memory_info()[0]

    def gpu_total_bytes(self) -> int:
        return self._memory_info()[1]

    def _memory_info(self) -> tuple[int, int]:
        """Free and total bytes of GPU 0, from a process of its own."""
        script = (
            "import ctypes; l = ctypes.CDLL('libcuda.so.1'); c = ctypes.c_void_p(); f = ctypes.c_size_t();"
            "t = ctypes.c_size_t();"
            "r = [l.cuInit(0), l.cuDevicePrimaryCtxRetain(ctypes.byref(c), 0),"
            "l.cuCtxSetCurrent(c), l.cuMemGetInfo_v2(ctypes.byref(f), ctypes.byref(t))];"
            "print(max(r), f.value, t.value)"
        )
        finished = subprocess.run(
            [sys.executable, "-c", script], env={**os.environ, **self.environment}, capture_output=True, check=True
        )
        result, free, total = map(int, finished.stdout.split())
        assert result == 0
        return free, total

    def restored(self, result: dict[str, Any], log: Path) -> Stepper:
        """The target that a restore's result tells of."""
        stepper = Stepper(int(result["root_pid"]), log)
        self._targets.append(stepper)
        return stepper

    def checkpoint(self, stepper: Stepper, **params: Any) -> dict[str, Any]:
        result: dict[str, Any] = self.call("checkpoint", target=stepper.pid, store=str(self.store_path), **params)
        if params.get("stop") and stepper.process is not None:
            stepper.process.wait(DEADLINE_S)
        return result

    def restore(self, image: str, log: Path, **params: Any) -> Stepper:
        return self.restored(self.call("restore", image=image, store=str(self.store_path), **params), log)

    def damage_gpu_chunk(self, image: str) -> None:
        """Change a byte of a chunk of the image's GPU memory, in whatever pack that is."""
        with ImageRepository(self.store_path) as store, store.open(image) as opened:
            digests = opened.manifest.digests
            index = next(
                at for at in range(0, len(digests), 32) if digests[at : at + 32] != zero_digest(store.chunk_bytes)
            )
            damage_chunk(store, digests[index : index + 32])

    def damage_cpu_page(self, image: str) -> None:
        """Change a byte of a chunk of the image's files of pages."""
        with ImageRepository(self.store_path) as store, store.open(image) as opened:
            pages = next(record for record in opened.cpu_files() if record.path.startswith("pages-"))
            damage_chunk(store, pages.digests[-32:])

    def images(self) -> list[str]:
        """References of the images that verify; any other makes the test fail."""
        store = ImageRepository(self.store_path)
        try:
            found = []
            for entry in store.list():
                assert entry.error is None, entry.error
                with store.open(entry.reference) as image:
                    assert image.verify() == []
                found.append(entry.reference)
            return found
        finally:
            store.close()

    def close(self) -> None:
        """End every target, the daemon and the keeper; remove the directory. Nothing happens a second time: by then the
        targets' numbers may be others'."""
        if self._closed:
            return
        self._closed = True
        for stepper in self._targets:
            _kill_session(stepper.pid)
            if stepper.process is not None:
                stepper.process.wait(DEADLINE_S)
        with contextlib.suppress(NoDaemonError, WoodfrogError), Client.connect(self.runtime) as client:
            client.call("ps")
            client.call("stop")
        for pid in _processes_of(self.runtime):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        shutil.rmtree(self.root, ignore_errors=True)


def build_targets(factory: pytest.TempPathFactory) -> Path:
    """Compile the targets and the stepper's kernels, once for all tests; the folder with all of them.
    $WOODFROG_TEST_TARGETS: one that has them already."""
    if ready := os.environ.get("WOODFROG_TEST_TARGETS"):
        return Path(ready)
    folder = session_folder(factory) / "targets"
    return once(folder, lambda: _compile_targets(folder))


def _compile_targets(into: Path) -> None:
    nvcc = next((found for name in _NVCC if (found := shutil.which(name))), None) or str(_wheel_nvcc())
    into.mkdir(exist_ok=True)
    commands = [
        [nvcc, "-ptx", "-arch=sm_90", "-o", str(into / f"{program}.ptx"), str(TARGETS / f"{program}_kernels.cu")]
        for program in ("stepper", "launcher", "collective")
    ] + [
        [
            "g++", "-std=c++20", "-O1", "-Wall", "-Wextra", "-Werror", f"-I{_cuda_include()}",
            str(TARGETS / f"{program}.cpp"), "-o", str(into / program),
            f"-L{paths.simgpu_dir()}", "-l:libcuda.so.1", "-pthread",
        ]
        for program in ("stepper", "scribbler", "launcher", "sharer", "collective")
    ]  # fmt: skip
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # whoever else runs tests waits for this
        for done in [pool.submit(subprocess.run, command, check=True) for command in commands]:
            done.result()


def new_root() -> Path:
    """A short private directory: socket paths have at most 108 bytes, pytest's own are longer."""
    return Path(tempfile.mkdtemp(prefix="wf-"))


def _wheel_nvcc() -> Path:
    import nvidia

    for location in nvidia.__path__:
        if (found := Path(location) / "cu13" / "bin" / "nvcc").exists():
            return found
    raise AssertionError("there is no nvcc: install nvidia-cuda-nvcc, or put the toolkit on PATH")


def _cuda_include() -> str:
    candidates: list[Path] = []
    with contextlib.suppress(ImportError):
        import nvidia

        candidates += [Path(location) / "cu13" / "include" for location in nvidia.__path__]
    candidates += [Path("/usr/local/cuda/include")]
    for candidate in candidates:
        if (candidate / "cuda.h").exists():
            return str(candidate)
    raise AssertionError("there is no cuda.h: install nvidia-cuda-runtime")


def wait_for_path(path: Path, text: str = "") -> None:
    """Wait until there is such a file, with this text in it."""
    with _changes_of(path.parent) as changed:
        deadline = time.monotonic() + DEADLINE_S
        while not (path.exists() and text in path.read_text()):
            left_s = deadline - time.monotonic()
            assert left_s > 0, f"no {path} with {text!r} within {DEADLINE_S:g} s"
            changed(min(left_s, 1.0))


@contextlib.contextmanager
def _changes_of(path: Path) -> Iterator[Callable[[float], None]]:
    """A function that waits until something below or in `path` changed, at most for the seconds that it is given."""
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    fd = libc.inotify_init1(os.O_CLOEXEC | os.O_NONBLOCK)
    assert fd >= 0
    try:
        # IN_MODIFY | IN_CLOSE_WRITE | IN_CREATE | IN_MOVED_TO | IN_DELETE
        assert libc.inotify_add_watch(fd, os.fsencode(path), 0x2 | 0x8 | 0x100 | 0x80 | 0x200) >= 0

        def changed(timeout_s: float) -> None:
            if select.select([fd], [], [], timeout_s)[0]:
                os.read(fd, 65536)

        yield changed
    finally:
        os.close(fd)


def _kill_session(leader: int) -> None:
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, ValueError, IndexError):
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                if int(fields[3]) == leader:
                    os.kill(int(entry.name), signal.SIGKILL)


def _processes_of(runtime: Path) -> list[int]:
    """Keeper and daemon of this directory: whoever has it in its environment, except this process."""
    wanted = f"WOODFROG_RUNTIME_DIR={runtime}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                if wanted in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
    return found
