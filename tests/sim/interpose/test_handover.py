"""A target's GPU memory goes to the daemon and comes back: same bytes, same addresses, whoever dies meanwhile."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

import pytest
from interposer_agents import DEADLINE_S, Listener, Target

from woodfrog.errors import WoodfrogError

MIB = 1 << 20


def test_the_agent_says_who_it_is(target: Target, listener: Listener) -> None:
    with listener.accept() as link:
        assert link.hello.pid == target.pid == link.pid
        assert link.hello.name == "a target"
        assert link.hello.state == "running"
        ticks = Path(f"/proc/{target.pid}/stat").read_text().rpartition(")")[2].split()[19]
        assert link.hello.start_ticks == int(ticks)
        assert link.ping() < DEADLINE_S


def test_a_survey_counts_what_is_owned_without_stopping_anything(target: Target, listener: Listener) -> None:
    with listener.accept() as link:
        before = link.survey()
        assert target.ask(f"alloc 3 {5 * MIB}") == "allocated 3"
        assert target.ask("alloc 10 1000") == "allocated 13"
        survey = link.survey()
        assert survey.allocation_count - before.allocation_count == 13
        assert survey.owned_count - before.owned_count == 3  # the small ones fit into the slab that is there
        assert survey.owned_bytes - before.owned_bytes == 3 * 6 * MIB
        assert survey.devices[0].largest_bytes == 6 * MIB
        assert len(survey.devices[0].uuid.rstrip(b"\0")) > 0
        assert survey.obstacles == ()
        assert link.state == "running"


def test_memory_survives_twenty_handovers_in_a_row_at_the_same_addresses(target: Target, listener: Listener) -> None:
    target.ask(f"alloc 6 {3 * MIB}")
    target.ask("alloc 40 5000")
    addresses = target.ask("addresses")
    with listener.accept() as link:
        for operation in range(20):
            link.quiesce(operation, DEADLINE_S)
            with link.export_memory() as exported:
                assert {(m.address, m.size_bytes) for m in exported.mappings} >= {
                    (int(address), size)
                    for address, size in zip(addresses.split(), [3 * MIB] * 6 + [5000] * 40, strict=True)
                }
                link.release_memory()
                assert link.state == "released"
                link.return_memory(exported.handles, list(exported.fds))
            link.resume()
            assert target.ask("check") == "ok"
            assert target.ask("addresses") == addresses


def test_the_bytes_are_alive_in_the_descriptors_alone_even_in_another_process(
    target: Target, listener: Listener
) -> None:
    target.ask(f"alloc 4 {2 * MIB}")
    with listener.accept() as link:
        link.quiesce(7, DEADLINE_S)
        exported = link.export_memory()
        link.release_memory()
        link.detach()
    # A keeper of a page: it gets the descriptors, the daemon closes its own, later they come back as new numbers.
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    keeper = os.fork()
    if keeper == 0:
        ours.close()
        _, fds, _, _ = socket.recv_fds(theirs, 16, 253)
        theirs.send(b"kept")
        theirs.recv(16)
        socket.send_fds(theirs, [b"back"], fds)
        os._exit(0)
    theirs.close()
    socket.send_fds(ours, [b"keep"], list(exported.fds))
    assert ours.recv(16) == b"kept"
    handles = exported.handles
    exported.close()
    assert not any("woodfrog" in name or "agent.sock" in name for name in target.descriptors().values())
    target.wake()
    with listener.accept() as link:
        assert link.hello.state == "released"
        assert link.hello.operation == 7
        ours.send(b"give")
        _, fds, _, _ = socket.recv_fds(ours, 16, 253)
        os.waitpid(keeper, 0)
        link.return_memory(handles, fds)
        for fd in fds:
            os.close(fd)
        link.resume()
        assert target.ask("check") == "ok"


def test_an_agent_without_a_daemon_holds_no_descriptor_and_wakes_up_when_told(
    target_program: Path, tmp_path: Path
) -> None:
    with Target(target_program, tmp_path, LD_PRELOAD="") as bare:
        kinds_without = sorted(name.split(":")[0] for name in bare.descriptors().values())
    with Target(target_program, tmp_path) as target:
        deadline = time.monotonic() + DEADLINE_S
        while True:  # it looks for a daemon once, when it starts
            kinds = sorted(name.split(":")[0] for name in target.descriptors().values())
            if kinds == kinds_without:
                break
            assert time.monotonic() < deadline, kinds
        listener = Listener(tmp_path)
        assert listener.nobody_connects(0.3)
        target.wake()
        with listener.accept() as link:
            assert link.hello.state == "running"
        listener.close()


def test_an_agent_that_was_woken_while_it_was_connected_sleeps_once_it_is_detached(
    target: Target, listener: Listener
) -> None:
    target.ask(f"alloc 2 {3 * MIB}")
    with listener.accept() as link:
        target.wake()  # a daemon that starts wakes whoever it does not know yet
        target.wake()
        link.detach()
    assert listener.nobody_connects(0.3)  # it would break into the dump that follows
    target.wake()
    with listener.accept() as again:
        assert again.hello.state == "running"


@pytest.mark.parametrize("until", ["quiesced", "exported", "returned"])
def test_the_target_runs_on_when_the_daemon_dies_before_it_owns_the_memory(
    target: Target, listener: Listener, until: str
) -> None:
    target.ask(f"alloc 2 {3 * MIB}")
    link = listener.accept()
    link.quiesce(1, DEADLINE_S)
    target.send("check")
    assert target.silent(0.2)
    if until != "quiesced":
        exported = link.export_memory()
        if until == "returned":
            link.release_memory()
            link.return_memory(exported.handles, list(exported.fds))
        exported.close()
    assert link.state == until
    link.close()
    assert target.answer() == "ok"
    target.wake()
    with listener.accept() as again:
        assert again.hello.state == "running"
        again.quiesce(2, DEADLINE_S)
        again.resume()


def test_a_target_whose_memory_is_away_waits_for_the_next_daemon(target: Target, listener: Listener) -> None:
    target.ask(f"alloc 2 {3 * MIB}")
    link = listener.accept()
    link.quiesce(1, DEADLINE_S)
    exported = link.export_memory()
    link.release_memory()
    # It dies in the middle of giving back: one handle is there, the rest is not.
    with pytest.raises(WoodfrogError):
        link.return_memory(exported.handles[:1], list(exported.fds)[:1])
    assert link.state == "released"
    link.close()
    target.send("check")
    assert target.silent(0.3)
    target.wake()
    with listener.accept() as again:
        assert again.hello.state == "released"
        again.return_memory(exported.handles, list(exported.fds))
        exported.close()
        again.resume()
        assert target.answer() == "ok"


def test_commands_out_of_order_are_refused_and_change_nothing(target: Target, listener: Listener) -> None:
    target.ask(f"alloc 1 {3 * MIB}")
    with listener.accept() as link:
        for forbidden in (link.export_memory, link.release_memory):
            with pytest.raises(WoodfrogError, match="running"):
                forbidden()
        with pytest.raises(WoodfrogError, match="running"):
            link.return_memory([], [])
        link.quiesce(1, DEADLINE_S)
        with pytest.raises(WoodfrogError, match="quiesced"):
            link.quiesce(2, DEADLINE_S)
        with pytest.raises(WoodfrogError, match="quiesced"):
            link.release_memory()
        exported = link.export_memory()
        link.release_memory()
        with pytest.raises(WoodfrogError, match="released"):
            link.resume()
        link.return_memory(exported.handles, list(exported.fds))
        exported.close()
        link.resume()
        assert target.ask("check") == "ok"


def test_a_target_with_a_low_limit_of_open_files_hands_over_more_than_fit(
    target_program: Path, listener: Listener
) -> None:
    soft = ["sh", "-c", 'ulimit -Sn 256; ulimit -Hn 4096; exec "$0"']
    with Target(target_program, listener.directory, *soft, WOODFROG_SIMGPU_MEMORY="3GiB") as target:
        target.ask(f"alloc 600 {2 * MIB}")
        before = set(target.descriptors())
        with listener.accept() as link:
            for _ in range(2):
                link.quiesce(1, DEADLINE_S)
                with link.export_memory() as exported:
                    assert len(exported.handles) >= 600
                    link.release_memory()
                    link.return_memory(exported.handles, list(exported.fds))
                link.resume()
            assert target.ask("check") == "ok"
            # What came back is kept out of the way of the application, which still gets small numbers.
            added = set(target.descriptors()) - before
            assert len(added) >= 600
            assert min(added) >= 128


def test_a_hard_limit_that_is_too_low_is_a_refusal_and_the_target_runs_on(
    target_program: Path, listener: Listener
) -> None:
    hard = ["sh", "-c", 'ulimit -n 256; exec "$0"']
    with Target(target_program, listener.directory, *hard, WOODFROG_SIMGPU_MEMORY="1GiB") as target:
        # The simulated driver needs a descriptor for each of them, and they fit; to keep as many more does not.
        target.ask(f"alloc 120 {2 * MIB}")
        with listener.accept() as link:
            link.quiesce(1, DEADLINE_S)
            with pytest.raises(WoodfrogError, match="limit of open files"):
                link.export_memory()
            assert link.state == "quiesced"
            link.resume()
            assert target.ask("check") == "ok"


def test_freed_memory_is_gone_at_once_after_a_return(target: Target, listener: Listener) -> None:
    target.ask(f"alloc 4 {40 * MIB}")
    with listener.accept() as link:
        link.quiesce(1, DEADLINE_S)
        with link.export_memory() as exported:
            link.release_memory()
            link.return_memory(exported.handles, list(exported.fds))
        link.resume()
        kept = len(target.descriptors())
        assert target.ask("free 4") == "allocated 0"
        # Each piece that came back was held by its handle and by a descriptor; both are given up.
        assert len(target.descriptors()) <= kept - 4
        assert link.survey().owned_bytes == 2 * MIB


def test_an_application_that_closes_every_descriptor_loses_the_daemon_and_nothing_else(
    target: Target, listener: Listener
) -> None:
    target.ask(f"alloc 2 {3 * MIB}")
    link = listener.accept()
    link.quiesce(1, DEADLINE_S)
    with link.export_memory() as exported:
        link.release_memory()
        link.return_memory(exported.handles, list(exported.fds))
    link.resume()
    link.close()
    target.ask("closefrom 400")
    assert target.ask("check") == "ok"
    target.wake()
    with listener.accept() as again:
        again.quiesce(2, DEADLINE_S)
        with pytest.raises(WoodfrogError, match="closed the descriptor"):
            again.export_memory()
        again.resume()
        assert target.ask("check") == "ok"
