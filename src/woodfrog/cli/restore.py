"""`woodfrog restore`: bring an image back as a running process."""

from __future__ import annotations

from typing import Annotated

import typer

from woodfrog.cli import output
from woodfrog.cli.options import GpuOption, ImageArgument, JsonOption, StoreOption, gpu_mapping


def restore(
    image: ImageArgument,
    gpu: GpuOption = None,
    mode: Annotated[str, typer.Option("--mode", help="When the target runs again; this version has: eager.")] = "eager",
    verify: Annotated[bool, typer.Option("--verify", help="Hash the memory again once it is in place.")] = False,
    standby: Annotated[
        bool, typer.Option("--standby/--no-standby", help="Take a standby process of the image if there is one.")
    ] = True,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Bring an image back as a running process, with the pids that it had."""
    with output.reported(as_json):
        from woodfrog import api
        from woodfrog.image.inspect import human_bytes

        gpu_map = gpu_mapping(gpu or [])
        with output.progress("restore", as_json=as_json) as on_event:
            target = api.restore(
                image, gpu_map=gpu_map, mode=mode, store=store, verify=verify, standby=standby, on_event=on_event
            )
        details = target.details
        assert details is not None
        if as_json:
            output.print_json(details.to_dict())
            return
        output.phase_table(details.phases)
        output.warn(details.warnings)
        checked = ", memory verified" if details.verified else ""
        taken = f", taken from standby ({details.standby})" if details.standby else ""
        size = human_bytes(details.bytes)
        output.say(f"{target.name}: pid {target.pid}, {size}{taken}{checked}; output in {target.log}")
