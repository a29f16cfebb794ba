"""Our MoE runners inside SGLang's FusedMoE layer: which layers are taken, from which tensors, and the call itself.

Everything is read from the one copy of the weights that SGLang prepares for flashinfer_cutlass: w13 rows [up; gate],
e2m1 packed along K, 128x4-swizzled e4m3 scales. Tensors are looked up at each call, so a weight update or an expert
rebalancing that rebinds them is followed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from sglang_sm120.errors import ConfigError, UnsupportedError
from sglang_sm120.integration.routed_scaling import scale_output
from sglang_sm120.kernels.moe.fused_moe.api import (
    MoeActivation,
    Numerics,
    Nvfp4MoeWeights,
    fused_moe,
    unsupported_reason,
)
from sglang_sm120.options import Sm120Options

logger = logging.getLogger(__name__)

_LAYER_ATTRIBUTE = "_sm120_moe"
_MAX_LISTED = 4


@dataclass(frozen=True)
class MoeLayer:
    """One FusedMoE layer that our runner serves. Kept on the layer; holds no tensor of its own."""

    layer: Any
    numerics: Numerics
    activation: MoeActivation
    format: str

    def weights(self) -> Nvfp4MoeWeights:
        """The layer's prepared tensors, as they are now."""
        return _WEIGHT_READERS[self.format](self.layer)

    def __call__(self, dispatch_output: Any) -> Any:
        """StandardDispatchOutput -> StandardCombineInput."""
        from sglang.srt.layers.moe.token_dispatcher.standard import StandardCombineInput

        layer, config = self.layer, self.layer.moe_runner_config
        topk = dispatch_output.topk_output
        ids_are_global = layer.moe_ep_size > 1 and layer.dispatcher.skip_local_expert_mapping
        output = fused_moe(
            dispatch_output.hidden_states,
            self.weights(),
            topk.topk_weights,
            topk.topk_ids,
            activation=self.activation,
            numerics=self.numerics,
            apply_router_weight_on_input=config.apply_router_weight_on_input,
            expert_offset=layer.moe_ep_rank * layer.num_local_experts if ids_are_global else 0,
            num_global_experts=layer.num_experts if ids_are_global else None,
            backend="reference",
        )
        return StandardCombineInput(hidden_states=scale_output(layer, output))


def run_moe_core(original: Callable, layer: Any, dispatch_output: Any) -> Any:
    """AROUND FusedMoE.run_moe_core: our runner where the layer was taken, else SGLang's."""
    served = serve_layer(layer, dispatch_output)
    return original(layer, dispatch_output) if served is None else served


def serve_layer(layer: Any, dispatch_output: Any) -> Any | None:
    """The combine input of a layer that we took, or None: SGLang's own path serves it."""
    ours = layer.__dict__.get(_LAYER_ATTRIBUTE)
    if ours is None:
        return None
    reason = _call_reason(dispatch_output)
    if reason is not None:
        raise UnsupportedError(
            f"MoE layer {layer.layer_id}: {reason}",
            "standard dispatch with unquantised hidden states and (ids, weights) of the top-k experts",
            "use --sm120-moe-backend flashinfer_cutlass",
        )
    return ours(dispatch_output)


