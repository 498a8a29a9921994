"""Instances of one model server: taken from the standby pool on demand, suspended and ended when nobody needs them.

An instance serves one request at a time. Whoever needs one gets, in this order, a ready one, a suspended one resumed, a
standby process, a restore from the image; at the bound of instances it waits for one to become free.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import woodfrog
from woodfrog.api import Target

log = logging.getLogger("fleet")

READY, BUSY, SUSPENDED = "ready", "busy", "suspended"
# What had to be done for a request, from the least on.
STARTS = ("ready", "resume", "standby", "restore")


@dataclass
class Instance:
    """One restored server, and the port that it has here."""

    target: Target
    port: int
    state: str = BUSY
    used_at: float = field(default_factory=time.monotonic)


@dataclass(frozen=True)
class Limits:
    """How many, and how long: seconds without a request after which an instance is suspended, and ended."""

    maximum: int = 4
    standby: int = 1
    suspend_after_s: float = 5.0
    end_after_s: float = 30.0
    wait_s: float = 60.0  # for a free instance


class Fleet:
    """Instances of `image`, which serves on `port`. Close it: what it started is ended then."""

    def __init__(self, image: str, port: int, limits: Limits) -> None:
        self.image, self.port, self.limits = image, port, limits
        self._changed = threading.Condition()
        self._instances: list[Instance] = []
        self._starting = 0
        self._closing = False
        self._refill = threading.Event()
        self._threads = [threading.Thread(target=work, daemon=True) for work in (self._keep_pool, self._put_to_sleep)]
        self._refill.set()
        for thread in self._threads:
            thread.start()

    @contextlib.contextmanager
    def lease(self) -> Iterator[tuple[Instance, str]]:
        """An instance for one request, and what had to be done for it. One that fails within is ended."""
        instance, start = self._take()
        try:
            yield instance, start
        except BaseException:
            self._end(instance)
            raise
        with self._changed:
            instance.state, instance.used_at = READY, time.monotonic()
            self._changed.notify_all()

    def states(self) -> dict[str, int]:
        """How many instances are in which state; `standby` are the pool's."""
        with self._changed:
            found = {state: sum(one.state == state for one in self._instances) for state in (READY, BUSY, SUSPENDED)}
        found["standby"] = sum(one.image == self.image for one in woodfrog.standby_pool())
        return found

    def close(self) -> None:
        """End every instance and the pool."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._refill.set()
        for thread in self._threads:
            thread.join()
        for instance in list(self._instances):
            self._end(instance)
        with contextlib.suppress(woodfrog.WoodfrogError):  # there may be none
            woodfrog.end_standby(self.image)

    def _take(self) -> tuple[Instance, str]:
        deadline = time.monotonic() + self.limits.wait_s
        with self._changed:
            while (found := self._choose()) is None and len(self._instances) + self._starting >= self.limits.maximum:
                if not self._changed.wait(max(0.0, deadline - time.monotonic())):
                    raise TimeoutError(f"no instance became free within {self.limits.wait_s:g} s")
            if found is None:
                self._starting += 1
            else:
                was, found.state = found.state, BUSY
        if found is None:
            return self._start()
        if was == READY:
            return found, "ready"
        try:
            woodfrog.resume(found.target)
        except BaseException:
            self._end(found)
            raise
        return found, "resume"

    def _choose(self) -> Instance | None:
        """A ready one, else a suspended one; of several the one used last, so that the others get their rest."""
        for state in (READY, SUSPENDED):
            if free := [one for one in self._instances if one.state == state]:
                return max(free, key=lambda one: one.used_at)
        return None

    def _start(self) -> tuple[Instance, str]:
        instance = None
        try:
            target = woodfrog.restore(self.image, new_pid_namespace=True, ports={self.port: 0})
            assert target.details is not None
            instance = Instance(target, target.details.ports[str(self.port)])
        finally:
            with self._changed:
                self._starting -= 1
                if instance is not None:
                    self._instances.append(instance)
                self._changed.notify_all()
        self._refill.set()
        start = "standby" if target.details.standby else "restore"
        log.info("%s on port %d, by %s", target.name, instance.port, start)
        return instance, start

    def _end(self, instance: Instance) -> None:
        instance.target.kill()
        with self._changed:
            if instance in self._instances:
                self._instances.remove(instance)
            self._changed.notify_all()

    # ── in the background ───────────────────────────────────────────────────────────────────────────────────────

    def _keep_pool(self) -> None:
        while True:
            self._refill.wait()
            self._refill.clear()
            if self._closing:
                return
            if self.limits.standby:
                try:
                    woodfrog.standby(
                        self.image, count=self.limits.standby, new_pid_namespace=True, ports={self.port: 0}
                    )
                except woodfrog.WoodfrogError as failure:
                    log.warning("the pool is not full: %s", failure.reason)  # the next request tries again

    def _put_to_sleep(self) -> None:
        while True:
            with self._changed:
                if self._closing:
                    return
                now = time.monotonic()
                waits = [self._due(one) - now for one in self._instances if one.state != BUSY]
                if not waits or min(waits) > 0:
                    self._changed.wait(min(waits) if waits else None)
                    continue
                due = next(one for one in self._instances if one.state != BUSY and self._due(one) <= now)
                was, due.state = due.state, BUSY
            if was == SUSPENDED or now - due.used_at >= self.limits.end_after_s:
                log.info("%s has had nothing to do: ended", due.target.name)
                self._end(due)
                continue
            self._suspend(due)

    def _due(self, instance: Instance) -> float:
        ready = instance.state == READY
        return instance.used_at + (self.limits.suspend_after_s if ready else self.limits.end_after_s)

    def _suspend(self, instance: Instance) -> None:
        try:
            woodfrog.suspend(instance.target, level="warm")
        except woodfrog.WoodfrogError as failure:
            log.warning("%s cannot be suspended and is ended: %s", instance.target.name, failure.reason)
            self._end(instance)
            return
        log.info("%s has had nothing to do: suspended", instance.target.name)
        with self._changed:
            instance.state = SUSPENDED
            self._changed.notify_all()
