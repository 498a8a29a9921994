"""daemon.sock: accepts connections of the owner, runs each request on a thread, streams its events.

It knows verbs only as a table of functions. A client that goes away does not stop its operation: half of what people
start from a terminal ends with the terminal, and a checkpoint that was asked for is wanted. Whoever does want it
stopped says `cancel`.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from woodfrog.daemon import peer, wire
from woodfrog.errors import RefusedError, UsageError, WoodfrogError
from woodfrog.operations.phases import Emit, as_woodfrog_error
from woodfrog.target import pid_namespace

log = logging.getLogger(__name__)

MAX_CONNECTIONS = 256
PROCESS_PARAMETERS = ("target", "out", "in", "pid")  # which a caller may give by number
WAITING_VERBS = frozenset({"wait"})  # a daemon that ends does not wait for these
BACKLOG = 128
# A client that does not read its events counts as gone after this: it must not hold up an operation on a frozen target.
SEND_TIMEOUT_S = 2
_SEND_TIMEOUT = struct.pack("@ll", SEND_TIMEOUT_S, 0)  # struct timeval


class Call:
    """One request in progress: its parameters, where its events go, and how it is cancelled."""

    def __init__(self, params: dict[str, Any], emit: Emit) -> None:
        self.params = params
        self.emit = emit
        self._lock = threading.Lock()
        self._cancel: Callable[[str], bool] | None = None

    def cancellable(self, cancel: Callable[[str], bool]) -> None:
        """From now on `cancel(reason)` stops this call (it answers whether it still could)."""
        with self._lock:
            self._cancel = cancel

    def cancel(self, reason: str) -> bool:
        with self._lock:
            chosen = self._cancel
        return chosen is not None and chosen(reason)


Verb = Callable[[Call], Any]


class Server:
    """Owns the listening socket and one thread a connection. `stop` ends accepting; running requests go on."""

    def __init__(self, path: Path, verbs: dict[str, Verb]) -> None:
        self._verbs = verbs
        self._listener = peer.listen(path, socket.SOCK_STREAM, BACKLOG)
        self._connections = threading.BoundedSemaphore(MAX_CONNECTIONS)
        self._requests: set[threading.Thread] = set()
        self._lock = threading.Lock()

    def serve(self) -> None:
        """Accept until `stop` is called."""
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return  # closed by stop
            if not peer.is_admitted(peer.credentials(connection)):
                log.warning("refused a connection of user %d", peer.credentials(connection).uid)
                connection.close()
                continue
            if not self._connections.acquire(blocking=False):
                log.warning("refused a connection: %d are open", MAX_CONNECTIONS)
                connection.close()
                continue
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _SEND_TIMEOUT)
            threading.Thread(target=self._serve_connection, args=(connection,), name="connection", daemon=True).start()

    def stop(self) -> None:
        """End `serve`; nobody gets a connection from now on. Safe to repeat."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def join_requests(self) -> None:
        """Wait until every running request, except the caller's own, has answered."""
        me = threading.current_thread()
        while True:
            with self._lock:
                others = [thread for thread in self._requests if thread is not me]
            if not others:
                return
            for thread in others:
                thread.join()

    def _serve_connection(self, connection: socket.socket) -> None:
        stream = _Stream(connection)
        calls: dict[int, Call] = {}
        caller_pid = peer.credentials(connection).pid
        try:
            while (request := wire.receive_request(connection)) is not None:
                if request.verb == "cancel":
                    stopped = _cancel(calls, request.params)
                    stream.answer(wire.Answer(request.id, result={"cancelled": stopped}, last=True))
                    continue
                self._begin(stream, calls, request, caller_pid)
        except UsageError as failure:
            log.warning("closing a connection: %s", failure.reason)
            stream.answer(wire.Answer(0, error=failure.to_dict(), last=True))
        except OSError as failure:
            log.info("a client went away: %s", failure)
        finally:
            stream.close_when_idle()
            self._connections.release()

    def _begin(self, stream: _Stream, calls: dict[int, Call], request: wire.Request, caller_pid: int) -> None:
        params = with_outer_numbers(request.params, caller_pid)
        call = Call(params, lambda event: stream.answer(wire.Answer(request.id, event=event)))
        calls[request.id] = call
        stream.hold()

        def run() -> None:
            try:
                stream.answer(self._answer(request, call))
            finally:
                calls.pop(request.id, None)
                stream.release()
                with self._lock:
                    self._requests.discard(threading.current_thread())

        thread = threading.Thread(target=run, name=f"verb-{request.verb}"[:15], daemon=True)
        if request.verb not in WAITING_VERBS:
            with self._lock:
                self._requests.add(thread)
        thread.start()

    def _answer(self, request: wire.Request, call: Call) -> wire.Answer:
        verb = self._verbs.get(request.verb)
        if verb is None:
            failure = UsageError(f"the daemon knows no verb {request.verb!r}", advice=", ".join(sorted(self._verbs)))
            return wire.Answer(request.id, error=failure.to_dict(), last=True)
        try:
            return wire.Answer(request.id, result=verb(call), last=True)
        except WoodfrogError as failure:
            log.info("%s failed: %s", request.verb, failure.reason)
            return wire.Answer(request.id, error=failure.to_dict(), last=True)
        except Exception as failure:
            log.exception("%s failed in a way that was not foreseen", request.verb)
            return wire.Answer(request.id, error=as_woodfrog_error(failure, request.verb).to_dict(), last=True)


