"""The fused MoE reference: what it computes, against the float64 loop of moe_oracle."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from moe_oracle import Layer, assert_close, inputs, layer, map_tensors, oracle, run
from nvfp4_oracle import as_e4m3

from sglang_sm120.errors import ContractError
from sglang_sm120.kernels.moe.fused_moe.api import MoeActivation, Nvfp4MoeWeights

NAN = float("nan")


# --- the whole layer ------------------------------------------------------------------------------------------------

SIZES = [(8, 1, 80, 80), (8, 4, 208, 96), (16, 4, 80, 160), (16, 1, 208, 352)]  # E, k, H, I: all off the 128 tile


@pytest.mark.parametrize("tokens", [0, 1, 2, 7, 8, 9, 16, 17, 63, 64, 65])
@pytest.mark.parametrize(("experts", "top_k", "hidden", "intermediate"), SIZES)
def test_w4a16_matches_the_oracle(tokens, experts, top_k, hidden, intermediate):
    lay = layer(experts, hidden, intermediate)
    x, topk_weights, topk_ids = inputs(tokens, top_k, experts, hidden)
    got = run(x, lay.weights(), topk_weights, topk_ids)
    assert got.dtype == x.dtype and got.is_contiguous()
    assert_close(got, oracle(x, lay, topk_weights, topk_ids))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 4e-3), (torch.float16, 5e-4)])
def test_half_precision_rounds_the_intermediate_and_the_result(dtype, tolerance):
    lay = layer(8, 208, 96)
    x, topk_weights, topk_ids = inputs(17, 4, 8, 208, dtype)
    x /= 64  # fp16 would overflow
    got = run(x, lay.weights(), topk_weights, topk_ids)
    assert got.dtype == dtype
    want = oracle(x, lay, topk_weights, topk_ids)
    assert_close(got, want, tolerance)
    # After the same last rounding nearly every element is equal; it is not without the rounding in the middle.
    same = (got == want.to(dtype)).double().mean()
    unrounded = run(x.float(), lay.weights(), topk_weights, topk_ids).to(dtype)
    assert same > 0.97 and (unrounded == want.to(dtype)).double().mean() < 0.9


@pytest.mark.parametrize(("experts", "top_k", "hidden", "intermediate"), SIZES)
@pytest.mark.parametrize("scalar", [False, True])
def test_w4a4_matches_the_oracle(experts, top_k, hidden, intermediate, scalar):
    lay = layer(experts, hidden, intermediate)
    if scalar:
        lay = dataclasses.replace(lay, input_scale={n: np.full(experts, s.max()) for n, s in lay.input_scale.items()})
    weights = lay.weights()
    if scalar:
        weights = dataclasses.replace(
            weights, w13_input_scale=weights.w13_input_scale[0].clone(), w2_input_scale=weights.w2_input_scale[:1]
        )
    x, topk_weights, topk_ids = inputs(9, top_k, experts, hidden)
    got = run(x, weights, topk_weights, topk_ids, numerics="w4a4")
    # fp32 against fp64 may move one code of the intermediate by a step: a bound that such a row keeps, far below
    # what quantising costs at all.
    assert_close(got, oracle(x, lay, topk_weights, topk_ids, numerics="w4a4"), 1e-2)
    unquantised = oracle(x, lay, topk_weights, topk_ids)
    assert (got.double() - unquantised).norm() > 0.05 * unquantised.norm()


@pytest.mark.parametrize("name", ["identity", "relu2"])
def test_w4a4_is_exact_where_every_number_is(name):
    """Small integers and powers of two: fp32 makes no rounding, so the result is the oracle's to the bit."""
    rng = np.random.default_rng(9)
    base = layer(8, 48, 32, is_gated=False)
    pairs = np.array([0x22, 0x2A, 0x00, 0x02], dtype=np.uint8)  # of 1, -1 and 0
    lay = Layer(
        codes={n: rng.choice(pairs, c.shape) for n, c in base.codes.items()},
        scales={n: np.full_like(s, 0x38) for n, s in base.scales.items()},  # 1.0
        s2={n: np.exp2(rng.integers(-2, 2, 8)).astype(np.float32) for n in base.s2},
        input_scale={n: np.exp2(rng.integers(-9, -6, 8)).astype(np.float32) for n in base.input_scale},
        is_gated=False,
    )
    x = torch.from_numpy(rng.integers(-6, 7, (9, 48)).astype(np.float32))
    _, topk_weights, topk_ids = inputs(9, 4, 8, 48)
    topk_weights = (topk_weights * 4).round() / 4
    activation = MoeActivation(name)
    got = run(x, lay.weights(), topk_weights, topk_ids, activation=activation, numerics="w4a4")
    want = oracle(x, lay, topk_weights, topk_ids, activation, "w4a4")
    assert want.abs().max() > 1 and torch.equal(got.double(), want)


