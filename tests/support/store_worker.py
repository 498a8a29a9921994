"""A process that a test can kill while it works on a store, hundreds of times: it forks a child for each order.

    python store_worker.py DIRECTORY      orders come by stdin, one a line: ACTION SEED NAME=VALUE… (environment)

For each order it prints the child's process id, and its exit status when it has ended. A child notes in DIRECTORY/log
what it has been told is done, after it was told; what it is about to take away, before. No threads before the fork.
"""

from __future__ import annotations

import os
import random
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import store_images
from store_images import CHUNK_BYTES, pattern

from woodfrog.errors import NotFoundError, RefusedError, WoodfrogError
from woodfrog.store.open import open_store
from woodfrog.store.store import Store
from woodfrog.store.tiers.disk import DiskTier

POOL = 60  # different chunks: images share most of them, so that prune finds packs that are partly needed
WAIT_S = 60.0  # for locks: several children may be at work


def data_of(seed: int) -> bytes:
    """An image's bytes: chunks of a small pool, some of its own, zeros, and a short end."""
    chosen = random.Random(seed)
    chunks = [pattern(CHUNK_BYTES, f"pool {chosen.randrange(POOL)}") for _ in range(16)]
    chunks += [pattern(CHUNK_BYTES, f"own {seed} {number}") for number in range(4)]
    chunks.append(bytes(CHUNK_BYTES))
    chosen.shuffle(chunks)
    return b"".join(chunks) + pattern(chosen.randrange(CHUNK_BYTES), f"end {seed}")


class Child:
    """One order. `url` and `other` are stores; small packs, so that an image is in several."""

    def __init__(self, directory: Path, seed: int) -> None:
        self._directory = directory
        self._random = random.Random(seed)
        self._url = os.environ.get("STORE_URL", str(directory / "store"))
        self._other = os.environ.get("OTHER_URL", str(directory / "other"))
        DiskTier.pack_bytes = 8 * CHUNK_BYTES
        if self._url.startswith("s3:") or self._other.startswith("s3:"):
            from woodfrog.store.tiers.s3 import S3Tier

            S3Tier.pack_bytes = 8 * CHUNK_BYTES

    def write(self) -> None:
        """Images, with flushes in between as a long checkpoint has them."""
        with open_store(self._url, chunk_bytes=CHUNK_BYTES) as store:
            for _ in range(3):
                seed = self._random.randrange(1 << 40)
                data = data_of(seed)
                half = 9 * CHUNK_BYTES
                with store.session(wait_s=WAIT_S) as session:
                    store_images.store_data(session, data[:half], self._random.choice(["none", "auto"]))
                    if self._random.random() < 0.5:
                        session.flush()
                    store_images.store_data(session, data[half:])
                    pairs = [(store_images.digests_of(data), store_images.sizes_of(data))]
                    name = f"image-{self._random.randrange(2)}"
                    reference = session.publish(
                        name, lambda number, data=data: store_images.manifest(data, number), pairs
                    )  # type: ignore[misc]
                self._note("there", "store", reference, seed)

    def prune(self) -> None:
        with open_store(self._url, chunk_bytes=CHUNK_BYTES) as store:
            for _ in range(2):
                self._remove_some(store)
                store.prune(store_images.digests, grace_s=0, rewrite_above=0.2, wait_s=WAIT_S)

    def repair(self) -> None:
        with open_store(self._url, chunk_bytes=CHUNK_BYTES) as store:
            store.repair(store_images.digests, wait_s=WAIT_S)

    def lose_the_index_and_repair(self) -> None:
        with open_store(self._url, chunk_bytes=CHUNK_BYTES) as store:
            lost = [key for key in store_images.index_keys(store) if self._random.random() < 0.7]
            self._note("lost", "store", "index", 0)
            store.tier.delete(lost)
            store.repair(store_images.digests, wait_s=WAIT_S)

    def copy(self) -> None:
        with (
            open_store(self._url, chunk_bytes=CHUNK_BYTES) as store,
            open_store(self._other, chunk_bytes=CHUNK_BYTES) as other,
        ):
            if len(other.list()) > 12:
                self._remove_some(other, "other")
            entries = store.list()
            for entry in self._random.sample(entries, min(3, len(entries))):
                try:
                    store.copy_image(entry.reference, other, store_images.digests, wait_s=WAIT_S)
                except (RefusedError, NotFoundError):
                    continue  # removed there once, or removed here meanwhile
                self._note("there", "other", entry.reference, -1)
            for entry in self._random.sample(other.list(), min(1, len(other.list()))):
                store_number = other.copy_image(
                    entry.reference, store, store_images.digests, name="back", wait_s=WAIT_S
                )
                self._note("there", "store", store_number.reference, -1)

    def _remove_some(self, store: Store, where: str = "store") -> None:
        entries = store.list()
        for entry in self._random.sample(entries, len(entries) // 3):
            self._note("going", where, entry.reference, 0)
            try:
                store.remove(entry.reference, wait_s=WAIT_S)
            except NotFoundError:
                continue

    def _note(self, what: str, where: str, reference: str, seed: int) -> None:
        descriptor = os.open(self._directory / "log", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        os.write(descriptor, f"{what} {where} {reference} {seed}\n".encode())
        os.close(descriptor)


def run(directory: Path, order: str) -> int:
    """In the child; its exit status."""
    action, seed, *environment = order.split()
    os.environ.update(setting.split("=", 1) for setting in environment)
    child = Child(directory, int(seed))
    actions: dict[str, Callable[[], None]] = {
        "write": child.write,
        "prune": child.prune,
        "repair": child.repair,
        "lose": child.lose_the_index_and_repair,
        "copy": child.copy,
    }
    try:
        actions[action]()
    except WoodfrogError as error:
        print(f"{action}: {type(error).__name__}: {error.reason}", file=sys.stderr, flush=True)
        return 3
    except Exception:  # noqa: BLE001 (the test is told by the status, a person by the trace)
        traceback.print_exc()
        return 4
    return 0


def main(directory: Path) -> None:
    children: dict[int, int] = {}
    for order in sys.stdin:
        if order.startswith("wait"):
            pid = int(order.split()[1])
            if pid in children:
                children.pop(pid)
                print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
            continue
        pid = os.fork()
        if pid == 0:
            os._exit(run(directory, order))
        children[pid] = pid
        print(pid, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
