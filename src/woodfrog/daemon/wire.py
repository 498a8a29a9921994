"""Framing on daemon.sock: u32 little-endian length, then one msgspec msgpack map.

Requests are `{id, verb, params}`; answers `{id, event}` any number of times, then one `{id, result}` or `{id, error}`.
What arrives is hostile until decoded: the length is checked against a cap before anything is allocated.
"""

from __future__ import annotations

import socket
import struct
from typing import Any

import msgspec

from woodfrog.errors import UsageError

_LENGTH = struct.Struct("<I")
# A request is a few hundred bytes; an answer carries a table of targets at most.
MAX_REQUEST_BYTES = 1 << 20
MAX_ANSWER_BYTES = 64 << 20


class Request(msgspec.Struct, forbid_unknown_fields=True):
    id: int
    verb: str
    params: dict[str, Any] = {}


class Answer(msgspec.Struct, omit_defaults=True):
    id: int
    event: dict[str, Any] | None = None
    result: Any = None
    error: dict[str, Any] | None = None
    last: bool = False


_encoder = msgspec.msgpack.Encoder()
_requests = msgspec.msgpack.Decoder(Request)
_answers = msgspec.msgpack.Decoder(Answer)


def send(connection: socket.socket, message: Request | Answer) -> None:
    """Send one message whole. The caller serialises senders. OSError when the peer is gone."""
    body = _encoder.encode(message)
    connection.sendall(_LENGTH.pack(len(body)) + body)


def receive_request(connection: socket.socket) -> Request | None:
    """The next request, or None at the end of the stream. UsageError when it is not one of ours."""
    body = _receive(connection, MAX_REQUEST_BYTES)
    return None if body is None else _decode(_requests, body)


def receive_answer(connection: socket.socket) -> Answer | None:
    """The next answer, or None at the end of the stream. UsageError when it is not one of ours."""
    body = _receive(connection, MAX_ANSWER_BYTES)
    return None if body is None else _decode(_answers, body)


def _decode(decoder: Any, body: bytes) -> Any:
    try:
        return decoder.decode(body)
    except msgspec.MsgspecError as failure:
        raise UsageError(f"a message on daemon.sock cannot be read: {failure}") from failure
    except RecursionError as failure:
        raise UsageError("a message on daemon.sock is nested too deep") from failure


def _receive(connection: socket.socket, cap_bytes: int) -> bytes | None:
    head = _receive_exactly(connection, _LENGTH.size)
    if head is None:
        return None
    (size,) = _LENGTH.unpack(head)
    if size > cap_bytes:
        raise UsageError(f"a message of {size} bytes on daemon.sock is larger than the {cap_bytes} allowed")
    body = _receive_exactly(connection, size)
    if body is None and size:
        raise UsageError("the stream on daemon.sock ended within a message")
    return body or b""


def _receive_exactly(connection: socket.socket, size: int) -> bytes | None:
    parts: list[bytes] = []
    missing = size
    while missing:
        part = connection.recv(min(missing, 1 << 20))
        if not part:
            if parts:
                raise UsageError("the stream on daemon.sock ended within a message")
            return None
        parts.append(part)
        missing -= len(part)
    return b"".join(parts)
