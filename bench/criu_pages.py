"""CRIU's dump of a process, its pages written by CRIU alone or copied by threads (cpu/lazy_dump.py), in turns.

Needs root and CRIU, but no GPU. The process has one large piece of memory, many small mappings and threads, like a
PyTorch program; the files go to a folder in memory, new for every dump, as in a checkpoint. All of CRIU's run counts,
because a target stands still from the driver's checkpoint on; `frozen_s` is what the process itself saw. "begun": CRIU
was started before and waited at its gate, from where on the time counts.

summary: <way>_dump_s, <way>_frozen_s, reserve_s (while the target runs), speedup (threads begun over criu)
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import harness
from woodfrog.cpu import criu as criu_module
from woodfrog.cpu import lazy_dump
from woodfrog.cpu.criu import Criu
from woodfrog.cpu.gate import Gate
from woodfrog.cpu.pages_by import VARIABLE
from woodfrog.operations.memory_folder import MemoryFolder

WAYS = ("criu", "criu_begun", "threads", "threads_begun")
HELD_S = 0.5  # more than CRIU needs until it waits at its gate
PROGRAM = """
import mmap, os, sys, threading, time
mib, mappings, threads = map(int, sys.argv[1:])
large = mmap.mmap(-1, mib << 20, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
block = os.urandom(1 << 20)
for offset in range(0, mib << 20, 1 << 20):
    large[offset:offset + (1 << 20)] = block
small = [mmap.mmap(-1, 65536, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) for _ in range(mappings)]
for number, one in enumerate(small):
    one[0] = 1
    if number % 2:  # else the kernel would make one mapping of all
        one.madvise(mmap.MADV_DONTFORK)
for _ in range(threads):
    threading.Thread(target=threading.Event().wait, daemon=True).start()
print("ready", flush=True)
last = time.monotonic()
while True:
    time.sleep(0.001)
    now = time.monotonic()
    if now - last > 0.02:
        print(now - last, flush=True)
    last = now
"""


def gaps(log: Path) -> list[float]:
    """How long the program stood still, each time, in seconds."""
    return [float(line) for line in log.read_text().splitlines()[1:]]


def measure(criu: Criu, pid: int, log: Path, way: str, size_bytes: int) -> dict[str, Any]:
    """One dump; the members of its row."""
    os.environ[VARIABLE] = way.removesuffix("_begun")
    gate = Gate() if way.endswith("_begun") else None
    folder = MemoryFolder.make(size_bytes)
    if folder is None:
        raise SystemExit("no folder in memory: this needs root, and twice as much memory as the process has")
    try:
        ahead = folder.path / "pages"
        began = time.monotonic()
        taken = lazy_dump.reserve(pid, ahead)
        reserve_s = time.monotonic() - began
        seen = len(gaps(log))
        if gate is not None:
            threading.Timer(HELD_S, gate.open).start()
        dumped = criu.dump(
            pid, folder.path / "cpu", leave_running=True, pages_ahead=ahead if taken else None, gate=gate
        )
        time.sleep(0.1)  # its next line tells the gap
    finally:
        folder.close()
        if gate is not None:
            gate.close()
    return {
        "way": way,
        "dump_s": dumped.elapsed_s - (HELD_S if gate is not None else 0.0),
        "frozen_s": max(gaps(log)[seen:], default=0.0),
        "reserve_s": reserve_s if taken else None,
        "size_bytes": dumped.size_bytes,
    }


def main() -> int:
    """Returns the exit status: 0 if everything was measured."""
    parser = harness.parser(__doc__ or "", budget_s=60)
    parser.add_argument("--mib", type=int, default=900, help="the large piece of memory")
    parser.add_argument("--mappings", type=int, default=1700)
    parser.add_argument("--threads", type=int, default=36)
    parser.add_argument("--turns", type=int, default=9)
    arguments = parser.parse_args()
    mib, turns = (64, 2) if arguments.quick else (arguments.mib, arguments.turns)
    results = harness.Results("criu_pages")
    budget = harness.Budget(arguments.budget_s)
    criu = criu_module.find()
    with tempfile.TemporaryDirectory() as work:
        log = Path(work) / "log"
        with open(log, "ab") as output:
            process = subprocess.Popen(
                [sys.executable, "-c", PROGRAM, str(mib), str(arguments.mappings), str(arguments.threads)],
                stdin=subprocess.DEVNULL, stdout=output, stderr=output, cwd=work, start_new_session=True,
            )  # fmt: skip
        try:
            while "ready" not in log.read_text():
                if process.poll() is not None:
                    raise SystemExit(log.read_text())
                time.sleep(0.05)
            results.add(kind="machine", processors=os.cpu_count(), criu=criu.version_text, mib=mib,
                        mappings=len(Path(f"/proc/{process.pid}/maps").read_text().splitlines()),
                        load=os.getloadavg()[0], huge_pages=harness.huge_pages())  # fmt: skip
            for turn in range(turns):
                for way in WAYS:
                    if turn == 0 or budget.allows():  # the first turn touches memory for the first time
                        results.add(kind="dump", turn=turn, **measure(criu, process.pid, log, way, mib << 20))
        finally:
            process.kill()
            process.wait()
    counted = [row for row in results.rows if row["kind"] == "dump" and row["turn"] > 0]
    for way in WAYS:
        for name in ("dump_s", "frozen_s"):
            of_way = [row[name] for row in counted if row["way"] == way]
            results.summary.update(harness.Spread.of(of_way).members(f"{way}_{name}"))
    results.summary["reserve_s"] = harness.median(row["reserve_s"] for row in counted if row["reserve_s"] is not None)
    results.summary["speedup"] = results.summary["criu_dump_s"] / results.summary["threads_begun_dump_s"]
    harness.finish(results, {})
    return 0


if __name__ == "__main__":
    sys.exit(main())
