"""Is there room? Asked before a target is touched, and answered with a refusal that names what is missing.

An estimate may only err to the safe side: what the driver and CRIU will really need shows when it is too late.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from woodfrog.errors import NoSpaceError

if TYPE_CHECKING:
    from woodfrog._native.transfer import Device
    from woodfrog.operations.context import Arenas

MIB = 1 << 20
# What an empty context's control state takes in host memory: 531 MiB measured on an H200 with driver 580 (FACTS §1);
# a process with large libraries loaded has more.
CONTROL_STATE_BYTES = 600 * MIB
# What it takes on the GPU once it is back there: about the same.
GPU_CONTROL_STATE_BYTES = 600 * MIB
# Of a GPU's memory, left to the target while copies of its chunks lie there: what it allocates meanwhile must not fail.
GPU_RESERVE_FRACTION = 1 / 32
# Left for everybody else on the machine.
HOST_RESERVE_BYTES = 256 * MIB


def control_state_bytes(simulated: bool) -> int:
    """Host memory that the driver's checkpoint of an otherwise empty target takes."""
    return 0 if simulated else CONTROL_STATE_BYTES


def gpu_control_state_bytes(simulated: bool) -> int:
    """Device memory that the driver's restore of an otherwise empty target takes."""
    return 0 if simulated else GPU_CONTROL_STATE_BYTES


def gpu_reserve_bytes(device: Device) -> int:
    """Of the memory of `device`: what must stay free while a target runs on beside copies of its chunks."""
    return int(device.total_bytes * GPU_RESERVE_FRACTION)


def host_available_bytes() -> int:
    """Host memory that can still be taken: the machine's, or this control group's if that is less."""
    available = 0
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
    limit = _cgroup_room_bytes()
    return available if limit is None else min(available, limit)


def host_total_bytes() -> int:
    """Host memory of the machine."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemTotal:"):
            return int(line.split()[1]) * 1024
    return 0


def host_has(needed_bytes: int) -> bool:
    """Whether `needed_bytes` (may be negative: nothing) of host memory can be taken."""
    return needed_bytes + HOST_RESERVE_BYTES <= host_available_bytes()


def arena_can_take(arenas: Arenas, more_bytes: int) -> bool:
    """Whether the host has memory for so much more of the arenas: what is prepared and free costs nothing."""
    used_bytes = arenas.size_bytes - arenas.free_bytes
    return host_has(more_bytes - max(0, arenas.prepared_bytes - used_bytes))


def require_host(needed_bytes: int, what: str, pid: int) -> None:
    """NoSpaceError unless `needed_bytes` of host memory can be taken for `what`."""
    available = host_available_bytes()
    if needed_bytes + HOST_RESERVE_BYTES > available:
        raise NoSpaceError(
            f"{what} needs {needed_bytes // MIB} MiB of host memory, and {available // MIB} MiB are available",
            advice="end other processes or resume suspended targets; the target was not touched",
            pid=pid,
            details={"needed_bytes": needed_bytes, "available_bytes": available},
        )


def require_gpu(device: Device, needed_bytes: int, what: str) -> None:
    """NoSpaceError unless `needed_bytes` are free on `device`: a restore onto a full GPU leaves its target stuck."""
    free = device.free_bytes()
    if needed_bytes > free:
        raise NoSpaceError(
            f"{what} needs {needed_bytes // MIB} MiB on GPU {device.ordinal} ({device.name}), "
            f"and {free // MIB} MiB are free",
            advice="end or suspend what uses that GPU, or choose another one with --gpu",
            device=device.ordinal,
            details={"needed_bytes": needed_bytes, "free_bytes": free},
        )


def _cgroup_room_bytes() -> int | None:
    """What this process's control group (version 2) may still take; None without a limit."""
    try:
        entry = Path("/proc/self/cgroup").read_text().strip().splitlines()[-1]
        group = Path("/sys/fs/cgroup") / entry.split(":", 2)[2].lstrip("/")
        limit = (group / "memory.max").read_text().strip()
        used = int((group / "memory.current").read_text())
    except (OSError, IndexError, ValueError):
        return None
    return None if limit == "max" else max(0, int(limit) - used)
