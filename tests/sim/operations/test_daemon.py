"""Promises of the daemon itself: starting, admitting, surviving, stopping."""

from __future__ import annotations

import os
import select
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from product import Product

from woodfrog.daemon.client import Client
from woodfrog.errors import NoDaemonError, NotFoundError, RefusedError, UsageError


def test_many_clients_that_start_at_once_get_the_same_daemon(product: Product) -> None:
    with ThreadPoolExecutor(8) as pool:
        pids = set(pool.map(lambda _: product.call("ping")["pid"], range(8)))
    assert len(pids) == 1


def test_a_killed_daemon_is_started_again_by_the_keeper(product: Product) -> None:
    before = product.daemon_pid()
    product.kill_daemon()
    assert product.daemon_pid() != before


def test_a_client_that_comes_right_after_the_daemons_death_is_served(product: Product) -> None:
    before = product.daemon_pid()
    daemon_fd = os.pidfd_open(before)
    os.kill(before, signal.SIGKILL)
    assert select.select([daemon_fd], [], [], 30)[0]
    os.close(daemon_fd)
    assert product.call("ping")["pid"] != before


def test_what_is_held_when_the_service_is_stopped_is_found_by_the_next_daemon(product: Product) -> None:
    target = product.run("--idle-kib", "2048", name="sleeper")
    product.call("suspend", target="sleeper")
    before = product.daemon_pid()
    keeper = int(subprocess.run(["ps", "-o", "ppid=", str(before)], capture_output=True, check=True).stdout)
    daemon_fd = os.pidfd_open(before)
    os.kill(keeper, signal.SIGTERM)
    poll = select.poll()
    poll.register(daemon_fd, select.POLLIN)
    assert poll.poll(30_000)
    os.close(daemon_fd)
    product.call("resume", target="sleeper")
    assert product.daemon_pid() != before
    target.check_runs_right()


def test_stop_ends_daemon_and_keeper(product: Product) -> None:
    product.call("ps")
    keeper = int(
        subprocess.run(["ps", "-o", "ppid=", str(product.daemon_pid())], capture_output=True, check=True).stdout
    )
    keeper_fd = os.pidfd_open(keeper)
    try:
        product.call("stop")
        poll = select.poll()
        poll.register(keeper_fd, select.POLLIN)
        assert poll.poll(30_000)
    finally:
        os.close(keeper_fd)
    with pytest.raises(NoDaemonError):
        Client.connect(product.runtime)


def test_the_socket_is_for_its_owner_only(product: Product) -> None:
    if os.geteuid() != 0:
        pytest.fail("needs root to become another user")
    product.call("ping")
    product.runtime.chmod(0o755)
    product.root.chmod(0o755)
    (product.runtime / "daemon.sock").chmod(0o666)
    script = (
        "import os, socket, sys; os.setuid(65534); s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1]);"
        "s.sendall(b'\\x01\\0\\0\\0\\x80'); sys.exit(0 if s.recv(1) == b'' else 1)"
    )
    path = str(product.runtime / "daemon.sock")
    finished = subprocess.run([sys.executable, "-c", script, path], timeout=30, check=False, capture_output=True)
    product.runtime.chmod(0o700)
    assert finished.returncode == 0 or b"ConnectionReset" in finished.stderr or b"BrokenPipe" in finished.stderr


@pytest.mark.parametrize(
    "packet",
    [
        struct.pack("<I", 1 << 31),
        struct.pack("<I", 5) + b"\xc1" * 5,
        struct.pack("<I", 3) + b"\x81\xa1x",
        struct.pack("<I", 100) + b"short",
        struct.pack("<I", 1 << 20) + b"\x91" * (1 << 20),
    ],
    ids=["too long", "not msgpack", "cut", "ends early", "nested deep"],
)
def test_hostile_bytes_do_not_disturb_the_daemon(product: Product, packet: bytes) -> None:
    before = product.daemon_pid()
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(product.runtime / "daemon.sock"))
        connection.sendall(packet)
        connection.shutdown(socket.SHUT_WR)
        while connection.recv(65536):
            pass
    assert product.daemon_pid() == before


@pytest.mark.parametrize(
    ("verb", "params", "error"),
    [
        ("nonsense", {}, UsageError),
        ("checkpoint", {}, UsageError),
        ("checkpoint", {"target": "nobody"}, NotFoundError),
        ("checkpoint", {"target": -3}, UsageError),
        ("checkpoint", {"target": 1 << 22}, NotFoundError),
        ("suspend", {"target": os.getpid()}, RefusedError),
        ("suspend", {"target": 1, "timeout_s": -1.0}, UsageError),
        ("suspend", {"target": os.getpid(), "levle": "cold"}, RefusedError),
        ("resume", {"target": os.getpid()}, RefusedError),
        ("restore", {"image": "nobody@1"}, NotFoundError),
        ("restore", {"image": "../../etc/passwd@1"}, (UsageError, NotFoundError)),
    ],
)
def test_a_request_that_cannot_be_met_is_refused_with_a_sentence(
    product: Product, verb: str, params: dict[str, object], error: type[Exception]
) -> None:
    with pytest.raises(error) as raised:
        product.call(verb, **params)
    assert raised.value.reason  # type: ignore[attr-defined]


def test_a_second_daemon_for_the_same_directory_is_refused(make_product: Callable[..., Product]) -> None:
    product = make_product()
    product.call("ping")
    finished = subprocess.run(
        [sys.executable, "-m", "woodfrog.daemon"],
        env={**os.environ, **product.environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert finished.returncode != 0
    assert "another daemon serves" in finished.stderr


def test_operations_leave_no_descriptor_thread_or_gpu_memory_behind(product: Product) -> None:
    target = product.run("--idle-kib", "4096")
    daemon = Path(f"/proc/{product.daemon_pid()}")

    def cycle() -> tuple[int, int]:
        image = product.checkpoint(target)["image"]
        product.call("suspend", target=target.pid)
        product.call("resume", target=target.pid)
        with pytest.raises(RefusedError):  # the target is alive
            product.call("restore", image=image, store=str(product.store_path))
        return len(list((daemon / "fd").iterdir())), len(list((daemon / "task").iterdir()))

    cycle()  # what is opened once and kept
    free_bytes = product.gpu_free_bytes()
    before = cycle()
    for _ in range(3):
        after = cycle()
    # Connections that were closed just now may still be ending; what each cycle leaves is three by now.
    assert after[0] < before[0] + 3
    assert after[1] < before[1] + 4
    assert product.gpu_free_bytes() == free_bytes
    assert product.call("arena")["free_bytes"] == product.call("arena")["size_bytes"]
    target.check_runs_right()
