"""The daemon's end of the connection to the interposer's agent in a target: one method for each command of wire.h.

An `AgentLink` owns its socket, and the descriptors that arrive belong to the result that is returned, or are closed
when it is not. Calls block, are bounded by a time-out, and one at a time. After an answer that did not come or could
not be understood the connection is unusable and is closed: by wire.h the target then goes on by itself, unless its
memory is already released. Must never touch GPU memory: it only passes descriptors on.
"""

from __future__ import annotations

import array
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
from woodfrog.target.hosted import Hosted, Named
from woodfrog.target.identity import Identity, ProcessHandle
from woodfrog.target.memory import Exported, Handle, Survey, handle_batches, survey_of
from woodfrog.target.tracking import KernelUse, Tracked

Collector = Callable[[wire.Message], None]

# Beyond the time that the agent itself was given for a command: scheduling on a loaded machine, and the packet's way.
_ANSWER_GRACE_S = 10.0
_DEFAULT_TIMEOUT_S = 60.0
_HELLO_TIMEOUT_S = 5.0

CUDA_ERROR_DEINITIALIZED = 4  # cuda.h
# native/wire/wire.h WF_HELD_…
_HELD_IDLE, _HELD_CAPTURING, _HELD_SUBMITTED_SHIFT, _HELD_WAITING_SHIFT = 1, 2, 8, 32

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


@dataclass(frozen=True)
class Guarded:
    """A handle (as its agent numbers it) and its units in the page of a snapshot by copy-on-write."""

    handle: int
    first: int
    count: int


@dataclass(frozen=True)
class Held:
    """What a process is like whose gate was closed: `idle` (no thread in the driver, no work on a GPU), `capturing`
    (its gate is still open), `waiting` threads at the gate, and how many that were let on gave the GPU work."""

    idle: bool
    capturing: bool
    waiting: int
    submitted: int


