"""What in a target watches the clock while it is suspended."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import PurePath

from woodfrog.target import procfs


def time_outs(pids: Iterable[int]) -> list[str]:
    """Sentences for whoever suspends these processes, which make up a target. Empty: nothing is known of them.

    PyTorch's process groups over NCCL (torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp): 10 minutes for a collective,
    8 minutes without a sign of life of the watchdog, which waits for the driver while the target is suspended.
    """
    of_job = list(pids)
    if len(of_job) < 2 or not any(_has_nccl(pid) for pid in of_job):
        return []
    return [
        "its processes use NCCL: PyTorch's watchdog may end a job that is suspended for longer than its time-outs "
        "(8 minutes, TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC; 10, init_process_group); resume it before, or use "
        "`checkpoint --stop` and `restore`, where its clocks stand still"
    ]


def _has_nccl(pid: int) -> bool:
    return any(PurePath(one.path).name.startswith("libnccl.so") for one in procfs.mapped_files(pid))
