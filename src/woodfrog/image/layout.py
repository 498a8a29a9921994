"""Places and names around an image: where its manifest is, how a reference may be written, CRIU's files on a disk.

It must never follow a symbolic link, nor reach outside the directory that it is given.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from woodfrog.errors import BadImageError, UsageError

PRIVATE_FILE = 0o600
PRIVATE_DIRECTORY = 0o700


def place(store_url: str, reference: str) -> str:
    """Where the manifest of NAME@NUMBER is in a store."""
    name, _, number = reference.partition("@")
    return f"{store_url.rstrip('/')}/images/{name}/{number}"


def split_reference(reference: str) -> tuple[str | None, str]:
    """(store, reference in it) of STORE/NAME@NUMBER, and (None, reference) of anything without a '/'."""
    store, slash, rest = reference.rpartition("/")
    if not slash:
        return None, reference
    if not rest:
        raise UsageError(f"{reference!r} names a store and no image", advice="write STORE/NAME@NUMBER")
    return store or "/", rest


def create_file(directory: Path, path: str) -> int:
    """A new, empty file at that path below `directory`, its parents made. The caller owns the descriptor."""
    place_of_it = directory / path
    place_of_it.parent.mkdir(mode=PRIVATE_DIRECTORY, parents=True, exist_ok=True)
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.open(place_of_it, flags, PRIVATE_FILE)


def plain_files(directory: Path, prefix: str = "") -> Iterator[tuple[str, int]]:
    """(path, size in bytes) of every file below `directory`, sorted. BadImageError for anything but plain files and
    directories: only those can be in an image."""
    with os.scandir(directory) as entries:
        found = sorted(entries, key=lambda entry: entry.name)
    for entry in found:
        path = f"{prefix}{entry.name}"
        if entry.is_dir(follow_symlinks=False):
            yield from plain_files(Path(entry.path), f"{path}/")
        elif entry.is_file(follow_symlinks=False):
            yield path, entry.stat(follow_symlinks=False).st_size
        else:
            raise BadImageError(f"{path} is a symbolic link or no regular file: only plain files can be in an image")