def take_layers(model: torch.nn.Module, options: Sm120Options, *, is_draft: bool = False) -> None:
    """Check the NVFP4 MoE layers of a loaded model, take those that our runner is to serve, and log one line.

    Raises: ConfigError for damaged global scales; UnsupportedError if a runner was asked for by name and cannot serve
    every NVFP4 layer, or there is none. A draft model may have none.
    """
    from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE

    layers = [(name, module) for name, module in model.named_modules() if isinstance(module, FusedMoE)]
    nvfp4 = [(name, layer, layer_format) for name, layer in layers if (layer_format := _format_of(layer)) is not None]
    runner = options.moe_runner
    taken: list[MoeLayer] = []
    declined: list[str] = []
    for name, layer, layer_format in nvfp4:
        if layer.runner_backend is None or not layer.runner_backend.is_flashinfer_cutlass():
            declined.append(f"{name}: its weights are prepared for {layer.runner_backend}")
            continue
        weights = _WEIGHT_READERS[layer_format](layer)
        _require_global_scales(name, weights)
        if runner != "reference":
            _require_stock_input_scales(name, weights)
            continue
        ours = _build(name, layer, layer_format, weights, options)
        if isinstance(ours, str):
            declined.append(f"{name}: {ours}")
        else:
            setattr(layer, _LAYER_ATTRIBUTE, ours)
            taken.append(ours)
    what = "draft model" if is_draft else "model"
    if options.sm120_moe_backend != "auto" and not is_draft and (declined or not nvfp4):
        raise UnsupportedError(
            f"--sm120-moe-backend {runner} serves {len(nvfp4) - len(declined)} of {len(nvfp4)} NVFP4 MoE layers"
            + (f" ({_shorten(declined)})" if declined else ""),
            "every NVFP4 MoE layer of the model, and at least one",
            "use --sm120-moe-backend auto, or another checkpoint",
        )
    if not nvfp4:
        logger.warning("sglang-sm120: the %s has no NVFP4 MoE layers (of %d): nothing to do", what, len(layers))
        return
    by_runner = f"MoE runner {runner} serves {len(nvfp4) - len(declined)} of {len(nvfp4)} layers of the {what}"
    numerics = " in " + " and ".join(sorted({layer.numerics for layer in taken})) if taken else ", scales checked"
    left = f"; left to SGLang: {_shorten(declined)}" if declined else ""
    logger.info("sglang-sm120: %s%s%s", by_runner, numerics, left)


def _shorten(reasons: list[str]) -> str:
    more = len(reasons) - _MAX_LISTED
    return "; ".join(reasons[:_MAX_LISTED]) + (f"; and {more} more" if more > 0 else "")


def _build(name: str, layer: Any, layer_format: str, weights: Nvfp4MoeWeights, options: Sm120Options) -> MoeLayer | str:
    """The taken layer, or why our runner cannot serve it."""
    reason = _layer_reason(layer)
    if reason is not None:
        return reason
    numerics = _numerics(name, weights, options)
    config = layer.moe_runner_config
    activation = MoeActivation(
        name=config.activation,
        alpha=config.gemm1_alpha,
        beta=config.gemm1_beta,
        limit=config.gemm1_clamp_limit or config.swiglu_limit,
    )
    dtype = layer.params_dtype
    reason = unsupported_reason(weights, activation=activation, numerics=numerics, hidden_dtype=dtype)
    return reason if reason is not None else MoeLayer(layer, numerics, activation, layer_format)


def _numerics(name: str, weights: Nvfp4MoeWeights, options: Sm120Options) -> Numerics:
    """What to do with activations: as asked, else W4A4 where the layer has the scales for it."""
    if options.sm120_moe_numerics == "w4a16":
        return "w4a16"
    fault = _input_scale_fault(weights)
    if fault is None:
        return "w4a4"
    if options.sm120_moe_numerics == "auto":
        return "w4a16"
    raise ConfigError(
        f"{name}: {fault}",
        "activation scales that are finite and above zero, for W4A4",
        "calibrate the checkpoint's activations again, or pass --sm120-moe-numerics w4a16",
    )


def _layer_reason(layer: Any) -> str | None:
    """What of the layer, apart from its weights, our runner does not cover."""
    config = layer.moe_runner_config
    if config.no_combine:
        return "no_combine is not covered"
    if layer.moe_ep_size > 1 and layer.num_fused_shared_experts:
        return "shared experts fused into the routed ones under expert parallelism are not covered"
    if getattr(layer, "_mega_moe_weights_built", False):
        return "its weights are packed for MegaMoE"
    if "run_moe_core" in layer.__dict__:
        return "run_moe_core is replaced on this layer (LoRA does that)"
    if not hasattr(layer.dispatcher, "skip_local_expert_mapping"):
        return f"dispatcher {type(layer.dispatcher).__name__} is not the standard one"
    return None


def _call_reason(dispatch_output: Any) -> str | None:
    """What of one call our runner does not cover."""
    from sglang.srt.layers.moe.topk import TopKOutputChecker

    if not dispatch_output.format.is_standard():
        return f"dispatch format {dispatch_output.format}"
    if dispatch_output.hidden_states_scale is not None:
        return "hidden states quantised before dispatch"
    if not TopKOutputChecker.format_is_standard(dispatch_output.topk_output):
        return f"top-k format {dispatch_output.topk_output.format}"
    return None


