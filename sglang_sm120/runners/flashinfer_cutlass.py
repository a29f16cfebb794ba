"""FlashInfer's `cutlass_fused_moe` called as SGLang calls it, for `sglang-sm120 tune` and for comparisons.

Not run on SM120. In a server SGLang's own path is called, not this.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

import torch
from torch import Tensor

from sglang_sm120.errors import UnsupportedError
from sglang_sm120.kernels.moe.layer import MoeActivation, Nvfp4MoeWeights
from sglang_sm120.kernels.quantization.nvfp4.api import round_up
from sglang_sm120.runners.base import STOCK, Bound, LayerSpec, MoeRunner
from sglang_sm120.runners.handover import (
    flashinfer_reason,
    gate_scale,
    gpu_reason,
    is_capturing,
    layer_reason,
    require_shared_scale,
    same_tensors,
    weigh_input,
)

# SGLang's SGLANG_FLASHINFER_MOE_FUSED_FINALIZE is off: the sum of the slots is deterministic.
USE_FUSED_FINALIZE = False
# FlashInfer's default, and what SGLang caps its own range at.
TUNE_MAX_NUM_TOKENS = 8192
# MoeActivation's name -> FlashInfer's ActivationType, as SGLang's get_activation_type and _activation_type map it.
_GATED = {"silu": "Swiglu", "gelu": "Geglu"}
_UNGATED = {"relu2": "Relu2"}


class FlashinferCutlassRunner(MoeRunner):
    """The stock path's kernel: hidden states go in unquantised, and both quantisations are inside it.

    What SGLang prepares, and what is handed over unchanged here: for ModelOpt one scalar input scale a GEMM, the
    largest over all experts of all ranks; for compressed-tensors one an expert. The kernel takes either.
    """

    name = STOCK
    numerics = ("w4a4",)
    graph_rule = (
        "One call of any batch size outside a capture builds and tunes it; a replay reads the weights in place but "
        "scales as they were at capture."
    )

    def unavailable_reason(self, device: torch.device) -> str | None:
        return gpu_reason(device) or flashinfer_reason()

    def unsupported_reason(
        self, weights: Nvfp4MoeWeights, spec: LayerSpec, numerics: str, num_tokens: int
    ) -> str | None:
        if numerics not in self.numerics:
            return f"it always quantises activations: {numerics} is not covered"
        reason = layer_reason(weights, spec, numerics)
        if reason is not None:
            return reason
        if weights.is_gated and weights.w13_order != "up_gate":
            return "its kernel reads up before gate, and the rows of w13 are gate first"
        covered = _GATED if weights.is_gated else _UNGATED
        if spec.activation.name not in covered:
            return f"activation {spec.activation.name!r} is not covered here: {', '.join(covered)} is, as in SGLang"
        inner = weights.intermediate_size
        if not weights.is_gated and round_up(inner, 128) != round_up(inner, 64):
            return f"an ungated intermediate size of {inner}: its scales' padding is not what the kernel expects"
        return _expert_range_reason(weights, spec)

    def workspace_bytes(self, weights: Nvfp4MoeWeights, spec: LayerSpec, numerics: str, num_tokens: int) -> int:
        """FlashInfer's own answer, so it has to be there, with a GPU."""
        fused_moe = _load()
        parallel = expert_parallel(weights, spec)
        own = fused_moe.cutlass_fused_moe_workspace_size(
            num_tokens,
            weights.hidden_size,
            weights.intermediate_size,
            weights.num_experts * parallel["ep_size"],
            spec.top_k,
            x_dtype=spec.hidden_dtype,
            weight_dtype=torch.int64,
            output_dtype=spec.hidden_dtype,
            activation_type=fused_moe.core.ActivationType[activation_type(spec.activation, weights.is_gated)],
            use_fused_finalize=USE_FUSED_FINALIZE,
            device=weights.w13_weight.device,
            **parallel,
        )
        per_token = 4 * weights.num_experts + 8 * spec.top_k + 2 * weights.hidden_size
        return int(own) + num_tokens * per_token + 64 * weights.num_experts + 4096

    def bind(self, weights: Nvfp4MoeWeights, spec: LayerSpec, numerics: str) -> Bound:
        reason = self.unavailable_reason(weights.w13_weight.device)
        reason = reason or self.unsupported_reason(weights, spec, numerics, 1)
        if reason is not None:
            raise UnsupportedError(f"flashinfer_cutlass: {reason}", "a layer it covers", "use another runner")
        require_shared_scale(self.name, weights)
        return _Layer(weights, spec)


