"""For programs under woodfrog: to be told when they were restored, and what has changed for them.

    woodfrog.on_restore(lambda news: print("I am", news.name, "and serve on", news.ports))

A restored process goes on where it was; arguments and environment of its start are memory of its own. What `woodfrog
restore --env NAME=VALUE --port OLD=NEW` says reaches it here. Needs no daemon, and costs one descriptor.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FrameType

FILE_NAME = "woodfrog-restored"  # operations/telling.py looks for it
MAX_BYTES = 1 << 16


@dataclass(frozen=True)
class Restored:
    """As what this process was restored. `ports`: that it listens on, by those of the image; `environment`: --env."""

    name: str = ""
    image: str = ""
    instance: str = ""  # of one in a PID namespace of its own
    ports: dict[int, int] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)


_file = -1
_callbacks: list[Callable[[Restored], None]] = []


def on_restore(callback: Callable[[Restored], None], *, number: int | None = None) -> None:
    """Have `callback` called after every restore of this process, in its main thread, with os.environ brought up to
    date. Call it in the main thread, before a checkpoint. `number`: the signal that is used (default: SIGRTMAX-5)."""
    chosen = int(signal.SIGRTMAX) - 5 if number is None else number
    signal.signal(chosen, _called)
    _register(chosen)
    _callbacks.append(callback)


def restored() -> Restored | None:
    """As what this process was restored last; None when it never was. To be asked at any time, once it was called (or
    `on_restore`) before the checkpoint."""
    if _file < 0:
        _register(0)
        return None
    news = json.loads(os.pread(_file, MAX_BYTES, 0))
    if "image" not in news:
        return None
    return Restored(
        news["name"],
        news["image"],
        news["instance"],
        {int(old): new for old, new in news["ports"].items()},
        news["environment"],
    )


def _register(number: int) -> None:
    global _file
    if _file < 0:
        _file = os.memfd_create(FILE_NAME, os.MFD_CLOEXEC)
    news = json.loads(os.pread(_file, MAX_BYTES, 0) or b"{}")
    data = json.dumps({**news, "signal": number}).encode()
    os.ftruncate(_file, 0)
    os.pwrite(_file, data, 0)


def _called(number: int, frame: FrameType | None) -> None:
    news = restored()
    if news is None:
        return  # somebody else's signal
    os.environ.update(news.environment)
    for callback in list(_callbacks):
        callback(news)
