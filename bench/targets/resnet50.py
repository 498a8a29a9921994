"""Target: ResNet-50 training (torchvision) with DataLoader workers that make the images.

The workers are forked processes that share memory and pipes with the trainer, so this target is a process tree. By
default they start before CUDA does, as in a script that builds its data pipeline first; with ``--workers-start after``
they are forked from a process that has a GPU context already. The value of a step is its loss.
"""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING

import protocol

if TYPE_CHECKING:
    import torch

CLASSES = 1000  # ImageNet's


class SyntheticImages:
    """A map-style data set: an image is a function of its index and the seed alone, whichever worker makes it."""

    def __init__(self, length: int, side: int, seed: int) -> None:
        self._length = length
        self._side = side
        self._seed = seed

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        import torch

        random = torch.Generator().manual_seed(self._seed * 1_000_003 + index)
        image = torch.randint(256, (3, self._side, self._side), dtype=torch.uint8, generator=random)
        return image, int(torch.randint(CLASSES, (1,), generator=random))


def main() -> None:
    parser = protocol.parser(__doc__ or "", steps=50)
    parser.add_argument("--batch", type=int, default=32, help="images a step")
    parser.add_argument("--side", type=int, default=224, help="pixels a side")
    parser.add_argument("--workers", type=int, default=4, help="DataLoader worker processes")
    parser.add_argument(
        "--workers-start", choices=("before", "after"), default="before", help="before or after CUDA does"
    )
    parser.add_argument("--warm-up", type=int, default=2, help="steps before the first logged one")
    arguments = parser.parse_args()
    protocol.set_environment()
    log = protocol.Log(arguments.log, arguments.pace_ms, arguments.hold)

    import torch
    import torchvision  # type: ignore[import-not-found,import-untyped,unused-ignore]
    from torch.utils.data import DataLoader

    torch.manual_seed(arguments.seed)
    # warn_only: max pooling's gradient is marked as not deterministic for other memory layouts than the one used here.
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_tf32 = False
    device = torch.device(arguments.device)

    steps = arguments.warm_up + arguments.steps
    loader = DataLoader(
        SyntheticImages(steps * arguments.batch, arguments.side, arguments.seed),  # type: ignore[arg-type,unused-ignore]
        batch_size=arguments.batch,
        num_workers=arguments.workers,
        multiprocessing_context="fork" if arguments.workers else None,
        generator=torch.Generator().manual_seed(arguments.seed),
    )
    batches = iter(loader) if arguments.workers_start == "before" else None

    model = torchvision.models.resnet50(weights=None, num_classes=CLASSES).to(device)
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    if batches is None:
        batches = iter(loader)

    def step(images: torch.Tensor, labels: torch.Tensor) -> float:
        pixels = images.to(device).float().div_(255.0)
        loss = torch.nn.functional.cross_entropy(model(pixels), labels.to(device))
        optimizer.zero_grad(set_to_none=False)
        loss.backward()
        optimizer.step()
        result = float(loss.detach())
        if not math.isfinite(result):
            raise SystemExit("resnet50: the loss is not finite; the result is worthless")
        return result

    for images, labels in itertools.islice(batches, arguments.warm_up):
        step(images, labels)
    state_bytes = 3 * sum(p.numel() * p.element_size() for p in model.parameters())  # weights, gradients, momentum
    reserved = torch.cuda.memory_reserved(device) if device.type == "cuda" else 0
    log.start("resnet50", state_bytes, reserved_bytes=reserved, workers=arguments.workers)
    for images, labels in batches:
        log.step(protocol.float_bits(step(images, labels)))

    total = 0
    for tensor in itertools.chain(model.parameters(), (s["momentum_buffer"] for s in optimizer.state.values())):
        total = (total * 31 + int(tensor.detach().view(torch.int32).sum(dtype=torch.int64))) % 2**64
    log.done(f"{total:016x}")


if __name__ == "__main__":
    main()
