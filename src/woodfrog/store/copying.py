"""Copying one image from a store into another: only the chunks that are absent there, the manifest last.

Each pack is durable and indexed there before the next one is begun, so that what an interrupted copy has sent is found
by the next and not sent again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from woodfrog._native.transfer import Arena, IntegrityError, Progress
from woodfrog.errors import BadImageError, RefusedError
from woodfrog.faults import fault_point
from woodfrog.store import moving
from woodfrog.store.entries import OpenManifest
from woodfrog.store.reader import Reader
from woodfrog.store.records import DIGEST_BYTES, batches, positions_of, select_rows
from woodfrog.store.session import WriteSession
from woodfrog.store.tiers.protocol import Digests


@dataclass(frozen=True)
class CopyResult:
    """`reference` is the image's in the store that it was copied to; bytes are raw ones."""

    reference: str
    chunks: int
    copied_chunks: int
    copied_bytes: int
    already_there: bool  # the same manifest was there: nothing was done


def refuse_other_chunk_size(source_chunk_bytes: int, source_url: str, to_chunk_bytes: int, to_url: str) -> None:
    """RefusedError: chunks of another size would share nothing with what is there."""
    if source_chunk_bytes != to_chunk_bytes:
        raise RefusedError(
            f"{source_url} has chunks of {source_chunk_bytes} bytes and {to_url} of {to_chunk_bytes}, and an image's "
            "digests are those of its chunks",
            advice="copy it into a store that was made with the same chunk size",
        )


def copy_image(
    opened: OpenManifest,
    reader: Reader,
    session: WriteSession,
    digests: Digests,
    *,
    chunk_bytes: int,
    spool_bytes: int,
    name: str | None,
    rename: Callable[[bytes, str, int], bytes] | None,
    compress: str,
    level: int,
    progress: Progress | None = None,
) -> CopyResult:
    """See Store.copy_image. `session` writes into the other store; `spool_bytes`: raw bytes for each pack there. The
    caller closes all three."""
    columns = list(digests(opened.data))
    copied_chunks = copied_bytes = 0

    def write(chunks: bytes, sources: Sequence[Arena | int]) -> None:
        session.write(chunks, sources, compress=compress, level=level, progress=progress)

    for some, sizes in columns:
        for positions in batches(positions_of(session.missing(some, sizes)), positions_of(sizes), spool_bytes):
            wanted = select_rows(some, positions, DIGEST_BYTES)
            located = reader.locate(wanted, select_rows(sizes, positions, 4))
            fault_point("store.copy.located")
            try:
                moving.move(wanted, located.locations, located.packs, session.tier, chunk_bytes, write)
            except IntegrityError as error:
                raise BadImageError(
                    f"{opened.reference} was not copied: a chunk of it is damaged in the store that it comes from",
                    advice="`woodfrog verify` there says which; `woodfrog repair` saves what can be saved",
                ) from error
            session.flush()
            fault_point("store.copy.flushed")
            copied_chunks += len(positions)
            copied_bytes += sum(positions_of(sizes)[at] for at in positions)
    fault_point("store.copy.chunks")
    if name is None:
        reference = opened.reference
        published = session.publish_as(reference, opened.data, columns)
    else:
        target = name

        def manifest(number: int) -> bytes:
            return opened.data if rename is None else rename(opened.data, target, number)

        reference, published = session.publish(name, manifest, columns), True
    chunks = sum(len(some) for some, _ in columns) // DIGEST_BYTES
    return CopyResult(reference, chunks, copied_chunks, copied_bytes, not published)
