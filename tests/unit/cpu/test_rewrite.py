"""Changes to CRIU's list of open files: only what is named changes, and what cannot be is refused."""

from __future__ import annotations

import os
import socket as socket_module
import sys
from pathlib import Path
from socket import AF_INET, AF_INET6

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "support"))

from criu_files import FILES, blob, image, number, regular, write

from woodfrog.cpu import images, pid_namespace
from woodfrog.cpu.rewrite import Changes, rewritten
from woodfrog.errors import RefusedError

TCP, UDP, LISTENING, ESTABLISHED = 6, 17, 10, 1


def socket(file_id: int, port: int, state: int = LISTENING, protocol: int = TCP, more: bytes = b"") -> bytes:
    """A record of files.img with an inet_sk_entry."""
    body = number(1, file_id) + number(3, 2) + number(5, protocol) + number(6, state) + number(7, port) + more
    return number(1, 4) + number(2, file_id) + blob(4, body)


def ports_of(folder: Path) -> set[int]:
    return {one.port for one in images.listening(folder)}


def test_a_port_changes_where_it_is_listened_on_and_nowhere_else(tmp_path: Path) -> None:
    records = [
        socket(1, 8000),
        socket(2, 8000, state=ESTABLISHED),
        socket(3, 8000, protocol=UDP),
        socket(4, 9000, more=number(77, 5)),
    ]
    original = image(FILES, *records)
    write(tmp_path, "files.img", original)
    assert ports_of(tmp_path) == {8000, 9000}
    changed = rewritten(original, Changes(ports={8000: 8001, 9000: 40000}), {})
    write(tmp_path, "files.img", changed)
    assert ports_of(tmp_path) == {8001, 40000}
    assert changed.count(number(7, 8000)) == 2  # the connection's and the UDP socket's
    assert number(77, 5) in changed
    assert rewritten(changed, Changes(ports={8001: 8000, 40000: 9000}), {}).count(number(7, 8000)) == 3


def test_a_path_changes_for_every_file_that_has_it(tmp_path: Path) -> None:
    records = [
        regular(1, b"/data/log", os.O_WRONLY | os.O_APPEND, None),
        regular(2, b"/data/log", os.O_WRONLY | os.O_APPEND, None),
        regular(3, b"/data/logs", os.O_RDWR, 7),
    ]
    original = image(FILES, *records)
    write(tmp_path, "files.img", rewritten(original, Changes(paths={"/data/log": "/run/a-longer/path.log"}), {}))
    assert [file.path for file in images.open_files(tmp_path)] == ["/run/a-longer/path.log"] * 2 + ["/data/logs"]
    assert rewritten(original, Changes(paths={"/data": "/x"}, ports={1: 2}), {}) == original


def test_ports_that_are_not_there_or_would_be_one_are_refused(tmp_path: Path) -> None:
    write(tmp_path, "files.img", image(FILES, socket(1, 8000), socket(2, 9000)))
    Changes(ports={8000: 9000, 9000: 8000}).require_ports(tmp_path)
    with pytest.raises(RefusedError, match="port 80; it listens on: 8000, 9000"):
        Changes(ports={80: 81}).require_ports(tmp_path)
    with pytest.raises(RefusedError, match="become one"):
        Changes(ports={8000: 9000}).require_ports(tmp_path)


def test_a_port_that_somebody_has_is_refused_where_the_addresses_meet(tmp_path: Path) -> None:
    for family, host, other in ((AF_INET, "127.0.0.1", "127.0.0.2"), (AF_INET6, "::1", "::2")):
        with socket_module.socket(family) as listener:
            listener.bind((host, 0))
            listener.listen()
            port = listener.getsockname()[1]
            for address, met in ((host, True), (other, False), (None, True)):
                packed = socket_module.inet_pton(family, address or ("::" if family == AF_INET6 else "0.0.0.0"))
                words = b"".join(
                    number(11, int.from_bytes(packed[at : at + 4], "little")) for at in range(0, len(packed), 4)
                )
                write(tmp_path, "files.img", image(FILES, socket(1, 8000, more=words)))
                if met:
                    with pytest.raises(RefusedError, match=f"TCP port {port}.*in use"):
                        Changes(ports={8000: port}).require_ports(tmp_path)
                else:
                    Changes(ports={8000: port}).require_ports(tmp_path)


def test_criu_gets_numbers_that_the_tree_does_not_have() -> None:
    for taken in (set[int](), {1, 2, 3}, {301, 302, 900}, set(range(300, 5000, 100)), {5000}):
        last = pid_namespace.last_number(taken)
        assert last >= 300
        assert not taken & set(range(last + 1, last + 300))
    with pytest.raises(RefusedError, match="no numbers free"):
        pid_namespace.last_number(set(range(300, int(Path("/proc/sys/kernel/pid_max").read_text()), 400)))
