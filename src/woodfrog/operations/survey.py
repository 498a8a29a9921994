"""The first phase of everything: what the target is, what stands in the way, and what the operation will need.

It changes nothing in the target, and must refuse here whatever can be known to fail later.
"""

from __future__ import annotations

import logging
import os
import time
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from woodfrog.cpu.pid_namespace import require_privilege
from woodfrog.driver import features
from woodfrog.driver.process import DriverProcess, ProcessState, is_cuda_process
from woodfrog.errors import RefusedError
from woodfrog.image.inspect import gpu_uuid
from woodfrog.operations import room
from woodfrog.operations.context import Context
from woodfrog.operations.members import AGENT_TIMEOUT_S
from woodfrog.operations.notes import MemberNote, Notes, boot_ticks
from woodfrog.target import limits, pid_namespace, preconditions
from woodfrog.target.memory import Survey
from woodfrog.target.process import ProcessInfo, ProcessTree

log = logging.getLogger(__name__)

OPERATION_ID_BITS = 63  # wire.h carries it as a u64


@dataclass(frozen=True)
class DeviceUse:
    """What the target has on one device. `ordinal` is the target's numbering (of several processes: notes.MemberNote),
    `uuid` 32 hex digits."""

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
    members: list[MemberNote]  # the processes that use the GPU, `pid` first
    devices: list[DeviceUse] = field(default_factory=list)
    owned_count: int = 0
    driver_bytes: int = 0  # device memory that the driver's own checkpoint saves
    host_bytes: int = 0

    @property
    def owned_bytes(self) -> int:
        return sum(device.owned_bytes for device in self.devices)

    @property
    def control_state_bytes(self) -> int:
        """Host memory that the driver's checkpoints of all processes take."""
        return self.driver_bytes + len(self.members) * room.control_state_bytes(self.simulated)

    @property
    def gpu_control_state_bytes(self) -> int:
        """Device memory that the driver's restores of all processes take, were they all on one device."""
        return self.driver_bytes + len(self.members) * room.gpu_control_state_bytes(self.simulated)

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
            members=self.members if len(self.members) > 1 else [],
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
            "gpu_pids": [member.pid for member in self.members],
            "gpu_bytes": self.owned_bytes,
            "driver_bytes": self.driver_bytes,
            "resident_bytes": self.resident_bytes,
            "devices": [device.uuid for device in self.devices],
        }


def survey(context: Context, root_pid: int, *, image: bool) -> Surveyed:
    """Look at the tree below `root_pid`; RefusedError says what stands in the way. `image`: the CPU side is dumped."""
    features.require_checkpoints()
    with ProcessTree(root_pid) as tree:
        if os.getpid() in tree.handles:
            raise RefusedError(
                f"the node daemon itself runs below process {root_pid}",
                advice="give the process that uses the GPU, not one that has the daemon below it",
                pid=root_pid,
            )
        users = preconditions.gpu_processes(tree, is_cuda_process)
        links = {
            user.pid: context.agents.ensure(user.pid, AGENT_TIMEOUT_S)
            for user in users
            if user.agent_tid is not None and user.state != "T"
        }
        answers = {pid: link.survey() for pid, link in links.items()}
        obstacles = preconditions.survey(tree, agent_surveys=answers, is_cuda_process=is_cuda_process)
        preconditions.refuse(obstacles, image=image)
        own_name = pid_namespace.name_of(root_pid)
        if image and own_name:
            require_privilege("the image of a target in a PID namespace of its own")
        process = users[0]
        ordered = [answers[user.pid] for user in users if user.pid in answers]
        limits.require_open_files(2 * sum(answer.owned_count for answer in ordered))  # the exported, and maps of them
        numbering = Numbering()
        surveyed = Surveyed(
            name=own_name
            or next((link.hello.name for link in links.values() if link.hello.name), "")
            or context.name_of(process.identity)
            or f"pid-{process.pid}",
            pid=process.pid,
            start_ticks=process.start_ticks,
            root_pid=root_pid,
            managed=bool(answers),
            simulated=process.is_simulated,
            processes=tree.processes,
            members=[
                MemberNote(user.pid, user.start_ticks, numbering.add(answers[user.pid]) if user.pid in answers else {})
                for user in users
            ],
            devices=numbering.devices(),
            owned_count=sum(answer.owned_count for answer in ordered),
            driver_bytes=sum(answer.driver_owned_bytes for answer in ordered),
            host_bytes=sum(answer.host_bytes for answer in ordered),
        )
    _require_devices(context, surveyed)
    for member in surveyed.members:
        state = DriverProcess(member.pid).state()
        if state is not ProcessState.RUNNING:
            raise RefusedError(
                f"the driver says process {member.pid} is {state.name.lower()}, not running",
                advice="somebody else has it in hand (cuda-checkpoint?), or `woodfrog resume` brings it back",
                pid=member.pid,
            )
    return surveyed


def _require_devices(context: Context, surveyed: Surveyed) -> None:
    """RefusedError when the target is on a GPU that this daemon does not use."""
    here = context.devices.all()
    for device in surveyed.devices:
        if device.uuid not in here:
            raise RefusedError(
                f"{surveyed.name} uses {gpu_uuid(device.uuid)}, which this daemon does not see; it sees "
                f"{', '.join(map(gpu_uuid, here)) or 'none'}",
                advice="start the daemon without CUDA_VISIBLE_DEVICES: it goes by UUIDs, whatever a target may see",
                pid=surveyed.pid,
            )


class Numbering:
    """The target's device ordinals: the first process's own ones; GPUs that only others see get free numbers."""

    def __init__(self) -> None:
        self._ordinals: dict[str, int] = {}
        self._owned_bytes: dict[str, int] = {}

    def add(self, answer: Survey) -> dict[int, int]:
        """One more process: those of its ordinals that are not the target's, and what the target calls them."""
        own = {device.ordinal: device.uuid.hex() for device in answer.devices}
        fresh = [(ordinal, uuid) for ordinal, uuid in sorted(own.items()) if uuid not in self._ordinals]
        for ordinal, uuid in fresh:
            taken = set(self._ordinals.values())
            self._ordinals[uuid] = ordinal if ordinal not in taken else next(i for i in count() if i not in taken)
        for device in answer.devices:
            uuid = device.uuid.hex()
            self._owned_bytes[uuid] = self._owned_bytes.get(uuid, 0) + device.owned_bytes
        return {ordinal: self._ordinals[uuid] for ordinal, uuid in own.items() if self._ordinals[uuid] != ordinal}

    def devices(self) -> list[DeviceUse]:
        """All GPUs, by the target's ordinals."""
        return [
            DeviceUse(ordinal, uuid, self._owned_bytes[uuid])
            for uuid, ordinal in sorted(self._ordinals.items(), key=lambda item: item[1])
        ]


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
