"""The MoE kernels of the package `b12x` that FlashInfer installs, over the CUTLASS weight layout as it lies.

Not run on SM120; planning and compilation for sm_120a were (tests/runners/test_b12x_plan.py).

What was read in its source (FlashInfer 0.7.2, `experimental/b12x/moe`), and what this adapter does about it:
- gated kernels read w13 with up first, which is the CUTLASS order (`w13_layout` "w13", alias "up_gate"). Gate-first
  rows, and any layer with the activation swigluoai_uninterleave, are rotated in place: both are refused.
- W4A16 alone repacks the weights in place: not offered. Every plan is checked to keep its source.
- an id of -1 is skipped by its kernel for larger batches only, and global ids cannot be mapped: skipped slots are sent
  to expert 0 with weight 0, and global ids are refused.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sglang_sm120.errors import UnsupportedError
from sglang_sm120.kernels.moe.layer import MoeActivation, Nvfp4MoeWeights
from sglang_sm120.runners.base import Bound, LayerSpec, MoeRunner
from sglang_sm120.runners.handover import (
    b12x_package_reason,
    gate_scale,
    gpu_reason,
    is_capturing,
    layer_reason,
    require_shared_scale,
    same_tensors,
    weigh_input,
)

QUANT_MODE = "nvfp4"  # b12x's word for w4a4
SOURCE_FORMAT = "modelopt_nvfp4"
W13_LAYOUT = "up_gate"
_PLANNED_LAYOUT, _PLANNED_STORAGE = "w13", "keep_source"  # what a plan says when it leaves the weights as they are


class PlanKey(NamedTuple):
    """What a plan depends on; layers that agree on it share one, and its scratch."""

    num_experts: int
    hidden_size: int
    intermediate_size: int
    activation: str
    swiglu_limit: float | None
    dtype: torch.dtype
    top_k: int
    max_tokens: int
    device: torch.device


class B12xRunner(MoeRunner):
    """W4A4, planned for token counts in powers of two."""

    name = "b12x"
    numerics = ("w4a4",)
    graph_rule = (
        "One call of that batch size outside a capture plans and compiles it; calls of one GPU have to be ordered, as "
        "on one stream, since layers share the scratch memory."
    )

    def unavailable_reason(self, device: torch.device) -> str | None:
        return gpu_reason(device) or b12x_package_reason()

    def unsupported_reason(
        self, weights: Nvfp4MoeWeights, spec: LayerSpec, numerics: str, num_tokens: int
    ) -> str | None:
        if numerics not in self.numerics:
            return f"{numerics} is not offered: b12x repacks the weights in place for it, and other runners read them"
        reason = layer_reason(weights, spec, numerics)
        if reason is not None:
            return reason
        if weights.is_gated and weights.w13_order != "up_gate":
            return "the rows of w13 are gate first, and b12x would rotate them in place"
        if spec.num_global_experts is not None:
            return "global expert ids are not covered: b12x has no map from them in W4A4"
        reason = _activation_reason(spec.activation, weights.is_gated)
        if reason is not None or self.unavailable_reason(weights.w13_weight.device) is not None:
            return reason  # without the package there is no plan to look at
        plan = planned(plan_key(weights, spec, num_tokens))
        return plan if isinstance(plan, str) else None

    def workspace_bytes(self, weights: Nvfp4MoeWeights, spec: LayerSpec, numerics: str, num_tokens: int) -> int:
        """The scratch of the plan, which layers of one shape share, and the routing in b12x's form."""
        plan = planned(plan_key(weights, spec, num_tokens))
        if isinstance(plan, str):
            raise UnsupportedError(f"b12x: {plan}", "a layer it covers", "use another runner")
        per_token = 16 * spec.top_k + 2 * weights.hidden_size
        return plan.scratch_bytes() + num_tokens * per_token + 32 * weights.num_experts + 4096

    def bind(self, weights: Nvfp4MoeWeights, spec: LayerSpec, numerics: str) -> Bound:
        reason = self.unavailable_reason(weights.w13_weight.device)
        reason = reason or self.unsupported_reason(weights, spec, numerics, 1)
        if reason is not None:
            raise UnsupportedError(f"b12x: {reason}", "a layer it covers", "use another runner")
        require_shared_scale(self.name, weights)
        return _Layer(weights, spec)


