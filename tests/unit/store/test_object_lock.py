"""Locks made of objects, on files whose age a test can choose."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from woodfrog.errors import RefusedError
from woodfrog.store import keys, owners
from woodfrog.store.tiers import object_lock
from woodfrog.store.tiers.disk import DiskTier
from woodfrog.store.tiers.object_lock import ObjectLock


class Files(DiskTier):
    """A disk tier, used as if it had no locks of its own."""

    def remove(self, key: str) -> None:
        self.delete([key])

    def age(self, key: str, seconds: float) -> None:
        then = time.time() - seconds
        os.utime(self.path / key, (then, then))

    def locks(self) -> list[str]:
        return [listed.key for listed in self.list(keys.LOCKS)]


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Files]:
    tier = Files(tmp_path / "store")
    yield tier
    tier.close()


def take(place: Files, *, exclusive: bool = False) -> ObjectLock:
    return object_lock.acquire(place, exclusive=exclusive, purpose="test it", wait_s=0)


def elsewhere(place: Files, *, exclusive: bool, boot: str = "another boot") -> str:
    """The object of a holder on another machine; its key."""
    key = keys.lock_key("e" * 32)
    owner = owners.this_process(exclusive=exclusive, purpose="write an image")
    place.replace(key, replace(owner, host="elsewhere", boot_id=boot, pid=7).encode())
    return key


def test_shared_ones_go_together_and_an_exclusive_one_goes_alone(place: Files) -> None:
    one, two = take(place), take(place)
    with pytest.raises(RefusedError, match=f"process {os.getpid()}"):
        take(place, exclusive=True)
    one.release()
    two.release()
    two.release()
    assert place.locks() == []
    alone = take(place, exclusive=True)
    for exclusive in (False, True):
        with pytest.raises(RefusedError):
            take(place, exclusive=exclusive)
    assert len(place.locks()) == 1, "a refused one leaves nothing"
    alone.release()
    assert place.locks() == []


def test_of_many_who_want_it_alone_at_once_never_two_have_it(place: Files) -> None:
    inside = 0
    most = 0
    guard = threading.Lock()
    start = threading.Barrier(6)
    times = []

    def work() -> None:
        nonlocal inside, most
        start.wait()
        for _ in range(3):
            lock = object_lock.acquire(place, exclusive=True, purpose="test it", wait_s=300)
            with guard:
                inside += 1
                most = max(most, inside)
            with guard:
                inside -= 1
                times.append(1)
            lock.release()

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (most, len(times)) == (1, 18)


def test_a_holder_elsewhere_counts_until_it_is_stale(place: Files) -> None:
    key = elsewhere(place, exclusive=False)
    place.age(key, object_lock.STALE_S - 120)
    with pytest.raises(RefusedError, match="process 7 on elsewhere"):
        take(place, exclusive=True)
    place.age(key, object_lock.STALE_S + 120)
    take(place, exclusive=True).release()
    assert place.locks() == [], "a stale object is removed"


def test_a_dead_process_of_this_boot_counts_no_more(place: Files) -> None:
    owner = owners.this_process(exclusive=True, purpose="prune the store")
    key = keys.lock_key("d" * 32)
    # The number is in use again, by a process that began later.
    place.replace(key, replace(owner, start_ticks=owner.start_ticks - 1).encode())
    take(place).release()
    place.replace(key, owner.encode())
    with pytest.raises(RefusedError, match="prune the store"):
        take(place)
    # The same number in another PID namespace says nothing.
    place.replace(key, replace(owner, start_ticks=1, pid_namespace=1).encode())
    with pytest.raises(RefusedError):
        take(place)


def test_a_lock_is_renewed_as_long_as_it_is_held(place: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_lock, "RENEW_S", 0.02)
    lock = take(place)
    (key,) = place.locks()
    place.age(key, 3600)
    deadline = time.monotonic() + 120
    while next(iter(place.list(keys.LOCKS))).modified_unix_s < time.time() - 1800:
        assert time.monotonic() < deadline, "it was not renewed"
        time.sleep(0.01)
    lock.check()
    lock.release()
    assert place.locks() == []


def test_a_lock_that_could_not_be_renewed_is_lost_before_others_take_it_for_dead(
    place: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = take(place)
    now = object_lock._clock_s()
    monkeypatch.setattr(object_lock, "_clock_s", lambda: now + object_lock.LOST_S + 1)
    with pytest.raises(RefusedError, match="could not be renewed"):
        lock.check()
    monkeypatch.setattr(object_lock, "_clock_s", lambda: now)
    with pytest.raises(RefusedError, match="could not be renewed"):
        lock.check()
    lock.release()
    assert object_lock.LOST_S + 2 * object_lock.RENEW_S < object_lock.STALE_S


def test_a_lock_that_someone_removed_is_lost(place: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_lock, "RENEW_S", 0.02)
    lock = take(place)
    place.delete(place.locks())
    lock._thread.join(120)
    with pytest.raises(RefusedError, match="removed by someone else"):
        lock.check()
    assert place.locks() == [], "it does not come back"
    lock.release()


def test_an_owner_that_was_tampered_with_is_no_owner() -> None:
    good = owners.this_process(exclusive=False, purpose="x").encode()
    assert owners.decode(good) is not None
    for wrong in (b"", b"[]", b"{}", b"null", good[:-5], good.replace(b'"pid"', b'"did"'), b'{"a": 1}'):
        assert owners.decode(wrong) is None
    assert owners.decode(good.replace(b'"purpose": "x"', b'"purpose": 5')) is None
