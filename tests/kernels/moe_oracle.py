"""A MoE layer of random NVFP4 codes, and its output in float64, token by token and slot by slot, for any kernel."""

from __future__ import annotations

import dataclasses
import functools
import math
from dataclasses import dataclass

import numpy as np
import torch
from nvfp4_oracle import as_e4m3, dequantize, quantize, swizzle

from sglang_sm120.kernels.moe.fused_moe.api import MoeActivation, Nvfp4MoeWeights, fused_moe

SILU = MoeActivation("silu")


@dataclass(frozen=True, eq=False)
class Layer:
    """Codes as they are before any layout: [E, rows, K/2] and [E, rows, K/16] for gate, up and down, and s2 [E]."""

    codes: dict[str, np.ndarray]
    scales: dict[str, np.ndarray]
    s2: dict[str, np.ndarray]
    input_scale: dict[str, np.ndarray]
    is_gated: bool

    def weights(self, order: str = "up_gate", padding: int = 0x7F, **changes) -> Nvfp4MoeWeights:
        """As flashinfer_cutlass gets them, with NaN in the padding of the scales unless told otherwise."""
        names = order.split("_") if self.is_gated else ["up"]
        s2 = np.stack((self.s2["gate"], self.s2["up"]), 1) if self.is_gated else self.s2["up"]
        tensors = {
            "w13_weight": torch.from_numpy(np.concatenate([self.codes[name] for name in names], 1)),
            "w13_blockscale": as_e4m3(swizzle(np.concatenate([self.scales[name] for name in names], 1), padding)),
            "w13_global_scale": torch.from_numpy(s2.copy()),
            "w2_weight": torch.from_numpy(self.codes["down"].copy()),
            "w2_blockscale": as_e4m3(swizzle(self.scales["down"], padding)),
            "w2_global_scale": torch.from_numpy(self.s2["down"].copy()),
            "w13_input_scale": torch.from_numpy(self.input_scale["w13"].copy()),
            "w2_input_scale": torch.from_numpy(self.input_scale["w2"].copy()),
        }
        return Nvfp4MoeWeights(**(tensors | changes), w13_order=order, is_gated=self.is_gated)

    @functools.cached_property
    def values(self) -> dict[str, np.ndarray]:
        return {name: dequantize(self.codes[name], self.scales[name], self.s2[name][:, None]) for name in self.codes}


@functools.cache
def layer(experts: int, hidden: int, intermediate: int, is_gated: bool = True) -> Layer:
    rng = np.random.default_rng([experts, hidden, intermediate])
    shapes = {"gate": (intermediate, hidden), "up": (intermediate, hidden), "down": (hidden, intermediate)}
    if not is_gated:
        del shapes["gate"]
    return Layer(
        codes={name: rng.integers(0, 256, (experts, m, k // 2), dtype=np.uint8) for name, (m, k) in shapes.items()},
        scales={name: rng.integers(16, 64, (experts, m, k // 16), dtype=np.uint8) for name, (m, k) in shapes.items()},
        # far apart between gate and up, and between experts, so that a mixed-up one shows
        s2={name: rng.uniform(0.02, 0.2, experts).astype(np.float32) for name in shapes},
        input_scale={name: rng.uniform(0.001, 0.01, experts).astype(np.float32) for name in ("w13", "w2")},
        is_gated=is_gated,
    )


def erf(x: np.ndarray) -> np.ndarray:
    return np.vectorize(math.erf, otypes=[float])(x)


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


ACTIVATIONS = {"silu": lambda x: x * sigmoid(x), "gelu": lambda x: x * (1 + erf(x / math.sqrt(2))) / 2}
ACTIVATIONS |= {"relu2": lambda x: np.maximum(x, 0) ** 2, "identity": lambda x: x}


def activate(gate: np.ndarray | None, up: np.ndarray, activation: MoeActivation) -> np.ndarray:
    if gate is None:
        return ACTIVATIONS[activation.name](up)
    if activation.limit is None:
        return ACTIVATIONS[activation.name](gate) * up
    alpha = 1.0 if activation.alpha is None else activation.alpha
    beta = (0.0 if activation.alpha is None else 1.0) if activation.beta is None else activation.beta
    gate, up = np.minimum(gate, activation.limit), np.minimum(np.maximum(up, -activation.limit), activation.limit)
    return gate * sigmoid(gate * alpha) * (up + beta)


def through(x: np.ndarray, s2: np.float32) -> np.ndarray:
    return dequantize(*quantize(x.astype(np.float32), s2), s2)


def oracle(x, lay: Layer, topk_weights, topk_ids, activation=SILU, numerics="w4a16", held=None) -> torch.Tensor:
    """float64, one token and one slot at a time. `held`: the experts that are run, by their row in the layer."""
    dtype, out = x.dtype, np.zeros(tuple(x.shape))
    held = range(len(lay.s2["down"])) if held is None else held
    for token, ids in enumerate(topk_ids.tolist()):
        for slot, expert in enumerate(ids):
            if expert not in held:
                continue
            row = x[token].double().numpy()
            if numerics == "w4a4":
                row = through(row, lay.input_scale["w13"][expert])
            gate = lay.values["gate"][expert] @ row if lay.is_gated else None
            middle = activate(gate, lay.values["up"][expert] @ row, activation)
            if numerics == "w4a4":
                middle = through(middle, lay.input_scale["w2"][expert])
            else:
                middle = torch.from_numpy(middle).to(dtype).double().numpy()
            out[token] += float(topk_weights[token, slot]) * (lay.values["down"][expert] @ middle)
    return torch.from_numpy(out)


def map_tensors(weights: Nvfp4MoeWeights, change) -> Nvfp4MoeWeights:
    return dataclasses.replace(weights, **{name: change(tensor) for name, tensor in tensors_of(weights).items()})


def tensors_of(weights: Nvfp4MoeWeights) -> dict[str, torch.Tensor]:
    fields = {field.name: getattr(weights, field.name) for field in dataclasses.fields(weights)}
    return {name: value for name, value in fields.items() if isinstance(value, torch.Tensor)}


def inputs(tokens: int, top_k: int, experts: int, hidden: int, dtype=torch.float32, seed: int = 0):
    generator = torch.Generator().manual_seed(seed + tokens)
    x = torch.randn(tokens, hidden, generator=generator).to(dtype)
    topk_weights = torch.rand(tokens, top_k, generator=generator)
    ids = torch.stack([torch.randperm(experts, generator=generator)[:top_k] for _ in range(tokens)] or [torch.empty(0)])
    return x, topk_weights, ids.reshape(tokens, top_k).to(torch.int32)


def run(x, weights, topk_weights, topk_ids, *, activation=SILU, numerics="w4a16", **more) -> torch.Tensor:
    return fused_moe(x, weights, topk_weights, topk_ids, activation=activation, numerics=numerics, **more)


def assert_close(got: torch.Tensor, want: torch.Tensor, tolerance: float = 2e-6) -> None:
    """Every row within `tolerance` of the size of that row (a sum's error follows its terms, not its result)."""
    assert got.shape == want.shape
    size = want.norm(dim=1) + 1e-30
    error = (got.double() - want.double()).norm(dim=1) / size
    assert (error <= tolerance).all(), f"relative error by row up to {error.max().item():.2e}"
