"""Can this image be restored on this machine? (docs/format.md, "Which fields judge compatibility")

`judge` compares plain values and returns every finding, so that a person sees all of them at once. It must never look
at the machine itself (the caller gathers the facts), and never guess: what is not known is a warning.
"""

from __future__ import annotations

import os
import platform
import re
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from woodfrog.errors import RefusedError
from woodfrog.image.inspect import gpu_uuid
from woodfrog.image.manifest import Device, Manifest


class Severity(str, Enum):
    REFUSED = "refused"
    WARNING = "warning"


@dataclass(frozen=True)
class Finding:
    severity: Severity
    field: str
    reason: str
    advice: str = ""


@dataclass(frozen=True)
class Gpu:
    """A GPU of this machine; `free_bytes` None when unknown."""

    ordinal: int
    uuid: str  # 32 hex digits
    name: str
    total_bytes: int
    compute_major: int
    compute_minor: int
    free_bytes: int | None = None


@dataclass(frozen=True)
class Machine:
    """Facts of this machine; None or empty means not known. `remap_from`: the driver here is known not to move a target
    to another GPU, which drivers from this branch on do."""

    architecture: str = field(default_factory=platform.machine)
    kernel: str = field(default_factory=platform.release)
    cuda_version: int | None = None
    driver_release: str = ""
    simulated: bool = False
    gpus: tuple[Gpu, ...] | None = None
    criu_version: str | None = None
    woodfrog_version: str = ""
    remap_from: int = 0
    uid: int = field(default_factory=os.geteuid)


def judge(manifest: Manifest, machine: Machine, gpu_map: dict[str, str] | None = None) -> list[Finding]:
    """All that speaks against a restore here, refusals first. `gpu_map`: UUID in the image → UUID here (hex)."""
    found: list[Finding] = []
    found += _architecture(manifest, machine)
    found += _driver(manifest, machine)
    found += _gpus(manifest, machine, gpu_map or {})
    found += _cpu(manifest, machine)
    found += _environment(manifest, machine)
    return sorted(found, key=lambda finding: finding.severity is not Severity.REFUSED)


def require(findings: list[Finding], reference: str) -> None:
    """RefusedError when one of the findings refuses; its details list all of them."""
    refusals = [finding for finding in findings if finding.severity is Severity.REFUSED]
    if refusals:
        raise RefusedError(
            f"{reference} cannot be restored here: " + "; ".join(finding.reason for finding in refusals),
            advice=next((finding.advice for finding in refusals if finding.advice), ""),
            details={"findings": [{"severity": f.severity.value, "field": f.field, "reason": f.reason,
                                   "advice": f.advice} for f in findings]},
        )  # fmt: skip


def map_gpus(manifest: Manifest, gpus: tuple[Gpu, ...], gpu_map: dict[str, str]) -> dict[str, Gpu | None]:
    """Which GPU here each of the image's gets: as mapped, else itself, else a free one of the same kind."""
    by_uuid = {gpu.uuid: gpu for gpu in gpus}
    chosen: dict[str, Gpu | None] = {}
    for device in manifest.devices:
        wanted = gpu_map.get(device.uuid, device.uuid)
        chosen[device.uuid] = by_uuid.get(wanted)
    taken = {gpu.uuid for gpu in chosen.values() if gpu is not None}
    for device in manifest.devices:
        if chosen[device.uuid] is None and device.uuid not in gpu_map:
            same = (gpu for gpu in gpus if gpu.uuid not in taken and _same_kind(device, gpu))
            chosen[device.uuid] = found = next(same, None)
            if found is not None:
                taken.add(found.uuid)
    return chosen


def _refused(name: str, reason: str, advice: str = "") -> Finding:
    return Finding(Severity.REFUSED, name, reason, advice)


def _warning(name: str, reason: str, advice: str = "") -> Finding:
    return Finding(Severity.WARNING, name, reason, advice)


def _architecture(manifest: Manifest, machine: Machine) -> list[Finding]:
    found = []
    if manifest.host.architecture != machine.architecture:
        found.append(
            _refused(
                "host.architecture", f"it is of a {manifest.host.architecture} machine, this is {machine.architecture}"
            )
        )
    if _version(machine.kernel) < _version(manifest.host.kernel):
        found.append(
            _warning("host.kernel", f"the kernel here ({machine.kernel}) is older than there ({manifest.host.kernel})")
        )
    if machine.woodfrog_version and _version(machine.woodfrog_version) < _version(manifest.woodfrog_version):
        found.append(_warning("woodfrog_version", f"a newer woodfrog wrote it ({manifest.woodfrog_version})"))
    return found


