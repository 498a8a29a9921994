"""From a restore's call to the first token of a model server: the modes and standby, images in memory and on a disk.

A server takes a request once it runs (SIGUSR1 after the call has returned) and answers with its first token; what the
same server needs for that when it runs anyway (the forward pass) is measured before and taken off where it says so.

* standby_first_token_ms       of the model of GPT-2-large class, data held in GPU memory: beyond the forward pass;
                               standby_host_first_token_ms: held in the arena; standby_mapped_first_token_ms: in host
                               memory that the server runs on until its data has moved to the GPU
* mapped_first_token_ms        after a restore with --mode mapped, beyond the forward pass; ordered_…: with --mode
                               ordered (the restores before have left a profile); eager_…: for comparison
* mapped_settled_s             from the call until all data is on the GPU, while the server answers; ordered_…, eager_…
* mapped_longest_pause_ms      of the server by a promotion, the worst of all repetitions
* eager_over_floor             the restore's call over CRIU's and the driver's own restore, without woodfrog, of the
                               same program with next to no data, or over the bytes at the speed of pinned copies,
                               whichever is larger; the worse of the models, image in memory
* eager_over_own_floor         the same over a restore by woodfrog of that program (phases cpu and control), where many
                               threads fill the memory that CRIU would read with one
* speedup_vs_driver            first token after a restore of the same program without woodfrog: the driver's checkpoint
                               of all data, CRIU, and back (driver_and_criu.py), over eager
* speedup_vs_fresh_start       first token of the program started anew (its weights are made on the GPU, not read from
                               anywhere), over eager. standby_speedup_… likewise, over standby held in GPU memory

The last two are of the largest model that was measured; with the model's name behind, of that one. On a machine without
a GPU: the simulated driver's folder in LD_LIBRARY_PATH and --quick.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import driver_and_criu
import driver_baseline
import harness
import target_process
import woodfrog_calls

GOALS = {"standby_first_token_ms": "<= 100", "eager_over_floor": "<= 1.1"}
FORWARDS = 5  # forward passes of the running server that are measured


@dataclass(frozen=True)
class Way:
    """A mode of restore, or with `standby` a hold; how long one takes without the data, until the process has ended."""

    name: str
    expected_s: float
    standby: bool = False

    @property
    def label(self) -> str:
        return f"standby {self.name}" if self.standby else self.name


EAGER = Way("eager", 3.0)
MAPPED, ORDERED = Way("mapped", 4.5), Way("ordered", 4.5)
HELD = Way("device", 4.0, standby=True), Way("host", 4.0, standby=True)
HELD_MAPPED = Way("mapped", 5.0, standby=True)


@dataclass(frozen=True)
class Model:
    """A server: the target's name, its options, and about how large its data is."""

    label: str
    target: str
    options: tuple[str, ...]
    gib: float


@dataclass
class Measured:
    """What is known of one model; seconds."""

    forward_s: float = 0.0
    gpu_bytes: int = 0
    fresh_s: float = 0.0
    driver_s: float = 0.0
    eager_call_s: list[float] = field(default_factory=list)
    eager_s: list[float] = field(default_factory=list)
    standby_s: dict[str, list[float]] = field(default_factory=dict)
    mode_s: dict[str, list[float]] = field(default_factory=dict)  # to the first token, by mode or hold
    settled_s: dict[str, list[float]] = field(default_factory=dict)  # until all data is on the GPU
    longest_pause_s: float = 0.0


def models(*, quick: bool) -> tuple[Model, list[Model]]:
    """One with next to no data, and those that are measured, the most important one first."""
    if quick:
        small = ("--burst", "1", "--state-gib")
        return Model("floor", "sparse_writes", (*small, "0.001"), 0.001), [
            Model("large", "sparse_writes", (*small, "0.03125"), 0.03125),
            Model("8b", "sparse_writes", (*small, "0.0625"), 0.0625),
        ]
    serving = ("--burst", "1", "--tokens-in", "128", "--tokens-out", "1")
    return Model("floor", "serve_transformer", (*serving, "--layers", "1", "--width", "512"), 0.01), [
        # 0.77 billion parameters in float32, as GCROP's largest model: 3.1 GB.
        Model("large", "serve_transformer", (*serving, "--layers", "14", "--width", "2048", "--dtype", "float32"), 2.9),
        Model("8b", "serve_transformer", serving, 15.6),
    ]


