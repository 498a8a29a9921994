"""What a person writes for times and fractions: `24h`, `7d`, `90s`; `5%`. Nothing here prints."""

from __future__ import annotations

import re

from woodfrog.errors import UsageError

_SECONDS = {"": 1.0, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}
_NUMBER = r"[0-9]{1,9}(?:\.[0-9]{1,9})?"
_DURATION = re.compile(rf"({_NUMBER})\s*(s|min|m|h|d|w|)")
_PERCENT = re.compile(rf"({_NUMBER})\s*(%?)")


def duration_s(text: str, option: str) -> float:
    """Seconds of `90`, `90s`, `5m`, `24h`, `7d` or `2w`. UsageError naming the option."""
    if (match := _DURATION.fullmatch(text.strip())) is None:
        raise UsageError(f"{option} {text!r} is no time", advice="write a number and s, m, h, d or w: 90s, 5m, 24h")
    return float(match[1]) * _SECONDS[match[2]]


def fraction(text: str, option: str) -> float:
    """0 to 1 of `5%` (or `5`, which means the same). UsageError naming the option."""
    match = _PERCENT.fullmatch(text.strip())
    if match is None or float(match[1]) > 100:
        raise UsageError(f"{option} {text!r} is no percentage", advice="write a number from 0% to 100%")
    return float(match[1]) / 100
