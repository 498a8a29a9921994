"""`woodfrog images`: what a store holds."""

from __future__ import annotations

from typing import Annotated

import typer

from woodfrog.cli import output
from woodfrog.cli.options import JsonOption, StoreOption


def images(
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="Only the images of this name.")] = None,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """List the images of a store; damaged ones are shown with their reason."""
    with output.reported(as_json):
        from woodfrog import api
        from woodfrog.image.inspect import human_bytes, iso_time

        found = api.images(name, store=store)
        if as_json:
            output.print_json([image.to_dict() for image in found])
            return
        rows = [
            (image.reference, "-", "-", "-", "-", f"damaged: {image.error}")
            if image.error is not None
            else (
                image.reference,
                iso_time(image.created_unix_s),
                human_bytes(image.gpu_bytes),
                human_bytes(image.cpu_bytes),
                human_bytes(image.stored_bytes),
                f"{image.kind}, {'ran on' if image.leave_running else 'stopped'}",
            )
            for image in found
        ]
        output.table(("image", "created", "GPU memory", "CPU side", "stored", "what"), rows, right=(2, 3, 4))
