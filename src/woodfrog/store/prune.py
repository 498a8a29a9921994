"""Deleting what no image needs: a plan first, which can be printed and tested, then its execution.

Marks what the manifests name and sweeps the rest, alone in the store. Each step leaves a store in which every image is
whole, so that being killed between any two costs room only (docs/format.md).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from woodfrog._native.transfer import CancelledError, Progress, TransferError
from woodfrog.errors import BadImageError, NoSpaceError
from woodfrog.faults import fault_point
from woodfrog.store import indexes, keys, marking, space
from woodfrog.store.config import Config
from woodfrog.store.entries import Hold
from woodfrog.store.indexes import IndexedPack
from woodfrog.store.records import stored_sizes_of
from woodfrog.store.saving import Saver
from woodfrog.store.tiers.protocol import Digests, Listed, Tier

# A remote store's lock objects can be lost to a writer that was stopped for long; what is younger stays. On a local
# disk the kernel keeps the lock, and a full disk is to be freed at once.
REMOTE_GRACE_S = 3600.0
REWRITE_ABOVE = 0.25  # of a pack's bytes not needed: rewriting costs the rest, and pays only by what it frees
_SMALL = 1 / 8  # of what a pack should be; that many of them or more are joined
_OBJECTS = 8  # index objects that may stay as they are


@dataclass(frozen=True)
class PackPlan:
    """What happens to one pack, and why."""

    key: str
    action: str  # "keep", "delete" or "rewrite"
    reason: str
    size_bytes: int
    live_bytes: int  # stored bytes of chunks that images need
    chunks: int
    live_chunks: int


@dataclass(frozen=True)
class PrunePlan:
    """What is to be done, or (`executed`) was."""

    images: int
    packs: list[PackPlan]
    indexes: int  # index objects before
    executed: bool = False
    notes: list[str] = field(default_factory=list)  # what was left undone, and why

    @property
    def freed_bytes(self) -> int:
        deleted = sum(pack.size_bytes for pack in self.packs if pack.action == "delete")
        return deleted + sum(pack.size_bytes - pack.live_bytes for pack in self.packs if pack.action == "rewrite")

    @property
    def size_bytes(self) -> int:
        return sum(pack.size_bytes for pack in self.packs)

    def lines(self) -> list[str]:
        """For a person."""
        does = [pack for pack in self.packs if pack.action != "keep"]
        lines = [
            f"{pack.action:7} {pack.key}  {pack.size_bytes} bytes, {pack.live_chunks} of {pack.chunks} chunks needed"
            f"  ({pack.reason})"
            for pack in does
        ]
        kept = len(self.packs) - len(does)
        verb = "freed" if self.executed else "to free"
        lines.append(f"{self.images} images; {kept} packs stay; {self.freed_bytes} of {self.size_bytes} bytes {verb}")
        return lines + self.notes


def prune(
    tier: Tier,
    config: Config,
    digests: Digests,
    *,
    dry_run: bool,
    grace_s: float | None,
    rewrite_above: float,
    wait_s: float,
    progress: Progress | None = None,
) -> PrunePlan:
    """See Store.prune."""
    lock = tier.acquire(exclusive=not dry_run, purpose="prune the store", wait_s=wait_s)
    try:
        with space.telling_full(tier.spool):
            fault_point("store.prune.locked")
            pruning = _Pruning(tier, config, digests, grace_s, rewrite_above, lock, progress)
            return pruning.plan if dry_run else pruning.execute()
    finally:
        lock.release()


class _Pruning:
    """One plan and its execution, under the lock that the caller holds."""

    def __init__(
        self,
        tier: Tier,
        config: Config,
        digests: Digests,
        grace_s: float | None,
        rewrite_above: float,
        lock: Hold,
        progress: Progress | None,
    ) -> None:
        self._tier = tier
        self._config = config
        self._lock = lock
        self._progress = progress
        self._found = indexes.read_all(tier)
        listed = sorted(tier.list(keys.PACKS))
        sizes = {entry.key: entry.size_bytes for entry in listed}
        usable = [pack for pack in self._found.packs.values() if sizes.get(pack.key) == pack.size_bytes]
        self._marked = marking.mark(tier, usable, digests, config.chunk_bytes)
        if self._marked.lacking:
            which = ", ".join(f"{image} ({absent})" for image, absent in sorted(self._marked.lacking.items()))
            raise BadImageError(
                f"nothing was deleted, because images need chunks that are in no index: {which}",
                advice="`woodfrog repair` first; then give up (`woodfrog rm`) images that cannot be saved",
                details={"lacking": self._marked.lacking},
            )
        self._numbers = {pack.key: number for number, pack in enumerate(self._marked.packs)}
        youngest = tier.clock_s() - ((0.0 if tier.local else REMOTE_GRACE_S) if grace_s is None else grace_s)
        packs = [self._judge(entry, entry.modified_unix_s > youngest, rewrite_above) for entry in listed]
        young = {entry.key for entry in listed if entry.modified_unix_s > youngest}
        self.plan = PrunePlan(self._marked.images, self._join_small(packs, young), len(self._found.objects))

    def _judge(self, entry: Listed, young: bool, rewrite_above: float) -> PackPlan:
        number = self._numbers.get(entry.key)
        if number is None:
            indexed = any(pack.key == entry.key for pack in self._found.packs.values())
            if indexed:  # of another size: damaged, and repair may save something of it
                return PackPlan(entry.key, "keep", "damaged: `woodfrog repair`", entry.size_bytes, 0, 0, 0)
            action, reason = ("keep", "in no index, but young") if young else ("delete", "in no index")
            return PackPlan(entry.key, action, reason, entry.size_bytes, 0, 0, 0)
        pack = self._marked.packs[number]
        live = self._marked.is_live(number)
        sizes = stored_sizes_of(pack.records)
        live_bytes = sum(size for size, needed in zip(sizes, live, strict=True) if needed)
        dead = 1 - live_bytes / max(1, sum(sizes))
        if not any(live):
            action, reason = ("keep", "not needed, but young") if young else ("delete", "no image needs it")
        elif dead > rewrite_above and not young:
            action, reason = "rewrite", f"{dead:.0%} of it is not needed"
        else:
            action, reason = "keep", "needed"
        return PackPlan(entry.key, action, reason, entry.size_bytes, live_bytes, pack.chunks, sum(live))

    def _join_small(self, packs: list[PackPlan], young: set[str]) -> list[PackPlan]:
        limit = self._tier.pack_bytes * _SMALL
        small = {
            pack.key
            for pack in packs
            if pack.action == "keep" and pack.live_chunks and pack.size_bytes < limit and pack.key not in young
        }
        if len(small) * _SMALL < 1:
            return packs
        return [replace(pack, action="rewrite", reason="small") if pack.key in small else pack for pack in packs]

    def execute(self) -> PrunePlan:
        tier, plan = self._tier, self.plan
        tier.clean()
        dead = [pack.key for pack in plan.packs if pack.action == "delete"]
        # Nothing is written before this: it must work on a full disk. Indexes may go on naming what is not there.
        self._delete(dead)
        fault_point("store.prune.dead_deleted")
        known = {pack.key: pack for pack in self._marked.packs}
        notes: list[str] = []
        gone = set(dead)
        new: list[IndexedPack] = []
        for group in self._rounds([pack for pack in plan.packs if pack.action == "rewrite"]):
            try:
                saved = self._rewrite([known[pack.key] for pack in group])
            except CancelledError:
                raise
            except (NoSpaceError, TransferError, BadImageError) as error:
                why = "there is no room" if isinstance(error, NoSpaceError) else "one of them is damaged (verify)"
                notes.append(f"{len(group)} packs were not rewritten: {why}")
                continue
            new += saved
            # Rewriting may give the same pack again.
            going = {pack.key for pack in group} - {pack.key for pack in saved}
            self._delete(sorted(going))
            gone |= going
            fault_point("store.prune.old_deleted")
        stay = [pack for pack in self._marked.packs if pack.key not in gone]
        if gone or new or len(self._found.objects) > _OBJECTS or self._found.damaged:
            notes += self._renew_indexes([*stay, *new])
        tier.restore_reserve()
        executed = [
            replace(pack, action="keep", reason="not rewritten")
            if pack.action == "rewrite" and pack.key not in gone
            else pack
            for pack in plan.packs
        ]
        return replace(plan, packs=executed, executed=True, notes=notes)

    def _rounds(self, packs: Sequence[PackPlan]) -> Iterator[list[PackPlan]]:
        """A few packs at a time, so that a nearly full disk has room for what is saved before the old ones go."""
        group: list[PackPlan] = []
        live = 0
        for pack in packs:
            if group and live + pack.live_bytes > self._tier.pack_bytes:
                yield group
                group, live = [], 0
            group.append(pack)
            live += pack.live_bytes
        if group:
            yield group

    def _rewrite(self, packs: Sequence[IndexedPack]) -> list[IndexedPack]:
        saver = Saver(self._tier, self._config.chunk_bytes, self._progress)
        try:
            for pack in packs:
                live = self._marked.is_live(self._numbers[pack.key])
                saver.save(pack, [at for at, needed in enumerate(live) if needed])
            saved = saver.finish()
        finally:
            saver.close()
        fault_point("store.prune.rewritten")
        indexes.write(self._tier, saved)
        fault_point("store.prune.rewritten_indexed")
        return saved

    def _renew_indexes(self, packs: Sequence[IndexedPack]) -> list[str]:
        """All packs in as few objects as can be, then the old objects go. Returns what was left undone."""
        unique = list({pack.key: pack for pack in packs}.values())
        before = {entry.key for entry in self._tier.list(keys.INDEX)}
        try:
            written = indexes.write(self._tier, unique)
        except NoSpaceError:
            if not self._tier.release_reserve():
                return ["the index was not renewed: there is no room"]
            try:
                written = indexes.write(self._tier, unique)
            except NoSpaceError:
                return ["the index was not renewed: there is no room"]
        fault_point("store.prune.index_durable")
        self._delete(sorted(before - set(written)))
        fault_point("store.prune.old_indexes_deleted")
        return []

    def _delete(self, going: Sequence[str]) -> None:
        if going:
            self._lock.check()
            self._tier.delete(going)
