"""From SGLang's NVFP4 FusedMoE layers to the tensors that every runner reads, and whether their scales can be used.

Everything is the one copy of the weights that SGLang prepares for flashinfer_cutlass: w13 rows [up; gate], e2m1 packed
along K, 128x4-swizzled e4m3 scales.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from sglang_sm120.errors import ConfigError
from sglang_sm120.kernels.moe.fused_moe.api import Nvfp4MoeWeights


def format_of(layer: Any) -> str | None:
    """ "modelopt", "compressed-tensors", or None if the layer is not NVFP4."""
    from sglang.srt.layers.quantization.compressed_tensors.schemes.compressed_tensors_w4a4_nvfp4_moe import (
        CompressedTensorsW4A4Nvfp4MoE,
    )
    from sglang.srt.layers.quantization.modelopt_quant import ModelOptNvFp4FusedMoEMethod

    if isinstance(layer.quant_method, ModelOptNvFp4FusedMoEMethod):
        return "modelopt"
    return "compressed-tensors" if isinstance(layer.scheme, CompressedTensorsW4A4Nvfp4MoE) else None


class Reciprocals:
    """Of a layer's scales that SGLang keeps inverted: made once, and again when the tensor was rebound or written to.

    A tensor that was written to keeps its reciprocal's address, which captured graphs read.
    """

    def __init__(self) -> None:
        self._kept: dict[str, tuple[weakref.ref[torch.Tensor], int, torch.Tensor]] = {}

    def of(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """1 / tensor. Tensors made in inference mode do not say when they are written to: always new."""
        if tensor.is_inference():
            return 1 / tensor
        source, version, inverse = self._kept.get(name, (None, 0, tensor))
        is_known = source is not None and source() is tensor
        if not is_known:
            inverse = 1 / tensor
        elif version != tensor._version:
            inverse.copy_(1 / tensor)
        self._kept[name] = (weakref.ref(tensor), tensor._version, inverse)
        return inverse


def read_weights(
    layer: Any, layer_format: str, *, input_scales: bool = True, kept: Reciprocals | None = None
) -> Nvfp4MoeWeights:
    """The layer's tensors, as they are now. input_scales: not for W4A16, which needs none.

    compressed-tensors stores reciprocals of s2, and SGLang keeps the gate's and the up half's apart.
    """
    modelopt = layer_format == "modelopt"
    kept = kept or Reciprocals()

    def inverse(name: str) -> torch.Tensor:
        return kept.of(name, getattr(layer, name))

    return Nvfp4MoeWeights(
        w13_weight=layer.w13_weight,
        w13_blockscale=layer.w13_blockscale_swizzled if modelopt else layer.w13_weight_scale,
        w13_global_scale=layer.w13_weight_scale_2 if modelopt else inverse("w13_weight_global_scale"),
        w2_weight=layer.w2_weight,
        w2_blockscale=layer.w2_blockscale_swizzled if modelopt else layer.w2_weight_scale,
        w2_global_scale=layer.w2_weight_scale_2,
        w13_input_scale=inverse("w13_input_scale_quant") if input_scales else None,
        w2_input_scale=inverse("w2_input_scale_quant") if input_scales else None,
        w13_order="up_gate",
        is_gated=layer.moe_runner_config.is_gated,
    )


def _fault(scale: torch.Tensor | None) -> str | None:
    """The first value that is not finite and above zero, or None."""
    if scale is None:
        return "missing"
    bad = scale[~(torch.isfinite(scale) & (scale > 0))]
    return f"{bad.flatten()[0].item():g}" if bad.numel() else None


def require_global_scales(name: str, weights: Nvfp4MoeWeights) -> None:
    """Field report 8: a zero or NaN global scale multiplies every expert by it, silently."""
    for label, scale in (("w13_weight", weights.w13_global_scale), ("w2_weight", weights.w2_global_scale)):
        fault = _fault(scale)
        if fault is not None:
            raise ConfigError(
                f"{name}: the global scale of {label} is {fault}",
                "a global scale that is finite and above zero, for every expert",
                "export the checkpoint again",
            )


def require_stock_input_scales(name: str, weights: Nvfp4MoeWeights) -> None:
    """The stock path divides by them, whatever they are."""
    fault = input_scale_fault(weights)
    if fault is not None:
        raise ConfigError(
            f"{name}: {fault}",
            "activation scales that are finite and above zero: the stock path always quantises activations",
            "use --sm120-moe-backend reference --sm120-moe-numerics w4a16, or calibrate the checkpoint again",
        )


def input_scale_fault(weights: Nvfp4MoeWeights) -> str | None:
    for label, scale in (("w13", weights.w13_input_scale), ("w2", weights.w2_input_scale)):
        fault = _fault(scale)
        if fault is not None:
            return f"the activation scale of {label} is {fault}"
    return None
