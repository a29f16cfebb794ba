"""Which MoE layers are taken, which are refused and why, and that a taken layer computes from SGLang's own tensors."""

from __future__ import annotations

import logging
import weakref
from types import SimpleNamespace

import pytest
import torch

from sglang_sm120.errors import ConfigError, UnsupportedError
from sglang_sm120.integration import moe_tables, self_check
from sglang_sm120.integration.moe import run_moe_core, take_layers
from sglang_sm120.integration.moe_weights import Reciprocals
from sglang_sm120.kernels.quantization.nvfp4.api import (
    amax_global_scale,
    dequantize_nvfp4,
    quantize_nvfp4,
    swizzle_blockscale,
)
from sglang_sm120.options import Sm120Options
from sglang_sm120.runners.base import STOCK, Choice
from sglang_sm120.runners.handover import same_tensors
from sglang_sm120.runners.native import ReferenceRunner
from sglang_sm120.runners.table import Row, RunnerTable

EXPERTS, HIDDEN, INTERMEDIATE, TOKENS = 4, 64, 128, 5
REFERENCE = Sm120Options(enable_sm120_opts=True, sm120_moe_backend="reference", sm120_moe_numerics="w4a16")
AUTO = Sm120Options(enable_sm120_opts=True)


@pytest.fixture(scope="module")
def sglang_types():
    """SGLang's classes, imported once: that takes a while."""
    from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
    from sglang.srt.layers.moe.token_dispatcher.standard import StandardDispatchOutput
    from sglang.srt.layers.moe.topk import StandardTopKOutput
    from sglang.srt.layers.moe.utils import MoeRunnerBackend
    from sglang.srt.layers.quantization.modelopt_quant import ModelOptNvFp4FusedMoEMethod

    return SimpleNamespace(
        FusedMoE=FusedMoE,
        Dispatch=StandardDispatchOutput,
        TopK=StandardTopKOutput,
        Backend=MoeRunnerBackend,
        Method=ModelOptNvFp4FusedMoEMethod,
    )


def plain_weights() -> tuple[torch.Tensor, torch.Tensor]:
    """Float32 [E, 2I, H] with rows [up; gate], and [E, H, I]."""
    generator = torch.Generator().manual_seed(0)
    w13 = torch.randn(EXPERTS, 2 * INTERMEDIATE, HIDDEN, generator=generator) * 0.1
    return w13, torch.randn(EXPERTS, HIDDEN, INTERMEDIATE, generator=generator) * 0.1


