"""Target: training of a GPT-2 model (transformers) with AdamW, from random weights on synthetic tokens.

``--state-gib`` (1 to 64, default 16) is the size of weights, gradients and optimizer moments together: 16 bytes a
parameter. The value of a step is its loss, the final digest covers every bit of weights and moments. Dropout is on, so
the random number generator is part of the state. Attention is the plain one, made of matrix products and softmax,
because that is the one whose gradient is the same in every run on every library version.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import driver_calls
import protocol
import saving

if TYPE_CHECKING:
    import torch

VOCABULARY = 50257  # GPT-2's
BYTES_PER_PARAMETER = 16  # weight, gradient and two moments of AdamW, 4 bytes each
HEAD_SIZE = 64  # of every published GPT-2


def shape_for(state_gib: float, positions: int) -> tuple[int, int]:
    """Width and number of layers of a GPT-2 whose training state is about ``state_gib`` GiB."""
    parameters = state_gib * 2**30 / BYTES_PER_PARAMETER
    # Widths of the published models (gpt2, -medium, -large, -xl), then one more for what is larger than them.
    width = next(
        (w for w, most in ((256, 3e7), (768, 2e8), (1024, 5e8), (1280, 9e8), (1600, 2e9)) if parameters < most), 2560
    )
    embedding = (VOCABULARY + positions) * width
    layer = 12 * width**2 + 13 * width
    return width, max(1, round((parameters - embedding) / layer))


def state_checksum(tensors: list[torch.Tensor]) -> str:
    """Sums the bits of every tensor as integers: the same whatever the order of the additions."""
    import torch

    total = 0
    for tensor in tensors:
        total = (total * 31 + int(tensor.detach().contiguous().view(torch.int32).sum(dtype=torch.int64))) % 2**64
    return f"{total:016x}"


def main() -> None:
    parser = protocol.parser(__doc__ or "", steps=50, state_gib=16.0)
    parser.add_argument("--batch", type=int, default=4, help="sequences a step")
    parser.add_argument("--sequence", type=int, default=256, help="tokens a sequence")
    parser.add_argument(
        "--precision", choices=("bf16", "fp32"), default="bf16", help="bf16: autocast over fp32 weights"
    )
    parser.add_argument("--warm-up", type=int, default=2, help="steps before the first logged one")
    parser.add_argument("--save", choices=("none", "torch", "async"), default="none", help="at SIGUSR2 (saving.py)")
    parser.add_argument("--save-to", default="", metavar="FOLDER", help="where to")
    parser.add_argument("--alternate", type=int, default=0, help="past the interposer every so many steps")
    arguments = parser.parse_args()
    protocol.set_environment()
    log = protocol.Log(arguments.log, arguments.pace_ms, arguments.hold)

    import torch
    from transformers import GPT2Config, GPT2LMHeadModel  # type: ignore[import-not-found,unused-ignore]

    torch.manual_seed(arguments.seed)
    # warn_only: every operation used here has a deterministic form; a warning names one that would not.
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    device = torch.device(arguments.device)

    width, layers = shape_for(arguments.state_gib, arguments.sequence)
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=arguments.sequence,
        n_embd=width,
        n_layer=layers,
        n_head=width // HEAD_SIZE,
        use_cache=False,
        attn_implementation="eager",
    )
    with device:  # weights are made where they live: a billion of them on the CPU would take a minute
        model = GPT2LMHeadModel(config)
    model = model.to(device=device, dtype=torch.float32)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=device.type == "cuda")
    tokens = torch.Generator(device="cpu").manual_seed(arguments.seed)
    positions = torch.arange(arguments.sequence, device=device).unsqueeze(0)

    def step() -> float:
        batch = torch.randint(VOCABULARY, (arguments.batch, arguments.sequence), generator=tokens).to(device)
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=arguments.precision == "bf16"):
            output: Any = model(input_ids=batch, labels=batch, position_ids=positions)
        output.loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)  # gradients stay allocated: the state has one size
        loss = float(output.loss.detach())
        if not math.isfinite(loss):
            raise SystemExit("train_gpt2: the loss is not finite; the result is worthless")
        return loss

    for _ in range(arguments.warm_up):
        step()
    parameters = sum(p.numel() for p in model.parameters())
    reserved = torch.cuda.memory_reserved(device) if device.type == "cuda" else 0
    alternating = driver_calls.Alternating(arguments.alternate)
    log.start(
        "train_gpt2",
        parameters * BYTES_PER_PARAMETER,
        parameters=parameters,
        layers=layers,
        width=width,
        reserved_bytes=reserved,
        places=alternating.places,
        tokens_per_step=arguments.batch * arguments.sequence,
    )
    saver = saving.Saver(arguments.save, arguments.save_to, model, optimizer, log)
    for _ in range(arguments.steps):
        alternating.begin()
        loss = step()
        log.step(protocol.float_bits(loss), **alternating.end())
        saver.between_steps()

    tensors: list[torch.Tensor] = list(model.parameters())
    for state in optimizer.state.values():
        tensors += [state["exp_avg"], state["exp_avg_sq"]]
    log.done(state_checksum(tensors))


if __name__ == "__main__":
    main()
