"""`woodfrog verify`: hash an image from end to end."""

from __future__ import annotations

from woodfrog.cli import output
from woodfrog.cli.options import ImageArgument, JsonOption, StoreOption


def verify(image: ImageArgument, store: StoreOption = None, as_json: JsonOption = False) -> None:
    """Hash every byte of an image and compare it with its manifest."""
    with output.reported(as_json):
        from woodfrog import api
        from woodfrog.image.inspect import human_bytes

        with output.progress("verify", as_json=as_json) as on_event:
            result = api.verify(image, store=store, on_event=on_event)
        if as_json:
            output.print_json({**result.to_dict(), "verified": True})
            return
        rate = result.bytes / result.seconds if result.seconds > 0 else 0.0
        output.say(
            f"{result.image}: {human_bytes(result.bytes)} verified in {result.seconds:.2f} s ({human_bytes(rate)}/s)"
        )
