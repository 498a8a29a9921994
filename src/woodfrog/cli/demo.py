"""`woodfrog demo`: freeze and thaw a real process here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from woodfrog.cli import output
from woodfrog.cli.options import JsonOption

if TYPE_CHECKING:
    from woodfrog.demo.scenario import DemoResult


def demo(
    simulated: Annotated[
        bool, typer.Option("--simulated", help="Use the simulated GPU even if there is a real one.")
    ] = False,
    keep: Annotated[
        bool, typer.Option("--keep", help="Keep the demo's directory (for a look at logs and image).")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Train a small network, freeze it to disk in the middle, thaw it, and compare with a run that was left alone."""
    with output.reported(as_json):
        from woodfrog.demo import scenario

        result = scenario.run(simulated=simulated, keep=keep, say=(lambda text: None) if as_json else output.say)
        if not as_json:
            _show(result)
        output.print_json(result.to_dict())
        if not result.identical:
            raise typer.Exit(1)


def _show(result: DemoResult) -> None:
    rows = [("checkpoint --stop", phase, f"{seconds * 1000:,.1f} ms") for phase, seconds in result.checkpoint.items()]
    rows += [("restore", phase, f"{seconds * 1000:,.1f} ms") for phase, seconds in result.restore.items()]
    output.table(("operation", "phase", "time"), rows, right=(2,))
    verdict = "the same, to the last byte" if result.identical else "DIFFERENT"
    output.say(f"weights after {result.steps} steps, frozen at step {result.frozen_at_step} and left alone: {verdict}")
