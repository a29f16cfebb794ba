"""routed_scaling_factor is applied exactly once, by whom SGLang leaves it to."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from sglang_sm120.integration.routed_scaling import apply_weights, scale_output


class CudaTensor(torch.Tensor):
    """A CPU tensor that says it is on CUDA: the rule depends on nothing else of the device."""

    is_cuda = True


def _layer(factor: float | None, fused: bool) -> SimpleNamespace:
    config = SimpleNamespace(routed_scaling_factor=factor)
    return SimpleNamespace(moe_runner_config=config, should_fuse_routed_scaling_factor_in_topk=fused)


@pytest.mark.parametrize(
    ("cuda", "factor", "fused", "expected"),
    [
        (True, 2.5, False, 5.0),  # compressed-tensors: left to the runner
        (True, 2.5, True, 2.0),  # ModelOpt: in the router weights already
        (True, None, False, 2.0),  # a model without a factor
        (False, 2.5, False, 2.0),  # the CPU: the model multiplies
    ],
)
def test_who_multiplies(cuda: bool, factor: float | None, fused: bool, expected: float) -> None:
    output = torch.full((3, 4), 2.0).as_subclass(CudaTensor if cuda else torch.Tensor)
    layer = _layer(factor, fused)
    assert (scale_output(layer, output.clone()) == expected).all()
    stock = apply_weights(lambda scheme, layer, tokens: SimpleNamespace(hidden_states=tokens), None, layer, output)
    assert (stock.hidden_states == expected).all()
