"""How many steps a process that is behind may take at once while a job comes to rest (operations/cut.py)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

from woodfrog.operations.cut import MOST_STEPS, _Rank, _Watch
from woodfrog.operations.members import Member
from woodfrog.target.link import Held


def rank(pid: int, *, idle: bool) -> _Rank:
    made = _Rank(cast(Member, SimpleNamespace(pid=pid)))
    become(made, idle=idle)
    return made


def become(one: _Rank, *, idle: bool) -> None:
    one.held = Held(idle=idle, capturing=False, waiting=1, submitted=0)


def take(watch: _Watch, one: _Rank) -> None:
    one.took = one.stride
    watch.stepped(one)


def test_steps_double_while_nobody_else_changes() -> None:
    behind, ahead = rank(1, idle=True), rank(2, idle=False)
    watch = _Watch([behind, ahead])
    for _ in range(20):
        take(watch, behind)
        become(behind, idle=not behind.idle)  # its own work does not count
        watch.look()
    assert behind.stride == MOST_STEPS
    assert ahead.stride == 1


def test_one_step_again_when_somebody_else_changes() -> None:
    behind, ahead, third = rank(1, idle=True), rank(2, idle=False), rank(3, idle=False)
    watch = _Watch([behind, ahead, third])
    for _ in range(4):
        take(watch, behind)
        watch.look()
    assert behind.stride == 16
    become(third, idle=True)
    watch.look()
    assert behind.stride == 1
    for _ in range(10):
        take(watch, behind)
        watch.look()
    assert behind.stride == MOST_STEPS, "nobody went too far: nothing is halved"


def test_whoever_goes_too_far_halves_what_may_be_taken_until_it_is_one() -> None:
    first, second = rank(1, idle=True), rank(2, idle=False)
    watch = _Watch([first, second])
    most = []
    for _ in range(12):
        while first.stride < MOST_STEPS and (not most or first.stride < most[-1]):
            take(watch, first)
            watch.look()
        take(watch, first)
        most.append(max(1, first.took // 2))
        become(first, idle=False)
        become(second, idle=True)
        ahead = watch.look()
        assert ahead is (first if first.took > 1 else None)
        if ahead is not None:
            watch.too_far(ahead)
        first, second = second, first  # now the other one is behind
    assert most == sorted(most, reverse=True)
    assert most[-1] == 1
    take(watch, first)
    watch.look()
    assert first.stride == 1


def test_whoever_had_only_work_of_its_own_queued_halves_nothing() -> None:
    first, second = rank(1, idle=True), rank(2, idle=False)
    watch = _Watch([first, second])
    take(watch, first)
    take(watch, first)
    become(first, idle=False)
    become(second, idle=True)
    assert watch.look() is first
    become(first, idle=True)  # within the time that it is given
    watch.look()
    for _ in range(11):
        take(watch, first)
        watch.look()
    assert first.stride == MOST_STEPS
