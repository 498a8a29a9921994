"""Every target through every operation: its results must equal those of an uninterrupted run, to the last bit.

Uninterrupted runs of all targets, without woodfrog, go first and side by side. Then each target runs under woodfrog and
goes, one after the other, through

* suspend_resume    taken off the GPU and given back
* leave_running     checkpointed with its CPU side while it runs on
* stop_restore      checkpointed, ended, restored in a new process, which runs to the end
* image_restored    the image of leave_running restored in its turn: it repeats the steps from there to the end

After each, the steps that follow are compared with the uninterrupted run's, and at the end the digest of the whole
state. A target that fails one operation starts afresh for the others, so one failure is counted once.

summary: equal, attempted, and `<target>` (operations whose results were equal)
"""

from __future__ import annotations

import concurrent.futures
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import harness
import target_process
import woodfrog_calls
from target_process import TargetRun

MODES = ("suspend_resume", "leave_running", "stop_restore", "image_restored")


@dataclass(frozen=True)
class Case:
    """A target of the matrix: how long it runs, and how slowly, so that each operation meets it at work."""

    name: str
    steps: int
    pace_ms: int
    options: tuple[str, ...]
    quick: tuple[str, ...]
    program: str = ""  # where it is not the name

    @property
    def target(self) -> str:
        """The program in bench/targets."""
        return self.program or self.name

    @property
    def can_be_held(self) -> bool:
        """Whether it takes --hold: the programs in Python do. The others are small, and outlast their images."""
        return (target_process.TARGETS / f"{self.target}.py").exists()

    def argv(self, quick: bool, *, paced: bool) -> list[str]:
        """Its options; the pace changes no result."""
        options = [*(self.quick if quick else self.options), "--steps", str(self.steps)]
        return [*options, "--pace-ms", str(self.pace_ms)] if paced else options


CASES = (
    Case("driver_api", 120, 40, ("--state-gib", "1"), ("--state-gib", "0.05")),
    Case("heat", 120, 40, ("--state-gib", "1"), ("--state-gib", "0.05")),
    Case("md", 120, 30, ("--state-gib", "0.5"), ("--state-gib", "0.02")),
    Case("decode_graphs", 400, 15, ("--state-gib", "8"), ("--state-gib", "0.5")),
    Case("train_gpt2", 120, 100, ("--state-gib", "16"), ("--state-gib", "1", "--batch", "2", "--sequence", "64")),
    Case("resnet50", 60, 60, ("--batch", "32"), ("--batch", "8")),
    # As most programs do it: the workers are forked when CUDA is in use already, and inherit its files.
    Case(
        "resnet50_forked",
        60,
        60,
        ("--batch", "32", "--workers-start", "after"),
        ("--batch", "8", "--workers-start", "after"),
        "resnet50",
    ),
)


class DifferenceError(Exception):
    """The results after an operation are not those of the uninterrupted run."""


