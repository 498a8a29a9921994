"""Following a target that `woodfrog run` started: its log to stdout as it grows, signals on to it, until it ends."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import typer

from woodfrog.api import Target
from woodfrog.logtail import LogTail

_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGQUIT)


def until_end(target: Target, *, show: bool) -> int:
    """Follow until the target ends; its exit code, negative for the signal that ended it."""
    with _forwarding(target):
        if show:
            with LogTail(target.log, target.log_offset, target.pid) as log:
                for block in log.blocks():
                    sys.stdout.buffer.write(block)
                    sys.stdout.buffer.flush()
        code = target.wait()
    assert code is not None  # it is our child
    return code


def explain_signal(target: Target, code: int) -> None:
    """Say which signal ended the target, and whether that was its checkpoint."""
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    text = f"woodfrog: {target.name} was ended by {name}"
    if -code == signal.SIGKILL and (image := _stopped_into(target)):
        text += f": it was checkpointed and stopped; `woodfrog restore {image}` brings it back"
    typer.echo(text, err=True)


@contextmanager
def _forwarding(target: Target) -> Iterator[None]:
    def forward(number: int, frame: FrameType | None) -> None:
        target.kill(number)

    before = {number: signal.signal(number, forward) for number in _FORWARDED}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _stopped_into(target: Target) -> str | None:
    """The newest image in the default store that this very target was stopped into, if there is one."""
    from woodfrog import api

    mine = [
        image.reference
        for image in api.images()
        if image.target_name == target.name
        and not image.leave_running
        and image.error is None
        and image.created_unix_s >= target.started_unix_s
    ]
    return mine[-1] if mine else None
