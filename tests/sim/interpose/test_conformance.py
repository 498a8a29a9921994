"""An application sees the same results with the interposer as without it.

The same sequence of calls, chosen by hypothesis, is made by two processes on the simulated driver, one of them with the
interposer. What they print must be equal, line by line.
"""

from __future__ import annotations

import itertools
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import interposer_support as support
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

GRANULE = 2 << 20
# The driver takes memory for small allocations in units of its own choosing: the same amount in both processes, but
# perhaps in another order. This is how far free memory may differ while small allocations are alive.
SMALL_UNITS_BYTES = 3 * GRANULE


class Caller:
    """A process of programs/calls.cpp."""

    def __init__(self, program: Path, *, interposed: bool) -> None:
        self.process = subprocess.Popen(
            [program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=support.environment(
                {
                    "WOODFROG_SIMGPU_DEVICES": "2",
                    "WOODFROG_SIMGPU_MEMORY": "256MiB",
                    # A machine of its own: simulated GPUs are shared by the processes of one machine.
                    "WOODFROG_SIMGPU_MACHINE": f"conformance-{os.getpid()}-{next(_machines)}",
                },
                interposed=interposed,
            ),
        )

    def run(self, calls: list[str]) -> list[str]:
        """The printed line for each call."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write("".join(f"{call}\n" for call in calls))
        self.process.stdin.flush()
        lines = [self.process.stdout.readline().rstrip("\n") for _ in calls]
        assert self.process.poll() is None, f"it ended with {self.process.returncode} after {[x for x in lines if x]}"
        return lines

    def close(self) -> int:
        assert self.process.stdin is not None
        self.process.stdin.close()
        return self.process.wait(timeout=30)


class Pair:
    """A process without and one with the interposer, new ones after a difference: what went wrong may last."""

    def __init__(self, program: Path) -> None:
        self._program = program
        self._callers: list[Caller] = []

    def run(self, calls: list[str]) -> tuple[list[str], list[str]]:
        if not self._callers:
            self._callers = [Caller(self._program, interposed=interposed) for interposed in (False, True)]
        without, interposed = (caller.run(calls) for caller in self._callers)
        return without, interposed

    def discard(self) -> None:
        for caller in self._callers:
            caller.process.kill()
            caller.process.wait()
        self._callers = []

    def close(self) -> list[int]:
        return [caller.close() for caller in self._callers]


_machines = itertools.count()


@pytest.fixture(scope="module")
def pair(calls_program: Path) -> Iterator[Pair]:
    callers = Pair(calls_program)
    yield callers
    assert set(callers.close()) <= {0}


slot = st.integers(0, 7)
few = st.integers(0, 3)
size = st.one_of(
    st.sampled_from([0, 1, 255, 256, 512, 513, GRANULE - 1, GRANULE, GRANULE + 1, 5 << 20, 300 << 20, 1 << 60]),
    st.integers(1, 4096),
    st.integers(1, 12 << 20),
)
granules = st.integers(1, 3).map(lambda n: n * GRANULE)
context = st.integers(-2, 2)  # -1 and -2: the primary contexts of the two devices


def call(name: str, *parameters: st.SearchStrategy[int]) -> st.SearchStrategy[str]:
    return st.tuples(*parameters).map(lambda values: " ".join([name, *map(str, values)]))


allocation = st.one_of(
    call("alloc", slot, size),
    call("pitch", slot, st.integers(0, 5000), st.integers(0, 600), st.sampled_from([3, 4, 8, 16])),
)
plain = st.one_of(
    allocation,
    call("free", slot, st.just(0)),
    call("free_inside", slot, st.integers(1, 1 << 20)),
    call("free_ordered", slot),
    call("range", slot, st.integers(0, 1 << 21)),
    call("attributes", slot, st.integers(0, 1 << 24)),
    call("fill", slot, st.integers(0, 255)),
    call("copy", slot, slot),
    call("info", slot),
    call("managed", slot, st.integers(1, 1 << 20)),
    call("alloc_ordered", slot, st.integers(1, 1 << 20)),
    call("host", slot, st.integers(1, 1 << 16)),
    call("retain_plain", slot),
)
virtual = st.one_of(
    call("reserve", few, granules),
    call("unreserve", few),
    call("create", few, st.integers(0, 1), st.sampled_from([0, 1]), st.one_of(granules, st.just(4096))),
    call("release", few),
    call("map", few, few, granules),
    call("unmap", few),
    call("access", few, st.integers(0, 1), st.sampled_from([0, 1, 3])),
    call("properties", few),
    call("retain", few),
    call("share", few, few),
    call("fill_mapped", few, st.integers(0, 255)),
    call("attributes_mapped", few),
)
contexts = st.one_of(
    call("context", few, st.integers(0, 1)),
    call("use", context),
    call("no_context", few),
    call("destroy", few),
    call("reset_primary", st.integers(0, 1)),
    call("peer", context),
    call("no_peer", context),
)


def same(pair: Pair, calls: list[str]) -> None:
    """Runs the calls in both processes, each starting anew, and compares what they print."""
    try:
        without, interposed = pair.run(["reset", *calls, "reset"])
        for expected, found in zip(without, interposed, strict=True):
            used = [re.fullmatch(r"(info .* used )(-?\d+)", line) for line in (expected, found)]
            if used[0] and used[1] and used[0].group(1) == used[1].group(1):
                assert abs(int(used[0].group(2)) - int(used[1].group(2))) <= SMALL_UNITS_BYTES, (expected, found)
            else:
                assert found == expected
        assert interposed[-1] == "reset: device 1 leaks 0 device 0 leaks 0 "
    except BaseException:
        pair.discard()
        raise


quick = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
)


@quick
@given(calls=st.lists(plain, min_size=4, max_size=40))
def test_plain_allocations_look_the_same_to_the_application(pair: Pair, calls: list[str]) -> None:
    same(pair, calls)


@quick
@given(calls=st.lists(virtual, min_size=4, max_size=40))
def test_virtual_memory_calls_look_the_same_to_the_application(pair: Pair, calls: list[str]) -> None:
    same(pair, calls)


@quick
@given(calls=st.lists(st.one_of(plain, virtual, contexts), min_size=4, max_size=60))
def test_a_mixture_over_contexts_and_devices_looks_the_same_to_the_application(pair: Pair, calls: list[str]) -> None:
    same(pair, calls)


@quick
@given(
    mode=st.integers(0, 2),
    thread_mode=st.integers(0, 2),
    before=st.lists(allocation, max_size=6),
    calls=st.lists(
        st.one_of(allocation, call("free", slot, st.just(0)), call("free_inside", slot, st.integers(1, 4096))),
        min_size=1,
        max_size=12,
    ),
)
def test_calls_during_a_capture_look_the_same_to_the_application(
    pair: Pair, mode: int, thread_mode: int, before: list[str], calls: list[str]
) -> None:
    inside = [f"exchange {thread_mode}", f"capture {mode}", *calls, "end_capture 0", "exchange 0"]
    same(pair, [*before, *inside, *(f"attributes {number} 0" for number in range(8))])


def test_what_lies_in_a_context_that_lost_its_slot_is_no_leak(pair: Pair) -> None:
    # The second takes the first's slot; when it is destroyed the first is current again.
    same(pair, ["context 0 0", "context 0 0", "destroy 0", "alloc 0 1"])


def test_contents_survive_what_happens_around_them(pair: Pair) -> None:
    calls = []
    for number in range(8):
        calls += [f"alloc {number} {300 * 1024 * (number + 1)}", f"fill {number} {number + 1}"]
    for number in range(0, 8, 2):
        calls += [f"free {number} 0", f"alloc {number} {(number + 1) * 700_000}", f"fill {number} {100 + number}"]
    calls += [f"sum {number}" for number in range(8)]
    same(pair, calls)


def test_memory_runs_out_and_is_whole_again_as_without_the_interposer(pair: Pair) -> None:
    calls = [f"alloc {number} {48 << 20}" for number in range(8)]
    calls += [f"free {number} 0" for number in range(0, 8, 2)]
    calls += [f"alloc {number} {30 << 20}" for number in range(8, 16)]
    calls += ["info 0"]
    same(pair, calls)
