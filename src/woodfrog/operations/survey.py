"""The first phase of everything: what the target is, what stands in the way, and what the operation will need.

It changes nothing in the target, and must refuse here whatever can be known to fail later.
"""

from __future__ import annotations

import logging
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from woodfrog.driver.process import DriverProcess, ProcessState, is_cuda_process
from woodfrog.errors import RefusedError
from woodfrog.operations.context import Context
from woodfrog.operations.frozen import AGENT_TIMEOUT_S
from woodfrog.operations.notes import Notes, boot_ticks
from woodfrog.target import limits, preconditions
from woodfrog.target.process import ProcessInfo, ProcessTree

log = logging.getLogger(__name__)

OPERATION_ID_BITS = 63  # wire.h carries it as a u64


@dataclass(frozen=True)
class DeviceUse:
    """What the target has on one device. `ordinal` is the target's own numbering, `uuid` 32 hex digits."""

    ordinal: int
    uuid: str
    owned_bytes: int


@dataclass(frozen=True)
class Surveyed:
    """A target as the survey found it."""

    name: str
    pid: int
    start_ticks: int
    root_pid: int
    managed: bool
    simulated: bool
    processes: list[ProcessInfo]
    devices: list[DeviceUse] = field(default_factory=list)
    owned_count: int = 0
    driver_bytes: int = 0  # device memory that the driver's own checkpoint saves
    host_bytes: int = 0

    @property
    def owned_bytes(self) -> int:
        return sum(device.owned_bytes for device in self.devices)

    @property
    def resident_bytes(self) -> int:
        return sum(process.resident_bytes for process in self.processes)

    @property
    def user(self) -> int:
        """Whose data it is."""
        return self.gpu_process.uid

    @property
    def gpu_process(self) -> ProcessInfo:
        return next(process for process in self.processes if process.pid == self.pid)

    def notes(self, operation: str, *, stop: bool = False, store: str = "") -> Notes:
        """Fresh notes for an operation on this target."""
        return Notes(
            operation=operation,
            operation_id=new_operation_id(),
            name=self.name,
            pid=self.pid,
            start_ticks=self.start_ticks,
            root_pid=self.root_pid,
            managed=self.managed,
            user=self.user,
            stop=stop,
            store=store,
            begun_ticks=boot_ticks(),
            tree=[process.pid for process in self.processes],
            devices={device.ordinal: device.uuid for device in self.devices},
            driver_bytes=self.driver_bytes,
            simulated=self.simulated,
            created_unix_s=time.time(),
            command=" ".join(self.gpu_process.command_line)[:4096],
            log_path=log_path_of(self.pid),
        )

    def to_dict(self) -> dict[str, Any]:
        """For people and for JSON."""
        return {
            "name": self.name,
            "pid": self.pid,
            "root_pid": self.root_pid,
            "managed": self.managed,
            "processes": len(self.processes),
            "gpu_bytes": self.owned_bytes,
            "driver_bytes": self.driver_bytes,
            "resident_bytes": self.resident_bytes,
            "devices": [device.uuid for device in self.devices],
        }


def survey(context: Context, root_pid: int, *, image: bool) -> Surveyed:
    """Look at the tree below `root_pid`; RefusedError says what stands in the way. `image`: the CPU side is dumped."""
    with ProcessTree(root_pid) as tree:
        if os.getpid() in tree.handles:
            raise RefusedError(
                f"the node daemon itself runs below process {root_pid}",
                advice="give the process that uses the GPU, not one that has the daemon below it",
                pid=root_pid,
            )
        users = preconditions.gpu_processes(tree, is_cuda_process)
        agent = next((process for process in users if process.agent_tid is not None), None)
        answer = None
        link = None
        if len(users) == 1 and agent is not None and agent.state != "T":
            link = context.agents.ensure(agent.pid, AGENT_TIMEOUT_S)
            answer = link.survey()
        obstacles = preconditions.survey(tree, agent_survey=answer, is_cuda_process=is_cuda_process)
        preconditions.refuse(obstacles, image=image)
        process = users[0]
        if answer is not None:
            limits.require_open_files(2 * answer.owned_count)  # the exported ones, and the maps of them
        surveyed = Surveyed(
            name=(link.hello.name if link else "") or context.name_of(process.identity) or f"pid-{process.pid}",
            pid=process.pid,
            start_ticks=process.start_ticks,
            root_pid=root_pid,
            managed=answer is not None,
            simulated=process.is_simulated,
            processes=tree.processes,
            devices=[
                DeviceUse(device.ordinal, device.uuid.hex(), device.owned_bytes)
                for device in sorted(answer.devices, key=lambda device: device.ordinal)
            ]
            if answer is not None
            else [],
            owned_count=answer.owned_count if answer is not None else 0,
            driver_bytes=answer.driver_owned_bytes if answer is not None else 0,
            host_bytes=answer.host_bytes if answer is not None else 0,
        )
    state = DriverProcess(surveyed.pid).state()
    if state is not ProcessState.RUNNING:
        raise RefusedError(
            f"the driver says process {surveyed.pid} is {state.name.lower()}, not running",
            advice="somebody else has it in hand (cuda-checkpoint?), or `woodfrog resume` brings it back",
            pid=surveyed.pid,
        )
    return surveyed


def log_path_of(pid: int) -> str:
    """The file that the process's standard output goes to; empty when it is no regular file."""
    try:
        path = Path(f"/proc/{pid}/fd/1").readlink()
    except OSError:
        return ""
    return str(path) if path.is_absolute() and path.is_file() else ""


def new_operation_id() -> int:
    """A number that no other operation has, also not after a restart or on another machine."""
    return int.from_bytes(os.urandom(8), "little") >> (64 - OPERATION_ID_BITS) or 1
