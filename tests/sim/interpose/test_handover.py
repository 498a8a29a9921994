"""A target's GPU memory goes to the daemon and comes back: same bytes, same addresses, whoever dies meanwhile."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from interposer_agents import DEADLINE_S, Listener, Target

from woodfrog.errors import WoodfrogError
from woodfrog.target.wire import Message

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
        try:
            ours.close()
            _, fds, _, _ = socket.recv_fds(theirs, 16, 253)
            theirs.send(b"kept")
            theirs.recv(16)
            socket.send_fds(theirs, [b"back"], fds)
        finally:
            os._exit(0)  # whatever has happened: this is no second test session
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
        while not target.agent_sleeps():  # it looks for a daemon once, when it starts
            assert time.monotonic() < deadline
        assert sorted(name.split(":")[0] for name in target.descriptors().values()) == kinds_without
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


EXPORTS_FAIL = "cuMemExportToShareableHandle:999"


@pytest.fixture
def exports(tmp_path: Path) -> Path:
    """The file with what is to fail in a target."""
    path = tmp_path / "failures"
    path.touch()
    return path


def test_descriptors_made_ahead_leave_the_driver_nothing_to_export(
    target_program: Path, listener: Listener, exports: Path
) -> None:
    with Target(target_program, listener.directory, WOODFROG_SIMGPU_FAIL=f"@{exports}") as target:
        target.ask(f"alloc 7 {3 * MIB}")
        with listener.accept() as link:
            before = set(target.descriptors())
            made = link.export_ahead()
            assert made == len(set(target.descriptors()) - before) >= 7
            assert link.export_ahead() == 0  # they are there
            assert link.state == "running"
            assert target.ask("check") == "ok"
            exports.write_text(EXPORTS_FAIL)
            for operation in range(2):
                link.quiesce(operation, DEADLINE_S)
                with link.export_memory() as exported:
                    assert len(exported.handles) == made
                    link.release_memory()
                    assert set(target.descriptors()) <= before  # a dump would find any that is left
                    link.return_memory(exported.handles, list(exported.fds))
                link.resume()
                assert target.ask("check") == "ok"
            # What is allocated afterwards is exported while the target waits.
            target.ask(f"alloc 1 {3 * MIB}")
            link.quiesce(3, DEADLINE_S)
            with pytest.raises(WoodfrogError, match="exporting"):
                link.export_memory()
            assert link.state == "quiesced"
            exports.write_text("")
            with link.export_memory() as exported:
                assert len(exported.handles) == made + 1
            link.resume()
            assert target.ask("check") == "ok"


def test_memory_freed_after_its_descriptor_was_made_ahead_is_gone_at_once(target: Target, listener: Listener) -> None:
    target.ask(f"alloc 4 {40 * MIB}")
    with listener.accept() as link:
        link.export_ahead()
        kept = len(target.descriptors())
        assert target.ask("free 3") == "allocated 1"
        assert len(target.descriptors()) <= kept - 3
        link.quiesce(1, DEADLINE_S)
        with link.export_memory() as exported:
            assert [one.size_bytes for one in exported.handles].count(40 * MIB) == 1
            link.release_memory()
            link.return_memory(exported.handles, list(exported.fds))
        link.resume()
        assert target.ask("check") == "ok"


def test_descriptors_made_ahead_that_the_application_closes_are_made_again(target: Target, listener: Listener) -> None:
    target.ask(f"alloc 2 {3 * MIB}")
    link = listener.accept()
    link.export_ahead()
    link.close()
    target.ask("closefrom 400")
    target.wake()
    with listener.accept() as again:
        again.quiesce(2, DEADLINE_S)
        with again.export_memory() as exported:
            again.release_memory()
            again.return_memory(exported.handles, list(exported.fds))
        again.resume()
        assert target.ask("check") == "ok"


def test_descriptors_made_ahead_need_no_higher_limit_of_open_files(target_program: Path, listener: Listener) -> None:
    hard = ["sh", "-c", 'ulimit -n 600; exec "$0"']
    with Target(target_program, listener.directory, *hard, WOODFROG_SIMGPU_MEMORY="1GiB") as target:
        target.ask(f"alloc 100 {2 * MIB}")
        with listener.accept() as link:
            assert link.export_ahead() >= 100
            link.quiesce(1, DEADLINE_S)
            with link.export_memory() as exported:
                link.release_memory()
                link.return_memory(exported.handles, list(exported.fds))
            link.resume()
            assert target.ask("check") == "ok"


def test_many_handles_travel_in_as_few_packets_as_hold_them(target_program: Path, listener: Listener) -> None:
    """What the target waits for grows with its handles: a packet each would be a turn of two processes each."""
    with Target(target_program, listener.directory, WOODFROG_SIMGPU_MEMORY="3GiB") as target:
        target.ask(f"alloc 490 {2 * MIB}")  # three packets
        with listener.accept() as link:
            sent: list[str] = []
            received: list[str] = []
            send, receive = link._send, link._receive

            def counted_send(message: Message, deadline: float) -> None:
                sent.append(message.type)
                send(message, deadline)

            def counted_receive(deadline: float, command: str) -> Message:
                message = receive(deadline, command)
                received.append(message.type)
                return message

            link._send = counted_send  # type: ignore[method-assign]
            link._receive = counted_receive  # type: ignore[method-assign]
            link.export_ahead()
            link.quiesce(1, DEADLINE_S)
            with link.export_memory() as exported:
                link.release_memory()
                link.return_memory(exported.handles, list(exported.fds))
            link.resume()
            packets = -(-len(exported.handles) // 240)
            assert sent.count("return_batch") == packets
            assert received.count("export_batch") == packets
            assert len(sent) == 5 + packets
            assert len(received) == 6 + packets + received.count("mapping_batch")
            assert target.ask("check") == "ok"


@pytest.fixture
def pooled(target_program: Path, listener: Listener) -> Iterator[Target]:
    """A target whose large allocations share blocks."""
    with Target(target_program, listener.directory, WOODFROG_POOL_MIB="128", WOODFROG_SIMGPU_MEMORY="2GiB") as running:
        yield running


def test_large_allocations_that_share_blocks_are_few_handles_and_come_back(pooled: Target, listener: Listener) -> None:
    pooled.ask(f"alloc 60 {5 * MIB}")  # 6 MiB each: 10 to a block of 64
    pooled.ask(f"alloc 2 {40 * MIB}")  # too large to share one
    pooled.ask("alloc 10 1000")
    with listener.accept() as link:
        for operation in range(3):
            link.export_ahead()
            link.quiesce(operation, DEADLINE_S)
            with link.export_memory() as exported:
                sizes = [one.size_bytes for one in exported.handles]
                assert sizes.count(64 * MIB) == 6
                assert sizes.count(40 * MIB) == 2
                assert len(sizes) == 9
                of_5_mib = [one for one in exported.mappings if one.size_bytes == 5 * MIB]
                assert len(of_5_mib) == 60
                assert all(one.offset_bytes % (2 * MIB) == 0 for one in of_5_mib)
                link.release_memory()
                link.return_memory(exported.handles, list(exported.fds))
            link.resume()
            assert pooled.ask("check") == "ok"


def test_a_shared_block_is_given_back_once_all_of_it_is_free(pooled: Target, listener: Listener) -> None:
    with listener.accept() as link:
        before = link.survey().owned_bytes
        pooled.ask(f"alloc 10 {5 * MIB}")
        assert link.survey().owned_bytes - before == 64 * MIB
        pooled.ask("free 9")
        assert link.survey().owned_bytes - before == 64 * MIB
        pooled.ask(f"alloc 9 {6 * MIB}")  # into the same
        assert link.survey().owned_bytes - before == 64 * MIB
        pooled.ask("free 10")
        assert link.survey().owned_bytes - before == 0


def test_an_allocation_for_which_no_shared_block_fits_has_one_of_its_own(
    target_program: Path, listener: Listener
) -> None:
    with Target(target_program, listener.directory, WOODFROG_POOL_MIB="64", WOODFROG_SIMGPU_MEMORY="96MiB") as target:
        target.ask(f"alloc 10 {6 * MIB}")
        target.ask(f"alloc 4 {6 * MIB}")  # another 64 MiB are not there, 24 are
        with listener.accept() as link:
            assert link.survey().owned_bytes <= 96 * MIB
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


@pytest.mark.parametrize("same", [False, True])
def test_an_agent_tells_what_its_time_went_to(target: Target, listener: Listener, same: bool) -> None:
    asked = set() if same else {"properties_call"}  # where each piece of memory lies
    target.ask(f"alloc 5 {3 * MIB}")
    with listener.accept() as link:
        assert link.spent() == {}
        link.quiesce(1, DEADLINE_S)
        with link.export_memory() as exported:
            link.release_memory()
            link.return_memory(exported.handles, list(exported.fds), same=same)
            handles = len(exported.handles)
        link.resume()
        spent = link.spent()
        assert spent.keys() == {"quiesce", "export_memory", "release_memory", "return_batch", "resume"}
        for command, calls in (
            ("export_memory", {"export_call"}),
            ("release_memory", {"unmap_call", "release_call"}),
            ("return_batch", {"import_call", "map_call", "access_call", *asked}),
        ):
            row = spent[command]
            assert {name for name in row if name.endswith("_call")} == calls
            assert all(row[name][1] == handles for name in calls)
            whole_s, times = row["all"]
            assert times == 1
            assert whole_s >= sum(seconds for name, (seconds, _) in row.items() if name != "all") > 0
        assert target.ask("check") == "ok"
        target.ask(f"alloc 2 {3 * MIB}")  # the application's own calls are nobody's time
        assert link.spent() == spent
        link.quiesce(2, DEADLINE_S)
        assert link.spent().keys() == {"quiesce"}
        link.resume()
