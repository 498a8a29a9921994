"""Moves GPU memory: arena, copies, digests, files. See native/transfer/README.md.

Everything that takes time releases the GIL. Offsets and sizes are in bytes. A function that moves bytes raises when
everything it had in flight has stopped; its destination then holds some of them. A range that does not fit raises
TransferError with code -EINVAL before anything moves.
"""

from collections.abc import Mapping, Sequence

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
    @property
    def hashes(self) -> str:
        """How hash_device computes digests of its memory: "gpu" by a kernel, "cpu" by threads on the simulated GPU's
        memory, "copy" through a bounded host buffer (no kernel for this GPU and driver)."""
    def free_bytes(self) -> int: ...
    def import_memory(self, fd: int, size_bytes: int) -> Memory:
        """The caller keeps and closes fd."""
    def view_memory(self, address: int, size_bytes: int) -> Memory:
        """Memory that the driver has mapped here (driver.storage) and unmaps: it must stay until no copy uses it."""
    def create_memory(self, size_bytes: int) -> Memory: ...
    def import_memories(self, fds: Sequence[int], sizes: Sequence[int]) -> list[Memory]:
        """All or none. One call for many is much cheaper than one each, and neighbours are copied as one."""
    def create_memories(self, sizes: Sequence[int], host_nodes: Sequence[int] = ...) -> list[Memory]:
        """All or none; see import_memories. `host_nodes`: for each the NUMA node of host memory instead, or -1."""

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

def hash_device(
    pieces: Sequence[tuple[Memory, int, int]],
    *,
    chunk_bytes: int,
    how: str = "auto",
    variant: str = "",
    threads: int = 0,
    progress: Progress | None = None,
) -> bytes:
    """The digests of all chunks of GPU memory as it is now, 32 bytes each, computed where the memory is.

    Pieces are cut as in drain_to_file; one without bytes has no chunk. chunk_bytes: a power of two from 4 KiB to
    64 MiB. how: "auto" is Device.hashes of each piece's GPU; "gpu", "cpu", "copy" force one way (-ENOTSUP where it does
    not exist). variant: one of hash_variants(), "" for the fastest known one; "gpu" only. threads: "cpu" and "copy".
    Uses 4 MiB of GPU memory beside the kernels' code, none if there is none, and keeps them for the next call.
    """

def hash_variants() -> list[str]:
    """The hash kernels that were built into this module, the one in use first; empty when it was built without nvcc.
    For measurements: all give the same digests."""

def read_device(pieces: Sequence[tuple[Memory, int, int]], *, blocks_per_multiprocessor: int = 0) -> None:
    """Reads every whole 16 bytes of GPU memory by a kernel and throws them away: the ceiling that benchmarks compare
    hash_device with. TransferError (-ENOTSUP) where there is no kernel. Piece offsets: multiples of 16."""

def drain_chunks(
    pieces: Sequence[tuple[Memory, int, int]],
    positions: bytes,
    arena: Arena,
    ranges: Sequence[tuple[int, int]],
    *,
    chunk_bytes: int,
    gather: str = "auto",
    staging_bytes: int = ...,
    background: bool = False,
    most_bytes_per_s: int = 0,
    progress: Progress | None = None,
) -> bytes:
    """Some chunks of GPU memory to the arena. Returns the arena offset of each, as u64, in their order.

    positions: u32 numbers of chunks, ascending, counted through all pieces (which are cut as in drain_to_file).
    ranges: (offset, size) of the arena, offsets on pages; each holds size // chunk_bytes slots of chunk_bytes. The
    chunks take slots one after the other; what a short chunk leaves of its slot is undefined. chunk_bytes: as for
    hash_device. gather: "auto"; "kernel" or "none" force or forbid that short runs are gathered in GPU memory and
    copied in large transfers ("kernel": -ENOTSUP where there is none). staging_bytes: of each of two buffers in GPU
    memory; without room for them every run is copied by itself. background: others use the bus, at most 12 MiB are
    under way at a time. most_bytes_per_s: of each GPU; 0: no bound.
    """

def capture_chunks(
    pieces: Sequence[tuple[Memory, int, int]],
    positions: bytes,
    slots: Sequence[tuple[Memory, int, int]],
    *,
    chunk_bytes: int,
    gather: str = "auto",
    progress: Progress | None = None,
) -> None:
    """Some chunks of GPU memory to other memory of the same GPU.

    positions: as for drain_chunks. slots: (memory, offset, size), each of size // chunk_bytes slots, offsets multiples
    of 16; the chunks take them one after the other, and what a short chunk leaves of its slot becomes zero. None of
    this memory may be that of a piece. gather: "kernel" or "none" force or forbid that short runs are copied by a
    kernel.
    """

