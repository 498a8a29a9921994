"""What this machine is, for judging whether an image can be restored on it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from woodfrog.driver import devices as driver_devices
from woodfrog.driver import features
from woodfrog.image.compatibility import Gpu, Machine
from woodfrog.operations.context import Context
from woodfrog.operations.manifest import version

if TYPE_CHECKING:
    from woodfrog.cpu.criu import Criu

SIMULATED_NAME = "simulated"  # in the name of every simulated GPU


def gpus(context: Context) -> tuple[Gpu, ...]:
    """The GPUs here with what is free on them now."""
    devices = context.devices.all()
    return tuple(
        Gpu(
            ordinal=gpu.ordinal,
            uuid=gpu.uuid.hex(),
            name=gpu.name,
            total_bytes=gpu.total_bytes,
            compute_major=gpu.compute_capability[0],
            compute_minor=gpu.compute_capability[1],
            free_bytes=devices[gpu.uuid.hex()].free_bytes() if gpu.uuid.hex() in devices else None,
        )
        for gpu in driver_devices.list_gpus()
    )


def facts(context: Context, criu: Criu | None) -> Machine:
    """Everything that compatibility.judge compares."""
    found = gpus(context)
    major, minor = driver_devices.cuda_version()
    branch = driver_devices.driver_branch()
    return Machine(
        cuda_version=major * 1000 + minor * 10,
        driver_release=".".join(str(part) for part in branch or ()),
        simulated=any(SIMULATED_NAME in gpu.name for gpu in found),
        gpus=found,
        criu_version=criu.version_text if criu else None,
        woodfrog_version=version(),
        remap_from=features.lacks_from("gpu_remap"),
    )
