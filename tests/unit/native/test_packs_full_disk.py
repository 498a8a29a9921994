"""A disk that fills up while packs are written or extracted is a clear error, and gives the room back."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from woodfrog._native import transfer

from . import packing
from .packing import KIB, MIB, filled, floats, new_file, noise

pytestmark = pytest.mark.usefixtures("file_way")


DISK_BYTES = 8 * MIB


@pytest.fixture(params=["tmpfs", "ext4"])
def small_disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A file system of its own, of 8 MiB."""
    if os.geteuid() != 0:
        pytest.fail("needs root to mount a small file system")
    if request.param == "ext4" and not Path("/dev/loop-control").exists():
        pytest.skip("no loop devices here: only tmpfs can be filled")
    directory = tmp_path / "disk"
    directory.mkdir()
    if request.param == "tmpfs":
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "none", str(directory)], check=True)
    else:
        image = tmp_path / "image"
        with image.open("wb") as file:
            file.truncate(DISK_BYTES)
        subprocess.run(["mkfs.ext4", "-q", "-O", "^has_journal", str(image)], check=True)
        subprocess.run(["mount", "-o", "loop", str(image), str(directory)], check=True)
    yield directory
    subprocess.run(["umount", str(directory)], check=True)


def free_bytes(directory: Path) -> int:
    status = os.statvfs(directory)
    return status.f_bavail * status.f_bsize


@pytest.mark.parametrize("compress", ["none", "zstd"])
def test_a_pack_that_does_not_fit_says_so_and_leaves_the_room(small_disk: Path, compress: str) -> None:
    before = free_bytes(small_disk)
    with new_file(small_disk) as fd:
        with filled([floats(64 * KIB, i) for i in range(32)]) as source:
            _, name = transfer.write_pack(fd, source.chunks, [source.arena], compress=compress)
        length = os.fstat(fd).st_size
        with filled([floats(64 * KIB, i) for i in range(100, 420)]) as source:
            with pytest.raises(transfer.TransferError) as caught:
                transfer.write_pack(fd, source.chunks, [source.arena], compress=compress)
            assert caught.value.code == -errno.ENOSPC
            assert "No space left on device" in str(caught.value)
        assert os.fstat(fd).st_size == length
        assert transfer.scan_pack(fd, contents=True)[1] == name, "what was there before is whole"
        assert free_bytes(small_disk) >= before - length - 64 * KIB
    assert free_bytes(small_disk) >= before - 64 * KIB


@pytest.mark.parametrize("threads", [2, 8])
def test_files_that_do_not_fit_say_so(small_disk: Path, tmp_path: Path, threads: int) -> None:
    contents = [noise(64 * KIB, i) for i in range(200)]
    with new_file(tmp_path) as pack, new_file(small_disk) as out, filled(contents) as source:
        packed, _ = transfer.write_pack(pack, source.chunks, [source.arena])
        with pytest.raises(transfer.TransferError) as caught:
            transfer.extract_from_packs(
                [(out, 0, 200 * 64 * KIB)],
                source.digests,
                packing.locate(packed),
                {0: pack},
                chunk_bytes=64 * KIB,
                threads=threads,
            )
        assert caught.value.code == -errno.ENOSPC
