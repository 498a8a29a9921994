"""`woodfrog checkpoint`: write an image of a running target."""

from __future__ import annotations

from typing import Annotated

import typer

from woodfrog.cli import output
from woodfrog.cli.options import JsonOption, StoreOption, TargetArgument, TimeoutOption


def checkpoint(
    target: TargetArgument,
    stop: Annotated[bool, typer.Option("--stop", help="End the target once the image is durable.")] = False,
    cpu: Annotated[bool, typer.Option("--cpu/--no-cpu", help="With the CPU side (needed for a restore).")] = True,
    name: Annotated[str | None, typer.Option("--name", help="Name of the image (default: the target's).")] = None,
    store: StoreOption = None,
    timeout: TimeoutOption = 30.0,
    as_json: JsonOption = False,
) -> None:
    """Write an image of a running target; it runs on afterwards unless --stop is given."""
    with output.reported(as_json):
        from woodfrog import api
        from woodfrog.image.inspect import human_bytes

        with output.progress("checkpoint", as_json=as_json) as on_event:
            result = api.checkpoint(
                target, stop=stop, cpu=cpu, store=store, name=name, timeout=timeout, on_event=on_event
            )
        if as_json:
            output.print_json(result.to_dict())
            return
        output.phase_table(result.phases)
        output.warn(result.warnings)
        size = f"{human_bytes(result.gpu_bytes)} of GPU memory, {human_bytes(result.cpu_bytes)} of CPU side"
        ran_on = f"the target waited {result.stall_s:.3f} s and runs on"
        output.say(f"{result.image}: {size}; {'the target was stopped' if result.stopped else ran_on}")
