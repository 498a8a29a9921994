"""The profile of an image: in which order a restored target used its allocations first (docs/format.md).

A file of its own beside the image, since a manifest never changes. A hint and no more: it decides what is promoted
first, so a damaged or foreign one is ignored, and whatever it names is compared with what there is.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from woodfrog.errors import WoodfrogError

if TYPE_CHECKING:
    from woodfrog.store.store import Store

log = logging.getLogger(__name__)

VERSION = 1
MOST_HANDLES = 1 << 18  # of a profile; what comes later in the order of use is promoted in the image's order


class _Profile(msgspec.Struct):
    version: int
    operation: int  # of the image's manifest
    handles: list[int]


def read_profile(store: Store, reference: str, operation: int) -> list[int]:
    """The handles of that image in the order of their first use, each once; empty without a (usable) profile."""
    try:
        data = store.read_profile(reference)
        profile = msgspec.json.decode(data, type=_Profile) if data else None
    except (WoodfrogError, OSError, msgspec.MsgspecError) as failure:
        log.warning("the profile of %s is not used: %s", reference, failure)
        return []
    if profile is None or profile.version != VERSION or profile.operation != operation:
        return []
    return list(dict.fromkeys(profile.handles))[:MOST_HANDLES]


def write_profile(store: Store, reference: str, operation: int, used: Sequence[int]) -> bool:
    """`used` first, then what the profile has had so far. Whether it was written; not to be able to is no failure."""
    handles = list(dict.fromkeys([*used, *read_profile(store, reference, operation)]))[:MOST_HANDLES]
    try:
        return store.write_profile(reference, msgspec.json.encode(_Profile(VERSION, operation, handles)))
    except (WoodfrogError, OSError) as failure:
        log.warning("the profile of %s was not written: %s", reference, failure)
        return False
