"""`woodfrog ps`: the targets that the daemon knows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from woodfrog.cli import output
from woodfrog.cli.options import JsonOption

if TYPE_CHECKING:
    from woodfrog.results import TargetInfo


def ps(as_json: JsonOption = False) -> None:
    """List the targets that can be checkpointed, and their state."""
    with output.reported(as_json):
        from woodfrog import api
        from woodfrog.image.inspect import human_bytes

        targets = api.ps()
        if as_json:
            output.print_json([target.to_dict() for target in targets])
            return
        rows = [
            (
                ",".join(map(str, target.gpu_pids or [target.pid])),
                target.name or "-",
                state_of(target),
                human_bytes(target.gpu_bytes),
                ",".join(map(str, target.devices)) or "-",
                "yes" if target.managed else "driver-only",
                target.command,
            )
            for target in targets
        ]
        output.table(("pid", "name", "state", "GPU memory", "GPUs", "managed", "command"), rows, right=(0, 3))


def state_of(target: TargetInfo) -> str:
    """The state, and what a person would want to know beside it."""
    from woodfrog.image.inspect import human_bytes

    if target.operation.startswith("migrating"):
        return target.operation
    if target.hosted_bytes:
        return f"{target.state}, {human_bytes(target.hosted_bytes)} on host memory"
    return target.state
