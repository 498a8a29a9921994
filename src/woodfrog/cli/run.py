"""`woodfrog run`: start a program that can be checkpointed, follow its output, end with its exit code."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from woodfrog.cli import output
from woodfrog.cli.options import JsonOption


def run(
    command: Annotated[list[str], typer.Argument(metavar="-- PROGRAM [ARGUMENTS]…", help="What to run.")],
    name: Annotated[str | None, typer.Option("--name", help="Name of the target (default: the program's).")] = None,
    log: Annotated[Path | None, typer.Option("--log", metavar="FILE", help="Where its output is appended.")] = None,
    cwd: Annotated[Path | None, typer.Option("--cwd", metavar="DIR", help="Its working directory.")] = None,
    detach: Annotated[bool, typer.Option("--detach", "-d", help="Return once it is started.")] = False,
    track: Annotated[
        bool,
        typer.Option("--track", help="Follow its launches: checkpoints hash only what they can have written."),
    ] = False,
    io_uring: Annotated[
        bool | None,
        typer.Option(
            "--io-uring/--no-io-uring",
            help="Whether it may have an io_uring, which no image can hold (default: not, if root starts it).",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Start a program so that it can be checkpointed.

    It runs in a session of its own with its output in a log file, which is shown here. Ctrl-C and SIGTERM are passed
    on to it. With --json nothing is shown until it ends.
    """
    with output.reported(as_json):
        from woodfrog import api
        from woodfrog.cli import follow

        directory = None if cwd is None else str(cwd)
        target = api.run(command, name, cwd=directory, log=log, track=track, io_uring=io_uring)
        started = {"name": target.name, "pid": target.pid, "log": target.log}
        if detach:
            if as_json:
                output.print_json(started)
            else:
                output.say(f"{target.name}: pid {target.pid}, output in {target.log}")
            return
        code = follow.until_end(target, show=not as_json)
        if as_json:
            output.print_json({**started, "exit_code": code})
        elif code < 0:
            follow.explain_signal(target, code)
        raise typer.Exit(code if code >= 0 else 128 - code)
