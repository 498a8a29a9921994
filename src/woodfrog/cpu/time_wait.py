"""Ports that are free but for connections in TIME_WAIT: they are taken away before a restore listens there.

For a minute after a connection was closed the kernel keeps its addresses (RFC 9293, TIME-WAIT), so that stray segments
meet no new connection, and nobody can bind the port meanwhile unless the closed socket had SO_REUSEADDR. NCCL's and
many other listeners have not, and CRIU, which restores them, can only set that on new sockets. Where both ends of such
a connection are addresses of this machine no segment can still be on its way, and it is ended with SOCK_DESTROY
(sock_diag(7), Linux 4.5, CONFIG_INET_DIAG_DESTROY; CAP_NET_ADMIN). Others are left.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import os
import socket
import struct
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

log = logging.getLogger(__name__)

_TIME_WAIT = "06"  # include/net/tcp_states.h
_NETLINK_SOCK_DIAG, _SOCK_DESTROY = 4, 21  # include/uapi/linux/netlink.h, sock_diag.h
_NLM_F_REQUEST, _NLM_F_ACK, _NLMSG_ERROR = 1, 4, 2
_ANY_COOKIE = 0xFFFFFFFF


@dataclass(frozen=True)
class Closed:
    """A connection in TIME_WAIT, as the kernel has its addresses: packed, 4 or 16 bytes."""

    local: bytes
    local_port: int
    remote: bytes
    remote_port: int

    @property
    def request(self) -> bytes:
        """The netlink message that ends it."""
        family = socket.AF_INET if len(self.local) == 4 else socket.AF_INET6
        body = struct.pack("=BBBBI", family, socket.IPPROTO_TCP, 0, 0, 1 << int(_TIME_WAIT, 16))
        body += struct.pack(">HH", self.local_port, self.remote_port)
        body += self.local.ljust(16, b"\0") + self.remote.ljust(16, b"\0")
        body += struct.pack("=III", 0, _ANY_COOKIE, _ANY_COOKIE)
        return struct.pack("=IHHII", 16 + len(body), _SOCK_DESTROY, _NLM_F_REQUEST | _NLM_F_ACK, 1, 0) + body


def closed(ports: Collection[int]) -> Iterator[Closed]:
    """What is in TIME_WAIT on one of these ports, in this network namespace."""
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(FileNotFoundError):  # a kernel without IPv6
            for line in Path("/proc/net", name).read_text().splitlines()[1:]:
                fields = line.split()
                one = Closed(*_endpoint(fields[1]), *_endpoint(fields[2]))
                if fields[3] == _TIME_WAIT and one.local_port in ports:
                    yield one


def free(ports: Collection[int]) -> int:
    """End those whose ends are both on this machine; how many that were. What cannot be ended is left and logged."""
    # The kernel walks its whole table of connections for an answer: 0.1 s on a large machine.
    waiting = list(closed(ports)) if ports else []
    if not waiting:
        return 0
    here = _own_addresses()
    ended = 0
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _NETLINK_SOCK_DIAG) as netlink:
        for one in waiting:
            if _plain(one.remote) not in here and not _plain(one.remote).is_loopback:
                continue
            netlink.send(one.request)
            _, kind, _, _, _, error = struct.unpack_from("=IHHIIi", netlink.recv(4096))
            if kind == _NLMSG_ERROR and error == 0:
                ended += 1
            else:
                log.warning("port %d stays in TIME_WAIT: %s", one.local_port, os.strerror(-error))
    return ended


def _endpoint(text: str) -> tuple[bytes, int]:
    """`0100007F:1F90`: words of the address as this machine's processor writes numbers, then the port."""
    address, _, port = text.partition(":")
    words = [int(address[start : start + 8], 16) for start in range(0, len(address), 8)]
    return struct.pack(f"={len(words)}I", *words), int(port, 16)


def _plain(address: bytes) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    plain = ipaddress.ip_address(address)
    return (plain.ipv4_mapped or plain) if isinstance(plain, ipaddress.IPv6Address) else plain


def _own_addresses() -> set[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    return {
        ipaddress.ip_address(address.address.partition("%")[0])
        for addresses in psutil.net_if_addrs().values()
        for address in addresses
        if address.family in (socket.AF_INET, socket.AF_INET6)
    }
