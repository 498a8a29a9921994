"""`woodfrog inspect`: what is in an image, and whether it could be restored here."""

from __future__ import annotations

from typing import Annotated

import typer

from woodfrog.cli import output, picture
from woodfrog.cli.options import ImageArgument, JsonOption, StoreOption


def inspect(
    image: ImageArgument,
    show_picture: Annotated[
        bool,
        typer.Option(
            "--picture/--no-picture",
            help="Which ranges other images of the store share, which are new and which zero (reads all manifests).",
        ),
    ] = True,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show what an image holds, which of it other images share, and what speaks for and against restoring it here."""
    with output.reported(as_json):
        from woodfrog import api, store_api
        from woodfrog.doctor import machine
        from woodfrog.image import compatibility
        from woodfrog.image import inspect as image_inspect

        with api.open_image(image, store=store) as opened:
            manifest = opened.manifest
            path = opened.path
        drawn = store_api.picture(image, store=store) if show_picture else None
        findings = compatibility.judge(manifest, machine.facts())
        if as_json:
            judged = [
                {"severity": f.severity.value, "field": f.field, "reason": f.reason, "advice": f.advice}
                for f in findings
            ]
            shown = {} if drawn is None else {"picture": drawn.to_dict()}
            output.print_json({**image_inspect.summary(manifest), "path": path, **shown, "compatibility": judged})
            return
        for what, value in image_inspect.lines(manifest):
            output.say(f"{what:>14}  {image_inspect.printable(value)}")
        output.say(f"{'path':>14}  {image_inspect.printable(path)}")
        if manifest.phases:
            output.say("")
            output.phase_table({phase.name: phase.seconds for phase in manifest.phases})
        output.say("")
        if drawn is not None:
            picture.show(drawn)
        if not findings:
            output.say("It can be restored here.")
        for finding in findings:
            advice = f" ({finding.advice})" if finding.advice else ""
            output.say(f"{finding.severity.value}: {image_inspect.printable(finding.reason, 400)}{advice}")
