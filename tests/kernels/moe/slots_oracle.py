"""What the operations that serve single slots are held against: slots in float64, layers without rounding, routings."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import torch
from moe_oracle import Layer, layer, oracle, tensors_of

from sglang_sm120.kernels.moe.layer import MoeActivation, Nvfp4MoeWeights

DTYPES = [torch.bfloat16, torch.float16]
TOLERANCE = {torch.bfloat16: 4e-3, torch.float16: 5e-4}  # of a row: two roundings to the dtype

# Activations that make no rounding of small integers. Alpha 0 makes the sigmoid one half.
EXACT = {True: MoeActivation("silu", alpha=0.0, beta=1.0, limit=5.0), False: MoeActivation("identity")}

ROUTINGS = [
    "all on one expert",
    "duplicates",
    "two experts only",
    "one skipped choice",
    "some skipped",
    "all skipped but one",
    "all skipped",
]


@functools.cache
def exact_layer(experts: int, hidden: int, intermediate: int, is_gated: bool = True) -> Layer:
    """Weights of 1, -1 and 0, scales that are powers of two: with integers for x, fp32 sums are exact in any order."""
    rng = np.random.default_rng([1, experts, hidden, intermediate])
    base = layer(experts, hidden, intermediate, is_gated)
    pairs = np.array([0x22, 0x2A, 0xA2, 0x00, 0x02, 0xA0], dtype=np.uint8)  # of 1, -1 and 0
    return dataclasses.replace(
        base,
        codes={name: rng.choice(pairs, codes.shape) for name, codes in base.codes.items()},
        scales={name: rng.choice(np.array([0x30, 0x38], np.uint8), s.shape) for name, s in base.scales.items()},
        s2={name: np.exp2(rng.integers(-2, 1, experts)).astype(np.float32) for name in base.s2},
    )


def exact_inputs(tokens: int, top_k: int, experts: int, hidden: int, dtype: torch.dtype, seed: int = 0):
    """Small integers, router weights of quarters, ids that may come twice in a row."""
    rng = np.random.default_rng([seed, tokens, hidden])
    x = torch.from_numpy(rng.integers(-2, 3, (tokens, hidden)).astype(np.float32)).to(dtype)
    weights = torch.from_numpy(rng.integers(1, 5, (tokens, top_k)).astype(np.float32) / 4)
    return x, weights, torch.from_numpy(rng.integers(0, experts, (tokens, top_k), dtype=np.int32))


def slots_oracle(x, lay: Layer, topk_weights, topk_ids, activation: MoeActivation, **more) -> torch.Tensor:
    """float64 [T * k, H], one slot at a time; zeros for those that are skipped."""
    top_k = topk_ids.shape[1]
    return oracle(
        x.repeat_interleave(top_k, 0), lay, topk_weights.reshape(-1, 1), topk_ids.reshape(-1, 1), activation, **more
    )


def held(topk_ids: torch.Tensor, experts: int, offset: int = 0) -> torch.Tensor:
    """bool [T * k]: whether the slot is one of this rank's."""
    ids = topk_ids.reshape(-1)
    return (ids >= offset) & (ids < offset + experts)


def routing(kind: str, tokens: int, top_k: int, experts: int, seed: int = 0) -> torch.Tensor:
    """One of ROUTINGS: int32 [T, k]."""
    rng = np.random.default_rng([seed, tokens, top_k, experts])
    ids = np.argsort(rng.random((tokens, experts)), axis=1)[:, :top_k].astype(np.int32)
    if kind == "all on one expert":
        ids[:] = experts - 2
    elif kind == "duplicates":
        ids[:, 1::2] = ids[:, : ids[:, 1::2].shape[1]]
    elif kind == "two experts only":
        ids = rng.choice(np.array([1, experts - 1], np.int32), ids.shape)
    elif kind == "one skipped choice":
        ids[:, 0] = -1
    elif kind == "some skipped":
        ids[rng.random(ids.shape) < 0.5] = -1
    elif kind == "all skipped but one":
        ids[:] = -1
        ids[-1, -1] = experts - 1
    elif kind == "all skipped":
        ids[:] = -7
    else:
        raise ValueError(kind)
    return torch.from_numpy(ids)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a 16-bit tensor, shape kept: NaN equals NaN, -0.0 differs from 0.0."""
    return tensor.view(torch.int16)


def fenced(tensor: torch.Tensor) -> torch.Tensor:
    """The same values with 0xFF bytes (NaN, also as e4m3) before and behind them in memory."""
    size = tensor.numel() * tensor.element_size()
    memory = torch.full((size + 512,), 0xFF, dtype=torch.uint8)
    memory[256 : 256 + size] = tensor.contiguous().view(torch.uint8).reshape(-1)
    return memory[256 : 256 + size].view(tensor.dtype).view(tensor.shape)


def fenced_weights(weights: Nvfp4MoeWeights) -> Nvfp4MoeWeights:
    return dataclasses.replace(weights, **{name: fenced(tensor) for name, tensor in tensors_of(weights).items()})
