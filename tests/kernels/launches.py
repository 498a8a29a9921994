"""Random launches of the corpus: for each kernel, shapes, arguments and memory with which it stays inside its arrays.

Arrays are exactly as long as the kernel may reach, with gaps between them: a template that names too little misses an
access, one that names another array is seen too.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from dataclasses import dataclass, field

Dimensions = tuple[int, int, int]


@dataclass
class Made:
    """A launch and the memory it runs on."""

    grid: Dimensions
    block: Dimensions
    shared_bytes: int
    parameters: bytes
    memory: list[tuple[int, bytes]] = field(default_factory=list)

    @property
    def allocations(self) -> list[tuple[int, int]]:
        return [(address, len(content)) for address, content in self.memory]


class Maker:
    """Places arrays and packs parameters for one launch."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.memory: list[tuple[int, bytes]] = []
        self._next = 0x7F0000000000 + rng.randrange(1 << 20) * 512

    def array(self, size_bytes: int) -> int:
        """An array of zeros."""
        return self.content(bytes(max(size_bytes, 1)))

    def content(self, data: bytes) -> int:
        address = self._next
        self.memory.append((address, data))
        self._next += (len(data) + 1023) // 512 * 512
        return address

    def ints(self, values: list[int], form: str = "i") -> int:
        return self.content(struct.pack(f"<{max(len(values), 1)}{form}", *(values or [0])))

    def made(
        self, grid: Dimensions | int, block: Dimensions | int, *parameters: tuple[str, object], shared_bytes: int = 0
    ) -> Made:
        packed = b""
        for form, value in parameters:
            data = value if isinstance(value, bytes) else struct.pack(f"<{form}", value)
            alignment = 8 if isinstance(value, bytes) else len(data)
            packed += bytes(-len(packed) % alignment) + data
        three = [d if isinstance(d, tuple) else (d, 1, 1) for d in (grid, block)]
        return Made(three[0], three[1], shared_bytes, packed, self.memory)


Generator = Callable[[Maker, random.Random], Made]
GENERATORS: dict[str, Generator] = {}


def launch_of(kernel: str) -> Callable[[Generator], Generator]:
    def keep(generator: Generator) -> Generator:
        GENERATORS[kernel] = generator
        return generator

    return keep


def make(kernel: str, seed: int) -> Made:
    """The launch number `seed` of a kernel: the same every time."""
    rng = random.Random(f"{kernel} {seed}")
    return GENERATORS[kernel](Maker(rng), rng)


def _p(address: int) -> tuple[str, object]:
    return "Q", address


def _i(value: int) -> tuple[str, object]:
    return "i", value