def _driver(manifest: Manifest, machine: Machine) -> list[Finding]:
    there = manifest.driver
    if machine.cuda_version is None:
        return [_warning("driver", "no CUDA driver is known here; the daemon looks again before it restores")]
    if there.simulated != machine.simulated:
        simulated, real = ("it", "this machine") if there.simulated else ("this machine", "it")
        return [_refused("driver.simulated", f"{simulated} has a simulated GPU and {real} has a real one")]
    advice = "restore where the driver is at least as new"
    if machine.cuda_version < there.cuda_version:
        reason = f"the driver here has CUDA {machine.cuda_version}, the image needs {there.cuda_version}"
        return [_refused("driver.cuda_version", reason, advice)]
    # As numbers: the driver's own text says 580.159.04, NVML's parts joined say 580.159.4.
    if there.release and machine.driver_release and _version(there.release) != _version(machine.driver_release):
        reason = f"driver {machine.driver_release} here, {there.release} there"
        if _version(machine.driver_release) < _version(there.release):
            return [_refused("driver.release", reason, advice)]
        return [_warning("driver.release", reason)]
    return []


def _gpus(manifest: Manifest, machine: Machine, gpu_map: dict[str, str]) -> list[Finding]:
    if machine.gpus is None:
        return [_warning("devices", "the GPUs here are not known; the daemon looks again before it restores")]
    unknown = sorted(set(gpu_map) - {device.uuid for device in manifest.devices})
    if unknown:
        return [_refused("devices", f"the GPU map names {unknown[0]}, which the image does not have")]
    if len(set(gpu_map.values())) != len(gpu_map):
        return [_refused("devices", "the GPU map names one GPU twice")]
    found = []
    for device_index, (device, gpu) in enumerate(
        zip(manifest.devices, map_gpus(manifest, machine.gpus, gpu_map).values(), strict=True)
    ):
        if gpu is None:
            wanted = gpu_map.get(device.uuid)
            missing = f"GPU {wanted} of the map is not here" if wanted else f"there is no free {device.name} here"
            found.append(_refused("devices", missing, "`woodfrog doctor` lists the GPUs; map one with --gpu"))
            continue
        needed = sum(handle.size for handle in manifest.handles if handle.device == device_index)
        if not _same_kind(device, gpu):
            reason = f"GPU {gpu.ordinal} here is a {gpu.name}, the image needs a {device.name}"
            found.append(_refused("devices.name", reason, "restore on a GPU of the same kind"))
        elif needed > gpu.total_bytes:
            found.append(_refused("devices.total_bytes", f"its {needed} bytes do not fit GPU {gpu.ordinal}"))
        elif gpu.total_bytes < device.total_bytes:
            found.append(_warning("devices.total_bytes", f"GPU {gpu.ordinal} here has less memory than there"))
        if gpu.uuid != device.uuid:
            found.append(_remap(device, gpu, machine))
    return found


def _remap(device: Device, gpu: Gpu, machine: Machine) -> Finding:
    if machine.remap_from:
        name = f"driver {machine.driver_release}" if machine.driver_release else "the driver here"
        return _refused(
            "devices.uuid", f"{name} cannot restore onto another GPU", f"driver {machine.remap_from} or newer can"
        )
    return _warning("devices.uuid", f"it moves from {gpu_uuid(device.uuid)} to {gpu_uuid(gpu.uuid)}")


def _cpu(manifest: Manifest, machine: Machine) -> list[Finding]:
    if manifest.cpu is None:
        reason = "it has no CPU side: it can be inspected and verified, not restored as a process"
        return [_refused("cpu", reason, "take a checkpoint with the CPU side")]
    advice = "scripts/get-criu.sh, or the distribution's package, brings CRIU 4.1 or newer"
    if machine.criu_version is None:
        return [_refused("cpu.version", "there is no CRIU here", advice)]
    if _version(machine.criu_version) < _version(manifest.cpu.version):
        reason = f"CRIU {machine.criu_version} here, {manifest.cpu.version} there"
        return [_refused("cpu.version", reason, advice)]
    return []


def _environment(manifest: Manifest, machine: Machine) -> list[Finding]:
    there = manifest.environment
    found = []
    if machine.uid not in (0, there.uid):
        reason = f"its processes belong to user {there.uid} and you are {machine.uid}"
        found.append(_refused("environment.uid", reason, "restore as that user or as root"))
    for name, path in (("working_directory", there.working_directory), ("log_path", there.log_path)):
        if path and not Path(path).exists():
            found.append(_warning(f"environment.{name}", f"{path} is not here"))
    return found


def _same_kind(device: Device, gpu: Gpu) -> bool:
    return (device.name, device.compute_major, device.compute_minor) == (gpu.name, gpu.compute_major, gpu.compute_minor)


def _version(text: str) -> tuple[int, ...]:
    """(6, 18, 44) of "6.18.44-fc-v782": the leading numbers; empty when there are none."""
    match = re.match(r"[0-9]{1,9}(?:\.[0-9]{1,9})*", text)
    return tuple(int(part) for part in match[0].split(".")) if match else ()
