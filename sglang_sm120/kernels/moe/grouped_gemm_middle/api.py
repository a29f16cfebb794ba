"""Both GEMMs of a MoE layer for some 8 to 64 rows an expert and more, in W4A16."""

from __future__ import annotations

import torch
from torch import Tensor

from sglang_sm120.errors import UnsupportedError
from sglang_sm120.kernels.moe import w4a16
from sglang_sm120.kernels.moe.expert_schedule import api as schedules
from sglang_sm120.kernels.moe.grouped_gemm_middle import config as configs
from sglang_sm120.kernels.moe.grouped_gemm_middle import kernel
from sglang_sm120.kernels.moe.grouped_gemm_middle.config import DEFAULT_ORDER, MiddleConfig, choose
from sglang_sm120.kernels.moe.layer import MoeActivation, Nvfp4MoeWeights
from sglang_sm120.kernels.moe.w4a16 import LayerShape

__all__ = [
    "DEFAULT_ORDER",
    "SOURCE",
    "MiddleConfig",
    "choose",
    "grouped_gemm_middle",
    "unsupported_reason",
    "workspace_bytes",
]

SOURCE = kernel.SOURCE


def unsupported_reason(
    shape: LayerShape, num_slots: int, *, hidden_dtype: torch.dtype, device: torch.device
) -> str | None:
    """One sentence on why `grouped_gemm_middle` does not cover this, or None. fused_moe checks the activation."""
    reason = w4a16.unsupported_reason(shape, hidden_dtype=hidden_dtype, device=device)
    if reason is None:
        rows = configs.choose_block_rows(shape, num_slots)
        reason = schedules.unsupported_reason(num_slots, shape.num_experts, rows)
        if reason is None and configs.max_blocks(shape, num_slots, rows) * rows * shape.intermediate_size >= 2**35:
            reason = f"{num_slots} slots are too many: rows of x are counted in 16 bytes by 32 bits"
    return reason


def workspace_bytes(shape: LayerShape, num_slots: int, num_tokens: int, *, num_sms: int) -> int:
    """Bytes that a call allocates beside its result: the schedule, a copy of x, what is between the GEMMs."""
    rows = choose(shape, num_slots, num_sms).block_rows
    between = 2 * configs.max_blocks(shape, num_slots, rows) * rows * shape.intermediate_size
    schedule = schedules.workspace_bytes(num_slots=num_slots, num_experts=shape.num_experts, block_rows=rows)
    return between + schedule + 2 * num_tokens * shape.hidden_size


def grouped_gemm_middle(
    hidden_states: Tensor,
    weights: Nvfp4MoeWeights,
    topk_weights: Tensor,
    topk_ids: Tensor,
    *,
    activation: MoeActivation,
    expert_offset: int = 0,
    num_global_experts: int | None = None,
    config: MiddleConfig | None = None,
    order: str | None = None,
) -> Tensor:
    """Run both GEMMs and what is between them, for every slot s = t * k + j with an expert of this rank.

        out[s] = topk_weights[t, j] * W2_e @ act(Wgate_e @ x[t], Wup_e @ x[t]),   e = topk_ids[t, j]

    Args:
        hidden_states: bfloat16 or float16 [T, H], T at least 1; any strides (a copy is made where rows cannot be read
            in 16 bytes).
        weights: see Nvfp4MoeWeights; checked by fused_moe.
        topk_weights: float [T, k], used as fp32.
        topk_ids: int32 or int64 [T, k]; others than this rank's are skipped.
        activation: see MoeActivation.
        expert_offset, num_global_experts: as in fused_moe.
        config: kernels and grids; `choose` by default.
        order: of the tiles, "column_major" or "row_major", or None for DEFAULT_ORDER; the result has the same bits.

    Returns:
        Tensor [T * k, H] of hidden_states' dtype, new; skipped slots are NOT written: `sum_slots` skips them too.

    Raises:
        UnsupportedError: what unsupported_reason says.

    Numerics:
        Weights are exact in the model's dtype (e2m1 * e4m3 has 6 significant bits), sums are fp32, global and router
        weights are applied in fp32; rounded to the model's dtype after the activation and at the end. The order of a
        sum depends on shapes and routing only: the same input gives the same bits. NaN stays in its row.

    Source: kernel.cu; fused_moe/reference.py is the reference. On the CPU the host build runs. Captured in a CUDA
    graph: yes, after one call outside. Memory: workspace_bytes.
    """
    shape = LayerShape.of(weights)
    reason = unsupported_reason(shape, topk_ids.numel(), hidden_dtype=hidden_states.dtype, device=hidden_states.device)
    if reason is not None:
        raise UnsupportedError(reason, "a layer that unsupported_reason() accepts", "use another MoE kernel")
    if config is None:
        config = choose(shape, topk_ids.numel(), w4a16.num_sms(hidden_states.device))
    return kernel.grouped_gemm_middle(
        w4a16.readable_rows(hidden_states),
        weights,
        topk_weights.to(torch.float32).contiguous(),
        topk_ids.contiguous(),
        activation=activation,
        expert_offset=expert_offset,
        num_global_experts=num_global_experts,
        config=config,
        order=order or DEFAULT_ORDER,
    )
