"""The facts of this machine that decide whether an image can be restored here; gathered once, asked of nobody else.

Starting the driver takes seconds on a real machine and may fail: what cannot be found out stays unknown.
"""

from __future__ import annotations

from pathlib import Path

from woodfrog import __version__
from woodfrog.errors import WoodfrogError
from woodfrog.image.compatibility import Gpu, Machine


def facts() -> Machine:
    """This machine as this process sees it. Costs a cuInit."""
    from woodfrog.driver import features

    cuda_version, gpus = driver_facts()
    return Machine(
        cuda_version=cuda_version,
        driver_release=driver_release(),
        simulated=is_simulated(),
        gpus=gpus,
        criu_version=criu_version(),
        woodfrog_version=__version__,
        remap_from=features.lacks_from("gpu_remap"),
    )


def driver_facts() -> tuple[int | None, tuple[Gpu, ...] | None]:
    """CUDA version of the driver (13000) and its GPUs; None, None without a driver."""
    from woodfrog.driver import devices

    try:
        major, minor = devices.cuda_version()
        found = devices.list_gpus()
    except WoodfrogError:
        return None, None
    gpus = tuple(
        Gpu(
            gpu.ordinal,
            gpu.uuid.hex(),
            gpu.name,
            gpu.total_bytes,
            *gpu.compute_capability,
            free_bytes=devices.free_bytes(gpu.uuid),
        )
        for gpu in found
    )
    return major * 1000 + minor * 10, gpus


def driver_release() -> str:
    """ "580.159.04", or empty: there is none, or it is the simulated one."""
    if is_simulated():
        return ""
    for line in _read("/proc/driver/nvidia/version").splitlines():
        words = line.split()
        for word in words:
            if word[:1].isdigit() and word.count(".") >= 1 and all(part.isdigit() for part in word.split(".")):
                return word
    return ""


def is_simulated() -> bool:
    """Whether the driver library that this process has loaded is the simulated GPU."""
    try:
        from woodfrog._native import paths

        directory = str(paths.simgpu_dir())
    except ImportError:
        return False
    return f"{directory}/" in _read("/proc/self/maps")


def criu_version() -> str | None:
    from woodfrog.cpu import criu

    try:
        return criu.find().version_text
    except WoodfrogError:
        return None


def has_real_gpu() -> bool:
    """Whether NVIDIA's kernel module, or a device node given to a container, shows a GPU here; starts no driver."""
    return any(Path("/proc/driver/nvidia/gpus").glob("*/information")) or any(Path("/dev").glob("nvidia[0-9]*"))


def _read(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""
