"""A job with its launcher in it, as torchrun is: a store on TCP, pipes, threads with timers, ranks in sessions of their
own that it restarts. It is one target, comes back whole, and its numbers are free when it has been ended."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from product import Product, Stepper

from woodfrog.errors import RefusedError

RANKS = 2


def ranks_of(job: Stepper) -> list[int]:
    """The pids of the newest round."""
    line = [line for line in job.lines() if line.startswith("round ")][-1]
    return [int(word) for word in line.split()[3:]]


def check_goes_on(job: Stepper) -> None:
    """All of its ranks, and what they find in their memory is right."""
    job.wait_steps(5)
    assert not [line for line in job.lines() if " errors " in line and not line.endswith(" errors 0")]


def monotonic_offset_s(pid: int) -> float:
    """By how much its monotonic clock differs from the machine's."""
    line = next(line for line in Path(f"/proc/{pid}/timens_offsets").read_text().splitlines() if "monotonic" in line)
    seconds, nanoseconds = line.split()[1:]
    return int(seconds) + int(nanoseconds) / 1e9


def ended_and_back(product: Product, job: Stepper) -> Stepper:
    """Stopped, and at once restored in new processes by a daemon that is the parent of what it restored before."""
    everyone = [job.pid, *ranks_of(job)]
    mine = job.process is None  # restored: the daemon's to reap
    image = product.checkpoint(job, stop=True)["image"]
    if mine:
        assert not [pid for pid in everyone if Path(f"/proc/{pid}").exists()], "a number is taken still"
    again = product.restore(image, job.log, verify=True)
    check_goes_on(again)
    return again


def test_a_job_with_its_launcher_goes_through_everything_twice(product: Product) -> None:
    job = product.elastic(RANKS)
    assert f"ready {RANKS} io_uring ENOSYS" in job.lines(), "root's targets have none, without being asked"
    (row,) = product.call("ps")
    assert row["gpu_pids"] == [job.pid, *ranks_of(job)], "the launcher has called cuInit, and is one of them"
    for _ in range(3):
        product.checkpoint(job)
        check_goes_on(job)
    for level in ("cold", "warm"):
        product.call("suspend", target=job.pid, level=level)
        product.call("resume", target=job.pid)
        check_goes_on(job)
    for _ in range(3):
        job = ended_and_back(product, job)
    job.finish()


def test_a_restored_launcher_restarts_its_ranks_and_is_restored_with_these(product: Product) -> None:
    job = ended_and_back(product, product.elastic(RANKS))
    before = ranks_of(job)
    os.kill(before[1], signal.SIGKILL)
    job.wait_for(lambda lines: any(line.startswith("round 2 ") for line in lines), "second round")
    check_goes_on(job)
    assert not set(before) & set(ranks_of(job))
    product.checkpoint(job)
    check_goes_on(job)
    for _ in range(2):
        job = ended_and_back(product, job)  # sessions that began after the restore, too
    job.finish()


def test_no_deadline_of_a_job_passes_while_it_lies_in_an_image(product: Product) -> None:
    """Its monotonic clock goes on from where it was, for all processes, time after time."""
    job = product.elastic(RANKS)
    behind = 0.0
    for _ in range(2):
        begun = time.monotonic()
        image = product.checkpoint(job, stop=True)["image"]
        stopped = time.monotonic()
        job = product.restore(image, job.log)
        restored = time.monotonic()
        check_goes_on(job)
        found = {monotonic_offset_s(pid) for pid in (job.pid, *ranks_of(job))}
        assert len(found) == 1, found
        offset = found.pop()
        assert begun - restored < offset - behind < 0, (begun, stopped, restored, offset, behind)
        behind = offset
    job.finish()


def test_a_launcher_with_an_io_uring_is_refused_before_anything_is_touched(product: Product) -> None:
    job = product.elastic(RANKS, io_uring=True)
    assert f"ready {RANKS} io_uring here" in job.lines()
    with pytest.raises(RefusedError, match=f"Process {job.pid} uses io_uring") as raised:
        product.checkpoint(job)
    assert "run --no-io-uring" in raised.value.advice
    product.call("suspend", target=job.pid)
    product.call("resume", target=job.pid)
    check_goes_on(job)
    job.finish()
