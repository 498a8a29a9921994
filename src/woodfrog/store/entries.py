"""What a store says about the images in it: plain values, no files. Nothing here may open or change anything."""

from __future__ import annotations

from dataclasses import dataclass
from types import TracebackType
from typing import NamedTuple, Protocol


@dataclass(frozen=True)
class Entry:
    """One published image, without a look inside."""

    reference: str  # NAME@NUMBER
    name: str
    number: int
    size_bytes: int  # of its manifest
    created_unix_s: float  # when its manifest was published, by the clock of whatever keeps the files


class Located(NamedTuple):
    """Where chunks are, as woodfrog._native.transfer wants it: `locations` are packed Location records, one a digest;
    `packs` maps the numbers in them to readable descriptors, which the Reader owns and closes."""

    locations: bytes
    packs: dict[int, int]


class Hold(Protocol):
    """A lock on the store. `release` may be called again."""

    def check(self) -> None:
        """RefusedError when the lock may have been lost meanwhile (a lock object that could not be refreshed)."""

    def release(self) -> None: ...


class OpenManifest:
    """A manifest's bytes, and a shared lock that keeps every chunk of its image in the store until `close`."""

    def __init__(self, reference: str, data: bytes, lock: Hold) -> None:
        self.reference = reference  # NAME@NUMBER
        self.data = data
        self._lock = lock

    def close(self) -> None:
        """Calling it again does nothing."""
        self._lock.release()

    def __enter__(self) -> OpenManifest:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