def first_token_s(target: target_process.TargetRun, begin_s: float) -> float:
    """Sends a request; seconds from that moment to the end of the step that answers it."""
    target.wait_more_steps(0)  # its log is read up to here
    answered = len(target.log.lines) + 1
    os.kill(target.pid, signal.SIGUSR1)
    target.wait_lines(answered)
    return float(target.log.lines[-1]["time_s"]) - begin_s


def end(target: target_process.TargetRun) -> None:
    """Ends a restored target and waits until its process number is free."""
    target.handle.kill()
    target.wait_ended()


def forget_cached(folder: Path) -> None:
    """The kernel's copies of these files in memory are dropped, so that they are read from the disk."""
    os.sync()
    for path in folder.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            try:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)


class Coldstart:
    """All measurements; each part has a row whatever becomes of it."""

    def __init__(self, results: harness.Results, budget: harness.Budget, arguments: Any) -> None:
        self.results = results
        self.budget = budget
        self.arguments = arguments
        self.failures: list[str] = []
        self.measured: dict[str, Measured] = {}
        self.floor_s = 0.0
        self.own_floor_s = 0.0
        self.ceiling: driver_baseline.Ceiling | None = None

    def attempt(self, part: str, model: Model, expected_s: float, measure: Any) -> None:
        """`measure`, if the budget has room for it; a failure costs only this part."""
        if not self.budget.allows(expected_s):
            self.results.add(kind=part, model=model.label, not_measured="the time budget was used up")
            return
        begin_s = time.monotonic()
        try:
            measure()
        except Exception as failure:  # noqa: BLE001 (one part that fails must not cost the others their measurement)
            self.failures.append(f"{part}, {model.label}: {failure}")
            self.results.add(kind=part, model=model.label, **harness.error_members(failure))
        print(f"{part}, {model.label}: {time.monotonic() - begin_s:.1f} s", flush=True)
        self.summarise()

    # ── parts ───────────────────────────────────────────────────────────────────────────────────────────────────

    def own_floor(self, model: Model) -> None:
        """A restore by woodfrog with next to no data."""
        import woodfrog

        values = []
        with self._stopped(model, "coldstart-floor") as (target, image):
            for repetition in range(self.arguments.repetitions):
                call = woodfrog_calls.timed(woodfrog.restore, image, standby=False)
                phases = self._adopt(target, call)
                pages_wait_s = call.result.details.pages_wait_s  # it is no part of what CRIU itself needs
                values.append(phases["cpu"] - pages_wait_s + phases["control"])
                self.results.add(
                    kind="own floor", repetition=repetition, cpu_and_control_s=values[-1], pages_wait_s=pages_wait_s,
                    phases_s=phases,
                )  # fmt: skip
                end(target)
            woodfrog.rm(image)
        self.own_floor_s = harness.median(values)

    def woodfrog(self, model: Model, ways: Sequence[Way], disk: Path | None = None) -> None:
        """These ways from memory; with `disk`, from there."""
        import woodfrog

        with self._stopped(model, f"coldstart-{model.label}") as (target, image):
            store: Path | None = None
            if disk is not None:
                woodfrog.push(image, disk)
                store = disk
            for way in ways:
                self._way(target, model, image, way, store)
            if disk is not None:
                shutil.rmtree(disk)
            woodfrog.rm(image)

    def _way(self, target: target_process.TargetRun, model: Model, image: str, way: Way, store: Path | None) -> None:
        """Its repetitions, as far as the time allows; the first tells how long the others take."""
        import woodfrog

        tier = "ram" if store is None else "disk"
        expected_s = 0.5 if self.arguments.quick else way.expected_s + 0.2 * model.gib
        for repetition in range(self.repetitions(way)):
            if not self.budget.allows(expected_s):
                self.results.add(
                    kind="woodfrog", model=model.label, way=way.label, tier=tier, repetition=repetition,
                    not_measured="the time budget was used up",
                )  # fmt: skip
                return
            begin_s = time.time()
            more: dict[str, Any] = {}
            if way.standby:
                woodfrog.standby(image, hold=way.name)
                more["standby_made_s"] = time.time() - begin_s
            if store is not None:
                forget_cached(store)
            self._restore(target, model, image, way, repetition, tier=tier, store=store, **more)
            end(target)
            expected_s = time.time() - begin_s

    def fresh(self, model: Model) -> None:
        """The program started anew: its first step comes without a request."""
        begin_s = time.time()
        with target_process.plain(
            model.target, model.options, self.arguments.work, f"coldstart-fresh-{model.label}"
        ) as target:
            target.wait_start()
            target.wait_step(1)
            seconds = float(target.log.lines[0]["time_s"]) - begin_s
        self.measured.setdefault(model.label, Measured()).fresh_s = seconds
        self.results.add(kind="fresh start", model=model.label, first_token_s=seconds)

    def floor(self, model: Model) -> None:
        """CRIU's and the driver's restore with next to no data, without woodfrog."""
        rows = self._driver_and_criu("floor", model, self.arguments.repetitions)
        if rows:
            self.floor_s = harness.median([back.criu_s + back.driver_restore_s for _, back in rows])

    def driver(self, model: Model) -> None:
        """The driver and CRIU alone, without woodfrog."""
        rows = self._driver_and_criu("driver and CRIU", model, self.arguments.driver_repetitions)
        if rows:
            self.measured.setdefault(model.label, Measured()).driver_s = harness.median(
                [seconds for seconds, _ in rows]
            )

    def _driver_and_criu(self, kind: str, model: Model, repetitions: int) -> list[tuple[float, driver_and_criu.Back]]:
        """Restores without woodfrog: seconds to the first token, and of the parts. None if there is no room."""
        data_bytes = int(model.gib * harness.GIB)
        try:
            driver_and_criu.require_room(data_bytes)
        except driver_and_criu.NoRoomError as failure:
            self.results.add(kind=kind, model=model.label, not_measured=str(failure))
            return []
        label = f"coldstart-{kind.partition(' ')[0]}-{model.label}"
        rows: list[tuple[float, driver_and_criu.Back]] = []
        with (
            driver_and_criu.session() as reaper,
            target_process.plain(model.target, model.options, self.arguments.work, label) as target,
        ):
            target.wait_start()
            target.wait_step(1)
            with driver_and_criu.saved(target, model.label, data_bytes) as image:
                for repetition in range(repetitions):
                    if rows and not self.budget.allows(rows[-1][0] + 3):
                        break
                    handle, back = driver_and_criu.restore(reaper, image)
                    target.adopt(handle)
                    rows.append((first_token_s(target, back.begin_s), back))
                    end(target)
                    self.results.add(
                        kind=kind, model=model.label, repetition=repetition, first_token_s=rows[-1][0],
                        saved={**asdict(image), "folder": ""}, **asdict(back),
                    )  # fmt: skip
        return rows

    def repetitions(self, way: Way) -> int:
        """Fewer of what has no goal: the time on a GPU is short."""
        most = self.arguments.repetitions
        return most if way.name in ("eager", "device", "host") else min(3, most)

    # ── shared ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _stopped(self, model: Model, label: str) -> Any:
        return _Stopped(self, model, label)

    def running(self, model: Model, target: target_process.TargetRun) -> None:
        """The forward pass of a server that runs."""
        target.wait_start()
        target.wait_step(1)
        seconds = [first_token_s(target, time.time()) for _ in range(FORWARDS)]
        if model.label != "floor":
            self.measured.setdefault(model.label, Measured()).forward_s = harness.median(seconds)
        self.results.add(kind="forward pass", model=model.label, **harness.Spread.of(seconds).members("forward_s"))

    def _adopt(self, target: target_process.TargetRun, call: woodfrog_calls.Timed) -> dict[str, float]:
        target.adopt(call.result)
        return {name: round(seconds, 6) for name, seconds in call.result.details.phases.items()}

    def _restore(
        self, target: target_process.TargetRun, model: Model, image: str, way: Way, repetition: int, *, tier: str,
        store: Path | None = None, **more: Any,
    ) -> None:  # fmt: skip
        """One restore to its first token, and until its data is on the GPU."""
        import woodfrog

        mine = self.measured.setdefault(model.label, Measured())
        mode = "eager" if way.standby else way.name
        call = woodfrog_calls.timed(woodfrog.restore, image, store=store, standby=way.standby, mode=mode)
        phases = self._adopt(target, call)
        details = call.result.details
        if (found := details.standby or details.mode) != way.name:
            raise target_process.TargetError(f"wanted {way.label}, and the restore was {found}")
        seconds = first_token_s(target, call.begin_s)
        settled_s = call.call_s
        if details.promotion is not None:
            promotion = woodfrog.promotion(target.pid, wait=True)
            if promotion.state != "complete":
                raise target_process.TargetError(f"its data did not move to the GPU: {promotion.reason}")
            settled_s = promotion.ended_unix_s - call.begin_s
            more["promotion"] = promotion.to_dict()
            mine.longest_pause_s = max(mine.longest_pause_s, promotion.longest_pause_s)
        mine.gpu_bytes = details.bytes
        if tier == "ram" and repetition:  # the first one populates the arena
            if way.standby:
                mine.standby_s.setdefault(way.name, []).append(seconds)
            else:
                mine.mode_s.setdefault(way.name, []).append(seconds)
                mine.settled_s.setdefault(way.name, []).append(settled_s)
            if way is EAGER:
                mine.eager_s.append(seconds)
                mine.eager_call_s.append(call.call_s)
        self.results.add(
            kind="woodfrog", model=model.label, way=way.label, tier=tier,
            repetition=repetition, first_token_s=seconds, beyond_forward_s=seconds - mine.forward_s,
            settled_s=settled_s, call_s=call.call_s, pages_wait_s=details.pages_wait_s, phases_s=phases,
            gpu_bytes=details.bytes, cpu_bytes=details.cpu_bytes, **more,
        )  # fmt: skip

    def summarise(self) -> None:
        """The summary of what has been measured so far."""
        summary = self.results.summary
        worst: dict[str, float] = {}
        for label, mine in self.measured.items():
            suffix = "" if label == "large" else f"_{label}"
            for hold, values in mine.standby_s.items():
                name = f"standby{'' if hold == 'device' else f'_{hold}'}_first_token_ms{suffix}"
                summary[name] = 1000 * (harness.median(values) - mine.forward_s)
            for mode, values in mine.mode_s.items():
                summary[f"{mode}_first_token_ms{suffix}"] = 1000 * (harness.median(values) - mine.forward_s)
                summary[f"{mode}_settled_s{suffix}"] = harness.median(mine.settled_s[mode])
            if mine.longest_pause_s:
                summary[f"mapped_longest_pause_ms{suffix}"] = 1000 * mine.longest_pause_s
            for name, floor_s in (("floor", self.floor_s), ("own_floor", self.own_floor_s)):
                if mine.eager_call_s and self.ceiling is not None and floor_s:
                    least_s = max(floor_s, mine.gpu_bytes / self.ceiling.h2d_bytes_per_s)
                    ratio = harness.median(mine.eager_call_s) / least_s
                    summary[f"eager_over_{name}{suffix or '_large'}"] = ratio
                    worst[name] = max(ratio, worst.get(name, 0.0))
            if mine.eager_s:
                eager_s = harness.median(mine.eager_s)
                device_s = harness.median(mine.standby_s["device"]) if "device" in mine.standby_s else 0.0
                for against, seconds in (("driver", mine.driver_s), ("fresh_start", mine.fresh_s)):
                    for name, divisor in (("speedup", eager_s), ("standby_speedup", device_s)):
                        if seconds and divisor:
                            summary[f"{name}_vs_{against}"] = seconds / divisor
                            summary[f"{name}_vs_{against}_{label}"] = seconds / divisor
        for name, ratio in worst.items():
            summary[f"eager_over_{name}"] = ratio