def _line(r: random.Random, n: int, *, each: int = 1) -> tuple[int, int]:
    """A grid and block that cover n elements, or somewhat more."""
    block = r.choice((1, 7, 32, 64, 96, 128, 256))
    return max(1, -(-n // (block * each))) + r.randrange(2), block


def _any_line(r: random.Random) -> tuple[int, int]:
    return r.randrange(1, 6), r.choice((1, 5, 32, 64, 128))


def _simple(
    kernel: str, build: Callable[[Maker, random.Random, int], tuple[tuple[str, object], ...]], each: int = 1
) -> None:
    """A kernel with one thread for each of n elements."""

    def generator(m: Maker, r: random.Random) -> Made:
        n = r.choice((1, r.randrange(1, 40), r.randrange(1, 900)))
        parameters = build(m, r, n)
        return m.made(*_line(r, n, each=each), *parameters)

    GENERATORS[kernel] = generator


def _strided_loop(kernel: str, build: Callable[[Maker, random.Random, int], tuple[tuple[str, object], ...]]) -> None:
    """A kernel whose threads stride over n elements, whatever the grid."""

    def generator(m: Maker, r: random.Random) -> Made:
        n = r.choice((1, r.randrange(1, 40), r.randrange(1, 900)))
        parameters = build(m, r, n)
        return m.made(*_any_line(r), *parameters)

    GENERATORS[kernel] = generator


_simple("saxpy", lambda m, r, n: (_i(n), ("f", 2.0), _p(m.array(4 * n)), _p(m.array(4 * n))))
_strided_loop("fill_grid_stride", lambda m, r, n: (_i(n), ("f", 2.0), _p(m.array(4 * n))))
_strided_loop("add_long_index", lambda m, r, n: (("Q", n), *(_p(m.array(4 * n)) for _ in range(3))))
_simple("add_vector4", lambda m, r, n: (_i(n), _p(m.array(16 * n)), _p(m.array(16 * n))))
_simple("unrolled_by_four", lambda m, r, n: (_i(n), _p(m.array(4 * n)), _p(m.array(4 * n))), each=4)
_simple("chunk_a_thread", lambda m, r, n: (_i(n), _i(r.randrange(1, 6)), _p(m.array(4 * n)), _p(m.array(4 * n))))
_simple("reversed", lambda m, r, n: (_i(n), _p(m.array(4 * n)), _p(m.array(4 * n))))
_simple("bytes_to_words", lambda m, r, n: (_i(n), _p(m.array(n)), _p(m.array(4 * n))))
_simple("interleave", lambda m, r, n: (_i(n), _p(m.array(8 * n)), _p(m.array(8 * n)), _p(m.array(16 * n))))
_simple("every_second", lambda m, r, n: (_i(n), _p(m.array(2 * n)), _p(m.array(2 * n))))
_simple("divided_by_seven", lambda m, r, n: (_i(n), _p(m.array(4 * (n // 7 + 1))), _p(m.array(4 * n))))
_simple("guarded_range", lambda m, r, n: (_i(n), _p(m.array(4 * n)), _p(m.array(4 * n))))
_strided_loop("backwards", lambda m, r, n: (_i(n), _p(m.array(4 * n))))


@launch_of("strided")
def _strided(m: Maker, r: random.Random) -> Made:
    n, stride = r.randrange(1, 200), r.randrange(1, 9)
    return m.made(*_line(r, n), _i(n), _i(stride), _p(m.array(4 * (n * stride + 2))), _p(m.array(4 * n * stride)))


def _plane(r: random.Random) -> tuple[int, int, Dimensions, Dimensions]:
    width, height = r.randrange(1, 70), r.randrange(1, 40)
    bx, by = r.choice(((8, 8), (16, 4), (32, 2), (5, 3)))
    return width, height, (-(-width // bx) + r.randrange(2), -(-height // by) + r.randrange(2), 1), (bx, by, 1)


@launch_of("two_dimensions")
def _two_dimensions(m: Maker, r: random.Random) -> Made:
    width, height, grid, block = _plane(r)
    pitch = width + r.randrange(10)
    size = 4 * pitch * height
    return m.made(grid, block, _i(width), _i(height), _i(pitch), _p(m.array(size)), _p(m.array(size)))


@launch_of("three_dimensions")
def _three_dimensions(m: Maker, r: random.Random) -> Made:
    nx, ny, nz = r.randrange(1, 20), r.randrange(1, 12), r.randrange(1, 9)
    size = 4 * nx * ny * nz
    grid = (-(-nx // 8), -(-ny // 4), -(-nz // 2))
    return m.made(grid, (8, 4, 2), _i(nx), _i(ny), _i(nz), _p(m.array(size)), _p(m.array(size)))


@launch_of("split_index")
def _split_index(m: Maker, r: random.Random) -> Made:
    width = r.choice((1, 4, 8, 13, 32))
    n, pitch = r.choice((width * r.randrange(1, 20), r.randrange(1, 300))), width + r.randrange(5)
    rows = (n - 1) // width + 1
    parameters = (_i(n), _i(width), _i(pitch), _p(m.array(4 * n)), _p(m.array(4 * rows * pitch)))
    return m.made(*_line(r, n), *parameters)


@launch_of("clamped")
def _clamped(m: Maker, r: random.Random) -> Made:
    n, length = r.randrange(1, 300), r.randrange(1, 300)
    return m.made(*_line(r, n), _i(n), _i(length), _p(m.array(4 * length)), _p(m.array(4 * n)))


@launch_of("one_thread")
def _one_thread(m: Maker, r: random.Random) -> Made:
    index = r.randrange(100)
    return m.made(*_any_line(r), _p(m.array(4 * index + 4)), _i(index))


@launch_of("select_source")
def _select_source(m: Maker, r: random.Random) -> Made:
    n = r.randrange(1, 300)
    return m.made(*_line(r, n), _i(n), _i(r.randrange(0, n + 1)), *(_p(m.array(4 * n)) for _ in range(3)))


# blocks.cu


@launch_of("transpose")
def _transpose(m: Maker, r: random.Random) -> Made:
    width, height = r.randrange(1, 70), r.randrange(1, 70)
    grid = (-(-width // 16), -(-height // 16), 1)
    size = 4 * width * height
    return m.made(grid, (16, 16, 1), _i(width), _i(height), _p(m.array(size)), _p(m.array(size)))


@launch_of("transpose_naive")
def _transpose_naive(m: Maker, r: random.Random) -> Made:
    width, height, grid, block = _plane(r)
    size = 4 * width * height
    return m.made(grid, block, _i(width), _i(height), _p(m.array(size)), _p(m.array(size)))


@launch_of("reduce_block")
def _reduce_block(m: Maker, r: random.Random) -> Made:
    n, grid, block = r.randrange(1, 900), r.randrange(1, 5), r.choice((32, 64, 128))
    return m.made(grid, block, _i(n), _p(m.array(4 * n)), _p(m.array(4 * grid)), shared_bytes=4 * block)


_simple("reduce_warp_atomic", lambda m, r, n: (_i(n), _p(m.array(4 * n)), _p(m.array(4))))


@launch_of("scan_block")
def _scan_block(m: Maker, r: random.Random) -> Made:
    n = r.randrange(1, 600)
    grid = -(-n // 256)
    return m.made(grid, 256, _i(n), _p(m.array(4 * n)), _p(m.array(4 * n)), _p(m.array(4 * grid)))


@launch_of("scan_add")
def _scan_add(m: Maker, r: random.Random) -> Made:
    n = r.randrange(1, 600)
    grid, block = _line(r, n)
    return m.made(grid, block, _i(n), _p(m.array(4 * grid)), _p(m.array(4 * n)))


_simple("stencil_1d", lambda m, r, n: (_i(n), _p(m.array(4 * n)), _p(m.array(4 * n))))


@launch_of("stencil_2d")
def _stencil_2d(m: Maker, r: random.Random) -> Made:
    width, height, grid, block = _plane(r)
    size = 4 * width * height
    return m.made(grid, block, _i(width), _i(height), _p(m.array(size)), _p(m.array(size)))


@launch_of("stencil_3d_sweep")
def _stencil_3d_sweep(m: Maker, r: random.Random) -> Made:
    nx, ny, nz = r.randrange(1, 20), r.randrange(1, 12), r.randrange(2, 9)
    size = 4 * nx * ny * nz
    grid = (-(-nx // 8), -(-ny // 4), 1)
    return m.made(grid, (8, 4, 1), _i(nx), _i(ny), _i(nz), _p(m.array(size)), _p(m.array(size)))


@launch_of("convolution_rows")
def _convolution_rows(m: Maker, r: random.Random) -> Made:
    width, height, radius = r.randrange(1, 80), r.randrange(1, 5), r.randrange(0, 4)
    size = 4 * width * height
    grid, block = _line(r, width)
    parameters = (
        _i(width),
        _i(height),
        _i(radius),
        _p(m.array(size)),
        _p(m.array(4 * (2 * radius + 1))),
        _p(m.array(size)),
    )
    return m.made((grid, height, 1), block, *parameters)


def _matrices(m: Maker, r: random.Random, tile: Dimensions) -> Made:
    rows, columns, depth = r.randrange(1, 40), r.randrange(1, 40), r.randrange(1, 40)
    a, b, c = m.array(4 * rows * depth), m.array(4 * depth * columns), m.array(4 * rows * columns)
    grid = (-(-columns // tile[0]), -(-rows // tile[1]), 1)
    return m.made(grid, tile, _p(a), _p(b), _p(c), _i(rows), _i(columns), _i(depth))


GENERATORS["matmul_naive"] = lambda m, r: _matrices(m, r, (8, 4, 1))
GENERATORS["matmul_tiled"] = lambda m, r: _matrices(m, r, (16, 16, 1))


@launch_of("softmax_rows")
def _softmax_rows(m: Maker, r: random.Random) -> Made:
    rows, columns = r.randrange(1, 5), r.randrange(1, 200)
    size = 4 * rows * columns
    return m.made(rows, r.choice((32, 64)), _i(columns), _p(m.array(size)), _p(m.array(size)))


@launch_of("layer_norm")
def _layer_norm(m: Maker, r: random.Random) -> Made:
    rows, columns = r.randrange(1, 5), r.randrange(1, 200)
    size = 4 * rows * columns
    one = 4 * columns
    parameters = (_i(columns), _p(m.array(size)), _p(m.array(one)), _p(m.array(one)), _p(m.array(size)))
    return m.made(rows, r.choice((32, 64)), *parameters)


@launch_of("attention_row")
def _attention_row(m: Maker, r: random.Random) -> Made:
    heads, length, size = r.randrange(1, 4), r.randrange(1, 7), r.randrange(1, 17)
    arrays = [m.array(4 * heads * length * size) for _ in range(4)]
    return m.made((length, heads, 1), 16, _i(heads), _i(length), _i(size), *map(_p, arrays))


@launch_of("rope")
def _rope(m: Maker, r: random.Random) -> Made:
    tokens, heads, half = r.randrange(1, 5), r.randrange(1, 4), r.randrange(1, 33)
    return m.made(
        (tokens, heads, 1),
        32,
        _i(heads),
        _i(half),
        _p(m.array(4 * tokens * half)),
        _p(m.array(8 * tokens * heads * half)),
    )


@launch_of("copy_async")
def _copy_async(m: Maker, r: random.Random) -> Made:
    n = r.randrange(1, 400)
    return m.made(-(-n // 128), 128, _i(n), _p(m.array(16 * n)), _p(m.array(16 * n)))


@launch_of("double_buffered")
def _double_buffered(m: Maker, r: random.Random) -> Made:
    n = r.randrange(1, 400)
    return m.made(1, 64, _i(n), _p(m.array(4 * n)), _p(m.array(4 * n)))


# irregular.cu


@launch_of("gather")
def _gather(m: Maker, r: random.Random) -> Made:
    n, length = r.randrange(1, 200), r.randrange(1, 100)
    index = m.ints([r.randrange(length) for _ in range(n)])
    return m.made(*_line(r, n), _i(n), _p(index), _p(m.array(4 * length)), _p(m.array(4 * n)))


@launch_of("scatter")
def _scatter(m: Maker, r: random.Random) -> Made:
    n, length = r.randrange(1, 200), r.randrange(1, 100)
    index = m.ints([r.randrange(length) for _ in range(n)], "q")
    return m.made(*_line(r, n), _i(n), _p(index), _p(m.array(4 * n)), _p(m.array(4 * length)))


def _embeddings(m: Maker, r: random.Random, backward: bool) -> Made:
    tokens, width, words = r.randrange(1, 6), r.randrange(1, 70), r.randrange(1, 9)
    ids = m.ints([r.randrange(words) for _ in range(tokens)])
    table, out = m.array(4 * words * width), m.array(4 * tokens * width)
    arrays = (out, table) if backward else (table, out)
    return m.made(tokens, r.choice((16, 32)), _i(tokens), _i(width), _p(ids), *map(_p, arrays))


GENERATORS["embedding"] = lambda m, r: _embeddings(m, r, False)
GENERATORS["embedding_backward"] = lambda m, r: _embeddings(m, r, True)
_strided_loop("histogram_bytes", lambda m, r, n: (_i(n), _p(m.content(r.randbytes(n))), _p(m.array(1024))))


@launch_of("histogram_shared")
def _histogram_shared(m: Maker, r: random.Random) -> Made:
    n, bins = r.randrange(1, 300), r.randrange(1, 100)
    values = m.ints([r.randrange(bins) for _ in range(n)])
    return m.made(*_any_line(r), _i(n), _i(bins), _p(values), _p(m.array(4 * bins)), shared_bytes=4 * bins)


@launch_of("bitonic_step")
def _bitonic_step(m: Maker, r: random.Random) -> Made:
    n = 1 << r.randrange(1, 9)
    k = 1 << r.randrange(1, n.bit_length())
    j = k >> r.randrange(1, k.bit_length())
    return m.made(*_line(r, n), _i(n), _i(j), _i(k), _p(m.ints([r.randrange(-99, 99) for _ in range(n)])))


@launch_of("sparse_rows")
def _sparse_rows(m: Maker, r: random.Random) -> Made:
    rows, columns = r.randrange(1, 40), r.randrange(1, 40)
    starts = [0]
    for _ in range(rows):
        starts.append(starts[-1] + r.randrange(6))
    count = starts[-1]
    index = m.ints([r.randrange(columns) for _ in range(count)])
    arrays = (m.ints(starts), index, m.array(4 * count), m.array(4 * columns), m.array(4 * rows))
    return m.made(*_line(r, rows), _i(rows), *map(_p, arrays))


@launch_of("hash_insert")
def _hash_insert(m: Maker, r: random.Random) -> Made:
    n = r.randrange(1, 60)
    mask = (1 << (2 * n).bit_length()) - 1
    keys = m.ints([r.randrange(1 << 31) for _ in range(n)], "I")
    return m.made(*_line(r, n), _i(n), ("I", mask), _p(keys), _p(m.array(4 * (mask + 1))))


@launch_of("list_sum")
def _list_sum(m: Maker, r: random.Random) -> Made:
    lists, nodes = r.randrange(1, 9), r.randrange(1, 30)
    base = m.array(16 * nodes)
    order = list(range(nodes))
    r.shuffle(order)
    content = bytearray(16 * nodes)
    for here, there in zip(order, [*order[1:], None], strict=True):
        struct.pack_into("<Qii", content, 16 * here, 0 if there is None else base + 16 * there, here, 0)
    m.memory[-1] = (base, bytes(content))
    heads = m.ints([base + 16 * r.randrange(nodes) for _ in range(lists)], "Q")
    return m.made(*_line(r, lists), _i(lists), _p(heads), _p(m.array(4 * lists)))


@launch_of("binary_search")
def _binary_search(m: Maker, r: random.Random) -> Made:
    n, queries = r.randrange(1, 100), r.randrange(1, 60)
    values = m.ints(sorted(r.randrange(100) for _ in range(n)))
    wanted = m.ints([r.randrange(100) for _ in range(queries)])
    return m.made(*_line(r, queries), _i(n), _i(queries), _p(values), _p(wanted), _p(m.array(4 * queries)))


def _views(m: Maker, r: random.Random) -> tuple[int, bytes]:
    n = r.randrange(1, 300)
    sources = [m.array(4 * n) for _ in range(4)]
    return n, struct.pack("<Qi4x4Q", m.array(4 * n), n, *sources)


@launch_of("struct_views")
def _struct_views(m: Maker, r: random.Random) -> Made:
    n, views = _views(m, r)
    return m.made(*_line(r, n), ("", views), _i(r.randrange(4)))


@launch_of("struct_views_mixed")
def _struct_views_mixed(m: Maker, r: random.Random) -> Made:
    n, views = _views(m, r)
    return m.made(*_line(r, n), ("", views))


@launch_of("struct_tensor")
def _struct_tensor(m: Maker, r: random.Random) -> Made:
    sizes = [r.randrange(1, 9) for _ in range(3)]
    n = sizes[0] * sizes[1] * sizes[2]
    packed = (sizes[1] * sizes[2], sizes[2], 1)
    turned = (1, sizes[0], sizes[0] * sizes[1])

    def tensor(strides: tuple[int, int, int]) -> bytes:
        return struct.pack("<Q6i", m.array(4 * n), *sizes, *strides)

    return m.made(*_line(r, n), ("", tensor(packed)), ("", tensor(r.choice((packed, turned)))))


@launch_of("pointer_table")
def _pointer_table(m: Maker, r: random.Random) -> Made:
    n, rows = r.randrange(1, 60), r.randrange(1, 6)
    table = m.ints([m.array(4 * n) for _ in range(rows)], "Q")
    return m.made(rows, 64, _i(n), _p(table), ("f", 1.0))


@launch_of("kv_cache_write")
def _kv_cache_write(m: Maker, r: random.Random) -> Made:
    heads, size, block_size, blocks = r.randrange(1, 4), r.randrange(1, 17), r.choice((4, 8)), r.randrange(1, 5)
    tokens = r.randrange(1, 6)
    slots = m.ints([r.randrange(-1, blocks * block_size) for _ in range(tokens)], "q")
    key, cache = m.array(4 * tokens * heads * size), m.array(4 * blocks * block_size * heads * size)
    return m.made(tokens, r.choice((16, 32)), _i(heads), _i(size), _i(block_size), _p(key), _p(slots), _p(cache))


@launch_of("kv_cache_append")
def _kv_cache_append(m: Maker, r: random.Random) -> Made:
    heads, size, capacity, tokens = r.randrange(1, 4), r.randrange(1, 40), r.randrange(6, 20), r.randrange(1, 6)
    position = r.randrange(0, capacity - tokens + 1)
    key, cache = m.array(4 * tokens * heads * size), m.array(4 * heads * capacity * size)
    return m.made((tokens, heads, 1), 16, _i(heads), _i(size), _i(capacity), _i(position), _p(key), _p(cache))


@launch_of("kv_cache_reshape")
def _kv_cache_reshape(m: Maker, r: random.Random) -> Made:
    heads, size, length = r.randrange(1, 5), r.choice((4, 8, 10)), r.randrange(1, 9)
    n = heads * size * length
    return m.made(*_line(r, n), _i(heads), _i(size), _i(length), _p(m.array(4 * n)), _p(m.array(4 * n)))


@launch_of("paged_read")
def _paged_read(m: Maker, r: random.Random) -> Made:
    heads, size, block_size, length, pages = r.randrange(1, 4), r.randrange(1, 20), 4, r.randrange(1, 12), 5
    table = m.ints([r.randrange(pages) for _ in range((length - 1) // block_size + 1)])
    cache, out = m.array(4 * pages * heads * block_size * size), m.array(4 * length * heads * size)
    return m.made(heads, 16, _i(heads), _i(size), _i(block_size), _i(length), _p(table), _p(cache), _p(out))


@launch_of("early_break")
def _early_break(m: Maker, r: random.Random) -> Made:
    n, grid, block = r.randrange(1, 20), r.randrange(1, 3), r.choice((4, 32))
    values = m.ints([r.randrange(30) for _ in range(n)])
    return m.made(grid, block, _i(n), _i(r.randrange(10)), _p(values), _p(m.array(4 * n * grid * block)))


_simple("collatz", lambda m, r, n: (_i(n), _p(m.array(4 * n))))


@launch_of("compact")
def _compact(m: Maker, r: random.Random) -> Made:
    n = r.randrange(1, 200)
    values = m.ints([r.randrange(-2, 3) for _ in range(n)])
    return m.made(*_line(r, n), _i(n), _p(values), _p(m.array(4 * n)), _p(m.array(4)))


_simple("atomics_mixed", lambda m, r, n: (_i(n), _p(m.array(44)), _p(m.array(8))))
_simple("module_variables", lambda m, r, n: (_i(n), _p(m.array(4 * n))))
_simple("through_function", lambda m, r, n: (_i(n), _p(m.array(4 * n))))
_simple("local_array", lambda m, r, n: (_i(n), _p(m.array(32 * n)), _p(m.array(4 * n))))


@launch_of("pointer_walk")
def _pointer_walk(m: Maker, r: random.Random) -> Made:
    n = r.randrange(1, 200)
    return m.made(1, r.choice((1, 32, 64)), _i(n), _p(m.array(4 * n)), _p(m.array(4 * n)))


@launch_of("conditional_advance")
def _conditional_advance(m: Maker, r: random.Random) -> Made:
    n = r.randrange(1, 100)
    flags = m.ints([r.randrange(2) for _ in range(n)])
    return m.made(1, 32, _i(n), _p(flags), _p(m.array(4 * n)))


@launch_of("triangular")
def _triangular(m: Maker, r: random.Random) -> Made:
    n = r.randrange(1, 60)
    return m.made(*_line(r, n), _i(n), _p(m.array(4 * n * n)))


@launch_of("wraps_around")
def _wraps_around(m: Maker, r: random.Random) -> Made:
    n, shift = r.randrange(1, 200), r.choice((0, r.randrange(1, 50), r.randrange(1 << 32)))
    return m.made(*_any_line(r), ("I", n), ("I", shift), _p(m.array(4 * n)))


@launch_of("swizzled")
def _swizzled(m: Maker, r: random.Random) -> Made:
    tiles_x, tiles_y, group = r.randrange(1, 9), r.randrange(1, 6), r.randrange(1, 5)
    width = 8 * tiles_x
    out = m.array(4 * width * 8 * tiles_y)
    return m.made(tiles_x * tiles_y, (8, 8, 1), _i(tiles_x), _i(tiles_y), _i(group), _i(width), _p(out))


@launch_of("power_of_two_steps")
def _power_of_two_steps(m: Maker, r: random.Random) -> Made:
    n = r.randrange(1, 300)
    return m.made(1, 32, _i(n), _p(m.array(4 * n)))


@launch_of("nested_loops")
def _nested_loops(m: Maker, r: random.Random) -> Made:
    a, b, c = r.randrange(1, 6), r.randrange(1, 20), r.randrange(1, 12)
    return m.made(*_any_line(r), _i(a), _i(b), _i(c), _p(m.array(4 * a * b * c)))
