"""A connection to the interposer's agent in a target: its hello, and one command at a time with its answer.

An `AgentChannel` owns its socket, and the descriptors that arrive belong to whoever collects them, or are closed.
Calls block, are bounded by a time-out, and one at a time. After an answer that did not come or could not be understood
the connection is unusable and is closed: by wire.h the target then goes on by itself, unless its memory is already
released. What is said is link.py's.
"""

from __future__ import annotations

import array
import os
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from woodfrog.errors import (
    NoSpaceError,
    RefusedError,
    TargetLostError,
    TargetState,
    TimeoutExceededError,
    WoodfrogError,
)
from woodfrog.target import wire
from woodfrog.target.descriptors import SCM_MAX_FD, Descriptors
from woodfrog.target.identity import Identity, ProcessHandle

Collector = Callable[[wire.Message], None]
Channel = TypeVar("Channel", bound="AgentChannel")

HELLO_TIMEOUT_S = 5.0
# The kernel closes the sockets of a process that is being killed before it has ended.
ENDING_S = 2.0
CUDA_ERROR_DEINITIALIZED = 4  # cuda.h

_STATE_OF_TARGET = {
    "running": TargetState.RUNNING,
    "held": TargetState.RUNNING,
    "quiesced": TargetState.RUNNING,  # it goes on by itself when the link is closed
    "exported": TargetState.RUNNING,
    "released": TargetState.FROZEN,
    "returned": TargetState.RUNNING,
}


@dataclass(frozen=True)
class Hello:
    """What an agent says first. `pid` is of its own PID namespace; the link's `identity` is of ours."""

    pid: int
    agent_tid: int
    start_ticks: int
    operation: int
    state: str
    owned_bytes: int
    owned_count: int
    device_count: int
    name: str
    build: str


