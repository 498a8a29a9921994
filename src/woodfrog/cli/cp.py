"""`woodfrog cp`: copy an image from one store into another. Also what `push` and `pull` tell of a copy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from woodfrog.cli import output
from woodfrog.cli.options import CompressOption, ImageArgument, JsonOption, StoreOption

if TYPE_CHECKING:
    from woodfrog.store.copying import CopyResult


def cp(
    image: ImageArgument,
    to: Annotated[
        str, typer.Argument(metavar="STORE", help="A directory, ram:NAME or s3://BUCKET/PREFIX; made if need be.")
    ],
    name: Annotated[
        str | None, typer.Option("--name", help="Make it the next image of that name there (default: as it is).")
    ] = None,
    compress: CompressOption = "auto",
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Copy an image into another store: only chunks that are absent there are moved. It keeps its name and number
    unless --name is given."""
    with output.reported(as_json):
        from woodfrog import store_api

        with output.progress("cp", as_json=as_json) as on_event:
            result = store_api.copy(image, to, store=store, name=name, compress=compress, on_event=on_event)
        tell(result, to, as_json)


def tell(result: CopyResult, to: str, as_json: bool) -> None:
    """What a copy did."""
    from dataclasses import asdict

    from woodfrog.image.inspect import human_bytes

    if as_json:
        output.print_json({**asdict(result), "store": to})
    elif result.already_there:
        output.say(f"{result.reference} is in {to} already")
    else:
        moved = f"{result.copied_chunks} of {result.chunks} chunks, {human_bytes(result.copied_bytes)}"
        output.say(f"{result.reference} is in {to}: {moved} were absent there")
