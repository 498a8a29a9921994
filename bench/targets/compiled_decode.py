"""Target: token generation by a model whose GPU code is all made by torch.compile (Triton), for benchmarks of shadow
execution.

A decoder-only transformer (RMS norm, rotary embedding, grouped queries, SiLU-gated feed-forward) with random bfloat16
weights writes one token after the other. Products of matrices and vectors are written as sums, which Triton reads
weights for as fast as memory gives them; so no library's kernel is in a step, and PyTorch launches none of its own
either. A step is ``--tokens`` tokens; its value is the last of them and the bits of its logit. The key-value cache has
``--positions`` places and is written round and round.

torch.compile keeps what it makes in $TORCHINDUCTOR_CACHE_DIR. It needs a C++ compiler, and no network.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import driver_calls
import protocol
import transformer

if TYPE_CHECKING:
    import torch

HEAD_SIZE = 128
QUERIES_PER_KEY = 4
ROTARY_BASE = 500_000.0


@dataclass(frozen=True)
class Shape:
    """The model's dimensions."""

    width: int
    layers: int
    positions: int
    vocabulary: int = 32_000

    @property
    def hidden(self) -> int:
        return self.width * 11 // 4

    @property
    def heads(self) -> int:
        return self.width // HEAD_SIZE

    @property
    def key_heads(self) -> int:
        return self.heads // QUERIES_PER_KEY


