"""checkpoint_self: a process that asks for its own checkpoint, typically from inside its training loop.

It cannot talk to the daemon itself: CRIU would find that socket in it. So a helper outside its process tree asks, and
writes the answer into a file. Between asking and the answer this process holds no descriptor and no child of ours. The
process restored from the image finds itself in the same wait, and knows itself by its start time, which is another.
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec

from woodfrog import errors
from woodfrog.daemon import runtime_dir
from woodfrog.errors import WoodfrogError
from woodfrog.results import CheckpointResult

# Not inotify: its descriptor would be in the image. A checkpoint takes hundreds of milliseconds; this costs nothing.
_LOOK_AGAIN_S = 0.005
_LOOK_AT_CLOCK_S = 1.0


def checkpoint_self(
    *, stop: bool = False, store: str | os.PathLike[str] | None = None, name: str | None = None, timeout: float = 30.0
) -> CheckpointResult:
    """Write an image of the calling process. Returns twice: with the result in this process, and with `restored` True
    in each process that is restored from the image. All other threads run on until the target comes to rest.

    `stop` ends this process once the image is durable. `timeout` (seconds) bounds the wait for GPU work in flight.
    """
    own = _incarnation()
    directory = runtime_dir.ensure()
    answer_path = directory / f"self-{os.getpid()}-{secrets.token_hex(8)}.json"
    request = {
        "pid": os.getpid(),
        "stop": stop,
        "store": _place(store),
        "name": name,
        "timeout": timeout,
    }
    environment = {key: value for key, value in os.environ.items() if key != "LD_PRELOAD"}
    started = subprocess.run(
        [sys.executable, "-m", "woodfrog.self_checkpoint", str(answer_path), json.dumps(request)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        env=environment,
        check=True,
    )
    return _wait(answer_path, int(started.stdout), own)


def _place(store: str | os.PathLike[str] | None) -> str | None:
    """The store as the helper is told it, whose working directory may be another one."""
    if store is None:
        return None
    place = os.fspath(store)
    return place if place.startswith(("ram:", "s3://")) else str(Path(place).absolute())


def _wait(answer_path: Path, helper_pid: int, own: tuple[str, int]) -> CheckpointResult:
    """Opens no file before the answer is there: a descriptor that happens to be open is in the image."""
    looked = time.monotonic()
    while not answer_path.exists():
        # Its pid may have been given to another process since we were frozen, hence the look by the clock as well.
        if not _alive(helper_pid) or time.monotonic() - looked > _LOOK_AT_CLOCK_S:
            looked = time.monotonic()
            if _incarnation() != own:
                return _restored(answer_path)
            if not _alive(helper_pid) and not answer_path.exists():
                raise WoodfrogError("the helper that asked for the checkpoint died", advice="see daemon.log")
        time.sleep(_LOOK_AGAIN_S)
    # With `stop` the answer was for a process that is gone: only its restored successor finds it.
    if _incarnation() != own:
        return _restored(answer_path)
    answer = json.loads(answer_path.read_bytes())
    answer_path.unlink()
    if "error" in answer:
        raise errors.from_dict(answer["error"])
    return msgspec.convert(answer["result"], CheckpointResult)


def _help(answer_path: Path, request: dict[str, Any]) -> None:
    """In the helper: leave the process tree, ask the daemon, answer. The parent waits for the first process only."""
    if (child := os.fork()) > 0:
        print(child, flush=True)
        # Not sys.exit: nothing may be cleaned up twice.
        os._exit(0)
    os.setsid()
    null = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(null, standard)
    from woodfrog import api

    try:
        result = api.checkpoint(
            request["pid"],
            stop=request["stop"],
            store=request["store"],
            name=request["name"],
            timeout=request["timeout"],
        )
        answer: dict[str, Any] = {"result": result.to_dict()}
    except WoodfrogError as error:
        answer = {"error": error.to_dict()}
    except Exception as error:  # noqa: BLE001 (the waiting process has to hear of it: nobody else sees this one)
        answer = {"error": WoodfrogError(f"{type(error).__name__}: {error}").to_dict()}
    temporary = answer_path.with_suffix(".tmp")
    temporary.touch(0o600)
    temporary.write_bytes(json.dumps(answer).encode())
    temporary.rename(answer_path)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return False  # another user's by now, so not the helper
    return True


def _restored(answer_path: Path) -> CheckpointResult:
    answer_path.unlink(missing_ok=True)
    return CheckpointResult(pid=os.getpid(), restored=True)


def _incarnation() -> tuple[str, int]:
    """This boot, and the start time of this process in it; the process that CRIU restores has its own."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text()
    fields = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()
    return boot, int(fields[19])  # proc(5): field 22; 3 is the first after the command's name


if __name__ == "__main__":
    _help(Path(sys.argv[1]), json.loads(sys.argv[2]))