class _Stopped:
    """A target under woodfrog that is measured while it runs and then checkpointed and stopped; with its image."""

    def __init__(self, bench: Coldstart, model: Model, label: str) -> None:
        self._bench = bench
        self._model = model
        self._context = target_process.interposed(model.target, model.options, bench.arguments.work, label)

    def __enter__(self) -> tuple[target_process.TargetRun, str]:
        import woodfrog

        target = self._context.__enter__()
        try:
            self._bench.running(self._model, target)
            image = woodfrog.checkpoint(target.handle, stop=True, compress="none").image
            target.wait_ended()
        except BaseException:
            self._context.__exit__(*sys.exc_info())
            raise
        assert image is not None
        return target, image

    def __exit__(self, *raised: Any) -> None:
        import woodfrog

        try:
            woodfrog.end_standby()
        finally:
            self._context.__exit__(*raised)


def parts(bench: Coldstart, arguments: Any) -> Iterable[tuple[str, Model, float, Any]]:
    """What is measured, the most important first: name, model, the seconds until its first row, and how. A server of
    PyTorch needs some 10 s to start, and one second more for every GiB of its weights."""
    floor, models_here = models(quick=arguments.quick)
    wanted = [model for model in models_here if model.label in arguments.models]
    disk = arguments.disk

    def seconds(starts: float, model: Model, per_gib: float) -> float:
        return starts * (0.05 if arguments.quick else 1.0) + per_gib * model.gib

    yield "floor", floor, seconds(20, floor, 0), lambda: bench.floor(floor)
    yield "own floor", floor, seconds(18, floor, 0), lambda: bench.own_floor(floor)
    for model in wanted:
        yield "woodfrog", model, seconds(20, model, 1.5), lambda model=model: bench.woodfrog(model, (EAGER, *HELD))
        yield "fresh start", model, seconds(12, model, 1), lambda model=model: bench.fresh(model)
        yield "driver and CRIU", model, seconds(18, model, 4), lambda model=model: bench.driver(model)
    for model in wanted[:1]:
        more = (MAPPED, ORDERED, HELD_MAPPED)
        yield "woodfrog", model, seconds(20, model, 1.5), lambda model=model, more=more: bench.woodfrog(model, more)
    for model in wanted:
        ways = (EAGER, MAPPED, ORDERED)
        yield (
            "woodfrog from disk", model, seconds(25, model, 3),
            lambda model=model, ways=ways: bench.woodfrog(model, ways, disk),
        )  # fmt: skip


