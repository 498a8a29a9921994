"""TCP connections between the processes of a tree: torchrun's store, gloo, the sockets of a launcher and its workers.

CRIU can save an established connection, but only both of its ends together come back as one. Looks only.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from woodfrog.target import procfs

_WITHOUT_PEER = {"0A", "07"}  # LISTEN and CLOSE, include/net/tcp_states.h
_SOCKET = "socket:["


@dataclass(frozen=True)
class Connections:
    """How many ends of TCP connections the tree has whose other end is in the tree as well, and how many others."""

    inside: int = 0
    outside: int = 0

    @property
    def closed_circle(self) -> bool:
        """There are connections, and all of them are between processes of the tree."""
        return self.inside > 0 and self.outside == 0


def of_tree(pids: Iterable[int]) -> Connections:
    """The connections of these processes, which share the network of the first one. A process that has ended, or that
    this user may not look into, has none."""
    pids = list(pids)
    ours = {inode for pid in pids for inode in _sockets(pid)}
    ends: dict[tuple[str, str], bool] = {}  # (local, remote) → whether the socket is the tree's
    for name in ("net/tcp", "net/tcp6"):
        for line in (procfs.text(pids[0], name) or "").splitlines()[1:] if pids else []:
            fields = line.split()
            if fields[3] not in _WITHOUT_PEER:
                ends[_plain(fields[1]), _plain(fields[2])] = int(fields[9]) in ours
    mine = [ends.get((remote, local), False) for (local, remote), is_ours in ends.items() if is_ours]
    return Connections(inside=sum(mine), outside=len(mine) - sum(mine))


def _sockets(pid: int) -> set[int]:
    try:
        paths = procfs.descriptors(pid).values()
    except PermissionError:
        return set()
    return {int(path[len(_SOCKET) : -1]) for path in paths if path.startswith(_SOCKET)}


def _plain(endpoint: str) -> str:
    """An IPv4 address within IPv6 (::ffff:…) as the IPv4 address: the other end may call it that."""
    mapped = "0000000000000000FFFF0000"
    return endpoint[len(mapped) :] if endpoint.startswith(mapped) else endpoint
