"""All-reduce, residual add and RMSNorm in one kernel, at SGLang's layer boundaries.

A boundary tries candidates in order; one that returns None has to do so before it touches anything, and the next, or
the plain sum and norm, serves. What decides is the same on every rank: settings, shapes, and the kind of batch.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from sglang.srt.batch_invariant_ops import is_batch_invariant_mode_enabled
from sglang.srt.layers import layernorm
from sglang.srt.layers.dp_attention import is_dp_attention_enabled
from sglang.srt.layers.layer_boundary.adapters.attention import get_attn_tp_context
from sglang.srt.layers.layer_boundary.contracts import FfnInputFusion
from sglang.srt.layers.layer_boundary.fusions.norm import fused_norm_gamma
from sglang.srt.layers.layer_boundary.layout import SumGroup, TokenAxis
from sglang.srt.layers.layer_boundary.output import UnreducedOutput
from sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph import is_in_breakable_cuda_graph
from sglang.srt.runtime_context import get_exec, get_parallel
from torch import Tensor

from sglang_sm120.integration import all_reduce
from sglang_sm120.integration.all_reduce_plane import Plane

logger = logging.getLogger(__name__)

Fused = tuple[Tensor, Tensor]
"""The next stage's input, and the residual."""

_said: set[str] = set()


class Fusions:
    """What we offer at each boundary: the interface of SGLang's own providers (`plan.fusions`)."""

    def attn_input_fusions(self, plan: Any) -> tuple[Callable[..., Fused | None], ...]:
        return (partial(fuse_attn_input, plan),)

    def ffn_input_fusions(self, plan: Any) -> tuple[FfnInputFusion, ...]:
        return (FfnInputFusion(completes=SumGroup.ATTN_TP, run=partial(fuse_ffn_input, plan)),)


FUSIONS = Fusions()


def attn_input_fusions(original: Callable, plan: Any, *args: Any, **kwargs: Any) -> tuple:
    """AROUND attn_input_fusions: ours before all others."""
    return (*FUSIONS.attn_input_fusions(plan), *original(plan, *args, **kwargs))


def ffn_input_fusions(original: Callable, plan: Any) -> tuple:
    """AROUND ffn_input_fusions: ours before all others."""
    return (*FUSIONS.ffn_input_fusions(plan), *original(plan))


def fuse_attn_input(
    plan: Any, owed: Any, residual: Tensor, forward_batch: Any, post_residual_addition: Tensor | None
) -> Fused | None:
    """The sum that the layer before left, its residual add, and the input norm; None: not this batch."""
    plane = _plane()
    if plane is None or not isinstance(owed, UnreducedOutput):  # else a MoE's finalize, which has its own kernels
        return None
    reason = None
    if owed.reduce_to_dp_local is not None or owed.complete_sum is not None:
        reason = "a sum with a way of its own"
    elif owed.group is None or owed.group.ranks != plane.group.ranks:
        reason = "a sum over another group"
    elif post_residual_addition is not None:
        reason = "an addition to the residual after the sum"
    return _fuse(plane, plan, owed.partial, residual, forward_batch, reason)


def fuse_ffn_input(plan: Any, hidden_states: Tensor, residual: Tensor, forward_batch: Any) -> Fused | None:
    """The sum of the attention's output, its residual add, and the norm behind it; None: not this batch."""
    plane = _plane()
    if plane is None:
        return None
    reason = "a sum over another group" if get_parallel().attn_tp_group.ranks != plane.group.ranks else None
    return _fuse(plane, plan, hidden_states, residual, forward_batch, reason)


def _plane() -> Plane | None:
    # A traced graph takes SGLang's operators: whether a size is ours would be asked of a symbol.
    return None if torch.compiler.is_compiling() else all_reduce.plane()


def _fuse(plane: Plane, plan: Any, x: Tensor, residual: Tensor, forward_batch: Any, reason: str | None) -> Fused | None:
    if not plane.takes(x, norm=True):  # mostly its size: nothing to remark on
        return None
    reason = reason or _residual_reason(x, residual) or _batch_reason(plan, forward_batch)
    norm = reason or norm_of(plan.norm, x)
    if isinstance(norm, str):
        _say(norm)
        return None
    gamma, offset = norm
    return plane.all_reduce_rmsnorm(x, residual, gamma, plan.norm.variance_epsilon, gamma_offset=offset)


def _residual_reason(x: Tensor, residual: Tensor | None) -> str | None:
    if residual is None or residual.shape != x.shape or residual.dtype != x.dtype or not residual.is_contiguous():
        return "a residual of another shape, dtype or layout than the sum"
    return None


def _batch_reason(plan: Any, forward_batch: Any) -> str | None:
    """What of the batch, or of how it is run, the kernel does not cover."""
    if is_dp_attention_enabled():
        return "attention data parallelism"
    if forward_batch.can_run_tbo:
        return "two-batch overlap"
    if is_in_breakable_cuda_graph():
        return "a breakable CUDA graph"
    if is_batch_invariant_mode_enabled():
        return "batch-invariant mode"
    if get_exec().comm.enable_quant_communications:
        return "quantised communication"
    if get_attn_tp_context().input_scattered or TokenAxis.ATTN_TP in plan.fused_input_rows(forward_batch).sharded:
        return "rows that are scattered over the ranks"
    return None


def norm_of(norm: Any, x: Tensor) -> tuple[Tensor, float] | str:
    """A norm's weight as the kernel takes it, with what is added to it; or why the kernel cannot be this norm."""
    if type(norm) not in (layernorm.RMSNorm, layernorm.GemmaRMSNorm):
        return f"norm {type(norm).__name__}"
    gamma, offset = fused_norm_gamma(norm), 0.0
    if gamma is None:
        return "RMSNorm without a weight"
    if type(norm) is layernorm.GemmaRMSNorm:
        # Not `gemma_weight`, which is weight + 1 rounded to the model's dtype: SGLang's kernel adds the 1 in fp32.
        gamma, offset = norm.weight.data, 1.0
    elif special := [name for name in _SPECIAL if getattr(norm, name, None)]:
        return f"RMSNorm with {', '.join(special)}"
    elif layernorm._fp8_static_input_scale(norm._quant_linear) is not None:
        return "RMSNorm that quantises for the layer behind it"
    if gamma.dtype != x.dtype or gamma.device != x.device or gamma.shape != x.shape[-1:] or not gamma.is_contiguous():
        return f"norm weight {list(gamma.shape)} of {gamma.dtype} on {gamma.device}"
    return gamma, offset


# What RMSNorm can be told beside its weight and epsilon.
_SPECIAL = (
    "variance_size_override", "cast_x_before_out_mul", "fp32_residual", "override_orig_dtype", "x_pad_to_multiple",
)  # fmt: skip


def _say(reason: str) -> None:
    """That SGLang's own path serves, once a reason."""
    if reason not in _said:
        _said.add(reason)
        logger.info("sglang-sm120: not fused, left to SGLang's all-reduce and norm: %s", reason)
