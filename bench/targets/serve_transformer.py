"""Target: a served language model that answers requests one after the other, for benchmarks of increments.

A decoder-only transformer of its own with the dimensions of an 8-billion-parameter Llama (32 layers of width 4096, 32
query and 8 key-value heads of 128, feed-forward width 14336, vocabulary 128256) and random bfloat16 weights. A step is
one request: ``--tokens-in`` tokens (default 1155) are read at once, then ``--tokens-out`` (211) are written, each by
one replay of a CUDA graph. The key-value cache is static and is written from its beginning by each request. The value
of a step holds the tokens written and the bits of the last one's logit. After each ``--burst`` requests it waits for
SIGUSR1.

``--layers``, ``--width`` (a multiple of 512) and ``--dtype`` make another model; the program of a small one can be
checked on a CPU.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import driver_calls
import protocol
import transformer
from cuda_graph import captured

if TYPE_CHECKING:
    import torch

HEAD_SIZE = 128
QUERIES_PER_KEY = 4
ROTARY_BASE = 500_000.0  # Llama 3's


@dataclass(frozen=True)
class Shape:
    """The model's dimensions."""

    width: int = 4096
    layers: int = 32
    hidden: int = 14336
    vocabulary: int = 128_256
    positions: int = 2048

    @property
    def heads(self) -> int:
        return self.width // HEAD_SIZE

    @property
    def key_heads(self) -> int:
        return self.heads // QUERIES_PER_KEY


