"""Mending a store: the index rebuilt from what packs say of themselves, and the intact chunks of damaged packs saved.

It must never delete an intact chunk or a manifest: a damaged pack goes only when all that was found intact in it is
durable elsewhere, and one in which nothing was found stays for someone to look at.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from woodfrog._native.transfer import IntegrityError, Progress, TransferError, scan_pack
from woodfrog.errors import BadImageError, WoodfrogError
from woodfrog.faults import fault_point
from woodfrog.store import indexes, keys, marking, space, verify
from woodfrog.store.config import Config
from woodfrog.store.entries import Hold
from woodfrog.store.indexes import IndexedPack
from woodfrog.store.records import RECORD_BYTES, select_rows
from woodfrog.store.saving import Saver
from woodfrog.store.tiers.protocol import Digests, Listed, Tier


@dataclass
class RepairReport:
    """What was found and done. Counts are of packs unless they say otherwise."""

    packs: int = 0
    indexed_again: int = 0  # intact, and not (rightly) in an index before
    salvaged: dict[str, int] = field(default_factory=dict)  # key of each damaged pack: chunks saved from it
    hopeless: dict[str, str] = field(default_factory=dict)  # key of each pack left as it is: why
    damaged_indexes: dict[str, str] = field(default_factory=dict)  # key: why; replaced
    incomplete: dict[str, int] = field(default_factory=dict)  # images that lost chunks, and how many
    unreadable: dict[str, str] = field(default_factory=dict)  # images whose manifest cannot be read, and why

    @property
    def all_well(self) -> bool:
        """Whether every image is whole now."""
        return not self.incomplete and not self.unreadable

    def lines(self) -> list[str]:
        """For a person."""
        return [
            f"{self.packs} packs looked at, {self.indexed_again} of them put into the index again",
            *(f"index {key} was damaged: {why}" for key, why in sorted(self.damaged_indexes.items())),
            *(f"pack {key} was damaged: {saved} chunks saved" for key, saved in sorted(self.salvaged.items())),
            *(f"pack {key} is left as it is: {why}" for key, why in sorted(self.hopeless.items())),
            *(f"image {image} has lost {absent} chunks" for image, absent in sorted(self.incomplete.items())),
            *(f"image {image} cannot be read: {why}" for image, why in sorted(self.unreadable.items())),
        ]


def repair(
    tier: Tier,
    config: Config,
    digests: Digests,
    *,
    check_data: bool,
    wait_s: float,
    progress: Progress | None = None,
) -> RepairReport:
    """See Store.repair."""
    lock = tier.acquire(exclusive=True, purpose="repair the store", wait_s=wait_s)
    try:
        with space.telling_full(tier.spool):
            fault_point("store.repair.locked")
            return _Repair(tier, config, check_data, lock, progress).run(digests)
    finally:
        lock.release()


class _Repair:
    def __init__(self, tier: Tier, config: Config, check_data: bool, lock: Hold, progress: Progress | None) -> None:
        self._tier = tier
        self._config = config
        self._check_data = check_data
        self._lock = lock
        self._progress = progress
        self._report = RepairReport()
        self._good: list[IndexedPack] = []
        self._salvageable: list[IndexedPack] = []

    def run(self, digests: Digests) -> RepairReport:
        tier, report = self._tier, self._report
        tier.clean()
        found = indexes.read_all(tier)
        report.damaged_indexes = found.damaged
        for entry in sorted(tier.list(keys.PACKS)):
            report.packs += 1
            name = keys.parse_pack(entry.key)
            assert name is not None, "a tier lists proper keys only"
            self._look_at(entry, name, found.packs.get(name))
        saved = self._salvage()
        fault_point("store.repair.salvaged")
        packs = list({pack.key: pack for pack in [*self._good, *saved]}.values())
        written = indexes.write(tier, packs)
        fault_point("store.repair.index_durable")
        old = [key for key in [*found.objects, *found.damaged] if key not in written]
        self._delete(old)
        fault_point("store.repair.old_indexes_deleted")
        self._delete([pack.key for pack in self._salvageable if pack.key not in {new.key for new in packs}])
        fault_point("store.repair.damaged_deleted")
        tier.restore_reserve()
        marked = marking.mark(tier, packs, digests, self._config.chunk_bytes, bear_unreadable=True)
        report.incomplete, report.unreadable = marked.lacking, marked.unreadable
        return report

    def _look_at(self, entry: Listed, name: bytes, indexed: IndexedPack | None) -> None:
        """Sorts one pack into intact, damaged with something to save, and hopeless."""
        if indexed is not None and indexed.size_bytes == entry.size_bytes and self._is_settled(indexed):
            return
        try:
            opened = self._tier.open_pack(entry.key, entry.size_bytes)
        except WoodfrogError as error:
            self._report.hopeless[entry.key] = error.reason
            return
        try:
            opened.fetch([(0, entry.size_bytes)], self._progress)
            try:
                records, actual = scan_pack(opened.fd, contents=self._check_data, progress=self._progress)
            except IntegrityError:
                actual = b""
            if actual == name:
                self._good.append(IndexedPack(name, entry.size_bytes, records))
                self._report.indexed_again += 1
                return
            records, _ = scan_pack(opened.fd, salvage=True, progress=self._progress)
        except (TransferError, BadImageError) as error:
            self._report.hopeless[entry.key] = f"it cannot be read ({error})"
            return
        finally:
            opened.close()
        if records:
            self._salvageable.append(IndexedPack(name, entry.size_bytes, records))
        else:
            self._report.hopeless[entry.key] = "nothing intact was found in it"

    def _is_settled(self, pack: IndexedPack) -> bool:
        """Judges a pack by what the index says of it, which survives damage to the pack's own headers. False: there is
        nothing good in it that way."""
        if not self._check_data:
            self._good.append(pack)
            return True
        found = verify.examine(self._tier, pack, pack.records, headers=True, progress=self._progress)
        if not found.bad and not found.headers:
            self._good.append(pack)
            return True
        bad = set(found.bad)
        intact = [at for at in range(pack.chunks) if at not in bad]
        if intact:
            records = select_rows(pack.records, intact, RECORD_BYTES)
            self._salvageable.append(IndexedPack(pack.name, pack.size_bytes, records))
        return bool(intact)

    def _salvage(self) -> list[IndexedPack]:
        """The intact chunks of damaged packs in new packs, durable."""
        saver = Saver(self._tier, self._config.chunk_bytes, self._progress)
        try:
            for pack in self._salvageable:
                saver.save(pack, range(pack.chunks))
                self._report.salvaged[pack.key] = pack.chunks
            return saver.finish()
        finally:
            saver.close()

    def _delete(self, going: list[str]) -> None:
        if going:
            self._lock.check()
            self._tier.delete(going)
