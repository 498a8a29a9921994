"""A step of a target as the replay of a CUDA graph. Not for the driver-API targets: this is PyTorch's."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def captured(step: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """The replay of `step`, which is run three times first; on another device than a GPU the step itself."""
    import torch

    if device.type != "cuda":
        return step
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # libraries set themselves up outside the capture
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    replay: Callable[[], None] = graph.replay
    return replay
