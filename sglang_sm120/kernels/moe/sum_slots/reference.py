"""The sum of every token's slots in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor


@torch.no_grad()
def sum_slots(slots: Tensor, topk_ids: Tensor, out: Tensor, *, num_experts: int, expert_offset: int) -> None:
    """See `api.sum_slots`."""
    ids = topk_ids.to(torch.int64)
    held = (ids >= expert_offset) & (ids < expert_offset + num_experts)
    by_token = slots.unflatten(0, tuple(topk_ids.shape))
    total = torch.zeros(out.shape, dtype=torch.float32, device=out.device)
    for j in range(topk_ids.shape[1]):
        total += torch.where(held[:, j, None], by_token[:, j].to(torch.float32), torch.zeros_like(total))
    out.copy_(total)
