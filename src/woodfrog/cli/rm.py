"""`woodfrog rm`: remove images."""

from __future__ import annotations

from typing import Annotated

import typer

from woodfrog.cli import completion, output
from woodfrog.cli.options import JsonOption, StoreOption


def rm(
    images: Annotated[
        list[str], typer.Argument(metavar="IMAGE…", help="NAME@NUMBER each.", autocompletion=completion.images)
    ],
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Remove images for good. A bare NAME removes only if it has just one image."""
    removed: list[str] = []
    with output.reported(as_json):
        from woodfrog import api
        from woodfrog.errors import WoodfrogError

        for image in images:
            try:
                removed.append(api.rm(image, store=store))
            except WoodfrogError as error:
                error.details["removed"] = removed
                raise
            if not as_json:
                output.say(f"removed {removed[-1]}")
        if as_json:
            output.print_json({"removed": removed})