class Walk:
    """One run of a target under woodfrog on its way through the operations."""

    def __init__(self, case: Case, run: TargetRun, reference: target_process.Log, hold: Path | None) -> None:
        self.case = case
        self.run = run
        self.reference = reference
        self.hold = hold
        self.image: str | None = None  # of leave_running
        self.images: list[str] = []

    def perform(self, mode: str) -> dict[str, Any]:
        """Does one operation to the running target; returns what is to be said about it in a row."""
        import woodfrog

        if mode == "suspend_resume":
            suspend = woodfrog_calls.timed(woodfrog.suspend, self.run.handle)
            resume = woodfrog_calls.timed(woodfrog.resume, self.run.handle)
            return {"suspend": suspend.members(), "resume": resume.members()}
        if mode == "leave_running":
            taken = woodfrog_calls.timed(woodfrog.checkpoint, self.run.handle, stop=False, cpu=True)
            self.image = str(taken.result.image)
            self.images.append(self.image)
            return {"checkpoint": taken.members(), "image_bytes": taken.result.bytes}
        if mode == "stop_restore":
            taken = woodfrog_calls.timed(woodfrog.checkpoint, self.run.handle, stop=True, cpu=True)
            self.images.append(str(taken.result.image))
            return {
                "checkpoint": taken.members(),
                "restore": self._restore(self.images[-1]),
                "image_bytes": taken.result.bytes,
            }
        if self.image is None:
            raise DifferenceError("there is no image of a leave-running checkpoint to restore")
        return {"restore": self._restore(self.image)}

    def _restore(self, image: str) -> dict[str, Any]:
        import woodfrog

        self.run.wait_ended()
        restored = woodfrog_calls.timed(woodfrog.restore, image)
        self.run.adopt(restored.result)
        details = getattr(restored.result, "details", None)
        return {"call_s": restored.call_s, "phases_s": dict(getattr(details, "phases", {}))}

    def let_run(self, fifths: int) -> None:
        """The target may make so many fifths of its steps, so that it cannot end while an image is written."""
        if self.hold is None:
            return
        if fifths >= 5:
            self.hold.unlink(missing_ok=True)
            return
        following = self.hold.with_suffix(".next")
        following.write_text(str(self.case.steps * fifths // 5))
        following.rename(self.hold)

    def check(self, first: int, last: int) -> None:
        """Raises DifferenceError unless the steps from ``first`` to ``last`` are the uninterrupted run's."""
        difference = target_process.steps_differ(self.reference, self.run.log, first, last)
        if difference:
            raise DifferenceError(difference)

    def check_end(self) -> None:
        """Waits for the end; raises DifferenceError unless all steps and the digest are the uninterrupted run's."""
        self.run.wait_done()
        self.check(1, self.case.steps)
        difference = target_process.ends_differ(self.reference, self.run.log)
        if difference:
            raise DifferenceError(difference)

    def remove_images(self) -> None:
        """Deletes what was checkpointed."""
        for image in self.images:
            woodfrog_calls.remove_image(image)


def walk_modes(results: harness.Results, walk: Walk, modes: Sequence[str], on_end: Callable[[str], None]) -> str | None:
    """Takes the target through ``modes`` until one fails; returns that one. ``on_end`` hears of the equal ones."""
    steps = walk.case.steps
    mode = modes[0]
    try:
        walk.run.wait_start()
        for number, mode in enumerate(modes):
            last = number + 1 == len(modes) or modes[number + 1] == "image_restored"
            if mode == "image_restored":
                if walk.image is None:
                    return None
                before = walk.run.log.last_step
            else:
                walk.run.wait_step(max(2, steps * (number + 1) // 5))
                walk.run.log.read()
                before = walk.run.log.last_step
            row = walk.perform(mode)
            walk.let_run(5 if last else number + 3)
            if last or mode == "image_restored":
                walk.check_end()
            else:
                walk.run.wait_step(before + max(3, steps // 10))
                walk.check(1, walk.run.log.last_step)
            results.add(target=walk.case.name, mode=mode, equal=True, at_step=before, **row)
            on_end(mode)
    except Exception as failure:  # noqa: BLE001 (a target that fails must not cost the others their row)
        results.add(
            target=walk.case.name, mode=mode, equal=False, target_alive=walk.run.alive(),
            **harness.error_members(failure),
        )  # fmt: skip
        return mode
    return None


def run_references(cases: Sequence[Case], work: Path, quick: bool) -> dict[str, target_process.Log | str]:
    """The logs of uninterrupted runs, all at the same time; a text says why there is none."""

    def reference(case: Case) -> target_process.Log | str:
        try:
            with target_process.plain(
                case.target, case.argv(quick, paced=False), work, f"reference-{case.name}"
            ) as run:
                run.wait_start(300.0)
                run.wait_done()
                return run.log
        except Exception as failure:  # noqa: BLE001 (as above)
            return f"{type(failure).__name__}: {failure}"

    with concurrent.futures.ThreadPoolExecutor(len(cases)) as pool:
        return dict(zip([case.name for case in cases], pool.map(reference, cases), strict=True))


def main() -> int:
    """Returns the exit status: 0 if every operation of every target gave equal results."""
    parser = harness.parser(__doc__ or "", budget_s=420)
    parser.add_argument("--targets", nargs="+", default=[case.name for case in CASES])
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--separate", action="store_true", help="a fresh run of the target for each operation")
    arguments = parser.parse_args()
    cases = [case for case in CASES if case.name in arguments.targets]

    results = harness.Results("targets")
    budget = harness.Budget(arguments.budget_s)
    references = run_references(cases, arguments.work, arguments.quick)
    equal: dict[str, int] = {case.name: 0 for case in cases}
    attempted = 0
    for case in cases:
        reference = references[case.name]
        if isinstance(reference, str):
            results.add(target=case.name, mode="uninterrupted", equal=False, error=reference)
            attempted += 1
            continue
        left = [mode for mode in MODES if mode in arguments.modes]
        while left:
            if not budget.allows(20.0):
                results.add(target=case.name, not_measured=left, error="the time budget was used up")
                break
            modes = left[:1] if arguments.separate else left
            label = f"matrix-{case.name}-{modes[0]}"
            options = case.argv(arguments.quick, paced=True)
            hold = arguments.work / f"{label}.hold" if case.can_be_held else None
            if hold is not None:
                options += ["--hold", str(hold)]
                hold.write_text(str(case.steps * 2 // 5))
            with target_process.interposed(case.target, options, arguments.work, label) as run:
                walk = Walk(case, run, reference, hold)
                ended: list[str] = []
                failed = walk_modes(results, walk, modes, ended.append)
            walk.remove_images()
            equal[case.name] += len(ended)
            attempted += len(ended) + (failed is not None)
            done = {*ended, failed} if failed else set(modes)
            left = [mode for mode in left if mode not in done]
            if "image_restored" in left and "leave_running" not in left:
                left.remove("image_restored")  # it needs the image of the same run
                results.add(target=case.name, not_measured=["image_restored"], error=f"{failed} failed before it")
    results.summary.update({**equal, "equal": sum(equal.values()), "attempted": attempted})
    harness.finish(results, {name: f"{len(arguments.modes)}" for name in equal})
    for row in results.rows:
        if row.get("equal") is False:
            print(f"FAILED {row['target']} {row['mode']}: {row['error']}")
    return 0 if attempted and attempted == sum(equal.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
