"""From what an operation knows to an image's manifest."""

from __future__ import annotations

import functools
import importlib.metadata
import platform
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from woodfrog.driver import devices as driver_devices
from woodfrog.errors import BadImageError
from woodfrog.image import manifest as m
from woodfrog.operations.context import Context
from woodfrog.operations.data import DevicePart, plan_owners
from woodfrog.operations.frozen import FrozenTarget
from woodfrog.operations.notes import Notes
from woodfrog.operations.placement import machine_gpus
from woodfrog.operations.survey import Surveyed
from woodfrog.target import wire
from woodfrog.target.pid_namespace import init_of, inner_number
from woodfrog.target.process import ProcessInfo

if TYPE_CHECKING:
    from woodfrog.cpu.criu import Criu, Dumped

SHELL_JOB = "--shell-job"
CONNECTIONS = "--tcp-established"
MAX_VISIBLE_GPUS = 64  # image.manifest's cap of devices


@dataclass(frozen=True)
class Draft:
    """What is known once the survey is done; `finish` adds what the operation found."""

    surveyed: Surveyed
    driver: m.Driver
    devices: list[m.Device]
    environment: m.Environment
    runtime_directory: str
    visible_gpus: list[str]  # all of the machine: a restore onto other GPUs must name every one of them
    numbers: dict[int, int]  # of processes here → in their PID namespace, which is what CRIU's images have

    @classmethod
    def of(cls, context: Context, surveyed: Surveyed, notes: Notes) -> Draft:
        return cls(
            surveyed,
            driver=_driver(surveyed.simulated),
            devices=_devices(notes),
            environment=_environment(surveyed, notes),
            runtime_directory=str(context.runtime_directory),
            visible_gpus=machine_gpus(context)[:MAX_VISIBLE_GPUS],
            numbers={
                pid: inner_number(pid)
                for process in surveyed.processes
                for pid in (process.pid, process.parent_pid, process.session_id)
            }
            if init_of(surveyed.root_pid) is not None
            else {},
        )

    def finish(
        self,
        target: FrozenTarget,
        *,
        parts: Sequence[DevicePart],
        digests: bytes,
        chunk_bytes: int,
        parent: str,
        dumped: Dumped | None,
        criu: Criu | None,
        leave_running: bool,
        phases: dict[str, float],
    ) -> m.Manifest:
        """The manifest; name, number, CPU files and amounts are the writer's to fill in. `digests`: of all parts."""
        notes = target.notes
        index_of = {ordinal: index for index, ordinal in enumerate(sorted(notes.devices))}
        handles = [
            m.Handle(handle.handle, part.device_index, handle.size, kind_number(handle.kind), handle.host_node)
            for part in parts
            for handle in (notes.handles[index] for index in part.indices)
        ]
        owners = plan_owners(notes.handles)
        several = notes.gpu_processes if len(notes.gpu_processes) > 1 else []
        shared = [
            m.SharedHandle(
                handle.handle,
                notes.handles[owner].handle,
                handle.size,
                index_of[notes.handles[owner].device],
                kind_number(handle.kind),
            )
            for index, (handle, owner) in enumerate(zip(notes.handles, owners, strict=True))
            if index != owner
        ]
        return m.Manifest(
            kind="managed" if notes.managed else "driver-only",
            created_unix_s=time.time(),
            woodfrog_version=version(),
            operation=notes.operation_id,
            target_name=notes.name,
            gpu_pid=self._inside(notes.pid),
            gpu_processes=[m.GpuProcess(pid=self._inside(one.pid), devices=one.devices) for one in several],
            leave_running=leave_running,
            driver=self.driver,
            devices=self.devices,
            host=host(),
            processes=[
                msgspec.structs.replace(
                    _process(process), pid=self._inside(process.pid), parent_pid=self._inside(process.parent_pid)
                )
                for process in self.surveyed.processes
            ],
            environment=msgspec.structs.replace(self.environment, session_id=self._inside(self.environment.session_id)),
            parent=parent or None,
            chunk_bytes=chunk_bytes,
            handles=handles,
            digests=digests,
            shared=shared,
            allocations=m.Allocations.from_rows(
                (
                    mapping.address,
                    mapping.size_bytes,
                    mapping.handle,
                    mapping.offset_bytes,
                    index_of[mapping.device],
                    kind_number(mapping.kind),
                )
                for mapping in target.mappings
            ),
            cpu=_cpu(dumped, criu, self._inside(notes.root_pid)),
            phases=[m.Phase(name, seconds) for name, seconds in phases.items()],
            stall_s=target.stall_s,
            notes={"runtime_directory": self.runtime_directory, "visible_gpus": ",".join(self.visible_gpus)},
        )

    def _inside(self, pid: int) -> int:
        return self.numbers.get(pid, pid)


