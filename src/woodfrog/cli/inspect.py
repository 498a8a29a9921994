"""`woodfrog inspect`: what is in an image, and whether it could be restored here."""

from __future__ import annotations

from woodfrog.cli import output
from woodfrog.cli.options import ImageArgument, JsonOption, StoreOption


def inspect(image: ImageArgument, store: StoreOption = None, as_json: JsonOption = False) -> None:
    """Show what an image holds, and what speaks for and against restoring it here."""
    with output.reported(as_json):
        from woodfrog import api
        from woodfrog.doctor import machine
        from woodfrog.image import compatibility
        from woodfrog.image import inspect as image_inspect

        with api.open_image(image, store=store) as opened:
            manifest = opened.manifest
            path = str(opened.path)
        findings = compatibility.judge(manifest, machine.facts())
        if as_json:
            judged = [
                {"severity": f.severity.value, "field": f.field, "reason": f.reason, "advice": f.advice}
                for f in findings
            ]
            output.print_json({**image_inspect.summary(manifest), "path": path, "compatibility": judged})
            return
        for what, value in image_inspect.lines(manifest):
            output.say(f"{what:>14}  {image_inspect.printable(value)}")
        output.say(f"{'path':>14}  {image_inspect.printable(path)}")
        if manifest.phases:
            output.say("")
            output.phase_table({phase.name: phase.seconds for phase in manifest.phases})
        output.say("")
        if not findings:
            output.say("It can be restored here.")
        for finding in findings:
            advice = f" ({finding.advice})" if finding.advice else ""
            output.say(f"{finding.severity.value}: {image_inspect.printable(finding.reason, 400)}{advice}")
