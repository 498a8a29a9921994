"""Random launches of the kernels in corpus/blocks.cu."""

from __future__ import annotations

import random

from making import GENERATORS, Dimensions, Made, Maker, launch_of, line, number, one_a_thread, plane, pointer


@launch_of("transpose")
def _transpose(m: Maker, r: random.Random) -> Made:
    width, height = r.randrange(1, 70), r.randrange(1, 70)
    grid = (-(-width // 16), -(-height // 16), 1)
    size = 4 * width * height
    return m.made(grid, (16, 16, 1), number(width), number(height), pointer(m.array(size)), pointer(m.array(size)))


@launch_of("transpose_naive")
def _transpose_naive(m: Maker, r: random.Random) -> Made:
    width, height, grid, block = plane(r)
    size = 4 * width * height
    return m.made(grid, block, number(width), number(height), pointer(m.array(size)), pointer(m.array(size)))


@launch_of("reduce_block")
def _reduce_block(m: Maker, r: random.Random) -> Made:
    n, grid, block = r.randrange(1, 900), r.randrange(1, 5), r.choice((32, 64, 128))
    return m.made(grid, block, number(n), pointer(m.array(4 * n)), pointer(m.array(4 * grid)), shared_bytes=4 * block)


one_a_thread("reduce_warp_atomic", lambda m, r, n: (number(n), pointer(m.array(4 * n)), pointer(m.array(4))))


@launch_of("scan_block")
def _scan_block(m: Maker, r: random.Random) -> Made:
    n = r.randrange(1, 600)
    grid = -(-n // 256)
    return m.made(grid, 256, number(n), pointer(m.array(4 * n)), pointer(m.array(4 * n)), pointer(m.array(4 * grid)))


@launch_of("scan_add")
def _scan_add(m: Maker, r: random.Random) -> Made:
    n = r.randrange(1, 600)
    grid, block = line(r, n)
    return m.made(grid, block, number(n), pointer(m.array(4 * grid)), pointer(m.array(4 * n)))


one_a_thread("stencil_1d", lambda m, r, n: (number(n), pointer(m.array(4 * n)), pointer(m.array(4 * n))))


@launch_of("stencil_2d")
def _stencil_2d(m: Maker, r: random.Random) -> Made:
    width, height, grid, block = plane(r)
    size = 4 * width * height
    return m.made(grid, block, number(width), number(height), pointer(m.array(size)), pointer(m.array(size)))


@launch_of("stencil_3d_sweep")
def _stencil_3d_sweep(m: Maker, r: random.Random) -> Made:
    nx, ny, nz = r.randrange(1, 20), r.randrange(1, 12), r.randrange(2, 9)
    size = 4 * nx * ny * nz
    grid = (-(-nx // 8), -(-ny // 4), 1)
    return m.made(grid, (8, 4, 1), number(nx), number(ny), number(nz), pointer(m.array(size)), pointer(m.array(size)))


@launch_of("convolution_rows")
def _convolution_rows(m: Maker, r: random.Random) -> Made:
    width, height, radius = r.randrange(1, 80), r.randrange(1, 5), r.randrange(0, 4)
    size = 4 * width * height
    grid, block = line(r, width)
    parameters = (
        number(width),
        number(height),
        number(radius),
        pointer(m.array(size)),
        pointer(m.array(4 * (2 * radius + 1))),
        pointer(m.array(size)),
    )
    return m.made((grid, height, 1), block, *parameters)


def _matrices(m: Maker, r: random.Random, tile: Dimensions) -> Made:
    rows, columns, depth = r.randrange(1, 40), r.randrange(1, 40), r.randrange(1, 40)
    a, b, c = m.array(4 * rows * depth), m.array(4 * depth * columns), m.array(4 * rows * columns)
    grid = (-(-columns // tile[0]), -(-rows // tile[1]), 1)
    return m.made(grid, tile, pointer(a), pointer(b), pointer(c), number(rows), number(columns), number(depth))


GENERATORS["matmul_naive"] = lambda m, r: _matrices(m, r, (8, 4, 1))
GENERATORS["matmul_tiled"] = lambda m, r: _matrices(m, r, (16, 16, 1))


@launch_of("softmax_rows")
def _softmax_rows(m: Maker, r: random.Random) -> Made:
    rows, columns = r.randrange(1, 5), r.randrange(1, 200)
    size = 4 * rows * columns
    return m.made(rows, r.choice((32, 64)), number(columns), pointer(m.array(size)), pointer(m.array(size)))


@launch_of("layer_norm")
def _layer_norm(m: Maker, r: random.Random) -> Made:
    rows, columns = r.randrange(1, 5), r.randrange(1, 200)
    size = 4 * rows * columns
    one = 4 * columns
    parameters = (
        number(columns),
        pointer(m.array(size)),
        pointer(m.array(one)),
        pointer(m.array(one)),
        pointer(m.array(size)),
    )
    return m.made(rows, r.choice((32, 64)), *parameters)


@launch_of("attention_row")
def _attention_row(m: Maker, r: random.Random) -> Made:
    heads, length, size = r.randrange(1, 4), r.randrange(1, 7), r.randrange(1, 17)
    arrays = [m.array(4 * heads * length * size) for _ in range(4)]
    return m.made((length, heads, 1), 16, number(heads), number(length), number(size), *map(pointer, arrays))


@launch_of("rope")
def _rope(m: Maker, r: random.Random) -> Made:
    tokens, heads, half = r.randrange(1, 5), r.randrange(1, 4), r.randrange(1, 33)
    return m.made(
        (tokens, heads, 1),
        32,
        number(heads),
        number(half),
        pointer(m.array(4 * tokens * half)),
        pointer(m.array(8 * tokens * heads * half)),
    )


@launch_of("copy_async")
def _copy_async(m: Maker, r: random.Random) -> Made:
    n = r.randrange(1, 400)
    return m.made(-(-n // 128), 128, number(n), pointer(m.array(16 * n)), pointer(m.array(16 * n)))


@launch_of("double_buffered")
def _double_buffered(m: Maker, r: random.Random) -> Made:
    n = r.randrange(1, 400)
    return m.made(1, 64, number(n), pointer(m.array(4 * n)), pointer(m.array(4 * n)))
