"""`woodfrog suspend`: take a target off the GPU, its process stays."""

from __future__ import annotations

from typing import Annotated

import typer

from woodfrog.cli import output
from woodfrog.cli.options import JsonOption, TargetArgument, TimeoutOption


def suspend(
    target: TargetArgument,
    level: Annotated[
        str, typer.Option("--level", help="cold: nothing stays on the GPU; warm: its context stays, it is back sooner.")
    ] = "cold",
    timeout: TimeoutOption = 30.0,
    as_json: JsonOption = False,
) -> None:
    """Take a target off the GPU: its memory waits in host memory, its process stays."""
    with output.reported(as_json):
        from woodfrog import api
        from woodfrog.image.inspect import human_bytes

        with output.progress("suspend", as_json=as_json) as on_event:
            result = api.suspend(target, level=level, timeout=timeout, on_event=on_event)
        if as_json:
            output.print_json(result.to_dict())
            return
        output.phase_table(result.phases)
        output.warn(result.warnings)
        output.say(
            f"{result.name or result.pid} is suspended ({result.level}): {human_bytes(result.bytes)} in host memory"
        )
