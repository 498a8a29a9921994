"""Everything that the command line prints, and the one place where errors become text and an exit code.

With --json stdout carries one JSON document and nothing else; without it results go to stdout, progress and errors to
stderr. Text that comes out of images or other processes is made safe for terminals before it is shown.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import typer

from woodfrog.errors import ExitCode, TargetState, WoodfrogError

if TYPE_CHECKING:
    from rich.console import Console

OnEvent = Callable[[dict[str, Any]], None]

_STATES = {
    TargetState.RUNNING: "The target runs on as before.",
    TargetState.FROZEN: "The target is frozen, its memory is safe with the keeper.",
    TargetState.SUSPENDED: "The target is suspended.",
    TargetState.STANDBY: "The standby process still waits.",
    TargetState.GONE: "The target is gone.",
    TargetState.UNTOUCHED: "Nothing was touched.",
    TargetState.NONE: "",
}


def print_json(value: Any) -> None:
    sys.stdout.write(json.dumps(value, ensure_ascii=False) + "\n")
    sys.stdout.flush()


def console(*, stderr: bool = False) -> Console:
    from rich.console import Console

    class OurConsole(Console):
        def on_broken_pipe(self) -> None:
            raise BrokenPipeError  # rich would end the process with code 1; `reported` knows better

    return OurConsole(stderr=stderr, highlight=False)


def say(text: str) -> None:
    """A line for people on stdout."""
    typer.echo(text)


def note(text: str) -> None:
    """A line for people on stderr, beside whatever stdout is for."""
    typer.echo(f"woodfrog: {text}", err=True)


@contextmanager
def reported(as_json: bool) -> Iterator[None]:
    """Turns what is raised inside into a message (or a JSON document) and typer's exit with the documented code."""
    try:
        yield
    except WoodfrogError as error:
        report(error, as_json)
        raise typer.Exit(int(error.exit_code)) from None
    except KeyboardInterrupt:
        if as_json:
            print_json({"error": "Interrupted", "reason": "interrupted", "exit_code": 130})
        else:
            typer.echo("woodfrog: interrupted; what had begun was taken back or went on to its end", err=True)
        raise typer.Exit(130) from None
    except BrokenPipeError:
        # The reader of our output went away (`woodfrog images | head`): no failure of ours, and nobody left to tell.
        sys.stdout = open("/dev/null", "w")  # noqa: SIM115 (stays open until the process ends)
        raise typer.Exit(141) from None


def report(error: WoodfrogError, as_json: bool) -> None:
    """Print one error: reason, state of the target, way out."""
    from woodfrog.image.inspect import printable

    if as_json:
        print_json(error.to_dict())
        return
    where = f" (in phase {error.phase})" if error.phase else ""
    lines = [f"woodfrog: {printable(error.reason, 2000)}{where}"]
    if error.exit_code != ExitCode.USAGE and (state := _STATES.get(error.target_state, "")):
        lines.append(f"  {state}")
    if error.advice:
        lines.append(f"  What to do: {printable(error.advice, 2000)}")
    typer.echo("\n".join(lines), err=True)


def table(headings: Sequence[str], rows: Iterable[Sequence[str]], *, right: Sequence[int] = ()) -> None:
    """A plain table on stdout; columns with an index in `right` are aligned right. Cells are made safe."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    from woodfrog.image.inspect import printable

    shown = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for index, heading in enumerate(headings):
        shown.add_column(heading, justify="right" if index in right else "left", overflow="fold")
    for row in rows:
        shown.add_row(*(Text(printable(cell)) for cell in row))
    target = console()
    if not target.is_terminal:
        target.width = max(target.width, 160)  # for files and pipes: no folding at 80
    target.print(shown)


def phase_table(phases: dict[str, float], *, total: str = "all phases") -> None:
    """Phases with their times. They may run beside each other, so their sum is not the whole time."""
    if phases:
        rows = [(name, f"{seconds * 1000:,.1f} ms") for name, seconds in phases.items()]
        table(("phase", "time"), rows, right=(1,))


def warn(warnings: Iterable[str]) -> None:
    from woodfrog.image.inspect import printable

    for warning in warnings:
        typer.echo(f"woodfrog: warning: {printable(warning, 2000)}", err=True)


@contextmanager
def progress(title: str, *, as_json: bool) -> Iterator[OnEvent]:
    """A bar per phase that moves bytes, and the phase that runs, on a terminal; nothing otherwise."""
    if as_json or not sys.stderr.isatty():
        yield lambda event: None
        return
    from rich.console import RenderableType
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        ProgressColumn,
        SpinnerColumn,
        Task,
        TaskID,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    class WithBytes(ProgressColumn):
        """Another column for phases that move bytes, nothing for those that do not."""

        def __init__(self, column: ProgressColumn) -> None:
            super().__init__()
            self._column = column

        def render(self, task: Task) -> RenderableType:
            return "" if task.total is None else self._column.render(task)

    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        TimeElapsedColumn(),
        *map(WithBytes, (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())),
    )
    with Progress(*columns, console=console(stderr=True), transient=True) as bars:
        tasks: dict[str, TaskID] = {}

        def on_event(event: dict[str, Any]) -> None:
            phase, kind = str(event.get("phase", "")), event.get("event")
            if phase not in tasks:
                tasks[phase] = bars.add_task(f"{title}: {phase}", total=None)
            if kind == "progress":
                bars.update(tasks[phase], completed=event.get("bytes_done", 0), total=event.get("bytes_total") or None)
            elif kind == "end":
                bars.remove_task(tasks.pop(phase))
            elif kind == "undo":
                bars.update(tasks[phase], description=f"{title}: taking back {phase}")

        yield on_event