@functools.cache
def version() -> str:
    """woodfrog's own version."""
    try:
        return importlib.metadata.version("woodfrog")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def host() -> m.Host:
    """This machine."""
    return m.Host(
        hostname=platform.node(),
        kernel=platform.release(),
        architecture=platform.machine(),
        boot_id=Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
    )


def kind_number(name: str) -> int:
    """The number of a kind of allocation in wire.h."""
    return next(number for number, known in wire.tables().kinds.items() if known == name)


def kind_name(number: int) -> str:
    """The name of a kind of allocation; BadImageError for a number that wire.h does not have."""
    name = wire.tables().kinds.get(number)
    if name is None:
        raise BadImageError(
            f"the image has an allocation of kind {number}, which this woodfrog does not know",
            advice="restore it with the version that wrote it",
        )
    return name


def _driver(simulated: bool) -> m.Driver:
    major, minor = driver_devices.cuda_version()
    branch = driver_devices.driver_branch()
    return m.Driver(
        cuda_version=major * 1000 + minor * 10,
        release=".".join(str(part) for part in branch or ()),
        simulated=simulated,
    )


def _devices(notes: Notes) -> list[m.Device]:
    """The target's GPUs in the order of its own numbering."""
    by_uuid = {gpu.uuid.hex(): gpu for gpu in driver_devices.list_gpus()}
    devices = []
    for ordinal, uuid in sorted(notes.devices.items()):
        gpu = by_uuid[uuid]
        devices.append(
            m.Device(
                ordinal=ordinal,
                uuid=uuid,
                name=gpu.name,
                total_bytes=gpu.total_bytes,
                compute_major=gpu.compute_capability[0],
                compute_minor=gpu.compute_capability[1],
            )
        )
    return devices


def _process(process: ProcessInfo) -> m.Process:
    return m.Process(
        pid=process.pid,
        parent_pid=process.parent_pid,
        start_ticks=process.start_ticks,
        threads=len(process.threads),
        executable=_link(process.pid, "exe"),
        command_line=[argument[: 1 << 17] for argument in process.command_line[: 1 << 16]],
    )


def _environment(surveyed: Surveyed, notes: Notes) -> m.Environment:
    root = next(process for process in surveyed.processes if process.pid == surveyed.root_pid)
    log_bytes = Path(notes.log_path).stat().st_size if notes.log_path else 0
    return m.Environment(
        uid=root.uid,
        gid=Path(f"/proc/{root.pid}").stat().st_gid,
        working_directory=_link(root.pid, "cwd"),
        log_path=notes.log_path,
        log_bytes=log_bytes,
        session_id=root.session_id,
    )


def _cpu(dumped: Dumped | None, criu: Criu | None, root_pid: int) -> m.CpuState | None:
    if dumped is None or criu is None:
        return None
    options = [name for name, given in ((SHELL_JOB, dumped.shell_job), (CONNECTIONS, dumped.connections)) if given]
    return m.CpuState(version=criu.version_text, options=options, root_pid=root_pid)


def _link(pid: int, name: str) -> str:
    """Where a link in /proc/<pid> points to; empty when it cannot be read (the process ended)."""
    try:
        return str(Path(f"/proc/{pid}/{name}").readlink())[:4096]
    except OSError:
        return ""
