"""woodfrog-enter beside a process that is not ours: faster where it can be, and never anything left behind in it."""

from __future__ import annotations

import errno
import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from mapper import Mapper
from ordered_program import OrderedProgram

from woodfrog._native import paths
from woodfrog.driver import entering
from woodfrog.driver.entering import Entered, driver_threads
from woodfrog.driver.library import DriverError

MIB = 1 << 20
X86 = platform.machine() == "x86_64"
# In the order in which they are come to (native/enter): flags of the mapping changed, frame on the stack, registers set
# for the call, signals held back, inside the call, behind it, signals back, registers back.
FAULTS = [
    "flags_set",
    "frame_written",
    "call_set",
    "signals_held",
    "call_entered",
    "call_made",
    "signals_back",
    "registers_back",
]


def huge_pages_are_given() -> bool:
    return "[never]" not in Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text()


@pytest.mark.parametrize("wait", [False, True])
def test_a_populated_mapping_gets_huge_pages_and_is_filled_from_outside(
    mapper: Callable[..., Mapper], wait: bool
) -> None:
    target = mapper(160)
    with Entered(target.pid, [target.thread], populate_threads=2, wait=wait) as visitor:
        target.check()
        target.check()
    visit = visitor.visit
    if not X86:
        assert "x86-64" in visit.reason
        return
    assert [one.size_bytes for one in visit.mappings] == [160 * MIB] * 2
    assert visit.reason == ""
    assert visit.threads == 1
    if wait:  # else the round may be over, and the memory unmapped, when it is looked at
        assert all(one.resident_bytes >= 160 * MIB for one in visit.mappings)
        assert all(one.huge_bytes >= 156 * MIB for one in visit.mappings) or not huge_pages_are_given()
    target.check_free()


