"""A trace as plain text: lines for a terminal, without colours."""

from __future__ import annotations

from collections.abc import Iterator

from woodfrog.trace.record import Holdings, Trace

BAR_CHARACTERS = 48
TOP_KINDS = 8
LEAST_S = 0.0005  # of a kind of call that is worth a line
MIB = 1 << 20


def lines(trace: Trace) -> Iterator[str]:
    """All of it."""
    yield f"process {trace.pid}: {trace.command}"
    if trace.gpus:
        yield f"  {', '.join(trace.gpus)}" + (f", driver {trace.driver}" if trace.driver else "")
    yield ""
    yield from _timeline(trace)
    yield from _memory(trace)
    yield from _saved(trace)
    yield from _holdings(trace)
    yield from _calls(trace)
    yield "What could not be seen:"
    yield from (f"  {sentence}" for sentence in trace.unseen)


def seconds(value: float) -> str:
    """With a unit that fits."""
    if value >= 1:
        return f"{value:.2f} s"
    return f"{value * 1e3:.1f} ms" if value >= 1e-3 else f"{value * 1e6:.0f} µs"


def _timeline(trace: Trace) -> Iterator[str]:
    if not trace.steps:
        return
    begin_s = trace.steps[0].begun_s
    whole_s = max(step.begun_s + step.took_s for step in trace.steps) - begin_s or 1e-9
    width = max(len(step.name) for step in trace.steps)
    for step in trace.steps:
        first = min(int((step.begun_s - begin_s) / whole_s * BAR_CHARACTERS), BAR_CHARACTERS - 1)
        length = max(1, min(round(step.took_s / whole_s * BAR_CHARACTERS), BAR_CHARACTERS - first))
        bar = (" " * first + "█" * length).ljust(BAR_CHARACTERS)
        failed = f"  FAILED: {step.error}" if step.error else ""
        yield f"  {step.name:{width}}  {bar}  {seconds(step.took_s):>9}  → {step.state}{failed}"
    yield ""


def _memory(trace: Trace) -> Iterator[str]:
    if not trace.samples:
        return
    yield "Memory in MiB:   anonymous      file    shared       GPU"
    marks = [0.0, *(step.begun_s + step.took_s for step in trace.steps)]
    for name, mark_s in zip(["before", *(step.name for step in trace.steps)], marks, strict=True):
        one = min(trace.samples, key=lambda sample: abs(sample.time_s - mark_s))
        gpu = "?" if one.gpu_bytes is None else str(one.gpu_bytes // MIB)
        yield (
            f"  {name[:13]:13}  {one.anonymous_bytes // MIB:10}{one.file_bytes // MIB:10}"
            f"{one.shared_bytes // MIB:10}{gpu:>10}"
        )
    yield ""


def _saved(trace: Trace) -> Iterator[str]:
    saved = trace.saved
    if saved is None:
        return
    yield (
        f"The saved state: {saved.size_bytes // MIB} MiB at {saved.address:#x}, "
        f"{saved.resident_bytes // MIB} MiB in memory, {saved.huge_bytes // MIB} MiB of it in huge pages"
    )
    if saved.filled_bytes_per_s:
        copied = (
            f", {saved.copied_bytes_per_s / 1e9:.2f} GB/s without its populating" if saved.copied_bytes_per_s else ""
        )
        yield f"  filled at {saved.filled_bytes_per_s / 1e9:.2f} GB/s{copied}"
    shares = ", ".join(f"{kind} {share:.1%}" for kind, share in saved.contents.items() if share)
    yield f"  contents of {saved.sampled} blocks of 4 KiB: {shares}"
    yield ""


def _holdings(trace: Trace) -> Iterator[str]:
    if not trace.holdings:
        return
    yield "The driver's files in the process (open, mapped, MiB mapped), and whether NVML lists it:"
    for holding in trace.holdings:
        total = [
            sum(getattr(file, name) for file in holding.files) for name in ("descriptors", "mappings", "mapped_bytes")
        ]
        yield f"  {holding.after:16} {total[0]:6} {total[1]:6} {total[2] // MIB:8}  {listed(holding)}"
    yield ""


def listed(holding: Holdings) -> str:
    """Whether NVML lists the process, in a word."""
    return {None: "?", True: "listed", False: "not listed"}[holding.listed]


def _calls(trace: Trace) -> Iterator[str]:
    if not any(trace.calls.values()):
        return
    cost = f"{trace.stops} stops, {seconds(trace.stopped_s)}"
    for helped in trace.copies:
        yield f"{helped.threads} threads helped with {helped.copied_bytes / MIB:,.1f} MiB of the driver's copies."
    yield f"The driver's system calls, of {len(trace.threads)} threads (tracing cost {cost}):"
    for name, kinds in trace.calls.items():
        busy = [one for one in kinds if not one.waits]
        total_s = sum(one.seconds for one in busy)
        yield f"  {name}: {sum(one.count for one in busy)} calls, {seconds(total_s)}"
        for one in busy[:TOP_KINDS]:
            if one.seconds >= LEAST_S:
                yield f"    {seconds(one.seconds):>9}  {one.count:6} of {one.kind}"
    yield ""
