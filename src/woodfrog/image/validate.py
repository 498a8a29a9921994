"""Checks a manifest's fields against each other (docs/format.md, "Checked against each other").

Used on everything that is read and everything that is about to be written. It must never trust one field because
another looks right, and never take more than linear time and memory (but for one sort) in the manifest's size.
"""

from __future__ import annotations

import itertools

from woodfrog.errors import BadImageError
from woodfrog.image.manifest import (
    DIGEST_BYTES,
    CpuState,
    Feature,
    FileRecord,
    Manifest,
    chunk_count,
    member_of,
)
from woodfrog.store.records import positions_of

MAX_ADDRESS = 1 << 57  # five-level page tables: no user address is higher
PAGE_BYTES = 4096  # of which chunks of a file's own sizes are multiples, but for the last


def validate(manifest: Manifest, flags: Feature) -> None:
    """BadImageError with the first contradiction found; `flags` are the mandatory flags of the header."""
    if flags != manifest.features:
        raise _bad(f"its feature flags are {int(flags):#x} where its contents call for {int(manifest.features):#x}")
    if manifest.chunk_bytes & (manifest.chunk_bytes - 1):
        raise _bad(f"its chunk size {manifest.chunk_bytes} is not a power of two")
    if manifest.kind == "driver-only" and (
        manifest.digests or manifest.handles or manifest.shared or len(manifest.allocations)
    ):
        raise _bad("it is driver-only and yet lists GPU memory of its own")
    _check_devices(manifest)
    _check_handles(manifest)
    _check_shared(manifest)
    _check_allocations(manifest)
    _check_processes(manifest)
    if manifest.cpu is not None:
        _check_cpu(manifest.cpu, manifest.chunk_bytes)


def _bad(what: str) -> BadImageError:
    return BadImageError(
        f"the image's manifest contradicts itself: {what}",
        advice="use another image; this one was damaged or made by a faulty writer",
    )


def _check_devices(manifest: Manifest) -> None:
    if len({device.uuid for device in manifest.devices}) != len(manifest.devices):
        raise _bad("two of its GPUs have the same UUID")


def _check_handles(manifest: Manifest) -> None:
    chunks = device = 0
    ids: set[int] = set()
    for handle in manifest.handles:
        if handle.device >= len(manifest.devices) or handle.size == 0 or handle.id in ids or handle.id >= 1 << 64:
            raise _bad(f"handle {handle.id:#x} is a duplicate, empty, or on none of its GPUs")
        if handle.device < device:
            raise _bad(f"handle {handle.id:#x} is not among the others of its GPU")
        ids.add(handle.id)
        device = handle.device
        chunks += chunk_count(handle.size, manifest.chunk_bytes)
    if len(manifest.digests) != chunks * DIGEST_BYTES:
        raise _bad(f"its handles have {chunks} chunks and {len(manifest.digests) / DIGEST_BYTES:g} digests")


def _check_shared(manifest: Manifest) -> None:
    owners = {handle.id: handle for handle in manifest.handles}
    ids = set(owners)
    for handle in manifest.shared:
        owner = owners.get(handle.of)
        if owner is None or not 0 < handle.size <= owner.size or handle.device != owner.device:
            raise _bad(f"handle {handle.id:#x} shares memory of a handle that is not there or smaller or elsewhere")
        if handle.id in ids or handle.id >= 1 << 64:
            raise _bad(f"handle {handle.id:#x} is a duplicate")
        ids.add(handle.id)


def _check_allocations(manifest: Manifest) -> None:
    try:
        columns = manifest.allocations.columns()
    except ValueError as error:
        raise _bad(f"its allocation table is damaged ({error})") from error
    handles = {handle.id: (handle.size, handle.device) for handle in manifest.handles}
    handles.update((shared.id, (shared.size, shared.device)) for shared in manifest.shared)
    ranges: list[tuple[int, int, int]] = []  # each process has addresses of its own
    for address, size, handle, offset, device, _ in zip(*columns, strict=True):
        handle_size, handle_device = handles.get(handle, (0, -1))
        if size == 0 or offset + size > handle_size or device != handle_device or address + size > MAX_ADDRESS:
            raise _bad(f"the allocation at {address:#x} does not lie inside its handle")
        ranges.append((member_of(handle) if manifest.gpu_processes else 0, address, size))
    ranges.sort()
    for (member, address, size), (next_member, following, _) in itertools.pairwise(ranges):
        if member == next_member and address + size > following:
            raise _bad(f"the allocations at {address:#x} and {following:#x} overlap")


def _check_processes(manifest: Manifest) -> None:
    pids = {process.pid for process in manifest.processes}
    if len(pids) != len(manifest.processes):
        raise _bad("two of its processes have the same pid")
    if manifest.gpu_pid not in pids or (manifest.cpu is not None and manifest.cpu.root_pid not in pids):
        raise _bad("its GPU process or its root process is not in its process tree")
    several = [process.pid for process in manifest.gpu_processes]
    if not several:
        return
    if several[0] != manifest.gpu_pid or len(several) < 2 or len(set(several)) != len(several) or set(several) - pids:
        raise _bad("its GPU processes are not distinct processes of its tree")
    ids = itertools.chain((one.id for one in manifest.handles), (one.id for one in manifest.shared))
    if any(member_of(handle) >= len(several) for handle in ids):
        raise _bad("a handle belongs to none of its GPU processes")


def _check_cpu(cpu: CpuState, chunk_bytes: int) -> None:
    paths: set[str] = set()
    names: set[str] = set()
    lent: set[tuple[str, int]] = set()
    for file in cpu.files:
        parts = file.path.split("/")
        if any(not part or part.startswith(".") or "\0" in part for part in parts) or file.path in paths:
            raise _bad(f"the path {file.path!r} of its CPU side is not allowed or is there twice")
        paths.add(file.path)
        if len(file.sizes) % 4:
            raise _bad(f"the column of sizes of {file.path} of its CPU side is damaged")
        count = len(file.sizes) // 4 or chunk_count(file.size_bytes, chunk_bytes)
        if len(file.digests) != count * DIGEST_BYTES:
            raise _bad(f"{file.path} of its CPU side has another number of digests than of chunks")
        if file.sizes and not _can_be_cut(file, chunk_bytes):
            raise _bad(f"the chunks of {file.path} of its CPU side do not make up the file")
        if file.mapped_as and (file.mapped_as in names or not file.pid or not file.size_bytes):
            raise _bad(f"{file.path} of its CPU side is mapped by nobody, or as another one is")
        names.add(file.mapped_as)
        if file.lent_from and (file.mapped_as or not file.pid or not file.size_bytes):
            raise _bad(f"{file.path} of its CPU side was lent by nobody, or is mapped as well")
        if file.lent_from and (file.lent_from, file.pid) in lent:
            raise _bad(f"process {file.pid} has lent two pieces of one GPU")
        lent.add((file.lent_from, file.pid))


def _can_be_cut(file: FileRecord, chunk_bytes: int) -> bool:
    sizes = positions_of(file.sizes)
    # There are 60,000 for each GB, and few different ones.
    whole_pages = all(size % PAGE_BYTES == 0 for size in set(sizes[:-1]))
    return whole_pages and min(sizes) > 0 and max(sizes) <= chunk_bytes and sum(sizes) == file.size_bytes
