"""The expert schedule in plain torch: a stable sort, then arithmetic on its boundaries. No checks here.

No shape depends on data and no value is read back, so it can be captured in a CUDA graph. What the contract leaves
unwritten is read and written back as it was.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from sglang_sm120.kernels.moe.expert_schedule.api import ExpertSchedule


@torch.no_grad()
def expert_schedule(topk_ids: Tensor, expert_offset: int, out: ExpertSchedule, cleared: Tensor | None) -> None:
    """See `api.expert_schedule`; writes `out` and `cleared`."""
    num_experts, block_rows = out.expert_rows.numel(), out.block_rows
    device = topk_ids.device
    ids = topk_ids.reshape(-1).to(torch.int64)
    held = (ids >= expert_offset) & (ids < expert_offset + num_experts)
    experts = torch.where(held, ids - expert_offset, torch.full_like(ids, num_experts))  # skipped slots come last
    sorted_experts, slots = torch.sort(experts, stable=True)

    # By search, not by counting with atomics: it has one result.
    starts = torch.searchsorted(sorted_experts, torch.arange(num_experts + 1, device=device))
    rows = starts.diff()
    blocks = (rows + (block_rows - 1)).div(block_rows, rounding_mode="floor")
    ends = blocks.cumsum(0)
    first = ends - blocks
    num_blocks = ends[-1:]

    capacity = out.sorted_slots.numel()
    # The extra expert takes the skipped slots to one place beyond the capacity, which is cut off.
    shift = torch.cat((first * block_rows - starts[:-1], torch.zeros_like(num_blocks)))
    place = torch.arange(ids.numel(), device=device) + shift[sorted_experts]
    place = torch.where(sorted_experts < num_experts, place, torch.full_like(place, capacity))
    padded = torch.full((capacity + 1,), -1, dtype=torch.int64, device=device).scatter(0, place, slots)
    out.sorted_slots.copy_(padded[:capacity])

    block = torch.arange(out.block_expert.numel(), device=device)
    owner = torch.searchsorted(ends, block, right=True)
    out.block_expert.copy_(torch.where(block < num_blocks, owner, out.block_expert))
    block = torch.arange(out.block_info.shape[0], device=device)
    owner = torch.searchsorted(ends, block, right=True).clamp(max=num_experts - 1)
    info = torch.stack((owner, first[owner], blocks[owner], rows[owner]), dim=1)
    out.block_info.copy_(torch.where((block < num_blocks)[:, None], info, out.block_info))
    out.expert_first_block.copy_(first)
    out.expert_rows.copy_(rows)
    out.num_blocks.copy_(num_blocks)
    if cleared is not None:
        cleared.zero_()
