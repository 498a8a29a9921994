"""`woodfrog repair`: mend a store whose index or packs are damaged."""

from __future__ import annotations

import typer

from woodfrog.cli import output
from woodfrog.cli.options import JsonOption, StoreOption


def repair(store: StoreOption = None, as_json: JsonOption = False) -> None:
    """Rebuild a store's index from its packs and save what is intact in damaged ones. No image is removed; those that
    lost chunks are named, and the exit code is then 7."""
    with output.reported(as_json):
        from dataclasses import asdict

        from woodfrog import store_api
        from woodfrog.errors import ExitCode
        from woodfrog.image.inspect import printable

        with output.progress("repair", as_json=as_json) as on_event:
            report = store_api.repair(store=store, on_event=on_event)
        if as_json:
            output.print_json({**asdict(report), "all_well": report.all_well})
        else:
            for line in report.lines():
                output.say(printable(line, 400))
            if report.all_well:
                output.say("every image is whole")
            else:
                output.say("give up what cannot be saved with `woodfrog rm`, or `woodfrog pull` it from another store")
        if not report.all_well:
            raise typer.Exit(ExitCode.BAD_IMAGE)