@pytest.mark.parametrize("order", ["r", "R"])
def test_what_comes_to_a_mappings_place_is_not_filled(mapper: Callable[..., Mapper], order: str) -> None:
    target = mapper(512)
    with Entered(target.pid, [target.thread], populate_threads=2) as visitor:
        begin = int(target.ask(order).split()[1])
        deadline = time.monotonic() + 20
        while X86 and not visitor.named("populated"):
            assert time.monotonic() < deadline, "it is still being filled"
            os.sched_yield()
    pages = np.fromfile(f"/proc/{target.pid}/pagemap", np.uint64, 512 * MIB // 4096, offset=begin // 4096 * 8)
    there = np.count_nonzero(pages >> np.uint64(63)) * 4096
    assert there < 64 * MIB, f"{there >> 20} MiB are"  # of calls that were under way
    target.check_free()


def test_small_mappings_are_left_alone_and_that_is_said(mapper: Callable[..., Mapper]) -> None:
    target = mapper(16)
    with Entered(target.pid, [target.thread], populate_threads=2) as visitor:
        target.check()
    assert visitor.visit.mappings == []
    assert "no large mapping" in visitor.visit.reason or not X86
    target.check_free()


@pytest.mark.skipif(not X86, reason="nothing is entered here, so there is nothing to be killed in")
@pytest.mark.parametrize("point", FAULTS)
def test_a_visitor_killed_anywhere_leaves_the_thread_on_its_way(
    mapper: Callable[..., Mapper], monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    monkeypatch.setenv("WOODFROG_ENTER_FAULT", point)
    target = mapper(80)
    with Entered(target.pid, [target.thread], populate_threads=1) as visitor:
        target.check()
        assert visitor._process is not None
        assert visitor._process.wait(10) == -signal.SIGKILL, "the point was not come to"
    target.check_free()


@pytest.mark.skipif(not X86, reason="nothing is entered here, so there is nothing to be killed in")
@pytest.mark.parametrize("order", ["y", "z", "p"])
@pytest.mark.parametrize("point", ["", *FAULTS])
def test_a_call_made_inline_keeps_its_wide_registers_wherever_the_visitor_is_killed(
    mapper: Callable[..., Mapper], monkeypatch: pytest.MonkeyPatch, point: str, order: str
) -> None:
    """YMM; ZMM and masks; protection keys: what a signal's frame has beside the x87 and SSE registers."""
    target = mapper(80)
    if target.ask(order) == "none":
        pytest.skip(f"this processor has no registers for order {order!r} of mapper.cpp")
    if point:
        monkeypatch.setenv("WOODFROG_ENTER_FAULT", point)
    with Entered(target.pid, [target.thread], populate_threads=1) as visitor:
        assert target.ask(order) == "right"
        assert visitor._process is not None
        if point:
            assert visitor._process.wait(10) == -signal.SIGKILL, "the point was not come to"
    assert point or len(visitor.visit.mappings) == 1
    assert target.ask(order) == "right"
    target.check_free()


@pytest.mark.skipif(not X86, reason="nothing is entered here")
@pytest.mark.parametrize("order", ["g", "d", "c"])
@pytest.mark.parametrize("whole", [False, True])
def test_a_call_of_ours_is_not_made_where_it_would_harm(mapper: Callable[..., Mapper], order: str, whole: bool) -> None:
    """Where a frame would lie over memory that is no stack's; where a call from the C library is a signal; in a child
    whose memory is another one's."""
    target = mapper(80)
    if target.ask(order) == "none":
        pytest.skip(f"this kernel has not what order {order!r} of mapper.cpp wants")
    with Entered(target.pid, [] if whole else [target.thread], populate_threads=1) as visitor:
        assert target.ask(order) == "right"
        target.check()
    # Of the round in between; before it none was given the advice.
    assert [one["advised"] for one in visitor.named("mapping")][-1:] == [0]
    assert all(one["advised"] != 0 for one in visitor.named("mapping")[:-1])
    target.check_free()


def test_a_thread_of_another_process_is_not_entered(mapper: Callable[..., Mapper]) -> None:
    """A thread's number may be somebody else's by now."""
    target, other = mapper(80), mapper(80)
    with Entered(target.pid, [other.thread], populate_threads=1) as visitor:
        assert all(tracer == "0" for _, tracer in other.states().values())
        other.check()
    assert "no thread that runs" in visitor.visit.reason or not X86
    other.check_free()


def test_names_of_files_may_be_any_bytes(tmp_path: Path) -> None:
    """They are told with every call that is recorded; a reader that cannot read on would have the process wait."""
    program = (
        "import os, sys; name = os.fsencode(sys.argv[1]) + bytes([47, 255, 34, 10, 92, 254]);"
        "file = os.open(name, os.O_CREAT | os.O_RDWR);"
        "print('ready', os.getpid(), os.getpid(), flush=True);"
        "[(os.write(file, b'x'), print('done', flush=True)) for byte in iter(lambda: os.read(0, 1), b'')]"
    )
    target = OrderedProgram([sys.executable, "-c", program, str(tmp_path)])
    try:
        with Entered(target.pid, populate_threads=0, record=True) as visitor:
            assert target.ask("x") == "done"
        assert len(visitor.named("detached")) == 1
        assert [one["path"] for one in visitor.named("path") if str(tmp_path) in one["path"]] == [
            f'{tmp_path}/\ufffd"\n\\\ufffd'
        ]
    finally:
        target.process.kill()
        target.process.wait(30)


def test_a_target_that_is_killed_in_the_middle_is_told(mapper: Callable[..., Mapper]) -> None:
    target = mapper(1536)
    with Entered(target.pid, [target.thread], populate_threads=1, wait=True) as visitor:
        target.begin()
        deadline = time.monotonic() + 20
        while X86 and not visitor.named("mapping") and time.monotonic() < deadline:
            os.sched_yield()
        target.process.kill()
        target.process.wait(20)
    assert "ended meanwhile" in visitor.visit.reason or not X86


@pytest.mark.parametrize("whole", [False, True])
def test_a_process_that_somebody_else_traces_is_left_alone(mapper: Callable[..., Mapper], whole: bool) -> None:
    """`whole`: the main thread is attached to first, and let go when the other one cannot be."""
    target = mapper(80)
    wanted = [] if whole else [target.thread]
    with (
        Entered(target.pid, [target.thread], populate_threads=0, record=True) as first,
        Entered(target.pid, wanted, populate_threads=1) as second,
    ):
        target.check()
    assert "traces it already" in second.visit.reason
    assert second.visit.mappings == []
    assert any(one["event"] == "call" for one in first.events)
    target.check_free()


def test_without_permission_nothing_is_done_and_that_is_said(mapper: Callable[..., Mapper]) -> None:
    if os.getuid() != 0:
        pytest.skip("needs root to become somebody else")
    target = mapper(80)
    # By its descriptor: a checkout may be below a folder that others may not enter.
    program = os.open(paths.enter(), os.O_RDONLY)
    try:
        done = subprocess.run(
            [f"/proc/self/fd/{program}", "--populate", "1", str(target.pid), str(target.thread)],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, timeout=60, check=False,
            user=65534, group=65534, extra_groups=[], pass_fds=[program],
        )  # fmt: skip
    finally:
        os.close(program)
    (told,) = [json.loads(line) for line in done.stdout.splitlines()]
    assert (done.returncode, told["event"], told["errno"]) == (1, "refused", errno.EPERM)
    target.check_free()


def test_when_the_daemon_is_killed_the_process_is_let_go_in_good_order(mapper: Callable[..., Mapper]) -> None:
    target = mapper(80)
    script = (
        "import os, signal, sys; from woodfrog.driver.entering import Entered;"
        "v = Entered(int(sys.argv[1]), populate_threads=1); v.__enter__();"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", script, str(target.pid)], timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL
    deadline = time.monotonic() + 20
    while any(tracer != "0" for _, tracer in target.states().values()):
        assert time.monotonic() < deadline, "it is still traced"
        os.sched_yield()
    target.check_free()


def test_a_process_that_is_stopped_meanwhile_stays_stopped(mapper: Callable[..., Mapper]) -> None:
    target = mapper(80)
    with Entered(target.pid, populate_threads=1) as visitor:
        os.kill(target.pid, signal.SIGSTOP)
        deadline = time.monotonic() + 20
        while any(state not in "Tt" for state, _ in target.states().values()):
            assert time.monotonic() < deadline, target.states()
            os.sched_yield()
    assert visitor.visit.mappings == []
    # A thread that is let go runs a moment until it notices that its group is stopped.
    deadline = time.monotonic() + 20
    while set(target.states().values()) != {("T", "0")}:
        assert time.monotonic() < deadline, target.states()
        os.sched_yield()
    os.kill(target.pid, signal.SIGCONT)
    target.check_free()


def test_two_processes_side_by_side(mapper: Callable[..., Mapper]) -> None:
    targets = [mapper(96), mapper(96)]
    with (
        Entered(targets[0].pid, populate_threads=1) as one,
        Entered(targets[1].pid, populate_threads=1) as other,
    ):
        for target in targets:
            target.begin()
        assert [target.line() for target in targets] == ["right", "right"]
    assert [len(visitor.visit.mappings) for visitor in (one, other)] == [1, 1] or not X86
    for target in targets:
        target.check_free()


def test_it_can_be_turned_off(mapper: Callable[..., Mapper], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WOODFROG_ENTER", "0")
    target = mapper(80)
    with Entered(target.pid) as visitor:
        assert target.states()[target.pid][1] == "0"
        target.check()
    assert "WOODFROG_ENTER" in visitor.visit.reason


def test_a_thread_is_found_by_its_number_in_a_container(
    mapper: Callable[..., Mapper], monkeypatch: pytest.MonkeyPatch
) -> None:
    if os.getuid() != 0:
        pytest.skip("needs root for a PID namespace")
    target = mapper(80, before=["unshare", "--pid", "--fork", "--kill-child"])
    inner = target.thread
    (pid,) = map(int, Path(f"/proc/{target.process.pid}/task/{target.process.pid}/children").read_text().split())
    assert target.pid == 1
    monkeypatch.setattr(entering.DriverProcess, "restore_thread_id", lambda self: inner)
    (thread,) = driver_threads(pid)
    assert Path(f"/proc/{pid}/task/{thread}/status").exists()
    with Entered(pid, [thread], populate_threads=1) as visitor:
        target.check()
    assert len(visitor.visit.mappings) == 1 or not X86


def test_a_process_whose_driver_names_no_thread_is_looked_at_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: object) -> int:
        raise DriverError("The driver does not have it.")

    monkeypatch.setattr(entering.DriverProcess, "restore_thread_id", refuse)
    assert driver_threads(os.getpid()) == []
