"""What the driver's calls of a handover and a return cost, by how many handles there are, and what they may be asked
for together.

`calls`: export, unmap, release, import, map, set access within one process (targets/handover_calls.cpp), for 50 to
2000 handles of 2 to 32 MiB (and a few large ones): mapped in ranges of their own or side by side in one, unmapped and
opened one by one (`each`) or in one call over many whole mappings (`all`), on 1 to 8 threads; besides those, what it
takes to pass the descriptors on once and to close them.

`ahead`: exports while the process gives the GPU work: what they cost that.

`hold`: the driver checkpoints and restores a process whose memory is exported to this one and is released; released
with its own descriptors open; unmapped with its handles kept; mapped. What the driver's calls take then, how much GPU
memory is free meanwhile, what the way back costs, whether the contents are right, and whether a kept handle is still
the memory that the descriptors stand for.

summary: for 2000 handles of 8 MiB, us_<call>_<layout>_<how>_<threads> a handle; handover_ms, return_ms as woodfrog
made them at first (own ranges, each, one thread) and best_…, the best of all ways; checkpoint_ms_<state> and
back_ms_<state>; wrong (goal: 0).

On a machine without a GPU: put the simulated driver's folder into LD_LIBRARY_PATH and use --quick.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from typing import Any, NamedTuple

import driver_baseline
import harness
import target_process

GOALS = {"wrong": "0"}
MIB = 2**20
SPARE_BYTES = 4 * harness.GIB
END_TIMEOUT_S = 20.0
HANDOVER = ("export", "unmap", "release")
RETURN = ("import", "map", "access")
CALLS = (*HANDOVER, *RETURN, "properties", "first_map", "first_access", "create", "close", "close_copies", "pass")


class Way(NamedTuple):
    """One way to make the calls."""

    handles: int
    mib: int
    threads: int
    layout: str
    how: str


STANDARD = [(1, "own", "each"), (1, "one", "each"), (1, "one", "all")]
WAYS = [
    *(Way(2000, 8, *way) for way in STANDARD),
    *(Way(2000, 8, threads, *way) for threads in (2, 4, 8) for way in (("own", "each"), ("one", "all"))),
    *(Way(handles, 8, *way) for handles in (500, 50) for way in STANDARD),
    *(Way(2000, mib, *way) for mib in (2, 32) for way in (STANDARD[0], STANDARD[2])),
    Way(64, 256, 1, "one", "all"),
    Way(8, 2048, 1, "one", "all"),
]
QUICK_WAYS = [Way(20, 2, *way) for way in [*STANDARD, (2, "own", "each"), (2, "one", "all")]]
# handles, MiB, the state they are held in, threads of the way back
HOLDS = [
    (500, 8, "released", 1),
    (500, 8, "released", 4),
    (500, 8, "released_open", 1),
    (500, 8, "unmapped", 1),
    (500, 8, "mapped", 1),
    (2000, 8, "released", 1),
]
QUICK_HOLDS = [(20, 2, state, 1) for state in ("released", "released_open", "unmapped", "mapped")]


class Program:
    """A running handover_calls."""

    def __init__(self) -> None:
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._process = subprocess.Popen(
            target_process.command("handover_calls", str(theirs.fileno())),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1, pass_fds=[theirs.fileno()],
        )  # fmt: skip
        theirs.close()
        hello = self._answer()
        self.pid = int(hello["pid"])
        self.free_bytes = int(hello["free_bytes"])

    def ask(self, *words: object) -> dict[str, Any]:
        """The answer to a command."""
        self.tell(*words)
        return self._answer()

    def tell(self, *words: object) -> None:
        """A command whose answer comes later."""
        assert self._process.stdin is not None
        self._process.stdin.write(" ".join(str(word) for word in words) + "\n")
        self._process.stdin.flush()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise target_process.TargetError(f"handover_calls ended with status {self._process.wait(END_TIMEOUT_S)}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    answer = _answer

    def close(self) -> None:
        """Ends it."""
        self.socket.close()
        with suppress(OSError):  # it has ended
            self.tell("end")
        try:
            self._process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def receive(of: socket.socket, count: int) -> list[int]:
    """So many descriptors; the caller's."""
    fds: list[int] = []
    while len(fds) < count:
        _, some, _, _ = socket.recv_fds(of, 1, 240)
        if not some:
            raise target_process.TargetError("handover_calls sent no descriptors")
        fds += some
    return fds


