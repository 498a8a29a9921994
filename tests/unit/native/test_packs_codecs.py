"""Where a compression library is missing everything else goes on, and what needs it says which one to install."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from woodfrog._native import transfer

from .packing import KIB, filled, noise, text

# Run in a process of its own that finds no system library (see `without`), with the Python packages or without.
USE = """
import errno, os, sys
from woodfrog._native import transfer
hidden, pack = sys.argv[1].split(","), int(sys.argv[2])
for name in hidden:
    sys.modules[name] = None  # find_spec sees no such package
print(*transfer.encodings())
arena = transfer.Arena(4096)
import blake3, struct
chunk = struct.pack("<32sQII", blake3.blake3(bytes(4096)).digest(), 0, 4096, 0)
for mode in ("lz4", "zstd", "auto"):
    out = os.memfd_create("out")
    try:
        records, name = transfer.write_pack(out, chunk, [arena], compress=mode)
    except transfer.TransferError as error:
        assert error.code == -errno.ENOTSUP
        print(mode, error)
        continue
    print(mode, struct.unpack("<32sQIIII", records)[4])
packed, _ = transfer.scan_pack(pack)
print("records", len(packed) // 56)
try:
    transfer.scan_pack(pack, contents=True)
    print("contents fine")
except transfer.TransferError as error:
    assert error.code == -errno.ENOTSUP
    print("contents", error)
"""


@pytest.fixture
def without(tmp_path: Path) -> dict[str, str]:
    """An environment in which the system's libraries cannot be loaded: what is found first is not a library."""
    for name in ("liblz4.so.1", "libzstd.so.1"):
        (tmp_path / name).write_bytes(b"")
    return os.environ | {"LD_LIBRARY_PATH": str(tmp_path)}


def use(environment: dict[str, str], hidden: str) -> list[str]:
    pack = os.memfd_create("pack")
    with filled([text(64 * KIB), noise(64 * KIB)]) as source:
        transfer.write_pack(pack, source.chunks, [source.arena], compress="zstd")
    done = subprocess.run(
        [sys.executable, "-c", USE, hidden, str(pack)],
        env=environment, pass_fds=(pack,), capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    os.close(pack)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_this_machine_has_all_encodings() -> None:
    assert transfer.encodings() == ["raw", "lz4", "zstd", "split-zstd"]


def test_the_python_packages_serve_where_the_system_has_no_library(without: dict[str, str]) -> None:
    said = use(without, "none")
    assert said == ["raw lz4 zstd split-zstd", "lz4 1", "zstd 2", "auto 2", "records 2", "contents fine"]


def test_without_zstd_what_needs_it_is_refused_by_name_and_auto_does_without(without: dict[str, str]) -> None:
    encodings, lz4, zstd, auto, scanned, contents = use(without, "zstandard")
    assert encodings == "raw lz4"
    assert (lz4, auto, scanned) == ("lz4 1", "auto 1", "records 2")
    for said in (zstd, contents):
        assert "libzstd.so.1" in said
        assert "zstandard" in said


def test_without_any_library_chunks_are_stored_raw(without: dict[str, str]) -> None:
    encodings, lz4, zstd, auto, scanned, contents = use(without, "lz4,zstandard")
    assert encodings == "raw"
    assert "liblz4.so.1" in lz4
    assert "libzstd.so.1" in zstd
    assert (auto, scanned) == ("auto 0", "records 2")
    assert "libzstd.so.1" in contents
