"""What the two CUDA W4A16 operations have in common on the Python side: the layer's facts, and w4a16.cuh's structs."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from sglang_sm120.kernels.moe.layer import MoeActivation, Nvfp4MoeWeights

K_MULTIPLE = 32  # a lane reads 16 bytes along K
DTYPE_NAMES = {torch.bfloat16: "bf16", torch.float16: "f16"}
_KINDS = {"silu": 0, "gelu": 1, "relu2": 2, "identity": 3}
_SWIGLU_CLAMPED = 4


class ActivationArgs(ctypes.Structure):
    """MoeActivationArgs in w4a16.cuh."""

    _fields_ = (
        ("kind", ctypes.c_int),
        ("limit", ctypes.c_float),
        ("alpha", ctypes.c_float),
        ("beta", ctypes.c_float),
    )


def activation_args(activation: MoeActivation) -> ActivationArgs:
    """The activation as the kernels take it. Without a limit, alpha and beta do not count."""
    if activation.limit is None:
        return ActivationArgs(kind=_KINDS[activation.name])
    alpha, beta = activation.swiglu_alpha_beta()
    return ActivationArgs(kind=_SWIGLU_CLAMPED, limit=activation.limit, alpha=alpha, beta=beta)


@dataclass(frozen=True)
class LayerShape:
    """num_experts on this rank, hidden size, intermediate size (of one half), and whether w13 has two halves."""

    num_experts: int
    hidden_size: int
    intermediate_size: int
    is_gated: bool

    @classmethod
    def of(cls, weights: Nvfp4MoeWeights) -> LayerShape:
        return cls(weights.num_experts, weights.hidden_size, weights.intermediate_size, weights.is_gated)


def unsupported_reason(shape: LayerShape, *, hidden_dtype: torch.dtype, device: torch.device) -> str | None:
    """One sentence on why neither operation covers this layer, or None."""
    if hidden_dtype not in DTYPE_NAMES:
        return f"hidden states of {hidden_dtype} are not covered: bfloat16 and float16 are"
    for name, k in (("hidden", shape.hidden_size), ("intermediate", shape.intermediate_size)):
        if k % K_MULTIPLE:
            return f"the {name} size {k} is not covered: a multiple of {K_MULTIPLE} is"
    halves = 2 if shape.is_gated else 1
    if halves * shape.intermediate_size * shape.hidden_size // 2 >= 2**31:
        return "one expert's weight has more than 2**31 bytes, and offsets inside an expert are 31 bits"
    return device_reason(device)


def device_reason(device: torch.device) -> str | None:
    """One sentence on why neither operation runs on this device, whatever the layer, or None."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
        return "this GPU has no conversion from e4m3: compute capability 8.9 is the lowest covered"
    if device.type not in ("cuda", "cpu"):
        return f"device {device} is not covered"
    return None


def global_scale_columns(weights: Nvfp4MoeWeights) -> tuple[int, int, int, int]:
    """Of w13_global_scale: its row stride, the columns for the first and second half of the rows, the gate's half.

    The columns are [gate, up] whatever the order of the rows.
    """
    up_first = weights.w13_order == "up_gate"
    gate_half = 1 if up_first else 0
    scale = weights.w13_global_scale
    if scale.dim() == 2 and scale.shape[1] == 2:
        return 2, (1 if up_first else 0), (0 if up_first else 1), gate_half
    return 1, 0, 0, gate_half


def readable_rows(x: Tensor) -> Tensor:
    """x itself if the kernels can read its rows in 16 bytes, else a copy; `contiguous` would leave a misaligned one."""
    aligned = x.data_ptr() % 16 == 0 and x.stride(0) * x.element_size() % 16 == 0 and x.stride(0) >= x.shape[1]
    return x if x.stride(1) == 1 and aligned else x.clone(memory_format=torch.contiguous_format)


def num_sms(device: torch.device) -> int:
    """Multiprocessors; a few on the CPU, so that a persistent loop is run."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 3
