"""The fused MoE op: memory, and what it refuses."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from moe_oracle import SILU, inputs, layer, map_tensors, run, tensors_of
from nvfp4_oracle import bytes_of

from sglang_sm120.errors import ContractError, UnsupportedError
from sglang_sm120.kernels.moe.fused_moe.api import (
    MoeActivation,
    Nvfp4MoeWeights,
    fused_moe,
    unsupported_reason,
    workspace_bytes,
)

NAN = float("nan")


# --- memory ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("numerics", ["w4a16", "w4a4"])
def test_strides_do_not_matter_and_inputs_stay(numerics):
    lay = layer(8, 80, 96)
    x, topk_weights, topk_ids = inputs(9, 4, 8, 80)
    weights = lay.weights()
    storage = torch.full((9, 3, 80), NAN)
    storage[:, 1] = x
    arguments = {"x": storage[:, 1], "topk_weights": topk_weights.T.contiguous().T, "topk_ids": topk_ids}
    tensors = tensors_of(weights) | arguments
    before = {name: bytes_of(tensor).clone() for name, tensor in tensors.items()}
    got = run(arguments["x"], weights, arguments["topk_weights"], topk_ids, numerics=numerics)
    assert torch.equal(got, run(x, weights, topk_weights, topk_ids, numerics=numerics))
    assert all(torch.equal(bytes_of(tensor), before[name]) for name, tensor in tensors.items())


@pytest.mark.parametrize("numerics", ["w4a16", "w4a4"])
@pytest.mark.parametrize("is_gated", [True, False])
@pytest.mark.parametrize(("tokens", "hidden", "intermediate"), [(1, 208, 352), (65, 208, 96), (300, 80, 352)])
def test_workspace_bytes_bounds_what_is_allocated(numerics, is_gated, tokens, hidden, intermediate, peak_bytes):
    weights = layer(8, hidden, intermediate, is_gated).weights()
    x, topk_weights, topk_ids = inputs(tokens, 4, 8, hidden, torch.bfloat16)
    with peak_bytes:
        out = run(x, weights, topk_weights, topk_ids, numerics=numerics)
    bound = workspace_bytes(
        num_tokens=tokens, top_k=4, hidden_size=hidden, intermediate_size=intermediate, is_gated=is_gated
    )
    assert out.isfinite().all()
    assert bound / 4 < peak_bytes.peak <= bound


@pytest.mark.parametrize("numerics", ["w4a16", "w4a4"])
@pytest.mark.parametrize("tokens", [0, 3])
def test_meta_tensors_pass_so_nothing_reads_a_value(numerics, tokens):
    """On the meta device reading a value, or a shape that depends on one, raises: what a graph capture needs."""
    weights = map_tensors(layer(8, 80, 96).weights(), lambda tensor: tensor.to("meta"))
    x, topk_weights, topk_ids = (t.to("meta") for t in inputs(tokens, 4, 8, 80, torch.bfloat16))
    out = run(x, weights, topk_weights, topk_ids, numerics=numerics)
    assert out.shape == (tokens, 80) and out.dtype == torch.bfloat16


# --- what is refused ------------------------------------------------------------------------------------------------

WEIGHTS = layer(8, 80, 96).weights()
UNGATED = layer(8, 80, 96, is_gated=False).weights()


def changed(**changes) -> Nvfp4MoeWeights:
    return dataclasses.replace(WEIGHTS, **changes)


@pytest.mark.parametrize(
    ("weights", "options", "says"),
    [
        (WEIGHTS, {"numerics": "w8a8"}, "w8a8"),
        (WEIGHTS, {"hidden_dtype": torch.float64}, "float64"),
        (WEIGHTS, {"activation": MoeActivation("relu2")}, "relu2"),
        (WEIGHTS, {"activation": MoeActivation("situ", limit=1.0)}, "situ"),
        (WEIGHTS, {"activation": MoeActivation("gelu", limit=1.0)}, "clamp limit"),
        (UNGATED, {"activation": MoeActivation("silu", limit=1.0)}, "clamp limit"),
        (changed(w2_input_scale=None), {"numerics": "w4a4"}, "input_scale"),
        (changed(w13_input_scale=None), {"numerics": "w4a4"}, "input_scale"),
        (changed(w13_weight=WEIGHTS.w13_weight.view(torch.int8)), {}, "int8"),
        (changed(w2_blockscale=WEIGHTS.w2_blockscale.view(torch.uint8)), {}, "uint8"),
        (changed(w13_weight=WEIGHTS.w13_weight[..., :36]), {}, "hidden size on this rank is 72"),
        (changed(w2_weight=WEIGHTS.w2_weight[..., :44]), {}, "intermediate size on this rank is 88"),
        (changed(w13_blockscale=WEIGHTS.w13_blockscale[..., :4]), {}, "32 elements"),
    ],
)
def test_what_is_not_covered(weights, options, says):
    asked = {"activation": SILU, "numerics": "w4a16", "hidden_dtype": torch.float32} | options
    reason = unsupported_reason(weights, **asked)
    assert reason is not None and says in reason and "\n" not in reason
    dtype = asked.pop("hidden_dtype")
    with pytest.raises(UnsupportedError, match=says):
        fused_moe(torch.zeros(2, 80, dtype=dtype), weights, torch.ones(2, 1), torch.zeros(2, 1).int(), **asked)


def test_what_is_covered():
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for numerics in ("w4a16", "w4a4"):
            assert unsupported_reason(WEIGHTS, activation=SILU, numerics=numerics, hidden_dtype=dtype) is None
    weight_only = changed(w13_input_scale=None, w2_input_scale=None)
    assert unsupported_reason(weight_only, activation=SILU, numerics="w4a16", hidden_dtype=torch.bfloat16) is None


GOOD = {"hidden_states": torch.zeros(2, 80), "topk_weights": torch.ones(2, 1), "topk_ids": torch.zeros(2, 1).int()}


@pytest.mark.parametrize(
    "bad",
    [
        {"hidden_states": torch.zeros(2, 96)},
        {"hidden_states": torch.zeros(1, 2, 80)},
        {"topk_ids": torch.zeros(3, 1).int()},
        {"topk_ids": torch.zeros(2).int()},
        {"topk_ids": torch.zeros(2, 1)},
        {"topk_ids": torch.zeros(2, 1).to(torch.int16)},
        {"topk_ids": torch.zeros(2, 1, device="meta").int()},
        {"topk_weights": torch.ones(2, 2)},
        {"topk_weights": torch.ones(2, 1).int()},
        {"topk_weights": torch.ones(2, 1, device="meta")},
        {"expert_offset": 1},
        {"expert_offset": 1, "num_global_experts": 8},
        {"expert_offset": -1, "num_global_experts": 16},
        {"num_global_experts": 7},
        {"topk_weights": torch.ones(2, 2), "topk_ids": torch.zeros(2, 2).int(), "apply_router_weight_on_input": True},
        {"weights": changed(w13_order="gate_up_gate")},
        {"weights": changed(w13_weight=WEIGHTS.w13_weight[:, :-16])},
        {"weights": changed(w13_weight=WEIGHTS.w13_weight[0])},
        {"weights": changed(w13_blockscale=WEIGHTS.w13_blockscale[:, :192])},
        {"weights": changed(w13_global_scale=torch.ones(8, 3))},
        {"weights": changed(w13_global_scale=torch.ones(8, 2).double())},
        {"weights": changed(w2_weight=WEIGHTS.w2_weight[:7])},
        {"weights": changed(w2_blockscale=WEIGHTS.w2_blockscale[:, :0])},
        {"weights": changed(w2_global_scale=torch.ones(8, 1))},
        {"weights": changed(w2_global_scale=torch.ones(8, device="meta"))},
        {"weights": changed(w13_input_scale=torch.ones(16))},
        {"weights": changed(is_gated=False), "activation": MoeActivation("relu2")},
        {"weights": dataclasses.replace(UNGATED, w13_global_scale=torch.ones(8, 2))},
        {"weights": changed(w13_input_scale=torch.zeros(8)), "numerics": "w4a4"},
    ],
)
def test_a_broken_contract_raises(bad):
    run(GOOD["hidden_states"], WEIGHTS, GOOD["topk_weights"], GOOD["topk_ids"])
    arguments = GOOD | {"weights": WEIGHTS, "activation": SILU, "numerics": "w4a16"} | bad
    with pytest.raises(ContractError) as error:
        fused_moe(**arguments)
    assert all((error.value.found, error.value.needed, error.value.fix))


@pytest.mark.parametrize("bad", [{"limit": 0.0}, {"limit": NAN}, {"alpha": NAN}, {"beta": float("inf")}])
def test_an_activation_that_makes_no_sense(bad):
    with pytest.raises(ContractError):
        MoeActivation("silu", **bad)
