"""Which GPUs a target is on: as its agents say, and as the ranks of a collective see it themselves."""

from __future__ import annotations

from product import Product, Stepper


def uuids(product: Product) -> list[str]:
    """Of the daemon's GPUs, in its order."""
    return [one["uuid"] for one in product.call("doctor")["devices"]]


def gpus_of(product: Product, target: Stepper) -> list[list[str]]:
    """For each process of the target the UUIDs of the GPUs that its memory is on, as its agent says."""
    (row,) = (row for row in product.call("ps") if row["root_pid"] == target.pid)
    return [one["gpus"] for one in row["gpu_processes"]]


def ranks_of(job: Stepper) -> list[str]:
    """The GPU of each rank, as the ranks themselves see it, a few steps after whatever has just happened."""
    job.wait_steps(8)
    said = {int(words[1]): words[3] for line in job.lines() if (words := line.split())[2:3] == ["gpu"]}
    return [gpu for _, gpu in sorted(said.items())]
