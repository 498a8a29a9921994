"""Random launches of the kernels in corpus/irregular.cu."""

from __future__ import annotations

import random
import struct

from making import GENERATORS, Made, Maker, any_line, launch_of, line, number, one_a_thread, pointer, strided_loop


@launch_of("gather")
def _gather(m: Maker, r: random.Random) -> Made:
    n, length = r.randrange(1, 200), r.randrange(1, 100)
    index = m.ints([r.randrange(length) for _ in range(n)])
    return m.made(*line(r, n), number(n), pointer(index), pointer(m.array(4 * length)), pointer(m.array(4 * n)))


@launch_of("scatter")
def _scatter(m: Maker, r: random.Random) -> Made:
    n, length = r.randrange(1, 200), r.randrange(1, 100)
    index = m.ints([r.randrange(length) for _ in range(n)], "q")
    return m.made(*line(r, n), number(n), pointer(index), pointer(m.array(4 * n)), pointer(m.array(4 * length)))


def _embeddings(m: Maker, r: random.Random, backward: bool) -> Made:
    tokens, width, words = r.randrange(1, 6), r.randrange(1, 70), r.randrange(1, 9)
    ids = m.ints([r.randrange(words) for _ in range(tokens)])
    table, out = m.array(4 * words * width), m.array(4 * tokens * width)
    arrays = (out, table) if backward else (table, out)
    return m.made(tokens, r.choice((16, 32)), number(tokens), number(width), pointer(ids), *map(pointer, arrays))


GENERATORS["embedding"] = lambda m, r: _embeddings(m, r, False)
GENERATORS["embedding_backward"] = lambda m, r: _embeddings(m, r, True)
strided_loop("histogram_bytes", lambda m, r, n: (number(n), pointer(m.content(r.randbytes(n))), pointer(m.array(1024))))


@launch_of("histogram_shared")
def _histogram_shared(m: Maker, r: random.Random) -> Made:
    n, bins = r.randrange(1, 300), r.randrange(1, 100)
    values = m.ints([r.randrange(bins) for _ in range(n)])
    return m.made(
        *any_line(r), number(n), number(bins), pointer(values), pointer(m.array(4 * bins)), shared_bytes=4 * bins
    )


@launch_of("bitonic_step")
def _bitonic_step(m: Maker, r: random.Random) -> Made:
    n = 1 << r.randrange(1, 9)
    k = 1 << r.randrange(1, n.bit_length())
    j = k >> r.randrange(1, k.bit_length())
    return m.made(
        *line(r, n), number(n), number(j), number(k), pointer(m.ints([r.randrange(-99, 99) for _ in range(n)]))
    )


@launch_of("sparse_rows")
def _sparse_rows(m: Maker, r: random.Random) -> Made:
    rows, columns = r.randrange(1, 40), r.randrange(1, 40)
    starts = [0]
    for _ in range(rows):
        starts.append(starts[-1] + r.randrange(6))
    count = starts[-1]
    index = m.ints([r.randrange(columns) for _ in range(count)])
    arrays = (m.ints(starts), index, m.array(4 * count), m.array(4 * columns), m.array(4 * rows))
    return m.made(*line(r, rows), number(rows), *map(pointer, arrays))


@launch_of("hash_insert")
def _hash_insert(m: Maker, r: random.Random) -> Made:
    n = r.randrange(1, 60)
    mask = (1 << (2 * n).bit_length()) - 1
    keys = m.ints([r.randrange(1 << 31) for _ in range(n)], "I")
    return m.made(*line(r, n), number(n), ("I", mask), pointer(keys), pointer(m.array(4 * (mask + 1))))


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
    return m.made(*line(r, lists), number(lists), pointer(heads), pointer(m.array(4 * lists)))


@launch_of("binary_search")
def _binary_search(m: Maker, r: random.Random) -> Made:
    n, queries = r.randrange(1, 100), r.randrange(1, 60)
    values = m.ints(sorted(r.randrange(100) for _ in range(n)))
    wanted = m.ints([r.randrange(100) for _ in range(queries)])
    return m.made(
        *line(r, queries), number(n), number(queries), pointer(values), pointer(wanted), pointer(m.array(4 * queries))
    )


def _views(m: Maker, r: random.Random) -> tuple[int, bytes]:
    n = r.randrange(1, 300)
    sources = [m.array(4 * n) for _ in range(4)]
    return n, struct.pack("<Qi4x4Q", m.array(4 * n), n, *sources)


@launch_of("struct_views")
def _struct_views(m: Maker, r: random.Random) -> Made:
    n, views = _views(m, r)
    return m.made(*line(r, n), ("", views), number(r.randrange(4)))


@launch_of("struct_views_mixed")
def _struct_views_mixed(m: Maker, r: random.Random) -> Made:
    n, views = _views(m, r)
    return m.made(*line(r, n), ("", views))


@launch_of("struct_tensor")
def _struct_tensor(m: Maker, r: random.Random) -> Made:
    sizes = [r.randrange(1, 9) for _ in range(3)]
    n = sizes[0] * sizes[1] * sizes[2]
    packed = (sizes[1] * sizes[2], sizes[2], 1)
    turned = (1, sizes[0], sizes[0] * sizes[1])

    def tensor(strides: tuple[int, int, int]) -> bytes:
        return struct.pack("<Q6i", m.array(4 * n), *sizes, *strides)

    return m.made(*line(r, n), ("", tensor(packed)), ("", tensor(r.choice((packed, turned)))))


@launch_of("pointer_table")
def _pointer_table(m: Maker, r: random.Random) -> Made:
    n, rows = r.randrange(1, 60), r.randrange(1, 6)
    table = m.ints([m.array(4 * n) for _ in range(rows)], "Q")
    return m.made(rows, 64, number(n), pointer(table), ("f", 1.0))


