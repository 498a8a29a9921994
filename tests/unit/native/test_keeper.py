"""The keeper holds what it acknowledged, whoever dies, and serves nobody but its owner."""

from __future__ import annotations

import array
import contextlib
import errno
import os
import random
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from woodfrog import errors
from woodfrog._native import paths
from woodfrog.daemon import keeper_client
from woodfrog.daemon.keeper_client import KeeperClient, KeeperRecord

from .conftest import Keeper, StartKeeper, content, eventually, memfd

MESSAGE = struct.Struct("<IHHiIQQ64s")


def packet(
    command: int,
    key: bytes = b"",
    *,
    magic: int = keeper_client.MAGIC,
    version: int = 1,
    status: int = 0,
    fd_count: int = 0,
    first: int = 0,
) -> bytes:
    return MESSAGE.pack(magic, version, command, status, fd_count, first, 0, key)


def raw_connection(keeper: Keeper) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.settimeout(30)
    connection.connect(str(keeper.socket))
    return connection


def status_of(reply: bytes) -> int:
    return int(MESSAGE.unpack(reply)[3])


def fill(client: KeeperClient, key: str, count: int) -> None:
    """`count` descriptors whose contents are their numbers."""
    fds = [memfd(str(i).encode()) for i in range(count)]
    try:
        assert client.append(key, fds) == count
    finally:
        for fd in fds:
            os.close(fd)


def test_the_client_and_the_keeper_have_the_same_layout() -> None:
    header = (Path(__file__).parents[3] / "native/wire/keeper.h").read_text()
    numbers = dict(re.findall(r"#define WF_KEEPER_(\w+) (\w+?)u?\b", header))
    assert int(numbers["MAGIC"], 16) == keeper_client.MAGIC
    assert int(numbers["VERSION"]) == keeper_client.VERSION
    assert int(numbers["MAX_FDS"]) == keeper_client.MAX_FDS
    assert int(numbers["MAX_RECORDS"]) == keeper_client.MAX_RECORDS
    commands = {name: int(value) for name, value in re.findall(r"X\((\w+), (\d+)\)", header)}
    assert commands == {command.name: command.value for command in keeper_client.Command}


def test_descriptors_come_back_in_order_and_refer_to_the_same_files(keeper: Keeper) -> None:
    with keeper.client() as client:
        fill(client, "target:1:2", 5)
    with keeper.client() as client:
        assert [content(fd) for fd in client.fetch("target:1:2")] == [b"0", b"1", b"2", b"3", b"4"]
        assert [content(fd) for fd in client.fetch("target:1:2", first=3, count=1)] == [b"3"]
        assert client.fetch("target:1:2", first=5) == []


def test_five_thousand_descriptors_fit_into_one_record(keeper: Keeper) -> None:
    files = [memfd(str(i).encode()) for i in range(10)]
    with keeper.client() as client:
        for _ in range(500):
            client.append("many", files)
        for fd in files:
            os.close(fd)
        assert client.list() == [KeeperRecord("many", 5000)]
        for first in range(0, 5000, 1000):
            fds = client.fetch("many", first=first, count=1000)
            assert [content(fd) for fd in fds] == [str(i % 10).encode() for i in range(1000)]
        before = keeper.fd_count()
        client.drop("many")
        assert before - keeper.fd_count() == 5000


def test_received_descriptors_are_not_inherited_by_children(keeper: Keeper) -> None:
    with keeper.client() as client:
        fill(client, "one", 1)
        (fd,) = client.fetch("one")
        assert not os.get_inheritable(fd)
        os.close(fd)


def test_notes_are_replaced_in_one_step_and_the_old_ones_are_gone(keeper: Keeper) -> None:
    with keeper.client() as client:
        fill(client, "target", 3)
        before = keeper.fd_count()
        notes = memfd(b"new notes")
        client.replace("target", 0, notes)
        os.close(notes)
        assert keeper.fd_count() == before
        assert [content(fd) for fd in client.fetch("target")] == [b"new notes", b"1", b"2"]


