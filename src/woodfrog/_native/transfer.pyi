"""Moves GPU memory: arena, copies, digests, files. See native/transfer/README.md.

Everything that takes time releases the GIL. Offsets and sizes are in bytes. A function that moves bytes raises when
everything it had in flight has stopped; its destination then holds some of them. A range that does not fit raises
TransferError with code -EINVAL before anything moves.
"""

from collections.abc import Sequence

class TransferError(RuntimeError):
    """`code` is the driver's CUresult, or a negative errno; `call` is the function that failed."""

    code: int
    call: str

class CancelledError(TransferError):
    """Progress.cancel() was called."""

class IntegrityError(TransferError):
    """`chunk` is the index of the first chunk whose digest differs."""

    chunk: int

def driver_version() -> int:
    """As the driver gives it: 13000 is CUDA 13.0. TransferError (-ENOENT, "dlopen") without a driver."""

def device_count() -> int: ...
def blake3(data: bytes, implementation: str | None = None) -> bytes:
    """The 32-byte BLAKE3 digest of `data`; ValueError for an implementation that this processor lacks."""

def blake3_implementations() -> list[str]:
    """What this processor can run, the one in use first."""

class Progress:
    """How far an operation is. Several may share one; with bytes_total 0 each adds its own bytes when it starts."""

    def __init__(self, bytes_total: int = 0) -> None: ...
    @property
    def bytes_done(self) -> int: ...
    @property
    def bytes_total(self) -> int: ...
    @property
    def cancelled(self) -> bool: ...
    def cancel(self) -> None:
        """The operation raises CancelledError at its next chunk. From any thread."""

class Arena:
    """Host memory on a memfd. The caller decides what lies where."""

    def __init__(self, size_bytes: int, *, numa_node: int = -1, threads: int = 0, fd: int = -1) -> None:
        """size_bytes: a multiple of the page size. fd >= 0: adopts that memfd with its contents (duplicated; the
        caller's stays open), which must have exactly this size. threads 0: one a processor, from 4 to 16."""
    @property
    def size_bytes(self) -> int: ...
    @property
    def fd(self) -> int:
        """The arena's own descriptor: pass it on, do not close it. -1 once closed."""
    @property
    def numa_node(self) -> int: ...
    @property
    def huge_pages(self) -> bool: ...
    @property
    def populated_bytes(self) -> int: ...
    @property
    def registered_bytes(self) -> int: ...
    def populate(self, offset: int, size: int, progress: Progress | None = None) -> None:
        """Makes the memory present (widened to blocks of 64 MiB), keeping contents; after register() each piece of
        1 GiB is registered as it becomes complete."""
    def clear(self, offset: int, size: int, progress: Progress | None = None) -> None:
        """Overwrites with zeros. What was never touched stays untouched."""
    def register(self, ordinal: int = 0) -> None:
        """Registers with the driver (for all GPUs of this process) what is populated now, and later what becomes so."""
    def unregister(self) -> None:
        """TransferError (-EBUSY) while a transfer uses the arena."""
    def close(self) -> None:
        """Gives the memory up (its descriptor may live on elsewhere). TransferError (-EBUSY) while it is in use."""

class Memory:
    """GPU memory held by this process, made by a Device."""

    @property
    def size_bytes(self) -> int: ...
    @property
    def ordinal(self) -> int: ...
    def export_fd(self) -> int:
        """A new descriptor, the caller's to close. Created memory only: imported memory's own descriptor serves."""
    def release(self) -> None:
        """Unmaps and gives the handle up. TransferError (-EBUSY) in a transfer; a second call does nothing."""

class Device:
    """A GPU. Its primary context is retained from the first call that needs it to the end of the object."""

    def __init__(self, ordinal: int) -> None: ...
    @property
    def ordinal(self) -> int: ...
    @property
    def uuid(self) -> bytes: ...
    @property
    def name(self) -> str: ...
    @property
    def total_bytes(self) -> int: ...
    @property
    def granularity_bytes(self) -> int: ...
    def free_bytes(self) -> int: ...
    def import_memory(self, fd: int, size_bytes: int) -> Memory:
        """The caller keeps and closes fd."""
    def create_memory(self, size_bytes: int) -> Memory: ...
    def import_memories(self, fds: Sequence[int], sizes: Sequence[int]) -> list[Memory]:
        """All or none. One call for many is much cheaper than one each, and neighbours are copied as one."""
    def create_memories(self, sizes: Sequence[int]) -> list[Memory]:
        """All or none; see import_memories."""

def drain(
    extents: Sequence[tuple[Memory, int, int, int]],
    arena: Arena,
    *,
    chunk_bytes: int = ...,
    progress: Progress | None = None,
) -> None:
    """GPU to arena. extents: (memory, memory_offset, arena_offset, size); none may overlap another."""

def refill(
    extents: Sequence[tuple[Memory, int, int, int]],
    arena: Arena,
    *,
    chunk_bytes: int = ...,
    progress: Progress | None = None,
) -> None:
    """Arena to GPU; extents as for drain."""

def drain_to_file(
    pieces: Sequence[tuple[Memory, int, int]],
    fd: int,
    file_offset: int,
    arena: Arena,
    arena_offset: int,
    arena_bytes: int,
    *,
    chunk_bytes: int = ...,
    threads: int = 0,
    progress: Progress | None = None,
) -> bytes:
    """GPU to file through [arena_offset, +arena_bytes) as a ring. pieces: (memory, offset, size).

    Returns the digests, 32 bytes a chunk, in order. Every piece starts a chunk; its last one may be short.
    """

def refill_from_file(
    pieces: Sequence[tuple[Memory, int, int]],
    fd: int,
    file_offset: int,
    arena: Arena,
    arena_offset: int,
    arena_bytes: int,
    *,
    digests: bytes | None,
    chunk_bytes: int = ...,
    threads: int = 0,
    progress: Progress | None = None,
) -> None:
    """File to GPU. A chunk that does not have its digest is not copied: IntegrityError. None: nothing is compared."""

def hash_memory(
    pieces: Sequence[tuple[Memory, int, int]],
    arena: Arena,
    arena_offset: int,
    arena_bytes: int,
    *,
    chunk_bytes: int = ...,
    threads: int = 0,
    progress: Progress | None = None,
) -> bytes:
    """The digests of GPU memory as it is now, by copying it back through the ring."""

def write_arena(
    arena: Arena,
    ranges: Sequence[tuple[int, int]],
    fd: int,
    file_offset: int,
    *,
    chunk_bytes: int = ...,
    threads: int = 0,
    progress: Progress | None = None,
) -> bytes:
    """Arena to file. ranges: (offset, size); they follow each other in the file. Returns the digests."""

def read_to_arena(
    arena: Arena,
    ranges: Sequence[tuple[int, int]],
    fd: int,
    file_offset: int,
    *,
    digests: bytes | None,
    chunk_bytes: int = ...,
    threads: int = 0,
    progress: Progress | None = None,
) -> None:
    """File to arena, each chunk compared with its digest. None: nothing is compared."""

def hash_file(
    fd: int,
    offset: int,
    size_bytes: int,
    *,
    chunk_bytes: int = ...,
    threads: int = 0,
    progress: Progress | None = None,
) -> bytes:
    """The digests of [offset, +size_bytes) of a file."""

def hash_arena(
    arena: Arena,
    ranges: Sequence[tuple[int, int]],
    *,
    chunk_bytes: int = ...,
    threads: int = 0,
    progress: Progress | None = None,
) -> bytes:
    """The digests of ranges of the arena."""
