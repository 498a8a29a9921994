"""A process that a test can kill while it brings an image into a store in S3.

    python s3_writer.py commit|push URL PACK_BYTES SIZE_BYTES [SOURCE]

`commit` writes one image straight into the store; `push` copies small@1 of the store SOURCE, which holds the same.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import store_images
from store_images import CHUNK_BYTES, pattern

from woodfrog.store import session
from woodfrog.store.open import open_store
from woodfrog.store.tiers.s3 import S3Tier


def main(action: str, url: str, pack_bytes: int, size_bytes: int, source: str) -> None:
    S3Tier.pack_bytes = pack_bytes
    session.INDEX_EVERY_S = 0.0  # what the test waits for is a pack
    with open_store(url, chunk_bytes=CHUNK_BYTES) as store:
        if action == "commit":
            store_images.write(store, pattern(size_bytes, "large"))
            return
        with open_store(source, chunk_bytes=CHUNK_BYTES) as local:
            local.copy_image("small@1", store, store_images.digests, compress="none")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), (sys.argv[5:] or [""])[0])
