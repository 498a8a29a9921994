"""`woodfrog standby`: keep a process of an image restored and waiting, so that `restore` has little left to do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from woodfrog.cli import completion, instances, output
from woodfrog.cli.instances import BindOption, HookOption, HookTimeoutOption, NameOption, NamespaceOption, PortOption
from woodfrog.cli.options import GpuOption, JsonOption, StoreOption, gpu_mapping

if TYPE_CHECKING:
    from woodfrog.results import TargetInfo


def standby(
    image: Annotated[
        str | None,
        typer.Argument(
            metavar="[IMAGE]", help="As for `restore`; with --end also a pid.", autocompletion=completion.images
        ),
    ] = None,
    count: Annotated[
        int, typer.Option("--count", min=1, help="How many shall wait; several: each in a PID namespace.")
    ] = 1,
    new_pid_namespace: NamespaceOption = False,
    name: NameOption = None,
    port: PortOption = None,
    bind: BindOption = None,
    hook: HookOption = None,
    hook_timeout: HookTimeoutOption = None,
    hold: Annotated[
        str,
        typer.Option("--hold", help="Where the data waits: host (taking costs a copy), device or mapped (a remap)."),
    ] = "host",
    gpu: GpuOption = None,
    listing: Annotated[bool, typer.Option("--list", help="List the pool.")] = False,
    end: Annotated[bool, typer.Option("--end", help="End those of IMAGE, the one with that pid, or all.")] = False,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Keep a process of an image restored and waiting: `restore` of that image then takes it."""
    with output.reported(as_json):
        from woodfrog import api
        from woodfrog.errors import UsageError
        from woodfrog.image.inspect import human_bytes

        if listing and end:
            raise UsageError("--list and --end are two things", advice="give one of them")
        if listing:
            _list(api.standby_pool(), as_json)
            return
        if end:
            ended = api.end_standby(image or "")
            if as_json:
                output.print_json(ended)
            else:
                output.say(f"ended: {', '.join(map(str, ended)) or 'none was there'}")
            return
        if image is None:
            raise UsageError("there is no image named", advice="woodfrog standby IMAGE, or --list, or --end")
        gpu_map = gpu_mapping(gpu or [])
        with output.progress("standby", as_json=as_json) as on_event:
            results = api.standby(
                image,
                count=count,
                hold=hold,
                new_pid_namespace=new_pid_namespace,
                name=name,
                ports=instances.ports(port),
                binds=instances.pairs("--bind", bind, ":"),
                hook=hook,
                hook_timeout=hook_timeout,
                gpu_map=gpu_map,
                store=store,
                on_event=on_event,
            )
        if as_json:
            output.print_json([result.to_dict() for result in results])
            return
        for result in results:
            output.phase_table(result.phases)
            output.warn(result.warnings)
            since = "waits" if result.new else "waits already"
            held = f"{human_bytes(result.bytes)} held in {result.hold} memory"
            listens = "".join(f", port {new} for {old}" for old, new in result.ports.items())
            output.say(f"{result.image}: {result.name}, pid {result.pid}, {since}, {held}{listens}")


def _list(pool: list[TargetInfo], as_json: bool) -> None:
    from woodfrog.image.inspect import human_bytes

    if as_json:
        output.print_json([target.to_dict() for target in pool])
        return
    rows = [(target.image, str(target.pid), target.hold, human_bytes(target.gpu_bytes)) for target in pool]
    output.table(("image", "pid", "held in", "GPU memory"), rows, right=(1, 3))
