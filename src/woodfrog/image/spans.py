"""Kinds of chunks (changed, shared, zero …) turned into ranges of bytes of an allocation, and into a line of blocks.

A kind is one small number a chunk, in a bytearray, because an image has millions of chunks. Nothing here knows what a
kind means or reads data.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple

from woodfrog.image.manifest import Manifest, chunk_count


class Span(NamedTuple):
    """`size_bytes` bytes of one kind, `offset` bytes from where whatever it is a part of begins."""

    offset: int
    size_bytes: int
    kind: int


class Handles:
    """Where in an image's column of chunks each handle's chunks are."""

    def __init__(self, manifest: Manifest) -> None:
        self.chunk_bytes = manifest.chunk_bytes
        self.first: dict[int, int] = {}
        self.count = 0
        for handle in manifest.handles:
            self.first[handle.id] = self.count
            self.count += chunk_count(handle.size, manifest.chunk_bytes)
        for shared in manifest.shared:
            self.first[shared.id] = self.first[shared.of]

    def chunks_of(self, handle: int, offset: int, size_bytes: int) -> tuple[int, int]:
        """(first, end) of the chunks that hold these bytes of a handle."""
        begin = self.first[handle]
        return begin + offset // self.chunk_bytes, begin + chunk_count(offset + size_bytes, self.chunk_bytes)


def spans(kinds: Sequence[int], offset: int, size_bytes: int, chunk_bytes: int) -> list[Span]:
    """The ranges of something that lies `offset` bytes into its first chunk; `kinds` are those of all its chunks."""
    found = []
    begin = -(offset % chunk_bytes)
    for kind, run in groupby(kinds):
        end = begin + chunk_bytes * sum(1 for _ in run)
        start, stop = max(0, begin), min(end, size_bytes)
        if stop > start:
            found.append(Span(start, stop - start, kind))
        begin = end
    return found


def spans_of(kinds: Sequence[int], sizes: Sequence[int]) -> list[Span]:
    """The ranges of a file whose chunks have these kinds and sizes."""
    found = []
    begin = 0
    for kind, run in groupby(zip(kinds, sizes, strict=True), key=itemgetter(0)):
        size_bytes = sum(size for _, size in run)
        found.append(Span(begin, size_bytes, kind))
        begin += size_bytes
    return found


def total(ranges: Sequence[Span], kind: int) -> int:
    """Bytes of that kind."""
    return sum(span.size_bytes for span in ranges if span.kind == kind)


@dataclass(frozen=True)
class Marks:
    """How a line of blocks is drawn: `strong` is the kind that a person looks for and must see however little of it
    there is; `others` are the marks of the rest, the first of them that is in a block wins."""

    strong: int
    full: str
    partly: str
    others: Mapping[int, str]


def draw(ranges: Sequence[Span], size_bytes: int, marks: Marks, width: int) -> str:
    """A line of at most `width` characters, each for an equal part of the whole (at least a byte)."""
    width = max(1, min(width, size_bytes))
    return "".join(_mark(cell, marks) for cell in _cells(ranges, size_bytes, width))


def _cells(ranges: Sequence[Span], size_bytes: int, width: int) -> Iterator[dict[int, int]]:
    """For each character the bytes of each kind."""
    at = 0
    for cell in range(width):
        begin, end = cell * size_bytes // width, (cell + 1) * size_bytes // width
        inside: dict[int, int] = {}
        while at < len(ranges) and ranges[at].offset < end:
            span = ranges[at]
            there = min(end, span.offset + span.size_bytes) - max(begin, span.offset)
            inside[span.kind] = inside.get(span.kind, 0) + there
            if span.offset + span.size_bytes > end:
                break
            at += 1
        yield inside


def _mark(inside: Mapping[int, int], marks: Marks) -> str:
    if strong := inside.get(marks.strong, 0):
        return marks.full if strong * 2 >= sum(inside.values()) else marks.partly
    return next((mark for kind, mark in marks.others.items() if kind in inside), " ")
