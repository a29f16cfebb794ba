"""The grouped GEMM in plain torch, expert by expert: the definition to compare against, and the path on a CPU.

It reads the counts of the schedule on the host, so unlike the kernel it cannot be captured.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sglang_sm120.kernels.quantization.nvfp4.api import GROUP_SIZE, dequantize_nvfp4, unswizzle_blockscale

if TYPE_CHECKING:
    from sglang_sm120.kernels.moe.expert_schedule.api import ExpertSchedule
    from sglang_sm120.kernels.moe.layer import MoeActivation


@torch.no_grad()
def grouped_gemm_prefill(
    a: Tensor,
    weight: Tensor,
    blockscale: Tensor,
    alpha: Tensor,
    schedule: ExpertSchedule,
    out: Tensor,
    *,
    a_scale: Tensor | None = None,
    a_rows: str = "slot",
    a_div: int = 1,
    out_rows: str = "slot",
    router_weights: Tensor | None = None,
    activation: MoeActivation | None = None,
    is_gated: bool = False,
    w13_order: str = "up_gate",
) -> Tensor:
    """See `api.grouped_gemm_prefill`."""
    n, packed_k = weight.shape[1:]
    one = torch.ones((), device=a.device)
    firsts, counts = schedule.expert_first_block.tolist(), schedule.expert_rows.tolist()
    for expert, (first_block, count) in enumerate(zip(firsts, counts, strict=True)):
        if count == 0:
            continue
        start = first_block * schedule.block_rows
        positions = torch.arange(start, start + count, device=a.device)
        slots = schedule.sorted_slots[positions].to(torch.int64)
        rows = positions if a_rows == "sorted" else slots // a_div
        x = a[rows].to(torch.float32) if a_scale is None else dequantize_nvfp4(a[rows], a_scale[rows], one)
        scale = unswizzle_blockscale(blockscale[expert], n, packed_k * 2 // GROUP_SIZE)
        result = x @ dequantize_nvfp4(weight[expert], scale, one).T
        result *= _column_alpha(alpha[expert].reshape(-1), n)
        if is_gated:
            assert activation is not None  # for the type checker: the api has refused this
            first, second = result.chunk(2, dim=1)
            gate, up = (second, first) if w13_order == "up_gate" else (first, second)
            result = activation.gated(gate, up)
        elif activation is not None:
            result = activation.ungated(result)
        if router_weights is not None:
            result = result * router_weights[slots, None]
        out[positions if out_rows == "sorted" else slots] = result.to(out.dtype)
    return out


def _column_alpha(alpha: Tensor, n: int) -> Tensor:
    """f32 [n] from one value, or from one for each half."""
    return alpha.repeat_interleave(n // alpha.numel()) if alpha.numel() == 2 else alpha.expand(n)
