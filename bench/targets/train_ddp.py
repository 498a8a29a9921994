"""Target: data-parallel training of a GPT-2-class transformer, one rank of a job.

Each rank has a log of its own (ranks.log_path), whose first line has the bus bandwidth of an all_reduce. The value of
a step is the bits of the rank's loss, the end's a checksum of the moments. NCCL on CUDA, gloo with `--device cpu`.
Weights and data are random, made from `--seed`; each rank has data of its own, so that a gradient that got lost or
doubled shows.
"""

from __future__ import annotations

import driver_calls
import protocol
import ranks

VOCABULARY = 8192


def main() -> None:
    parser = protocol.parser(__doc__ or "", steps=100)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--batch", type=int, default=4, help="sequences a step and rank")
    parser.add_argument("--sequence", type=int, default=256, help="tokens a sequence")
    parser.add_argument("--alternate", type=int, default=0, help="past the interposer every so many steps")
    arguments = parser.parse_args()
    protocol.set_environment()

    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    rank, device = ranks.join(arguments.device)
    torch.manual_seed(arguments.seed)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False

    layer = nn.TransformerEncoderLayer(
        arguments.width, arguments.width // 64, 4 * arguments.width, dropout=0.1, batch_first=True, norm_first=True
    )
    model = nn.Sequential(
        nn.Embedding(VOCABULARY, arguments.width),
        nn.TransformerEncoder(layer, arguments.layers, enable_nested_tensor=False),
        nn.Linear(arguments.width, VOCABULARY),
    ).to(device)
    ddp = DistributedDataParallel(model, device_ids=[device.index] if device.type == "cuda" else None)
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
    log = protocol.Log(ranks.log_path(rank), arguments.pace_ms, arguments.hold)
    state_bytes = 4 * sum(one.nbytes for one in model.parameters())  # with gradients and two moments
    bandwidth = ranks.bus_bandwidth(device)
    alternating = driver_calls.Alternating(arguments.alternate)
    log.start("train_ddp", state_bytes, rank=rank, busbw_gb_s=bandwidth, places=alternating.places)
    for _ in range(arguments.steps):
        alternating.begin()  # every rank switches before the same step
        loss = float(step())
        log.step(protocol.float_bits(loss), **alternating.end())
    total = 0
    for state in optimizer.state.values():
        for tensor in (state["exp_avg"], state["exp_avg_sq"]):
            total = (total * 31 + int(tensor.view(torch.int32).sum(dtype=torch.int64))) % 2**64
    log.done(f"{total:016x}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