def measure_calls(results: harness.Results, program: Program, way: Way, repetition: int) -> dict[str, float] | None:
    """One way; milliseconds of each call for all handles, None if they do not fit."""
    row = {"kind": "calls", **way._asdict(), "repetition": repetition}
    if way.handles * way.mib * MIB + SPARE_BYTES > program.free_bytes and way not in QUICK_WAYS:
        results.add(**row, not_measured="the GPU has not so much memory")
        return None
    answer = program.ask("calls", *way)
    times = {name: float(answer[f"{name}_ms"]) for name in CALLS}
    handover_ms, return_ms = (sum(times[name] for name in names) for names in (HANDOVER, RETURN))
    results.add(**row, handover_ms=handover_ms, return_ms=return_ms, **answer)
    results.summary["wrong"] = results.summary.get("wrong", 0) + answer["wrong"]
    return times


def summarise_calls(results: harness.Results, best: dict[Way, dict[str, float]]) -> None:
    """The members of the ways with most handles, and the best way of all."""
    most = max(way.handles for way in best)
    size = min(way.mib for way in best if way.handles == most and any(w.threads > 1 and w.mib == way.mib for w in best))
    ways = {way: times for way, times in best.items() if (way.handles, way.mib) == (most, size)}
    for way, times in ways.items():
        for name in (*HANDOVER, *RETURN):
            label = f"us_{name}_{way.layout}_{way.how}_{way.threads}"
            results.summary[label] = 1e3 * times[name] / way.handles
    for label, names in (("handover_ms", HANDOVER), ("return_ms", RETURN)):
        first = ways[Way(most, size, *STANDARD[0])]
        results.summary[label] = sum(first[name] for name in names)
        # Each call in the way that is best for it, of those where mappings lie side by side.
        one_range = [times for way, times in ways.items() if way.layout == "one"]
        results.summary[f"best_{label}"] = sum(min(times[name] for times in one_range) for name in names)
    for name in ("pass", "close"):
        results.summary[f"us_{name}"] = 1e3 * ways[Way(most, size, *STANDARD[0])][name] / most
    rows = [
        (*way, *(1e3 * times[name] / way.handles for name in (*HANDOVER, *RETURN, "properties", "close", "pass")))
        for way, times in best.items()
    ]
    columns = (*Way._fields, *HANDOVER, *RETURN, "properties", "close", "pass")
    print("\n" + harness.table("microseconds a handle", columns, rows), flush=True)


@contextmanager
def imported(fds: list[int], size_bytes: int) -> Iterator[float]:
    """The memory behind them in this process, as the daemon has it; milliseconds it took."""
    from woodfrog._native import transfer

    device = transfer.Device(0)
    begin_s = time.perf_counter()
    memories = device.import_memories(fds, [size_bytes] * len(fds))
    took_ms = 1e3 * (time.perf_counter() - begin_s)
    try:
        yield took_ms
    finally:
        for memory in memories:
            memory.release()