class AgentChannel:
    """A connection that has said hello."""

    def __init__(self, connection: socket.socket, *, hello_timeout_s: float = HELLO_TIMEOUT_S) -> None:
        """Takes the socket over (also when it raises). The peer must be this user's, and still there."""
        self._socket = connection
        self._lock = threading.Lock()
        self._sequence = 0
        self._handle: ProcessHandle | None = None
        self.state = "running"
        try:
            pid, uid = _peer(connection)
            if uid != os.geteuid():
                raise RefusedError(f"A process of user {uid} tried to connect as an agent.", pid=pid)
            self._handle = ProcessHandle(pid)
            self.hello = self._read_hello(hello_timeout_s)
            self.state = self.hello.state
        except TimeoutError:
            raise self._timed_out("hello", hello_timeout_s) from None
        except wire.WireError as error:
            raise self._broken(error) from None
        except ConnectionError:
            raise self._lost("hello", "it closed the connection") from None
        except BaseException:
            self.close()
            raise

    @property
    def identity(self) -> Identity:
        """The target's process, from the kernel (not from what it says)."""
        return self._process().identity

    @property
    def pid(self) -> int:
        return self.identity.pid

    @property
    def closed(self) -> bool:
        return self._socket.fileno() < 0

    def fileno(self) -> int:
        """For select: readable when the agent has closed (it never speaks first after hello)."""
        return self._socket.fileno()

    def close(self) -> None:
        """Without `detach`: a target that still owns its memory runs on."""
        self._socket.close()
        if self._handle is not None:
            self._handle.close()

    def __enter__(self: Channel) -> Channel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _command(
        self,
        name: str,
        body: wire.Values | None = None,
        *,
        timeout_s: float,
        collect: Collector | None = None,
    ) -> wire.Message:
        return self._exchange(name, [wire.Message(name, 0, body=body or {})], timeout_s=timeout_s, collect=collect)

    def _exchange(
        self,
        name: str,
        messages: list[wire.Message],
        *,
        timeout_s: float,
        collect: Collector | None = None,
    ) -> wire.Message:
        """Send a command and read until its reply; `collect` takes over the batches in between, with descriptors."""
        with self._lock:
            if self.closed:
                raise self._lost(name, "the connection is closed")
            self._sequence += 1
            deadline = time.monotonic() + timeout_s
            try:
                for message in messages:
                    message.sequence = self._sequence
                    self._send(message, deadline)
                reply = self._read_reply(deadline, name, collect)
            except TimeoutError:
                raise self._timed_out(name, timeout_s) from None
            except wire.WireError as error:
                raise self._broken(error) from None
            except (ConnectionError, BrokenPipeError) as error:
                why = os.strerror(error.errno) if error.errno else "it closed the connection"
                raise self._lost(name, why, ENDING_S) from None
        if reply.status != 0:
            raise self._refusal(name, reply)
        return reply

    def _process(self) -> ProcessHandle:
        assert self._handle is not None  # set before the constructor returned
        return self._handle

    def _read_hello(self, timeout_s: float) -> Hello:
        message = self._receive(time.monotonic() + timeout_s, "hello")
        try:
            if message.type != "hello":
                raise wire.WireError(f"the first packet is a {message.type}, not a hello")
            if message.fds:
                raise wire.WireError("the hello came with descriptors")
            body = message.body
            return Hello(
                pid=body["pid"],
                agent_tid=body["agent_tid"],
                start_ticks=body["start_ticks"],
                operation=body["operation"],
                state=_state_name(body["state"]),
                owned_bytes=body["owned_bytes"],
                owned_count=body["owned_count"],
                device_count=body["device_count"],
                name=wire.text(body["name"]),
                build=wire.text(body["build"]),
            )
        finally:
            Descriptors(message.fds).close()

    def _read_reply(self, deadline: float, command: str, collect: Collector | None) -> wire.Message:
        while True:
            message = self._receive(deadline, command)
            owned = Descriptors(message.fds)
            try:
                if message.sequence != self._sequence:
                    raise wire.WireError(f"a {message.type} answers {message.sequence} instead of {self._sequence}")
                if message.type == "reply":
                    if message.fds:
                        raise wire.WireError("a reply came with descriptors")
                    self.state = _state_name(message.body["state"])
                    return message
                if collect is None:
                    raise wire.WireError(f"a {message.type} came in answer to {command}")
                collect(message)
                owned.take()  # the collector has them now
            finally:
                owned.close()

    def _send(self, message: wire.Message, deadline: float) -> None:
        self._socket.settimeout(max(0.001, deadline - time.monotonic()))
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", message.fds))] if message.fds else []
        self._socket.sendmsg([wire.pack(message)], rights)

    def _receive(self, deadline: float, command: str) -> wire.Message:
        self._socket.settimeout(max(0.001, deadline - time.monotonic()))
        limit = wire.tables().max_message
        data, ancillary, flags, _ = self._socket.recvmsg(
            limit, socket.CMSG_SPACE(SCM_MAX_FD * array.array("i").itemsize), socket.MSG_CMSG_CLOEXEC
        )
        fds = Descriptors(_passed(ancillary))
        try:
            if not data:
                raise ConnectionResetError
            if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
                raise wire.WireError(
                    f"a packet in answer to {command} was cut: it is larger than {limit} bytes, or its descriptors did "
                    "not fit into this process's limit of open files"
                )
            message = wire.unpack(data, list(fds), "agent")
            fds.take()  # the message has them now
            return message
        finally:
            fds.close()

    def _refusal(self, command: str, reply: wire.Message) -> WoodfrogError:
        status = wire.tables().statuses.get(reply.status, f"status {reply.status}")
        said = wire.text(reply.body["message"])
        result = reply.body["driver_result"]
        common: dict[str, Any] = {
            "pid": self.pid,
            "target_state": _STATE_OF_TARGET[self.state],
            "details": {"command": command, "status": status, "driver_result": result, "state": self.state},
        }
        if status == "timeout":
            return TimeoutExceededError(
                f"The target's GPU work did not finish in time{_because(said)}.",
                advice="It runs on. Try again with a larger --timeout, or when it is less busy.",
                **common,
            )
        if status == "no_memory":
            return NoSpaceError(f"The target ran out of memory in {command}{_because(said)}.", **common)
        if result == CUDA_ERROR_DEINITIALIZED:
            return RefusedError(
                f"The target is ending: the GPU's driver in it has been, or is being, shut down (in {command}).",
                advice="It is too late for this one; take the image before the program returns from main.",
                **common,
            )
        if status == "unsupported":
            return RefusedError(
                f"The target uses something that cannot be handed over{_because(said)}.",
                advice="docs/troubleshooting.md lists what this can be.",
                **common,
            )
        if status == "driver_error":
            return WoodfrogError(f"A driver call failed in the target during {command}: {said or result}.", **common)
        return WoodfrogError(f"The target's agent refused {command} ({status}){_because(said)}.", **common)

    def _timed_out(self, command: str, timeout_s: float) -> TimeoutExceededError:
        state = self.state
        self.close()
        return TimeoutExceededError(
            f"The target's agent did not answer {command} within {timeout_s:g} s.",
            advice="A target that still owns its memory runs on by itself. See whether its process is stopped (`ps`).",
            pid=self._known_pid(),
            target_state=_STATE_OF_TARGET[state],
            details={"command": command, "state": state},
        )

    def _broken(self, error: wire.WireError) -> WoodfrogError:
        state = self.state
        self.close()
        return wire.WireError(
            f"The target's agent cannot be understood: {error.reason}.",
            advice="The target was probably started by another version of woodfrog: start it again with this one.",
            pid=self._known_pid(),
            target_state=_STATE_OF_TARGET[state],
        )

    def _lost(self, command: str, why: str, ending_s: float = 0.0) -> WoodfrogError:
        handle = self._handle
        alive = handle is not None and handle.identity.is_alive() and not handle.ends_within(ending_s)
        state = self.state
        self.close()
        if not alive:
            return TargetLostError(
                f"The target ended during {command}.",
                advice="Its output may say why.",
                pid=self._known_pid(),
                target_state=TargetState.GONE,
            )
        return WoodfrogError(
            f"The connection to the target's agent broke during {command}: {why}.",
            advice="A target that still owns its memory runs on by itself.",
            pid=self._known_pid(),
            target_state=_STATE_OF_TARGET[state],
        )

    def _known_pid(self) -> int | None:
        return self._handle.pid if self._handle is not None else None


def listen(path: str) -> socket.socket:
    """A listening socket for agents at `path`, which only this user may connect to. The caller owns it.

    A name left by a dead daemon is replaced; the caller makes sure that no living one uses it.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    try:
        Path(path).unlink(missing_ok=True)
        mask = os.umask(0o177)
        try:
            listener.bind(path)
        finally:
            os.umask(mask)
        listener.listen(128)
    except BaseException:
        listener.close()
        raise
    return listener


def _peer(connection: socket.socket) -> tuple[int, int]:
    """(pid, uid) of the other end, from the kernel."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, uid, _ = struct.unpack("3i", raw)
    return pid, uid


def _passed(ancillary: list[tuple[int, int, bytes]]) -> list[int]:
    """The descriptors that came with a packet."""
    numbers = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            numbers.frombytes(data[: len(data) - len(data) % numbers.itemsize])
    return list(numbers)


def _state_name(number: int) -> str:
    try:
        return wire.tables().states[number]
    except KeyError:
        raise wire.WireError(f"it claims to be in state {number}, which does not exist") from None


def _because(said: str) -> str:
    return f": {said}" if said else ""