def test_records_are_listed_in_order_of_creation_and_forgotten_when_dropped(keeper: Keeper) -> None:
    with keeper.client() as client:
        client.ping()
        empty = keeper.fd_count()
        for key in ("c", "a", "b"):
            fill(client, key, 2)
        client.drop("a")
        assert client.list() == [KeeperRecord("c", 2), KeeperRecord("b", 2)]
        assert client.ping() == 2
        client.drop("b")
        client.drop("c")
        assert client.list() == []
        assert keeper.fd_count() == empty


def test_what_does_not_exist_is_said_so_by_its_error_type(keeper: Keeper) -> None:
    with keeper.client() as client:
        fill(client, "here", 1)
        fd = memfd(b"")
        with pytest.raises(errors.NotFoundError):
            client.fetch("nobody")
        with pytest.raises(errors.NotFoundError):
            client.drop("nobody")
        with pytest.raises(errors.NotFoundError):
            client.replace("nobody", 0, fd)
        with pytest.raises(errors.UsageError):
            client.replace("here", 1, fd)
        with pytest.raises(errors.UsageError):
            client.fetch("here", first=2)
        with pytest.raises(errors.UsageError):
            client.append("a key with spaces", [fd])
        with pytest.raises(errors.UsageError):
            client.append("k" * 64, [fd])
        with pytest.raises(errors.UsageError):
            client.append("none", [])
        os.close(fd)
        with pytest.raises(errors.UsageError, match="not open"):
            client.append("closed", [fd])
        assert client.list() == [KeeperRecord("here", 1)]


def test_nobody_listening_is_an_error_that_says_where(tmp_path: Path) -> None:
    with pytest.raises(errors.NoDaemonError, match=re.escape(str(tmp_path / "keeper.sock"))):
        KeeperClient(tmp_path / "keeper.sock")