class _Stream:
    """The answering half of a connection, shared by its requests; closed when the last one has answered."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._lock = threading.Lock()
        self._users = 1  # the reader
        self._gone = False

    def answer(self, answer: wire.Answer) -> None:
        with self._lock:
            if self._gone:
                return
            try:
                wire.send(self._connection, answer)
            except OSError as failure:
                # The operation goes on; only its listener is gone.
                self._gone = True
                log.info("a client went away before its answer: %s", failure)

    def hold(self) -> None:
        with self._lock:
            self._users += 1

    def release(self) -> None:
        with self._lock:
            self._users -= 1
            if self._users == 0:
                self._gone = True
                self._connection.close()

    close_when_idle = release


def _cancel(calls: dict[int, Call], params: dict[str, Any]) -> bool:
    call = calls.get(params.get("request", -1))
    if call is None:
        return False
    return call.cancel("the client asked for it")


def with_outer_numbers(params: dict[str, Any], caller_pid: int) -> dict[str, Any]:
    """Numbers of processes as we know them: a target in a PID namespace that asks for its own checkpoint gives the
    number that it has in there."""
    given = {name: value for name in PROCESS_PARAMETERS if isinstance(value := params.get(name), int)}
    return {**params, **{name: pid_namespace.from_caller(pid, caller_pid) for name, pid in given.items()}}


def required(params: dict[str, Any], name: str, kind: type) -> Any:
    """The parameter `name`, which must be there and of this type."""
    if name not in params:
        raise UsageError(f"the parameter {name!r} is missing")
    return optional(params, name, kind, None)


def optional(params: dict[str, Any], name: str, kind: type, default: Any) -> Any:
    """The parameter `name`, or `default` when it is missing or null; UsageError for another type."""
    value = params.get(name)
    if value is None:
        return default
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise UsageError(f"the parameter {name!r} must be {kind.__name__}, not {type(value).__name__}")
    return value


def refuse_unknown(params: dict[str, Any], known: set[str]) -> None:
    """A misspelt option that is silently ignored would checkpoint something else than was asked for."""
    unknown = set(params) - known
    if unknown:
        raise RefusedError(
            f"unknown parameter(s): {', '.join(sorted(unknown))}", advice=f"known: {', '.join(sorted(known))}"
        )
