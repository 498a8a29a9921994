"""Who is at the other end of a unix socket, and listening for the owner only."""

from __future__ import annotations

import os
import socket
import struct
from pathlib import Path
from typing import NamedTuple

_UCRED = struct.Struct("iII")  # struct ucred, unix(7)


class Peer(NamedTuple):
    pid: int
    uid: int
    gid: int


def credentials(connection: socket.socket) -> Peer:
    """The peer's process and user as the kernel recorded them when it connected."""
    return Peer(*_UCRED.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)))


def is_admitted(peer: Peer) -> bool:
    """Only the daemon's own user, and root."""
    return peer.uid in (os.geteuid(), 0)


def listen(path: Path, kind: socket.SocketKind, backlog: int) -> socket.socket:
    """A listening unix socket of mode 0600. The caller holds the directory's lock, so a socket found there is stale."""
    listener = socket.socket(socket.AF_UNIX, kind)
    try:
        path.unlink(missing_ok=True)
        listener.bind(str(path))
        path.chmod(0o600)  # before listen: until then nobody can connect
        listener.listen(backlog)
    except BaseException:
        listener.close()
        raise
    return listener
