"""Looking for what is wrong with a store. It reads, compares and tells; it changes nothing (repair.py does)."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from woodfrog._native.transfer import IntegrityError, Progress, check_packs, scan_pack
from woodfrog.errors import WoodfrogError
from woodfrog.store import indexes, keys, marking
from woodfrog.store.config import Config
from woodfrog.store.indexes import IndexedPack
from woodfrog.store.records import (
    RECORD_BYTES,
    digests_of,
    locations_of,
    offsets_of,
    select_rows,
    stored_sizes_of,
)
from woodfrog.store.tiers.protocol import Digests, Tier

PROBLEM_KINDS = ("index-damaged", "pack-missing", "pack-size", "pack-damaged", "image-unreadable", "image-incomplete")


@dataclass(frozen=True)
class Problem:
    """`kind` is one of PROBLEM_KINDS; `where` a key or an image's reference; `chunks` how many are hit, if known."""

    kind: str
    where: str
    reason: str
    chunks: int = 0


class Examined(NamedTuple):
    """`bad`: positions of records whose bytes are not what their digest says, and `reason` why; `headers`: what is
    wrong with the pack's own."""

    bad: Sequence[int]
    reason: str
    headers: str


def verify(
    tier: Tier, config: Config, digests: Digests | None, *, sample: float, progress: Progress | None = None
) -> list[Problem]:
    """See Store.verify. The caller holds a lock."""
    found = indexes.read_all(tier)
    problems = [Problem("index-damaged", key, reason) for key, reason in sorted(found.damaged.items())]
    sizes = {listed.key: listed.size_bytes for listed in tier.list(keys.PACKS)}
    whole: list[IndexedPack] = []
    for pack in sorted(found.packs.values(), key=lambda pack: pack.key):
        if pack.key not in sizes:
            problems.append(Problem("pack-missing", pack.key, "it is in the index and not in the store", pack.chunks))
        elif sizes[pack.key] != pack.size_bytes:
            reason = f"it has {sizes[pack.key]} bytes instead of {pack.size_bytes}"
            problems.append(Problem("pack-size", pack.key, reason, pack.chunks))
        else:
            whole.append(pack)
    bad: dict[bytes, set[bytes]] = {}
    for pack in whole:
        records = _sample(pack.records, sample)
        examined = examine(tier, pack, records, headers=sample >= 1, progress=progress)
        if examined.bad:
            problems.append(Problem("pack-damaged", pack.key, examined.reason, len(examined.bad)))
            some = digests_of(records)
            bad[pack.name] = {some[at * keys.DIGEST_BYTES : (at + 1) * keys.DIGEST_BYTES] for at in examined.bad}
        elif examined.headers:
            problems.append(Problem("pack-damaged", pack.key, f"{examined.headers}, its chunks are intact"))
    if digests is None:
        return problems
    images = _images(tier, config, whole, bad, digests)
    if not images:
        # An interrupted prune leaves packs in the index that are gone because nothing needs them.
        problems = [problem for problem in problems if problem.kind != "pack-missing"]
    return problems + images


def examine(
    tier: Tier, pack: IndexedPack, records: bytes, *, headers: bool, progress: Progress | None = None
) -> Examined:
    """Reads these records' chunks (some of the pack's), and with `headers` the pack's own headers, which only `repair`
    needs: chunks are found by the index."""
    count = len(records) // RECORD_BYTES
    if not count and not headers:
        return Examined((), "", "")
    try:
        opened = tier.open_pack(pack.key, pack.size_bytes)
    except WoodfrogError as error:
        return Examined(range(count), error.reason, error.reason if headers else "")
    try:
        everything = [(0, pack.size_bytes)]
        opened.fetch(
            everything if headers else zip(offsets_of(records), stored_sizes_of(records), strict=True), progress
        )
        locations = locations_of(records, 0)
        bad = check_packs(digests_of(records), locations, {0: opened.fd}, progress=progress) if count else []
        reason = f"{len(bad)} of {count} chunks that were read are not what their digests say" if bad else ""
        return Examined(bad, reason, _headers(opened.fd, pack.name) if headers else "")
    finally:
        opened.close()


def _headers(descriptor: int, name: bytes) -> str:
    """What is wrong with them, if anything."""
    try:
        _, found = scan_pack(descriptor)
    except IntegrityError as error:
        return f"its headers are damaged ({error})"
    return "" if found == name else "its headers are not those that its name is of"


def without(packs: Sequence[IndexedPack], bad: Mapping[bytes, set[bytes]]) -> list[IndexedPack]:
    """The packs with the records of these digests (by the pack's name) left out."""
    remaining = []
    for pack in packs:
        if pack.name not in bad:
            remaining.append(pack)
            continue
        digests = digests_of(pack.records)
        each = (digests[at : at + keys.DIGEST_BYTES] for at in range(0, len(digests), keys.DIGEST_BYTES))
        good = [at for at, digest in enumerate(each) if digest not in bad[pack.name]]
        remaining.append(IndexedPack(pack.name, pack.size_bytes, select_rows(pack.records, good, RECORD_BYTES)))
    return remaining


def _images(
    tier: Tier, config: Config, packs: Sequence[IndexedPack], bad: Mapping[bytes, set[bytes]], digests: Digests
) -> list[Problem]:
    marked = marking.mark(tier, without(packs, bad), digests, config.chunk_bytes, bear_unreadable=True)
    problems = [Problem("image-unreadable", reference, reason) for reference, reason in marked.unreadable.items()]
    for reference, absent in marked.lacking.items():
        problems.append(Problem("image-incomplete", reference, f"{absent} of its chunks are lost", absent))
    return sorted(problems, key=lambda problem: problem.where)


def _sample(records: bytes, fraction: float) -> bytes:
    """At random, so that one run after the other comes to see everything; at least one chunk of each pack."""
    if fraction >= 1 or not records:
        return records
    if fraction <= 0:
        return b""
    count = len(records) // RECORD_BYTES
    chosen = random.sample(range(count), max(1, math.ceil(count * fraction)))
    return select_rows(records, sorted(chosen), RECORD_BYTES)
