"""The packed tables that the native module takes and gives, and their columns (layouts: woodfrog._native.transfer).

Tables have up to millions of rows, so columns are moved with strided slices, never row by row. All is little-endian, as
every machine with a CUDA GPU is.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence

from woodfrog._native import transfer

DIGEST_BYTES = 32
CHUNK_BYTES = 48  # digest[32] offset:u64 size:u32 source:u32
RECORD_BYTES = 56  # digest[32] offset:u64 stored:u32 raw:u32 encoding:u32 reserved:u32
LOCATION = "<QIIIIQ"  # offset stored raw encoding pack reserved
LOCATION_BYTES = 32
ABSENT = transfer.ABSENT
ZERO = transfer.ZERO


def pack_column(locations: bytes) -> memoryview:
    """The pack numbers (u32) of locations."""
    return memoryview(locations).cast("I")[5::8]


def location_offsets(locations: bytes) -> memoryview:
    """The offsets (u64) of locations."""
    return memoryview(locations).cast("Q")[0::4]


def digests_of(records: bytes) -> bytes:
    """The digests of pack records, back to back."""
    digests = bytearray(len(records) // RECORD_BYTES * DIGEST_BYTES)
    for byte in range(DIGEST_BYTES):
        digests[byte::DIGEST_BYTES] = records[byte::RECORD_BYTES]
    return bytes(digests)


def offsets_of(records: bytes) -> memoryview:
    """The offsets (u64) of pack records."""
    return memoryview(records).cast("Q")[4::7]


def stored_sizes_of(records: bytes) -> memoryview:
    """The stored sizes (u32) of pack records."""
    return memoryview(records).cast("I")[10::14]


def raw_sizes_of(chunks: bytes) -> memoryview:
    """The sizes (u32) of chunk records."""
    return memoryview(chunks).cast("I")[10::12]


def locations_of(records: bytes, pack: int) -> bytes:
    """Where the chunks of pack records are, with that number for their pack."""
    count = len(records) // RECORD_BYTES
    locations = bytearray(count * LOCATION_BYTES)
    # Offset, stored, raw and encoding lie side by side in both: 20 bytes.
    for byte in range(20):
        locations[byte::LOCATION_BYTES] = records[DIGEST_BYTES + byte :: RECORD_BYTES]
    for byte, value in enumerate(pack.to_bytes(4, "little")):
        locations[20 + byte :: LOCATION_BYTES] = bytes([value]) * count
    return bytes(locations)


def raw_records(digests: bytes, offsets: Iterable[int], sizes: Iterable[int]) -> bytes:
    """Pack records of chunks that lie at these offsets as they are."""
    packed_sizes = packed(sizes)
    columns = (
        (0, DIGEST_BYTES, digests),
        (32, 8, array("Q", offsets).tobytes()),
        (40, 4, packed_sizes),
        (44, 4, packed_sizes),
    )
    return interleave(len(digests) // DIGEST_BYTES, RECORD_BYTES, columns)


def made_up_records(digests: bytes) -> bytes:
    """Pack records with these digests that say nothing true of where the chunks are: to use a ChunkIndex as a set."""
    count = len(digests) // DIGEST_BYTES
    rest = (4096).to_bytes(8, "little") + 2 * (1).to_bytes(4, "little") + bytes(8)
    records = bytearray(count * RECORD_BYTES)
    for byte in range(DIGEST_BYTES):
        records[byte::RECORD_BYTES] = digests[byte::DIGEST_BYTES]
    for byte, value in enumerate(rest):
        records[DIGEST_BYTES + byte :: RECORD_BYTES] = bytes([value]) * count
    return bytes(records)


def select_rows(table: bytes, positions: Iterable[int], row_bytes: int) -> bytes:
    """The rows at these positions, in their order."""
    return transfer.select_rows(table, packed(positions), row_bytes)


def positions_of(packed: bytes) -> array[int]:
    """Packed u32 as an array."""
    positions = array("I")
    positions.frombytes(packed)
    return positions


def packed(numbers: Iterable[int]) -> bytes:
    """Chunk numbers or sizes as packed u32."""
    return array("I", numbers).tobytes()


def interleave(count: int, row_bytes: int, columns: Iterable[tuple[int, int, bytes]]) -> bytes:
    """A table of `count` rows out of columns: (where in a row, bytes wide, the values back to back). The rest is 0."""
    table = bytearray(count * row_bytes)
    for begin, width, column in columns:
        for byte in range(width):
            table[begin + byte :: row_bytes] = column[byte::width]
    return bytes(table)


def chunk_table(digests: bytes, offsets: Iterable[int], sizes: Iterable[int], sources: Iterable[int]) -> bytes:
    """Chunk records out of columns with one entry a chunk."""
    columns = (
        (0, DIGEST_BYTES, digests),
        (32, 8, array("Q", offsets).tobytes()),
        (40, 4, packed(sizes)),
        (44, 4, packed(sources)),
    )
    return interleave(len(digests) // DIGEST_BYTES, CHUNK_BYTES, columns)


def batches(positions: Iterable[int], sizes: Sequence[int] | memoryview, limit_bytes: int) -> Iterator[list[int]]:
    """The positions in their order, in groups whose sizes add up to at most `limit_bytes`; a larger one goes alone."""
    batch: list[int] = []
    total = 0
    for at in positions:
        if batch and total + sizes[at] > limit_bytes:
            yield batch
            batch, total = [], 0
        batch.append(at)
        total += sizes[at]
    if batch:
        yield batch


def running_offsets(sizes: Sequence[int] | memoryview) -> array[int]:
    """Where each of these begins when they lie back to back."""
    offsets = array("Q")
    at = 0
    for size in sizes:
        offsets.append(at)
        at += size
    return offsets
