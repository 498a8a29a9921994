"""What in a target watches the clock while it is suspended."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import PurePath

from woodfrog.target import procfs

_WAY_OUT = "resume it before, or use `checkpoint --stop` and `restore`, where all its clocks stand still"


def time_outs(pids: Sequence[int], stopped: Collection[int]) -> list[str]:
    """Sentences for whoever suspends these processes, which make up a target. Empty: nothing is known of them.
    `stopped`: those where PyTorch's clock will stand still meanwhile.

    PyTorch's process groups over NCCL (torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp): 10 minutes for a collective,
    8 minutes without a sign of life of the watchdog, which waits for the driver while the target is suspended.
    """
    with_nccl = [pid for pid in pids if _has_nccl(pid)] if len(pids) > 1 else []
    if not with_nccl:
        return []
    if all(pid in stopped for pid in with_nccl):
        return [
            "its processes use NCCL: the clock of PyTorch's watchdog stands still while it is suspended, which has not "
            f"been tried on a GPU for longer than its time-outs (8 to 10 minutes); to be sure, {_WAY_OUT}"
        ]
    return [
        "its processes use NCCL: PyTorch's watchdog may end a job that is suspended for longer than its time-outs "
        f"(8 minutes, TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC; 10, init_process_group); {_WAY_OUT}"
    ]


def _has_nccl(pid: int) -> bool:
    return any(PurePath(one.path).name.startswith("libnccl.so") for one in procfs.mapped_files(pid))
