"""`woodfrog diff`: what changed from one image to another."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from woodfrog.cli import completion, output
from woodfrog.cli.options import JsonOption, StoreOption

if TYPE_CHECKING:
    from woodfrog.image.diff import ImageDiff


def diff(
    before: Annotated[
        str, typer.Argument(metavar="A", help="An image, as for inspect.", autocompletion=completion.images)
    ],
    after: Annotated[
        str, typer.Argument(metavar="B", help="The image to compare it with.", autocompletion=completion.images)
    ],
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show which allocations and which processes' memory differ between two images, how much and where. Only manifests
    are read: a byte that differs shows as its whole chunk."""
    with output.reported(as_json):
        from woodfrog import store_api

        found = store_api.diff(before, after, store=store)
        if as_json:
            output.print_json(found.to_dict())
        elif found.same:
            output.say(f"{found.before} and {found.after} are the same, byte for byte")
        else:
            _show(found)


def _show(found: ImageDiff) -> None:
    from woodfrog.cli import picture
    from woodfrog.image.diff import ASCII_MARKS, MARKS
    from woodfrog.image.inspect import human_bytes

    marks = MARKS if picture.unicode_output() else ASCII_MARKS
    counts = ", ".join(
        f"{count} {state}"
        for state in ("same", "changed", "added", "removed", "unknown")
        if (count := found.count(state))
    )
    output.say(f"{found.before} → {found.after}" if marks is MARKS else f"{found.before} -> {found.after}")
    output.say(
        f"GPU memory: {human_bytes(found.gpu_changed_bytes)} of {human_bytes(found.gpu_bytes)} changed, "
        f"{human_bytes(found.gpu_new_bytes)} in chunks that {found.before} does not have; "
        f"allocations: {counts or 'none'}"
    )
    differing = [one for one in found.allocations if one.state != "same"]
    largest = sorted(differing, key=lambda one: (-one.changed_bytes, one.address))[: picture.ROWS]
    if largest:
        rows = [
            (
                f"{one.address:#x}",
                str(one.device),
                human_bytes(one.size_bytes),
                one.state,
                human_bytes(one.changed_bytes),
                picture.line(one.spans, one.size_bytes, marks),
            )
            for one in largest
        ]
        output.say("")
        output.table(("allocation", "GPU", "size", "state", "changed", "where"), rows, right=(1, 2, 4))
        picture.left_out("allocation", len(differing) - len(largest))
    output.say("")
    rows = [
        (
            "tree" if one.pid is None else str(one.pid),
            one.state,
            human_bytes(one.changed_bytes),
            human_bytes(one.new_bytes),
            ", ".join(file.path for file in one.files if file.state != "same"),
            one.command,
        )
        for one in found.processes
    ]
    output.table(("process", "state", "changed", "of it new", "CRIU's files", "command"), rows, right=(0, 2, 3))
