"""A manifest whose digests are right and whose fields lie is refused, with the lie in the sentence."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import small_images

from woodfrog.errors import BadImageError
from woodfrog.image import codec, validate
from woodfrog.image.chunks import packed
from woodfrog.image.manifest import Allocations, CpuState, Feature, FileRecord, Handle, Manifest, SharedHandle

GOOD = small_images.manifest()
SIZE = small_images.CHUNK_BYTES


def changed_handle(index: int, **changes: Any) -> list[Handle]:
    handles = list(GOOD.handles)
    handles[index] = msgspec.structs.replace(handles[index], **changes)
    return handles


def cpu_with(*paths: str) -> CpuState:
    return CpuState(
        version="4.1", root_pid=100, files=[FileRecord(path=path, size_bytes=0, digests=b"") for path in paths]
    )


def columns(**changes: bytes) -> Allocations:
    return msgspec.structs.replace(GOOD.allocations, **changes)


def cpu_cut(*sizes: int, digests: int | None = None, size_bytes: int = 3 * 4096, column: bytes = b"") -> CpuState:
    """One file with chunks of its own sizes."""
    count = len(sizes) if digests is None else digests
    record = FileRecord(path="a", size_bytes=size_bytes, digests=b"x" * 32 * count, sizes=packed(sizes) + column)
    return CpuState(version="4.1", root_pid=100, files=[record])


def cpu_mapped(*mapped: tuple[int, str], size_bytes: int = 4096) -> CpuState:
    """Files that processes map, by their numbers and CRIU's names."""
    digests = b"x" * 32 if size_bytes else b""
    files = [
        FileRecord(path=f"mapped-{number}", size_bytes=size_bytes, digests=digests, pid=pid, mapped_as=name)
        for number, (pid, name) in enumerate(mapped)
    ]
    return CpuState(version="4.1", root_pid=100, files=files)


def cpu_lent(*lent: tuple[int, str]) -> CpuState:
    """Memory that processes lent, by their numbers and the GPUs."""
    files = [
        FileRecord(path=f"gpu-{number}", size_bytes=4096, digests=b"x" * 32, pid=pid, lent_from=uuid)
        for number, (pid, uuid) in enumerate(lent)
    ]
    return CpuState(version="4.1", root_pid=100, files=files)


CONTRADICTIONS: dict[str, dict[str, Any]] = {
    "chunk size not a power of two": {"chunk_bytes": SIZE + 512},
    "driver-only with handles": {"kind": "driver-only"},
    "two GPUs of one UUID": {"devices": [GOOD.devices[0], GOOD.devices[0]]},
    "data of a GPU that is not there": {"devices": GOOD.devices[:1]},
    "a digest too few": {"digests": GOOD.digests[:-32]},
    "a digest too many": {"digests": GOOD.digests + GOOD.digests[:32]},
    "half a digest": {"digests": GOOD.digests + b"x" * 16},
    "digests and no handles": {"handles": [], "allocations": Allocations()},
    "a handle twice": {"handles": changed_handle(1, id=GOOD.handles[0].id)},
    "an empty handle": {"handles": changed_handle(1, size=0)},
    "a handle on no GPU": {"handles": changed_handle(2, device=2)},
    "a handle away from the others of its GPU": {"handles": [GOOD.handles[2], *GOOD.handles[:2]]},
    "another size of chunk": {"chunk_bytes": 2 * SIZE},
    "a handle's number too large": {"handles": changed_handle(0, id=1 << 64)},
    "a shared handle of none": {"shared": [SharedHandle(9, 8, SIZE, 0, 2)]},
    "a shared handle larger than its memory": {"shared": [SharedHandle(9, GOOD.handles[0].id, 1 << 40, 0, 2)]},
    "a shared handle on another GPU": {"shared": [SharedHandle(9, GOOD.handles[0].id, 1, 1, 2)]},
    "a shared handle that is one of the others": {
        "shared": [SharedHandle(GOOD.handles[1].id, GOOD.handles[0].id, 1, 0, 2)]
    },
    "columns of different lengths": {"allocations": columns(size=GOOD.allocations.size[:-8])},
    "half an entry": {"allocations": columns(size=GOOD.allocations.size[:-3])},
    "an allocation outside of its handle": {"allocations": Allocations.from_rows([(1 << 40, SIZE, 0x1001, 1, 0, 0)])},
    "an allocation that wraps around": {"allocations": Allocations.from_rows([(1 << 40, 2, 0x1001, 2**64 - 1, 0, 0)])},
    "an allocation in no handle": {"allocations": Allocations.from_rows([(1 << 40, 1, 5, 0, 0, 0)])},
    "an allocation on another GPU": {"allocations": Allocations.from_rows([(1 << 40, 1, 0x1000, 0, 1, 0)])},
    "an allocation of no size": {"allocations": Allocations.from_rows([(1 << 40, 0, 0x1000, 0, 0, 0)])},
    "an address of the kernel": {"allocations": Allocations.from_rows([((1 << 64) - 4096, 512, 0x1000, 0, 0, 0)])},
    "allocations on each other": {
        "allocations": Allocations.from_rows([(1 << 40, 512, 0x1000, 0, 0, 0), ((1 << 40) + 511, 1, 0x1001, 0, 0, 0)])
    },
    "a GPU process that is not in the tree": {"gpu_pid": 5},
    "a root that is not in the tree": {"cpu": CpuState(version="4.1", root_pid=5)},
    "a process twice": {"processes": [*GOOD.processes, GOOD.processes[0]]},
    "a path upwards": {"cpu": cpu_with("../../etc/passwd")},
    "an absolute path": {"cpu": cpu_with("/etc/passwd")},
    "a hidden path": {"cpu": cpu_with(".x")},
    "an empty part of a path": {"cpu": cpu_with("a//b")},
    "a NUL in a path": {"cpu": cpu_with("a\0b")},
    "a path twice": {"cpu": cpu_with("a", "a")},
    "digests of an empty file": {
        "cpu": CpuState(version="4.1", root_pid=100, files=[FileRecord(path="a", size_bytes=0, digests=b"x" * 32)])
    },
    "chunks that are less than their file": {"cpu": cpu_cut(4096, 4096)},
    "chunks that are more than their file": {"cpu": cpu_cut(4096, 2 * 4096, 1)},
    "more chunks than digests": {"cpu": cpu_cut(4096, 4096, 4096, digests=2)},
    "a chunk of no size": {"cpu": cpu_cut(4096, 0, 2 * 4096)},
    "a chunk larger than chunks are": {"cpu": cpu_cut(2 * SIZE, size_bytes=2 * SIZE)},
    "a chunk that ends within a page": {"cpu": cpu_cut(4097, 2 * 4096 - 1)},
    "half a size": {"cpu": cpu_cut(3 * 4096, column=b"xx")},
    "a mapped file of nobody's": {"cpu": cpu_mapped((0, "file[3c:2]"))},
    "lent memory of nobody's": {"cpu": cpu_lent((0, "ab" * 16))},
    "one GPU's memory lent twice": {"cpu": cpu_lent((100, "ab" * 16), (100, "ab" * 16))},
    "two files mapped as one": {"cpu": cpu_mapped((100, "file[3c:2]"), (101, "file[3c:2]"))},
    "an empty file that is mapped": {"cpu": cpu_mapped((100, "file[3c:2]"), size_bytes=0)},
}


