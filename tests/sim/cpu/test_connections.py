"""TCP connections between the processes of a target live through dump and restore; others come back closed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from woodfrog.cpu import images, time_wait
from woodfrog.cpu.criu import Criu, Restored
from woodfrog.target import connections
from woodfrog.target.process import ProcessTree
from woodfrog.target.reaper import Reaper

from .programs import Start, assert_gapless, end, wait_until

# The child checks every number that comes over the connection; both ends are the program's.
COUNTING = """
import os, socket, time
family, address = socket.{family}, "{address}"
listener = socket.socket(family)
listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
# Below those that the kernel gives to others, who might have it at the restore; and not one of a run just before.
port = 10000 + time.time_ns() // 1000000 % 20000
listener.bind((address, port))
# As NCCL's: what it accepts keeps the port for a minute once it is closed.
listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
listener.listen()
with socket.create_connection((address, port)) as other:
    listener.accept()[0].close()
    other.recv(1)
if os.fork() == 0:
    with socket.create_connection((address, port)) as connection, connection.makefile("rb") as lines:
        for n, line in enumerate(lines, 1):
            assert int(line) == n, (line, n)
            print(n, flush=True)
    print("the connection is closed", flush=True)
    os._exit(1)
connection, _ = listener.accept()
n = 0
while True:
    n += 1
    connection.sendall(b"%d\\n" % n)
    time.sleep(0.002)
"""


def _pids(pid: int) -> list[int]:
    with ProcessTree(pid) as tree:
        return [process.pid for process in tree.processes]


@pytest.mark.parametrize(("family", "address"), [("AF_INET", "127.0.0.1"), ("AF_INET6", "::1")])
def test_ranks_that_talk_over_tcp_go_on_in_the_original_and_in_the_restored_tree(
    criu: Criu, start: Start, reaper: Reaper, tmp_path: Path, family: str, address: str
) -> None:
    program = start(COUNTING.replace("{family}", family).replace("{address}", address))
    program.wait_for_more(20)
    found = connections.of_tree(_pids(program.pid))
    assert found == connections.Connections(inside=2, outside=0)
    criu.dump(program.pid, tmp_path / "running", leave_running=True, connections=True)
    program.wait_for_more(program.numbers()[-1] + 20)
    dumped = criu.dump(program.pid, tmp_path / "stopped", leave_running=False, connections=True)
    assert dumped.connections
    (listening,) = images.listening(dumped.directory)
    assert list(time_wait.closed({listening.port}))
    at_dump = program.numbers()[-1]
    program.kill_all()
    restored = criu.restore(dumped.directory, connections=True, log_directory=tmp_path / "logs")
    reaper.adopt([task.pid for task in restored.tasks])
    try:
        program.wait_for_more(at_dump + 50)
        assert_gapless(program)
    finally:
        end(restored)


def test_a_connection_to_a_process_outside_is_no_circle(start: Start) -> None:
    program = start(COUNTING.replace("{family}", "AF_INET").replace("{address}", "127.0.0.1"))
    parent, child = _pids(program.pid)
    for alone in (parent, child):
        found = connections.of_tree([alone])
        assert found == connections.Connections(inside=0, outside=1)
        assert not found.closed_circle
    assert not connections.of_tree([]).closed_circle


def test_the_restored_tree_sees_a_closed_connection_when_they_were_not_saved(
    criu: Criu, start: Start, restore: Callable[[Path], Restored], tmp_path: Path
) -> None:
    program = start(COUNTING.replace("{family}", "AF_INET").replace("{address}", "127.0.0.1"))
    program.wait_for_more(20)
    dumped = criu.dump(program.pid, tmp_path / "image", leave_running=False)
    assert not dumped.connections
    program.kill_all()
    restore(dumped.directory)
    wait_until(lambda: "the connection is closed" in program.log.read_text(), "the end of the connection")