@launch_of("kv_cache_write")
def _kv_cache_write(m: Maker, r: random.Random) -> Made:
    heads, size, block_size, blocks = r.randrange(1, 4), r.randrange(1, 17), r.choice((4, 8)), r.randrange(1, 5)
    tokens = r.randrange(1, 6)
    slots = m.ints([r.randrange(-1, blocks * block_size) for _ in range(tokens)], "q")
    key, cache = m.array(4 * tokens * heads * size), m.array(4 * blocks * block_size * heads * size)
    return m.made(
        tokens,
        r.choice((16, 32)),
        number(heads),
        number(size),
        number(block_size),
        pointer(key),
        pointer(slots),
        pointer(cache),
    )


@launch_of("kv_cache_append")
def _kv_cache_append(m: Maker, r: random.Random) -> Made:
    heads, size, capacity, tokens = r.randrange(1, 4), r.randrange(1, 40), r.randrange(6, 20), r.randrange(1, 6)
    position = r.randrange(0, capacity - tokens + 1)
    key, cache = m.array(4 * tokens * heads * size), m.array(4 * heads * capacity * size)
    return m.made(
        (tokens, heads, 1),
        16,
        number(heads),
        number(size),
        number(capacity),
        number(position),
        pointer(key),
        pointer(cache),
    )


@launch_of("kv_cache_reshape")
def _kv_cache_reshape(m: Maker, r: random.Random) -> Made:
    heads, size, length = r.randrange(1, 5), r.choice((4, 8, 10)), r.randrange(1, 9)
    n = heads * size * length
    return m.made(
        *line(r, n), number(heads), number(size), number(length), pointer(m.array(4 * n)), pointer(m.array(4 * n))
    )


@launch_of("paged_read")
def _paged_read(m: Maker, r: random.Random) -> Made:
    heads, size, block_size, length, pages = r.randrange(1, 4), r.randrange(1, 20), 4, r.randrange(1, 12), 5
    table = m.ints([r.randrange(pages) for _ in range((length - 1) // block_size + 1)])
    cache, out = m.array(4 * pages * heads * block_size * size), m.array(4 * length * heads * size)
    return m.made(
        heads,
        16,
        number(heads),
        number(size),
        number(block_size),
        number(length),
        pointer(table),
        pointer(cache),
        pointer(out),
    )


@launch_of("early_break")
def _early_break(m: Maker, r: random.Random) -> Made:
    n, grid, block = r.randrange(1, 20), r.randrange(1, 3), r.choice((4, 32))
    values = m.ints([r.randrange(30) for _ in range(n)])
    return m.made(
        grid, block, number(n), number(r.randrange(10)), pointer(values), pointer(m.array(4 * n * grid * block))
    )


one_a_thread("collatz", lambda m, r, n: (number(n), pointer(m.array(4 * n))))


@launch_of("compact")
def _compact(m: Maker, r: random.Random) -> Made:
    n = r.randrange(1, 200)
    values = m.ints([r.randrange(-2, 3) for _ in range(n)])
    return m.made(*line(r, n), number(n), pointer(values), pointer(m.array(4 * n)), pointer(m.array(4)))


one_a_thread("atomics_mixed", lambda m, r, n: (number(n), pointer(m.array(44)), pointer(m.array(8))))
one_a_thread("module_variables", lambda m, r, n: (number(n), pointer(m.array(4 * n))))
one_a_thread("through_function", lambda m, r, n: (number(n), pointer(m.array(4 * n))))
one_a_thread("local_array", lambda m, r, n: (number(n), pointer(m.array(32 * n)), pointer(m.array(4 * n))))


@launch_of("pointer_walk")
def _pointer_walk(m: Maker, r: random.Random) -> Made:
    n = r.randrange(1, 200)
    return m.made(1, r.choice((1, 32, 64)), number(n), pointer(m.array(4 * n)), pointer(m.array(4 * n)))


@launch_of("conditional_advance")
def _conditional_advance(m: Maker, r: random.Random) -> Made:
    n = r.randrange(1, 100)
    flags = m.ints([r.randrange(2) for _ in range(n)])
    return m.made(1, 32, number(n), pointer(flags), pointer(m.array(4 * n)))


@launch_of("triangular")
def _triangular(m: Maker, r: random.Random) -> Made:
    n = r.randrange(1, 60)
    return m.made(*line(r, n), number(n), pointer(m.array(4 * n * n)))


@launch_of("wraps_around")
def _wraps_around(m: Maker, r: random.Random) -> Made:
    n, shift = r.randrange(1, 200), r.choice((0, r.randrange(1, 50), r.randrange(1 << 32)))
    return m.made(*any_line(r), ("I", n), ("I", shift), pointer(m.array(4 * n)))


@launch_of("swizzled")
def _swizzled(m: Maker, r: random.Random) -> Made:
    tiles_x, tiles_y, group = r.randrange(1, 9), r.randrange(1, 6), r.randrange(1, 5)
    width = 8 * tiles_x
    out = m.array(4 * width * 8 * tiles_y)
    return m.made(
        tiles_x * tiles_y, (8, 8, 1), number(tiles_x), number(tiles_y), number(group), number(width), pointer(out)
    )


@launch_of("power_of_two_steps")
def _power_of_two_steps(m: Maker, r: random.Random) -> Made:
    n = r.randrange(1, 300)
    return m.made(1, 32, number(n), pointer(m.array(4 * n)))


@launch_of("nested_loops")
def _nested_loops(m: Maker, r: random.Random) -> Made:
    a, b, c = r.randrange(1, 6), r.randrange(1, 20), r.randrange(1, 12)
    return m.made(*any_line(r), number(a), number(b), number(c), pointer(m.array(4 * a * b * c)))
