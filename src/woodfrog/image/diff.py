"""What differs between two images, by their manifests alone: which allocations and files, how much, where.

Chunks are compared by digest, so a changed byte shows as its whole chunk, and a small allocation may show as changed
because a neighbour in the same chunk is. No memory content is read or shown.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from woodfrog.errors import RefusedError
from woodfrog.image.chunks import Cut
from woodfrog.image.lookup import Lookup
from woodfrog.image.manifest import DIGEST_BYTES, Allocation, FileRecord, Manifest, member_of
from woodfrog.image.spans import Handles, Marks, Span, spans, total

SAME, CHANGED = range(2)
MARKS = Marks(CHANGED, "█", "▄", {SAME: "░"})
ASCII_MARKS = Marks(CHANGED, "#", "+", {SAME: "-"})
_BLOCK = 256  # digests compared at once: what did not change is most of it
# CRIU's files of one process end with its number (core-101.img); all others are of the whole tree.
_PROCESS_FILE = re.compile(r"(?:.*/)?[a-z-]+-([0-9]{1,10})\.img")
# These have a number that is no process's: the pages file of pagemap-<pid>.img says its own inside.
_NUMBERED_OTHERWISE = re.compile(r"(?:.*/)?(?:pages|pagemap-shmem|tmpfs-dev|tmpfs|ghost-file)-[0-9]+\.img")


@dataclass(frozen=True)
class AllocationDiff:
    """`state`: same, changed, added, removed, or unknown (it lies in its chunks otherwise than before, so that digests
    cannot tell). Sizes are those of the second image, of a removed one those of the first."""

    address: int
    size_bytes: int
    device: int  # the GPU's ordinal
    state: str
    spans: list[Span]

    @property
    def changed_bytes(self) -> int:
        return total(self.spans, CHANGED)

    def to_dict(self) -> dict[str, Any]:
        ranges = [[span.offset, span.size_bytes] for span in self.spans if span.kind == CHANGED]
        return {
            "address": self.address,
            "size_bytes": self.size_bytes,
            "device": self.device,
            "state": self.state,
            "changed_bytes": self.changed_bytes,
            "changed_ranges": ranges,
        }


@dataclass(frozen=True)
class FileDiff:
    """One of CRIU's files. `changed_bytes`: chunks that differ from what was at the same place, or, of a file of pages
    that was cut by their addresses, that were nowhere in the file; `new_bytes`: of these, chunks that are nowhere in
    the first image, each once (the rest has only moved)."""

    path: str
    state: str  # same, changed, added or removed
    size_bytes: int
    changed_bytes: int
    new_bytes: int


@dataclass(frozen=True)
class ProcessDiff:
    """`pid` None: the process tree as a whole, and what cannot be told to be one process's."""

    pid: int | None
    command: str
    state: str  # same, changed, added or removed
    files: list[FileDiff]

    @property
    def changed_bytes(self) -> int:
        return sum(file.changed_bytes for file in self.files)

    @property
    def new_bytes(self) -> int:
        return sum(file.new_bytes for file in self.files)

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "changed_bytes": self.changed_bytes, "new_bytes": self.new_bytes}


@dataclass(frozen=True)
class ImageDiff:
    """Everything, the allocations in the order of their addresses. `gpu_changed_bytes` counts the bytes of allocations
    in changed chunks; `gpu_new_bytes` whole chunks of GPU memory of the second image that are nowhere in the first,
    each once: what moving from one to the other costs."""

    before: str
    after: str
    chunk_bytes: int
    gpu_bytes: int  # of the second image
    gpu_new_bytes: int
    allocations: list[AllocationDiff]
    processes: list[ProcessDiff]

    @property
    def same(self) -> bool:
        return self.count("same") == len(self.allocations) and all(one.state == "same" for one in self.processes)

    def count(self, state: str) -> int:
        """Allocations in that state."""
        return sum(1 for allocation in self.allocations if allocation.state == state)

    @property
    def gpu_changed_bytes(self) -> int:
        return sum(allocation.changed_bytes for allocation in self.allocations)

    def to_dict(self) -> dict[str, Any]:
        states = ("same", "changed", "added", "removed", "unknown")
        return {
            "before": self.before,
            "after": self.after,
            "same": self.same,
            "chunk_bytes": self.chunk_bytes,
            "gpu_bytes": self.gpu_bytes,
            "gpu_changed_bytes": self.gpu_changed_bytes,
            "gpu_new_bytes": self.gpu_new_bytes,
            "allocation_counts": {state: self.count(state) for state in states},
            "allocations": [one.to_dict() for one in self.allocations if one.state != "same"],
            "processes": [one.to_dict() for one in self.processes],
        }


