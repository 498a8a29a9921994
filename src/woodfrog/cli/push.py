"""`woodfrog push`: copy an image from the store here into another one."""

from __future__ import annotations

from typing import Annotated

import typer

from woodfrog.cli import output
from woodfrog.cli.cp import tell
from woodfrog.cli.options import CompressOption, ImageArgument, JsonOption, StoreOption


def push(
    image: ImageArgument,
    to: Annotated[
        str, typer.Argument(metavar="STORE", help="A directory, ram:NAME or s3://BUCKET/PREFIX; made if need be.")
    ],
    compress: CompressOption = "auto",
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Copy an image of --store into another store, where it keeps its name and number. Only chunks that are absent
    there are moved, and a push that was cut off goes on where it was."""
    with output.reported(as_json):
        from woodfrog import store_api

        with output.progress("push", as_json=as_json) as on_event:
            result = store_api.push(image, to, store=store, compress=compress, on_event=on_event)
        tell(result, to, as_json)
