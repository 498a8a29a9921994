"""`woodfrog restore`: bring an image back as a running process."""

from __future__ import annotations

from typing import Annotated

import typer

from woodfrog.cli import output
from woodfrog.cli.options import ImageArgument, JsonOption, StoreOption


def restore(
    image: ImageArgument,
    gpu: Annotated[
        list[str] | None,
        typer.Option("--gpu", metavar="[THERE=]HERE", help="GPU to restore onto: ordinal or UUID; repeat for several."),
    ] = None,
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


def gpu_mapping(options: list[str]) -> dict[str, str]:
    """--gpu as a map: `THERE=HERE`, or `HERE` for the GPUs of the image in order of their ordinals there."""
    from woodfrog.errors import UsageError

    mapping: dict[str, str] = {}
    for index, option in enumerate(options):
        there, equals, here = option.rpartition("=")
        there = there if equals else str(index)
        if not there or not here or there in mapping:
            raise UsageError(f"--gpu {option!r} is not HERE or THERE=HERE, or names a GPU twice")
        mapping[there] = here
    return mapping
