"""What the transformers among the targets have in common: the arithmetic of the Llama arrangement without weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def normed(x: torch.Tensor) -> torch.Tensor:
    """``x`` divided by the root of its mean square along the last dimension, computed in float32."""
    import torch

    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + 1e-6)).to(x.dtype)


def rotated(x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    """``x`` with its halves along the last dimension turned by the angles of its positions (rotary embedding)."""
    import torch

    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1).to(x.dtype)
