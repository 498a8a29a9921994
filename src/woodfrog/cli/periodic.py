"""`woodfrog checkpoint --every`: what it tells while it goes on, and how it ends.

With --json each line of stdout is a document: one a round (`checkpoint` or `error`), and last the `summary`.
"""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Any

from woodfrog.cli import output

if TYPE_CHECKING:
    from woodfrog.periodic.loop import Made


def until_end(
    target: str,
    every: str,
    max_overhead: str,
    keep_last: int | None,
    *,
    store: str | None,
    name: str | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Go on until the target ends, Ctrl-C, or SIGTERM (which is taken as Ctrl-C)."""
    from woodfrog.cli.units import duration_s, fraction
    from woodfrog.periodic.loop import checkpoint_every

    interval_s = duration_s(every, "--every")
    overhead = fraction(max_overhead, "--max-overhead")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with output.progress("checkpoint", as_json=as_json) as on_event:
        summary = checkpoint_every(
            target,
            interval_s,
            max_overhead=overhead,
            keep_last=keep_last,
            store=store,
            name=name,
            on_event=on_event,
            on_round=lambda made: _tell(made, as_json),
            **options,
        )
    if as_json:
        output.print_json({"summary": summary.to_dict()})
        return
    why = "the target ended" if summary.ended else "interrupted between checkpoints; the target runs on"
    newest = f", the newest {summary.images[-1]}" if summary.images else ""
    failed = f", {summary.failures} failed" if summary.failures else ""
    share = summary.stall_s / summary.elapsed_s if summary.elapsed_s > 0 else 0.0
    output.say(
        f"{why}: {len(summary.images)} checkpoints{newest}{failed}; "
        f"the target waited {summary.stall_s:.3f} s, {share:.2%} of the time"
    )


def _tell(made: Made, as_json: bool) -> None:
    from woodfrog.image.inspect import human_bytes

    if as_json:
        output.print_json(made.to_dict())
        return
    following = f"the next in {made.next_in_s:.0f} s"
    if made.result is not None:
        result = made.result
        output.warn(result.warnings)
        new = human_bytes(result.gpu_new_bytes + result.cpu_new_bytes)
        output.say(
            f"{result.image}: {new} new, {human_bytes(result.stored_bytes)} stored in {made.total_s:.1f} s; "
            f"the target waited {result.stall_s:.3f} s; {following}"
        )
    elif made.error is not None:
        output.report(made.error, as_json)
        output.say(f"trying again: {following}")
    for reference in made.removed:
        output.say(f"removed {reference}")
    output.warn(f"old images were not removed this time: {note}" for note in made.notes)
