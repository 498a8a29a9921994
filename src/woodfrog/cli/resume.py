"""`woodfrog resume`: give a suspended target its GPU memory back."""

from __future__ import annotations

from woodfrog.cli import output
from woodfrog.cli.options import GpuOption, JsonOption, TargetArgument, gpu_mapping


def resume(target: TargetArgument, gpu: GpuOption = None, as_json: JsonOption = False) -> None:
    """Give a suspended target its GPU memory back; it goes on where it was."""
    with output.reported(as_json):
        from woodfrog import api
        from woodfrog.image.inspect import human_bytes

        with output.progress("resume", as_json=as_json) as on_event:
            result = api.resume(target, gpu_map=gpu_mapping(gpu or []), on_event=on_event)
        if as_json:
            output.print_json(result.to_dict())
            return
        output.phase_table(result.phases)
        output.warn(result.warnings)
        output.say(f"{result.name or result.pid} runs again: {human_bytes(result.bytes)} on the GPU")
