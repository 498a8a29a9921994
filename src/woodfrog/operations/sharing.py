"""Which handles of a target's processes are the same physical memory, and whether all who share it are in the target.

Runs between export and release, when nothing has changed yet in any process. Descriptors tell what is one memory
(target/same_file.py); the interposers tell what was exported, imported, and by whom. Must never let an operation go on
when memory is shared with a process outside: that one would keep the old memory while the target gets new.

What can be seen: every descriptor of shared memory that a process of this user has open, and with it every importer
that runs under woodfrog (its interposer keeps one open). What cannot be seen: an importer without interposer that has
closed its descriptor, and a descriptor on its way through a socket. So memory with fewer importers in the target than
it was exported times is refused while there is a process, outside of the target and without interposer, that has the
GPU open.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec

from woodfrog.errors import RefusedError, TargetState
from woodfrog.operations.frozen import FrozenTarget
from woodfrog.operations.members import Member
from woodfrog.operations.notes import HandleNote
from woodfrog.target import procfs, same_file
from woodfrog.target.memory import Shared

KEEPER_NAME = "woodfrog-keeper"[:15]  # as the kernel keeps names; it holds what is being handed over
_DRIVER_LIBRARY = "/libcuda.so"
_INTERPOSER = "libwoodfrog_interpose.so"


@dataclass(frozen=True)
class Use:
    """One handle of shared memory, in one process."""

    target: FrozenTarget
    member: Member
    index: int  # of the handle, among the target's
    shared: Shared
    fd: int
    size_bytes: int

    @property
    def pid(self) -> int:
        return self.member.pid


def settle(targets: Sequence[FrozenTarget]) -> None:
    """Number the memory that handles share (HandleNote.memory), in the notes and in the keeper's copy of them.

    `targets`: all processes of the target that use a GPU, each exported and none released. RefusedError names the
    process that shares memory with one outside; then nothing has changed.
    """
    groups = _groups([use for target in targets for use in _uses(target, target.notes.handles, target.fds)])
    if not groups:
        return
    _require_inside(groups, targets)
    changed: dict[int, FrozenTarget] = {}
    for use, number in _numbers(groups):
        notes = use.target.notes
        notes.handles[use.index] = msgspec.structs.replace(notes.handles[use.index], memory=number)
        changed[notes.pid] = use.target
    for target in changed.values():
        target.record.update(target.notes)


def numbered(target: FrozenTarget, handles: Sequence[HandleNote], fds: Sequence[int]) -> list[HandleNote]:
    """`handles` of a target that runs on (`FrozenTarget.peek`) with the numbers of the memory that they share. Who else
    may have it is looked at once it is at rest. RefusedError for memory that nobody can tell the size of."""
    result = list(handles)
    groups = _groups(list(_uses(target, handles, fds)))
    inside = {target.notes.pid, *target.notes.tree}
    for group in groups:
        _require_exporter(group, inside)
    for use, number in _numbers(groups):
        result[use.index] = msgspec.structs.replace(result[use.index], memory=number)
    return result


def _uses(target: FrozenTarget, handles: Sequence[HandleNote], fds: Sequence[int]) -> Iterator[Use]:
    index_of = {handle.handle: index for index, handle in enumerate(handles)}
    for member in target.members:
        for shared in member.shared:
            if shared.exports or shared.by_ipc or shared.imported:  # else host memory that nobody else has
                index = index_of[shared.handle]
                yield Use(target, member, index, shared, fds[index], handles[index].size)


def _groups(uses: Sequence[Use]) -> list[list[Use]]:
    """Those of one memory together; each use is in one."""
    return [[uses[position] for position in group] for group in same_file.groups([use.fd for use in uses])]


def _numbers(groups: Sequence[Sequence[Use]]) -> Iterator[tuple[Use, int]]:
    """A number from 1 on for each memory that several handles are."""
    shared = [group for group in groups if len(group) > 1]
    for number, group in enumerate(shared, 1):
        for use in group:
            yield use, number


def _require_inside(groups: Sequence[Sequence[Use]], targets: Sequence[FrozenTarget]) -> None:
    inside = {pid for target in targets for pid in (target.notes.pid, *target.notes.tree)}
    for group in groups:
        _require_exporter(group, inside)
    _require_no_other_holder(groups, inside)
    unmatched = [group[0] for group in groups if _exports(group) > sum(use.shared.imported for use in group)]
    stranger = next(_strangers(inside), None) if unmatched else None
    if stranger is not None:
        use = unmatched[0]
        raise _refused(
            use,
            f"process {use.pid} has exported {_size(use)} of GPU memory more often than processes of the target have "
            f"it imported, and process {stranger}, outside of the target and without woodfrog, uses the GPU and may "
            "have it",
            advice="run all processes that share GPU memory as one target under `woodfrog run`, or end that process",
        )


def _exports(group: Sequence[Use]) -> int:
    return sum(use.shared.exports for use in group)


def _require_exporter(group: Sequence[Use], inside: set[int]) -> None:
    """Memory that was imported must come from the target."""
    if _exports(group) or any(use.shared.by_ipc for use in group):
        return
    use = group[0]
    exporter = next((one.shared.exporter for one in group if one.shared.exporter), 0)
    if exporter not in inside:
        who = f"process {exporter}, which is" if exporter else "a process that is"
        raise _refused(
            use,
            f"process {use.pid} has imported {_size(use)} of GPU memory from {who} not part of the target",
            advice="give the process that both descend from, or let the memory be released first",
        )
    # The exporter has given its own handle up. How much memory it is only a mapping tells.
    mapped = {(one.pid, mapping.handle) for one in group for mapping in one.member.mappings}
    if not any((one.pid, one.shared.handle) in mapped for one in group):
        raise _refused(
            use,
            f"process {use.pid} has imported GPU memory that process {exporter} has given up, and not mapped it, so "
            "that nobody can say how much it is",
            advice="try again when it has mapped or released it",
        )


def _require_no_other_holder(groups: Sequence[Sequence[Use]], inside: set[int]) -> None:
    ours = {group[0].fd: group for group in groups}
    kept = {(use.pid, use.shared.kept_fd) for group in groups for use in group}
    for holder in same_file.holders(list(ours), _others()):
        if (holder.pid, holder.descriptor) in kept:
            continue
        use = ours[holder.ours][0]
        if holder.pid in inside:
            raise _refused(
                use,
                f"process {holder.pid} still has a descriptor ({holder.descriptor}) open of {_size(use)} of GPU memory "
                "that it shares",
                advice="let it close the descriptor once it is imported, or try again later",
            )
        raise _refused(
            use,
            f"process {holder.pid}, which is not part of the target, shares {_size(use)} of GPU memory with process "
            f"{use.pid}",
            advice="give the process that both descend from, or let the memory be released first",
        )


def _others() -> Iterator[int]:
    """Every process but those that hold the descriptors for us."""
    for pid in procfs.pids():
        if pid != os.getpid() and (procfs.text(pid, "comm") or "").rstrip("\n") != KEEPER_NAME:
            yield pid


def _strangers(inside: set[int]) -> Iterator[int]:
    """Processes of this user, outside of the target, that use the GPU without our interposer."""
    machines = {_simulated_machine(pid) for pid in inside}
    for pid in _others():
        if pid in inside or _is_daemon(pid):
            continue
        try:
            maps = procfs.text(pid, "maps") or ""
            reaches = _simulated_machine(pid) in machines
        except PermissionError:
            continue
        if _DRIVER_LIBRARY in maps and _INTERPOSER not in maps and reaches:
            yield pid


def _simulated_machine(pid: int) -> str:
    """Simulated GPUs are of a machine with a name, and no memory leads from one to another; "" where they are real."""
    settings = (procfs.text(pid, "environ") or "").split("\0")
    return next((one for one in settings if one.startswith("WOODFROG_SIMGPU_MACHINE=")), "")


def _is_daemon(pid: int) -> bool:
    return "woodfrog.daemon" in procfs.command_line(pid)


def _size(use: Use) -> str:
    return f"{use.size_bytes >> 20} MiB"


def _refused(use: Use, reason: str, advice: str) -> RefusedError:
    return RefusedError(
        reason, advice=advice, pid=use.pid, target_state=TargetState.RUNNING, details={"code": "shared_memory"}
    )
