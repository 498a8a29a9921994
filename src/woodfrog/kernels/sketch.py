"""A launch as a person writes it down, and its ranges as lines of blocks: for `woodfrog kernels explain`.

Parameters are given one by one: numbers, or names of buffers with their sizes, which get addresses of their own.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from woodfrog.errors import UsageError
from woodfrog.kernels.template import Exactness, Kind, Launch, Range, Template

_FIRST_ADDRESS = 0x7F00_0000_0000
_GAP = 1 << 20
_BUFFER = re.compile(r"([A-Za-z_]\w*):([0-9]{1,15})([KMG]?)")
_INTEGER = re.compile(r"[-+]?(0x[0-9a-fA-F]{1,16}|[0-9]{1,20})")
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_BLOCKS, _ASCII_BLOCKS = "·░▒█", ".-+#"  # nothing, some of it, bounds, all of it
_WRITTEN = "NAME:BYTES for a buffer (K, M, G allowed), a whole number, a number with a point, or hex:BYTES"


@dataclass(frozen=True)
class Buffer:
    name: str
    address: int
    size_bytes: int


@dataclass(frozen=True)
class Sketch:
    """A launch, the buffers it was given, and what it reads and writes."""

    launch: Launch
    buffers: tuple[Buffer, ...]
    reads: list[Range]
    writes: list[Range]


def dimensions(text: str, option: str) -> tuple[int, int, int]:
    """`4`, `4,2` or `4,2,1` (x may stand for the comma). UsageError naming the option."""
    parts = re.split(r"[,x]", text)
    if not 1 <= len(parts) <= 3 or not all(p.isdigit() and 0 < int(p) < 1 << 31 for p in parts):
        raise UsageError(f"{option} {text!r} is no size of a grid or block", advice="Write 4, 4,2 or 4,2,1.")
    one, two, three = (*(int(p) for p in parts), 1, 1)[:3]
    return one, two, three


def sketched(template: Template, grid: str, block: str, words: Sequence[str]) -> Sketch:
    """The ranges of a launch written down as words, one for each parameter. Raises UsageError."""
    expected = template.parameters
    if len(words) != len(expected):
        sizes = ", ".join(str(p.size_bytes) for p in expected) or "none"
        raise UsageError(
            f"{template.kernel} takes {len(expected)} parameters (bytes: {sizes}), {len(words)} were given",
            advice=f"Write --param once for each: {_WRITTEN}.",
        )
    buffers: list[Buffer] = []
    data = bytearray(template.parameters_bytes)
    for number, (word, parameter) in enumerate(zip(words, expected, strict=True)):
        value = _value(word, parameter.size_bytes, f"parameter {number}", buffers)
        data[parameter.offset_bytes : parameter.offset_bytes + parameter.size_bytes] = value
    symbols: dict[str, tuple[int, int]] = {}
    for name in template.symbols:
        buffers.append(_buffer(name, _GAP, buffers))
        symbols[name] = (buffers[-1].address, _GAP)
    launch = Launch(
        dimensions(grid, "--grid"),
        dimensions(block, "--block"),
        bytes(data),
        [(one.address, one.size_bytes) for one in buffers],
        symbols,
    )
    reads, writes = (Kind.LOAD, Kind.ATOMIC), (Kind.STORE, Kind.ATOMIC)
    return Sketch(launch, tuple(buffers), template.ranges(launch, kinds=reads), template.ranges(launch, kinds=writes))


def _buffer(name: str, size_bytes: int, before: Sequence[Buffer]) -> Buffer:
    address = before[-1].address + before[-1].size_bytes + _GAP if before else _FIRST_ADDRESS
    return Buffer(name, address // _GAP * _GAP, size_bytes)


def _value(word: str, size_bytes: int, what: str, buffers: list[Buffer]) -> bytes:
    if match := _BUFFER.fullmatch(word):
        if size_bytes != 8:
            raise UsageError(f"{what} has {size_bytes} bytes and cannot be a buffer ({word})")
        name = match[1]
        known = next((one for one in buffers if one.name == name), None)
        if known is None:
            size = int(match[2]) * _UNITS[match[3]]
            if not 0 < size < 1 << 44:
                raise UsageError(f"{what}: a buffer of {size} bytes is none")
            known = _buffer(name, size, buffers)
            buffers.append(known)
        return struct.pack("<Q", known.address)
    if _INTEGER.fullmatch(word):
        value = int(word, 0) if "x" in word else int(word)
        if -(1 << (8 * size_bytes - 1)) <= value < 1 << 8 * size_bytes:
            return (value % (1 << 8 * size_bytes)).to_bytes(size_bytes, "little")
        raise UsageError(f"{what}: {word} does not fit in {size_bytes} bytes")
    if word.startswith("hex:"):
        try:
            data = bytes.fromhex(word[4:])
        except ValueError:
            data = b""
        if len(data) != size_bytes:
            raise UsageError(f"{what} has {size_bytes} bytes, {word[:40]} is not as many in hexadecimal")
        return data
    try:
        return struct.pack({2: "<e", 4: "<f", 8: "<d"}[size_bytes], float(word))
    except (ValueError, KeyError, OverflowError):
        raise UsageError(f"{what}: {word!r} is nothing that {size_bytes} bytes can be", advice=_WRITTEN) from None


def as_fields(sketch: Sketch) -> dict[str, Any]:
    """For JSON: ranges by buffer, with offsets into it."""
    found = []
    for kind, ranges in (("read", sketch.reads), ("write", sketch.writes)):
        for one in ranges:
            buffer = _inside(sketch.buffers, one)
            found.append(
                {
                    "kind": kind,
                    "buffer": None if buffer is None else buffer.name,
                    "offset_bytes": one.address - (0 if buffer is None else buffer.address),
                    "size_bytes": one.size_bytes,
                    "exactness": one.exactness.name.lower(),
                }
            )
    buffers = [{"name": b.name, "size_bytes": b.size_bytes} for b in sketch.buffers]
    return {"grid": sketch.launch.grid, "block": sketch.launch.block, "buffers": buffers, "ranges": found}


def _inside(buffers: Sequence[Buffer], one: Range) -> Buffer | None:
    return next((b for b in buffers if b.address <= one.address < b.address + b.size_bytes), None)


def drawn(sketch: Sketch, *, width: int = 64, unicode: bool = True) -> list[str]:
    """A line of blocks for what is read and for what is written of each buffer, and the bytes in words."""
    signs = _BLOCKS if unicode else _ASCII_BLOCKS
    grid, block = ("x".join(str(d) for d in size) for size in (sketch.launch.grid, sketch.launch.block))
    text = [
        f"grid {grid}, block {block}",
        f"  {signs[3]} touched   {signs[1]} some of it   {signs[2]} within bounds, or whole   {signs[0]} not touched",
    ]
    wide = max((len(b.name) for b in sketch.buffers), default=0)
    for buffer in sketch.buffers:
        for kind, ranges in (("read ", sketch.reads), ("write", sketch.writes)):
            mine = _clipped(ranges, buffer)
            text.append(f"  {buffer.name:>{wide}} {kind} {_line(mine, buffer, width, signs)}  {_words(mine, buffer)}")
    outside = [one for one in (*sketch.reads, *sketch.writes) if _inside(sketch.buffers, one) is None]
    if outside:
        text.append(f"  {len(outside)} ranges lie outside of all buffers, the first at {outside[0].address:#x}")
    return text


def _clipped(ranges: Sequence[Range], buffer: Buffer) -> list[Range]:
    """The parts of ranges inside a buffer, at offsets into it."""
    found = []
    for one in ranges:
        start = max(one.address - buffer.address, 0)
        end = min(one.address + one.size_bytes - buffer.address, buffer.size_bytes)
        if start < end:
            found.append(Range(start, end - start, one.exactness))
    return found


def _line(ranges: Sequence[Range], buffer: Buffer, width: int, signs: str) -> str:
    cells = min(width, buffer.size_bytes)
    touched, loose = [0] * cells, [False] * cells
    for one in ranges:
        end = one.address + one.size_bytes
        for cell in range(one.address * cells // buffer.size_bytes, (end * cells - 1) // buffer.size_bytes + 1):
            low, high = -(-cell * buffer.size_bytes // cells), -(-(cell + 1) * buffer.size_bytes // cells)
            touched[cell] += max(0, min(end, high) - max(one.address, low))
            loose[cell] = loose[cell] or one.exactness is not Exactness.EXACT
    line = ""
    for cell in range(cells):
        low, high = -(-cell * buffer.size_bytes // cells), -(-(cell + 1) * buffer.size_bytes // cells)
        part = 0 if not touched[cell] else 2 if loose[cell] else 3 if touched[cell] >= high - low else 1
        line += signs[part]
    return line.ljust(width)


def _words(ranges: Sequence[Range], buffer: Buffer) -> str:
    if not ranges:
        return "nothing"
    total = sum(one.size_bytes for one in ranges)
    worst = max(one.exactness for one in ranges)
    pieces = "" if len(ranges) == 1 else f" in {len(ranges)} pieces"
    return f"{total} of {buffer.size_bytes} bytes{pieces}, {worst.name.lower()}"
