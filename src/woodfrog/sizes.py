"""Sizes as people write them."""

from __future__ import annotations

import re

from woodfrog.errors import UsageError

_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


def parse_size(text: str) -> int:
    """Bytes of a size such as 64G, 512M or 1073741824; at least 1. UsageError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?", text.strip().lower())
    size_bytes = int(float(match[1]) * _UNITS[match[2]]) if match is not None else 0
    if size_bytes <= 0:
        raise UsageError(f"{text!r} is not a size", advice="for example 64G or 512M")
    return size_bytes
