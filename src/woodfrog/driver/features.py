"""What which driver can do about checkpoints: a table by driver branch, checked against the symbols that are there.

The table is what NVIDIA documents for each branch. What a symbol can tell is never decided by a version; what only the
branch tells is taken for given in a driver newer than the table, and tried where the branch is not known. So nothing is
refused because of a driver that this table does not know: the driver itself answers then.
"""

from __future__ import annotations

import ctypes
import platform
from dataclasses import dataclass
from functools import cache

from woodfrog.driver import devices
from woodfrog.errors import RefusedError, WoodfrogError

MINIMUM_BRANCH = 570


@dataclass(frozen=True)
class Feature:
    """`branch`: the first driver branch that has it. `symbol`: what libcuda exports then, "" when nothing tells."""

    name: str
    branch: int
    symbol: str
    description: str


TABLE: tuple[Feature, ...] = (
    Feature("toggle", 550, "", "the cuda-checkpoint program can suspend and resume a process"),
    Feature("actions", 555, "", "lock, checkpoint, restore and unlock as separate steps of that program"),
    Feature("checkpoint_api", 570, "cuCheckpointProcessCheckpoint", "the same steps as driver calls"),
    Feature(
        "lock_timeout", 570, "cuCheckpointProcessLock", "a lock that gives up after a time and lets the target run on"
    ),
    Feature("gpu_remap", 580, "", "restore onto other GPUs of the same chip"),
    Feature("arm", 595, "", "checkpoint on 64-bit Arm"),
    Feature("legacy_ipc", 610, "", "legacy CUDA IPC between processes of one job"),
    Feature("custom_storage", 615, "cuCheckpointOperationComplete", "the caller copies GPU memory itself"),
)
NEWEST_BRANCH = max(feature.branch for feature in TABLE)

# The branch that a CUDA version came with (NVIDIA's CUDA release notes), for when NVML is not there to ask.
_BRANCH_OF_CUDA = (((13, 4), 615), ((13, 0), 580), ((12, 8), 570), ((12, 5), 555), ((12, 4), 550))


def branch_of_cuda(version: tuple[int, int]) -> int | None:
    """The oldest driver branch that supports this CUDA version; None for one before checkpoints existed."""
    return next((branch for cuda, branch in _BRANCH_OF_CUDA if version >= cuda), None)


@dataclass(frozen=True)
class Verdict:
    feature: Feature
    available: bool
    how: str  # "symbol", "branch", "newer" (than the table) or "unknown"


def judge(branch: int | None, exported: frozenset[str]) -> list[Verdict]:
    """Each feature's verdict for a driver of this branch (None: unknown) that exports these symbols."""
    verdicts = []
    for feature in TABLE:
        if feature.symbol:
            verdicts.append(Verdict(feature, feature.symbol in exported, "symbol"))
        elif branch is not None:
            how = "newer" if branch > NEWEST_BRANCH else "branch"
            verdicts.append(Verdict(feature, branch >= feature.branch, how))
        else:
            verdicts.append(Verdict(feature, False, "unknown"))
    return verdicts


@cache
def exported_symbols() -> frozenset[str]:
    """Which of the table's symbols this machine's driver has, in the version that it supports; empty without one.

    It must export them and give them out when asked: a driver may have the name of what a newer version begins.
    """
    try:
        libcuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return frozenset()
    return frozenset(feature.symbol for feature in TABLE if feature.symbol and _gives_out(libcuda, feature.symbol))


def _gives_out(libcuda: ctypes.CDLL, symbol: str) -> bool:
    if not hasattr(libcuda, symbol):
        return False
    ask = getattr(libcuda, "cuGetProcAddress_v2", None)  # CUDA 12.0, older than every checkpoint call
    if ask is None:
        return True
    version, function, found = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_int()
    if libcuda.cuDriverGetVersion(ctypes.byref(version)) != 0:
        return True
    ask.argtypes = (
        ctypes.c_char_p, ctypes.POINTER(ctypes.c_void_p), ctypes.c_int, ctypes.c_uint64, ctypes.POINTER(ctypes.c_int),
    )  # fmt: skip
    code = ask(symbol.encode(), ctypes.byref(function), version.value, 0, ctypes.byref(found))
    return code == 0 and bool(function.value)


def newest_branch_of_cuda(version: tuple[int, int]) -> int | None:
    """No driver that supports just this CUDA version is of this branch or a newer one; None when there may be."""
    return min((branch for cuda, branch in _BRANCH_OF_CUDA if cuda > version), default=None)


@cache
def _below() -> int | None:
    """This machine's driver is of an older branch than this one; None when that cannot be said of any branch.

    NVML tells the driver's release; where there is none (a container, the simulated GPU), its CUDA version limits it.
    """
    if release := devices.driver_branch():
        return release[0] + 1
    try:
        return newest_branch_of_cuda(devices.cuda_version())
    except WoodfrogError:  # no driver: whoever calls it says so
        return None


def lacks(name: str) -> Feature | None:
    """The feature, if it is known that this machine's driver does not have it; None if it has, or if that is open."""
    feature = next(one for one in TABLE if one.name == name)
    if feature.symbol:
        return None if feature.symbol in exported_symbols() else feature
    below = _below()
    return feature if below is not None and below <= feature.branch else None


def require(name: str, what: str) -> None:
    """RefusedError when this machine's driver is known not to have a feature that `what` needs."""
    if (feature := lacks(name)) is not None:
        raise RefusedError(
            f"{what} needs driver {feature.branch} or newer, which this machine has not ({feature.description})",
            advice=f"install driver {feature.branch} or newer; `woodfrog doctor` says what this one can do",
        )


def lacks_from(name: str) -> int:
    """The first branch that has a feature which this machine's driver is known to lack; 0 if it is not."""
    feature = lacks(name)
    return feature.branch if feature is not None else 0


def require_checkpoints() -> None:
    """RefusedError when this machine's driver is known not to checkpoint processes at all."""
    what = "checkpointing a process"
    require("checkpoint_api", what)
    if platform.machine() == "aarch64":
        require("arm", f"{what} on 64-bit Arm")


def lacking(*names: str) -> list[str]:
    """Of these features, those that this machine's driver is known to lack, as phrases for people."""
    found = [lacks(name) for name in names]
    return [f"{one.description} (driver {one.branch})" for one in found if one is not None]


def has(name: str, branch: int | None = None) -> bool:
    """Whether this machine's driver has a feature of the table."""
    for verdict in judge(branch, exported_symbols()):
        if verdict.feature.name == name:
            return verdict.available
    raise KeyError(name)
