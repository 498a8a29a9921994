"""Packets are unpacked exactly or refused: no bytes from the other side can do anything else."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from woodfrog.target import wire
from woodfrog.target.wire import Message, WireError


def _values(names: tuple[str, ...], layout: Any, draw: st.DrawFn) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, part in zip(names, layout.codec.unpack(b"\0" * layout.size), strict=True):
        values[name] = (
            draw(st.binary(max_size=len(part))) if isinstance(part, bytes) else draw(st.integers(0, 2**31 - 1))
        )
    return values


@st.composite
def messages(draw: st.DrawFn) -> Message:
    kind = draw(st.sampled_from(sorted(wire.tables().by_name)))
    layout = wire.tables().by_name[kind]
    entries = draw(st.integers(0, 3)) if layout.entry.size else 0
    return Message(
        kind,
        sequence=draw(st.integers(0, 2**64 - 1)),
        status=draw(st.integers(-(2**31), 2**31 - 1)),
        last=draw(st.booleans()),
        body=_values(layout.body.names, layout.body, draw),
        entries=[_values(layout.entry.names, layout.entry, draw) for _ in range(entries)],
    )


def _sender(message: Message) -> str:
    return wire.tables().by_name[message.type].sender


def _other(sender: str) -> str:
    return "daemon" if sender == "agent" else "agent"


@given(messages())
def test_what_was_packed_is_unpacked(message: Message) -> None:
    found = wire.unpack(wire.pack(message), [], _sender(message))
    assert (found.type, found.sequence, found.status, found.last) == (
        message.type,
        message.sequence,
        message.status,
        message.last,
    )
    for sent, got in zip([message.body, *message.entries], [found.body, *found.entries], strict=True):
        for name, value in sent.items():
            assert got[name] == value if isinstance(value, int) else got[name].startswith(value)


@given(messages())
def test_a_message_from_the_wrong_side_is_refused(message: Message) -> None:
    with pytest.raises(WireError, match="may send"):
        wire.unpack(wire.pack(message), [], _other(_sender(message)))


@given(messages(), st.data())
def test_a_cut_or_lengthened_packet_is_refused(message: Message, data: st.DataObject) -> None:
    packet = wire.pack(message)
    cut = data.draw(st.integers(0, len(packet) - 1))
    with pytest.raises(WireError):
        wire.unpack(packet[:cut], [], _sender(message))
    with pytest.raises(WireError):
        wire.unpack(packet + b"\0", [], _sender(message))


@given(st.binary(max_size=600))
def test_any_bytes_are_a_message_or_refused(data: bytes) -> None:
    for sender in ("agent", "daemon"):
        with contextlib.suppress(WireError):
            assert wire.unpack(data, [], sender).type in wire.tables().by_name


@given(messages(), st.data())
def test_a_flipped_bit_never_does_more_than_change_a_value(message: Message, data: st.DataObject) -> None:
    packet = bytearray(wire.pack(message))
    position = data.draw(st.integers(0, len(packet) * 8 - 1))
    packet[position // 8] ^= 1 << position % 8
    try:
        found = wire.unpack(bytes(packet), [], _sender(message))
    except WireError:
        return
    assert len(found.entries) == len(message.entries)


@given(st.binary(max_size=64))
def test_text_from_a_target_is_printable_and_ends_at_the_first_nul(raw: bytes) -> None:
    found = wire.text(raw)
    assert found.isprintable()
    assert len(found) <= len(raw.split(b"\0", 1)[0])


def test_more_entries_than_a_packet_may_hold_are_a_mistake_of_ours() -> None:
    with pytest.raises(ValueError, match="at most"):
        wire.pack(Message("return_batch", 0, entries=[{}] * (wire.tables().max_entries + 1)))
