"""Both GEMMs of a MoE layer for few rows an expert, in W4A16: what decoding is made of."""

from __future__ import annotations

import torch
from torch import Tensor

from sglang_sm120.errors import UnsupportedError
from sglang_sm120.kernels.moe import w4a16
from sglang_sm120.kernels.moe.expert_schedule import api as schedules
from sglang_sm120.kernels.moe.grouped_gemm_decode import config as configs
from sglang_sm120.kernels.moe.grouped_gemm_decode import kernel
from sglang_sm120.kernels.moe.grouped_gemm_decode.config import BLOCK_ROWS, DEFAULT_ORDER, DecodeConfig, choose
from sglang_sm120.kernels.moe.layer import MoeActivation, Nvfp4MoeWeights
from sglang_sm120.kernels.moe.w4a16 import LayerShape

__all__ = [
    "BLOCK_ROWS",
    "DEFAULT_ORDER",
    "SOURCE",
    "DecodeConfig",
    "choose",
    "grouped_gemm_decode",
    "unsupported_reason",
    "workspace_bytes",
]

SOURCE = kernel.SOURCE

_MAX_STEPS = 2**31  # pieces of work are counted in int32


def unsupported_reason(
    shape: LayerShape, num_slots: int, *, hidden_dtype: torch.dtype, device: torch.device
) -> str | None:
    """One sentence on why `grouped_gemm_decode` does not cover this, or None. fused_moe checks the activation."""
    reason = w4a16.unsupported_reason(shape, hidden_dtype=hidden_dtype, device=device)
    if reason is None:
        reason = schedules.unsupported_reason(num_slots, shape.num_experts, BLOCK_ROWS)
    if reason is None:
        columns = max(shape.intermediate_size * shape.hidden_size // 32 // 128, shape.hidden_size // 32)
        if configs.max_blocks(shape, num_slots) * (columns + 1) >= _MAX_STEPS:
            reason = f"{num_slots} slots are too many: steps of work are counted in 31 bits"
    return reason


def workspace_bytes(shape: LayerShape, num_slots: int, *, num_sms: int) -> int:
    """Bytes that a call allocates beside its result: the schedule, what is between the GEMMs, partial sums."""
    config = choose(shape, num_slots, num_sms)
    between = 2 * configs.max_blocks(shape, num_slots) * BLOCK_ROWS * shape.intermediate_size
    if config.tiny:
        return between
    schedule = schedules.workspace_bytes(num_slots=num_slots, num_experts=shape.num_experts, block_rows=BLOCK_ROWS)
    return between + schedule + 4 * configs.partial_floats(shape, config.gemm1) + 4 * config.gemm1.grid


def grouped_gemm_decode(
    hidden_states: Tensor,
    weights: Nvfp4MoeWeights,
    topk_weights: Tensor,
    topk_ids: Tensor,
    *,
    activation: MoeActivation,
    expert_offset: int = 0,
    num_global_experts: int | None = None,
    config: DecodeConfig | None = None,
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
        order: of the tiles, "column_major" or "row_major"; as `config`, it may change the rounding of sums.

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
    return kernel.grouped_gemm_decode(
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
