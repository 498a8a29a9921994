"""Every precondition of woodfrog on this machine, one function each, and what to do where it is not met.

A check answers with a verdict and a sentence; it must never change the machine, and a check that cannot find out says
so as a warning instead of raising.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from woodfrog.errors import WoodfrogError


class Verdict(str, Enum):
    OK = "ok"
    WARNING = "warning"
    FAIL = "fail"
    NOT_APPLICABLE = "n/a"


@dataclass(frozen=True)
class Check:
    """One finding; `fix` is empty when there is nothing to do."""

    name: str
    verdict: Verdict
    finding: str
    fix: str = ""

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "verdict": self.verdict.value}


def run_all(store: str | os.PathLike[str] | None = None) -> list[Check]:
    """Every check, in the order in which things are needed. Takes seconds on a real GPU: the driver is started."""
    # Here and not above: each of these modules is about one subject and brings its own imports.
    from woodfrog.doctor import gpu, host, tools

    checks: list[tuple[str, Callable[[], list[Check]]]] = [
        ("driver", gpu.check_driver),
        ("GPUs", gpu.check_devices),
        ("MIG", gpu.check_mig),
        ("MPS", gpu.check_mps),
        ("kernel", host.check_kernel),
        ("woodfrog", tools.check_native),
        ("CRIU", tools.check_criu),
        ("privileges", host.check_privileges),
        ("open files", host.check_open_files),
        ("locked memory", host.check_locked_memory),
        ("disk I/O", host.check_file_io),
        ("stores in memory", host.check_memory_stores),
        ("huge pages", host.check_huge_pages),
        ("host memory", gpu.check_host_memory),
        ("store", lambda: tools.check_store(store)),
        ("runtime directory", tools.check_runtime_directory),
        ("daemon", tools.check_daemon),
        ("container", host.check_container),
    ]
    found: list[Check] = []
    for name, check in checks:
        try:
            found += check()
        except WoodfrogError as error:
            found.append(Check(name, Verdict.WARNING, error.reason, error.advice))
        except OSError as error:
            found.append(Check(name, Verdict.WARNING, f"cannot be found out: {error}"))
    return found


def read(path: str) -> str:
    """A small file of /proc or /sys, stripped; empty when it is not there."""
    try:
        return Path(path).read_text(errors="replace").strip()
    except OSError:
        return ""
