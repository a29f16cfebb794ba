"""What `bench moe` calls: random NVFP4 experts, and the fused MoE layer by each backend and order of tiles."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from sglang_sm120.bench.options import ModelShape
from sglang_sm120.errors import UnsupportedError
from sglang_sm120.kernels.moe.fused_moe.api import (
    Backend,
    MoeActivation,
    Numerics,
    Nvfp4MoeWeights,
    Order,
    backend_reason,
    fused_moe,
)
from sglang_sm120.kernels.moe.fused_moe.config import choose_backend
from sglang_sm120.kernels.moe.grouped_gemm_decode.api import grouped_gemm_decode
from sglang_sm120.kernels.moe.grouped_gemm_middle.api import grouped_gemm_middle
from sglang_sm120.kernels.moe.w4a16 import LayerShape
from sglang_sm120.kernels.quantization.nvfp4.api import GROUP_SIZE, round_up

Call = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(hidden_states [T, H], topk_weights [T, k], topk_ids [T, k]) -> [T, H]; the weights are bound."""

ACTIVATION = MoeActivation("silu")
_GEMMS: dict[str, Callable[..., Tensor]] = {"decode": grouped_gemm_decode, "middle": grouped_gemm_middle}

# So that what goes into each GEMM has a size of about 1: E4M3 codes of 0.11 to 1.4 and these s2.
_SCALE_CODES = (30, 60)
_GLOBAL_SCALES = (0.005, 0.015)
_AMAX_HIDDEN, _AMAX_INTERMEDIATE = 6.0, 64.0
_QUANTISED_MAX = 448.0 * 6.0


def random_weights(shape: ModelShape, device: torch.device, generator: torch.Generator) -> Nvfp4MoeWeights:
    """Random gated experts in the CUTLASS layout. Gate and up share a global scale, and it fits bfloat16: there are
    kernels that hold one an expert, in that format."""
    experts, hidden, intermediate = shape.num_experts, shape.hidden_size, shape.intermediate_size

    def integers(low: int, high: int, *size: int) -> Tensor:
        return torch.randint(low, high, size, dtype=torch.uint8, device=device, generator=generator)

    def scales(rows: int, k: int) -> Tensor:
        size = (experts, round_up(rows, 128), round_up(k // GROUP_SIZE, 4))
        return integers(*_SCALE_CODES, *size).view(torch.float8_e4m3fn)

    def global_scales() -> Tensor:
        low, high = _GLOBAL_SCALES
        values = torch.rand(experts, device=device, generator=generator) * (high - low) + low
        return values.to(torch.bfloat16).to(torch.float32)

    return Nvfp4MoeWeights(
        w13_weight=integers(0, 256, experts, 2 * intermediate, hidden // 2),
        w13_blockscale=scales(2 * intermediate, hidden),
        w13_global_scale=global_scales()[:, None].repeat(1, 2),
        w2_weight=integers(0, 256, experts, hidden, intermediate // 2),
        w2_blockscale=scales(hidden, intermediate),
        w2_global_scale=global_scales(),
        w13_input_scale=torch.tensor(_AMAX_HIDDEN / _QUANTISED_MAX, device=device),
        w2_input_scale=torch.tensor(_AMAX_INTERMEDIATE / _QUANTISED_MAX, device=device),
    )


@dataclass(frozen=True)
class Candidate:
    """One way to run the layer. order "" where there is none to choose; part "gemms": all but the sum of the slots."""

    backend: str
    order: str
    numerics: str
    part: str = ""

    @property
    def label(self) -> str:
        return " ".join(word for word in (self.backend, self.part, self.order, self.numerics) if word)

    def bind(self, weights: Nvfp4MoeWeights) -> Call:
        """The layer over these weights."""
        numerics = cast("Numerics", self.numerics)
        backend = cast("Backend", self.backend)
        order = cast("Order | None", None if self.order in ("", "default") else self.order)
        if self.part == "gemms":
            gemms = _GEMMS[self.backend]
            return lambda x, router, ids: gemms(x, weights, router, ids, activation=ACTIVATION, order=order)
        return lambda x, router, ids: fused_moe(
            x, weights, router, ids, activation=ACTIVATION, numerics=numerics, backend=backend, order=order
        )

    def unsupported_reason(self, weights: Nvfp4MoeWeights, num_slots: int, hidden: Tensor) -> str | None:
        """One sentence, or None."""
        if self.backend == "auto":
            return None
        return backend_reason(
            self.backend,
            weights,
            num_slots,
            activation=ACTIVATION,
            numerics=self.numerics,
            hidden_dtype=hidden.dtype,
            device=hidden.device,
        )


def candidates(
    backends: tuple[str, ...], orders: tuple[str, ...], numerics: tuple[str, ...], gemms: bool = False
) -> list[Candidate]:
    """Every combination; "auto" once, in fused_moe's own order; the parts that are GEMMs too, where asked for."""
    return [
        Candidate(backend, order, number, part)
        for number in numerics
        for backend in backends
        for part in (("", "gemms") if gemms and backend in _GEMMS and number == "w4a16" else ("",))
        for order in (("",) if backend == "auto" else orders)
    ]


def served_by(auto: Candidate, weights: Nvfp4MoeWeights, hidden: Tensor, router: Tensor, ids: Tensor) -> str:
    """The backend that "auto" comes to: the first that covers the call and can be loaded here."""
    if hidden.device.type == "cuda":
        for name in choose_backend(LayerShape.of(weights), ids.numel(), auto.numerics):
            named = Candidate(name, "", auto.numerics)
            if named.unsupported_reason(weights, ids.numel(), hidden) is None:
                try:
                    named.bind(weights)(hidden, router, ids)
                except UnsupportedError:
                    continue
                return name
    return "reference"


def reference_output(
    weights: Nvfp4MoeWeights,
    numerics: str,
    hidden: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    num_global_experts: int | None = None,
) -> Tensor:
    """What is right: fused_moe in plain torch; on the first rank, where ids are those of num_global_experts."""
    return fused_moe(
        hidden,
        weights,
        topk_weights,
        topk_ids,
        activation=ACTIVATION,
        numerics=cast("Numerics", numerics),
        num_global_experts=num_global_experts,
        backend="reference",
    )


def relative_error(got: Tensor, want: Tensor) -> float:
    """The largest over tokens of |got - want| / |want|; infinite for a wrong shape, NaN or infinity. Sums slots.

    A token without an expert on this rank is exactly zero in both, which is no error.
    """
    if got.shape != want.shape and got.numel() % want.numel() == 0:
        got = got.to(torch.float64).view(len(want), -1, want.shape[1]).sum(1)
    if got.shape != want.shape:
        return float("inf")
    difference = (got.to(torch.float64) - want.to(torch.float64)).norm(dim=1)
    relative = difference / want.to(torch.float64).norm(dim=1)
    error = torch.where(difference == 0, 0.0, relative).max().item()
    return error if error == error else float("inf")
