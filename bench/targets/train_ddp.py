"""Target: data-parallel training of a GPT-2-class transformer, one rank of a `torchrun`.

Rank R appends JSON lines to $TRAIN_DDP_LOG.R (not `--log`, which torchrun would take for one of its own options):
{"start", "pid", "busbw_gb_s"}, then {"step", "value", "time"} with the bits of its loss, last {"done", "value"} with a
checksum of the moments. NCCL on CUDA, gloo with `--device cpu`. Weights and data are random, made from `--seed`; each
rank has data of its own, so that a gradient that got lost or doubled shows.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import protocol

VOCABULARY = 8192
BUS_BYTES = 256 << 20
BUS_ROUNDS = 20


def main() -> None:
    parser = protocol.parser(__doc__ or "", steps=100)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--batch", type=int, default=4, help="sequences a step and rank")
    parser.add_argument("--sequence", type=int, default=256, help="tokens a sequence")
    arguments = parser.parse_args()
    protocol.set_environment()

    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    rank, local = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    path = Path(f"{os.environ['TRAIN_DDP_LOG']}.{rank}")

    def say(**members: Any) -> None:
        with path.open("a") as file:  # held open while it grows, it could not be restored
            file.write(json.dumps({**members, "time": time.time()}) + "\n")

    on_gpu = arguments.device == "cuda"
    if on_gpu:
        torch.cuda.set_device(local)
    device = torch.device("cuda", local) if on_gpu else torch.device("cpu")
    torch.manual_seed(arguments.seed)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    dist.init_process_group("nccl" if on_gpu else "gloo")

    layer = nn.TransformerEncoderLayer(
        arguments.width, arguments.width // 64, 4 * arguments.width, dropout=0.1, batch_first=True, norm_first=True
    )
    model = nn.Sequential(
        nn.Embedding(VOCABULARY, arguments.width),
        nn.TransformerEncoder(layer, arguments.layers, enable_nested_tensor=False),
        nn.Linear(arguments.width, VOCABULARY),
    ).to(device)
    ddp = DistributedDataParallel(model, device_ids=[local] if on_gpu else None)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-4)
    tokens = torch.Generator().manual_seed(arguments.seed + rank)

    def step() -> torch.Tensor:
        batch = torch.randint(VOCABULARY, (arguments.batch, arguments.sequence + 1), generator=tokens).to(device)
        with torch.autocast(device.type, dtype=torch.bfloat16):
            logits = ddp(batch[:, :-1])
        loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        return loss.detach()

    step()
    say(start=True, pid=os.getpid(), busbw_gb_s=_bus_bandwidth(torch, dist, device) if on_gpu else None)
    for number in range(1, arguments.steps + 1):
        say(step=number, value=protocol.float_bits(float(step())))
        if arguments.pace_ms:
            time.sleep(arguments.pace_ms / 1000)
    total = 0
    for state in optimizer.state.values():
        for tensor in (state["exp_avg"], state["exp_avg_sq"]):
            total = (total * 31 + int(tensor.view(torch.int32).sum(dtype=torch.int64))) % 2**64
    say(done=True, value=f"{total:016x}")
    dist.destroy_process_group()


def _bus_bandwidth(torch: Any, dist: Any, device: Any) -> float:
    """GB/s of an all_reduce, counted as nccl-tests do (bytes * 2 (n-1)/n / time): the best of three."""
    buffer = torch.ones(BUS_BYTES // 4, device=device)
    ranks = dist.get_world_size()
    best = 0.0
    for _ in range(4):  # the first one connects
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(BUS_ROUNDS):
            dist.all_reduce(buffer)
        end.record()
        end.synchronize()
        best = max(best, BUS_ROUNDS * BUS_BYTES * 2 * (ranks - 1) / ranks / (begin.elapsed_time(end) / 1e3) / 1e9)
    return best


if __name__ == "__main__":
    main()
