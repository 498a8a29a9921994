"""The process's memory and the driver's files in it, from /proc and NVML. Reads only."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from woodfrog.driver import devices
from woodfrog.target import procfs
from woodfrog.trace.record import DriverFile, Sample

# Of NVIDIA's driver, and of the simulated GPU (native/simgpu), whose device memory are memfds of that name.
_DRIVER_FILES = re.compile(r"/dev/nvidia|/dev/dri/|memfd:simgpu|libcuda\.so|libnvidia-")
# Of woodfrog's daemon (operations/control_files.py): without a name on a tmpfs, or a restored process's.
_CONTROL_FILE = re.compile(r"/#[0-9]+ \(deleted\)$|memfd:woodfrog-control")
_LINE = re.compile(r"([0-9a-f]+)-([0-9a-f]+) (\S{4}) \S+ \S+ \S+\s*(.*)")


@dataclass(frozen=True)
class Range:
    """One mapping of the process: addresses, permissions as in /proc/PID/maps, and what is mapped ("": nothing)."""

    begin: int
    end: int
    permissions: str
    path: str

    @property
    def size_bytes(self) -> int:
        return self.end - self.begin


def ranges(pid: int) -> list[Range]:
    """All mappings; empty when the process is gone. PermissionError is the caller's."""
    found = []
    for line in (procfs.text(pid, "maps") or "").splitlines():
        if match := _LINE.fullmatch(line):
            found.append(Range(int(match[1], 16), int(match[2], 16), match[3], match[4]))
    return found


def new_writable(before: Sequence[Range], after: Sequence[Range]) -> list[tuple[int, int]]:
    """(begin, end) of private memory that is mapped to write now and was not mapped before, and of the daemon's files
    for the control state, whenever they were mapped; the largest first."""
    taken = sorted((one.begin, one.end) for one in before)
    found = []
    for one in after:
        if not one.permissions.startswith("rw"):
            continue
        if _CONTROL_FILE.search(one.path):  # mapped before the driver's checkpoint, so perhaps before we looked
            found.append((one.begin, one.end))
            continue
        if one.path or one.permissions[3] != "p":
            continue
        begin = one.begin
        # The kernel joins neighbours: of a mapping that has grown only what is new counts.
        for taken_begin, taken_end in taken:
            if taken_end <= begin or taken_begin >= one.end:
                continue
            if taken_begin > begin:
                found.append((begin, taken_begin))
            begin = max(begin, taken_end)
        if begin < one.end:
            found.append((begin, one.end))
    return sorted(found, key=lambda found: found[0] - found[1])


def driver_files(pid: int) -> list[DriverFile]:
    """The driver's files that the process has open or mapped, by path."""
    opened = Counter(path for path in procfs.descriptors(pid).values() if _DRIVER_FILES.search(path))
    mapped: dict[str, list[int]] = defaultdict(list)
    for one in ranges(pid):
        if _DRIVER_FILES.search(one.path):
            mapped[one.path].append(one.size_bytes)
    return [DriverFile(path, opened[path], len(mapped[path]), sum(mapped[path])) for path in sorted({*opened, *mapped})]


def sample(pid: int, time_s: float, gpu_uuids: Sequence[bytes]) -> Sample | None:
    """Memory by kind; None when the process is gone."""
    if not (fields := procfs.status(pid)):
        return None

    def kib(name: str) -> int:
        return int(fields.get(name, "0 kB").split()[0]) * 1024

    return Sample(time_s, kib("RssAnon"), kib("RssFile"), kib("RssShmem"), gpu_bytes(pid, gpu_uuids))


def gpu_bytes(pid: int, gpu_uuids: Sequence[bytes]) -> int | None:
    """GPU memory of the process as NVML tells it: 0 when NVML does not list it, None when it tells nothing at all."""
    told = [use for uuid in gpu_uuids for use in devices.users(uuid)]
    if not any(use.used_bytes is not None for use in told) and not told:
        return None
    return sum(use.used_bytes or 0 for use in told if use.pid == pid)


def listed(pid: int, gpu_uuids: Sequence[bytes]) -> bool | None:
    """Whether NVML lists the process on one of these GPUs; None where there is no NVML."""
    if devices.driver_branch() is None:
        return None
    return any(use.pid == pid for uuid in gpu_uuids for use in devices.users(uuid))


def huge_and_resident(pid: int, begin: int, end: int) -> tuple[int, int]:
    """Bytes in huge pages and bytes in memory of the mappings that lie in [begin, end)."""
    huge = resident = 0
    inside = False
    for line in (procfs.text(pid, "smaps") or "").splitlines():
        if match := _LINE.fullmatch(line):
            inside = int(match[1], 16) < end and int(match[2], 16) > begin
        elif inside and line.startswith("AnonHugePages:"):
            huge += int(line.split()[1]) * 1024
        elif inside and line.startswith("Rss:"):
            resident += int(line.split()[1]) * 1024
    return huge, resident
