"""SGLang's own NVFP4 Marlin MoE (W4A16), as a baseline for `sglang-sm120 bench moe`. Serving does not use it."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import torch
from sglang.srt.layers.moe.fused_moe_triton.fused_marlin_moe import fused_marlin_moe
from sglang.srt.layers.quantization.marlin_utils import marlin_make_workspace
from sglang.srt.layers.quantization.marlin_utils_fp4 import prepare_moe_nvfp4_layer_for_marlin
from torch import Tensor

from sglang_sm120.errors import UnsupportedError
from sglang_sm120.kernels.moe.fused_moe.api import Nvfp4MoeWeights
from sglang_sm120.kernels.quantization.nvfp4.api import GROUP_SIZE, unswizzle_blockscale

_HIDDEN_MULTIPLE, _INTERMEDIATE_MULTIPLE = 128, 64
_WORKSPACE_BLOCKS_PER_SM = 4  # as SGLang's Marlin runner makes it


@torch.no_grad()
def prepare(weights: Nvfp4MoeWeights) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Repack one layer with SGLang's functions and return its call.

    Args:
        weights: gated silu experts on a GPU; copied, not changed. SGLang rounds the global scales to bfloat16.

    Returns:
        callable of (hidden_states bfloat16 [T, H], topk_weights float32 [T, k], topk_ids int32 [T, k]) -> bfloat16
        [T, H]. Can be captured in a CUDA graph after one call of the same shape.

    Raises:
        UnsupportedError: ungated experts, sizes that Marlin has no tiles for, gate and up with different global scales.
    """
    _check(weights)
    hidden, intermediate = weights.hidden_size, weights.intermediate_size
    layer = SimpleNamespace(
        w13_weight=_parameter(_gate_first(weights.w13_weight, weights)),
        w13_weight_scale=_parameter(_gate_first(_row_major(weights.w13_blockscale, 2 * intermediate, hidden), weights)),
        w13_weight_scale_2=_parameter(weights.w13_global_scale.reshape(weights.num_experts, -1)[:, 0].contiguous()),
        w2_weight=_parameter(weights.w2_weight),
        w2_weight_scale=_parameter(_row_major(weights.w2_blockscale, hidden, intermediate)),
        w2_weight_scale_2=_parameter(weights.w2_global_scale),
        moe_runner_config=SimpleNamespace(is_gated=True),
        intermediate_size_per_partition=intermediate,
        params_dtype=torch.bfloat16,
    )
    prepare_moe_nvfp4_layer_for_marlin(layer, group_size=GROUP_SIZE)

    @torch.no_grad()
    def call(hidden_states: Tensor, topk_weights: Tensor, topk_ids: Tensor) -> Tensor:
        return fused_marlin_moe(
            hidden_states=hidden_states,
            w1=layer.w13_weight,
            w2=layer.w2_weight,
            w1_scale=layer.w13_weight_scale,
            w2_scale=layer.w2_weight_scale,
            gating_output=topk_weights,  # only its number of rows is read
            topk_weights=topk_weights,
            topk_ids=topk_ids,
            w1_global_scale=layer.w13_weight_scale_2,
            w2_global_scale=layer.w2_weight_scale_2,
            # a zeroed one for each call, as SGLang's runner does
            workspace=marlin_make_workspace(hidden_states.device, max_blocks_per_sm=_WORKSPACE_BLOCKS_PER_SM),
            num_bits=4,
            is_k_full=True,
            inplace=False,
            activation="silu",
            is_gated=True,
        )

    return call


def _check(weights: Nvfp4MoeWeights) -> None:
    reason = None
    scale = weights.w13_global_scale
    if not weights.is_gated:
        reason = "experts without a gate"
    elif weights.hidden_size % _HIDDEN_MULTIPLE or weights.intermediate_size % _INTERMEDIATE_MULTIPLE:
        reason = f"hidden size {weights.hidden_size} and intermediate size {weights.intermediate_size}"
    elif scale.dim() == 2 and not torch.equal(scale[:, 0], scale[:, -1]):
        reason = "gate and up with different global scales"
    if reason is not None:
        raise UnsupportedError(
            f"the Marlin baseline with {reason}",
            f"gated experts, hidden size a multiple of {_HIDDEN_MULTIPLE}, intermediate size of "
            f"{_INTERMEDIATE_MULTIPLE}, one global scale an expert",
            "choose another model or baseline",
        )


def _row_major(blockscale: Tensor, rows: int, k: int) -> Tensor:
    return unswizzle_blockscale(blockscale, rows, k // GROUP_SIZE).contiguous()


def _gate_first(rows: Tensor, weights: Nvfp4MoeWeights) -> Tensor:
    """[E, 2I, ...] with the gate's rows before up's."""
    if weights.w13_order == "gate_up":
        return rows
    return torch.cat(rows.view(torch.uint8).chunk(2, dim=1)[::-1], dim=1).view(rows.dtype)


def _parameter(values: Tensor) -> torch.nn.Parameter:
    return torch.nn.Parameter(values, requires_grad=False)