def main() -> int:
    """Returns the exit status: 0 if eager and standby restores of the first model were measured."""
    parser = harness.parser(__doc__ or "", budget_s=480)
    parser.add_argument("--repetitions", type=int, default=4, help="the first is not in the summary")
    parser.add_argument("--driver-repetitions", type=int, default=3, help="of restores by the driver and CRIU alone")
    parser.add_argument("--models", nargs="+", choices=("large", "8b"), default=["large", "8b"])
    parser.add_argument("--disk", type=Path, default=harness.REPOSITORY / "build" / "bench-disk-images")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.repetitions, arguments.driver_repetitions = 2, 2

    bench = Coldstart(harness.Results("coldstart"), harness.Budget(arguments.budget_s), arguments)
    bench.ceiling = driver_baseline.copy_ceiling((64 << 20) if arguments.quick else 4 * harness.GIB)
    bench.results.summary |= bench.ceiling.members()
    for part, model, expected_s, measure in parts(bench, arguments):
        bench.attempt(part, model, expected_s, measure)
    harness.finish(bench.results, GOALS, bench.failures)
    wanted = {"standby_first_token_ms", "eager_over_floor"}
    return 0 if wanted <= bench.results.summary.keys() else 1


if __name__ == "__main__":
    sys.exit(main())
