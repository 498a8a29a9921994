"""`woodfrog resume`: give a suspended target its GPU memory back, or go on with a promotion that stopped."""

from __future__ import annotations

from typing import Annotated

import typer

from woodfrog.cli import output
from woodfrog.cli.options import GpuOption, JsonOption, TargetArgument, gpu_mapping
from woodfrog.cli.restore import promotion_line


def resume(
    target: TargetArgument,
    gpu: GpuOption = None,
    wait: Annotated[
        bool, typer.Option("--wait", help="Of a target that is promoted: return once that has ended.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Give a suspended target its GPU memory back; it goes on where it was. A promotion that stopped goes on."""
    with output.reported(as_json):
        from woodfrog import api
        from woodfrog.image.inspect import human_bytes

        with output.progress("resume", as_json=as_json) as on_event:
            result = api.resume(target, gpu_map=gpu_mapping(gpu or []), wait=wait, on_event=on_event)
        if as_json:
            output.print_json(result.to_dict())
            return
        output.phase_table(result.phases)
        output.warn(result.warnings)
        if result.promotion is not None:
            output.say(promotion_line(result.promotion))
            return
        output.say(f"{result.name or result.pid} runs again: {human_bytes(result.bytes)} on the GPU")
