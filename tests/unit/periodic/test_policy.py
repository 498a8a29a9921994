"""When the next periodic checkpoint is due: the promises of `--every` and `--max-overhead`, on numbers alone."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from woodfrog.errors import UsageError
from woodfrog.periodic.policy import MAX_BACK_OFF_S, Cost, Policy

seconds = st.floats(0, 1000, allow_nan=False)
rounds = st.lists(st.tuples(seconds, seconds), min_size=1, max_size=30)


def test_the_first_checkpoint_is_made_at_once_and_cheap_ones_follow_at_the_interval() -> None:
    policy = Policy(300, 0.01)
    assert policy.next_begin_s() == 0
    policy.succeeded(Cost(stall_s=0.5, total_s=3))
    assert policy.next_begin_s() == 300


def test_a_stall_above_the_bound_makes_the_interval_longer_and_a_shorter_one_brings_it_back() -> None:
    policy = Policy(60, 0.01)
    policy.succeeded(Cost(stall_s=2, total_s=3))
    assert policy.next_begin_s() == pytest.approx(200)
    policy.succeeded(Cost(stall_s=0.1, total_s=3))
    assert policy.next_begin_s() == 60


def test_a_checkpoint_that_takes_longer_than_the_interval_leaves_as_much_time_after_it() -> None:
    policy = Policy(10, None)
    policy.succeeded(Cost(stall_s=0.1, total_s=40))
    assert policy.next_begin_s() == 80
    for _ in range(3):
        policy.succeeded(Cost(stall_s=0.1, total_s=1))
    assert policy.next_begin_s() == 10


@given(rounds, st.floats(1, 1000), st.floats(0.001, 1))
def test_over_whole_intervals_the_target_never_waits_for_more_than_the_bound(
    costs: list[tuple[float, float]], interval_s: float, bound: float
) -> None:
    policy = Policy(interval_s, bound)
    stalled_s = elapsed_s = 0.0
    for stall_s, more_s in costs:
        policy.succeeded(Cost(stall_s, stall_s + more_s))
        following_s = policy.next_begin_s()
        assert following_s >= interval_s
        assert following_s >= 2 * (stall_s + more_s)
        stalled_s += stall_s
        elapsed_s += following_s
        assert stalled_s <= elapsed_s * bound * (1 + 1e-9)


@given(st.lists(seconds, min_size=1, max_size=30), st.floats(1, 10_000))
def test_failures_back_off_up_to_a_limit_and_never_below_the_interval(took: list[float], interval_s: float) -> None:
    policy = Policy(interval_s, None)
    before_s = 0.0
    for took_s in took:
        policy.failed(took_s)
        following_s = policy.next_begin_s()
        assert max(interval_s, took_s) <= following_s <= max(interval_s, MAX_BACK_OFF_S, took_s)
        if took_s <= before_s:
            assert following_s >= min(before_s, MAX_BACK_OFF_S) or following_s >= interval_s
        before_s = following_s
    assert policy.failures == len(took)
    policy.succeeded(Cost(0, 0))
    assert (policy.failures, policy.next_begin_s()) == (0, interval_s)


def test_each_failure_in_a_row_doubles_the_wait() -> None:
    policy = Policy(10, None)
    waits = []
    for _ in range(4):
        policy.failed(1)
        waits.append(policy.next_begin_s())
    assert waits == [20, 40, 80, 160]


def test_a_failure_that_took_long_is_paid_for_too() -> None:
    policy = Policy(10, 0.01)
    policy.failed(5)
    assert policy.next_begin_s() == 500


@pytest.mark.parametrize(("interval_s", "bound"), [(0.0, 0.01), (0.5, 0.01), (60.0, 0.0), (60.0, 1.5)])
def test_a_policy_that_makes_no_sense_is_refused(interval_s: float, bound: float) -> None:
    with pytest.raises(UsageError):
        Policy(interval_s, bound)
