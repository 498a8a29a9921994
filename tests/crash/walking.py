"""Walking fault points: every one of an operation fires once, and after each the promise is checked.

The promise: the target runs on with right contents, or a complete image that verifies exists (a suspended target: its
data is there). Never neither, and never a half image that is accepted.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from product import Product, Stepper

from woodfrog.errors import NoDaemonError, RefusedError, WoodfrogError
from woodfrog.operations.fault_points import PHASES

# What each way through an operation passes; the others of its phases belong to another way.
WAYS: dict[str, tuple[str, tuple[str, ...]]] = {
    "checkpoint": ("checkpoint", tuple(phase for phase in PHASES["checkpoint"] if phase not in ("precopy", "end"))),
    "checkpoint and stop": (
        "checkpoint",
        tuple(
            phase
            for phase in PHASES["checkpoint"]
            if phase not in ("precopy", "snapshot", "capture", "restore", "return")
        ),
    ),
    "checkpoint with precopy": ("checkpoint", ("precopy",)),  # its other phases are those of "checkpoint"
    # Where it is other than "checkpoint".
    "checkpoint by copy-on-write": ("checkpoint", ("capture", "drain", "restore", "return", "write", "commit")),
    "suspend": ("suspend", PHASES["suspend"]),
    "resume": ("resume", PHASES["resume"]),
    "resume elsewhere": ("resume", ("refill", "control", "commit")),  # the rest is that of a resume
    "migrate": ("migrate", tuple(phase for phase in PHASES["migrate"] if phase != "precopy")),
    "migrate with precopy": ("migrate", ("precopy", "allocate")),
    "restore": ("restore", PHASES["restore"]),
    # Where they are other than a restore and a resume; and of data in GPU memory, than of data in the arena.
    "standby": ("standby", ("allocate", "refill", "connect", "commit")),
    "standby in device memory": ("standby", ("commit",)),
    "take": ("take", PHASES["take"]),
    "take from device memory": ("take", ("refill", "return")),
    "restore mapped": ("restore", ("allocate", "refill", "return", "commit")),
    "promote": ("promote", PHASES["promote"]),
    "standby in mapped memory": ("standby", ("commit",)),
    "take from mapped memory": ("take", ("refill", "commit", "return", "end")),
}


RESUMES = ("resume", "resume elsewhere")
FROM_IMAGE = tuple(
    way for way, (operation, _) in WAYS.items() if operation in ("restore", "standby", "take", "promote")
)


@dataclass(frozen=True)
class Point:
    """One fault point and what happens there."""

    name: str
    action: str

    def __str__(self) -> str:
        return f"{self.name}:{self.action}"


def points(way: str, before: str, after: str, phases: Iterable[str] | None = None) -> list[Point]:
    """A fault before and one after each phase of this way through an operation."""
    operation, passed = WAYS[way]
    chosen = passed if phases is None else phases
    return [
        Point(f"{operation}.{phase}.{side}", action)
        for phase, (side, action) in itertools.product(chosen, (("before", before), ("after", after)))
    ]


def environment(faults: Sequence[Point], state: Path) -> dict[str, str]:
    """What makes the daemon fail at each of these points, once."""
    state.mkdir(exist_ok=True)
    return {
        "WOODFROG_FAULTS": ",".join(map(str, faults)),
        "WOODFROG_FAULTS_STATE": str(state),
        "WOODFROG_SIMGPU_DEVICES": "2",
    }


def fired(state: Path) -> int:
    return len(list(state.iterdir()))


class Walker:
    """One target and one daemon, taken through an operation until every fault has fired and it succeeds."""

    def __init__(self, product: Product, faults: Sequence[Point], state: Path) -> None:
        self.product = product
        self.faults = faults
        self.state = state
        self.target = product.run("--idle-kib", "2048", "--pace-us", "2000")
        self.image = ""

    def walk(self, way: str) -> None:
        """Attempt it until it succeeds; every fault must have fired by then."""
        self.prepare(way)
        failures: list[str] = []
        for _ in range(len(self.faults) + 1):
            daemon = int(self._ask("ping")["pid"])
            failure: WoodfrogError | None = None
            try:
                self.make_ready(way)
                self.attempt(way)
            except NoDaemonError as lost:
                failure = lost
                self.product.wait_for_new_daemon(daemon)
            except WoodfrogError as raised:
                failure = raised
            failures.append(str(failure))
            self.check(way, failure)
            if failure is None:
                break
        assert fired(self.state) == len(self.faults), (sorted(path.name for path in self.state.iterdir()), failures)
        self.product.images()  # each verifies

    def prepare(self, way: str) -> None:
        """Once, before the first attempt."""
        if way in FROM_IMAGE:
            self.image = str(self.product.checkpoint(self.target, stop=True)["image"])
            # From here on the process with this number is one that was restored.
            self.target = Stepper(self.target.pid, self.target.log)

    def make_ready(self, way: str) -> None:
        """Bring the target into the state that the operation starts from, wherever the last attempt left it."""
        if way in FROM_IMAGE:
            if self.target.alive and not (way.startswith("take") and self._state() == "standby"):
                self._ask("standby_end")
                if self.target.alive:
                    self.product.end(self.target)
            if way.startswith("take") and not self.target.alive:
                self._fill_pool(way)
            return
        if not self.target.alive:  # a stop that had passed its commit point
            self.target = self.product.run("--idle-kib", "2048", "--pace-us", "2000")
        state = self._state()
        if way in RESUMES and state == "running":
            self.product.call("suspend", target=self.target.pid)
        if way not in RESUMES and state == "suspended":
            self.product.call("resume", target=self.target.pid)

    def attempt(self, way: str) -> None:
        """The operation, once."""
        if way.startswith("standby"):
            self._fill_pool(way)
        elif way in ("restore mapped", "promote"):
            self._restore_mapped()
        elif way in FROM_IMAGE:
            self.target = self.product.restore(self.image, self.target.log)
        elif way in ("suspend", "resume"):
            self.product.call(way, target=self.target.pid)
        elif way == "resume elsewhere" or way.startswith("migrate"):
            self._go_elsewhere(way)
        else:
            self.product.checkpoint(
                self.target,
                stop=way == "checkpoint and stop",
                precopy=way == "checkpoint with precopy",
                concurrent="cow" if way == "checkpoint by copy-on-write" else "auto",
            )

    def _go_elsewhere(self, way: str) -> None:
        """To whichever of the two GPUs it is not on."""
        verb, options = way.split()[0], {"precopy": True} if way.endswith("precopy") else {}
        for gpu in ("1", "0"):
            with contextlib.suppress(RefusedError):  # it is there already
                self.product.call(verb, target=self.target.pid, gpu_map={"0": gpu}, **options)
                return
        raise AssertionError("it can go to neither GPU")

    def _restore_mapped(self) -> None:
        result = self.product.call(
            "restore", image=self.image, store=str(self.product.store_path), mode="mapped", wait=True
        )
        self.target = self.product.restored(result, self.target.log)
        if result["promotion"]["state"] != "complete":
            raise WoodfrogError(result["promotion"]["reason"])

    def _fill_pool(self, way: str) -> None:
        hold = next((hold for hold in ("device", "mapped") if way.endswith(f"{hold} memory")), "host")
        self.product.call("standby", image=self.image, store=str(self.product.store_path), hold=hold)

    # ── the promise ─────────────────────────────────────────────────────────────────────────────────────────────

    def check(self, way: str, failure: WoodfrogError | None) -> None:
        """Whatever happened: the target is right, or an image is."""
        if way in FROM_IMAGE:
            self._check_restore(failure)
            return
        state = self._state()
        if state == "gone":
            assert way == "checkpoint and stop", f"the target is gone after {failure}"
            assert self._newest_image_is_of(self.target), f"neither target nor image after {failure}"
            return
        if state == "suspended":
            assert way == "suspend" or way in RESUMES
            return
        assert state == "running", f"the target is {state} after {failure}"
        self.target.wait_steps(1)
        self._check_lines()

    def _check_restore(self, failure: WoodfrogError | None) -> None:
        if self.target.alive and self._state() == "standby":
            self._check_lines()  # it waits: taking it once more is what comes next
        elif self.target.alive:
            self.target.wait_steps(1)
            self._check_lines()
        else:
            assert failure is not None
            assert self.image in self.product.images()

    def finish(self) -> None:
        """At the end the target still has every byte that it should."""
        self._leave_suspension()
        if not self.target.alive:
            newest = self.product.images()[-1]
            self.target = self.product.restore(newest, self.target.log)
        self.target.check_runs_right()
        left = [*self.product.runtime.glob("restore-*"), *self.product.runtime.glob("checkpoint-*")]
        assert left == [], "a killed daemon's folders, with the target's memory in them, are still there"

    def _leave_suspension(self) -> None:
        if self._state() == "standby":
            self.target = self.product.restore(self.image, self.target.log)
        if self._state() == "suspended":
            self.product.call("resume", target=self.target.pid)

    def _state(self) -> str:
        if not self.target.alive:
            return "gone"
        rows = [row for row in self._ask("ps") if row["pid"] == self.target.pid]
        return str(rows[0]["state"]) if rows else "unknown"

    def _ask(self, verb: str) -> Any:
        """An answer, of the next daemon if need be: one that goes on with a promotion meets its faults by itself."""
        for _ in self.faults:
            try:
                return self.product.call(verb)
            except NoDaemonError:
                self.product.wait_for_new_daemon(0)
        return self.product.call(verb)

    def _check_lines(self) -> None:
        wrong = [line for line in self.target.lines() if line.startswith("step ") and not line.endswith("errors 0")]
        assert not wrong, wrong[:3]

    def _newest_image_is_of(self, target: Stepper) -> bool:
        images = self.product.images()
        if not images:
            return False
        from woodfrog.image.repository import ImageRepository

        with ImageRepository(self.product.store_path).open(images[-1]) as image:
            return image.manifest.gpu_pid == target.pid