# What a client does before it is killed; the number of steps done is the last argument.
DYING_CLIENT = """
import os, signal, socket, sys
from woodfrog.daemon import keeper_client as k
def message(command, key, count, first=0):
    return k._MESSAGE.pack(k.MAGIC, k.VERSION, command, 0, count, first, 0, key)
fds = [os.memfd_create(str(i)) for i in range(200)]
for i, fd in enumerate(fds):
    os.write(fd, b"%d" % i)
s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
steps = [
    lambda: s.connect(sys.argv[1]),
    lambda: socket.send_fds(s, [message(k.Command.append, b"first", 200)], fds),
    lambda: s.recv(96),
    lambda: socket.send_fds(s, [message(k.Command.append, b"second", 100)], fds[:100]),
    lambda: s.recv(96),
    lambda: s.send(message(k.Command.fetch, b"first", 0)),
    lambda: socket.recv_fds(s, 96, 240),
    lambda: socket.send_fds(s, [message(k.Command.replace, b"first", 1, 7)], fds[:1]),
    lambda: s.recv(96),
    lambda: s.send(message(k.Command.drop, b"second", 0)),
    lambda: s.recv(96),
]
for step in steps[: int(sys.argv[2])]:
    step()
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("steps", range(12))
def test_a_client_killed_at_any_point_leaves_whole_records(keeper: Keeper, steps: int) -> None:
    with keeper.client() as client:
        client.ping()  # it has been accepted when it is answered
        empty = keeper.fd_count()
    died = subprocess.run([sys.executable, "-c", DYING_CLIENT, str(keeper.socket), str(steps)], check=False)
    assert died.returncode == -signal.SIGKILL
    with keeper.client() as client:
        held = {record.key: record.fd_count for record in client.list()}
        # A request that was sent may or may not have been taken up; one that was answered has been.
        assert held.get("first", 200) == 200
        assert held.get("second", 100) == 100
        assert ("first" in held) or steps < 3
        assert ("second" in held) == (5 <= steps < 10) or steps in (4, 10)
        assert keeper.fd_count() - empty == sum(held.values())
        if "first" in held:
            contents = [content(fd) for fd in client.fetch("first")]
            expected = [str(i).encode() for i in range(200)]
            assert contents == expected or (steps >= 8 and contents == [*expected[:7], b"0", *expected[8:]])


def hostile_packets() -> dict[str, tuple[bytes, int, int]]:
    """Name: packet, descriptors sent with it, status expected."""
    append = keeper_client.Command.append
    fetch = keeper_client.Command.fetch
    bad = errno.EBADMSG
    return {
        "short": (packet(append, b"k", fd_count=1)[:-1], 1, bad),
        "long": (packet(append, b"k", fd_count=1) + b"x", 1, bad),
        "very_long": (b"\xff" * 60000, 3, bad),
        "one_byte": (b"W", 0, bad),
        "wrong_magic": (packet(append, b"k", magic=1, fd_count=1), 1, bad),
        "wrong_version": (packet(append, b"k", version=2, fd_count=1), 1, bad),
        "status_in_request": (packet(append, b"k", status=1, fd_count=1), 1, bad),
        "more_descriptors_than_said": (packet(append, b"k", fd_count=1), 2, bad),
        "fewer_descriptors_than_said": (packet(append, b"k", fd_count=2), 1, bad),
        "more_descriptors_than_allowed": (packet(append, b"k", fd_count=241), 241, bad),
        "as_many_descriptors_as_the_kernel_takes": (packet(append, b"k", fd_count=253), 253, bad),
        "no_key": (packet(append, b"", fd_count=1), 1, bad),
        "key_without_end": (packet(append, b"k" * 64, fd_count=1), 1, bad),
        "key_with_newline": (packet(append, b"a\nb", fd_count=1), 1, bad),
        "key_not_ascii": (packet(append, "ä".encode(), fd_count=1), 1, bad),
        "append_without_descriptors": (packet(append, b"k"), 0, errno.EINVAL),
        "fetch_with_descriptors": (packet(fetch, b"k", fd_count=1), 1, errno.EINVAL),
        "replace_with_two": (packet(5, b"held", fd_count=2), 2, errno.EINVAL),
        "replace_beyond_the_end": (packet(5, b"held", fd_count=1, first=2**64 - 1), 1, errno.EINVAL),
        "fetch_beyond_the_end": (packet(fetch, b"held", first=2**64 - 1), 0, errno.EINVAL),
        "list_beyond_the_end": (packet(4, first=2**64 - 1), 0, errno.ENOENT),
        "no_such_command": (packet(99, b"k"), 0, errno.EOPNOTSUPP),
        "command_zero": (packet(0, b"k"), 0, errno.EOPNOTSUPP),
    }


@pytest.mark.parametrize("name", hostile_packets())
def test_a_hostile_packet_is_answered_with_a_reason_and_keeps_nothing(keeper: Keeper, name: str) -> None:
    data, fd_count, expected = hostile_packets()[name]
    with keeper.client() as client:
        fill(client, "held", 2)
    fds = [memfd(b"") for _ in range(fd_count)]
    with raw_connection(keeper) as connection:
        connection.send(packet(keeper_client.Command.ping))
        connection.recv(200)
        before = keeper.fd_count()
        socket.send_fds(connection, [data], array.array("i", fds))
        assert status_of(connection.recv(200)) == expected
        connection.send(packet(keeper_client.Command.ping))
        assert status_of(connection.recv(200)) == 0
        assert keeper.fd_count() == before
    for fd in fds:
        os.close(fd)
    with keeper.client() as client:
        assert client.list() == [KeeperRecord("held", 2)]


def test_random_packets_change_nothing_and_leak_nothing(keeper: Keeper) -> None:
    generator = random.Random(20261129)
    with keeper.client() as client:
        fill(client, "held", 2)
        before = keeper.fd_count()
    fds = [memfd(b"") for _ in range(8)]
    with raw_connection(keeper) as connection:
        for _ in range(3000):
            data = bytearray(generator.randbytes(generator.choice([96, 96, 96, generator.randrange(1, 300)])))
            if generator.random() < 0.7:
                data[:6] = packet(0)[:6]
            if generator.random() < 0.5:  # a command, a status of 0 and few descriptors; the key stays random
                data[6:16] = struct.pack("<HiI", generator.randrange(10), 0, generator.randrange(9))
            sent = fds[: generator.randrange(9)]
            if len(data) >= 8 and data[6:8] == b"\x06\x00":
                data[6] = 7  # not `stop`
            socket.send_fds(connection, [bytes(data)], array.array("i", sent))
            connection.recv(200)
    for fd in fds:
        os.close(fd)
    with keeper.client() as client:
        assert client.list() == [KeeperRecord("held", 2)]
        assert keeper.fd_count() == before


def test_a_client_that_never_reads_its_replies_does_not_hold_the_keeper_up(keeper: Keeper) -> None:
    connection = raw_connection(keeper)
    with contextlib.suppress(OSError):
        while True:
            connection.send(packet(keeper_client.Command.ping))
    with keeper.client() as client:  # the silent one has been let go
        assert client.ping() == 0
    connection.close()


def test_a_second_client_is_served_when_the_first_one_leaves(keeper: Keeper) -> None:
    first = keeper.client()
    assert first.ping() == 0
    answers: list[int] = []

    def second() -> None:
        with keeper.client() as client:
            answers.append(client.ping())

    waiting = threading.Thread(target=second)
    waiting.start()
    fill(first, "while the other waits".replace(" ", "-"), 1)
    assert answers == []
    first.close()
    waiting.join(30)
    assert answers == [1]


def test_a_waiting_client_gives_up_after_its_timeout_and_says_why(keeper: Keeper) -> None:
    with keeper.client() as first:
        assert first.ping() == 0
        second = KeeperClient(keeper.socket, timeout_s=0.2)
        with pytest.raises(errors.NoDaemonError, match="did not answer"):
            second.ping()
        with pytest.raises(errors.NoDaemonError, match="closed before"):
            second.ping()
        assert first.ping() == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_is_refused(keeper: Keeper) -> None:
    base = keeper.directory.parent
    for path, mode in ((base, 0o755), (keeper.directory, 0o755), (keeper.socket, 0o777)):
        path.chmod(mode)  # so that only SO_PEERCRED stands in the way
    attempt = (
        "import os, socket, sys\n"
        "os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
        "s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)\n"
        "s.settimeout(30)\n"
        "s.connect(sys.argv[1])\n"
        "try:\n"
        "    s.send(bytes.fromhex(sys.argv[2]))\n"
        "    answer = s.recv(200)\n"
        "except ConnectionError:\n"
        "    answer = b''\n"
        "sys.exit(42 if answer == b'' else 1)\n"
    )
    command = [sys.executable, "-c", attempt, str(keeper.socket), packet(7).hex()]
    assert subprocess.run(command, check=False).returncode == 42
    with keeper.client() as client:
        assert client.ping() == 0


def test_only_one_keeper_serves_a_directory(start_keeper: StartKeeper, keeper: Keeper) -> None:
    second = start_keeper("/bin/true")
    assert second.process.wait(30) == 75
    assert "another keeper" in second.stderr()
    with keeper.client() as client:
        assert client.ping() == 0


def test_a_keeper_takes_over_the_socket_of_a_dead_one(start_keeper: StartKeeper, keeper: Keeper) -> None:
    keeper.end()
    assert keeper.socket.exists()
    with start_keeper().client() as client:
        assert client.ping() == 0


def test_a_directory_open_to_others_is_refused(start_keeper: StartKeeper, keeper: Keeper) -> None:
    shared = keeper.directory.parent / "shared"
    shared.mkdir(mode=0o777)
    shared.chmod(0o777)
    other = start_keeper("/bin/true", directory="shared")
    assert other.process.wait(30) == 1
    assert "0700" in other.stderr()


def test_the_socket_admits_its_owner_only(keeper: Keeper) -> None:
    assert keeper.socket.stat().st_mode & 0o077 == 0
    assert keeper.directory.stat().st_mode & 0o777 == 0o700


def test_a_daemon_that_dies_is_started_again_and_finds_its_records(keeper: Keeper) -> None:
    with keeper.client() as client:
        fill(client, "kept", 3)
    children = Path(f"/proc/{keeper.process.pid}/task/{keeper.process.pid}/children")
    first = children.read_text().split()[0]
    os.kill(int(first), signal.SIGKILL)
    second = keeper.line()
    assert second != first
    with keeper.client() as client:
        assert client.list() == [KeeperRecord("kept", 3)]


def test_a_daemon_that_keeps_dying_is_started_at_most_five_times_a_minute(start_keeper: StartKeeper) -> None:
    keeper = start_keeper("/bin/sh", "-c", "echo started; exit 7", options=["--restart-window", "2"])
    assert keeper.process.stderr
    said: list[str] = []
    while len(said) < 13:
        said.append(keeper.process.stderr.readline().decode().strip())
    pauses = [float(line.split(" in ")[1].split()[0]) for line in said if "starting it again" in line]
    assert pauses[:6] == [0.0, 0.1, 0.2, 0.4, 2.0, 0.0] or pauses[:5] == [0.0, 0.1, 0.2, 0.4, 2.0]
    with keeper.client() as client:  # and it serves meanwhile
        assert client.ping() == 0


def test_a_daemon_that_cannot_be_started_is_named(start_keeper: StartKeeper) -> None:
    keeper = start_keeper("/no/such/daemon")
    assert keeper.process.stderr
    assert "/no/such/daemon" in keeper.process.stderr.readline().decode()


def test_stop_is_refused_while_something_is_held_and_ends_it_otherwise(keeper: Keeper) -> None:
    with keeper.client() as client:
        fill(client, "held", 1)
        with pytest.raises(errors.RefusedError):
            client.stop()
        client.drop("held")
        client.stop()
    assert keeper.process.wait(30) == 0
    assert not keeper.socket.exists()


def test_sigterm_ends_the_daemon_and_then_the_keeper_when_nothing_is_held(keeper: Keeper) -> None:
    keeper.process.send_signal(signal.SIGTERM)
    assert keeper.line() == "terminated"
    assert keeper.process.wait(30) == 0


def test_sigterm_does_not_end_a_keeper_that_holds_something(keeper: Keeper) -> None:
    with keeper.client() as client:
        fill(client, "held", 1)
        keeper.process.send_signal(signal.SIGTERM)
        assert keeper.line() == "terminated"
        assert [content(fd) for fd in client.fetch("held")] == [b"0"]
        client.drop("held")
    assert keeper.process.wait(30) == 0
    assert "staying" in keeper.stderr()


def test_a_hangup_of_its_terminal_does_not_end_it(keeper: Keeper) -> None:
    keeper.process.send_signal(signal.SIGHUP)
    with keeper.client() as client:
        assert client.ping() == 0
    assert os.getsid(keeper.process.pid) == keeper.process.pid


def test_orphans_are_reaped(start_keeper: StartKeeper) -> None:
    # The inner shell outlives the outer one's child that started it, and ends when its input ends.
    keeper = start_keeper("/bin/sh", "-c", "(sh -c 'echo $$; kill -STOP $$' &) ; exec sleep 1000")
    orphan = int(keeper.line())
    stat = Path(f"/proc/{orphan}/stat")
    eventually(lambda: stat.read_text().split()[3] == str(keeper.process.pid), "the keeper adopts the orphan")
    os.kill(orphan, signal.SIGKILL)
    eventually(lambda: not stat.exists(), "the orphan is reaped")


def test_a_full_table_refuses_more_and_takes_connections_still(start_keeper: StartKeeper) -> None:
    limited = ["/bin/sh", "-c", f'ulimit -n 700; exec {paths.keeper()} "$@"', "sh"]
    keeper = start_keeper(program=limited)
    with keeper.client() as client:
        fds = [memfd(b"") for _ in range(100)]
        for _ in range(4):
            client.append("many", fds)
        with pytest.raises(errors.NoSpaceError) as caught:
            client.append("many", fds)
        assert caught.value.details["errno"] == errno.EMFILE
        assert client.list() == [KeeperRecord("many", 400)]
        for fd in fds:
            os.close(fd)
    with keeper.client() as client:
        assert client.ping() == 1


def test_the_number_of_records_is_bounded(keeper: Keeper) -> None:
    fd = memfd(b"")
    with keeper.client() as client:
        for i in range(keeper_client.MAX_RECORDS):
            client.append(f"key:{i}", [fd])
        with pytest.raises(errors.NoSpaceError):
            client.append("one:too:many", [fd])
        assert client.append("key:0", [fd]) == 2
        assert client.ping() == keeper_client.MAX_RECORDS
    os.close(fd)
