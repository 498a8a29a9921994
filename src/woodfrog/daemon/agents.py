"""agent.sock: the connections to the agent threads inside targets, by process.

An agent connects by itself when it starts, and again whenever it is woken. While it sleeps it holds no descriptor of
ours. One thread accepts and one watches for ends; commands are sent by whoever runs an operation on that target.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

from woodfrog.daemon import peer, runtime_dir
from woodfrog.errors import RefusedError, TargetLostError, TargetState, TimeoutExceededError, WoodfrogError
from woodfrog.target import discovery
from woodfrog.target.link import AgentLink

log = logging.getLogger(__name__)

BACKLOG = 512
HELLO_TIMEOUT_S = 10.0  # the hello is sent right after connecting


class Agents:
    """All connections. Thread-safe. `on_change` is called (on any thread) when an agent comes or goes."""

    def __init__(self, path: Path, on_change: Callable[[], None] | None = None) -> None:
        self._listener = peer.listen(path, socket.SOCK_SEQPACKET, BACKLOG)
        self._runtime_directory = path.parent
        self._links: dict[int, AgentLink] = {}
        self._changed = threading.Condition()
        self._on_change = on_change or (lambda: None)
        self._ends = select.epoll()
        self._stopping = False

    def start(self) -> None:
        """Accept connections, and wake the agents that sleep because nobody was here."""
        threading.Thread(target=self._accept, name="agents-accept", daemon=True).start()
        threading.Thread(target=self._watch, name="agents-watch", daemon=True).start()
        self.wake_sleeping()

    def stop(self) -> None:
        """Accept no more. Connections end with the process: agents of running targets go on by themselves."""
        self._stopping = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def links(self) -> dict[int, AgentLink]:
        with self._changed:
            return dict(self._links)

    def link(self, pid: int) -> AgentLink | None:
        """The connection of this process; None when it has none, or one that broke."""
        with self._changed:
            link = self._links.get(pid)
        if link is not None and link.closed:  # after an answer that did not come: epoll tells nothing of it
            self._forget(pid, link)
            return None
        return link

    def ensure(self, pid: int, timeout_s: float) -> AgentLink:
        """The connection of `pid`; its agent is woken when it sleeps. TimeoutExceededError, TargetLostError."""
        if (link := self.link(pid)) is not None:
            return link
        agent = discovery.agent_of(pid)
        if agent is None:
            if not Path(f"/proc/{pid}").exists():
                raise TargetLostError(f"process {pid} is gone", pid=pid, target_state=TargetState.GONE)
            # It is connecting just now, or it died: the wait tells.
            log.info("no sleeping agent in process %d; waiting for its connection", pid)
        elif not self.is_ours(pid):
            raise RefusedError(
                f"process {pid} belongs to the daemon of another runtime directory ({_runtime_directory_of(pid)})",
                advice=f"set {runtime_dir.ENVIRONMENT} to that directory",
                pid=pid,
            )
        else:
            discovery.wake(agent)
        return self.wait_for(pid, timeout_s)

    def wait_for(self, pid: int, timeout_s: float) -> AgentLink:
        """Wait until the agent of `pid` has connected and said hello."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while pid not in self._links:
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    raise TimeoutExceededError(
                        f"the agent of process {pid} did not answer within {timeout_s:g} s",
                        advice="is the process stopped, or the machine overloaded? try again",
                        pid=pid,
                    )
                self._changed.wait(left_s)
            return self._links[pid]

    def detach(self, pid: int) -> None:
        """The agent closes its connection and sleeps."""
        link = self.link(pid)
        if link is None:
            return
        self._forget(pid, link)
        link.detach()

    def wake_sleeping(self) -> None:
        """Wake every sleeping agent whose runtime directory is ours."""
        for agent in discovery.managed_targets():
            if agent.pid not in self._links and self.is_ours(agent.pid):
                with contextlib.suppress(WoodfrogError):  # it ended just now
                    discovery.wake(agent)

    def is_ours(self, pid: int) -> bool:
        """Whether the agent of `pid` connects here and not to another daemon of this user."""
        return _runtime_directory_of(pid) == self._runtime_directory

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return  # closed by stop
            if not peer.is_admitted(peer.credentials(connection)):
                log.warning("refused an agent of user %d", peer.credentials(connection).uid)
                connection.close()
                continue
            # A peer that says nothing must not keep the others waiting.
            threading.Thread(target=self._greet, args=(connection,), name="agent-hello", daemon=True).start()

    def _greet(self, connection: socket.socket) -> None:
        try:
            link = AgentLink(connection, hello_timeout_s=HELLO_TIMEOUT_S)
        except (WoodfrogError, OSError) as failure:
            log.warning("an agent's hello was refused: %s", failure)
            return
        with self._changed:
            self._links[link.pid] = link
            self._ends.register(link.fileno(), select.EPOLLRDHUP | select.EPOLLHUP)
            self._changed.notify_all()
        log.info("agent of process %d (%s) is here, %s", link.pid, link.hello.name, link.state)
        self._on_change()

    def _watch(self) -> None:
        while not self._stopping:
            for fd, _ in self._ends.poll():
                with self._changed:
                    gone = [link for link in self._links.values() if link.fileno() == fd]
                for link in gone:
                    log.info("agent of process %d is gone", link.pid)
                    self._forget(link.pid, link)
                    # An operation may be using this link in another thread: the ping takes its turn after it, finds the
                    # end of the stream, and marks the link closed before the descriptor's number can be given away.
                    with contextlib.suppress(WoodfrogError):
                        link.ping()
                    link.close()
                if gone:
                    self._on_change()

    def _forget(self, pid: int, link: AgentLink) -> None:
        with self._changed:
            if self._links.get(pid) is link:
                del self._links[pid]
            with contextlib.suppress(OSError, ValueError):  # closed already
                self._ends.unregister(link.fileno())
            self._changed.notify_all()


def _runtime_directory_of(pid: int) -> Path | None:
    """Where the agent of `pid` would connect; None when it cannot be read."""
    try:
        entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return None
    environment = dict(entry.split(b"=", 1) for entry in entries if b"=" in entry)
    if chosen := environment.get(runtime_dir.ENVIRONMENT.encode()):
        return Path(os.fsdecode(chosen))
    if session := environment.get(b"XDG_RUNTIME_DIR"):
        return Path(os.fsdecode(session)) / "woodfrog"
    return runtime_dir.path() if os.environ.get(runtime_dir.ENVIRONMENT) is None else None
