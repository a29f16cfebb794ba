"""What a MoE layer is to its kernels: the weights as they lie in memory, and what is between the two GEMMs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from sglang_sm120.errors import ContractError

Numerics = Literal["w4a16", "w4a4"]

W13_ORDERS = ("up_gate", "gate_up")


@dataclass(frozen=True)
class MoeActivation:
    """What lies between the two GEMMs.

    name: gated "silu" or "gelu": act(gate) * up. Ungated "silu", "gelu", "relu2" (max(x, 0)²) or "identity".
        "gelu" is the exact one (erf).
    limit: only with a gated "silu": gate = min(gate, limit), up = clamp(up, -limit, limit), in physical units, and then
        gate * sigmoid(alpha * gate) * (up + beta).
    alpha, beta: only with a limit. Alpha defaults to 1; beta to 1 when alpha is given (gpt-oss), else to 0. WITHOUT a
        limit both are ignored, as in SGLang's `materialize_swiglu_params_for_cutlass`, which this has to agree with.
    """

    name: str = "silu"
    alpha: float | None = None
    beta: float | None = None
    limit: float | None = None

    def __post_init__(self) -> None:
        finite = all(value is None or math.isfinite(value) for value in (self.alpha, self.beta))
        if not finite or (self.limit is not None and not self.limit > 0):
            raise ContractError(
                f"activation {self}", "finite alpha and beta, and a limit above 0", "pass None for what is switched off"
            )

    def swiglu_alpha_beta(self) -> tuple[float, float]:
        """Alpha and beta with their defaults, as they apply when a limit is set."""
        alpha = 1.0 if self.alpha is None else self.alpha
        if self.beta is not None:
            return alpha, self.beta
        return alpha, 0.0 if self.alpha is None else 1.0

    def gated(self, gate: Tensor, up: Tensor) -> Tensor:
        """Of a gated layer, in plain torch; NaN stays NaN."""
        if self.name == "gelu":
            return F.gelu(gate) * up
        if self.limit is None:
            return gate * torch.sigmoid(gate) * up
        alpha, beta = self.swiglu_alpha_beta()
        gate = gate.clamp(max=self.limit)
        up = up.clamp(min=-self.limit, max=self.limit)
        return gate * torch.sigmoid(alpha * gate) * (up + beta)

    def ungated(self, x: Tensor) -> Tensor:
        """Of an ungated layer, in plain torch; NaN stays NaN."""
        if self.name == "silu":
            return x * torch.sigmoid(x)
        if self.name == "gelu":
            return F.gelu(x)
        if self.name == "relu2":
            return x.clamp(min=0).square()
        return x  # "identity"


@dataclass(frozen=True, eq=False)
class Nvfp4MoeWeights:
    """One rank's experts: value = e2m1 * e4m3 * s2, exactly the tensors SGLang prepares for flashinfer_cutlass.

    E experts on this rank, H hidden, I intermediate size on this rank as stored (SGLang pads it for ungated layers).

    w13_weight: uint8 [E, 2I, H/2] gated, [E, I, H/2] ungated; e2m1 packed along H, even h in the low nibble.
    w13_blockscale: float8_e4m3fn [E, pad128(rows), pad4(H/16)], 128x4 swizzled; the padding may hold anything.
    w13_global_scale: float32 [E, 2], column 0 gate and column 1 up WHATEVER w13_order is; or [E, 1] or [E], shared or
        ungated; the value multiplier s2, not its reciprocal, and without the activation scale.
    w2_weight: uint8 [E, H, I/2]; e2m1 packed along I.
    w2_blockscale: float8_e4m3fn [E, pad128(H), pad4(I/16)], 128x4 swizzled.
    w2_global_scale: float32 [E]; s2.
    w13_input_scale: float32 scalar or [E], s2 of the hidden states for w4a4; None in a weight-only checkpoint.
    w2_input_scale: float32 scalar or [E], s2 of the activation's result for w4a4; likewise.
    w13_order: the order of the two halves of w13's rows: "up_gate" (CUTLASS) or "gate_up". Never guessed.
    is_gated: whether w13 holds a gate and an up half.
    """

    w13_weight: Tensor
    w13_blockscale: Tensor
    w13_global_scale: Tensor
    w2_weight: Tensor
    w2_blockscale: Tensor
    w2_global_scale: Tensor
    w13_input_scale: Tensor | None = None
    w2_input_scale: Tensor | None = None
    w13_order: str = "up_gate"
    is_gated: bool = True

    @property
    def num_experts(self) -> int:
        """Experts on this rank."""
        return self.w13_weight.shape[0]

    @property
    def hidden_size(self) -> int:
        return self.w2_weight.shape[1]

    @property
    def intermediate_size(self) -> int:
        """Per rank, as stored in w2; of one half when gated."""
        return self.w2_weight.shape[2] * 2
