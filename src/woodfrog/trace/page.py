"""A trace as one HTML page that needs nothing else: no script, no file, no network."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from html import escape

from woodfrog.trace.record import Sample, Trace
from woodfrog.trace.text import MIB, listed, seconds

WIDTH, LEFT = 1100, 150  # of the drawing, and of the names beside it, in pixels
LANE = 22
GRAPH = 120
COLOURS = ("#3b7dd8", "#d8703b", "#4a9d5b", "#8a5bc4", "#b5892f", "#c44f6b", "#4ba3a3", "#777777")
_STYLE = """
body { font: 14px/1.45 system-ui, sans-serif; margin: 2em auto; max-width: 1300px; padding: 0 1em; color: #222 }
h1 { font-size: 1.3em } h2 { font-size: 1.1em; margin-top: 1.6em } svg text { font-size: 11px }
table { border-collapse: collapse } td, th { padding: .15em .8em .15em 0; text-align: left; vertical-align: top }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums } code { font-size: .92em }
@media (prefers-color-scheme: dark) { body { background: #181818; color: #ddd } svg text { fill: #ddd } }
"""


def page(trace: Trace) -> str:
    """The whole document."""
    parts = [
        f"<h1>Process {trace.pid}: <code>{escape(trace.command[:300])}</code></h1>",
        f"<p>{escape(', '.join(trace.gpus))}" + (f", driver {escape(trace.driver)}" if trace.driver else "") + "</p>",
        "<h2>Timeline</h2>",
        _timeline(trace),
        _table(
            ("step", "took", "state afterwards", ""),
            [(step.name, seconds(step.took_s), step.state, step.error) for step in trace.steps],
            {1},
        ),
        _saved(trace),
        _calls(trace),
        _holdings(trace),
        "<h2>What could not be seen</h2><ul>",
        *(f"<li>{escape(sentence)}</li>" for sentence in trace.unseen),
        "</ul>",
    ]
    head = f'<meta charset="utf-8"><title>Process {trace.pid}</title><style>{_STYLE}</style>'
    return f"<!doctype html><html><head>{head}</head><body>{''.join(parts)}</body></html>\n"


def _timeline(trace: Trace) -> str:
    ends = [step.begun_s + step.took_s for step in trace.steps] + [sample.time_s for sample in trace.samples]
    whole_s = max(ends, default=0.0) or 1e-9

    def x(time_s: float) -> float:
        return LEFT + time_s / whole_s * (WIDTH - LEFT)

    shapes = []
    for number, step in enumerate(trace.steps):
        colour = "#c0392b" if step.error else COLOURS[number % len(COLOURS)]
        shapes.append(
            _bar(x(step.begun_s), 2, x(step.begun_s + step.took_s), colour, f"{step.name}: {seconds(step.took_s)}")
        )
        shapes.append(f'<text x="{x(step.begun_s) + 3:.1f}" y="{LANE - 7}" fill="white">{escape(step.name)}</text>')
    lanes = list(dict.fromkeys(call.thread for call in trace.long_calls))
    kinds = list(dict.fromkeys(call.kind for call in sorted(trace.long_calls, key=lambda call: -call.took_s)))
    for call in trace.long_calls:
        top = LANE * (1 + lanes.index(call.thread)) + 2
        colour = COLOURS[min(kinds.index(call.kind), len(COLOURS) - 1)]
        shapes.append(
            _bar(x(call.begun_s), top, x(call.begun_s + call.took_s), colour, f"{call.kind}: {seconds(call.took_s)}")
        )
    labels = ["steps", *(f"{thread} {trace.threads.get(thread, '')}" for thread in lanes)]
    top = LANE * len(labels) + 10
    shapes += [f'<text x="0" y="{LANE * (index + 1) - 7}">{escape(label)}</text>' for index, label in enumerate(labels)]
    shapes.append(_graph(trace.samples, x, top))
    height = top + GRAPH + 20
    legend = "".join(
        f'<span style="color:{COLOURS[min(index, len(COLOURS) - 1)]}">■</span> {escape(kind)} &nbsp; '
        for index, kind in enumerate(kinds[: len(COLOURS)])
    )
    axis = f'<text x="{WIDTH}" y="{height - 3}" text-anchor="end">{whole_s:.3f} s</text>'
    return f'<svg width="{WIDTH}" height="{height}">{"".join(shapes)}{axis}</svg><p>{legend}</p>'


def _bar(left: float, top: float, right: float, colour: str, title: str) -> str:
    width = max(right - left, 0.6)
    return (
        f'<rect x="{left:.2f}" y="{top}" width="{width:.2f}" height="{LANE - 4}" fill="{colour}">'
        f"<title>{escape(title)}</title></rect>"
    )


def _graph(samples: Sequence[Sample], x: Callable[[float], float], top: int) -> str:
    curves = (
        ("anonymous", "#3b7dd8", [(one.time_s, one.anonymous_bytes) for one in samples]),
        ("file, shared", "#b5892f", [(one.time_s, one.file_bytes + one.shared_bytes) for one in samples]),
        ("GPU (NVML)", "#4a9d5b", [(one.time_s, one.gpu_bytes) for one in samples if one.gpu_bytes is not None]),
    )
    most = max((size for _, _, points in curves for _, size in points), default=0) or 1
    drawn = [f'<text x="0" y="{top + 12}">memory, up to {most // MIB} MiB</text>']
    for number, (name, colour, points) in enumerate(curves):
        if not points:
            continue
        line = " ".join(f"{x(time_s):.1f},{top + GRAPH - size / most * GRAPH:.1f}" for time_s, size in points)
        drawn.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        drawn.append(f'<text x="0" y="{top + 30 + 15 * number}" fill="{colour}" style="fill:{colour}">{name}</text>')
    return "".join(drawn)


def _saved(trace: Trace) -> str:
    saved = trace.saved
    if saved is None:
        return ""
    rows = [
        ("address", f"{saved.address:#x}"),
        ("size", f"{saved.size_bytes / MIB:,.1f} MiB"),
        ("in memory; in huge pages", f"{saved.resident_bytes // MIB:,} MiB; {saved.huge_bytes // MIB:,} MiB"),
        ("filled at", f"{saved.filled_bytes_per_s / 1e9:.2f} GB/s of the checkpoint"),
        (
            "copied at",
            f"{saved.copied_bytes_per_s / 1e9:.2f} GB/s without its populating" if saved.copied_bytes_per_s else "?",
        ),
        *((kind, f"{share:.1%} of {saved.sampled} blocks") for kind, share in saved.contents.items()),
    ]
    return "<h2>The saved state</h2>" + _table(("", ""), rows, set())


def _calls(trace: Trace) -> str:
    rows = [
        (step, kind.kind + (" (waits)" if kind.waits else ""), str(kind.count), seconds(kind.seconds))
        for step, kinds in trace.calls.items()
        for kind in kinds
    ]
    if not rows:
        return ""
    cost = f"<p>{trace.stops} stops for the tracing, {seconds(trace.stopped_s)} in all.</p>"
    return "<h2>System calls</h2>" + cost + _table(("step", "call", "number", "time"), rows, {2, 3})


def _holdings(trace: Trace) -> str:
    rows = [
        (holding.after, file.path, str(file.descriptors), str(file.mappings), f"{file.mapped_bytes / MIB:,.1f}")
        for holding in trace.holdings
        for file in holding.files
    ]
    if not rows:
        return ""
    seen = ", ".join(f"{holding.after}: {listed(holding)}" for holding in trace.holdings)
    return f"<h2>The driver's files</h2><p>By NVML: {escape(seen)}</p>" + _table(
        ("after", "file", "open", "mapped", "MiB"), rows, {2, 3, 4}
    )


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]], right: set[int]) -> str:
    def cells(row: Sequence[str], tag: str) -> str:
        return "".join(
            f"<{tag}{' class=n' if index in right else ''}>{escape(cell)}</{tag}>" for index, cell in enumerate(row)
        )

    body = "".join(f"<tr>{cells(row, 'td')}</tr>" for row in rows)
    return f"<table><tr>{cells(headings, 'th')}</tr>{body}</table>"
