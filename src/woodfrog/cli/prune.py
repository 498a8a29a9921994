"""`woodfrog prune`: let old images go, and free what no image needs."""

from __future__ import annotations

from typing import Annotated

import typer

from woodfrog.cli import output
from woodfrog.cli.options import JsonOption, StoreOption


def prune(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="The --keep rules are for the images of this name only.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be done.")] = False,
    grace: Annotated[
        str | None,
        typer.Option(
            "--grace", metavar="TIME", help="Packs younger than this stay (default: 0 on this machine, 1h in S3)."
        ),
    ] = None,
    keep_last: Annotated[
        int | None, typer.Option("--keep-last", metavar="N", min=1, help="Remove all but the newest N of each name.")
    ] = None,
    keep_within: Annotated[
        str | None, typer.Option("--keep-within", metavar="TIME", help="Remove what is older, the newest apart: 7d.")
    ] = None,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Free the room of what no image needs; with --keep-last or --keep-within remove old images first. What either
    rule keeps stays, and so does the newest image of each name."""
    with output.reported(as_json):
        from woodfrog import store_api
        from woodfrog.cli.units import duration_s
        from woodfrog.errors import ExitCode
        from woodfrog.image.inspect import human_bytes

        with output.progress("prune", as_json=as_json) as on_event:
            result = store_api.prune(
                store=store,
                dry_run=dry_run,
                grace_s=None if grace is None else duration_s(grace, "--grace"),
                keep_last=keep_last,
                keep_within_s=None if keep_within is None else duration_s(keep_within, "--keep-within"),
                name=name,
                on_event=on_event,
            )
        if as_json:
            output.print_json(result.to_dict())
        else:
            would = "would be " if dry_run else ""
            for reference in result.removed:
                output.say(f"{would}removed: {reference}")
            for kept in result.retention.keep if result.retention is not None else ():
                output.say(f"{would}kept: {kept.entry.reference} ({kept.reason})")
            if dry_run:
                for pack in result.plan.packs:
                    if pack.action != "keep":
                        output.say(f"would {pack.action} {pack.key}: {human_bytes(pack.size_bytes)} ({pack.reason})")
            output.warn(result.plan.notes)
            rewritten = sum(1 for pack in result.plan.packs if pack.action == "rewrite")
            output.say(
                f"{human_bytes(result.plan.freed_bytes)} of {human_bytes(result.plan.size_bytes)} {would}freed"
                + (f", {rewritten} packs {would}rewritten" if rewritten else "")
            )
            output.warn(f"{reference}: {why}" for reference, why in result.errors.items())
        if result.errors:
            raise typer.Exit(ExitCode.FAILED)
