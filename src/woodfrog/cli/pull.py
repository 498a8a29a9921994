"""`woodfrog pull`: copy an image from another store into the one here."""

from __future__ import annotations

from typing import Annotated

import typer

from woodfrog.cli import output
from woodfrog.cli.cp import tell
from woodfrog.cli.options import CompressOption, JsonOption, StoreOption


def pull(
    image: Annotated[
        str, typer.Argument(metavar="IMAGE", help="NAME@NUMBER, or NAME for the newest, in the other store.")
    ],
    source: Annotated[str, typer.Argument(metavar="STORE", help="A directory, ram:NAME or s3://BUCKET/PREFIX.")],
    compress: CompressOption = "auto",
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Copy an image of another store into --store, where it keeps its name and number. Only chunks that are absent
    here are moved."""
    with output.reported(as_json):
        from woodfrog import store_api
        from woodfrog.store.open import default_place

        with output.progress("pull", as_json=as_json) as on_event:
            result = store_api.pull(image, source, store=store, compress=compress, on_event=on_event)
        tell(result, default_place() if store is None else store, as_json)
