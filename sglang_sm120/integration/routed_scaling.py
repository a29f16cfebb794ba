"""Who multiplies an MoE layer's output by the model's routed_scaling_factor.

On CUDA the models leave it to the runner, unless the router weights carry it: so for ModelOpt NVFP4, not for
compressed-tensors (`should_fuse_routed_scaling_factor_in_topk`). Elsewhere the models multiply. SGLang 0.5.23's CUTLASS
path does neither for compressed-tensors NVFP4.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def output_factor(layer: Any, output: torch.Tensor) -> float | None:
    """The factor that is left to the runner of this layer, or None."""
    factor = layer.moe_runner_config.routed_scaling_factor
    return None if not output.is_cuda or layer.should_fuse_routed_scaling_factor_in_topk else factor


def scale_output(layer: Any, output: torch.Tensor) -> torch.Tensor:
    """A runner's output, multiplied by routed_scaling_factor where that is left to the runner; in place."""
    factor = output_factor(layer, output)
    return output if factor is None else output.mul_(factor)


def apply_weights(original: Callable, scheme: Any, layer: Any, dispatch_output: Any) -> Any:
    """AROUND CompressedTensorsW4A4Nvfp4MoE.apply_weights, the stock path of a layer that we did not take."""
    combine_input = original(scheme, layer, dispatch_output)
    scale_output(layer, combine_input.hidden_states)
    return combine_input
