"""Ranges of images as lines of blocks, for `inspect` and `diff`. Falls back to ASCII where the output has no others."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from woodfrog.cli import output

if TYPE_CHECKING:
    from woodfrog.image.picture import Part, Picture
    from woodfrog.image.spans import Marks, Span

WIDTH = 64  # of a line of blocks
ROWS = 16  # of a table of allocations: the largest; --json has all
FILE_ROWS = 6  # CRIU's files but the pages are small


def show(picture: Picture) -> None:
    """The picture of one image: its sums, and its largest allocations and files."""
    from woodfrog.image.inspect import human_bytes
    from woodfrog.image.picture import ASCII_MARKS, LEGEND, MARKS

    for what, shares in (("GPU memory", picture.gpu), ("CPU side", picture.cpu)):
        output.say(
            f"{what:>14}  {human_bytes(shares.new_bytes)} only in this image, "
            f"{human_bytes(shares.shared_bytes)} shared, {human_bytes(shares.zero_bytes)} zero"
        )
    marks = MARKS if unicode_output() else ASCII_MARKS
    signs = (marks.full, marks.partly, *marks.others.values())
    output.say(f"{'':>14}  " + "   ".join(f"{sign} {what}" for sign, what in zip(signs, LEGEND, strict=True)))
    output.say("")
    for heading, parts, most in (("allocation", picture.allocations, ROWS), ("file", picture.files, FILE_ROWS)):
        _table(heading, parts, marks, most)


def line(spans: Sequence[Span], size_bytes: int, marks: Marks) -> str:
    """One line of blocks."""
    from woodfrog.image.spans import draw

    return draw(spans, size_bytes, marks, WIDTH)


def unicode_output() -> bool:
    """Whether stdout can show block characters."""
    try:
        "█▄░·".encode(sys.stdout.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def left_out(what: str, count: int) -> None:
    """Say that a table does not show everything."""
    if count > 0:
        output.say(f"and {count} more {what}{'s' if count > 1 else ''}, with less that is new; --json has all")


def _table(heading: str, parts: Sequence[Part], marks: Marks, most: int) -> None:
    from woodfrog.image.inspect import human_bytes

    if not parts:
        return
    largest = sorted(parts, key=lambda part: (-part.shares.new_bytes, -part.size_bytes))[:most]
    rows = [
        (part.name, human_bytes(part.size_bytes), human_bytes(part.shares.new_bytes),
         line(part.spans, part.size_bytes, marks))
        for part in largest
    ]  # fmt: skip
    output.table((heading, "size", "new", "where"), rows, right=(1, 2))
    left_out(heading, len(parts) - len(largest))
    output.say("")