class Guard:
    """What of a running target's snapshot is captured, shared with the target through a page (native/wire/guard.h). A
    run is (first, count, first unit, units): chunks first … first+count-1 of a part's positions. Each chunk is handed
    out once. From any thread."""

    def __init__(self, parts: Sequence[tuple[Sequence[int], bytes]], *, chunk_bytes: int) -> None:
        """parts: the sizes of pieces, which are cut as by drain_to_file, and the positions (u32, ascending, counted
        through them) of the chunks that have to be captured."""
    @property
    def fd(self) -> int:
        """The page's own descriptor: pass it on, do not close it."""
    @property
    def unit_bytes(self) -> int: ...
    def places(self, part: int) -> list[tuple[int, int]]:
        """First unit and number of units of each piece of a part."""
    def take(self, part: int, most_chunks: int) -> list[tuple[int, int, int, int]]:
        """The next runs that nobody has taken, in the order of the memory; at least a unit. [] when there are none."""
    def take_wanted(self, part: int, most_chunks: int) -> list[tuple[int, int, int, int]]:
        """The same of what the target waits for; waits for that. [] when it is over."""
    def captured(self, part: int, runs: Sequence[tuple[int, int, int, int]]) -> None:
        """The target may write there."""
    def left(self, part: int) -> int:
        """Chunks that are not captured yet, taken or not."""
    def finish(self) -> None:
        """Nobody waits any more."""
    @property
    def waits(self) -> int:
        """Calls of the target that waited, as it says itself; so are the next two."""
    @property
    def waited_s(self) -> float: ...
    @property
    def given_up(self) -> int:
        """Calls that went on without what they waited for."""

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

# Packs and the chunk index: native/packs/README.md, docs/format.md. Packed little-endian arrays travel as bytes:
#   chunk     48 bytes  <32sQII    digest, offset in sources[source], size, source
#   record    56 bytes  <32sQIIII  digest, offset in the pack, stored size, raw size, encoding, 0
#   location  32 bytes  <QIIIIQ    offset in the pack, stored size, raw size, encoding, pack, 0
#   digests   32 bytes each; sizes and positions: uint32 each
# Encodings: 0 raw, 1 lz4, 2 zstd, 3 split-zstd. Location.pack: the caller's number of the pack, or:

ABSENT: int
"""Location.pack of a digest that the index does not know; the location's other fields are 0."""
ZERO: int
"""Location.pack of a chunk of zeros: it is nowhere stored. `raw` is its size."""

def encodings() -> list[str]:
    """What this machine can write and read: "raw", and "lz4", "zstd", "split-zstd" where their library is found."""

class ChunkIndex:
    """Which pack holds a digest, and where. About 60 bytes a chunk. From any thread, several at once."""

    def __init__(self, chunk_bytes: int) -> None:
        """chunk_bytes: the size of a full chunk, for recognising chunks of zeros; 4 KiB to 64 MiB."""
    @property
    def chunk_bytes(self) -> int: ...
    @property
    def memory_bytes(self) -> int:
        """What its tables take, in bytes."""
    def __len__(self) -> int:
        """The number of different digests."""
    def add(self, pack: int, records: bytes) -> None:
        """Adds what write_pack or scan_pack returned, as pack number `pack` (below ZERO). A digest that another pack
        holds too is found there first, and here once that pack is removed. TransferError (-EINVAL): the records make
        no sense, nothing was added."""
    def remove_pack(self, pack: int) -> int:
        """Forgets a pack; returns how many of its chunks no other pack holds (they are ABSENT from now on)."""
    def find(self, digests: bytes, sizes: bytes | None = None) -> bytes:
        """A location a digest. With the chunks' sizes also short chunks of zeros are recognised as ZERO."""
    def missing(self, digests: bytes, sizes: bytes | None = None) -> bytes:
        """The positions, ascending, of the first occurrence of each digest that is neither known nor zeros."""
    def digests(self) -> bytes:
        """All digests, each once, in no particular order."""

def choose_file_io(choice: str) -> None:
    """How packs are written and read from now on in this process: "uring" (each thread has several requests in flight;
    TransferError where the kernel has none for us), "threads" (each thread waits for each), or "auto", which is the one
    that measured better where it can be had. At the start the environment variable WOODFROG_FILE_IO says it. Files in
    memory, and what goes through the page cache, are always read and written by threads."""

def file_io() -> str:
    """ "uring" or "threads": what would be used now."""

def uring_trouble() -> str | None:
    """Why this process cannot use io_uring; None if it can. Asked of the kernel once."""

def uring_requests() -> int:
    """How many requests the rings of this process have finished."""

def select_rows(table: bytes, positions: bytes, row_bytes: int) -> bytes:
    """The rows of a packed table (rows of row_bytes, back to back) at these positions (u32), in their order."""

