"""Index objects: which packs there are and what is in them, so that nobody has to read the packs (docs/format.md,
"Index"). An index is a copy of what the packs say of themselves: losing one costs time, never data.

What is read is checked here, size by size, before it is used.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from blake3 import blake3

from woodfrog._native.transfer import ChunkIndex, TransferError
from woodfrog.errors import BadImageError
from woodfrog.store import keys
from woodfrog.store.config import MIN_CHUNK_BYTES
from woodfrog.store.records import RECORD_BYTES, offsets_of, stored_sizes_of
from woodfrog.store.tiers.protocol import Tier

MAGIC = b"WFRGIDX\0"
VERSION = 1
_HEADER = struct.Struct("<8sIIIIQ24x")  # magic, version, header length, packs, reserved, records
_PACK = struct.Struct("<32sQII")  # name, size in bytes, records, reserved
WRITTEN_BYTES = 64 << 20  # a writer ends an object here: about a million records


@dataclass(frozen=True)
class IndexedPack:
    """A pack as an index tells it."""

    name: bytes
    size_bytes: int
    records: bytes = field(repr=False)  # packed Record rows

    @property
    def key(self) -> str:
        return keys.pack_key(self.name)

    @property
    def chunks(self) -> int:
        return len(self.records) // RECORD_BYTES


@dataclass
class Indexes:
    """All index objects of a store. A pack that several describe is taken from the first."""

    packs: dict[bytes, IndexedPack]
    objects: dict[str, list[bytes]]  # key of each intact object: names of the packs that it describes
    damaged: dict[str, str]  # key: why


def encode(packs: Sequence[IndexedPack]) -> bytes:
    """One index object's bytes."""
    header = _HEADER.pack(MAGIC, VERSION, _HEADER.size, len(packs), 0, sum(pack.chunks for pack in packs))
    table = (_PACK.pack(pack.name, pack.size_bytes, pack.chunks, 0) for pack in packs)
    return b"".join([header, *table, *(pack.records for pack in packs)])


def decode(data: bytes) -> list[IndexedPack]:
    """The packs that an index object describes; BadImageError says what is wrong with it."""
    if len(data) < _HEADER.size:
        raise BadImageError("it is shorter than its header")
    magic, version, header_bytes, count, reserved, records = _HEADER.unpack_from(data)
    if magic != MAGIC or header_bytes != _HEADER.size or reserved:
        raise BadImageError("it is no index")
    if version != VERSION:
        raise BadImageError(f"it has version {version}, and this woodfrog reads {VERSION}")
    if len(data) != _HEADER.size + count * _PACK.size + records * RECORD_BYTES:
        raise BadImageError("its length is not what its header says")
    packs = []
    at = _HEADER.size + count * _PACK.size
    for number in range(count):
        name, size_bytes, chunks, _ = _PACK.unpack_from(data, _HEADER.size + number * _PACK.size)
        end = at + chunks * RECORD_BYTES
        if end > len(data):
            raise BadImageError("its packs have more records than it says")
        pack = IndexedPack(name, size_bytes, data[at:end])
        if not _is_inside(pack):
            raise BadImageError("a record lies outside its pack")
        packs.append(pack)
        at = end
    if at != len(data):
        raise BadImageError("its packs have fewer records than it says")
    return packs


def _is_inside(pack: IndexedPack) -> bool:
    if not pack.records:
        return True
    offsets, sizes = offsets_of(pack.records), stored_sizes_of(pack.records)
    if max(offsets) + max(sizes) <= pack.size_bytes:
        return True  # nearly always: no need to look at each
    return all(offset + size <= pack.size_bytes for offset, size in zip(offsets, sizes, strict=True))


def read(tier: Tier, key: str) -> list[IndexedPack]:
    """BadImageError for an object that is damaged, or gone."""
    data = tier.get(key, keys.INDEX_MAX_BYTES)
    if data is None:
        raise BadImageError("it is gone")
    if blake3(data).digest() != keys.parse_index(key):
        raise BadImageError("its bytes are not what its name says")
    return decode(data)


def read_all(tier: Tier) -> Indexes:
    """Every index object; damaged ones are told apart, not raised."""
    found = Indexes({}, {}, {})
    for key in sorted(listed.key for listed in tier.list(keys.INDEX)):
        try:
            packs = read(tier, key)
            _check_sense(packs)
        except BadImageError as error:
            found.damaged[key] = error.reason
            continue
        found.objects[key] = [pack.name for pack in packs]
        for pack in packs:
            found.packs.setdefault(pack.name, pack)
    return found


def _check_sense(packs: Sequence[IndexedPack]) -> None:
    """What the native module thinks of the records, before several packs depend on it."""
    index = ChunkIndex(MIN_CHUNK_BYTES)  # which size does not matter for this
    for number, pack in enumerate(packs):
        try:
            index.add(number, pack.records)
        except TransferError as error:
            raise BadImageError(f"the records of the pack {pack.name.hex()} make no sense ({error})") from error


def write(tier: Tier, packs: Iterable[IndexedPack]) -> list[str]:
    """Durable index objects that describe these packs; returns their keys. The packs are durable already."""
    written = []
    for group in _groups(packs):
        data = encode(group)
        key = keys.index_key(blake3(data).digest())
        if not tier.put_if_absent(key, data) and not _is_intact(tier, key):
            tier.replace(key, data)
        written.append(key)
    return written


def _is_intact(tier: Tier, key: str) -> bool:
    try:
        read(tier, key)
    except BadImageError:
        return False
    return True


def _groups(packs: Iterable[IndexedPack]) -> Iterator[list[IndexedPack]]:
    group: list[IndexedPack] = []
    size = 0
    for pack in packs:
        if group and size + len(pack.records) > WRITTEN_BYTES:
            yield group
            group, size = [], 0
        group.append(pack)
        size += len(pack.records)
    if group:
        yield group