class Server:
    """The model and everything that a request reads or writes, all allocated once."""

    def __init__(self, shape: Shape, device: torch.device, seed: int, dtype: torch.dtype) -> None:
        import torch

        self.shape = shape
        self.device = device
        random = torch.Generator(device=device).manual_seed(seed)

        def weight(rows: int, columns: int) -> torch.Tensor:
            values = torch.randn(rows, columns, generator=random, device=device, dtype=dtype)
            return values.mul_(columns**-0.5)

        width, hidden = shape.width, shape.hidden
        key_width = shape.key_heads * HEAD_SIZE
        self.embedding = weight(shape.vocabulary, width)
        self.head = weight(shape.vocabulary, width)
        self.layers = [
            {
                "query_key_value": weight(width + 2 * key_width, width),
                "output": weight(width, width),
                "gate_up": weight(2 * hidden, width),
                "down": weight(width, hidden),
            }
            for _ in range(shape.layers)
        ]
        cache_shape = (shape.layers, 2, 1, shape.key_heads, shape.positions, HEAD_SIZE)
        self.cache = torch.zeros(cache_shape, device=device, dtype=dtype)
        self.position = torch.zeros(1, device=device, dtype=torch.long)
        self.token = torch.zeros(1, device=device, dtype=torch.long)
        self.logit = torch.zeros(1, device=device, dtype=torch.float32)
        self.places = torch.arange(shape.positions, device=device)
        frequency = ROTARY_BASE ** (-torch.arange(0, HEAD_SIZE, 2, device=device, dtype=torch.float32) / HEAD_SIZE)
        angle = self.places.float()[:, None] * frequency
        self.cosine, self.sine = angle.cos(), angle.sin()

    def tensors(self) -> list[torch.Tensor]:
        return [self.embedding, self.head, self.cache, *(t for layer in self.layers for t in layer.values())]

    def _rotated(self, x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        cosine, sine = self.cosine.index_select(0, places), self.sine.index_select(0, places)
        return transformer.rotated(x, cosine, sine)

    def _attended(self, query: torch.Tensor, number: int, places: torch.Tensor) -> torch.Tensor:
        """What one token finds in the cache of layer ``number``: heads by tokens by HEAD_SIZE."""
        import torch

        shape = self.shape
        keys, values = self.cache[number, 0], self.cache[number, 1]
        # Queries that share a key are rows of one product. The cache is as long for the first token as for the last.
        rows = query.reshape(1, shape.key_heads, QUERIES_PER_KEY, HEAD_SIZE)
        scores = torch.matmul(rows, keys.transpose(-1, -2)).float() * HEAD_SIZE**-0.5
        scores = scores.masked_fill(self.places > places, float("-inf"))
        return torch.matmul(torch.softmax(scores, dim=-1).to(query.dtype), values).view_as(query)

    def _forward(self, tokens: torch.Tensor, places: torch.Tensor) -> None:
        """Reads ``tokens`` at ``places`` (one token, or all from place 0 on) and leaves the likeliest next one. Nothing
        waits for the host."""
        import torch

        shape, count = self.shape, tokens.shape[0]
        functional: Any = torch.nn.functional
        x = self.embedding.index_select(0, tokens)
        for number, layer in enumerate(self.layers):
            mixed = functional.linear(transformer.normed(x), layer["query_key_value"])
            mixed = mixed.view(1, count, shape.heads + 2 * shape.key_heads, HEAD_SIZE).transpose(1, 2)
            query, key, value = mixed.split((shape.heads, shape.key_heads, shape.key_heads), dim=1)
            query, key = self._rotated(query, places), self._rotated(key, places)
            self.cache[number, 0].index_copy_(2, places, key)
            self.cache[number, 1].index_copy_(2, places, value)
            if count == 1:
                found = self._attended(query, number, places)
            else:
                key, value = (part.repeat_interleave(QUERIES_PER_KEY, dim=1) for part in (key, value))
                found = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
            x = x + functional.linear(found.transpose(1, 2).reshape(count, shape.width), layer["output"])
            gate, up = functional.linear(transformer.normed(x), layer["gate_up"]).chunk(2, dim=-1)
            x = x + functional.linear(functional.silu(gate) * up, layer["down"])
        logits = functional.linear(transformer.normed(x[-1:]), self.head).float()
        best, token = logits.max(dim=-1)
        self.logit.copy_(best)
        self.token.copy_(token)

    def read(self, tokens: torch.Tensor) -> None:
        """The request itself, from position 0 on."""
        self._forward(tokens, self.places[: tokens.shape[0]])
        self.position.fill_(tokens.shape[0])

    def write_token(self) -> None:
        """One token more. Fixed shapes and addresses: this is what the graph holds."""
        self._forward(self.token, self.position)
        self.position.add_(1)


def main() -> None:
    parser = protocol.parser(__doc__ or "", steps=1_000_000)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of weights and cache")
    parser.add_argument("--tokens-in", type=int, default=1155)
    parser.add_argument("--tokens-out", type=int, default=211)
    parser.add_argument("--burst", type=int, default=5, help="requests before it waits for SIGUSR1; 0: never")
    parser.add_argument("--alternate", type=int, default=0, help="past the interposer every so many steps")
    arguments = parser.parse_args()
    protocol.set_environment()
    protocol.hold_signals()
    log = protocol.Log(arguments.log, arguments.pace_ms, arguments.hold)

    import torch

    torch.manual_seed(arguments.seed)
    device = torch.device(arguments.device)
    small = arguments.width < 4096
    shape = Shape(
        width=arguments.width,
        layers=arguments.layers,
        hidden=arguments.width * 7 // 2,
        vocabulary=1024 if small else 128_256,
        positions=-(-(arguments.tokens_in + arguments.tokens_out + 4) // 64) * 64,
    )
    prompts = torch.Generator(device="cpu").manual_seed(arguments.seed)
    with torch.inference_mode():
        server = Server(shape, device, arguments.seed, getattr(torch, arguments.dtype))
        next_token = captured(server.write_token, server.device)
        tensors = server.tensors()
        if arguments.alternate:  # what one request looks up must be looked up before its calls can be switched
            server.read(torch.zeros(arguments.tokens_in, device=device, dtype=torch.long))
            next_token()
            server.token.item()
        alternating = driver_calls.Alternating(arguments.alternate)
        log.start(
            "serve_transformer",
            sum(tensor.numel() * tensor.element_size() for tensor in tensors),
            parameters=sum(tensor.numel() for tensor in tensors) - server.cache.numel(),
            layers=shape.layers,
            width=shape.width,
            places=alternating.places,
            tokens_per_step=arguments.tokens_out,
        )
        for _ in protocol.in_bursts(arguments.steps, arguments.burst):
            alternating.begin()
            prompt = torch.randint(shape.vocabulary, (arguments.tokens_in,), generator=prompts).to(device)
            server.read(prompt)
            written = []
            for _ in range(arguments.tokens_out):
                next_token()
                written.append(int(server.token.item()))
            digest = hashlib.sha256(repr(written).encode()).hexdigest()[:16]
            value = f"{digest}:{protocol.float_bits(float(server.logit.item()))}"
            log.step(value, **alternating.end())
        checksum = int(server.cache.view(torch.int16).sum(dtype=torch.int64))
    log.done(f"{checksum} {server.position.tolist()}")


if __name__ == "__main__":
    main()