# --- routing --------------------------------------------------------------------------------------------------------


def routing(kind: str, topk_ids: torch.Tensor) -> torch.Tensor:
    ids = topk_ids.clone()
    if kind == "all on one expert":
        ids[:] = -1
        ids[:, 2] = 5
    elif kind == "duplicates":
        ids[:, 1] = ids[:, 0]
        ids[:, 3] = ids[:, 2]
    elif kind == "experts without a token":
        ids %= 3
    elif kind == "some skipped":
        ids[::2, 1] = -1
        ids[3] = -1
    elif kind == "all skipped":
        ids[:] = -1
    return ids


KINDS = ["all on one expert", "duplicates", "experts without a token", "some skipped", "all skipped"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("numerics", ["w4a16", "w4a4"])
def test_routing(kind, dtype, numerics):
    lay = layer(8, 80, 96)
    x, topk_weights, topk_ids = inputs(9, 4, 8, 80)
    topk_ids = routing(kind, topk_ids).to(dtype)
    got = run(x, lay.weights(), topk_weights, topk_ids, numerics=numerics)
    assert_close(got, oracle(x, lay, topk_weights, topk_ids, numerics=numerics), 2e-6 if numerics == "w4a16" else 1e-2)
    assert (got[(topk_ids < 0).all(dim=1)] == 0).all()


@settings(deadline=None, max_examples=40)
@given(data=st.data(), tokens=st.integers(1, 5), top_k=st.integers(1, 4))
def test_any_routing(data, tokens, top_k):
    lay = layer(8, 80, 96)
    ids = data.draw(st.lists(st.integers(-2, 7), min_size=tokens * top_k, max_size=tokens * top_k))
    topk_ids = torch.tensor(ids).reshape(tokens, top_k)
    x, topk_weights, _ = inputs(tokens, top_k, 8, 80)
    assert_close(run(x, lay.weights(), topk_weights, topk_ids), oracle(x, lay, topk_weights, topk_ids))


def test_topk_weights_in_half_precision():
    lay = layer(8, 80, 96)
    x, topk_weights, topk_ids = inputs(7, 4, 8, 80)
    half = topk_weights.bfloat16()
    assert_close(run(x, lay.weights(), half, topk_ids), oracle(x, lay, half, topk_ids))


def test_the_sum_runs_in_slot_order_whatever_the_experts_are_called():
    lay = layer(16, 80, 160)
    weights = lay.weights()
    x, topk_weights, topk_ids = inputs(33, 4, 16, 80)
    want = run(x, weights, topk_weights, topk_ids)
    shuffle = torch.randperm(16, generator=torch.Generator().manual_seed(1))
    renamed = map_tensors(weights, lambda tensor: torch.stack([tensor[expert] for expert in shuffle.tolist()]))
    ids = torch.argsort(shuffle)[topk_ids.long()]
    assert torch.equal(run(x, renamed, topk_weights, ids), want)


def test_the_sum_runs_from_the_first_slot_in_fp32():
    """Weights for which any other order gives another result: the first slot's share is lost beside the second's."""
    lay = layer(8, 80, 96)
    x, _, _ = inputs(9, 1, 8, 80)
    ids = torch.full((9, 3), 5)
    y = run(x, lay.weights(), torch.ones(9, 1), ids[:, :1])
    big = 2.0**25
    got = run(x, lay.weights(), torch.tensor([[1.0, big, -big]]).expand(9, 3), ids)
    want = (y + big * y) - big * y
    assert torch.equal(got, want) and not torch.equal(want, y)


def slice_of(weights: Nvfp4MoeWeights, first: int, count: int) -> Nvfp4MoeWeights:
    """One rank's share."""
    return map_tensors(weights, lambda tensor: tensor[first : first + count])


@pytest.mark.parametrize(("first", "count"), [(0, 8), (8, 8), (4, 8), (15, 1), (0, 16)])
def test_expert_parallel_ids_are_global(first, count):
    lay = layer(16, 80, 160)
    x, topk_weights, topk_ids = inputs(17, 4, 16, 80)
    topk_ids[0] = torch.tensor([-1, 0, 15, 8])
    part = slice_of(lay.weights(), first, count)
    got = run(x, part, topk_weights, topk_ids, expert_offset=first, num_global_experts=16)
    assert_close(got, oracle(x, lay, topk_weights, topk_ids, held=range(first, first + count)))
    local = torch.where((topk_ids >= first) & (topk_ids < first + count), topk_ids - first, -1)
    assert torch.equal(got, run(x, part, topk_weights, local))


def test_expert_parallel_ranks_add_up():
    lay = layer(16, 80, 160)
    x, topk_weights, topk_ids = inputs(17, 4, 16, 80)
    ranks = [
        run(x, slice_of(lay.weights(), f, 4), topk_weights, topk_ids, expert_offset=f, num_global_experts=16)
        for f in (0, 4, 8, 12)
    ]
    assert_close(sum(ranks), oracle(x, lay, topk_weights, topk_ids))


def test_an_id_beyond_the_experts_is_refused_on_the_cpu():
    weights = layer(8, 80, 96).weights()
    x, topk_weights, topk_ids = inputs(4, 4, 8, 80)
    topk_ids[2, 1] = 8
    with pytest.raises(ContractError, match="id of 8 or more"):
        run(x, weights, topk_weights, topk_ids)
    run(x, weights, topk_weights, topk_ids, num_global_experts=9)  # global: another rank's
    topk_ids[2, 1] = 9
    with pytest.raises(ContractError, match="global"):
        run(x, weights, topk_weights, topk_ids, num_global_experts=9)


def test_router_weight_on_the_input():
    lay = layer(8, 80, 96)
    for dtype, tolerance in ((torch.float32, 2e-6), (torch.bfloat16, 4e-3)):
        x, topk_weights, topk_ids = inputs(9, 1, 8, 80, dtype)
        topk_ids[4] = -1
        topk_weights[4] = NAN
        got = run(x, lay.weights(), topk_weights, topk_ids, apply_router_weight_on_input=True)
        want = oracle(x * topk_weights.to(dtype), lay, torch.ones(9, 1), topk_ids)
        assert_close(got, want, tolerance)
        assert (got.double() - oracle(x, lay, topk_weights, topk_ids)).nan_to_num().norm() > 0.1 * want.norm()


# --- layout of the weights ------------------------------------------------------------------------------------------


def test_both_orders_of_w13_give_one_answer_and_the_wrong_order_another():
    lay = layer(8, 80, 96)
    arguments = inputs(9, 4, 8, 80)
    up_gate = run(arguments[0], lay.weights("up_gate"), *arguments[1:])
    assert_close(run(arguments[0], lay.weights("gate_up"), *arguments[1:]), up_gate)
    wrong = run(arguments[0], dataclasses.replace(lay.weights("gate_up"), w13_order="up_gate"), *arguments[1:])
    assert (wrong - up_gate).norm() > 0.3 * up_gate.norm()


@pytest.mark.parametrize("shape", [(8,), (8, 1)])
def test_a_shared_global_scale(shape):
    lay = layer(8, 80, 96)
    lay = dataclasses.replace(lay, s2=lay.s2 | {"gate": lay.s2["up"]})
    arguments = inputs(9, 4, 8, 80)
    shared = torch.from_numpy(lay.s2["up"]).reshape(shape)
    got = run(arguments[0], lay.weights(w13_global_scale=shared), *arguments[1:])
    assert torch.equal(got, run(arguments[0], lay.weights(), *arguments[1:]))
    assert_close(got, oracle(arguments[0], lay, *arguments[1:]))


def test_the_layout_is_the_one_sglang_makes():
    """SGLang swizzles the row-major scales of w13 as one matrix, so a half need not start on a tile of 128 rows."""
    swizzle_blockscale = pytest.importorskip("sglang.srt.layers.quantization.utils").swizzle_blockscale
    lay = layer(8, 208, 352)
    scales = {"w13": np.concatenate((lay.scales["up"], lay.scales["gate"]), 1), "w2": lay.scales["down"]}
    theirs = {f"{name}_blockscale": swizzle_blockscale(as_e4m3(codes)) for name, codes in scales.items()}
    x, topk_weights, topk_ids = inputs(5, 4, 8, 208)
    assert_close(run(x, lay.weights(**theirs), topk_weights, topk_ids), oracle(x, lay, topk_weights, topk_ids))


def test_padding_of_the_scales_does_not_matter():
    lay = layer(8, 208, 352)
    x, topk_weights, topk_ids = inputs(5, 4, 8, 208)
    for numerics in ("w4a16", "w4a4"):
        clean = run(x, lay.weights(padding=0), topk_weights, topk_ids, numerics=numerics)
        assert torch.isfinite(clean).all()
        assert torch.equal(run(x, lay.weights(padding=0x7F), topk_weights, topk_ids, numerics=numerics), clean)


def test_an_ungated_layer_padded_by_sglang():
    """SGLang pads I to 128 with zero weights and zero scales, in w13 and w2 alike."""
    lay = layer(8, 80, 96, is_gated=False)
    pad = {"codes": {"up": (32, 0), "down": (0, 16)}, "scales": {"up": (32, 0), "down": (0, 2)}}
    padded = dataclasses.replace(
        lay,
        **{
            kind: {n: np.pad(getattr(lay, kind)[n], ((0, 0), (0, m), (0, k))) for n, (m, k) in by_name.items()}
            for kind, by_name in pad.items()
        },
    )
    x, topk_weights, topk_ids = inputs(9, 4, 8, 80)
    for activation in (MoeActivation("relu2"), MoeActivation("silu")):
        got = run(x, padded.weights(), topk_weights, topk_ids, activation=activation)
        assert_close(got, oracle(x, lay, topk_weights, topk_ids, activation))


# --- activations ----------------------------------------------------------------------------------------------------

CASES = [(True, MoeActivation("gelu"))]
CASES += [(False, MoeActivation(name)) for name in ("silu", "gelu", "relu2", "identity")]
CASES += [
    (True, MoeActivation("silu", limit=3.0)),
    (True, MoeActivation("silu", alpha=1.702, limit=3.0)),
    (True, MoeActivation("silu", alpha=1.702, beta=0.25, limit=3.0)),
    (True, MoeActivation("silu", beta=0.5, limit=1.0)),
]


@pytest.mark.parametrize(("is_gated", "activation"), CASES)
@pytest.mark.parametrize("numerics", ["w4a16", "w4a4"])
def test_activations(is_gated, activation, numerics):
    lay = layer(8, 80, 96, is_gated)
    x, topk_weights, topk_ids = inputs(9, 4, 8, 80)
    got = run(x, lay.weights(), topk_weights, topk_ids, activation=activation, numerics=numerics)
    want = oracle(x, lay, topk_weights, topk_ids, activation, numerics)
    assert_close(got, want, 2e-6 if numerics == "w4a16" else 2e-2)
    if is_gated:
        assert (want - oracle(x, lay, topk_weights, topk_ids, numerics=numerics)).norm() > 1e-4 * want.norm()


def test_alpha_and_beta_without_a_limit_are_ignored_as_in_sglang():
    lay = layer(8, 80, 96)
    arguments = inputs(9, 4, 8, 80)
    got = run(arguments[0], lay.weights(), *arguments[1:], activation=MoeActivation("silu", alpha=1.7, beta=2.0))
    assert torch.equal(got, run(arguments[0], lay.weights(), *arguments[1:]))


@pytest.mark.parametrize("alpha", [None, 1.702])
@pytest.mark.parametrize("beta", [None, 0.0, 0.5])
@pytest.mark.parametrize("limit", [None, 7.0])
def test_swiglu_defaults_are_sglangs(alpha, beta, limit):
    base = pytest.importorskip("sglang.srt.layers.moe.moe_runner.base")
    cutlass = pytest.importorskip("sglang.srt.layers.moe.moe_runner.flashinfer_cutlass")
    config = base.MoeRunnerConfig(gemm1_alpha=alpha, gemm1_beta=beta, gemm1_clamp_limit=limit, activation="silu")
    theirs = cutlass.materialize_swiglu_params_for_cutlass(config, 1, torch.device("cpu"))
    ours = MoeActivation("silu", alpha=alpha, beta=beta, limit=limit)
    if limit is None:
        assert theirs == (None, None, None)
    else:
        assert [t.item() for t in theirs] == pytest.approx([*ours.swiglu_alpha_beta(), limit])


# --- poison ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("numerics", ["w4a16", "w4a4"])
@pytest.mark.parametrize("poison", [NAN, float("inf")])
def test_a_poisoned_row_stays_its_own_problem(numerics, poison):
    lay = layer(8, 80, 96)
    x, topk_weights, topk_ids = inputs(17, 4, 8, 80)
    topk_ids[[3, 16]] = -1  # padding rows
    clean = run(x, lay.weights(), topk_weights, topk_ids, numerics=numerics)
    dirty = x.clone()
    dirty[[3, 16]] = poison
    topk_weights[3] = NAN
    got = run(dirty, lay.weights(), topk_weights, topk_ids, numerics=numerics)
    assert torch.equal(got, clean) and (got[[3, 16]] == 0).all()
    dirty[5, 7] = NAN  # a routed one
    got = run(dirty, lay.weights(), topk_weights, topk_ids, numerics=numerics)
    others = [row for row in range(17) if row != 5]
    assert torch.isnan(got[5]).all() and torch.equal(got[others], clean[others])


@pytest.mark.parametrize("field", ["w13_global_scale", "w2_global_scale", "w13_blockscale", "w2_blockscale"])
def test_a_poisoned_expert_reaches_only_its_tokens(field):
    lay = layer(8, 80, 96)
    x, topk_weights, topk_ids = inputs(17, 4, 8, 80)
    clean = run(x, lay.weights(), topk_weights, topk_ids)
    weights = lay.weights()
    tensor = getattr(weights, field)
    if tensor.dtype == torch.float32:
        tensor[3] = NAN
    else:
        tensor.view(torch.uint8)[3] = 0x7F
    got = run(x, weights, topk_weights, topk_ids)
    its_tokens = (topk_ids == 3).any(dim=1)
    assert 0 < its_tokens.sum() < 17
    assert torch.isnan(got[its_tokens]).all() and torch.equal(got[~its_tokens], clean[~its_tokens])


def test_a_poisoned_router_weight_in_a_skipped_slot():
    lay = layer(8, 80, 96)
    x, topk_weights, topk_ids = inputs(9, 4, 8, 80)
    topk_ids[:, 1] = -1
    clean = run(x, lay.weights(), topk_weights, topk_ids)
    topk_weights[:, 1] = NAN
    assert torch.equal(run(x, lay.weights(), topk_weights, topk_ids), clean)


# --- GPU ------------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("numerics", ["w4a16", "w4a4"])
def test_gpu_matches_and_can_be_captured(numerics):
    lay = layer(16, 80, 160)
    weights = map_tensors(lay.weights(), lambda tensor: tensor.cuda())
    x, topk_weights, topk_ids = inputs(17, 4, 16, 80)
    topk_ids[3, 2] = 16  # cannot be seen without waiting for the GPU: skipped
    want = oracle(x, lay, topk_weights, topk_ids, numerics=numerics)
    on_device = [t.cuda() for t in (x, topk_weights, topk_ids)]
    run(on_device[0], weights, *on_device[1:], numerics=numerics)
    graph = torch.cuda.CUDAGraph()
    torch.set_float32_matmul_precision("high")  # TF32, as SGLang sets for some models: it must not reach the reference
    try:
        with torch.cuda.graph(graph):
            got = run(on_device[0], weights, *on_device[1:], numerics=numerics)
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision("highest")
    graph.replay()
    assert_close(got.cpu(), want, 2e-6 if numerics == "w4a16" else 1e-2)
    on_device[0][5:] = NAN  # a smaller batch, with a poisoned tail
    on_device[2][5:] = -1
    graph.replay()
    assert_close(got[:5].cpu(), want[:5], 2e-6 if numerics == "w4a16" else 1e-2)
    assert (got[5:] == 0).all()
