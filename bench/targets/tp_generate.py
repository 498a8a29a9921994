"""Target: tensor-parallel generation of a transformer, one rank of a job.

Every layer's attention heads and feed-forward columns are split over the ranks, whose partial sums meet in an
all_reduce after each half (NCCL on CUDA, gloo with `--device cpu`). Weights are random, made from `--seed`, the same
whatever the number of ranks. One step is one token of each sequence, greedily chosen, with a static KV cache; when that
is full, generation begins anew with the next prompt. The value of a step is the tokens. Each rank has a log of its own
(ranks.log_path); its first line has the bus bandwidth of an all_reduce.
"""

from __future__ import annotations

from typing import Any

import protocol
import ranks

VOCABULARY = 8192


def main() -> None:
    parser = protocol.parser(__doc__ or "", steps=200)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--batch", type=int, default=8, help="sequences")
    parser.add_argument("--length", type=int, default=256, help="tokens of a sequence, then the next prompt")
    arguments = parser.parse_args()
    protocol.set_environment()

    import torch
    import torch.distributed as dist
    from torch.nn import functional

    rank, device = ranks.join(arguments.device)
    count = dist.get_world_size()
    width, heads = arguments.width, arguments.width // 64
    if heads % count:
        raise SystemExit(f"{heads} heads cannot be split over {count} ranks")
    mine = slice(rank * width // count, (rank + 1) * width // count)  # of the heads' columns
    wide = slice(rank * 4 * width // count, (rank + 1) * 4 * width // count)
    kind = torch.bfloat16 if device.type == "cuda" else torch.float32
    generator = torch.Generator().manual_seed(arguments.seed)

    def weight(*shape: int) -> Any:
        return torch.randn(*shape, generator=generator) * shape[-1] ** -0.5

    def part(whole: Any, rows: slice = slice(None), columns: slice = slice(None)) -> Any:
        return whole[rows, columns].to(device=device, dtype=kind).contiguous()

    embedding = part(weight(VOCABULARY, width))
    layers = []
    for _ in range(arguments.layers):
        query, key, value, out = (weight(width, width) for _ in range(4))
        up, down = weight(4 * width, width), weight(width, 4 * width)
        layers.append(
            (
                *(part(one, rows=mine) for one in (query, key, value)),
                part(out, columns=mine),
                part(up, rows=wide),
                part(down, columns=wide),
            )
        )
    shape = (arguments.layers, 2, arguments.batch, heads // count, arguments.length, 64)
    cache = torch.zeros(shape, device=device, dtype=kind)

    def normal(hidden: Any) -> Any:
        return functional.layer_norm(hidden, (width,))

    def everybody(partial: Any) -> Any:
        dist.all_reduce(partial)
        return partial

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def token(last: Any, position: int) -> Any:
        hidden = embedding[last]
        for number, (query, key, value, out, up, down) in enumerate(layers):
            inside = normal(hidden)
            asked, found, held = (
                functional.linear(inside, one).view(arguments.batch, heads // count, 64) for one in (query, key, value)
            )
            cache[number, 0, :, :, position] = found
            cache[number, 1, :, :, position] = held
            keys, values = cache[number, :, :, :, : position + 1]
            scores = (asked.unsqueeze(2) @ keys.transpose(2, 3)).float() / 8.0
            seen = (scores.softmax(-1).to(kind) @ values).reshape(arguments.batch, -1)
            hidden = hidden + everybody(functional.linear(seen, out))
            inside = functional.gelu(functional.linear(normal(hidden), up))
            hidden = hidden + everybody(functional.linear(inside, down))
        return functional.linear(normal(hidden), embedding).argmax(-1)

    log = protocol.Log(ranks.log_path(rank), arguments.pace_ms, arguments.hold)
    state_bytes = cache.nbytes + embedding.nbytes + sum(one.nbytes for layer in layers for one in layer)
    prompt, position = 0, 0
    tokens = torch.zeros(arguments.batch, dtype=torch.int64, device=device)
    token(tokens, 0)  # cuBLAS and the communicator are ready
    log.start("tp_generate", state_bytes, rank=rank, busbw_gb_s=ranks.bus_bandwidth(device))
    for _ in range(arguments.steps):
        if position == 0:
            first = torch.arange(arguments.batch, device=device)
            tokens = (first * 7919 + prompt * 104729 + arguments.seed) % VOCABULARY
        tokens = token(tokens, position)
        position += 1
        if position == arguments.length:
            prompt, position = prompt + 1, 0
        log.step(".".join(f"{one:x}" for one in tokens.tolist()))
    log.done(f"{int(cache.view(torch.int16 if kind == torch.bfloat16 else torch.int32).sum(dtype=torch.int64)):x}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