def quantised(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    scales = torch.stack([amax_global_scale(expert) for expert in weight])
    packed, block = quantize_nvfp4(weight, scales[:, None])
    return packed, block, scales


def make_layer(types, *, experts: slice = slice(None), ep_size: int = 1, ep_rank: int = 0):
    """A FusedMoE as SGLang leaves it after loading ModelOpt NVFP4 for flashinfer_cutlass."""
    layer = types.FusedMoE.__new__(types.FusedMoE)
    torch.nn.Module.__init__(layer)
    w13, w2 = plain_weights()
    for name, weight in (("w13", w13[experts]), ("w2", w2[experts])):
        packed, block, scales = quantised(weight)
        setattr(layer, f"{name}_weight", packed)
        setattr(layer, f"{name}_blockscale_swizzled", swizzle_blockscale(block))
        setattr(layer, f"{name}_weight_scale_2", scales[:, None].repeat(1, 2) if name == "w13" else scales)
        setattr(layer, f"{name}_input_scale_quant", torch.tensor(1 / 0.01))
    layer.quant_method = types.Method.__new__(types.Method)
    layer.runner_backend = types.Backend.FLASHINFER_CUTLASS
    layer.dispatcher = SimpleNamespace(skip_local_expert_mapping=True)
    layer.layer_id, layer.params_dtype = 3, torch.float32
    layer.top_k = 2
    layer.num_experts, layer.num_local_experts = EXPERTS, len(range(EXPERTS)[experts])
    layer.moe_ep_size, layer.moe_ep_rank, layer.num_fused_shared_experts = ep_size, ep_rank, 0
    layer.should_fuse_routed_scaling_factor_in_topk = True
    layer.moe_runner_config = SimpleNamespace(
        activation="silu", is_gated=True, gemm1_alpha=None, gemm1_beta=None, gemm1_clamp_limit=None, swiglu_limit=None,
        apply_router_weight_on_input=False, no_combine=False, routed_scaling_factor=None,
    )  # fmt: skip
    return layer


def model_of(*layers) -> torch.nn.Module:
    model = torch.nn.Module()
    for number, layer in enumerate(layers):
        model.add_module(f"layer{number}", layer)
    return model


def dispatch(types, *, scale=None):
    generator = torch.Generator().manual_seed(1)
    hidden_states = torch.randn(TOKENS, HIDDEN, generator=generator)
    ids = torch.tensor([[0, 3], [1, 1], [2, -1], [-1, -1], [3, 2]])
    weights = torch.rand(TOKENS, 2, generator=generator)
    return types.Dispatch(hidden_states, scale, types.TopK(weights, ids, None))


def expected(tokens) -> torch.Tensor:
    """Float64, from the dequantised weights, token by token."""
    w13, w2 = (
        dequantize_nvfp4(packed, block, scales[:, None], dtype=torch.float64)
        for packed, block, scales in map(quantised, plain_weights())
    )
    out = torch.zeros(TOKENS, HIDDEN, dtype=torch.float64)
    for token in range(TOKENS):
        for slot in range(2):
            expert = int(tokens.topk_output.topk_ids[token, slot])
            if expert >= 0:
                up, gate = (w13[expert] @ tokens.hidden_states[token].double()).chunk(2)
                down = w2[expert] @ (torch.nn.functional.silu(gate) * up)
                out[token] += tokens.topk_output.topk_weights[token, slot].double() * down
    return out


def stock(layer, dispatch_output):
    raise AssertionError("the stock path was called")


def test_a_taken_layer_serves_from_the_prepared_tensors(sglang_types) -> None:
    layer = make_layer(sglang_types)
    take_layers(model_of(layer), REFERENCE)
    tokens = dispatch(sglang_types)
    got = run_moe_core(stock, layer, tokens).hidden_states
    torch.testing.assert_close(got.double(), expected(tokens), rtol=0, atol=1e-5)
    layer.w2_weight_scale_2 = layer.w2_weight_scale_2 * 2  # a weight update rebinds: the next call follows
    again = run_moe_core(stock, layer, tokens).hidden_states
    torch.testing.assert_close(again, got * 2)


def test_two_expert_parallel_ranks_add_up(sglang_types) -> None:
    """Ids stay global on this path; each rank serves its own experts and skips -1 and the other's."""
    tokens = dispatch(sglang_types)
    parts = []
    for rank, experts in enumerate((slice(0, 2), slice(2, 4))):
        layer = make_layer(sglang_types, experts=experts, ep_size=2, ep_rank=rank)
        take_layers(model_of(layer), REFERENCE)
        parts.append(run_moe_core(stock, layer, tokens).hidden_states)
    torch.testing.assert_close(sum(parts).double(), expected(tokens), rtol=0, atol=1e-5)


def test_auto_leaves_layers_to_the_stock_path(sglang_types, caplog: pytest.LogCaptureFixture) -> None:
    layer = make_layer(sglang_types)
    with caplog.at_level(logging.INFO):
        take_layers(model_of(layer), AUTO)
    assert run_moe_core(lambda layer, tokens: "stock", layer, dispatch(sglang_types)) == "stock"
    assert "MoE runners of 1 of 1 layers of the model: flashinfer_cutlass w4a4 for every batch" in caplog.text


@pytest.mark.parametrize("options", [REFERENCE, AUTO])
@pytest.mark.parametrize("name", ["w13_weight_scale_2", "w2_weight_scale_2"])
@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf")])
def test_a_damaged_global_scale_of_one_expert(options, name: str, value: float, sglang_types) -> None:
    layer = make_layer(sglang_types)
    getattr(layer, name)[2] = value
    with pytest.raises(ConfigError, match=f"layer0: the global scale of {name.split('_')[0]}_weight is"):
        take_layers(model_of(layer), options)


def test_a_damaged_activation_scale(sglang_types) -> None:
    layer = make_layer(sglang_types)
    layer.w2_input_scale_quant = torch.tensor(float("inf"))  # the reciprocal of a zero
    take_layers(model_of(layer), REFERENCE)  # w4a16 does not look at it
    with pytest.raises(ConfigError, match="activation scale of w2 is 0"):
        take_layers(model_of(layer), AUTO)
    with pytest.raises(ConfigError, match="activation scale of w2 is 0"):
        take_layers(model_of(layer), Sm120Options(True, "reference", "w4a4"))


def _trtllm(layer, types) -> None:
    layer.runner_backend = types.Backend.FLASHINFER_TRTLLM


def _lora(layer, types) -> None:
    layer.run_moe_core = lambda dispatch_output: None


def _situ(layer, types) -> None:
    layer.moe_runner_config.activation = "situ"


def _other_dispatcher(layer, types) -> None:
    layer.dispatcher = SimpleNamespace()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_trtllm, "prepared for"),
        (_lora, "run_moe_core is replaced"),
        (_situ, "situ"),
        (_other_dispatcher, "not the standard one"),
    ],
)
def test_a_layer_that_is_not_covered(change, reason: str, sglang_types, caplog: pytest.LogCaptureFixture) -> None:
    """Asked for by name: refused with the reason. On auto: left to SGLang, with one line."""
    good, bad = make_layer(sglang_types), make_layer(sglang_types)
    change(bad, sglang_types)
    with pytest.raises(UnsupportedError, match="serves 1 of 2 NVFP4 MoE layers") as caught:
        take_layers(model_of(good, bad), REFERENCE)
    assert reason in str(caught.value)
    with caplog.at_level(logging.INFO):
        take_layers(model_of(good, bad), Sm120Options(True, sm120_emulate=True))
    assert "MoE runners of 1 of 2 layers of the model: reference w4a4 for every batch" in caplog.text
    assert "1 of 2 MoE layers of the model left to SGLang: layer1: " in caplog.text
    assert reason in caplog.text


