"""`woodfrog restore`: bring an image back as a running process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from woodfrog.cli import instances, output
from woodfrog.cli.instances import (
    BindOption,
    EnvironmentOption,
    HookOption,
    HookTimeoutOption,
    NameOption,
    NamespaceOption,
    PortOption,
)
from woodfrog.cli.options import GpuOption, ImageArgument, JsonOption, StoreOption, gpu_mapping

if TYPE_CHECKING:
    from woodfrog.results import PromotionResult


def restore(
    image: ImageArgument,
    gpu: GpuOption = None,
    mode: Annotated[
        str,
        typer.Option(
            "--mode",
            help="When the target runs: eager (its data is on the GPU), mapped (before; the data follows), or ordered "
            "(so that what it uses follows first).",
        ),
    ] = "eager",
    wait: Annotated[bool, typer.Option("--wait", help="Return once all data is on the GPU (mapped, ordered).")] = False,
    verify: Annotated[bool, typer.Option("--verify", help="Hash the memory again once it is in place.")] = False,
    standby: Annotated[
        bool, typer.Option("--standby/--no-standby", help="Take a standby process of the image if there is one.")
    ] = True,
    new_pid_namespace: NamespaceOption = False,
    name: NameOption = None,
    port: PortOption = None,
    bind: BindOption = None,
    env: EnvironmentOption = None,
    hook: HookOption = None,
    hook_timeout: HookTimeoutOption = None,
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
                image,
                gpu_map=gpu_map,
                mode=mode,
                wait=wait,
                store=store,
                verify=verify,
                standby=standby,
                new_pid_namespace=new_pid_namespace,
                name=name,
                ports=instances.ports(port),
                binds=instances.pairs("--bind", bind, ":"),
                env=instances.pairs("--env", env, "="),
                hook=hook,
                hook_timeout=hook_timeout,
                on_event=on_event,
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
        listens = "".join(f", port {new} for {old}" for old, new in details.ports.items())
        output.say(f"{target.name}: pid {target.pid}, {size}{taken}{checked}{listens}; output in {target.log}")
        if details.promotion is not None:
            output.say(promotion_line(details.promotion))


def promotion_line(promotion: PromotionResult) -> str:
    """What a person is told of the way of the memory to the GPU."""
    from woodfrog.image.inspect import human_bytes

    if promotion.state == "running":
        return f"{human_bytes(promotion.total_bytes)} on host memory move to the GPU while it runs; see `woodfrog ps`"
    moved = f"{human_bytes(promotion.moved_bytes)} moved to the GPU in {promotion.seconds:.2f} s"
    pauses = f"{promotion.batches} pauses, {promotion.longest_pause_s * 1000:.1f} ms the longest"
    left = f"; {human_bytes(promotion.left_bytes)} stay on host memory" if promotion.left_bytes else ""
    return f"{moved} ({pauses}){left}"
