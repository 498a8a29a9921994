"""A content-addressed store: chunks in packs, an index that finds them, numbered manifests (docs/format.md).

`Store` puts the parts together; each operation is in a module of its own. It knows nothing of what is in a manifest:
what chunks an image has, callers tell it. Nothing here deletes except under the exclusive lock.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from woodfrog._native.transfer import Progress
from woodfrog.errors import NotFoundError, UsageError
from woodfrog.store import copying, images, keys, names, retention, space
from woodfrog.store import prune as pruning
from woodfrog.store import repair as repairing
from woodfrog.store import verify as verifying
from woodfrog.store.catalogue import Catalogue
from woodfrog.store.config import Config
from woodfrog.store.entries import Entry, OpenManifest
from woodfrog.store.holds import SharedHolds
from woodfrog.store.packing import PACKS_ON_THE_WAY
from woodfrog.store.reader import Reader
from woodfrog.store.session import WriteSession
from woodfrog.store.tiers.protocol import Digests, Tier

LOCK_WAIT_S = 10.0  # how long an operation waits for others by default; those who can wait longer say so


class Store:
    """Made by `woodfrog.store.open.open_store`. Safe to use from several threads; keep one a process and place, because
    it keeps the index in memory. References are NAME@NUMBER, or NAME for the newest of that name."""

    def __init__(self, tier: Tier, config: Config) -> None:
        self._tier = tier
        self._config = config
        self._catalogue = Catalogue(tier, config.chunk_bytes)
        self._holds = SharedHolds(tier)

    @property
    def url(self) -> str:
        """What `open_store` opens again."""
        return self._tier.url

    @property
    def path(self) -> Path | None:
        """The directory, or None for a remote store."""
        return self._tier.path

    @property
    def local(self) -> bool:
        return self._tier.local

    @property
    def tier(self) -> Tier:
        return self._tier

    @property
    def id(self) -> str:
        """Random, given at creation: tells two stores apart, or one from its copy at another path."""
        return self._config.id

    @property
    def chunk_bytes(self) -> int:
        """The size of chunks, fixed when the store was made."""
        return self._config.chunk_bytes

    def session(self, *, wait_s: float = LOCK_WAIT_S) -> WriteSession:
        """Start writing. Holds the shared lock until it is published, aborted or left. RefusedError while the store is
        being pruned or repaired for longer than `wait_s`."""
        hold = self._holds.take("write an image", wait_s)
        try:
            view = self._catalogue.refresh()
            with space.telling_full(self._tier.spool):
                return WriteSession(self._tier, self._catalogue, view, self.chunk_bytes, hold)
        except BaseException:
            hold.release()
            raise

    def reader(self, *, wait_s: float = LOCK_WAIT_S) -> Reader:
        """Start reading chunks. Holds the shared lock until it is closed: what it finds stays."""
        hold = self._holds.take("read an image", wait_s)
        try:
            return Reader(self._tier, self._catalogue.refresh(), hold)
        except BaseException:
            hold.release()
            raise

    def next_number(self, name: str) -> int:
        """The number that the next image of that name would get now. Numbers rise and are never used again."""
        return images.next_number(self._tier, names.check_name(name))

    def list(self, name: str | None = None) -> builtins.list[Entry]:
        """Every image (of that name), by name and number. No manifest is opened."""
        return images.entries(self._tier, name)

    def resolve(self, reference: str) -> str:
        """NAME@NUMBER of a reference, the newest of a bare name. NotFoundError."""
        name, number = names.parse_reference(reference)
        if number is not None:
            return f"{name}@{number}"
        entries = self.list(name)
        if not entries:
            raise self._no(f"of {name}")
        return entries[-1].reference

    def read(self, reference: str, *, hold: bool = True, wait_s: float = LOCK_WAIT_S) -> OpenManifest:
        """A manifest's bytes. `hold`: with the shared lock, so that its chunks stay until it is closed; without, it is
        for looking only. NotFoundError; BadImageError for a file that is too large to be a manifest."""
        lock = self._holds.take("read an image", wait_s) if hold else self._holds.none()
        try:
            exact = self.resolve(reference)
            data = self._tier.get(keys.manifest_of(exact), keys.MANIFEST_MAX_BYTES)
            if data is None:
                raise self._no(exact)
            return OpenManifest(exact, data, lock)
        except BaseException:
            lock.release()
            raise

    def read_profile(self, reference: str) -> bytes | None:
        """What `write_profile` left beside NAME@NUMBER, None for nothing. BadImageError when it is too large."""
        return self._tier.get(keys.profile_of(self.resolve(reference)), keys.PROFILE_MAX_BYTES)

    def write_profile(self, reference: str, data: bytes, *, wait_s: float = LOCK_WAIT_S) -> bool:
        """Note something beside an image, in place of what was noted before; it goes with the image. False, and nothing
        is written, if there is no such image."""
        if len(data) > keys.PROFILE_MAX_BYTES:
            raise UsageError(f"a profile of {len(data)} bytes is larger than {keys.PROFILE_MAX_BYTES}")
        lock = self._holds.take("write a profile", wait_s)
        try:
            exact = self.resolve(reference)
            if exact not in [entry.reference for entry in self.list(names.parse_reference(exact)[0])]:
                return False
            with space.telling_full(self._tier.spool):
                self._tier.replace(keys.profile_of(exact), data)
            return True
        finally:
            lock.release()

    def remove(self, reference: str, *, wait_s: float = LOCK_WAIT_S) -> str:
        """Delete one image's manifest (a bare name: UsageError, unless it has just one image) and return its full
        reference. The bytes go with the next `prune`. RefusedError while somebody reads or writes in the store for
        longer than `wait_s`: deleting is done alone."""
        name, number = names.parse_reference(reference)
        if number is None and len(self.list(name)) > 1:
            raise UsageError(f"{name} has several images", advice=f"say which: {name}@NUMBER")
        exact = self.resolve(reference)
        lock = self._tier.acquire(exclusive=True, purpose=f"remove {exact}", wait_s=wait_s)
        try:
            if exact not in [entry.reference for entry in self.list(name)]:
                raise self._no(exact)
            with space.telling_full(self._tier.spool):
                images.remove(self._tier, [exact], lock)
        finally:
            lock.release()
        return exact

    def prune(
        self,
        digests: Digests,
        *,
        dry_run: bool = False,
        grace_s: float | None = None,
        rewrite_above: float = pruning.REWRITE_ABOVE,
        wait_s: float = LOCK_WAIT_S,
        progress: Progress | None = None,
    ) -> pruning.PrunePlan:
        """Delete what no image needs (packs younger than `grace_s` stay; None: an hour in a remote store, 0 on a local
        disk), rewrite packs of which more than the fraction `rewrite_above` is not needed, and write the index anew.
        Returns what was (`dry_run`: would be) done.

        RefusedError while somebody reads or writes for longer than `wait_s`. BadImageError, with nothing deleted, if a
        manifest cannot be read or needs chunks that are in no index (`repair` comes first)."""
        return pruning.prune(
            self._tier,
            self._config,
            digests,
            dry_run=dry_run,
            grace_s=grace_s,
            rewrite_above=rewrite_above,
            wait_s=wait_s,
            progress=progress,
        )

    def verify(
        self,
        digests: Digests | None = None,
        *,
        sample: float = 1.0,
        wait_s: float = LOCK_WAIT_S,
        progress: Progress | None = None,
    ) -> builtins.list[verifying.Problem]:
        """What is wrong with the store. `sample`: the fraction of chunks whose bytes are read and compared (0: only
        listings and indexes). With `digests`, also which images lack chunks. Works beside readers and writers."""
        hold = self._holds.take("verify the store", wait_s)
        try:
            return verifying.verify(self._tier, self._config, digests, sample=sample, progress=progress)
        finally:
            hold.release()

    def repair(
        self,
        digests: Digests,
        *,
        check_data: bool = True,
        wait_s: float = LOCK_WAIT_S,
        progress: Progress | None = None,
    ) -> repairing.RepairReport:
        """Rebuild the index from the packs and save what can be saved of damaged packs. `check_data`: every chunk is
        read and compared, not only the packs' own headers. Never deletes an intact chunk or a manifest."""
        return repairing.repair(
            self._tier, self._config, digests, check_data=check_data, wait_s=wait_s, progress=progress
        )

    def copy_image(
        self,
        reference: str,
        to: Store,
        digests: Digests,
        *,
        name: str | None = None,
        rename: Callable[[bytes, str, int], bytes] | None = None,
        compress: str = "auto",
        level: int = 0,
        wait_s: float = LOCK_WAIT_S,
        progress: Progress | None = None,
    ) -> copying.CopyResult:
        """Copy one image into another store: only chunks that are absent there, the manifest last. What an interrupted
        copy has written is found by the next.

        It keeps its name and number there; with `name` it gets the next number of that name instead, and `rename`
        (manifest, name, number) gives the manifest's bytes for it. Nothing is done if the same manifest is there
        already; RefusedError if another one is, or if the stores' chunk sizes differ."""
        copying.refuse_other_chunk_size(self.chunk_bytes, self.url, to.chunk_bytes, to.url)
        with (
            space.telling_full(to.tier.spool),
            self.read(reference, wait_s=wait_s) as opened,
            self.reader(wait_s=wait_s) as reader,
            to.session(wait_s=wait_s) as session,
        ):
            return copying.copy_image(
                opened,
                reader,
                session,
                digests,
                chunk_bytes=self.chunk_bytes,
                spool_bytes=to.tier.pack_bytes,
                name=name,
                rename=rename,
                compress=compress,
                level=level,
                progress=progress,
            )

    def plan_retention(self, policy: retention.Policy, name: str | None = None) -> retention.RetentionPlan:
        """Which images (of that name) the policy keeps and which go; nothing is removed."""
        return retention.plan(self.list(name), policy, self._tier.clock_s())

    def apply_retention(self, plan: retention.RetentionPlan, *, wait_s: float = LOCK_WAIT_S) -> builtins.list[str]:
        """Remove the images that the plan lets go (those that are still there) under one exclusive lock; returns their
        references. The bytes go with the next `prune`."""
        if not plan.remove:
            return []
        lock = self._tier.acquire(exclusive=True, purpose="remove old images", wait_s=wait_s)
        try:
            there = {entry.reference for entry in self.list()}
            going = [entry.reference for entry in plan.remove if entry.reference in there]
            images.remove(self._tier, going, lock)
            return going
        finally:
            lock.release()

    def free_bytes(self) -> int | None:
        """What can still be written; None where nobody knows (s3)."""
        return self._tier.free_bytes()

    def require(self, size_bytes: int, what: str, *, work_bytes: int = 0) -> None:
        """NoSpaceError unless `size_bytes` more fit into packs, and beside them `work_bytes` into directories of the
        store's (a remote one's are on a local disk, where packs on their way are too). `what` is the subject of the
        sentence."""
        if self._tier.path is None:
            size_bytes = min(size_bytes, PACKS_ON_THE_WAY * self._tier.pack_bytes)
        space.require(self._tier.path or self._tier.spool, size_bytes + work_bytes, what)

    def is_current(self) -> bool:
        """Whether its path still leads to the place that it has open."""
        return self._tier.is_current()

    def clean(self) -> builtins.list[str]:
        """Remove what dead writers left unfinished; done at opening too. Returns what that was."""
        return self._tier.clean()

    def close(self) -> None:
        """Ends what it has open; sessions and readers must have ended before."""
        self._holds.close()
        self._tier.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _no(self, what: str) -> NotFoundError:
        return NotFoundError(f"there is no image {what} in {self.url}", advice="`woodfrog images` lists what there is")
