"""Small, complete images for tests: every feature of the format in a few hundred kilobytes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec
from blake3 import blake3

from woodfrog.image import chunks, codec
from woodfrog.image.image import Image
from woodfrog.image.manifest import (
    Allocations,
    CpuState,
    Device,
    Driver,
    Environment,
    FileRecord,
    Handle,
    Host,
    Manifest,
    Phase,
    Process,
)
from woodfrog.image.repository import ImageRepository

CHUNK_BYTES = 64 << 10
UUIDS = ("11" * 16, "22" * 16)
# Two handles of the first GPU (the first with a short last chunk, so that chunks restart), one of the second.
HANDLES = ((0, 3 * CHUNK_BYTES + 512), (0, CHUNK_BYTES), (1, 2 * CHUNK_BYTES))
CPU_FILES = {"core-100.img": b"core" * 50, "pages-1.img": bytes(range(256)) * 300, "empty.img": b""}


def pattern(size_bytes: int, seed: int) -> bytes:
    """Bytes without repetition at any chunk boundary."""
    return blake3(seed.to_bytes(4, "little")).digest(length=size_bytes)


def digests(data: bytes) -> bytes:
    return b"".join(blake3(data[at : at + CHUNK_BYTES]).digest() for at in range(0, len(data), CHUNK_BYTES))


def manifest(**changes: Any) -> Manifest:
    """The manifest of the image that `write` writes, with fields replaced by `changes`."""
    whole = Manifest(
        kind="managed",
        created_unix_s=1_700_000_000.5,
        woodfrog_version="0.1.0",
        operation=(1 << 63) + 5,
        target_name="small",
        gpu_pid=101,
        leave_running=False,
        driver=Driver(cuda_version=13000, release="580.159.04"),
        devices=[
            Device(ordinal=i, uuid=UUIDS[i], name="GPU", total_bytes=1 << 31, compute_major=9, compute_minor=0)
            for i in (0, 1)
        ],
        host=Host(hostname="here", kernel="6.18.0", architecture="x86_64", boot_id="b"),
        processes=[
            Process(pid=100, command_line=["sh", "-c", "train"]),
            Process(pid=101, parent_pid=100, command_line=["train"]),
        ],
        environment=Environment(uid=os.geteuid(), gid=os.getegid(), working_directory="/", log_path=""),
        chunk_bytes=CHUNK_BYTES,
        handles=[Handle(0x1000 + index, device, size, 0) for index, (device, size) in enumerate(HANDLES)],
        digests=b"".join(digests(pattern(size, index)) for index, (_, size) in enumerate(HANDLES)),
        allocations=Allocations.from_rows(
            [
                (0x7000_0000_0000, 512, 0x1000, 0, 0, 0),
                (0x7000_0000_1000, CHUNK_BYTES, 0x1000, 512, 0, 1),
                (0x7100_0000_0000, 2 * CHUNK_BYTES, 0x1002, 0, 1, 0),
            ]
        ),
        cpu=CpuState(version="4.1.1", root_pid=100, options=["--file-locks"]),
        phases=[Phase("quiesce", 0.001), Phase("drain", 0.5)],
        stall_s=0.25,
        notes={"why": "test"},
    )
    return msgspec.structs.replace(whole, **changes)


def cpu_with_pages() -> CpuState:
    """A CPU side of an image with a file of pages that is cut into chunks of its own sizes, and one that is not."""
    pages = pattern(6 * 4096, 9)
    column = b"".join(
        blake3(pages[begin:end]).digest() for begin, end in ((0, 4096), (4096, 5 * 4096), (5 * 4096, None))
    )
    return CpuState(
        version="4.1.1",
        root_pid=100,
        files=[
            FileRecord(path="core-100.img", size_bytes=200, digests=digests(pattern(200, 8))),
            FileRecord(path="pages-1.img", size_bytes=len(pages), digests=column, pid=101,
                       sizes=chunks.packed([4096, 4 * 4096, 4096])),
            FileRecord(path="control-101.mem", size_bytes=300, digests=digests(pattern(300, 10)), pid=101,
                       mapped_as="file[3c:2]"),
        ],
    )  # fmt: skip


def write(store: ImageRepository, name: str = "small", **changes: Any) -> Image:
    """A committed image in that store. The caller closes it."""
    with store.begin(name) as writer:
        fill(writer)
        return store.open(writer.commit(manifest(**changes)).reference)


def fill(writer: Any, seed: int = 0) -> None:
    """The image's GPU memory and CPU files, as an operation and CRIU would write them; `manifest` is of seed 0."""
    contents = [pattern(size, index + seed) for index, (_, size) in enumerate(HANDLES)]
    cut = chunks.Cut([size for _, size in HANDLES], CHUNK_BYTES)
    column = b"".join(map(digests, contents))
    new, _ = writer.survey_gpu([column], [cut])
    fds = [os.memfd_create(f"handle-{index}") for index in range(len(HANDLES))]
    try:
        for fd, content in zip(fds, contents, strict=True):
            os.write(fd, content)
        table = chunks.chunk_table(
            chunks.select_digests(column, new),
            chunks.select(cut.offsets(), new),
            chunks.select(cut.sizes, new),
            chunks.select(cut.pieces(), new),
        )
        if new:
            writer.write_gpu(table, fds)
    finally:
        for fd in fds:
            os.close(fd)
    fill_cpu(writer)


def fill_cpu(writer: Any) -> None:
    """CRIU's files alone."""
    folder = writer.directory / "cpu"
    folder.mkdir()
    for name, content in CPU_FILES.items():
        (folder / name).write_bytes(content)


def packs(store_path: Path) -> list[Path]:
    """The packs of a store on this disk."""
    return sorted(path for path in (store_path / "packs").rglob("*") if path.is_file())


def reseal(path: Path, body: bytes, *, mandatory: int | None = None) -> bytes:
    """A manifest file with this body and right digests: what someone who means harm would write."""
    flags = int(manifest().features) if mandatory is None else mandatory
    prefix = codec.PREFIX.pack(codec.MAGIC, 1, codec.HEADER_BYTES, flags, 0, len(body), 0)
    content = prefix + blake3(prefix).digest() + body
    data = content + blake3(content).digest()
    path.write_bytes(data)
    return data
