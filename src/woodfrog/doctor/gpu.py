"""Checks of the driver and the GPUs, real or simulated. See checks.py."""

from __future__ import annotations

import os
import re
from pathlib import Path

from woodfrog.doctor import machine
from woodfrog.doctor.checks import Check, Verdict, read
from woodfrog.errors import WoodfrogError
from woodfrog.image.inspect import human_bytes


def check_driver() -> list[Check]:
    from woodfrog.driver import devices, features

    try:
        major, minor = devices.cuda_version()
    except WoodfrogError as error:
        return [Check("driver", Verdict.FAIL, error.reason, error.advice)]
    if machine.is_simulated():
        return [Check("driver", Verdict.OK, f"the simulated GPU, CUDA {major}.{minor}")]
    release = machine.driver_release() or ".".join(map(str, devices.driver_branch() or ()))
    if release:
        branch = int(release.split(".")[0])
        finding = f"{release}, CUDA {major}.{minor}"
    else:  # in a container neither /proc/driver nor NVML may be there; the CUDA version tells the branch
        branch = features.branch_of_cuda((major, minor)) or 0
        known = f"branch {branch} or newer by its CUDA version" if branch else "older than all that can checkpoint"
        finding = f"CUDA {major}.{minor}, {known} (its release is not told here)"
    if not features.has("checkpoint_api", branch):
        fix = f"install driver {features.MINIMUM_BRANCH} or newer"
        why = "too old, it" if branch < features.MINIMUM_BRANCH else "it"
        return [Check("driver", Verdict.FAIL, f"{finding}: {why} exports no cuCheckpointProcess*", fix)]
    try:
        features.require_checkpoints()
    except WoodfrogError as error:
        return [Check("driver", Verdict.FAIL, f"{finding}: {error.reason}", error.advice)]
    missing = [v.feature.description for v in features.judge(branch, features.exported_symbols()) if not v.available]
    text = f"{finding}; not in this driver: {'; '.join(missing)}" if missing else finding
    return [Check("driver", Verdict.OK, text)]


def check_devices() -> list[Check]:
    from woodfrog.driver import devices

    try:
        gpus = devices.list_gpus()
    except WoodfrogError as error:
        return [Check("GPUs", Verdict.FAIL, error.reason, error.advice)]
    if not gpus:
        return [Check("GPUs", Verdict.FAIL, "the driver shows no GPU", "look at CUDA_VISIBLE_DEVICES and nvidia-smi")]
    found = []
    for gpu in gpus:
        capability = ".".join(map(str, gpu.compute_capability))
        free = devices.free_bytes(gpu.uuid)
        memory = human_bytes(gpu.total_bytes) + (f", {human_bytes(free)} free" if free is not None else "")
        found.append(Check(f"GPU {gpu.ordinal}", Verdict.OK, f"{gpu.name}, {capability}, {memory}, {gpu.uuid_text}"))
    return found


def check_mig() -> list[Check]:
    from woodfrog.driver import devices

    try:
        gpus = devices.list_gpus()
    except WoodfrogError:
        return [Check("MIG", Verdict.NOT_APPLICABLE, "no driver")]
    states = {gpu.ordinal: devices.mig_enabled(gpu.uuid) for gpu in gpus}
    split = [str(ordinal) for ordinal, enabled in states.items() if enabled]
    if split:
        fix = "the driver cannot checkpoint MIG instances: use another GPU, or have MIG switched off"
        return [Check("MIG", Verdict.FAIL, f"on for GPU {', '.join(split)}", fix)]
    if any(enabled is None for enabled in states.values()):
        verdict = Verdict.NOT_APPLICABLE if machine.is_simulated() else Verdict.WARNING
        return [Check("MIG", verdict, "not known (NVML does not tell)")]
    return [Check("MIG", Verdict.OK, "off")]


def check_mps() -> list[Check]:
    directory = os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps")
    servers = [
        path.parent.name for path in Path("/proc").glob("[0-9]*/comm") if read(str(path)).startswith("nvidia-cuda-mps")
    ]
    if servers or Path(directory, "control").exists():
        finding = f"a control daemon runs (pid {', '.join(servers)})" if servers else f"{directory} has a control pipe"
        return [Check("MPS", Verdict.WARNING, finding, "the driver cannot checkpoint its clients: stop it")]
    return [Check("MPS", Verdict.OK, "off")]


def check_host_memory() -> list[Check]:
    """What a suspend of everything on the GPUs would need, against what this host has."""
    match = re.search(r"^MemAvailable:\s*(\d+) kB", read("/proc/meminfo"), re.MULTILINE)
    available = int(match[1]) * 1024 if match else 0
    _, gpus = machine.driver_facts()
    if not gpus:
        return [
            Check("host memory", Verdict.NOT_APPLICABLE, f"{human_bytes(available)} available, no GPU to compare with")
        ]
    wanted = sum(gpu.total_bytes for gpu in gpus)
    finding = f"{human_bytes(available)} available, {human_bytes(wanted)} of GPU memory"
    if available < wanted:
        fix = "full GPUs cannot be suspended all at once; checkpoints to disk stream through what there is"
        return [Check("host memory", Verdict.WARNING, finding, fix)]
    return [Check("host memory", Verdict.OK, finding)]