def write_pack(
    fd: int,
    chunks: bytes,
    sources: Sequence[Arena | int],
    *,
    compress: str = "none",
    level: int = 0,
    cached: bool = False,
    threads: int = 0,
    progress: Progress | None = None,
) -> tuple[bytes, bytes]:
    """Writes chunks to the end of a file that is empty or holds what earlier calls wrote; nothing is synced.

    Returns a record a chunk, in the order of `chunks`, and the 32-byte name that the whole file now has as a pack.
    sources are arenas and descriptors of files, read through the page cache. Each chunk is compared with its digest on
    the way: IntegrityError. compress: "none", "lz4", "zstd" (split-zstd where that is smaller) or "auto" (per segment
    what pays, of what encodings() has); a chunk that would not get a sixteenth smaller is stored raw. level: of zstd,
    1 to 19; 0 is 1. cached: through the page cache, for a file that is read next and never synced. One pack is written
    by one call at a time. After a failure the file is as long as before.
    """

def scan_pack(
    fd: int, *, salvage: bool = False, contents: bool = False, threads: int = 0, progress: Progress | None = None
) -> tuple[bytes, bytes]:
    """Records (in file order) and name of a pack, from its headers alone; the caller compares the name.

    contents: every chunk is read and compared too. IntegrityError says what is damaged; its `chunk` is the number of
    chunks before it. salvage: what is damaged is left out instead, contents are always read, and the name is that of
    the headers found, which is another one if any was lost.
    """

def check_packs(
    digests: bytes, locations: bytes, packs: Mapping[int, int], *, threads: int = 0, progress: Progress | None = None
) -> list[int]:
    """The positions, ascending, whose stored bytes cannot be read or do not have their digest; ABSENT ones too."""

def refill_from_packs(
    pieces: Sequence[tuple[Memory, int, int]],
    digests: bytes,
    locations: bytes,
    packs: Mapping[int, int],
    arena: Arena,
    arena_offset: int,
    arena_bytes: int,
    *,
    chunk_bytes: int,
    check: bool = True,
    threads: int = 0,
    progress: Progress | None = None,
) -> None:
    """Packs to GPU through [arena_offset, +arena_bytes) as a ring. pieces are cut as by drain_to_file, a digest and a
    location a chunk; packs: number to descriptor. A chunk that does not have its digest is not copied: IntegrityError.
    Without `check` nothing is compared, which is then the caller's duty (hash_device, once all is there).
    ZERO chunks are set on the GPU, nothing is read. A chunk that is ABSENT: TransferError (-ENOENT), nothing moved."""

def refill_arena_from_packs(
    arena: Arena,
    ranges: Sequence[tuple[int, int]],
    digests: bytes,
    locations: bytes,
    packs: Mapping[int, int],
    *,
    chunk_bytes: int,
    threads: int = 0,
    progress: Progress | None = None,
) -> None:
    """Packs to arena; ranges: (offset, size), cut into chunks each. Otherwise as refill_from_packs."""

def extract_from_packs(
    pieces: Sequence[tuple[int, int, int]],
    digests: bytes,
    locations: bytes,
    packs: Mapping[int, int],
    *,
    chunk_bytes: int,
    sizes: bytes | None = None,
    threads: int = 0,
    progress: Progress | None = None,
) -> None:
    """Packs to files. pieces: (descriptor, offset, size), cut into chunks each, or, with `sizes` (packed u32), into
    chunks of these sizes through all pieces, each 1 … chunk_bytes and all but a piece's last multiples of 4096. Files
    become long enough; ZERO chunks become holes. Nothing is synced. Otherwise as refill_from_packs."""

def hash_pieces(
    pieces: Sequence[tuple[int, int, int]],
    *,
    chunk_bytes: int,
    sizes: bytes | None = None,
    threads: int = 0,
    progress: Progress | None = None,
) -> bytes:
    """The digests of the chunks of file ranges (descriptor, offset, size), read through the page cache. Chunks are cut
    as by extract_from_packs."""

def userfaultfd_trouble() -> str:
    """Why this process cannot have a userfaultfd, as the kernel says it; empty when it can."""

def save_pages(pid: int, fd: int, pieces: bytes, *, threads: int = 0, progress: Progress | None = None) -> None:
    """Memory of a process that stands still, into a file that is as large as that already. pieces: packed u64
    (address, size, offset in the file), whole pages, ascending. TransferError: -ESRCH, -EPERM, -ENOSPC."""

def fill_pages(uffd: int, fd: int, pieces: bytes, *, threads: int = 0, progress: Progress | None = None) -> None:
    """Pages of a file into the process that the userfaultfd is of, where all of them are registered; pieces as for
    save_pages. TransferError (-ESRCH: it has ended)."""

def answer_page_faults(uffd: int, fd: int, pieces: bytes, stop_fd: int) -> None:
    """Blocks until `stop_fd` can be read. Until then a thread of that process that touches a page of `pieces` gets it
    from the file, and another page as zeros."""
