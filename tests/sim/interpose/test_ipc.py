"""Legacy CUDA IPC, over descriptors: as with the driver, and through a freeze in the middle of it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from sharing_job import Job

from woodfrog.errors import RefusedError
from woodfrog.operations.sharing import settle

MIB_IN_KIB = 1 << 10


def open_in(job: Job, name: str, owner: int, importer: int, *, as_name: str = "") -> str:
    """One more opening of an owner's allocation; the name that the importer has it by."""
    as_name = as_name or name
    job.sharer.order(owner, "ipc_send", name, importer)
    job.sharer.order(importer, "ipc_take", as_name, owner)
    return as_name


@pytest.mark.parametrize("kib", [4, 3 * MIB_IN_KIB], ids=["in a slab", "of its own"])
@pytest.mark.parametrize("renewed", [False, True], ids=["same memory", "new memory"])
def test_what_one_writes_the_other_sees_before_and_after(
    make_job: Callable[[int], Job], kib: int, renewed: bool
) -> None:
    job = make_job(3)
    for name in ("before", "a", "behind"):  # neighbours in a slab
        job.sharer.order(0, "alloc", name, kib)
        job.sharer.order(0, "write", name, 1)
    for importer in (1, 2):
        open_in(job, "a", 0, importer)
        assert job.sharer.order(importer, "range", "a") == f"0 {kib * 1024}"
    job.sharer.require_shared("a", 0, 1, 2, value=10)
    address = job.sharer.order(1, "address", "a")
    for turn in range(2):
        job.freeze()
        assert {number for numbers in job.memories() for number in numbers} == {1}
        if renewed:
            job.renew()
        job.thaw()
        job.sharer.require_shared("a", 0, 1, 2, value=20 + 10 * turn)
        assert job.sharer.order(1, "address", "a") == address
    for name in ("before", "behind"):
        assert job.sharer.order(0, "check", name, 1) == "ok"
    open_in(job, "behind", 0, 1)  # a handle that is made afterwards
    job.sharer.require_shared("behind", 0, 1, value=50)


def test_opening_twice_gives_the_same_address_until_the_last_close(make_job: Callable[[int], Job]) -> None:
    job = make_job(2)
    job.sharer.order(0, "alloc", "a", 64)
    job.sharer.order(0, "alloc", "b", 64)
    addresses = {job.sharer.order(1, "address", open_in(job, "a", 0, 1, as_name=name)) for name in ("first", "second")}
    assert len(addresses) == 1
    open_in(job, "b", 0, 1)
    job.sharer.order(0, "write", "a", 5)
    assert job.sharer.order(1, "ipc_close", "first") == "ok"
    job.freeze()
    job.thaw()
    assert job.sharer.order(1, "check", "second", 5) == "ok"
    assert job.sharer.order(1, "ipc_close", "second") == "ok"
    job.sharer.require_shared("b", 0, 1, value=8)
    assert job.sharer.order(1, "ipc_close", "b") == "ok"
    job.freeze()
    assert job.memories() == [[], []]
    job.thaw()
    open_in(job, "b", 0, 1)
    job.sharer.require_shared("b", 0, 1, value=9)


def test_its_own_handle_and_one_of_freed_memory_are_refused_as_by_the_driver(make_job: Callable[[int], Job]) -> None:
    job = make_job(2)
    job.sharer.order(0, "alloc", "a", 4 * MIB_IN_KIB)
    job.sharer.order(0, "ipc_send", "a", 0)
    assert job.sharer.try_order(0, "ipc_take", "x", 0) == "error cuIpcOpenMemHandle CUDA_ERROR_INVALID_CONTEXT"
    job.sharer.order(0, "ipc_send", "a", 1)
    job.sharer.order(0, "free", "a")
    assert job.sharer.try_order(1, "ipc_take", "x", 0) == "error cuIpcOpenMemHandle CUDA_ERROR_INVALID_VALUE"


def test_freed_memory_lives_on_where_it_is_open(make_job: Callable[[int], Job]) -> None:
    job = make_job(2)
    job.sharer.order(0, "alloc", "a", 4 * MIB_IN_KIB)
    job.sharer.order(0, "write", "a", 6)
    open_in(job, "a", 0, 1)
    job.sharer.order(0, "free", "a")
    job.sharer.order(0, "alloc", "other", 4 * MIB_IN_KIB)  # is not the same memory
    job.sharer.order(0, "write", "other", 7)
    job.freeze()
    job.renew()
    job.thaw()
    assert job.sharer.order(1, "check", "a", 6) == "ok"
    assert job.sharer.order(0, "check", "other", 7) == "ok"


def test_an_importer_that_is_left_out_is_named(make_job: Callable[[int], Job]) -> None:
    job = make_job(2)
    job.sharer.order(0, "alloc", "a", 64)
    open_in(job, "a", 0, 1)
    for inside, outside in ((0, 1), (1, 0)):
        job.quiesce(inside)
        with pytest.raises(RefusedError, match=f"{job.sharer.pids[outside]}"):
            settle(job.targets)
        job.let_go()
    job.sharer.require_shared("a", 0, 1, value=3)


def test_a_handle_that_is_opened_while_its_exporter_is_frozen_is_answered_afterwards(
    make_job: Callable[[int], Job],
) -> None:
    job = make_job(2)
    job.sharer.order(0, "alloc", "a", 64)
    job.sharer.order(0, "write", "a", 4)
    job.sharer.order(0, "ipc_send", "a", 1)
    job.quiesce(0)
    settle(job.targets)
    job.targets[0].release()
    number = job.sharer.give(1, "ipc_take", "a", 0)
    job.thaw()
    assert job.sharer.answer(number, "ipc_take") == "ok"
    assert job.sharer.order(1, "check", "a", 4) == "ok"


def test_events_between_processes_are_waited_for(make_job: Callable[[int], Job]) -> None:
    job = make_job(2)
    assert job.sharer.order(0, "event", 1) == "ok"
    job.freeze()
    job.thaw()
    assert job.sharer.order(1, "wait", 0) == "ok"
