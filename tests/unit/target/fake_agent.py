"""An agent for tests of the link: speaks wire.h over a socket, and misbehaves when told to.

It is a thread of the test's own process, so the peer credentials are ours. Memory is stood in for by memfds.
"""

from __future__ import annotations

import array
import contextlib
import os
import socket
import threading
from collections.abc import Callable

from woodfrog.target import wire
from woodfrog.target.wire import Message, Values

Answer = Callable[["FakeAgent", Message], None]


class FakeAgent:
    """`answers` replaces what it does on a command; `daemon_end` is for the link to take over."""

    def __init__(self, *, handles: int = 0, mappings: int | None = None, hello: Message | None = None) -> None:
        self.daemon_end, self.socket = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.state = "running"
        self.handles: list[Values] = [
            {"handle": number + 1, "size": 2 << 20, "device": 0, "kind": 0} for number in range(handles)
        ]
        self.fds = [os.memfd_create(f"memory{number}") for number in range(handles)]
        self.mappings: list[Values] = [
            {"address": (1 << 40) + (number << 21), "size": 1 << 20, "handle": number + 1, "offset": 0}
            for number in range(handles if mappings is None else mappings)
        ]
        self.commands: list[str] = []
        self.returned: list[tuple[int, int]] = []  # (handle, inode of its descriptor)
        self.answers: dict[str, Answer] = {}
        self.hello = hello or Message(
            "hello", 0, body={"pid": os.getpid(), "agent_tid": 1, "name": b"llama", "build": b"test", "owned_count": 3}
        )
        self._thread = threading.Thread(target=self._serve, daemon=True)

    def start(self) -> FakeAgent:
        self.send(self.hello)
        self._thread.start()
        return self

    def join(self) -> None:
        self._thread.join(timeout=30)
        assert not self._thread.is_alive()

    def close(self) -> None:
        self.daemon_end.close()
        with contextlib.suppress(OSError):  # it may have closed its end itself
            self.socket.shutdown(socket.SHUT_RDWR)
        if self._thread.is_alive():
            self.join()
        self.socket.close()
        for fd in self.fds:
            os.close(fd)
        self.fds.clear()

    def send(self, message: Message) -> None:
        self.send_raw(wire.pack(message), message.fds)

    def send_raw(self, data: bytes, fds: list[int] | None = None) -> None:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        self.socket.sendmsg([data], rights)

    def reply(self, command: Message, status: int = 0, message: bytes = b"", driver_result: int = 0) -> None:
        states = {name: number for number, name in wire.tables().states.items()}
        body = {
            "state": states[self.state],
            "elapsed_us": 1500,
            "message": message,
            "driver_result": driver_result,
        }
        self.send(Message("reply", command.sequence, status=status, body=body))

    def export(self, command: Message) -> None:
        step = wire.tables().max_entries
        for kind, entries, fds in (("export_batch", self.handles, self.fds), ("mapping_batch", self.mappings, [])):
            for start in range(0, len(entries), step):
                part = entries[start : start + step]
                last = start + step >= len(entries)
                self.send(Message(kind, command.sequence, entries=part, fds=list(fds[start : start + step]), last=last))
        self.state = "exported"
        self.reply(command)

    def _serve(self) -> None:
        while True:
            try:
                data, ancillary, _, _ = self.socket.recvmsg(
                    wire.tables().max_message, socket.CMSG_SPACE(253 * 4), socket.MSG_CMSG_CLOEXEC
                )
            except OSError:
                return
            if not data:
                return
            fds = array.array("i")
            for _, _, rights in ancillary:
                fds.frombytes(rights)
            command = wire.unpack(data, list(fds), "daemon")
            self.commands.append(command.type)
            try:
                self.answers.get(command.type, FakeAgent._answer)(self, command)
            except (BrokenPipeError, ConnectionResetError):
                return  # the link has given up on it
            finally:
                for fd in fds:
                    os.close(fd)

    def _answer(self, command: Message) -> None:
        after = {"quiesce": "quiesced", "release_memory": "released", "resume": "running"}
        self.state = after.get(command.type, self.state)
        if command.type == "export_memory":
            self.export(command)
        elif command.type == "return_batch":
            self.returned += [
                (entry["handle"], os.fstat(fd).st_ino) for entry, fd in zip(command.entries, command.fds, strict=True)
            ]
            if command.last:
                self.state = "returned"
                self.reply(command)
        elif command.type == "survey":
            obstacles = wire.tables().obstacles["managed_memory"]
            device = {"owned_bytes": 6 << 20, "uuid": b"u" * 16, "ordinal": 0, "owned_count": 3}
            self.send(
                Message(
                    "survey_result",
                    command.sequence,
                    body={"owned_bytes": 6 << 20, "owned_count": 3, "obstacles": obstacles, "contexts": 1},
                    entries=[device],
                )
            )
            self.reply(command)
        elif command.type == "detach":
            self.reply(command)
            self.socket.shutdown(socket.SHUT_RDWR)
            self.socket.close()
        else:
            self.reply(command)
