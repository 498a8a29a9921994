"""Several processes that share memory are frozen and come back: each sees what the others write, as before."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sharing_job import Job

from woodfrog.errors import RefusedError
from woodfrog.operations.sharing import settle

EXAMPLES = int(os.environ.get("WOODFROG_TEST_SHARING_EXAMPLES", "6"))


@pytest.mark.parametrize(("workers", "where"), [(2, ""), (3, ""), (2, "host")])
@pytest.mark.parametrize("renewed", [False, True], ids=["same memory", "new memory"])
def test_what_one_writes_all_see_before_and_after(
    make_job: Callable[[int], Job], workers: int, where: str, renewed: bool
) -> None:
    job = make_job(workers)
    sharer = job.sharer
    everyone = range(workers)
    for owner in everyone:
        sharer.share(f"of-{owner}", owner, *(other for other in everyone if other != owner), mib=4, where=where)
        sharer.order(owner, "write", f"of-{owner}", 100 + owner)
        sharer.share(f"private-{owner}", owner)
        sharer.order(owner, "write", f"private-{owner}", 200 + owner)
    addresses = [sharer.order(0, "address", f"of-{owner}") for owner in everyone]
    for turn in range(3):
        job.freeze()
        assert job.memories() == [list(job.memories()[0])] + [
            sorted(numbers, key=numbers.index) for numbers in job.memories()[1:]
        ]
        assert sorted(job.memories()[0]) == list(range(1, workers + 1))
        if renewed:
            job.renew()
        job.thaw()
        for owner in everyone:
            for reader in everyone:
                expected = 100 + owner if turn == 0 else 1000 * turn + 10 * owner + workers - 1
                assert sharer.order(reader, "check", f"of-{owner}", expected) == "ok"
            assert sharer.order(owner, "check", f"private-{owner}", 200 + owner) == "ok"
            sharer.require_shared(f"of-{owner}", *everyone, value=1000 * (turn + 1) + 10 * owner)
    assert [sharer.order(0, "address", f"of-{owner}") for owner in everyone] == addresses


def test_a_processor_that_touches_host_memory_while_it_is_away_waits(make_job: Callable[[int], Job]) -> None:
    job = make_job(2)
    job.sharer.share("h", 0, 1, where="host")
    job.sharer.share("p", 1, where="host")  # shared with nobody
    for worker in (0, 1):
        job.sharer.order(worker, "count", "h" if worker == 0 else "p")
    for turn in range(3):
        for worker in (0, 1):
            while not _counted(job, worker):
                pass  # its thread has only begun
        job.freeze()
        still = [_settled(job, worker) for worker in (0, 1)]
        if turn == 1:
            job.renew()
        job.thaw()
        for worker in (0, 1):
            while _counted(job, worker) <= still[worker]:
                pass  # it counts on, and from where it was
    job.sharer.order(1, "poke", "h", 99)
    assert job.sharer.order(0, "check", "h", 99).endswith("instead of 99")  # the rest of it is not, the first word is
    os.kill(job.sharer.pids[0], signal.SIGSEGV)  # one that is no fault ends the process as ever
    assert job.sharer.process.process is not None
    job.sharer.process.process.kill()
    job.sharer.process.process.wait()
    with contextlib.suppress(ProcessLookupError):  # it may have ended with the one that started it
        os.kill(job.sharer.pids[1], signal.SIGKILL)


def _counted(job: Job, worker: int) -> int:
    return int(job.sharer.order(worker, "counted", "h" if worker == 0 else "p"))


def _settled(job: Job, worker: int) -> int:
    """The count of a thread that must have come to wait: it no longer changes."""
    count = _counted(job, worker)
    while (again := _counted(job, worker)) != count:
        count = again
    return count


def test_what_came_back_can_be_shared_with_yet_another(make_job: Callable[[int], Job]) -> None:
    job = make_job(3)
    job.sharer.share("a", 0, 1)
    job.freeze()
    job.renew()
    job.thaw()
    job.sharer.pass_on("a", 0, 2)
    job.sharer.require_shared("a", 0, 1, 2, value=5)
    job.freeze()
    assert job.memories() == [[1], [1], [1]]
    job.thaw()
    job.sharer.require_shared("a", 0, 1, 2, value=9)


def test_an_exporter_may_have_given_its_own_handle_up(make_job: Callable[[int], Job]) -> None:
    job = make_job(3)
    job.sharer.share("a", 0, 1, 2)
    job.sharer.order(1, "write", "a", 77)
    job.sharer.order(0, "release", "a")
    job.freeze()
    assert job.memories() == [[], [1], [1]]
    job.renew()
    job.thaw()
    assert job.sharer.order(2, "check", "a", 77) == "ok"
    job.sharer.require_shared("a", 1, 2, value=3)


@pytest.mark.parametrize(("inside", "outside"), [((0,), 1), ((1,), 0), ((0, 1), 2), ((1, 2), 0)])
def test_a_process_that_is_left_out_is_named(make_job: Callable[[int], Job], inside: tuple[int], outside: int) -> None:
    job = make_job(3)
    job.sharer.share("a", 0, 1, 2)
    job.quiesce(*inside)
    if inside == (1, 2) or inside == (1,):
        named = "not part of the target"  # the exporter, or another importer: whoever is found first
    else:
        named = f"{job.sharer.pids[outside]}|{job.sharer.pids[2]}"
    with pytest.raises(RefusedError, match=named) as raised:
        settle(job.targets)
    assert raised.value.details["code"] == "shared_memory"
    assert all(handle.memory == 0 for target in job.targets for handle in target.notes.handles)
    job.let_go()
    job.sharer.require_shared("a", 0, 1, 2, value=40)


def test_an_import_of_which_nobody_knows_the_size_is_refused(make_job: Callable[[int], Job]) -> None:
    job = make_job(2)
    job.sharer.order(0, "make", "a", 8)
    job.sharer.order(0, "send", "a", 1)
    job.sharer.order(1, "take", "a", 0)
    job.sharer.order(0, "release", "a")
    job.quiesce()
    with pytest.raises(RefusedError, match="how much"):
        settle(job.targets)
    job.let_go()
    assert job.sharer.order(1, "map", "a", 8) == "ok"
    job.freeze()
    job.thaw()
    job.sharer.require_shared("a", 1, value=6)


# ── random programs ─────────────────────────────────────────────────────────────────────────────────────────────

WORKERS = 3
ACTIONS = ("make", "pass", "write", "unmap", "release", "freeze", "renew")


class Model:
    """What each process must see. A name is one memory; the same process has it at most once."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.value: dict[int, int] = {}
        self.holders: dict[int, dict[int, bool]] = {}  # memory → worker → mapped
        self.exporter: dict[int, int] = {}
        self._next = 0

    def act(self, action: str, one: int, other: int) -> None:
        order = self.job.sharer.order
        if action == "make":
            number, worker = self._next, one % WORKERS
            self._next += 1
            order(worker, "make", number, 2)
            order(worker, "map", number, 2)
            order(worker, "write", number, 500 + number)
            self.value[number], self.holders[number], self.exporter[number] = 500 + number, {worker: True}, worker
        elif action in ("freeze", "renew"):
            self.freeze(action == "renew")
        elif (number := self._pick(one)) is not None:
            self._on(action, number, other)

    def _on(self, action: str, number: int, other: int) -> None:
        order, holders = self.job.sharer.order, self.holders[number]
        worker = sorted(holders)[other % len(holders)]
        if action == "pass":
            owner, importer = self.exporter[number], other % WORKERS
            if owner in holders and importer not in holders:
                order(owner, "send", number, importer)
                order(importer, "take", number, owner)
                order(importer, "map", number, 2)
                holders[importer] = True
        elif action == "write" and holders[worker]:
            self.value[number] = 10_000 + other
            order(worker, "write", number, self.value[number])
        elif action == "unmap" and holders[worker]:
            order(worker, "unmap", number)
            holders[worker] = False
        elif action == "release":
            order(worker, "release", number)
            del holders[worker]
            if not holders:
                del self.holders[number]

    def freeze(self, renewed: bool) -> None:
        # Memory that only importers have, none of them mapped, is refused: its size is not known.
        lost = [n for n, h in self.holders.items() if self.exporter[n] not in h and not any(h.values())]
        self.job.quiesce()
        if lost:
            with pytest.raises(RefusedError, match="how much"):
                settle(self.job.targets)
            self.job.let_go()
        else:
            settle(self.job.targets)
            for target in self.job.targets:
                target.release()
            if renewed:
                self.job.renew()
            self.job.thaw()
        self.check()

    def check(self) -> None:
        for number, holders in self.holders.items():
            for worker, mapped in holders.items():
                if not mapped:
                    assert self.job.sharer.order(worker, "map", number, 2) == "ok"
                    holders[worker] = True
                assert self.job.sharer.order(worker, "check", number, self.value[number]) == "ok"

    def _pick(self, one: int) -> int | None:
        numbers = sorted(self.holders)
        return numbers[one % len(numbers)] if numbers else None


@settings(
    max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], database=None
)
@given(
    program=st.lists(
        st.tuples(st.sampled_from(ACTIONS), st.integers(0, 99), st.integers(0, 99)), min_size=6, max_size=30
    )
)
def test_random_programs_see_their_memory_as_if_nothing_had_happened(
    make_job: Callable[[int], Job], program: list[tuple[str, int, int]]
) -> None:
    job = make_job(WORKERS)
    model = Model(job)
    for action, one, other in [("make", 0, 0), ("pass", 0, 1), *program, ("freeze", 0, 0), ("renew", 0, 0)]:
        model.act(action, one, other)
    job.sharer.end()