def test_no_layer_at_all(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(UnsupportedError, match="serves 0 of 0"):
        take_layers(torch.nn.Linear(2, 2), REFERENCE)
    take_layers(torch.nn.Linear(2, 2), REFERENCE, is_draft=True)
    take_layers(torch.nn.Linear(2, 2), AUTO)
    assert "the model has no NVFP4 MoE layers (of 0): nothing to do" in caplog.text


def test_a_call_that_is_not_covered_is_refused(sglang_types) -> None:
    layer = make_layer(sglang_types)
    take_layers(model_of(layer), REFERENCE)
    with pytest.raises(UnsupportedError, match="MoE layer 3: hidden states quantised before dispatch"):
        run_moe_core(stock, layer, dispatch(sglang_types, scale=torch.ones(1)))


REFERENCE_W4A16, STOCK_W4A4 = Choice("reference", "w4a16"), Choice(STOCK, "w4a4")


@pytest.fixture
def switching(monkeypatch: pytest.MonkeyPatch):
    """Layers get a table: reference up to 3 tokens, SGLang's own path above."""

    def table(*_args) -> RunnerTable:
        rows = (Row(3, (REFERENCE_W4A16, STOCK_W4A4)), Row(None, (STOCK_W4A4, REFERENCE_W4A16)))
        return RunnerTable(rows, "test")

    monkeypatch.setattr(moe_tables.Tables, "of", table)


def first_tokens(types, count: int, **more):
    whole = dispatch(types, **more)
    topk = whole.topk_output
    return types.Dispatch(
        whole.hidden_states[:count],
        whole.hidden_states_scale,
        types.TopK(topk.topk_weights[:count], topk.topk_ids[:count], None),
    )


def served(layer, dispatch_output):
    return run_moe_core(lambda layer, tokens: STOCK, layer, dispatch_output)


def test_the_number_of_tokens_decides(switching, sglang_types) -> None:
    layer = make_layer(sglang_types)
    (ours,) = take_layers(model_of(layer), AUTO)
    assert served(layer, first_tokens(sglang_types, 4)) == STOCK
    got = served(layer, first_tokens(sglang_types, 3)).hidden_states
    torch.testing.assert_close(got.double(), expected(dispatch(sglang_types))[:3], rtol=0, atol=1e-5)
    ours.strike(REFERENCE_W4A16, "wrong")
    assert served(layer, first_tokens(sglang_types, 3)) == STOCK
    ours.strike(STOCK_W4A4, "wrong too")
    with pytest.raises(UnsupportedError, match="no runner is left for 3 tokens: reference w4a16: wrong; flashinfer"):
        served(layer, first_tokens(sglang_types, 3))


def test_tuning_sees_the_stock_path(switching, sglang_types, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = make_layer(sglang_types)
    take_layers(model_of(layer), AUTO)
    tuner = SimpleNamespace(is_tuning_mode=True)
    module = SimpleNamespace(AutoTuner=SimpleNamespace(get=lambda: tuner))
    monkeypatch.setitem(__import__("sys").modules, "flashinfer.autotuner", module)
    assert served(layer, first_tokens(sglang_types, 2)) == STOCK
    tuner.is_tuning_mode = False
    assert served(layer, first_tokens(sglang_types, 2)) != STOCK


def test_a_call_that_is_not_covered_goes_to_the_stock_path_on_auto(
    switching, sglang_types, caplog: pytest.LogCaptureFixture
) -> None:
    layer = make_layer(sglang_types)
    take_layers(model_of(layer), AUTO)
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            assert served(layer, first_tokens(sglang_types, 2, scale=torch.ones(1))) == STOCK
    assert caplog.text.count("left to SGLang's own MoE path: hidden states quantised before dispatch") == 1


def test_what_of_a_server_is_not_covered_leaves_its_layers_to_sglang(sglang_types, caplog) -> None:
    layer = make_layer(sglang_types)
    with caplog.at_level(logging.INFO):
        assert take_layers(model_of(layer), AUTO, server_reason="--enable-eplb") == []
    assert "1 of 1 MoE layers of the model left to SGLang: layer0: --enable-eplb" in caplog.text
    assert served(layer, dispatch(sglang_types)) == STOCK


@pytest.fixture
def layers_with_a_stock_path(sglang_types, monkeypatch: pytest.MonkeyPatch):
    """Five taken layers whose stock path is right, or off by a factor."""

    def make(factor: float, options: Sm120Options):
        def stock_path(layer, dispatch_output):
            bound = ReferenceRunner().bind(None, layer._sm120_moe.spec, "w4a4")
            topk = dispatch_output.topk_output
            weights = layer._sm120_moe.weights("w4a4")
            output = bound(dispatch_output.hidden_states, weights, topk.topk_weights, topk.topk_ids)
            return SimpleNamespace(hidden_states=output * factor)

        layers = [make_layer(sglang_types) for _ in range(5)]
        taken = take_layers(model_of(*layers), options)
        monkeypatch.setattr(
            sglang_types.FusedMoE, "run_moe_core", lambda self, tokens: run_moe_core(stock_path, self, tokens)
        )
        return taken

    return make


def test_the_self_check_passes_what_is_right(switching, layers_with_a_stock_path, caplog) -> None:
    taken = layers_with_a_stock_path(1.0, AUTO)
    with caplog.at_level(logging.INFO):
        findings = self_check.run(taken, AUTO, [1, 2, 8], 32)
    assert {finding.layer for finding in findings} == {"layer0", "layer2", "layer4"}
    assert {finding.choice for finding in findings} == {STOCK_W4A4} and all(finding.passed for finding in findings)
    assert "self-check of 3 MoE layers at " in caplog.text and "flashinfer_cutlass w4a4 right" in caplog.text
    assert taken[0].table.ranking(100)[0] == STOCK_W4A4


def test_the_self_check_strikes_a_wrong_stock_path(switching, layers_with_a_stock_path, caplog) -> None:
    taken = layers_with_a_stock_path(2.0, AUTO)
    with caplog.at_level(logging.INFO):
        self_check.run(taken, AUTO, [1, 2, 8], 32)
    assert all(ours.choice(100) == REFERENCE_W4A16 for ours in taken), "every layer, not only those that were checked"
    assert "flashinfer_cutlass w4a4 WRONG, not used" in caplog.text
    strict = Sm120Options(enable_sm120_opts=True, sm120_verify="strict")
    with pytest.raises(UnsupportedError, match=r"the self-check failed: .*flashinfer_cutlass w4a4"):
        self_check.run(layers_with_a_stock_path(2.0, AUTO), strict, [1, 2, 8], 32)
    off = Sm120Options(enable_sm120_opts=True, sm120_verify="off")
    assert self_check.run(layers_with_a_stock_path(2.0, AUTO), off, [1, 2, 8], 32) == []


def test_a_stock_path_that_cannot_be_called_is_used_unchecked(
    switching, sglang_types, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Outside a forward pass it may lack what it needs; that says nothing about its results. `strict` wants to know."""
    (ours,) = take_layers(model_of(make_layer(sglang_types)), AUTO)

    def no_context(self, tokens):
        raise RuntimeError("no forward context")

    monkeypatch.setattr(sglang_types.FusedMoE, "run_moe_core", no_context)
    self_check.run([ours], AUTO, [1, 2], 32)
    assert "used unchecked: RuntimeError: no forward context" in caplog.text
    assert ours.choice(100) == STOCK_W4A4
    strict = Sm120Options(enable_sm120_opts=True, sm120_verify="strict")
    with pytest.raises(UnsupportedError, match="cannot be called by the self-check: RuntimeError"):
        self_check.run([ours], strict, [1, 2], 32)


def test_nothing_is_left_after_the_self_check(layers_with_a_stock_path) -> None:
    taken = layers_with_a_stock_path(2.0, Sm120Options(enable_sm120_opts=True, sm120_moe_backend=STOCK))
    for ours in taken:
        ours.strike(Choice("reference", "w4a4"), "not here")
    with pytest.raises(UnsupportedError, match="no runner is left"):
        self_check.run(taken, AUTO, [1, 2], 32)


def test_reciprocals_are_made_once_and_follow_the_tensor() -> None:
    """Rebound: a new one. Written to: the same address, which graphs may have captured, with the new values."""
    kept, tensor = Reciprocals(), torch.tensor([2.0, 4.0])
    first = kept.of("scale", tensor)
    assert first.tolist() == [0.5, 0.25] and kept.of("scale", tensor) is first
    tensor.fill_(8)
    assert kept.of("scale", tensor) is first and first.tolist() == [0.125, 0.125]
    assert kept.of("other", tensor) is not first
    again = kept.of("scale", torch.tensor([5.0]))
    assert again is not first and again.tolist() == pytest.approx([0.2])
    with torch.inference_mode():
        untracked = torch.tensor([2.0])
        kept.of("scale", untracked)
        untracked.fill_(4)
        assert kept.of("scale", untracked).tolist() == [0.25]
    gone = torch.ones(3)
    kept.of("gone", gone)
    watched = weakref.ref(gone)
    del gone
    assert watched() is None, "a tensor that was replaced is not kept alive"


def test_the_same_tensors_are_handed_over_again(sglang_types) -> None:
    layer = make_layer(sglang_types)
    (ours,) = take_layers(model_of(layer), REFERENCE)
    assert same_tensors(ours.weights("w4a4"), ours.weights("w4a4"))
    before = ours.weights("w4a4")
    layer.w2_weight_scale_2 = layer.w2_weight_scale_2.clone()
    assert not same_tensors(before, ours.weights("w4a4"))