def measure_hold(results: harness.Results, handles: int, mib: int, state: str, threads: int) -> None:
    """One state, in a process of its own: a driver that does not like it must not disturb the others."""
    row: dict[str, Any] = {"kind": "hold", "handles": handles, "mib": mib, "state": state, "threads": threads}
    fds: list[int] = []
    with closing(Program()) as program:
        try:
            program.tell("hold", handles, mib, state)
            fds = receive(program.socket, handles)
            ready = program.answer()
            with imported(fds, mib * MIB) as import_ms:
                row["daemon_import_ms"] = import_ms
            free_before = driver_baseline.free_gpu_bytes()
            lock_s, checkpoint_s = driver_baseline.driver_out(program.pid)
            free_meanwhile = driver_baseline.free_gpu_bytes()
            restore_s, unlock_s = driver_baseline.driver_in(program.pid)
            program.tell("back", threads)
            if state == "released":
                for first in range(0, handles, 240):
                    socket.send_fds(program.socket, [b"f"], fds[first : first + 240])
            elif state != "released_open":
                socket.send_fds(program.socket, [b"f"], fds[:1])
            back = program.answer()
        finally:
            for fd in fds:
                os.close(fd)
    back_ms = sum(back.get(f"{name}_ms", 0.0) for name in RETURN)
    results.add(
        **row, lock_ms=1e3 * lock_s, checkpoint_ms=1e3 * checkpoint_s, restore_ms=1e3 * restore_s,
        unlock_ms=1e3 * unlock_s, free_before=free_before, free_meanwhile=free_meanwhile, out=ready, back=back,
        back_ms=back_ms,
    )  # fmt: skip
    results.summary["wrong"] = results.summary.get("wrong", 0) + back["wrong"]
    label = f"{state}_{handles}_{threads}"
    results.summary[f"checkpoint_ms_{label}"] = 1e3 * checkpoint_s
    results.summary[f"restore_ms_{label}"] = 1e3 * restore_s
    results.summary[f"back_ms_{label}"] = back_ms
    if "same_memory" in back:
        results.summary[f"same_memory_{state}"] = int(back["same_memory"])


def main() -> int:
    """Returns the exit status: 0 if everything that was begun was measured and every byte looked at was right."""
    parser = harness.parser(__doc__ or "", budget_s=60)
    parser.add_argument("--repetitions", type=int, default=2)
    arguments = parser.parse_args()
    ways, holds = (QUICK_WAYS, QUICK_HOLDS) if arguments.quick else (WAYS, HOLDS)
    results = harness.Results("handover")
    budget = harness.Budget(arguments.budget_s)
    failures: list[str] = []

    best: dict[Way, dict[str, float]] = {}
    try:
        with closing(Program()) as program:
            longest_s = 0.0
            for repetition in range(arguments.repetitions):
                for way in ways:
                    # Half of the time is for the driver's own calls on held memory.
                    if not budget.allows(arguments.budget_s / 2 + longest_s) and repetition:
                        break
                    begin_s = time.monotonic()
                    times = measure_calls(results, program, way, repetition)
                    longest_s = max(longest_s, time.monotonic() - begin_s)
                    if times is not None:
                        old = best.get(way, times)
                        best[way] = {name: min(old[name], times[name]) for name in times}
            largest = ways[0]
            ahead = program.ask("ahead", largest.handles, largest.mib)
            results.add(kind="ahead", handles=largest.handles, mib=largest.mib, **ahead)
            for name in ("step_alone", "step_alone_longest", "step_beside", "step_beside_longest"):
                results.summary[f"ahead_{name}_us"] = 1e3 * ahead[f"{name}_ms"]
        summarise_calls(results, best)
    except Exception as failure:  # noqa: BLE001 (the other half must not be lost)
        failures.append(f"calls: {failure}")
        results.add(kind="calls", **harness.error_members(failure))
    with driver_baseline.context():
        for handles, mib, state, threads in holds:
            if not budget.allows(3.0):
                results.add(kind="hold", state=state, not_measured="the time budget was used up")
                continue
            try:
                measure_hold(results, handles, mib, state, threads)
            except Exception as failure:  # noqa: BLE001 (a state that the driver refuses is a result too)
                failures.append(f"hold {state}: {failure}")
                results.add(kind="hold", handles=handles, mib=mib, state=state, **harness.error_members(failure))
    harness.finish(results, GOALS, failures)
    return 1 if any(text.startswith("calls") for text in failures) or results.summary.get("wrong") else 0


if __name__ == "__main__":
    sys.exit(main())
