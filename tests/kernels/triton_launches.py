"""Random launches of the Triton kernels under triton/ that the simulated GPU can run (the others multiply matrices).

A Triton kernel's parameters are its arguments in order and two scratch pointers that these kernels do not use.
"""

from __future__ import annotations

import random
import re
import struct

from launches import Made, Maker

from woodfrog.kernels import Launch, Template

THREADS = 128  # Triton's default of four warps
SHARED_BYTES = 64 << 10


def _made(m: Maker, grid: tuple[int, int, int] | int, *parameters: tuple[str, object]) -> Made:
    return m.made(grid, THREADS, *parameters, ("Q", 0), ("Q", 0), shared_bytes=SHARED_BYTES)


def _pointers(m: Maker, *sizes: int) -> list[tuple[str, object]]:
    return [("Q", m.array(4 * size)) for size in sizes]


def make(kernel: str, seed: int) -> Made:
    """The launch number `seed` of a kernel."""
    r = random.Random(f"{kernel} {seed}")
    m = Maker(r)
    n = r.choice((1, r.randrange(1, 200), 1024, r.randrange(1, 4000)))
    rows, columns = r.randrange(1, 6), r.choice((1, 128, r.randrange(1, 500)))
    if kernel == "pointwise_gelu":
        return _made(m, -(-n // 1024), *_pointers(m, n, columns, n), ("i", n), ("i", columns))
    if kernel == "residual_add":
        return _made(m, -(-n // 1024), *_pointers(m, n, n, n), ("i", n))
    if kernel == "layer_norm_rows":
        sizes = (rows * columns, columns, columns, rows * columns, rows)
        return _made(m, rows, *_pointers(m, *sizes), ("i", columns))
    if kernel == "softmax_rows":
        stride = columns + r.randrange(9)
        return _made(m, rows, *_pointers(m, rows * stride, rows * stride), ("i", stride), ("i", columns))
    if kernel == "reduce_looped":
        x = r.randrange(1, 40)
        return _made(m, -(-x // 8), *_pointers(m, x * columns, x), ("i", x), ("i", columns))
    if kernel == "embedding_rows":
        words, tokens = r.randrange(1, 9), r.randrange(1, 20)
        ids = m.ints([r.randrange(words) for _ in range(tokens)], "q")
        x = tokens * columns
        parameters = (("Q", ids), *_pointers(m, words * columns, x), ("i", x), ("i", columns))
        return _made(m, -(-x // 512), *parameters)
    if kernel == "transpose_heads":
        y, x = r.randrange(1, 90), r.randrange(1, 90)
        return _made(m, (-(-x // 32), -(-y // 32), 1), *_pointers(m, x * y, x * y), ("i", y), ("i", x))
    if kernel == "rotary":
        tokens, heads = r.randrange(1, 6), r.randrange(1, 5)
        whole, half = tokens * heads * 64, tokens * 32
        return _made(m, (tokens, heads, 1), *_pointers(m, whole, half, half, whole), ("i", heads))
    if kernel == "kv_cache_write":
        tokens, heads, width = r.randrange(1, 6), r.randrange(1, 5), r.randrange(1, 129)
        capacity = tokens + r.randrange(20)
        position = r.randrange(capacity - tokens + 1)
        key, cache = _pointers(m, tokens * heads * width, heads * capacity * width)
        numbers = (("i", position), ("i", tokens), ("i", width), ("i", capacity))
        return _made(m, (tokens, heads, 1), key, cache, *numbers)
    if kernel == "cross_entropy_rows":
        labels = m.ints([r.randrange(columns) for _ in range(rows)], "q")
        logits, loss = _pointers(m, rows * columns, rows)
        return _made(m, rows, logits, ("Q", labels), loss, ("i", columns))
    if kernel == "adam_step":
        return _made(m, -(-n // 512), *_pointers(m, n, n, n, n), ("i", n), ("f", 0.1))
    raise KeyError(kernel)


def unlike_any_other(template: Template, text: str, seed: int) -> Launch:
    """A launch of any Triton kernel with random numbers for its parameters: to be evaluated, not to be run."""
    threads = re.search(r"\.reqntid (\d+)", text)
    assert threads is not None
    r = random.Random(seed)
    block, allocations = b"", []
    for parameter in template.parameters:
        if parameter.size_bytes == 8:
            allocations.append((0x7F0000000000 + (len(allocations) << 30), 1 << 28))
            value = struct.pack("<Q", allocations[-1][0])
        else:
            value = struct.pack("<i", r.randrange(1, 100_000))
        block += bytes(parameter.offset_bytes - len(block)) + value
    grid = (r.randrange(1, 300), r.randrange(1, 4), 1)
    return Launch(grid, (int(threads[1]), 1, 1), block, allocations)


RUNNABLE = (
    "pointwise_gelu", "residual_add", "layer_norm_rows", "softmax_rows", "reduce_looped", "embedding_rows",
    "transpose_heads", "rotary", "kv_cache_write", "cross_entropy_rows", "adam_step",
)  # fmt: skip
