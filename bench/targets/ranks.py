"""What targets have in common that are one rank of a job: joining it, a log of their own, the bus they see.

A rank is told its place by the environment, as torchrun tells it. NCCL where each has a GPU of its own; gloo where
several are on one (NCCL refuses that), and elsewhere.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

BUS_BYTES = 256 << 20
BUS_ROUNDS = 20


def join(kind: str) -> tuple[int, Any]:
    """This rank's number and its device, in the process group of the job, whose time-out is $RANKS_TIMEOUT_S if set."""
    import torch
    import torch.distributed as dist

    timeout_s = float(os.environ.get("RANKS_TIMEOUT_S", "0"))
    timeout = timedelta(seconds=timeout_s) if timeout_s else None
    rank, local = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    if kind != "cuda":
        dist.init_process_group("gloo", timeout=timeout)
        return rank, torch.device(kind)
    gpus = torch.cuda.device_count()
    device = torch.device("cuda", local % gpus)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl" if int(os.environ["WORLD_SIZE"]) <= gpus else "gloo", timeout=timeout)
    return rank, device


def log_path(rank: int) -> str:
    """Each rank has a log of its own: $RANK_LOG.RANK (not `--log`, which torchrun would take for an option of its own);
    without the variable its standard output."""
    log = os.environ.get("RANK_LOG", "")
    return f"{log}.{rank}" if log else ""


def bus_bandwidth(device: Any) -> float | None:
    """GB/s of an all_reduce, counted as nccl-tests do (bytes * 2 (n-1)/n / time): the best of three. NCCL only."""
    import torch
    import torch.distributed as dist

    if device.type != "cuda" or dist.get_backend() != "nccl":
        return None
    buffer = torch.ones(BUS_BYTES // 4, device=device)
    ranks = dist.get_world_size()
    best = 0.0
    for _ in range(4):  # the first one connects
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(BUS_ROUNDS):
            dist.all_reduce(buffer)
        end.record()
        end.synchronize()
        best = max(best, BUS_ROUNDS * BUS_BYTES * 2 * (ranks - 1) / ranks / (begin.elapsed_time(end) / 1e3) / 1e9)
    return best