def diff(before: Manifest, after: Manifest) -> ImageDiff:
    """RefusedError when the images' chunks have different sizes."""
    if before.chunk_bytes != after.chunk_bytes:
        raise RefusedError(
            f"{before.reference} has chunks of {before.chunk_bytes} bytes and {after.reference} of "
            f"{after.chunk_bytes}: their digests cannot be compared",
            advice="compare images of stores with the same chunk size",
        )
    handles = Cut([handle.size for handle in before.handles], before.chunk_bytes)
    files = Cut.of_files(_records(before), before.chunk_bytes)
    known = Lookup(before.all_digests(), handles.sizes + files.sizes, before.chunk_bytes)
    return ImageDiff(
        before.reference,
        after.reference,
        after.chunk_bytes,
        after.gpu_bytes,
        _gpu_new_bytes(after, known),
        _allocations(before, after),
        _processes(before, after, known),
    )


def changed_chunks(before: bytes, after: bytes) -> bytearray:
    """SAME or CHANGED for each chunk of `after`, compared with that at the same place in `before`."""
    count = len(after) // DIGEST_BYTES
    kinds = bytearray(count)
    step = _BLOCK * DIGEST_BYTES
    for begin in range(0, len(after), step):
        if after[begin : begin + step] == before[begin : begin + step]:
            continue
        for at in range(begin, min(begin + step, len(after)), DIGEST_BYTES):
            if after[at : at + DIGEST_BYTES] != before[at : at + DIGEST_BYTES]:
                kinds[at // DIGEST_BYTES] = CHANGED
    return kinds


def _gpu_new_bytes(after: Manifest, known: Lookup) -> int:
    sizes = Cut([handle.size for handle in after.handles], after.chunk_bytes).sizes
    return sum(sizes[at] for at in known.missing(after.digests, sizes))


def _allocations(before: Manifest, after: Manifest) -> list[AllocationDiff]:
    old = {(_ordinal(before, row), member_of(row.handle), row.address): row for row in before.allocations.rows()}
    old_handles, new_handles = Handles(before), Handles(after)
    found = []
    for row in after.allocations.rows():
        there = old.pop((_ordinal(after, row), member_of(row.handle), row.address), None)
        state, ranges = "added", [Span(0, row.size, CHANGED)]
        if there is not None:
            state, ranges = _compared(before, there, old_handles, after, row, new_handles)
        found.append(AllocationDiff(row.address, row.size, _ordinal(after, row), state, ranges))
    for (device, _, address), row in old.items():
        found.append(AllocationDiff(address, row.size, device, "removed", []))
    return sorted(found, key=lambda one: (one.device, one.address))


def _ordinal(manifest: Manifest, row: Allocation) -> int:
    return manifest.devices[row.device].ordinal


def _compared(
    before: Manifest, old: Allocation, old_handles: Handles, after: Manifest, new: Allocation, new_handles: Handles
) -> tuple[str, list[Span]]:
    """The state of an allocation that is in both images, and its ranges."""
    chunk_bytes = after.chunk_bytes
    if (old.offset - new.offset) % chunk_bytes:
        return "unknown", []
    first, end = old_handles.chunks_of(old.handle, old.offset, old.size)
    was = before.digests[first * DIGEST_BYTES : end * DIGEST_BYTES]
    first, end = new_handles.chunks_of(new.handle, new.offset, new.size)
    kinds = changed_chunks(was, after.digests[first * DIGEST_BYTES : end * DIGEST_BYTES])
    ranges = spans(kinds, new.offset, new.size, chunk_bytes)
    same = old.size == new.size and not any(kinds)
    return ("same" if same else "changed"), ranges


def _processes(before: Manifest, after: Manifest, known: Lookup) -> list[ProcessDiff]:
    old_commands = {process.pid: " ".join(process.command_line) for process in before.processes}
    new_commands = {process.pid: " ".join(process.command_line) for process in after.processes}
    files: dict[int | None, list[FileDiff]] = {}
    owners = {record.path: record.pid for record in (*_records(before), *_records(after)) if record.pid}
    only = next(iter(new_commands)) if old_commands.keys() == new_commands.keys() and len(new_commands) == 1 else None
    for file in _files(_records(before), _records(after), after.chunk_bytes, known):
        pid = only if only is not None else _pid_of(file.path, owners, old_commands.keys() | new_commands.keys())
        files.setdefault(pid, []).append(file)
    found = []
    for pid in sorted(old_commands.keys() | new_commands.keys()):
        mine = files.pop(pid, [])
        if pid not in new_commands or pid not in old_commands:
            state = "removed" if pid in old_commands else "added"
        else:
            same = old_commands[pid] == new_commands[pid] and all(file.state == "same" for file in mine)
            state = "same" if same else "changed"
        found.append(ProcessDiff(pid, new_commands.get(pid, old_commands.get(pid, "")), state, mine))
    if rest := files.pop(None, []):
        state = "same" if all(file.state == "same" for file in rest) else "changed"
        found.append(ProcessDiff(None, "", state, rest))
    return found


def _pid_of(path: str, owners: Mapping[str, int], pids: Collection[int]) -> int | None:
    if path in owners:
        return owners[path] if owners[path] in pids else None
    match = _PROCESS_FILE.fullmatch(path)
    if match is None or _NUMBERED_OTHERWISE.fullmatch(path):
        return None
    return int(match[1]) if int(match[1]) in pids else None


def _records(manifest: Manifest) -> Sequence[FileRecord]:
    return manifest.cpu.files if manifest.cpu is not None else []


def _files(
    before: Sequence[FileRecord], after: Sequence[FileRecord], chunk_bytes: int, known: Lookup
) -> list[FileDiff]:
    old = {record.path: record for record in before}
    found = []
    for record in after:
        was = old.pop(record.path, None)
        sizes = Cut.of_files([record], chunk_bytes).sizes
        kinds = _kinds(was, record, sizes, chunk_bytes)
        changed_bytes = sum(size for size, kind in zip(sizes, kinds, strict=True) if kind == CHANGED)
        new_bytes = sum(sizes[at] for at in known.missing(record.digests, sizes) if kinds[at] == CHANGED)
        state = "added" if was is None else "same" if _has_same_bytes(was, record) else "changed"
        found.append(FileDiff(record.path, state, record.size_bytes, changed_bytes, new_bytes))
    found += [FileDiff(path, "removed", 0, 0, 0) for path in old]
    return found


def _kinds(was: FileRecord | None, record: FileRecord, sizes: array[int], chunk_bytes: int) -> bytearray:
    """SAME or CHANGED for each chunk of a file."""
    if was is None or not (was.sizes and record.sizes):
        return changed_chunks(was.digests if was is not None else b"", record.digests)
    # A page's place in the file says nothing: whether the file had a chunk like that does.
    return Lookup(was.digests, Cut.of_files([was], chunk_bytes).sizes, chunk_bytes).strange(record.digests, sizes)


def _has_same_bytes(was: FileRecord, record: FileRecord) -> bool:
    return (was.size_bytes, was.sizes, was.digests) == (record.size_bytes, record.sizes, record.digests)
