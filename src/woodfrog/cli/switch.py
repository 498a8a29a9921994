"""`woodfrog switch`: one target leaves the GPU, a suspended one comes back."""

from __future__ import annotations

from typing import Annotated

import typer

from woodfrog.cli import completion, output
from woodfrog.cli.options import JsonOption, TimeoutOption


def switch(
    leaving: Annotated[
        str, typer.Argument(metavar="OUT", help="The one that leaves.", autocompletion=completion.targets)
    ],
    coming: Annotated[
        str, typer.Argument(metavar="IN", help="The suspended one that comes.", autocompletion=completion.targets)
    ],
    level: Annotated[str, typer.Option("--level", help="Of what leaves: cold, or warm (its context stays).")] = "cold",
    timeout: TimeoutOption = 30.0,
    as_json: JsonOption = False,
) -> None:
    """Suspend OUT and resume IN, both at once where the GPU has room for both. If IN cannot come, OUT runs on."""
    with output.reported(as_json):
        from woodfrog import api
        from woodfrog.image.inspect import human_bytes

        with output.progress("switch", as_json=as_json) as on_event:
            result = api.switch(leaving, coming, level=level, timeout=timeout, on_event=on_event)
        if as_json:
            output.print_json(result.to_dict())
            return
        output.phase_table(result.phases)
        output.warn(result.warnings)
        came = f"{result.in_['name']} runs again: {human_bytes(result.in_['bytes'])} on the GPU"
        left = f"{result.out_['name']} is suspended: {human_bytes(result.out_['bytes'])} in host memory"
        output.say(f"{came}; {left}{'' if result.overlapped else ' (one after the other: no room for both)'}")