def with_flags(manifest: Manifest) -> None:
    validate.validate(manifest, manifest.features)


def test_the_manifest_that_all_of_these_start_from_is_accepted() -> None:
    with_flags(GOOD)


@pytest.mark.parametrize("changes", CONTRADICTIONS.values(), ids=CONTRADICTIONS.keys())
def test_a_contradiction_is_refused_with_a_reason(changes: dict[str, Any]) -> None:
    with pytest.raises(BadImageError) as raised:
        with_flags(msgspec.structs.replace(GOOD, **changes))
    assert "contradicts itself" in raised.value.reason
    assert raised.value.advice


@pytest.mark.parametrize("bit", [1, 2, 4])
def test_flags_that_do_not_say_what_the_fields_say_are_refused(bit: int) -> None:
    with pytest.raises(BadImageError, match="flags"):
        validate.validate(GOOD, GOOD.features ^ bit)


def test_lent_memory_is_accepted_and_calls_for_its_flag() -> None:
    manifest = msgspec.structs.replace(GOOD, cpu=cpu_lent((100, "ab" * 16), (100, "cd" * 16), (101, "ab" * 16)))
    with_flags(manifest)
    with pytest.raises(BadImageError, match="flags"):
        validate.validate(manifest, manifest.features ^ Feature.LENT_MEMORY)


def test_mapped_files_are_accepted_and_call_for_their_flag() -> None:
    manifest = msgspec.structs.replace(GOOD, cpu=cpu_mapped((100, "file[3c:2]"), (101, "file[3c:3]")))
    with_flags(manifest)
    with pytest.raises(BadImageError, match="flags"):
        validate.validate(manifest, manifest.features ^ Feature.MAPPED_FILES)


@pytest.mark.parametrize("name", ["/etc/passwd", "file[3c:2]\n", "fd[3]:file[3c:2]", "file[:2]", "file[3C:2]", "x"])
def test_a_name_that_criu_does_not_give_is_refused(name: str) -> None:
    with pytest.raises(BadImageError):
        codec.encode(msgspec.structs.replace(GOOD, cpu=cpu_mapped((100, name))))


def test_chunks_of_a_files_own_sizes_are_accepted() -> None:
    with_flags(msgspec.structs.replace(GOOD, cpu=cpu_cut(4096, 2 * 4096)))
    with_flags(msgspec.structs.replace(GOOD, cpu=cpu_cut(2 * 4096, 100, size_bytes=2 * 4096 + 100)))
