"""The Marlin baseline: what SGLang's functions are given; the kernels themselves need a GPU."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_sm120.bench.moe_cases import random_weights
from sglang_sm120.bench.options import ModelShape
from sglang_sm120.errors import UnsupportedError
from sglang_sm120.integration import marlin_baseline
from sglang_sm120.kernels.moe.layer import Nvfp4MoeWeights
from sglang_sm120.kernels.quantization.nvfp4.api import dequantize_nvfp4, unswizzle_blockscale

SHAPE = ModelShape("", 3, 2, 256, 192)


def weights() -> Nvfp4MoeWeights:
    return random_weights(SHAPE, torch.device("cpu"), torch.Generator().manual_seed(0))


def prepared(monkeypatch: pytest.MonkeyPatch, of: Nvfp4MoeWeights) -> SimpleNamespace:
    """The layer that SGLang's preparation gets, which is left out here."""
    seen: list[Any] = []
    monkeypatch.setattr(
        marlin_baseline, "prepare_moe_nvfp4_layer_for_marlin", lambda layer, group_size: seen.append(layer)
    )
    marlin_baseline.prepare(of)
    return seen[0]


@pytest.mark.parametrize("order", ["up_gate", "gate_up"])
def test_sglang_gets_the_same_numbers_with_the_gate_first(order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    of = replace(weights(), w13_order=order)
    layer = prepared(monkeypatch, of)

    def decoded(packed: torch.Tensor, scale: torch.Tensor, s2: torch.Tensor) -> torch.Tensor:
        return dequantize_nvfp4(packed.data, scale.data, s2.reshape(-1, 1))

    def ours(packed: torch.Tensor, blockscale: torch.Tensor, s2: torch.Tensor) -> torch.Tensor:
        return decoded(packed, unswizzle_blockscale(blockscale, packed.shape[1], packed.shape[2] // 8), s2)

    s13 = of.w13_global_scale[:, 0]
    first, second = ours(of.w13_weight, of.w13_blockscale, s13).chunk(2, dim=1)
    gate, up = (second, first) if order == "up_gate" else (first, second)
    got = decoded(layer.w13_weight, layer.w13_weight_scale, layer.w13_weight_scale_2.data)
    assert torch.equal(got, torch.cat((gate, up), 1))
    got = decoded(layer.w2_weight, layer.w2_weight_scale, layer.w2_weight_scale_2.data)
    assert torch.equal(got, ours(of.w2_weight, of.w2_blockscale, of.w2_global_scale))
    assert layer.intermediate_size_per_partition == SHAPE.intermediate_size


def test_what_marlin_does_not_cover_is_refused() -> None:
    two_scales = weights()
    two_scales.w13_global_scale[:, 1] *= 2
    narrow = random_weights(ModelShape("", 3, 2, 256, 32), torch.device("cpu"), torch.Generator())
    for of, reason in ((two_scales, "different global scales"), (narrow, "intermediate size 32")):
        with pytest.raises(UnsupportedError, match=reason):
            marlin_baseline.prepare(of)
