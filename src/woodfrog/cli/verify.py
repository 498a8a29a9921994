"""`woodfrog verify`: hash an image, or a whole store, from end to end."""

from __future__ import annotations

from typing import Annotated

import typer

from woodfrog.cli import completion, output
from woodfrog.cli.options import JsonOption, StoreOption


def verify(
    image: Annotated[
        str | None,
        typer.Argument(
            metavar="[IMAGE]",
            help="NAME@NUMBER, NAME for the newest, or STORE/NAME@NUMBER; without it, the whole store.",
            autocompletion=completion.images,
        ),
    ] = None,
    sample: Annotated[
        str | None,
        typer.Option("--sample", metavar="P%", help="Of a whole store, read only so many of the chunks, at random."),
    ] = None,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Hash every byte of an image and compare it with its manifest; without IMAGE every pack and every image of a
    store. Exit code 7 if anything is wrong."""
    with output.reported(as_json):
        from woodfrog import api
        from woodfrog.errors import UsageError
        from woodfrog.image.inspect import human_bytes

        if image is None:
            _whole_store(store, sample, as_json)
            return
        if sample is not None:
            raise UsageError("--sample is for a whole store", advice="leave the image or --sample out")
        with output.progress("verify", as_json=as_json) as on_event:
            result = api.verify(image, store=store, on_event=on_event)
        if as_json:
            output.print_json({**result.to_dict(), "verified": True})
            return
        rate = result.bytes / result.seconds if result.seconds > 0 else 0.0
        output.say(
            f"{result.image}: {human_bytes(result.bytes)} verified in {result.seconds:.2f} s ({human_bytes(rate)}/s)"
        )


def _whole_store(store: str | None, sample: str | None, as_json: bool) -> None:
    from dataclasses import asdict

    from woodfrog import store_api
    from woodfrog.cli.units import fraction
    from woodfrog.errors import ExitCode
    from woodfrog.image.inspect import printable
    from woodfrog.store.open import default_place

    place = default_place() if store is None else store
    part = 1.0 if sample is None else fraction(sample, "--sample")
    with output.progress("verify", as_json=as_json) as on_event:
        problems = store_api.verify_store(store=place, sample=part, on_event=on_event)
    if as_json:
        found = [asdict(problem) for problem in problems]
        output.print_json({"store": place, "sample": part, "verified": not problems, "problems": found})
    else:
        for problem in problems:
            output.say(f"{problem.kind}: {problem.where}: {printable(problem.reason, 400)}")
        read = "all chunks" if part >= 1 else f"{part:.3g} of the chunks" if part > 0 else "no chunk"
        if problems:
            output.say(f"{place}: {len(problems)} problems ({read} read); `woodfrog repair` saves what can be saved")
        else:
            output.say(f"{place}: nothing is wrong ({read} read)")
    if problems:
        raise typer.Exit(ExitCode.BAD_IMAGE)
