"""What a foreign MoE kernel needs before it is handed a layer: the package it comes from, small conversions.

Nothing here imports a foreign package. Source of the conversions: SGLang 0.5.23, `modelopt_quant.py`
(`process_weights_after_loading`, `_compute_gemm1_alphas`) and `moe_runner/flashinfer_cutlass.py`.
"""

from __future__ import annotations

import importlib.util
from dataclasses import fields
from importlib import metadata

import torch
from torch import Tensor

from sglang_sm120.errors import UnsupportedError
from sglang_sm120.kernels.moe.fused_moe import api
from sglang_sm120.kernels.moe.layer import Nvfp4MoeWeights
from sglang_sm120.runners.base import LayerSpec

FLASHINFER_RANGE = ((0, 7, 2), (0, 7, 3))
"""First FlashInfer version whose calls were checked against its source, and first that was not. SGLang pins 0.7.2."""

_TENSORS = tuple(field.name for field in fields(Nvfp4MoeWeights) if "Tensor" in str(field.type))
_FOREIGN_DTYPES = (torch.bfloat16, torch.float16)


def gpu_reason(device: torch.device) -> str | None:
    """Why this device is no SM120 or SM121 GPU, or None."""
    if device.type != "cuda":
        return f"it needs an SM120 GPU, and the layer is on {device}"
    major, minor = torch.cuda.get_device_capability(device)
    return None if major == 12 else f"it needs compute capability 12.x, and this GPU has {major}.{minor}"


def flashinfer_reason() -> str | None:
    """Why the installed FlashInfer is not one that was checked, or None. Reads metadata; imports nothing."""
    first, end = (".".join(map(str, version)) for version in FLASHINFER_RANGE)
    try:
        version = metadata.version("flashinfer-python")
    except metadata.PackageNotFoundError:
        return f"flashinfer-python is not installed; install flashinfer-python=={first}, which SGLang pins"
    # Both ends have a third number, so "0.7.2.post1" and "0.7.2+cu130" are in and "0.7.2rc1" is not.
    numbers = tuple(int(part) if part.isdigit() else -1 for part in version.split("+")[0].split(".")[:3])
    if FLASHINFER_RANGE[0] <= numbers < FLASHINFER_RANGE[1]:
        return None
    return f"flashinfer-python {version} is not one that was checked (>= {first}, < {end})"


def b12x_package_reason() -> str | None:
    """Why the package `b12x` that would be imported is not the one that FlashInfer installs, or None.

    PyPI has a distribution `b12x` that owns the same file with other contents: installing both leaves whichever came
    last, and removing one breaks the other. So both the owner and the file are looked at.
    """
    reason = flashinfer_reason()
    if reason is not None:
        return reason
    first = ".".join(map(str, FLASHINFER_RANGE[0]))
    fix = f"pip uninstall -y b12x, then pip install --force-reinstall --no-deps flashinfer-python=={first}"
    try:
        other = metadata.distribution("b12x")
    except metadata.PackageNotFoundError:
        other = None
    if other is not None:
        return f"PyPI's b12x {other.version} is installed over the package that FlashInfer brings; {fix}"
    flashinfer = metadata.distribution("flashinfer-python")
    owned = [file for file in flashinfer.files or () if file.as_posix() == "b12x/__init__.py"]
    spec = importlib.util.find_spec("b12x")
    if not owned or spec is None or spec.origin is None:
        return f"this installation of FlashInfer has no package b12x; {fix}"
    if str(flashinfer.locate_file(owned[0])) != spec.origin:
        return f"the package b12x would be imported from {spec.origin}, which FlashInfer does not own; {fix}"
    return None


def layer_reason(weights: Nvfp4MoeWeights, spec: LayerSpec, numerics: str) -> str | None:
    """Why the layer is none that both foreign kernels cover, or None: what `fused_moe` says, and the dtype."""
    reason = api.unsupported_reason(
        weights, activation=spec.activation, numerics=numerics, hidden_dtype=spec.hidden_dtype
    )
    if reason is None and spec.hidden_dtype not in _FOREIGN_DTYPES:
        reason = f"hidden states of {spec.hidden_dtype} are not covered: bfloat16 and float16 are"
    return reason


def gate_scale(weights: Nvfp4MoeWeights) -> Tensor:
    """float32 [E], a view: the one global scale that kernels with a single alpha an expert apply to gate AND up.

    SGLang hands over the gate's (column 0); `require_shared_scale` is for where that would be wrong.
    """
    return weights.w13_global_scale.reshape(weights.num_experts, -1)[:, 0]


def require_shared_scale(runner: str, weights: Nvfp4MoeWeights) -> None:
    """Raises UnsupportedError if gate and up have different global scales. Waits for the GPU: not for a forward."""
    scale = weights.w13_global_scale.reshape(weights.num_experts, -1)
    if not torch.equal(scale[:, 0], scale[:, -1]):
        raise UnsupportedError(
            f"{runner}: gate and up have different global scales",
            "one global scale an expert, since this kernel applies the gate's to both",
            "use another runner for this checkpoint",
        )


def weigh_input(hidden_states: Tensor, topk_weights: Tensor, spec: LayerSpec) -> tuple[Tensor, Tensor]:
    """Hidden states and fp32 router weights as the kernel is to see them.

    With apply_router_weight_on_input the product is rounded to the hidden states' dtype and the weights become 1, as in
    SGLang's `_prescale_router_weight_on_input`; k is 1 then.
    """
    if not spec.apply_router_weight_on_input:
        return hidden_states, topk_weights.to(torch.float32)
    scaled = hidden_states * topk_weights.to(hidden_states.dtype)
    return scaled, torch.ones_like(topk_weights, dtype=torch.float32)


def same_tensors(one: Nvfp4MoeWeights, other: Nvfp4MoeWeights) -> bool:
    """Whether both hold the very same tensors, so that nothing has to be handed over again."""
    if one is other:
        return True
    return all(getattr(one, name) is getattr(other, name) for name in _TENSORS)


def is_capturing(device: torch.device) -> bool:
    """Whether a CUDA graph is being captured on this device's current stream."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
