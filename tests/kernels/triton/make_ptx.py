"""Makes the PTX files beside it from Triton kernels, with no GPU: `python make_ptx.py` (made with Triton 3.9.0).

The kernels are those that a compiled transformer block consists of, in the way TorchInductor and the usual libraries
write them: fused pointwise, reductions over rows, embedding, rotary embedding, matrix products, attention, a loss.
"""

from __future__ import annotations

from pathlib import Path

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


@triton.jit
def pointwise_gelu(in_ptr, bias_ptr, out_ptr, xnumel, width, BLOCK: tl.constexpr):
    x = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = x < xnumel
    v = tl.load(in_ptr + x, mask).to(tl.float32) + tl.load(bias_ptr + x % width, mask).to(tl.float32)
    tl.store(out_ptr + x, 0.5 * v * (1 + tl.math.erf(v * 0.7071)), mask)


@triton.jit
def residual_add(a_ptr, b_ptr, out_ptr, xnumel, BLOCK: tl.constexpr):
    x = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = x < xnumel
    tl.store(out_ptr + x, tl.load(a_ptr + x, mask) + tl.load(b_ptr + x, mask), mask)


@triton.jit
def layer_norm_rows(in_ptr, weight_ptr, bias_ptr, out_ptr, mean_ptr, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    c = tl.arange(0, BLOCK)
    mask = c < columns
    v = tl.load(in_ptr + row * columns + c, mask, other=0.0).to(tl.float32)
    mean = tl.sum(v, 0) / columns
    d = tl.where(mask, v - mean, 0.0)
    scale = 1 / tl.sqrt(tl.sum(d * d, 0) / columns + 1e-5)
    w = tl.load(weight_ptr + c, mask)
    b = tl.load(bias_ptr + c, mask)
    tl.store(out_ptr + row * columns + c, d * scale * w + b, mask)
    tl.store(mean_ptr + row, mean)


@triton.jit
def softmax_rows(in_ptr, out_ptr, stride, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    c = tl.arange(0, BLOCK)
    mask = c < columns
    v = tl.load(in_ptr + row * stride + c, mask, other=-float("inf"))
    e = tl.exp(v - tl.max(v, 0))
    tl.store(out_ptr + row * stride + c, e / tl.sum(e, 0), mask)


@triton.jit
def reduce_looped(in_ptr, out_ptr, xnumel, rnumel, XBLOCK: tl.constexpr, RBLOCK: tl.constexpr):
    x = tl.program_id(0) * XBLOCK + tl.arange(0, XBLOCK)[:, None]
    xmask = x < xnumel
    total = tl.zeros([XBLOCK, RBLOCK], tl.float32)
    for offset in range(0, rnumel, RBLOCK):
        r = offset + tl.arange(0, RBLOCK)[None, :]
        total += tl.load(in_ptr + r + rnumel * x, (r < rnumel) & xmask, other=0.0)
    tl.store(out_ptr + x, tl.sum(total, 1)[:, None], xmask)


@triton.jit
def embedding_rows(ids_ptr, table_ptr, out_ptr, xnumel, width, BLOCK: tl.constexpr):
    x = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = x < xnumel
    token = tl.load(ids_ptr + x // width, mask, other=0)
    tl.store(out_ptr + x, tl.load(table_ptr + token * width + x % width, mask), mask)


@triton.jit
def transpose_heads(in_ptr, out_ptr, ynumel, xnumel, YBLOCK: tl.constexpr, XBLOCK: tl.constexpr):
    y = tl.program_id(1) * YBLOCK + tl.arange(0, YBLOCK)[None, :]
    x = tl.program_id(0) * XBLOCK + tl.arange(0, XBLOCK)[:, None]
    mask = (y < ynumel) & (x < xnumel)
    tl.store(out_ptr + y + ynumel * x, tl.load(in_ptr + x + xnumel * y, mask), mask)


@triton.jit
def rotary(q_ptr, cos_ptr, sin_ptr, out_ptr, heads, HALF: tl.constexpr):
    token, head = tl.program_id(0), tl.program_id(1)
    c = tl.arange(0, HALF)
    base = (token * heads + head) * 2 * HALF
    a, b = tl.load(q_ptr + base + c), tl.load(q_ptr + base + HALF + c)
    co, si = tl.load(cos_ptr + token * HALF + c), tl.load(sin_ptr + token * HALF + c)
    tl.store(out_ptr + base + c, a * co - b * si)
    tl.store(out_ptr + base + HALF + c, b * co + a * si)


@triton.jit
def matmul(a_ptr, b_ptr, c_ptr, m, n, k, am, ak, bk, bn, cm, cn, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    pid = tl.program_id(0)
    columns = tl.cdiv(n, BN)
    pm, pn = pid // columns, pid % columns
    rm = (pm * BM + tl.arange(0, BM)) % m
    rn = (pn * BN + tl.arange(0, BN)) % n
    rk = tl.arange(0, BK)
    a = a_ptr + rm[:, None] * am + rk[None, :] * ak
    b = b_ptr + rk[:, None] * bk + rn[None, :] * bn
    total = tl.zeros((BM, BN), tl.float32)
    for i in range(tl.cdiv(k, BK)):
        left = k - i * BK
        total = tl.dot(
            tl.load(a, mask=rk[None, :] < left, other=0.0), tl.load(b, mask=rk[:, None] < left, other=0.0), total
        )
        a += BK * ak
        b += BK * bk
    om, on = pm * BM + tl.arange(0, BM), pn * BN + tl.arange(0, BN)
    tl.store(c_ptr + om[:, None] * cm + on[None, :] * cn, total.to(tl.float16), (om[:, None] < m) & (on[None, :] < n))


@triton.jit
def attention(q_ptr, k_ptr, v_ptr, out_ptr, length, stride, scale, BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr):
    start, head = tl.program_id(0), tl.program_id(1)
    base = head * stride
    om, od = start * BM + tl.arange(0, BM), tl.arange(0, D)
    q = tl.load(q_ptr + base + om[:, None] * D + od[None, :], om[:, None] < length, other=0.0)
    most = tl.full([BM], -1e30, tl.float32)
    total = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, D], tl.float32)
    for at in range(0, (start + 1) * BM, BN):
        on = at + tl.arange(0, BN)
        k = tl.load(k_ptr + base + on[None, :] * D + od[:, None], on[None, :] < length, other=0.0)
        s = tl.where(om[:, None] >= on[None, :], tl.dot(q, k) * scale, -1e30)
        new = tl.maximum(most, tl.max(s, 1))
        p = tl.exp(s - new[:, None])
        old = tl.exp(most - new)
        total = total * old + tl.sum(p, 1)
        v = tl.load(v_ptr + base + on[:, None] * D + od[None, :], on[:, None] < length, other=0.0)
        acc = acc * old[:, None] + tl.dot(p.to(tl.float16), v)
        most = new
    tl.store(
        out_ptr + base + om[:, None] * D + od[None, :], (acc / total[:, None]).to(tl.float16), om[:, None] < length
    )


@triton.jit
def kv_cache_write(key_ptr, cache_ptr, position, tokens, width, capacity, BLOCK: tl.constexpr):
    token, head = tl.program_id(0), tl.program_id(1)
    c = tl.arange(0, BLOCK)
    mask = c < width
    v = tl.load(key_ptr + (token * tl.num_programs(1) + head) * width + c, mask)
    tl.store(cache_ptr + (head * capacity + position + token) * width + c, v, mask)


@triton.jit
def cross_entropy_rows(logits_ptr, label_ptr, loss_ptr, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    most, total = -float("inf"), 0.0
    for offset in range(0, columns, BLOCK):
        c = offset + tl.arange(0, BLOCK)
        v = tl.load(logits_ptr + row * columns + c, c < columns, other=-float("inf"))
        new = tl.maximum(most, tl.max(v, 0))
        total = total * tl.exp(most - new) + tl.sum(tl.exp(v - new), 0)
        most = new
    label = tl.load(label_ptr + row)
    tl.store(loss_ptr + row, most + tl.log(total) - tl.load(logits_ptr + row * columns + label))


@triton.jit
def adam_step(p_ptr, g_ptr, m_ptr, v_ptr, xnumel, lr, BLOCK: tl.constexpr):
    x = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = x < xnumel
    g = tl.load(g_ptr + x, mask)
    m = 0.9 * tl.load(m_ptr + x, mask) + 0.1 * g
    v = 0.99 * tl.load(v_ptr + x, mask) + 0.01 * g * g
    tl.store(m_ptr + x, m, mask)
    tl.store(v_ptr + x, v, mask)
    tl.store(p_ptr + x, tl.load(p_ptr + x, mask) - lr * m / (tl.sqrt(v) + 1e-8), mask)


F, H, N, L = "*fp32", "*fp16", "i32", "*i64"
KERNELS = [
    (pointwise_gelu, [F, F, F, N, N], {"BLOCK": 1024}),
    (residual_add, [F, F, F, N], {"BLOCK": 1024}),
    (layer_norm_rows, [F, F, F, F, F, N], {"BLOCK": 1024}),
    (softmax_rows, [F, F, N, N], {"BLOCK": 512}),
    (reduce_looped, [F, F, N, N], {"XBLOCK": 8, "RBLOCK": 128}),
    (embedding_rows, [L, F, F, N, N], {"BLOCK": 512}),
    (transpose_heads, [F, F, N, N], {"YBLOCK": 32, "XBLOCK": 32}),
    (rotary, [F, F, F, F, N], {"HALF": 32}),
    (matmul, [H, H, H] + [N] * 9, {"BM": 64, "BN": 64, "BK": 32}),
    (attention, [H, H, H, H, N, N, "fp32"], {"BM": 64, "BN": 64, "D": 64}),
    (kv_cache_write, [F, F, N, N, N, N], {"BLOCK": 128}),
    (cross_entropy_rows, [F, L, F, N], {"BLOCK": 512}),
    (adam_step, [F, F, F, F, N, "fp32"], {"BLOCK": 512}),
]


def main() -> None:
    here = Path(__file__).resolve().parent
    for architecture in (80, 90):
        for function, types, constants in KERNELS:
            names = function.arg_names
            signature = dict(zip(names, types, strict=False)) | dict.fromkeys(constants, "constexpr")
            divisible = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(types) if kind.startswith("*")}
            source = ASTSource(function, signature, {(names.index(k),): v for k, v in constants.items()}, divisible)
            compiled = triton.compile(source, target=GPUTarget("cuda", architecture, 32))
            text = compiled.asm["ptx"]
            lines = [line for line in text.splitlines() if not line.lstrip().startswith((".file", ".loc", "//"))]
            text = "\n".join(lines)
            text = text[: text.index(".section")] if ".section" in text else text
            (here / f"{function.fn.__name__}-sm_{architecture}.ptx").write_text(text.rstrip() + "\n")


if __name__ == "__main__":
    main()
