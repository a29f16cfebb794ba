"""What the kernel computes, in plain torch, from all ranks' tensors at once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def all_reduce(inputs: Sequence[Tensor]) -> Tensor:
    """The sum of all ranks' tensors: fp32, in the ranks' order, rounded once to their dtype."""
    total = torch.zeros_like(inputs[0], dtype=torch.float32)
    for tensor in inputs:
        total += tensor.float()
    return total.to(inputs[0].dtype)


def all_reduce_rmsnorm(
    inputs: Sequence[Tensor], residual: Tensor, gamma: Tensor, eps: float, *, gamma_offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """The sum as `all_reduce` rounds it, added to the residual in fp32, and the norm of that before it is rounded."""
    hidden = all_reduce(inputs).float() + residual.float()
    factor = torch.rsqrt(hidden.square().mean(dim=-1, keepdim=True) + eps)
    out = hidden * factor * (gamma.float() + gamma_offset)
    return out.to(residual.dtype), hidden.to(residual.dtype)
