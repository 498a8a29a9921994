"""The shared lock of one Store object: taken when the first of its sessions and readers begins, given back after the
last, so that a remote store sees one lock object and not one for each."""

from __future__ import annotations

import threading

from woodfrog.errors import WoodfrogError
from woodfrog.store.entries import Hold
from woodfrog.store.tiers.protocol import Tier


class SharedHolds:
    """Safe to use from several threads."""

    def __init__(self, tier: Tier) -> None:
        self._tier = tier
        self._mutex = threading.Lock()
        self._current: _Counted | None = None

    def take(self, purpose: str, wait_s: float) -> Hold:
        """RefusedError when someone has the exclusive lock for longer than that."""
        with self._mutex:
            current = self._current
            if current is None or current.users == 0 or not _is_good(current.lock):
                current = _Counted(self._tier.acquire(exclusive=False, purpose=purpose, wait_s=wait_s))
                self._current = current
            current.users += 1
            return _Share(self, current)

    def none(self) -> Hold:
        """No lock at all, in the form of one."""
        return _None()

    def give_back(self, counted: _Counted) -> None:
        """For the shares that `take` gave out."""
        with self._mutex:
            counted.users -= 1
            if counted.users == 0:
                counted.lock.release()
                if self._current is counted:
                    self._current = None

    def close(self) -> None:
        with self._mutex:
            if self._current is not None:
                self._current.lock.release()
                self._current = None


class _Counted:
    def __init__(self, lock: Hold) -> None:
        self.lock = lock
        self.users = 0


class _Share:
    def __init__(self, holds: SharedHolds, counted: _Counted) -> None:
        self._holds = holds
        self._counted = counted
        self._released = False

    def check(self) -> None:
        self._counted.lock.check()

    def release(self) -> None:
        if not self._released:
            self._released = True
            self._holds.give_back(self._counted)


class _None:
    def check(self) -> None:
        return

    def release(self) -> None:
        return


def _is_good(lock: Hold) -> bool:
    try:
        lock.check()
    except WoodfrogError:
        return False
    return True
