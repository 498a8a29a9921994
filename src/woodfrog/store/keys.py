"""Keys of the files in a store and the caps on their sizes (docs/format.md, "Layout of a store").

Only what has one of these forms is ever listed, opened or deleted. This module decides names; it never touches a file.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from woodfrog.store import names

DIGEST_BYTES = 32  # BLAKE3
CONFIG = "config"
PACKS = "packs/"
INDEX = "index/"
IMAGES = "images/"
PROFILES = "profiles/"
LOCKS = "locks/"

# Read whole, so capped before: anything larger was not written by woodfrog.
CONFIG_MAX_BYTES = 64 << 10
MARK_MAX_BYTES = 16
OWNER_MAX_BYTES = 4 << 10
PROFILE_MAX_BYTES = 8 << 20
INDEX_MAX_BYTES = 256 << 20  # writers end one at a quarter of it (indexes.py)
MANIFEST_MAX_BYTES = (1 << 30) + 4096  # docs/format.md: a body of at most 1 GiB, and what is around it

_PACK = re.compile(r"packs/([0-9a-f]{2})/(\1[0-9a-f]{62})")
_INDEX = re.compile(r"index/([0-9a-f]{64})")
_MANIFEST = re.compile(r"images/([A-Za-z0-9][A-Za-z0-9._-]{0,62})/([1-9][0-9]{0,8})")
_MARK = re.compile(r"images/([A-Za-z0-9][A-Za-z0-9._-]{0,62})/\.mark")
_PROFILE = re.compile(r"profiles/([A-Za-z0-9][A-Za-z0-9._-]{0,62})/([1-9][0-9]{0,8})")
_LOCK = re.compile(r"locks/([0-9a-f]{32})")


class ManifestKey(NamedTuple):
    name: str
    number: int


def pack_key(name: bytes) -> str:
    return f"{PACKS}{name.hex()[:2]}/{name.hex()}"


def parse_pack(key: str) -> bytes | None:
    """The name of the pack with that key, or None for what is no pack's key."""
    return bytes.fromhex(match[2]) if (match := _PACK.fullmatch(key)) else None


def index_key(name: bytes) -> str:
    return f"{INDEX}{name.hex()}"


def parse_index(key: str) -> bytes | None:
    return bytes.fromhex(match[1]) if (match := _INDEX.fullmatch(key)) else None


def manifest_key(name: str, number: int) -> str:
    return f"{IMAGES}{names.check_name(name)}/{number}"


def manifest_of(reference: str) -> str:
    """The key of NAME@NUMBER."""
    name, number = names.parse_reference(reference)
    assert number is not None, "a reference without a number names no file"
    return manifest_key(name, number)


def profile_of(reference: str) -> str:
    """The key of what is noted beside NAME@NUMBER."""
    name, number = names.parse_reference(reference)
    assert number is not None, "a reference without a number names no file"
    return f"{PROFILES}{name}/{number}"


def parse_manifest(key: str) -> ManifestKey | None:
    return ManifestKey(match[1], int(match[2])) if (match := _MANIFEST.fullmatch(key)) else None


def mark_key(name: str) -> str:
    return f"{IMAGES}{names.check_name(name)}/.mark"


def lock_key(token: str) -> str:
    return f"{LOCKS}{token}"


def is_key(key: str) -> bool:
    """Whether a store of this format can have a file under that key."""
    return key == CONFIG or any(form.fullmatch(key) for form in (_PACK, _INDEX, _MANIFEST, _MARK, _PROFILE, _LOCK))
