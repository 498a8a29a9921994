"""`woodfrog trace`: what the driver does when it checkpoints a process, seen from outside."""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from woodfrog.cli import output, units
from woodfrog.cli.options import JsonOption, TimeoutOption

START_TIMEOUT_S = 120.0  # until a program that is started here uses CUDA: PyTorch's imports on a slow disk
LOOK_INTERVAL_S = 0.05
END_TIMEOUT_S = 10.0


def trace(
    what: Annotated[
        list[str], typer.Argument(metavar="PID | -- PROGRAM [ARGUMENTS]…", help="A process, or a program to start.")
    ],
    html: Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Write it as one HTML page.")] = None,
    watch: Annotated[
        str | None,
        typer.Option("--watch", metavar="TIME", help="Only follow what others do with it (the daemon, say)."),
    ] = None,
    after: Annotated[
        str, typer.Option("--after", metavar="TIME", help="Of a program started here: how long it runs before.")
    ] = "1s",
    known: Annotated[
        list[Path] | None,
        typer.Option("--known", metavar="FILE", help="Look for this file's contents in the saved state (repeatable)."),
    ] = None,
    help_driver: Annotated[
        bool, typer.Option("--help-driver", help="Populate its mapping from outside, as checkpoint and suspend do.")
    ] = False,
    all_threads: Annotated[
        bool, typer.Option("--all-threads", help="Trace the program's own threads as well as the driver's.")
    ] = False,
    no_calls: Annotated[
        bool, typer.Option("--no-calls", help="No system calls: no thread is stopped, times are the driver's alone.")
    ] = False,
    timeout: TimeoutOption = 30.0,
    as_json: JsonOption = False,
) -> None:
    """Take a process through lock, checkpoint, restore and unlock of the driver, and show what happens there.

    It runs on afterwards; a program that was started here is ended. Works on processes that woodfrog did not start.
    """
    with output.reported(as_json):
        from woodfrog.trace import page, text
        from woodfrog.trace import watch as watching

        watch_s = 0.0 if watch is None else units.duration_s(watch, "--watch")
        with _process(what, units.duration_s(after, "--after")) as (pid, ours):
            request = watching.Request(
                pid=pid, timeout_s=timeout, all_threads=all_threads, help_driver=help_driver, calls=not no_calls,
                watch_s=watch_s, known=known or (), started_by_us=ours,
            )  # fmt: skip
            found = watching.trace(
                request, lambda: output.note(f"following what others do with process {pid}, for {watch_s:g} s at most")
            )
        if html is not None:
            html.write_text(page.page(found))
        if as_json:
            output.print_json(found.to_dict())
        else:
            from woodfrog.image.inspect import printable

            for line in text.lines(found):
                output.say(printable(line, 4096))
        if any(step.error for step in found.steps):
            raise typer.Exit(1)


@contextlib.contextmanager
def _process(what: list[str], after_s: float) -> Iterator[tuple[int, bool]]:
    """The process's number, and whether it was started here; such a one is ended with the block."""
    if len(what) == 1 and what[0].isdecimal():
        yield int(what[0]), False
        return
    from woodfrog.errors import NotFoundError, RefusedError

    try:
        # A session of its own: Ctrl-C is for the trace, which then brings the process back before it ends it.
        program = subprocess.Popen(what, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, start_new_session=True)
    except OSError as failure:
        raise NotFoundError(
            f"{what[0]} cannot be started: {failure.strerror}", advice="give a PID, or `-- PROGRAM ARGUMENTS`"
        ) from failure
    try:
        from woodfrog.driver.process import is_cuda_process

        deadline = time.monotonic() + START_TIMEOUT_S
        while not is_cuda_process(program.pid):
            if program.poll() is not None:
                raise RefusedError(f"{what[0]} ended with {program.returncode} before it used CUDA")
            if time.monotonic() > deadline:
                raise RefusedError(
                    f"{what[0]} has not used CUDA within {START_TIMEOUT_S:g} s",
                    advice="if another process of it does, give that one's PID",
                    pid=program.pid,
                )
            time.sleep(LOOK_INTERVAL_S)
        with contextlib.suppress(subprocess.TimeoutExpired):
            program.wait(after_s)
        yield program.pid, True
    finally:
        program.terminate()
        try:
            program.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            program.kill()
            program.wait()
