"""`woodfrog checkpoint`: write an image of a running target."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from woodfrog.cli import output, periodic
from woodfrog.cli.options import JsonOption, StoreOption, TargetArgument, TimeoutOption

if TYPE_CHECKING:
    from woodfrog.results import CheckpointResult


def checkpoint(
    target: TargetArgument,
    stop: Annotated[bool, typer.Option("--stop", help="End the target once the image is durable.")] = False,
    cpu: Annotated[bool, typer.Option("--cpu/--no-cpu", help="With the CPU side (needed for a restore).")] = True,
    name: Annotated[str | None, typer.Option("--name", help="Name of the image (default: the target's).")] = None,
    compress: Annotated[
        str, typer.Option("--compress", metavar="METHOD", help="auto, none, lz4, zstd or zstd:LEVEL.")
    ] = "auto",
    incremental: Annotated[
        bool,
        typer.Option("--incremental/--full", help="Move only what the store does not have, or all of it, to compare."),
    ] = True,
    check_clean: Annotated[
        bool,
        typer.Option("--check-clean", help="Of a target run with --track: hash also what it cannot have written."),
    ] = False,
    concurrent: Annotated[
        str,
        typer.Option(
            "--concurrent",
            metavar="WAY",
            help="copy: the target runs on beside a copy in GPU memory; cow: its memory is captured while it runs "
            "(it waits where it writes first); stop: it waits for its data; auto.",
        ),
    ] = "auto",
    precopy: Annotated[
        bool, typer.Option("--precopy", help="Copy in rounds while it still runs, so that less is left once it waits.")
    ] = False,
    every: Annotated[
        str | None,
        typer.Option(
            "--every", metavar="TIME", help="Again and again, at most that often (5m), until the target ends."
        ),
    ] = None,
    max_overhead: Annotated[
        str,
        typer.Option("--max-overhead", metavar="P%", help="With --every: of the time the target may wait so much."),
    ] = "1%",
    keep_last: Annotated[
        int | None,
        typer.Option("--keep-last", metavar="N", min=1, help="With --every: remove all but the newest N images."),
    ] = None,
    store: StoreOption = None,
    timeout: TimeoutOption = 30.0,
    as_json: JsonOption = False,
) -> None:
    """Write an image of a running target; it runs on afterwards unless --stop is given."""
    with output.reported(as_json):
        from woodfrog import api
        from woodfrog.errors import UsageError
        from woodfrog.image.inspect import human_bytes

        options: dict[str, Any] = {
            "store": store,
            "name": name,
            "cpu": cpu,
            "timeout": timeout,
            "compress": compress,
            "incremental": incremental,
            "check_clean": check_clean,
            "concurrent": concurrent,
            "precopy": precopy,
        }
        if every is not None:
            if stop:
                raise UsageError("a target that is stopped cannot be checkpointed again", advice="leave out --stop")
            periodic.until_end(target, every, max_overhead, keep_last, as_json=as_json, **options)
            return
        if keep_last is not None:
            raise UsageError("--keep-last goes with --every", advice="`woodfrog prune --keep-last` removes old images")
        with output.progress("checkpoint", as_json=as_json) as on_event:
            result = api.checkpoint(target, stop=stop, on_event=on_event, **options)
        if as_json:
            output.print_json(result.to_dict())
            return
        output.phase_table(result.phases)
        output.warn(result.warnings)
        size = f"{human_bytes(result.gpu_bytes)} of GPU memory, {human_bytes(result.cpu_bytes)} of CPU side"
        new_bytes = result.gpu_new_bytes + result.cpu_new_bytes
        new = f"{human_bytes(new_bytes)} new, {human_bytes(result.stored_bytes)} stored"
        if result.tracked:
            output.say(_followed(result))
        ran_on = f"the target waited {result.stall_s:.3f} s and runs on"
        for device in result.concurrent if not result.stopped else ():
            if device["drained_bytes"] and device["copied_bytes"]:
                output.say(
                    f"GPU {device['device']}: a copy of {human_bytes(device['copied_bytes'])} of what was new fitted "
                    f"into its memory; the target waited for {human_bytes(device['drained_bytes'])} to drain"
                )
        if cow := result.copy_on_write:
            output.say(
                f"captured while it ran; {cow['waits']} of its calls waited for {human_bytes(cow['early_bytes'])}, "
                f"{cow['waited_s']:.3f} s together"
            )
        if result.retaken:
            output.warn([f"taken again while the target waited: {result.retaken['reason']}"])
        output.say(f"{result.image}: {size}; {new}; {'the target was stopped' if result.stopped else ran_on}")


def _followed(result: CheckpointResult) -> str:
    """What following the launches was good for, in a line."""
    from woodfrog.image.inspect import human_bytes

    launches = f"{result.covered_launches} of {result.launches} launches have a template"
    if result.unclean_reason:
        return f"everything was hashed: {result.unclean_reason}; {launches}"
    done = "is as it was, as it should be" if result.clean_checked else "was not hashed"
    return f"{human_bytes(result.clean_bytes)} that nothing can have written {done}; {launches}"
