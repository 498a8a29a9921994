"""Locks made of objects, for places that have no other: each holder puts an object of its own and looks at the others'.

A holder renews its object; one that was not renewed for STALE_S is taken for dead by others, so a holder that could
not renew its own for LOST_S takes itself for dead, before they do. Ages are differences of times of the server's clock.
"""

from __future__ import annotations

import random
import secrets
import threading
import time
from collections.abc import Iterator
from typing import Protocol

from woodfrog.errors import RefusedError, WoodfrogError
from woodfrog.store import keys, owners
from woodfrog.store.tiers.protocol import Listed

RENEW_S = 60.0
LOST_S = 10 * 60.0
STALE_S = 20 * 60.0  # twice LOST_S: a request that was on its way for long still comes before it
_PAUSE_S = (0.1, 0.8)  # before the next attempt; random, so that two who met do not meet again


class Objects(Protocol):
    """What of a tier this needs."""

    @property
    def url(self) -> str: ...

    def get(self, key: str, max_bytes: int) -> bytes | None: ...

    def replace(self, key: str, data: bytes) -> None: ...

    def list(self, prefix: str) -> Iterator[Listed]: ...

    def remove(self, key: str) -> None: ...


class ObjectLock:
    """See Hold. `skew_s`: how far the server's clock was ahead of this machine's when the lock was taken."""

    def __init__(self, objects: Objects, key: str, data: bytes, put_s: float, skew_s: float) -> None:
        self._objects = objects
        self._key = key
        self._data = data
        self._renewed_s = put_s
        self.skew_s = skew_s
        self._lost = ""
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="woodfrog-lock", daemon=True)
        self._thread.start()

    def check(self) -> None:
        silent_s = _clock_s() - self._renewed_s
        if not self._lost and silent_s > LOST_S:
            self._lost = f"could not be renewed for {silent_s:.0f} seconds"
        if self._lost:
            raise RefusedError(
                f"the lock on the store {self._objects.url} {self._lost}: others may take it for given up",
                advice="see to the connection, then begin again",
            )

    def release(self) -> None:
        if not self._ended.is_set():
            self._ended.set()
            self._thread.join()
            self._objects.remove(self._key)

    def _renew(self) -> None:
        while not self._ended.wait(RENEW_S):
            before = _clock_s()
            try:
                self.check()
                if self._objects.get(self._key, keys.OWNER_MAX_BYTES) is None:
                    self._lost = "was removed by someone else"
                    return
                self._objects.replace(self._key, self._data)
            except RefusedError:
                return
            except WoodfrogError:
                continue  # the next round may reach the server; `check` judges how long it has been
            self._renewed_s = before


def acquire(objects: Objects, *, exclusive: bool, purpose: str, wait_s: float) -> ObjectLock:
    """RefusedError naming the holders."""
    deadline = time.monotonic() + wait_s
    while True:
        key = keys.lock_key(secrets.token_hex(16))
        data = owners.this_process(exclusive=exclusive, purpose=purpose).encode()
        put_s, unix_s = _clock_s(), time.time()
        objects.replace(key, data)
        try:
            # Everybody puts first and looks afterwards, so of two that do not go together at least one sees the other.
            mine_s, stale, conflicts = _look(objects, key, exclusive)
            if not conflicts:
                for other in stale:
                    objects.remove(other)
                return ObjectLock(objects, key, data, put_s, mine_s - unix_s)
        except BaseException:
            objects.remove(key)
            raise
        objects.remove(key)
        if time.monotonic() >= deadline:
            raise RefusedError(
                f"the store {objects.url} is in use, so this cannot {purpose}: {', '.join(conflicts)}",
                advice=f"wait for it to end; one that died elsewhere is passed over after {STALE_S / 60:.0f} minutes",
            )
        threading.Event().wait(random.uniform(*_PAUSE_S))


def _look(objects: Objects, mine: str, exclusive: bool) -> tuple[float, list[str], list[str]]:
    """When mine was put by the server's clock, keys of dead holders' objects, and who stands in the way."""
    listed = list(objects.list(keys.LOCKS))
    mine_s = max((entry.modified_unix_s for entry in listed if entry.key == mine), default=None)
    if mine_s is None:
        raise RefusedError(
            f"the store {objects.url} does not list what was just put into it, so it cannot be locked",
            advice="use a server with consistent listings, as S3 itself has",
        )
    stale: list[str] = []
    conflicts: list[str] = []
    for entry in listed:
        if entry.key == mine:
            continue
        data = objects.get(entry.key, keys.OWNER_MAX_BYTES)
        if data is None:
            continue  # it ended meanwhile
        owner = owners.decode(data)
        if mine_s - entry.modified_unix_s > STALE_S or (owner is not None and owner.is_dead()):
            stale.append(entry.key)
        elif owner is None:
            conflicts.append(f"{entry.key} (not written by woodfrog)")
        elif exclusive or owner.exclusive:
            conflicts.append(owner.describe())
    return mine_s, stale, conflicts


def _clock_s() -> float:
    """Goes on while the machine is suspended, unlike the monotonic one."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
