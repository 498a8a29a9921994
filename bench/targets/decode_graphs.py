"""Target: token generation with a static key-value cache, each token one replay of a CUDA graph.

A decoder-only transformer of its own (the Llama arrangement: RMS norm, rotary positions, gated feed-forward) with
random bfloat16 weights writes one token a step for every sequence of the batch, the likeliest one (greedy). Position,
token and cache live in GPU memory and are updated inside the graph, so a replay needs nothing from the host. The value
of a step holds the tokens and the bits of their logits. On a CPU the same step runs without a graph.

``--state-gib`` (default 4) is shared between weights (three quarters) and cache.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import driver_calls
import protocol
import transformer
from cuda_graph import captured

if TYPE_CHECKING:
    import torch

HEAD_SIZE = 64
VOCABULARY = 32000  # the size of Llama's first vocabulary
BYTES_PER_VALUE = 2  # bfloat16


@dataclass(frozen=True)
class Shape:
    """The model's dimensions."""

    width: int
    layers: int
    batch: int
    positions: int

    @property
    def heads(self) -> int:
        return self.width // HEAD_SIZE

    @property
    def hidden(self) -> int:
        """Width of the gated feed-forward part: 8/3 of the model's, rounded up to 64."""
        return -(-8 * self.width // 3 // 64) * 64

    @staticmethod
    def for_state(state_gib: float, batch: int) -> Shape:
        weights = 0.75 * state_gib * 2**30 / BYTES_PER_VALUE
        width = next((w for w, most in ((256, 3e7), (1024, 5e8), (2048, 2e9)) if weights < most), 4096)
        layer = 4 * width**2 + 3 * width * (-(-8 * width // 3 // 64) * 64)
        layers = max(1, round((weights - 2 * VOCABULARY * width) / layer))
        cache_per_position = 2 * layers * width * batch * BYTES_PER_VALUE
        positions = int(0.25 * state_gib * 2**30 / cache_per_position)
        return Shape(width, layers, batch, min(4096, max(64, positions)))


class Decoder:
    """The model and everything that a step reads or writes, all allocated once."""

    def __init__(self, shape: Shape, device: torch.device, seed: int) -> None:
        import torch

        self.shape = shape
        random = torch.Generator(device=device).manual_seed(seed)

        def weight(rows: int, columns: int) -> torch.Tensor:
            values = torch.randn(rows, columns, generator=random, device=device, dtype=torch.bfloat16)
            return values.mul_(columns**-0.5)

        width, hidden = shape.width, shape.hidden
        self.embedding = torch.randn(VOCABULARY, width, generator=random, device=device, dtype=torch.bfloat16)
        self.layers = [
            {
                "query_key_value": weight(3 * width, width),
                "output": weight(width, width),
                "gate_up": weight(2 * hidden, width),
                "down": weight(width, hidden),
            }
            for _ in range(shape.layers)
        ]
        self.head = weight(VOCABULARY, width)
        cache_shape = (shape.layers, 2, shape.batch, shape.heads, shape.positions, HEAD_SIZE)
        self.cache = torch.zeros(cache_shape, device=device, dtype=torch.bfloat16)
        self.position = torch.zeros(1, device=device, dtype=torch.long)
        self.token = torch.arange(1, shape.batch + 1, device=device, dtype=torch.long)
        self.logit = torch.zeros(shape.batch, device=device, dtype=torch.float32)
        self.places = torch.arange(shape.positions, device=device)
        frequency = 10000.0 ** (-torch.arange(0, HEAD_SIZE, 2, device=device, dtype=torch.float32) / HEAD_SIZE)
        angle = torch.arange(shape.positions, device=device, dtype=torch.float32)[:, None] * frequency
        self.cosine, self.sine = angle.cos(), angle.sin()

    def state_bytes(self) -> int:
        tensors = [self.embedding, self.head, self.cache, *(t for layer in self.layers for t in layer.values())]
        return sum(t.numel() * t.element_size() for t in tensors)

    def _rotated(self, x: torch.Tensor) -> torch.Tensor:
        cosine = self.cosine.index_select(0, self.position)
        sine = self.sine.index_select(0, self.position)
        return transformer.rotated(x, cosine, sine)

    def step(self) -> None:
        """One token for every sequence. Fixed shapes and addresses, and nothing of it waits for the host."""
        import torch

        shape = self.shape
        # Tokens further on than the position are not there yet; the cache is as long for the first as for the last.
        hidden_places = (self.places > self.position)[None, None, None, :]
        x = self.embedding.index_select(0, self.token)
        for number, layer in enumerate(self.layers):
            qkv = torch.nn.functional.linear(transformer.normed(x), layer["query_key_value"])
            query, key, value = qkv.view(shape.batch, 3, shape.heads, 1, HEAD_SIZE).unbind(dim=1)
            keys, values = self.cache[number, 0], self.cache[number, 1]
            keys.index_copy_(2, self.position, self._rotated(key))
            values.index_copy_(2, self.position, value)
            scores = torch.matmul(self._rotated(query), keys.transpose(-1, -2)).float() * HEAD_SIZE**-0.5
            weights = torch.softmax(scores.masked_fill(hidden_places, float("-inf")), dim=-1).to(x.dtype)
            mixed = torch.matmul(weights, values).reshape(shape.batch, shape.width)
            x = x + torch.nn.functional.linear(mixed, layer["output"])
            gate, up = torch.nn.functional.linear(transformer.normed(x), layer["gate_up"]).chunk(2, dim=-1)
            x = x + torch.nn.functional.linear(torch.nn.functional.silu(gate) * up, layer["down"])
        logits = torch.nn.functional.linear(transformer.normed(x), self.head).float()
        best, token = logits.max(dim=-1)
        self.logit.copy_(best)
        self.token.copy_(token)
        # At the end of the cache the text goes on from its beginning: the run has no natural end.
        self.position.copy_((self.position + 1) % shape.positions)


def main() -> None:
    parser = protocol.parser(__doc__ or "", steps=500, state_gib=4.0)
    parser.add_argument("--batch", type=int, default=4, help="sequences decoded at once")
    parser.add_argument("--alternate", type=int, default=0, help="past the interposer every so many steps")
    arguments = parser.parse_args()
    protocol.set_environment()
    log = protocol.Log(arguments.log, arguments.pace_ms, arguments.hold)

    import torch

    torch.manual_seed(arguments.seed)
    torch.backends.cuda.matmul.allow_tf32 = False
    device = torch.device(arguments.device)
    shape = Shape.for_state(arguments.state_gib, arguments.batch)
    with torch.inference_mode():
        decoder = Decoder(shape, device, arguments.seed)
        next_token = captured(decoder.step, device)
        alternating = driver_calls.Alternating(arguments.alternate)
        log.start(
            "decode_graphs",
            decoder.state_bytes(),
            places=alternating.places,
            width=shape.width,
            layers=shape.layers,
            positions=shape.positions,
            tokens_per_step=shape.batch,
        )
        for _ in range(arguments.steps):
            alternating.begin()
            next_token()
            tokens = decoder.token.tolist()
            logits = [protocol.float_bits(v) for v in decoder.logit.tolist()]
            log.step("-".join(f"{t}:{v}" for t, v in zip(tokens, logits, strict=True)), **alternating.end())
        cache = decoder.cache.view(torch.int16).sum(dtype=torch.int64)
    log.done(hashlib.sha256(f"{int(cache)} {decoder.position.tolist()}".encode()).hexdigest())


if __name__ == "__main__":
    main()
