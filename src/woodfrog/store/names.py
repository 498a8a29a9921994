"""Names and references of images (docs/format.md, "Layout of a store").

A name can never lead out of the store's own directory. This module decides names only; it must never touch a file.
"""

from __future__ import annotations

import re

from woodfrog.errors import UsageError

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
REFERENCE = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]{0,62})@([1-9][0-9]{0,8})")


def check_name(name: str) -> str:
    """The name itself, or UsageError."""
    if not NAME.fullmatch(name):
        raise UsageError(
            f"{name!r} is not a name that an image can have",
            advice="use 1 to 63 letters, digits, '.', '_' and '-', the first a letter or digit",
        )
    return name


def parse_reference(reference: str) -> tuple[str, int | None]:
    """("llama", 3) of "llama@3", ("llama", None) of "llama"; UsageError otherwise."""
    if match := REFERENCE.fullmatch(reference):
        return match[1], int(match[2])
    if "@" in reference:
        raise UsageError(f"{reference!r} names no image", advice="write NAME or NAME@NUMBER, as `woodfrog images` does")
    return check_name(reference), None
