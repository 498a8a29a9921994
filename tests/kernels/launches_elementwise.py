"""Random launches of the kernels in corpus/elementwise.cu."""

from __future__ import annotations

import random

from making import Made, Maker, any_line, launch_of, line, number, one_a_thread, plane, pointer, strided_loop

one_a_thread("saxpy", lambda m, r, n: (number(n), ("f", 2.0), pointer(m.array(4 * n)), pointer(m.array(4 * n))))
strided_loop("fill_grid_stride", lambda m, r, n: (number(n), ("f", 2.0), pointer(m.array(4 * n))))
strided_loop("add_long_index", lambda m, r, n: (("Q", n), *(pointer(m.array(4 * n)) for _ in range(3))))
one_a_thread("add_vector4", lambda m, r, n: (number(n), pointer(m.array(16 * n)), pointer(m.array(16 * n))))
one_a_thread("unrolled_by_four", lambda m, r, n: (number(n), pointer(m.array(4 * n)), pointer(m.array(4 * n))), each=4)
one_a_thread(
    "chunk_a_thread",
    lambda m, r, n: (number(n), number(r.randrange(1, 6)), pointer(m.array(4 * n)), pointer(m.array(4 * n))),
)
one_a_thread("reversed", lambda m, r, n: (number(n), pointer(m.array(4 * n)), pointer(m.array(4 * n))))
one_a_thread("bytes_to_words", lambda m, r, n: (number(n), pointer(m.array(n)), pointer(m.array(4 * n))))
one_a_thread(
    "interleave",
    lambda m, r, n: (number(n), pointer(m.array(8 * n)), pointer(m.array(8 * n)), pointer(m.array(16 * n))),
)
one_a_thread("every_second", lambda m, r, n: (number(n), pointer(m.array(2 * n)), pointer(m.array(2 * n))))
one_a_thread(
    "divided_by_seven", lambda m, r, n: (number(n), pointer(m.array(4 * (n // 7 + 1))), pointer(m.array(4 * n)))
)
one_a_thread("guarded_range", lambda m, r, n: (number(n), pointer(m.array(4 * n)), pointer(m.array(4 * n))))
strided_loop("backwards", lambda m, r, n: (number(n), pointer(m.array(4 * n))))


@launch_of("strided")
def _strided(m: Maker, r: random.Random) -> Made:
    n, stride = r.randrange(1, 200), r.randrange(1, 9)
    return m.made(
        *line(r, n), number(n), number(stride), pointer(m.array(4 * (n * stride + 2))), pointer(m.array(4 * n * stride))
    )


@launch_of("two_dimensions")
def _two_dimensions(m: Maker, r: random.Random) -> Made:
    width, height, grid, block = plane(r)
    pitch = width + r.randrange(10)
    size = 4 * pitch * height
    return m.made(
        grid, block, number(width), number(height), number(pitch), pointer(m.array(size)), pointer(m.array(size))
    )


@launch_of("three_dimensions")
def _three_dimensions(m: Maker, r: random.Random) -> Made:
    nx, ny, nz = r.randrange(1, 20), r.randrange(1, 12), r.randrange(1, 9)
    size = 4 * nx * ny * nz
    grid = (-(-nx // 8), -(-ny // 4), -(-nz // 2))
    return m.made(grid, (8, 4, 2), number(nx), number(ny), number(nz), pointer(m.array(size)), pointer(m.array(size)))


@launch_of("split_index")
def _split_index(m: Maker, r: random.Random) -> Made:
    width = r.choice((1, 4, 8, 13, 32))
    n, pitch = r.choice((width * r.randrange(1, 20), r.randrange(1, 300))), width + r.randrange(5)
    rows = (n - 1) // width + 1
    parameters = (number(n), number(width), number(pitch), pointer(m.array(4 * n)), pointer(m.array(4 * rows * pitch)))
    return m.made(*line(r, n), *parameters)


@launch_of("clamped")
def _clamped(m: Maker, r: random.Random) -> Made:
    n, length = r.randrange(1, 300), r.randrange(1, 300)
    return m.made(*line(r, n), number(n), number(length), pointer(m.array(4 * length)), pointer(m.array(4 * n)))


@launch_of("one_thread")
def _one_thread(m: Maker, r: random.Random) -> Made:
    index = r.randrange(100)
    return m.made(*any_line(r), pointer(m.array(4 * index + 4)), number(index))


@launch_of("select_source")
def _select_source(m: Maker, r: random.Random) -> Made:
    n = r.randrange(1, 300)
    return m.made(*line(r, n), number(n), number(r.randrange(0, n + 1)), *(pointer(m.array(4 * n)) for _ in range(3)))
