"""Where a store of a test is, on whatever tier."""

from __future__ import annotations

from collections.abc import Callable

from store_images import CHUNK_BYTES

from woodfrog.store.open import open_store
from woodfrog.store.store import Store


class Place:
    """Where a store is. Opens it any number of times, and reaches past it to the files."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._opened: list[Store] = []

    def open(self) -> Store:
        self._opened.append(open_store(self.url, chunk_bytes=CHUNK_BYTES))
        return self._opened[-1]

    def damage(self, key: str, change: Callable[[bytes], bytes]) -> None:
        """Replaces the bytes of a file by what `change` makes of them."""
        store = self.open()
        data = store.tier.get(key, 1 << 30)
        assert data is not None
        if store.path is not None:
            (store.path / key).write_bytes(change(data))
        else:
            store.tier.replace(key, change(data))

    def close(self) -> None:
        for store in self._opened:
            store.close()