class AgentLink:
    """A connection that has said hello."""

    def __init__(self, connection: socket.socket, *, hello_timeout_s: float = _HELLO_TIMEOUT_S) -> None:
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

    def survey(self, timeout_s: float = _DEFAULT_TIMEOUT_S) -> Survey:
        """Counts without stopping anything."""
        found: list[wire.Message] = []

        def collect(message: wire.Message) -> None:
            if message.type != "survey_result" or found:
                raise wire.WireError(f"a {message.type} came in answer to survey")
            found.append(message)

        self._command("survey", timeout_s=timeout_s, collect=collect)
        if not found:
            raise self._broken(wire.WireError("the reply to survey came without a result"))
        return survey_of(found[0])

    def quiesce(self, operation: int, timeout_s: float) -> float:
        """Close the gate and wait for the work in flight; seconds that it took.

        TimeoutExceededError: the work did not finish, the gate is open again and the target runs on.
        """
        body = {"operation": operation, "timeout_ms": max(1, min(int(timeout_s * 1000), 0xFFFFFFFF))}
        reply = self._command("quiesce", body, timeout_s=timeout_s + _ANSWER_GRACE_S)
        return float(reply.body["elapsed_us"]) / 1e6

    def hold(self, operation: int, look_s: float, *, admit: int = 0) -> Held:
        """Close the gate, without waiting for the work in flight longer than `look_s`; again and again, as long as the
        agent is held. `admit`: so many pieces of work threads that wait at the gate give the GPU before, a few at a
        time, as long as these are done within `look_s` each time."""
        body = {"operation": operation, "timeout_ms": round(look_s * 1000), "admit": admit}
        value = int(self._command("hold", body, timeout_s=look_s + _DEFAULT_TIMEOUT_S).body["value"])
        return Held(
            idle=bool(value & _HELD_IDLE),
            capturing=bool(value & _HELD_CAPTURING),
            waiting=value >> _HELD_WAITING_SHIFT,
            submitted=value >> _HELD_SUBMITTED_SHIFT & 0xFFFFFF,
        )

    def export_ahead(self, timeout_s: float = _DEFAULT_TIMEOUT_S) -> int:
        """While the target runs, it makes descriptors of its handles ready, so that it need not while it waits; how
        many it made. None by an interposer that is older than this message."""
        try:
            return int(self._command("export_ahead", timeout_s=timeout_s).body["value"])
        except WoodfrogError as failure:
            if failure.details.get("status") != "bad_message" or self.closed:
                raise
            return 0

    def export_memory(self, timeout_s: float = _DEFAULT_TIMEOUT_S) -> Exported:
        """A descriptor for each handle that the interposer owns. The target still owns its memory afterwards."""
        exported = Exported()
        try:
            self._command("export_memory", timeout_s=timeout_s, collect=exported.add)
            exported.check()
        except wire.WireError as error:
            exported.close()
            raise self._broken(error) from None
        except BaseException:
            exported.close()
            raise
        return exported

    def dirty(self, operation: int, timeout_s: float = _DEFAULT_TIMEOUT_S) -> Tracked:
        """What may have been written since the last committed image, told for the image of `operation`. Not `told` by a
        target that does not follow its launches, or whose interposer is older than this message."""
        tracked = Tracked()
        try:
            self._command("dirty", {"operation": operation}, timeout_s=timeout_s, collect=tracked.add)
        except WoodfrogError as failure:
            if failure.details.get("status") != "bad_message" or self.closed:
                raise
            return Tracked()
        return tracked

    def committed(self, operation: int, timeout_s: float = _DEFAULT_TIMEOUT_S) -> None:
        """That image is committed: what was told for it need not be told again."""
        self._command("committed", {"operation": operation}, timeout_s=timeout_s)

    def release_memory(self, timeout_s: float = _DEFAULT_TIMEOUT_S) -> None:
        """The target gives its memory up; from here only `return_memory` leads on. Its addresses stay reserved."""
        self._command("release_memory", timeout_s=timeout_s)

    def detach(self, timeout_s: float = _DEFAULT_TIMEOUT_S) -> None:
        """The agent closes its end and sleeps with its state until it is woken. The link is closed afterwards."""
        self._command("detach", timeout_s=timeout_s)
        deadline = time.monotonic() + timeout_s
        try:
            # The agent's end must really be closed before CRIU looks at the target's descriptors.
            while True:
                self._socket.settimeout(max(0.001, deadline - time.monotonic()))
                if not self._socket.recv(1):
                    break
        except ConnectionResetError:
            pass  # closed with something unread: closed all the same
        except TimeoutError:
            raise self._timed_out("detach", timeout_s) from None
        finally:
            self.close()

    def return_memory(
        self,
        handles: Sequence[Handle],
        fds: Sequence[int],
        timeout_s: float = _DEFAULT_TIMEOUT_S,
        *,
        same: bool = False,
    ) -> None:
        """Give the memory back: the agent maps each handle where it was. The descriptors stay the caller's.

        Allowed only while the driver has the target unlocked. `fds[k]` is the memory of `handles[k]`; `same`: the very
        memory that it released, so the agent need not ask the driver where it lies.
        """
        self.return_packed(self.packed_return(handles, fds, same=same), timeout_s)

    @staticmethod
    def packed_return(handles: Sequence[Handle], fds: Sequence[int], *, same: bool = False) -> list[wire.Message]:
        """What `return_memory` sends, to be made before the target waits for it."""
        batches = handle_batches("return_batch", handles, fds)
        for batch in batches:
            batch.same = same
        return batches

    def return_packed(self, batches: list[wire.Message], timeout_s: float = _DEFAULT_TIMEOUT_S) -> None:
        """`return_memory` with what `packed_return` made."""
        self._exchange("return_batch", batches, timeout_s=timeout_s)

    def spent(self, timeout_s: float = _DEFAULT_TIMEOUT_S) -> dict[str, dict[str, tuple[float, int]]]:
        """What the agent's time went to in this operation so far: seconds and number, by command and by wire.h's
        spendings. Empty of an interposer that is older than this message."""
        found: dict[str, dict[str, tuple[float, int]]] = {}
        table = wire.tables()

        def collect(message: wire.Message) -> None:
            if message.type != "spent_batch" or message.fds:
                raise wire.WireError(f"a {message.type} came in answer to spent")
            for entry in message.entries:
                command, spending = table.by_number.get(entry["command"]), table.spendings.get(entry["spending"])
                if command is None or spending is None:
                    raise wire.WireError("it spent time on something that there is not")
                found.setdefault(command.name, {})[spending] = (entry["ns"] / 1e9, entry["count"])

        try:
            self._command("spent", timeout_s=timeout_s, collect=collect)
        except WoodfrogError as failure:
            if failure.details.get("status") != "bad_message" or self.closed:
                raise
        return found

    def hosted(self, timeout_s: float = _DEFAULT_TIMEOUT_S) -> Hosted:
        """Device memory of the target that lies on host memory as yet, with descriptors of that. In any state."""
        hosted = Hosted()
        try:
            self._command("hosted", timeout_s=timeout_s, collect=hosted.add)
            hosted.check()
        except wire.WireError as error:
            hosted.close()
            raise self._broken(error) from None
        except BaseException:
            hosted.close()
            raise
        return hosted

    def follow_access(self, on: bool, timeout_s: float = _DEFAULT_TIMEOUT_S) -> None:
        """At rest: note which memory on the host launches name. `on` False, in any state: stop that."""
        self._command("follow_access", {"on": int(on)}, timeout_s=timeout_s)

    def accessed(self, timeout_s: float = _DEFAULT_TIMEOUT_S) -> list[int]:
        """The handles that launches have named since `follow_access` began, in the order of first use."""
        named = Named("accessed_batch")
        self._command("accessed", timeout_s=timeout_s, collect=named.add)
        return named.handles

    def replace_memory(
        self, handles: Sequence[Handle], fds: Sequence[int], timeout_s: float = _DEFAULT_TIMEOUT_S
    ) -> list[int]:
        """While it is quiesced: `fds[k]`, device memory with the contents of the host memory behind `handles[k]`, takes
        its place. The handles that were replaced; others were freed meanwhile, or may not be moved."""
        replaced = Named("replaced_batch")
        batches = handle_batches("replace_batch", handles, fds)
        self._exchange("replace_batch", batches, timeout_s=timeout_s, collect=replaced.add)
        return replaced.handles

    def guard(self, handles: Sequence[Guarded], page: int, timeout_s: float = _DEFAULT_TIMEOUT_S) -> None:
        """From now on calls that write memory of these handles wait until it is captured. `page` stays the caller's.
        Between `return_memory` and `resume`; refused (status bad_message) by an interposer that is older than this."""
        self.guard_packed(self.packed_guard(handles, page), timeout_s)

    @staticmethod
    def packed_guard(handles: Sequence[Guarded], page: int) -> list[wire.Message]:
        """What `guard` sends, to be made before the target waits for it."""
        layout = wire.tables().by_name["guard"].entry
        assert layout.names == ("handle", "first", "count")
        step = wire.tables().max_entries
        starts = range(0, len(handles), step) or range(1)
        return [
            wire.Message(
                "guard",
                0,
                last=start == starts[-1],
                entries=layout.pack_rows((one.handle, one.first, one.count) for one in handles[start : start + step]),
                fds=[page] if start == 0 else [],
            )
            for start in starts
        ]

    def guard_packed(self, messages: list[wire.Message], timeout_s: float = _DEFAULT_TIMEOUT_S) -> None:
        """`guard` with what `packed_guard` made."""
        self._exchange("guard", messages, timeout_s=timeout_s)

    def guard_end(self, timeout_s: float = _DEFAULT_TIMEOUT_S) -> list[KernelUse]:
        """Nothing waits any more. The kernels that were launched meanwhile, most often launched first."""
        launched = Tracked()
        self._command("guard_end", timeout_s=timeout_s, collect=launched.add)
        return launched.kernels

    def resume(self, timeout_s: float = _DEFAULT_TIMEOUT_S) -> int:
        """Open the gate; how many bytes of the memory offered for the control state the driver had taken."""
        return int(self._command("resume", timeout_s=timeout_s).body["value"])

    def wanted_control_memory(self, size_bytes: int, timeout_s: float = _DEFAULT_TIMEOUT_S) -> int:
        """How many bytes of memory that is not its own the target would take for the driver's control state:
        `size_bytes` in whole huge pages, or as much as the driver took last time. 0: none."""
        return self._control_memory("ask", size_bytes, (), timeout_s)

    def offer_control_memory(
        self, size_bytes: int, fd: int | None = None, timeout_s: float = _DEFAULT_TIMEOUT_S
    ) -> int:
        """While the target runs, it makes memory for the driver's control state ready: `size_bytes`, or as much as the
        driver took last time; or with `fd` (the caller's) just `size_bytes` of that file. How many bytes that became; 0
        is no failure, the driver's checkpoint takes longer."""
        if fd is None:
            return self._control_memory("own", size_bytes, (), timeout_s)
        return self._control_memory("shared", size_bytes, (fd,), timeout_s)

    def withdraw_control_memory(self, timeout_s: float = _DEFAULT_TIMEOUT_S) -> None:
        """What was offered and not taken is unmapped. Only while the target runs."""
        self._control_memory("withdraw", 0, (), timeout_s)

    def _control_memory(self, what: str, size_bytes: int, fds: Sequence[int], timeout_s: float) -> int:
        body = {"bytes": size_bytes, "offer": wire.tables().control[what]}
        message = wire.Message("control_memory", 0, body=body, fds=list(fds))
        return int(self._exchange("control_memory", [message], timeout_s=timeout_s).body["value"])

    def ping(self, timeout_s: float = _HELLO_TIMEOUT_S) -> float:
        """Seconds until the agent answered."""
        begin = time.monotonic()
        self._command("ping", timeout_s=timeout_s)
        return time.monotonic() - begin

    def close(self) -> None:
        """Without `detach`: a target that still owns its memory runs on."""
        self._socket.close()
        if self._handle is not None:
            self._handle.close()

    def __enter__(self) -> AgentLink:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

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
                raise self._lost(name, why) from None
        if reply.status != 0:
            raise self._refusal(name, reply)
        return reply

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

    def _lost(self, command: str, why: str) -> WoodfrogError:
        alive = self._handle is not None and self._handle.identity.is_alive()
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
