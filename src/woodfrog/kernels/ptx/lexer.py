"""Turns PTX text into tokens. One regular expression does the work: nothing here may loop over characters in Python."""

from __future__ import annotations

import re

from woodfrog.kernels import limits
from woodfrog.kernels.error import KernelFileError, PtxError

# Kinds of tokens.
WORD = 1  # identifiers and opcodes with their modifiers: %tid.x, ld.global.v4.f32, $L__BB0_1
DIRECTIVE = 2  # .reg
NUMBER = 3
STRING = 4
PUNCTUATION = 5
END = 6

_TOKEN = re.compile(
    r"""
    (?P<space>(?:\s+|//[^\n]*|/\*.*?\*/|\#[^\n]*)+)
  | (?P<word>[%$A-Za-z_][\w$]*(?:\.\w+(?:::\w+)*)*(?:::\w+(?:\.\w+)*)*)
  | (?P<directive>\.[A-Za-z_][\w]*(?:::\w+)*)
  | (?P<number>0[fF][0-9a-fA-F]{8}|0[dD][0-9a-fA-F]{16}|0[xX][0-9a-fA-F]+U?|0[bB][01]+U?
      |\d+\.\d*(?:[eE][+-]?\d+)?|\d+[eE][+-]?\d+|\d+U?)
  | (?P<string>"[^"\n]*")
  | (?P<punctuation>[{}()\[\],;:+\-=<>@!|*/&~?^])
    """,
    re.VERBOSE | re.DOTALL,
)
_KINDS = {"word": WORD, "directive": DIRECTIVE, "number": NUMBER, "string": STRING, "punctuation": PUNCTUATION}


def tokens(text: str) -> tuple[list[int], list[str], list[int]]:
    """Kinds, texts and positions of all tokens, an END token last."""
    if len(text) > limits.PTX_BYTES:
        raise KernelFileError(f"{len(text)} characters of PTX are more than the {limits.PTX_BYTES} allowed")
    kinds: list[int] = []
    texts: list[str] = []
    positions: list[int] = []
    position = 0
    end = len(text)
    match = _TOKEN.match
    while position < end:
        found = match(text, position)
        if found is None:
            raise error_at(text, position, f"{text[position]!r} begins nothing that PTX knows")
        group = found.lastgroup
        if group != "space":
            kinds.append(_KINDS[group or ""])
            texts.append(found.group())
            positions.append(position)
        position = found.end()
    kinds.append(END)
    texts.append("the end of the text")
    positions.append(end)
    return kinds, texts, positions


def error_at(text: str, position: int, message: str) -> PtxError:
    """The error for a place in the text."""
    line = text.count("\n", 0, position) + 1
    column = position - (text.rfind("\n", 0, position) + 1) + 1
    return PtxError(message, line=line, column=column)


def integer(text: str) -> int | None:
    """The value of an integer token, None for a floating-point one."""
    digits = text.rstrip("U")
    low = digits[:2].lower()
    if low in ("0f", "0d") or "." in digits:
        return None
    if low == "0x":
        return int(digits, 16)
    if low == "0b":
        return int(digits, 2)
    if "e" in digits or "E" in digits:
        return None
    if len(digits) > 20:
        return None  # beyond 64 bits; Python's own limit on long decimals is not to be met here
    if len(digits) > 1 and digits[0] == "0" and not set(digits) - set("01234567"):
        return int(digits, 8)
    return int(digits)