def product(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """A matrix times a vector."""
    return (weight.float() * x.float()).sum(-1).to(x.dtype)


def layer(
    x: torch.Tensor, weights: tuple[torch.Tensor, ...], keys: torch.Tensor, values: torch.Tensor,
    cosine: torch.Tensor, sine: torch.Tensor, place: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """One layer for one token; writes its place in the cache."""
    import torch

    mixing, output, gate, up, down = weights
    key_heads, positions, _ = keys.shape
    mixed = product(mixing, transformer.normed(x)).view(-1, HEAD_SIZE)
    query, key, value = mixed.split((key_heads * QUERIES_PER_KEY, key_heads, key_heads))
    cosine, sine = cosine.index_select(0, place), sine.index_select(0, place)
    query, key = (transformer.rotated(part, cosine, sine) for part in (query, key))
    keys.index_copy_(1, place, key[:, None])
    values.index_copy_(1, place, value[:, None])
    query = query.view(key_heads, QUERIES_PER_KEY, 1, HEAD_SIZE)
    scores = (query.float() * keys[:, None].float()).sum(-1) * HEAD_SIZE**-0.5
    scores = scores.masked_fill(torch.arange(positions, device=x.device) > place, float("-inf"))
    found = (torch.softmax(scores, -1)[..., None] * values[:, None].float()).sum(-2)
    x = x + product(output, found.reshape(-1).to(x.dtype))
    inner = transformer.normed(x)
    gated = product(gate, inner).float()
    return x + product(down, (gated * gated.sigmoid() * product(up, inner).float()).to(x.dtype))


def first(embedding: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
    return embedding.index_select(0, token).view(-1)


def last(
    x: torch.Tensor, head: torch.Tensor, token: torch.Tensor, logit: torch.Tensor, place: torch.Tensor, positions: int
) -> None:
    """The next token, and the place it goes to."""
    logits = product(head, transformer.normed(x)).float()
    best, which = logits.max(dim=-1)
    logit.copy_(best[None])
    token.copy_(which[None])
    place.copy_((place + 1) % positions)


class Model:
    """The weights, and everything that a token reads or writes, all allocated once."""

    def __init__(self, shape: Shape, device: torch.device, seed: int, dtype: torch.dtype) -> None:
        import torch

        random = torch.Generator(device=device).manual_seed(seed)

        def weight(rows: int, columns: int) -> torch.Tensor:
            return torch.randn(rows, columns, generator=random, device=device, dtype=dtype).mul_(columns**-0.5)

        width, hidden = shape.width, shape.hidden
        mixed = (shape.heads + 2 * shape.key_heads) * HEAD_SIZE
        rows = ((mixed, width), (width, width), (hidden, width), (hidden, width), (width, hidden))
        self.shape = shape
        self.embedding, self.head = weight(shape.vocabulary, width), weight(shape.vocabulary, width)
        self.layers = [tuple(weight(*one) for one in rows) for _ in range(shape.layers)]
        cache = (shape.key_heads, shape.positions, HEAD_SIZE)
        # Tensors of their own: views of one would be taken for one input that is written to twice.
        self.caches = [
            tuple(torch.zeros(cache, device=device, dtype=dtype) for _ in range(2)) for _ in range(shape.layers)
        ]
        self.place = torch.zeros(1, device=device, dtype=torch.long)
        self.token = torch.zeros(1, device=device, dtype=torch.long)
        self.logit = torch.zeros(1, device=device, dtype=torch.float32)
        frequency = ROTARY_BASE ** (-torch.arange(0, HEAD_SIZE, 2, device=device, dtype=torch.float32) / HEAD_SIZE)
        angle = torch.arange(shape.positions, device=device).float()[:, None] * frequency
        self.cosine, self.sine = angle.cos(), angle.sin()
        self._first, self._layer, self._last = (
            torch.compile(one, fullgraph=True, dynamic=False) for one in (first, layer, last)
        )

    def tensors(self) -> list[torch.Tensor]:
        return [self.embedding, self.head, *(t for group in (*self.layers, *self.caches) for t in group)]

    def write_token(self) -> None:
        x = self._first(self.embedding, self.token)
        for weights, (keys, values) in zip(self.layers, self.caches, strict=True):
            x = self._layer(x, weights, keys, values, self.cosine, self.sine, self.place)
        self._last(x, self.head, self.token, self.logit, self.place, self.shape.positions)


def choose_by_rule() -> None:
    """Has torch.compile take one configuration of each kernel without measuring any: a measurement decides otherwise in
    another process, and with it the order of sums, and it runs kernels as often as it likes."""
    from torch._inductor import config

    for name, value in (
        ("max_autotune", False), ("max_autotune_pointwise", False), ("coordinate_descent_tuning", False),
        ("dynamic_scale_rblock", False), ("triton.autotune_pointwise", False), ("triton.multi_kernel", 0),
        ("deterministic", True),
    ):  # fmt: skip
        owner, _, attribute = name.rpartition(".")
        place = getattr(config, owner) if owner else config
        if hasattr(place, attribute):  # versions differ in what there is
            setattr(place, attribute, value)


def bits(tensors: Iterable[torch.Tensor]) -> int:
    """The sum of all tensors' bits as integers."""
    import torch

    return sum(int(one.view(torch.int16).sum(dtype=torch.int64)) for one in tensors)


def main() -> None:
    parser = protocol.parser(__doc__ or "", steps=1_000_000)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--width", type=int, default=2048, help="a multiple of 512")
    parser.add_argument("--positions", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=8, help="of a step")
    parser.add_argument("--alternate", type=int, default=0, help="past the interposer every so many steps")
    arguments = parser.parse_args()
    protocol.set_environment()
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # no tree of processes: there are few kernels
    log = protocol.Log(arguments.log, arguments.pace_ms, arguments.hold)

    import torch

    choose_by_rule()
    shape = Shape(arguments.width, arguments.layers, arguments.positions)
    device = torch.device(arguments.device)
    with torch.inference_mode():
        model = Model(shape, device, arguments.seed, torch.bfloat16)
        weights = bits([model.embedding, model.head, *(t for group in model.layers for t in group)])
        model.write_token()  # compiles
        first_token = f"{int(model.token.item())}:{protocol.float_bits(float(model.logit.item()))}"
        tensors = model.tensors()
        alternating = driver_calls.Alternating(arguments.alternate)
        log.start(
            "compiled_decode",
            sum(tensor.numel() * tensor.element_size() for tensor in tensors),
            layers=shape.layers,
            tokens_per_step=arguments.tokens,
            places=alternating.places,
            # Where processes differ, this tells whether it was so from the beginning.
            weights=weights,
            first_token=first_token,
        )
        for _ in range(arguments.steps):
            alternating.begin()
            for _ in range(arguments.tokens):
                model.write_token()
            token, logit = int(model.token.item()), float(model.logit.item())
            log.step(f"{token}:{protocol.float_bits(logit)}", **alternating.end())
        checksum = bits(one for pair in model.caches for one in pair)
    log.done(f"{checksum} {int(model.place.item())}")


if __name__ == "__main__":
    main()
