"""Agents are found by name and signal mask, and the wake signal reaches their thread and nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from woodfrog.errors import RefusedError, TargetLostError, WoodfrogError
from woodfrog.target import discovery, procfs
from woodfrog.target.discovery import Agent
from woodfrog.target.process import ProcessTree

# A thread that looks like the interposer's: it has the name, blocks the wake signal and waits for it. The main thread
# does not block it, so a signal to the process as a whole would end it.
TARGET = """
import ctypes, os, signal, sys, threading
wake = signal.SIGRTMAX - 3
def agent():
    ctypes.CDLL(None).prctl(15, sys.argv[1].encode(), 0, 0, 0)
    if sys.argv[2] != "open":
        signal.pthread_sigmask(signal.SIG_BLOCK, {wake})
    os.write(1, b"ready")
    if sys.argv[2] != "blocks":
        os.read(0, 1)
    while True:
        signal.sigwait({wake})
        os.write(1, b"woken")
threading.Thread(target=agent, daemon=True).start()
os.read(0, 1)
"""


def start(name: str = "woodfrog-agent", mask: str = "blocks", **environment: str) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, "-c", TARGET, name, mask],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, **environment},
    )
    assert process.stdout is not None
    assert os.read(process.stdout.fileno(), 5) == b"ready"
    if mask == "blocks":
        # Ready was said just before the wait: see that the thread has arrived there.
        deadline = time.monotonic() + 30
        while discovery.agent_of(process.pid) is None and name == discovery.AGENT_THREAD_NAME:
            assert time.monotonic() < deadline
    return process


def finish(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.communicate()


@pytest.fixture
def target() -> Iterator[subprocess.Popen[bytes]]:
    process = start(WOODFROG_NAME="llama")
    yield process
    finish(process)


def test_an_agent_is_found_with_its_process_thread_and_name(target: subprocess.Popen[bytes]) -> None:
    found = {agent.pid: agent for agent in discovery.managed_targets()}
    agent = found[target.pid]
    stat = procfs.stat(target.pid)
    assert stat is not None
    assert agent.start_ticks == stat.start_ticks
    assert agent.tid != target.pid
    assert agent.tid in procfs.threads(target.pid)
    assert agent.name == "llama"
    assert discovery.agent_of(target.pid) == agent
    with ProcessTree(target.pid) as tree:
        assert tree.root.agent_tid == agent.tid
        assert tree.with_agent() == [tree.root]


def test_an_agent_is_found_while_it_waits_and_while_it_works() -> None:
    # In sigwait the kernel shows the awaited signal as not blocked; outside of it as blocked.
    for mask in ("blocks", "works"):
        process = start(mask=mask)
        try:
            assert discovery.agent_of(process.pid) is not None
        finally:
            finish(process)


def test_waking_reaches_the_agents_thread_and_only_that(target: subprocess.Popen[bytes]) -> None:
    agent = discovery.agent_of(target.pid)
    assert agent is not None
    assert target.stdout is not None
    for _ in range(20):
        discovery.wake(agent)
        assert os.read(target.stdout.fileno(), 5) == b"woken"
    assert target.poll() is None


@pytest.mark.parametrize(("name", "mask"), [("woodfrog-agent", "open"), ("woodfrog-agents", "blocks")])
def test_a_thread_that_only_looks_like_an_agent_is_none_and_is_never_signalled(name: str, mask: str) -> None:
    process = start(name, mask)
    try:
        assert discovery.agent_of(process.pid) is None
        stat = procfs.stat(process.pid)
        assert stat is not None
        thread = procfs.threads(process.pid)[-1]
        if mask == "open":
            with pytest.raises(RefusedError, match="does not wait for the wake signal"):
                discovery.wake(Agent(process.pid, thread, stat.start_ticks, ""))
        assert process.poll() is None
    finally:
        finish(process)


def test_a_process_that_took_the_number_is_never_signalled(target: subprocess.Popen[bytes]) -> None:
    agent = discovery.agent_of(target.pid)
    assert agent is not None
    with pytest.raises(TargetLostError):
        discovery.wake(Agent(agent.pid, agent.tid, agent.start_ticks - 1, ""))
    finish(target)
    with pytest.raises(WoodfrogError):
        discovery.wake(agent)


def test_the_wake_signal_is_that_of_the_interposer() -> None:
    from woodfrog._native import wire

    assert wire.WAKE_SIGNAL_OFFSET == discovery.WAKE_SIGNAL_OFFSET
    assert wire.AGENT_THREAD_NAME == discovery.AGENT_THREAD_NAME