class _Plan:
    """One plan of b12x's, with its scratch memory, which outlives every graph captured with it."""

    def __init__(self, weight_plan: Any, plan: Any, device: torch.device) -> None:
        self.weight_plan, self.plan = weight_plan, plan
        self._device = device
        self._scratch: tuple[Tensor, ...] | None = None

    def scratch(self) -> tuple[Tensor, ...]:
        if self._scratch is None:
            self._scratch = tuple(
                torch.zeros(part.shape, dtype=part.dtype, device=self._device) for part in self.plan.scratch_specs()
            )
        return self._scratch

    def scratch_bytes(self) -> int:
        return sum(part.nbytes for part in self.plan.scratch_specs())


class _Layer:
    """One layer. Its scales in b12x's form are kept, and refreshed in place when other tensors are handed over.

    A replay of a graph therefore sees scales as of the last call outside it. If the weights themselves move, b12x keeps
    the old ones alive in its own cache.
    """

    def __init__(self, weights: Nvfp4MoeWeights, spec: LayerSpec) -> None:
        self._module = _load()
        self._spec = spec
        self._weights: Nvfp4MoeWeights | None = None
        self._addresses: tuple[int, ...] = ()
        self._experts: Any = None
        self._warm: set[int] = set()
        self._prepare(weights)

    def __call__(
        self, hidden_states: Tensor, weights: Nvfp4MoeWeights, topk_weights: Tensor, topk_ids: Tensor
    ) -> Tensor:
        num_tokens = hidden_states.shape[0]
        output = torch.empty(hidden_states.shape, dtype=hidden_states.dtype, device=hidden_states.device)
        if num_tokens == 0:
            return output
        if num_tokens not in self._warm and is_capturing(hidden_states.device):
            raise UnsupportedError(
                f"b12x: a batch of {num_tokens} tokens inside a graph capture before any outside one",
                "one call of that batch size before the capture: it plans and compiles",
                "call the layer once with as many tokens first",
            )
        if self._weights is None or not same_tensors(weights, self._weights):
            self._prepare(weights)
        hidden_states, topk_weights = weigh_input(hidden_states, topk_weights, self._spec)
        topk_weights, topk_ids = without_skipped(topk_weights, topk_ids, weights.num_experts)
        plan = self._plan(weights, num_tokens)
        binding = self._module.bind(
            plan.plan,
            scratch=plan.scratch(),
            a=hidden_states.contiguous(),
            experts=self._experts,
            topk_weights=topk_weights,
            topk_ids=topk_ids,
            output=output,
            input_scales_static=False,  # `_prepare` may write new values to the same addresses
        )
        result = self._module.run(binding=binding)
        self._warm.add(num_tokens)
        return result

    def _plan(self, weights: Nvfp4MoeWeights, num_tokens: int) -> _Plan:
        plan = planned(plan_key(weights, self._spec, num_tokens))
        if isinstance(plan, str):
            raise UnsupportedError(f"b12x: {plan}", "a batch it covers", "use another runner for this batch size")
        return plan

    def _prepare(self, weights: Nvfp4MoeWeights) -> None:
        big = (weights.w13_weight, weights.w13_blockscale, weights.w2_weight, weights.w2_blockscale)
        addresses = tuple(tensor.data_ptr() for tensor in big)
        arguments = weight_arguments(weights)
        if addresses == self._addresses:
            self._experts.a1_gscale.copy_(arguments["a1_gscale"])
            self._experts.a2_gscale.copy_(arguments["a2_gscale"])
            self._experts.w1_alphas.copy_(arguments["w1_global_scale"] / arguments["a1_gscale"])
            self._experts.w2_alphas.copy_(arguments["w2_global_scale"] / arguments["a2_gscale"])
        else:
            plan = self._plan(weights, 1)
            self._experts = self._module.prepare_weights(
                plan=plan.weight_plan, params_dtype=self._spec.hidden_dtype, **arguments
            )
        self._weights, self._addresses = weights, addresses


def plan_key(weights: Nvfp4MoeWeights, spec: LayerSpec, num_tokens: int) -> PlanKey:
    """The plan that serves a batch: for the next power of two tokens."""
    return PlanKey(
        weights.num_experts,
        weights.hidden_size,
        weights.intermediate_size,
        spec.activation.name,
        spec.activation.limit,
        spec.hidden_dtype,
        spec.top_k,
        1 << (max(num_tokens, 1) - 1).bit_length(),
        weights.w13_weight.device,
    )