def _format_of(layer: Any) -> str | None:
    """ "modelopt", "compressed-tensors", or None if the layer is not NVFP4."""
    from sglang.srt.layers.quantization.compressed_tensors.schemes.compressed_tensors_w4a4_nvfp4_moe import (
        CompressedTensorsW4A4Nvfp4MoE,
    )
    from sglang.srt.layers.quantization.modelopt_quant import ModelOptNvFp4FusedMoEMethod

    if isinstance(layer.quant_method, ModelOptNvFp4FusedMoEMethod):
        return "modelopt"
    return "compressed-tensors" if isinstance(layer.scheme, CompressedTensorsW4A4Nvfp4MoE) else None


def _modelopt_weights(layer: Any) -> Nvfp4MoeWeights:
    return Nvfp4MoeWeights(
        w13_weight=layer.w13_weight,
        w13_blockscale=layer.w13_blockscale_swizzled,
        w13_global_scale=layer.w13_weight_scale_2,
        w2_weight=layer.w2_weight,
        w2_blockscale=layer.w2_blockscale_swizzled,
        w2_global_scale=layer.w2_weight_scale_2,
        w13_input_scale=1 / layer.w13_input_scale_quant,
        w2_input_scale=1 / layer.w2_input_scale_quant,
        w13_order="up_gate",
        is_gated=layer.moe_runner_config.is_gated,
    )


def _compressed_tensors_weights(layer: Any) -> Nvfp4MoeWeights:
    """The format stores reciprocals; SGLang keeps the gate's and up's apart in w13_weight_global_scale."""
    return Nvfp4MoeWeights(
        w13_weight=layer.w13_weight,
        w13_blockscale=layer.w13_weight_scale,
        w13_global_scale=1 / layer.w13_weight_global_scale,
        w2_weight=layer.w2_weight,
        w2_blockscale=layer.w2_weight_scale,
        w2_global_scale=layer.w2_weight_scale_2,
        w13_input_scale=1 / layer.w13_input_scale_quant,
        w2_input_scale=1 / layer.w2_input_scale_quant,
        w13_order="up_gate",
        is_gated=layer.moe_runner_config.is_gated,
    )


_WEIGHT_READERS: dict[str, Callable[[Any], Nvfp4MoeWeights]] = {
    "modelopt": _modelopt_weights,
    "compressed-tensors": _compressed_tensors_weights,
}


def _fault(scale: torch.Tensor | None) -> str | None:
    """The first value that is not finite and above zero, or None."""
    if scale is None:
        return "missing"
    bad = scale[~(torch.isfinite(scale) & (scale > 0))]
    return f"{bad.flatten()[0].item():g}" if bad.numel() else None


def _require_global_scales(name: str, weights: Nvfp4MoeWeights) -> None:
    """Field report 8: a zero or NaN global scale multiplies every expert by it, silently."""
    for label, scale in (("w13_weight", weights.w13_global_scale), ("w2_weight", weights.w2_global_scale)):
        fault = _fault(scale)
        if fault is not None:
            raise ConfigError(
                f"{name}: the global scale of {label} is {fault}",
                "a global scale that is finite and above zero, for every expert",
                "export the checkpoint again",
            )


def _require_stock_input_scales(name: str, weights: Nvfp4MoeWeights) -> None:
    """The stock path divides by them, whatever they are."""
    fault = _input_scale_fault(weights)
    if fault is not None:
        raise ConfigError(
            f"{name}: {fault}",
            "activation scales that are finite and above zero: the stock path always quantises activations",
            "use --sm120-moe-backend reference --sm120-moe-numerics w4a16, or calibrate the checkpoint again",
        )


def _input_scale_fault(weights: Nvfp4MoeWeights) -> str | None:
    for label, scale in (("w13", weights.w13_input_scale), ("w2", weights.w2_input_scale)):
        fault = _fault(scale)
        if fault is not None:
            return f"the activation scale of {label} is {fault}"
    return None
