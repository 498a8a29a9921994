"""The manifest file: what is written is read back, and nothing else is accepted."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import small_images
from blake3 import blake3

from woodfrog.errors import BadImageError
from woodfrog.image import codec
from woodfrog.image.manifest import Allocation, Allocations, CpuState


@pytest.fixture(scope="module")
def encoded() -> bytes:
    return codec.encode(small_images.manifest(cpu=None, processes=small_images.manifest().processes))


def test_a_manifest_is_read_back_as_it_was_written() -> None:
    manifest = small_images.manifest()
    assert codec.decode(codec.encode(manifest)) == manifest


def test_every_single_flipped_bit_of_every_byte_is_refused(encoded: bytes) -> None:
    for position in range(len(encoded)):
        for bit in (0, 7):
            damaged = bytearray(encoded)
            damaged[position] ^= 1 << bit
            with pytest.raises(BadImageError) as raised:
                codec.decode(bytes(damaged))
            assert raised.value.reason
            assert raised.value.advice


def test_every_truncation_is_refused(encoded: bytes) -> None:
    for length in range(len(encoded)):
        with pytest.raises(BadImageError):
            codec.decode(encoded[:length])


def test_appended_bytes_are_refused(encoded: bytes) -> None:
    for extra in (b"\0", encoded, b"x" * 4096):
        with pytest.raises(BadImageError):
            codec.decode(encoded + extra)


def test_a_newer_format_version_is_refused_by_its_number(encoded: bytes) -> None:
    newer = bytearray(encoded)
    newer[8] = 2
    with pytest.raises(BadImageError, match="version 2"):
        codec.decode(bytes(newer))


def test_an_unknown_mandatory_feature_is_refused_and_an_unknown_optional_one_is_not(tmp_path: Path) -> None:
    body = msgspec.msgpack.encode(small_images.manifest())
    flags = int(small_images.manifest().features)
    data = small_images.reseal(tmp_path / "manifest", body, mandatory=flags | 1 << 40)
    with pytest.raises(BadImageError, match="features"):
        codec.decode(data)
    prefix = codec.PREFIX.pack(codec.MAGIC, 1, codec.HEADER_BYTES, flags, 1 << 40, len(body), 0)
    content = prefix + blake3(prefix).digest() + body
    assert codec.decode(content + blake3(content).digest()) == small_images.manifest()


def test_fields_of_a_newer_writer_are_ignored(tmp_path: Path) -> None:
    fields = msgspec.msgpack.decode(msgspec.msgpack.encode(small_images.manifest()))
    fields["invented_later"] = [1, 2, {"a": None}]
    data = small_images.reseal(tmp_path / "manifest", msgspec.msgpack.encode(fields))
    assert codec.decode(data) == small_images.manifest()


NEEDED = ["kind", "gpu_pid", "driver", "devices", "host", "processes", "leave_running", "chunk_bytes"]


@pytest.mark.parametrize("missing", NEEDED)
def test_a_sealed_body_without_a_needed_field_is_refused(tmp_path: Path, missing: str) -> None:
    fields = msgspec.msgpack.decode(msgspec.msgpack.encode(small_images.manifest()))
    del fields[missing]
    with pytest.raises(BadImageError, match=missing):
        codec.decode(small_images.reseal(tmp_path / "manifest", msgspec.msgpack.encode(fields)))


@pytest.mark.parametrize(
    "body",
    [
        b"\xc1",  # never used in msgpack
        b"\xdf\xff\xff\xff\xff",  # a map of four thousand million entries
        b"\xdd\xff\xff\xff\xff",  # an array of as many
        b"\xc6\xff\xff\xff\xff",  # as many bytes
        b"\x91" * 100_000,  # an array in an array in an array …
        b"\x81\xa4kind\xa7managed" + b"\0",
    ],
)
def test_a_sealed_body_that_is_no_manifest_is_refused(tmp_path: Path, body: bytes) -> None:
    with pytest.raises(BadImageError):
        codec.decode(small_images.reseal(tmp_path / "manifest", body))


def test_a_contradictory_manifest_is_never_encoded() -> None:
    with pytest.raises(BadImageError):
        codec.encode(small_images.manifest(gpu_pid=999))
    with pytest.raises(BadImageError):
        codec.encode(small_images.manifest(cpu=CpuState(version="4", root_pid=100, options=["x"] * 300)))


def test_allocations_survive_as_columns() -> None:
    rows = [Allocation(1 << 56, 1 << 40, 7, 9, 3, 2), Allocation(0, 1, (1 << 64) - 1, 0, 0, 1)]
    table = Allocations.from_rows(rows)
    assert list(table.rows()) == rows
    assert len(table) == 2
    assert len(table.address) == 16


def test_a_value_too_large_for_its_column_is_not_cut() -> None:
    with pytest.raises(OverflowError):
        Allocations.from_rows([(1 << 64, 1, 1, 0, 0, 0)])


def test_a_path_that_is_no_utf8_does_not_stop_a_checkpoint() -> None:
    broken = b"/data/caf\xe9".decode(errors="surrogateescape")
    processes = [
        small_images.Process(pid=100, command_line=["train", broken], executable=broken),
        small_images.Process(pid=101, parent_pid=100),
    ]
    decoded = codec.decode(codec.encode(small_images.manifest(processes=processes)))
    assert decoded.processes[0].command_line == ["train", "/data/caf\N{REPLACEMENT CHARACTER}"]
    assert decoded.handles == small_images.manifest().handles
    assert decoded.allocations == small_images.manifest().allocations
