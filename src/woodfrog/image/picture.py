"""Which parts of an image are its own, which it shares with other images of the store, and which are zeros.

Told from manifests alone: a chunk whose digest another image names too is shared. No memory content is read or shown.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from woodfrog.image.chunks import Cut
from woodfrog.image.lookup import Lookup
from woodfrog.image.manifest import Manifest
from woodfrog.image.spans import Handles, Marks, Span, spans, spans_of, total

ZERO, SHARED, NEW = range(3)
NAMES = {ZERO: "zero", SHARED: "shared", NEW: "new"}
MARKS = Marks(NEW, "█", "▄", {SHARED: "░", ZERO: "·"})
ASCII_MARKS = Marks(NEW, "#", "+", {SHARED: "-", ZERO: "."})
LEGEND = ("only in this image", "partly", "shared with other images", "zero")


@dataclass(frozen=True)
class Shares:
    """Bytes by kind: `new` ones no other image of the store names; zeros are stored nowhere."""

    new_bytes: int = 0
    shared_bytes: int = 0
    zero_bytes: int = 0

    def to_dict(self) -> dict[str, int]:
        return {"new_bytes": self.new_bytes, "shared_bytes": self.shared_bytes, "zero_bytes": self.zero_bytes}


@dataclass(frozen=True)
class Part:
    """One allocation of GPU memory, or one of CRIU's files (`address` and `device` None)."""

    name: str
    size_bytes: int
    spans: list[Span]
    address: int | None = None
    device: int | None = None  # the GPU's ordinal

    @property
    def shares(self) -> Shares:
        return Shares(total(self.spans, NEW), total(self.spans, SHARED), total(self.spans, ZERO))

    def to_dict(self) -> dict[str, Any]:
        where = {} if self.address is None else {"address": self.address, "device": self.device}
        ranges = [[span.offset, span.size_bytes, NAMES[span.kind]] for span in self.spans]
        return {"name": self.name, **where, "size_bytes": self.size_bytes, **self.shares.to_dict(), "ranges": ranges}


@dataclass(frozen=True)
class Picture:
    """`gpu` and `cpu` count every byte of the handles and files once; a chunk that several small allocations lie in is
    shown with each of them."""

    chunk_bytes: int
    others: int  # images that it was compared with
    gpu: Shares
    cpu: Shares
    allocations: list[Part]
    files: list[Part]

    def to_dict(self) -> dict[str, Any]:
        return {
            "chunk_bytes": self.chunk_bytes,
            "compared_with_images": self.others,
            "gpu": self.gpu.to_dict(),
            "cpu": self.cpu.to_dict(),
            "allocations": [part.to_dict() for part in self.allocations],
            "files": [part.to_dict() for part in self.files],
        }


def picture(manifest: Manifest, others: Iterable[bytes]) -> Picture:
    """`others`: for each other image of the store its digests, 32 bytes each, back to back."""
    gpu = Cut([handle.size for handle in manifest.handles], manifest.chunk_bytes)
    files = manifest.cpu.files if manifest.cpu is not None else []
    cpu = Cut.of_files(files, manifest.chunk_bytes)
    mine = Lookup(manifest.all_digests(), gpu.sizes + cpu.sizes, manifest.chunk_bytes)
    count = 0
    for column in others:
        mine.mark(column)
        count += 1
    kinds = bytearray(
        ZERO if zero else SHARED if named else NEW for zero, named in zip(mine.zeros, mine.named(), strict=True)
    )
    gpu_kinds, cpu_kinds = kinds[: len(gpu)], kinds[len(gpu) :]
    return Picture(
        manifest.chunk_bytes,
        count,
        _shares(gpu_kinds, gpu),
        _shares(cpu_kinds, cpu),
        list(_allocations(manifest, gpu_kinds)),
        [
            Part(record.path, record.size_bytes, spans_of(cpu_kinds[begin:end], cpu.sizes[begin:end]))
            for record, begin, end in zip(files, cpu.first, cpu.first[1:], strict=False)
        ],
    )


def _shares(kinds: bytearray, cut: Cut) -> Shares:
    sums = [0, 0, 0]
    for kind, size in zip(kinds, cut.sizes, strict=True):
        sums[kind] += size
    return Shares(new_bytes=sums[NEW], shared_bytes=sums[SHARED], zero_bytes=sums[ZERO])


def _allocations(manifest: Manifest, kinds: bytearray) -> Iterator[Part]:
    handles = Handles(manifest)
    for row in manifest.allocations.rows():
        first, end = handles.chunks_of(row.handle, row.offset, row.size)
        ranges = spans(kinds[first:end], row.offset, row.size, manifest.chunk_bytes)
        device = manifest.devices[row.device].ordinal
        yield Part(f"{row.address:#x}", row.size, ranges, row.address, device)
