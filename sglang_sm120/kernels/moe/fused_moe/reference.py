"""The fused MoE layer in plain torch: a static loop over the local experts, each over all tokens. No checks here.

    out[t] = sum over k = 0..K-1 of  topk_weights[t, k] * down_e(act(gate_e(x[t]), up_e(x[t]))),   e = topk_ids[t, k]

Cost: O(E * T) rows of GEMM, not O(K * T); this is the definition to compare against, and the path for a machine without
our kernels, not a fast one.

What makes it safe to compare against:
- no shape and no branch depends on data, and no value is read back: it can be captured in a CUDA graph;
- the rows of a GEMM do not mix, and results are selected with `torch.where`, never by multiplying with 0, so NaN or
  infinity in a row, a weight or a router weight reaches only the tokens that are routed to it;
- the contributions of a token are kept by slot and summed in slot order, so the sum does not depend on the experts;
- one expert is dequantised at a time: there is no second copy of the weights.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

from sglang_sm120.kernels.moe.layer import MoeActivation, Nvfp4MoeWeights
from sglang_sm120.kernels.quantization.nvfp4.api import (
    GROUP_SIZE,
    dequantize_nvfp4,
    quantize_nvfp4,
    unswizzle_blockscale,
)


@contextlib.contextmanager
def full_float32() -> Iterator[None]:
    """Multiply float32 matrices in float32: a server may have switched TF32 on (SGLang does for GLM-4)."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@torch.no_grad()
@full_float32()
def fused_moe(
    hidden_states: Tensor,
    weights: Nvfp4MoeWeights,
    topk_weights: Tensor,
    topk_ids: Tensor,
    *,
    activation: MoeActivation,
    numerics: str,
    apply_router_weight_on_input: bool = False,
    expert_offset: int = 0,
    num_global_experts: int | None = None,
) -> Tensor:
    """See `api.fused_moe`."""
    num_tokens, top_k = topk_ids.shape
    router_weights = topk_weights.to(torch.float32)
    if apply_router_weight_on_input:
        # SGLang multiplies in the dtype of the hidden states, with the weight rounded to it first.
        hidden_states = hidden_states * topk_weights.to(hidden_states.dtype)
        router_weights = torch.ones_like(router_weights)

    local_ids = local_expert_ids(topk_ids, weights.num_experts, expert_offset, num_global_experts)
    slots = torch.zeros(
        num_tokens, top_k, weights.hidden_size, dtype=torch.float32, device=hidden_states.device
    )  # the output of slot k of token t, before its router weight
    for expert in range(weights.num_experts):
        hit = local_ids == expert
        y = _expert(hidden_states.to(torch.float32), weights, expert, activation, numerics, hidden_states.dtype)
        for slot in range(top_k):
            torch.where(hit[:, slot, None], y, slots[:, slot], out=slots[:, slot])

    out = torch.zeros(num_tokens, weights.hidden_size, dtype=torch.float32, device=hidden_states.device)
    for slot in range(top_k):
        kept = local_ids[:, slot, None] >= 0
        out += torch.where(kept, router_weights[:, slot, None] * slots[:, slot], torch.zeros_like(out))
    return out.to(hidden_states.dtype)


def local_expert_ids(
    topk_ids: Tensor, num_local_experts: int, expert_offset: int, num_global_experts: int | None
) -> Tensor:
    """int64 [T, k]: the row of this rank's weights for each slot, or -1 where the slot is skipped on this rank.

    With `num_global_experts` the ids are global and this rank holds [expert_offset, expert_offset + num_local_experts);
    without it they are local already.
    """
    first = expert_offset if num_global_experts is not None else 0
    ids = topk_ids.to(torch.int64)
    held = (ids >= first) & (ids < first + num_local_experts)
    return torch.where(held, ids - first, torch.full_like(ids, -1))


def _expert(
    x: Tensor,
    weights: Nvfp4MoeWeights,
    expert: int,
    activation: MoeActivation,
    numerics: str,
    hidden_dtype: torch.dtype,
) -> Tensor:
    """One expert over all rows of x (fp32 [T, H]): fp32 [T, H]."""
    if numerics == "w4a4":
        x = _through_nvfp4(x, weights.w13_input_scale, expert)
    w13 = _dequantize_rows(weights.w13_weight, weights.w13_blockscale, expert, _w13_row_scale(weights, expert))
    projected = x @ w13.T
    del w13  # before the second weight is decoded
    if weights.is_gated:
        first, second = projected.chunk(2, dim=1)
        gate, up = (second, first) if weights.w13_order == "up_gate" else (first, second)
        intermediate = activation.gated(gate, up)
    else:
        intermediate = activation.ungated(projected)
    if numerics == "w4a4":
        intermediate = _through_nvfp4(intermediate, weights.w2_input_scale, expert)
    else:
        intermediate = intermediate.to(hidden_dtype).to(torch.float32)
    w2 = _dequantize_rows(weights.w2_weight, weights.w2_blockscale, expert, weights.w2_global_scale[expert])
    return intermediate @ w2.T


def _through_nvfp4(x: Tensor, input_scale: Tensor | None, expert: int) -> Tensor:
    """x as a W4A4 GEMM sees it: quantised under the expert's activation scale, and decoded to fp32."""
    assert input_scale is not None  # for the type checker: unsupported_reason has refused this
    scale = input_scale.reshape(()) if input_scale.numel() == 1 else input_scale[expert]
    packed, block_scale = quantize_nvfp4(x, scale)
    return dequantize_nvfp4(packed, block_scale, scale)


def _dequantize_rows(weight: Tensor, blockscale: Tensor, expert: int, global_scale: Tensor) -> Tensor:
    """One expert's weight as fp32 [rows, K]; the padding of the swizzled scales is cut off, whatever it holds."""
    rows, packed_cols = weight.shape[1:]
    scale = unswizzle_blockscale(blockscale[expert], rows, packed_cols * 2 // GROUP_SIZE)
    return dequantize_nvfp4(weight[expert], scale, global_scale)


def _w13_row_scale(weights: Nvfp4MoeWeights, expert: int) -> Tensor:
    """s2 of w13: a scalar when shared, or one value for each row, in the row order of w13."""
    scale = weights.w13_global_scale[expert].reshape(-1)
    if scale.numel() == 1:
        return scale.reshape(())
    gate, up = scale[0], scale[1]  # the columns are [gate, up] whatever the order of the rows
    first, second = (up, gate) if weights.w13_order == "up_gate" else (gate, up)
    half = weights.w13_weight.shape[1] // 2
    return torch.cat((first.expand(half), second.expand(half)))