class _Layer:
    """One layer. What is computed from the scales is kept for as long as the same tensors are handed over."""

    def __init__(self, weights: Nvfp4MoeWeights, spec: LayerSpec) -> None:
        fused_moe = _load()
        self._kernel = fused_moe.cutlass_fused_moe
        self._spec = spec
        name = activation_type(spec.activation, weights.is_gated)
        self._fixed: dict[str, Any] = {
            "activation_type": fused_moe.core.ActivationType[name],
            **swiglu_arguments(spec.activation, weights),
            **expert_parallel(weights, spec),
        }
        self._weights = weights
        self._arguments = weight_arguments(weights)
        self._tuned = False

    def __call__(
        self, hidden_states: Tensor, weights: Nvfp4MoeWeights, topk_weights: Tensor, topk_ids: Tensor
    ) -> Tensor:
        if hidden_states.shape[0] == 0:
            return torch.empty_like(hidden_states)
        if not same_tensors(weights, self._weights):
            self._weights, self._arguments = weights, weight_arguments(weights)
        hidden_states, topk_weights = weigh_input(hidden_states, topk_weights, self._spec)
        call = functools.partial(
            self._kernel,
            output=torch.empty(hidden_states.shape, dtype=hidden_states.dtype, device=hidden_states.device),
            input=hidden_states.contiguous(),
            token_selected_experts=topk_ids.to(torch.int32),
            token_final_scales=topk_weights,
            output_dtype=hidden_states.dtype,
            input_sf=None,
            tune_max_num_tokens=TUNE_MAX_NUM_TOKENS,
            use_fused_finalize=USE_FUSED_FINALIZE,
            **self._arguments,
            **self._fixed,
        )
        if not self._tuned and not is_capturing(hidden_states.device):
            with _autotune():  # SGLang does before it captures; without, the kernel's default tile would be judged
                call()
            self._tuned = True
        return call()[0]


def activation_type(activation: MoeActivation, is_gated: bool) -> str:
    """Name of the member of FlashInfer's ActivationType. A clamp is in `swiglu_arguments`."""
    return (_GATED if is_gated else _UNGATED)[activation.name]


def swiglu_arguments(activation: MoeActivation, weights: Nvfp4MoeWeights) -> dict[str, Tensor | None]:
    """swiglu_alpha, swiglu_beta and swiglu_limit: float32 [E] with a limit, else None, as SGLang's
    `materialize_swiglu_params_for_cutlass`. The kernel clamps dequantised values."""
    if activation.limit is None:
        return {"swiglu_alpha": None, "swiglu_beta": None, "swiglu_limit": None}
    alpha, beta = activation.swiglu_alpha_beta()
    values = {"swiglu_alpha": alpha, "swiglu_beta": beta, "swiglu_limit": activation.limit}
    like = {"dtype": torch.float32, "device": weights.w13_weight.device}
    return {name: torch.full((weights.num_experts,), float(value), **like) for name, value in values.items()}  # type: ignore[call-overload]


def expert_parallel(weights: Nvfp4MoeWeights, spec: LayerSpec) -> dict[str, int]:
    """ep_size and ep_rank: with them ids are global, and the kernel skips those outside this rank's range. An id of -1
    is outside every range, and so it is skipped without them too."""
    if spec.num_global_experts is None:
        return {"ep_size": 1, "ep_rank": 0}
    held = weights.num_experts
    return {"ep_size": spec.num_global_experts // held, "ep_rank": spec.expert_offset // held}


def weight_arguments(weights: Nvfp4MoeWeights) -> dict[str, Any]:
    """The weights and the six quant_scales of NVFP4 as `_run_flashinfer_cutlass` hands them over.

    fc1_expert_weights int64 [E, rows, H / 16], fc2_expert_weights int64 [E, H, I / 16]: views. quant_scales:
    1 / in13 (scalar or [E]), block scales of w13 as int32 (a view), in13 * s2 of the gate [E], and the same for w2.
    """
    return {
        "fc1_expert_weights": weights.w13_weight.view(torch.int64),
        "fc2_expert_weights": weights.w2_weight.view(torch.int64),
        "quant_scales": [
            *_scales(weights.w13_input_scale, weights.w13_blockscale, gate_scale(weights)),
            *_scales(weights.w2_input_scale, weights.w2_blockscale, weights.w2_global_scale),
        ],
    }


def _scales(input_scale: Tensor | None, blockscale: Tensor, global_scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    assert input_scale is not None  # unsupported_reason has refused this
    if input_scale.numel() == 1:
        input_scale = input_scale.reshape(())  # one dimension would mean one scale an expert
    return 1 / input_scale, blockscale.view(torch.int32), (input_scale * global_scale).contiguous()


def _expert_range_reason(weights: Nvfp4MoeWeights, spec: LayerSpec) -> str | None:
    if spec.num_global_experts is None:
        return None
    held = weights.num_experts
    if spec.num_global_experts % held or spec.expert_offset % held:
        return (
            f"experts {spec.expert_offset} to {spec.expert_offset + held} of {spec.num_global_experts}: every rank has "
            "to hold equally many"
        )
    return None


def _load() -> Any:
    """`flashinfer.fused_moe`, with its `core`."""
    importlib.import_module("flashinfer.fused_moe.core")
    return importlib.import_module("flashinfer.fused_moe")


def _autotune() -> Any:
    """FlashInfer's context manager in which a call measures its tiles and remembers the best ones."""
    return importlib.import_module("flashinfer.autotuner").autotune(True)
