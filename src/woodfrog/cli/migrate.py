"""`woodfrog migrate`: a running target goes to other GPUs of this machine."""

from __future__ import annotations

from typing import Annotated

import typer

from woodfrog.cli import output
from woodfrog.cli.options import GpuOption, JsonOption, TargetArgument, TimeoutOption, gpu_mapping


def migrate(
    target: TargetArgument,
    gpu: GpuOption = None,
    precopy: Annotated[
        bool, typer.Option("--precopy", help="Copy its memory while it still runs, then what it has changed since.")
    ] = False,
    timeout: TimeoutOption = 30.0,
    as_json: JsonOption = False,
) -> None:
    """Move a running target to other GPUs of this machine; its processes stay."""
    with output.reported(as_json):
        from woodfrog import api
        from woodfrog.errors import UsageError
        from woodfrog.image.inspect import human_bytes

        gpu_map = gpu_mapping(gpu or [])
        if not gpu_map:
            raise UsageError("it is not said where to", advice="--gpu HERE, or --gpu THERE=HERE for each that moves")
        with output.progress("migrate", as_json=as_json) as on_event:
            result = api.migrate(target, gpu_map, precopy=precopy, timeout=timeout, on_event=on_event)
        if as_json:
            output.print_json(result.to_dict())
            return
        output.phase_table(result.phases)
        output.warn(result.warnings)
        output.say(
            f"{result.name or result.pid} runs on other GPUs: {human_bytes(result.bytes)} moved, "
            f"it waited {result.stall_s:.2f} s"
        )
