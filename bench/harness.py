"""What every benchmark shares: its options, its time budget, its statistics and its results file.

A results file has the form {bench, date, gpu, driver, commit, command, summary: {name: number}, rows: [...]}. It is
written again after every row, by rename, so a benchmark that is stopped half way leaves what it has measured; its
summary then says ``complete: 0``. Files go to ``$OUT`` where that is set, else to ``bench/results/<gpu>/``.

Nothing here may start a process or touch the GPU beyond asking for its name: importing it costs nothing.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import shlex
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
GIB = 2**30


def parser(description: str, *, budget_s: float) -> argparse.ArgumentParser:
    """An argument parser with the options that every benchmark has."""
    # `timeout` ends a benchmark that runs too long with SIGTERM: it must still end its targets.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    result = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    result.add_argument("--quick", action="store_true", help="small sizes and few repetitions: does it run at all?")
    result.add_argument("--budget-s", type=float, default=budget_s, help="add no repetition after this many seconds")
    result.add_argument("--work", type=Path, default=REPOSITORY / "build" / "bench-work", help="folder for logs")
    return result


class Budget:
    """The time a benchmark may still spend. It never stops what runs, it only says whether more may be started."""

    def __init__(self, budget_s: float) -> None:
        self._end_s = time.monotonic() + budget_s

    @property
    def left_s(self) -> float:
        """Seconds left, never below zero."""
        return max(0.0, self._end_s - time.monotonic())

    def allows(self, expected_s: float = 0.0) -> bool:
        """Whether something that takes about ``expected_s`` seconds would end in time."""
        return self.left_s > expected_s


@dataclass(frozen=True)
class Spread:
    """Minimum, median and maximum of repeated measurements, and how many there were."""

    minimum: float
    median: float
    maximum: float
    count: int

    @staticmethod
    def of(values: Iterable[float]) -> Spread:
        """Raises ValueError when there is no value: a median of nothing must not become a number."""
        ordered = sorted(values)
        if not ordered:
            raise ValueError("no measurement was made")
        return Spread(ordered[0], statistics.median(ordered), ordered[-1], len(ordered))

    def members(self, name: str) -> dict[str, float]:
        """The members of a row for the measurement ``name``."""
        return {
            f"{name}_min": self.minimum,
            name: self.median,
            f"{name}_max": self.maximum,
            f"{name}_count": self.count,
        }


def gpu_name() -> str:
    """The name of GPU 0 as the driver gives it, or ``no GPU``."""
    try:
        from cuda.bindings import driver
    except ImportError:
        return "no GPU"
    try:
        (initialised,) = driver.cuInit(0)
    except RuntimeError:  # cuda-bindings raises it when there is no libcuda to load
        return "no GPU"
    if initialised != driver.CUresult.CUDA_SUCCESS:
        return "no GPU"
    error, name = driver.cuDeviceGetName(128, 0)
    return name.split(b"\0")[0].decode() if error == driver.CUresult.CUDA_SUCCESS else "no GPU"


def driver_version() -> str:
    """The version of the kernel's NVIDIA driver, or the CUDA version that the driver library reports."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        text = ""
    found = re.search(r"\b(\d{3,}\.\d+(?:\.\d+)?)\b", text)
    if found:
        return found.group(1)
    try:
        from cuda.bindings import driver

        error, version = driver.cuDriverGetVersion()
    except (ImportError, RuntimeError):
        return "none"
    return f"CUDA {version // 1000}.{version % 1000 // 10}" if error == driver.CUresult.CUDA_SUCCESS else "none"


def commit() -> str:
    """The commit measured: ``$WOODFROG_COMMIT`` where the tree travels without its history, else asked of git."""
    given = os.environ.get("WOODFROG_COMMIT")
    if given:
        return given
    try:
        head = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"],
            cwd=REPOSITORY, capture_output=True, text=True, timeout=20, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return head.stdout.strip() or "unknown"


class Results:
    """The results file of one benchmark; see the module's text for its form."""

    def __init__(self, bench: str) -> None:
        self._bench = bench
        self._gpu = gpu_name()
        self._head = {
            "bench": bench,
            "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "gpu": self._gpu,
            "driver": driver_version(),
            "commit": commit(),
            "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        }
        self.rows: list[dict[str, Any]] = []
        self.summary: dict[str, float] = {}

    @property
    def path(self) -> Path:
        """Where the file is written."""
        out = os.environ.get("OUT")
        if out:
            return Path(out) / f"{self._bench}.json"
        folder = re.sub(r"[^a-z0-9]+", "-", self._gpu.lower().replace("nvidia", "")).strip("-")
        return REPOSITORY / "bench" / "results" / folder / f"{self._bench}.json"

    def add(self, **members: Any) -> None:
        """Adds a row and writes the file; numbers in SI units, the unit at the end of each name."""
        self.rows.append(members)
        print(json.dumps(members, default=str), flush=True)
        self._write(complete=False)

    def finish(self) -> Path:
        """Writes the file for the last time, as complete."""
        return self._write(complete=True)

    def _write(self, *, complete: bool) -> Path:
        path = self.path
        path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(
            {**self._head, "summary": {**self.summary, "complete": int(complete)}, "rows": self.rows},
            indent=1,
            default=str,  # the fields of an error can be of any type
        )
        new = path.with_suffix(".new")
        new.write_text(text + "\n")
        new.replace(path)
        return path


def huge_pages() -> dict[str, str]:
    """The kernel's settings for transparent huge pages: `enabled` for private memory, `shmem_enabled` for shared."""
    found = {}
    for name in ("enabled", "shmem_enabled"):
        path = Path("/sys/kernel/mm/transparent_hugepage") / name
        found[name] = path.read_text().strip() if path.exists() else "not there"
    return found


def error_members(failure: BaseException) -> dict[str, Any]:
    """What a row says about a failure: of woodfrog's own errors every field, since nobody is there to ask later."""
    members: dict[str, Any] = {"error_type": type(failure).__name__, "error": str(failure)}
    for name in ("advice", "phase", "target_state", "details"):
        if getattr(failure, name, None):
            members[name] = getattr(failure, name)
    return members


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A plain text table; floats get four significant digits."""

    def cell(value: Any) -> str:
        if isinstance(value, float):
            return f"{value:.4g}"
        return "" if value is None else str(value)

    cells = [list(columns), *([cell(v) for v in row] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(columns))]
    lines = ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in cells]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join([title, *lines])


def print_summary(results: Results, goals: Mapping[str, str]) -> None:
    """Prints the summary as a table with the goal of each number, where it has one."""
    rows = [(name, value, goals.get(name, "")) for name, value in results.summary.items()]
    print(
        "\n" + table(f"{results.path.name} ({len(results.rows)} rows)", ("summary", "value", "goal"), rows), flush=True
    )


def finish(results: Results, goals: Mapping[str, str], failures: Iterable[str] = ()) -> None:
    """The end of every benchmark: the file is complete, and the summary is printed, then what went wrong."""
    results.finish()
    print_summary(results, goals)
    for text in failures:
        print(f"FAILED {text}")


def median(values: Iterable[float]) -> float:
    """The median alone, where the spread stands elsewhere."""
    return Spread.of(values).median