def weight_plan_arguments(key: PlanKey) -> dict[str, Any]:
    """For b12x's `plan_weights`, in its tensor-based form."""
    return {
        "quant_modes": (QUANT_MODE,),
        "source_format": SOURCE_FORMAT,
        "activation": key.activation,
        "params_dtype": key.dtype,
        "num_experts": key.num_experts,
        "hidden_size": key.hidden_size,
        "intermediate_size": key.intermediate_size,
        "w13_layout": W13_LAYOUT,
    }


def capacity_arguments(key: PlanKey, weight_plan: Any) -> dict[str, Any]:
    """For b12x's `Caps`."""
    return {
        "max_tokens": key.max_tokens,
        "num_topk": key.top_k,
        "device": key.device,
        "weight_plan": weight_plan,
        "quant_mode": QUANT_MODE,
        "swiglu_limit": key.swiglu_limit,
    }


def weight_arguments(weights: Nvfp4MoeWeights) -> dict[str, Tensor]:
    """For b12x's `prepare_weights`: the four big tensors as they are, and four small float32 ones of our own.

    w1_global_scale, w2_global_scale: [E], s2 of the weights, the gate's for w13. a1_gscale, a2_gscale: RECIPROCALS of
    the input scales, [1] when shared, so that b12x quantises a token once and not for each of its experts, else [E].
    b12x divides the first by the second itself.
    """
    return {
        "w1_fp4": weights.w13_weight,
        "w2_fp4": weights.w2_weight,
        "w1_blockscale": weights.w13_blockscale,
        "w2_blockscale": weights.w2_blockscale,
        "w1_global_scale": gate_scale(weights).contiguous(),
        "w2_global_scale": weights.w2_global_scale.contiguous(),
        "a1_gscale": _reciprocal(weights.w13_input_scale),
        "a2_gscale": _reciprocal(weights.w2_input_scale),
    }


def without_skipped(topk_weights: Tensor, topk_ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Router weights float32 and ids int32 [T, k], contiguous, in which a slot outside 0..E-1 is expert 0 with weight
    0. Exact unless expert 0 gives infinity or NaN for that token."""
    held = (topk_ids >= 0) & (topk_ids < num_experts)
    ids = torch.where(held, topk_ids, torch.zeros_like(topk_ids)).to(torch.int32)
    return torch.where(held, topk_weights, torch.zeros_like(topk_weights)).contiguous(), ids.contiguous()


@functools.cache
def planned(key: PlanKey) -> _Plan | str:
    """The plan, or b12x's sentence on why there is none. Costs milliseconds; reads no tensor."""
    module = _load()
    try:
        weight_plan = module.plan_weights(**weight_plan_arguments(key))
        plan = module.plan(module.Caps(**capacity_arguments(key, weight_plan)))
    except (ValueError, TypeError, NotImplementedError) as error:
        return f"its planner refuses this layer ({error})"
    kept = (weight_plan.w13_layout, str(getattr(weight_plan.storage_policy, "value", weight_plan.storage_policy)))
    if kept != (_PLANNED_LAYOUT, _PLANNED_STORAGE):
        return f"its plan would change the shared weights (w13_layout {kept[0]}, storage {kept[1]})"
    return _Plan(weight_plan, plan, key.device)


def _activation_reason(activation: MoeActivation, is_gated: bool) -> str | None:
    name = "silu" if is_gated else "relu2"
    if activation.name != name:
        return f"activation {activation.name!r} is not covered: {name} is"
    if activation.limit is not None and activation.swiglu_alpha_beta() != (1.0, 0.0):
        return "a clamped SwiGLU with an alpha or a beta is not covered: b12x would rotate the rows of w13 for it"
    return None


def _reciprocal(input_scale: Tensor | None) -> Tensor:
    assert input_scale is not None  # unsupported_reason has refused this
    return (1 / input_scale).reshape(-1).contiguous()


def _load() -> Any:
    """`b12x.moe.fused_moe`; whose b12x it is has been checked by `unavailable_reason`."""
    return importlib.import_module("b12x.moe.fused_moe")
