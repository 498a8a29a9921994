"""The demo itself: the same training twice, once left alone, once frozen to disk in the middle; then compare.

Everything happens in a private directory with a daemon of its own, which are gone afterwards, whatever happened. It
must never touch the user's own daemon, store or targets.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from woodfrog import api
from woodfrog.daemon import runtime_dir
from woodfrog.daemon.client import Client
from woodfrog.doctor import machine
from woodfrog.errors import NoDaemonError, RefusedError, TargetState, WoodfrogError
from woodfrog.image.inspect import human_bytes
from woodfrog.logtail import LogTail

STEPS = 200
FREEZE_AT_STEP = 80
# Pauses between FREEZE_AT_STEP and SLOW_TO make up the time in which the freeze has to begin: 7.5 s.
SLOW_TO = 110
PACE_MS = 250.0
LIMIT_S = 120.0  # for each training; it takes seconds
_END_S = 10.0  # for a killed process to be gone

Say = Callable[[str], None]


@dataclass
class DemoResult:
    """What the demo found; `identical` is the point of it."""

    identical: bool = False
    simulated: bool = False
    gpu: str = ""
    steps: int = STEPS
    frozen_at_step: int = 0
    result_bytes: int = 0
    image: str = ""
    image_gpu_bytes: int = 0
    image_cpu_bytes: int = 0
    gone_while_frozen: bool = False
    verified: bool = False
    seconds: float = 0.0
    checkpoint: dict[str, float] = field(default_factory=dict)
    restore: dict[str, float] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def run(*, simulated: bool, keep: bool, say: Say) -> DemoResult:
    """Do all of it; takes well under a minute. Any WoodfrogError of the operations goes through to the caller."""
    begun = time.monotonic()
    result = DemoResult(simulated=simulated or not machine.has_real_gpu())
    _check_parts(simulated=result.simulated)
    if result.simulated:
        say(
            "GPU: the simulated one"
            + ("" if simulated else " (this machine has no other)")
            + "; CRIU and libraries are real"
        )
    # Socket names have at most 108 bytes: a long $TMPDIR is passed over.
    place = tempfile.gettempdir()
    directory = Path(tempfile.mkdtemp(prefix="woodfrog-demo-", dir=place if len(place) < 60 else "/tmp"))
    with _terminated_by_signals(), _private(directory, simulated=result.simulated, keep=keep, say=say):
        _play(directory, result, say)
    result.seconds = round(time.monotonic() - begun, 2)
    return result


def _play(directory: Path, result: DemoResult, say: Say) -> None:
    say(f"1. training {STEPS} steps, left alone")
    alone = _train(directory, "alone")
    _finish(alone, directory / "alone.bin")

    say(f"2. training the same again, to be frozen around step {FREEZE_AT_STEP}")
    frozen = _train(directory, "frozen", "--slow-from", str(FREEZE_AT_STEP), "--slow-to", str(SLOW_TO),
                    "--pace-ms", str(PACE_MS))  # fmt: skip
    _wait_for_step(frozen, FREEZE_AT_STEP)
    say(f"3. woodfrog checkpoint frozen --stop        (pid {frozen.pid}, in the middle of it)")
    checkpoint = api.checkpoint(frozen, stop=True)
    assert checkpoint.image is not None
    result.image, result.checkpoint = checkpoint.image, checkpoint.phases
    frozen.wait(LIMIT_S)
    result.gone_while_frozen = not Path(f"/proc/{frozen.pid}").exists()
    result.frozen_at_step = _last_step(Path(frozen.log))
    if not result.gone_while_frozen or result.frozen_at_step >= STEPS or (directory / "frozen.bin").exists():
        raise WoodfrogError(f"the target was not frozen in the middle (step {result.frozen_at_step})")
    image = api.inspect(result.image)
    result.gpu = image["devices"][0]["name"]
    result.image_gpu_bytes, result.image_cpu_bytes = image["gpu_bytes"], image["cpu_bytes"]
    sizes = f"{human_bytes(result.image_gpu_bytes)} of GPU memory, {human_bytes(result.image_cpu_bytes)} of CPU side"
    say(f"   process {frozen.pid} is gone; step {result.frozen_at_step} of {STEPS} is in {result.image}: {sizes}")

    verified = api.verify(result.image)
    result.verified = True
    say(f"4. woodfrog verify {result.image}: every chunk has its digest ({human_bytes(verified.bytes)})")

    say(f"5. woodfrog restore {result.image}")
    thawed = api.restore(result.image)
    result.restore = thawed.details.phases if thawed.details is not None else {}
    try:
        thawed.wait(LIMIT_S)
    except TimeoutError as error:
        raise WoodfrogError(str(error), pid=thawed.pid, target_state=TargetState.RUNNING) from error
    finally:
        thawed.kill()
    say(f"   pid {thawed.pid} went on from step {result.frozen_at_step} and has ended")
    expected, found = (directory / "alone.bin").read_bytes(), _read_result(directory / "frozen.bin", thawed)
    result.result_bytes = len(expected)
    result.identical = len(expected) > 0 and expected == found


def _train(directory: Path, name: str, *options: str) -> api.Target:
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}  # numpy's idle threads would only fill the image
    program = str(Path(__file__).with_name("train.py"))
    command = [sys.executable, program, "--out", str(directory / f"{name}.bin"), "--steps", str(STEPS), *options]
    return api.run(command, name=name, env=environment, cwd=str(directory), log=directory / f"{name}.log")


def _finish(target: api.Target, out: Path) -> None:
    try:
        code = target.wait(LIMIT_S)
    except TimeoutError as error:
        target.kill()
        raise WoodfrogError(str(error), pid=target.pid) from error
    if code != 0 or not out.exists():
        raise _failed(target, f"the training ended with exit code {code}")


def _wait_for_step(target: api.Target, step: int) -> None:
    with LogTail(target.log, target.log_offset, target.pid) as log:
        try:
            for line in log.lines(LIMIT_S):
                if line.startswith(f"step {step} "):
                    return
        except TimeoutError as error:
            target.kill()
            raise _failed(target, f"the training did not come to step {step} within {LIMIT_S:g} s") from error
    raise _failed(target, f"the training ended before step {step}")


def _last_step(log: Path) -> int:
    steps = [line.split()[1] for line in log.read_text(errors="replace").splitlines() if line.startswith("step ")]
    return int(steps[-1]) if steps else 0


def _read_result(path: Path, target: api.Target) -> bytes:
    if not path.exists():
        raise _failed(target, "the restored training ended without a result")
    return path.read_bytes()


def _failed(target: api.Target, what: str) -> WoodfrogError:
    lines = Path(target.log).read_text(errors="replace").splitlines()[-5:]
    return WoodfrogError(f"{what}; its last words: {' | '.join(lines) or '(none)'}", pid=target.pid)


def _check_parts(*, simulated: bool) -> None:
    """What has to be there, before anything is started."""
    from importlib.util import find_spec

    from woodfrog.cpu import criu

    if find_spec("cuda") is None or find_spec("cuda.core") is None:
        raise RefusedError("the demo's program needs cuda-core", advice="pip install 'woodfrog[demo]'")
    criu.find()
    if simulated:
        from woodfrog._native import paths

        if not (paths.simgpu_dir() / "libcuda.so.1").exists():
            raise RefusedError("the simulated GPU is not built", advice="run `make build`")


@contextlib.contextmanager
def _private(directory: Path, *, simulated: bool, keep: bool, say: Say) -> Iterator[None]:
    """Our own runtime directory, store and (if simulated) driver, for this process and all that it starts."""
    changes = {runtime_dir.ENVIRONMENT: str(directory / "run"), "WOODFROG_STORE": str(directory / "store")}
    if simulated:
        from woodfrog._native import paths

        library_path = os.environ.get("LD_LIBRARY_PATH")
        changes["WOODFROG_SIMGPU_MACHINE"] = directory.name  # whatever else is simulated here has its own GPUs
        changes["LD_LIBRARY_PATH"] = str(paths.simgpu_dir()) + (f":{library_path}" if library_path else "")
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        try:
            _stop_all(directory, say)
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value
            if keep:
                say(f"kept: {directory}")
            else:
                shutil.rmtree(directory, ignore_errors=True)


def _stop_all(directory: Path, say: Say) -> None:
    """End the targets, the daemon and the keeper of this demo, whatever state they are in."""
    try:
        with Client.connect(directory / "run") as client:
            for row in client.call("ps"):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(row["pid"]), signal.SIGKILL)
            client.call("stop")
    except NoDaemonError:
        pass  # it never started, or is gone already
    except WoodfrogError as error:
        say(f"the demo's daemon did not stop by itself: {error.reason}")
    _end_processes(directory)


def _end_processes(directory: Path) -> None:
    """Kill what is left of ours, the keeper first (it would start the daemon again), and wait until it is gone.

    Ours are the processes with this private directory in their environment: nobody else can have it.
    """
    mark = f"{runtime_dir.ENVIRONMENT}={directory / 'run'}".encode()
    ours = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # ended meanwhile, or not ours to look at
            if entry.name != str(os.getpid()) and mark in (entry / "environ").read_bytes().split(b"\0"):
                ours.append((b"keeper" not in (entry / "cmdline").read_bytes(), int(entry.name)))
    for _, pid in sorted(ours):
        with contextlib.suppress(ProcessLookupError):
            pidfd = os.pidfd_open(pid)
            try:
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                select.select([pidfd], [], [], _END_S)
            finally:
                os.close(pidfd)


@contextlib.contextmanager
def _terminated_by_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP end the demo as Ctrl-C does: with everything cleaned up."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
