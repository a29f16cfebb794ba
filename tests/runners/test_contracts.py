"""The foreign runners hand over what SGLang hands over, and the sources that say so are the ones that were read."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from sglang_sm120.doctor.checks import sglang_tree
from sglang_sm120.kernels.moe.layer import MoeActivation
from sglang_sm120.runners import b12x, flashinfer_cutlass
from sglang_sm120.runners.base import LayerSpec
from tests.runners.contract_sources import FILE, FLASHINFER, SGLANG, digests, find
from tests.runners.test_foreign_runners import E, H, K, fakes, shared  # noqa: F401

from moe_oracle import inputs  # isort: skip  # test_foreign_runners finds it

RECORDED = json.loads(FILE.read_text())


@pytest.fixture(scope="session")
def flashinfer_source() -> Path:
    """The folder with `flashinfer/` and `b12x/`: FLASHINFER_SOURCE (an unpacked wheel), or where it is installed."""
    given = os.environ.get("FLASHINFER_SOURCE")
    spec = importlib.util.find_spec("flashinfer")
    if given is None and (spec is None or spec.origin is None):
        pytest.skip("flashinfer-python is not installed, and FLASHINFER_SOURCE names no unpacked wheel")
    root = Path(given) if given else Path(spec.origin).parent.parent
    assert (root / "flashinfer").is_dir(), f"no flashinfer in {root}"
    return root


def test_sglang_is_the_one_that_was_read() -> None:
    tree = sglang_tree()
    assert tree is not None
    assert digests(tree.parent, SGLANG) == RECORDED["sglang 0.5.23"]


def test_flashinfer_is_the_one_that_was_read(flashinfer_source: Path) -> None:
    assert digests(flashinfer_source, FLASHINFER) == RECORDED["flashinfer-python 0.7.2"]


def test_a_changed_source_is_noticed(tmp_path: Path) -> None:
    tree = sglang_tree()
    assert tree is not None
    for name in SGLANG:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(tree.parent / name, tmp_path / name)
    edited = tmp_path / "sglang/srt/layers/quantization/modelopt_quant.py"
    edited.write_text(edited.read_text().replace("gate_scale = w13_weight_scale_2[:, 0]", "gate_scale = None"))
    now, before = digests(tmp_path, SGLANG), RECORDED["sglang 0.5.23"]
    assert [key.rpartition(":")[2] for key in now if now[key] != before[key]] == ["_compute_gemm1_alphas"]
    edited.unlink()
    assert sum(digest == "missing" for digest in digests(tmp_path, SGLANG).values()) == 3


def keywords(file: Path, name: str) -> set[str]:
    node = find(ast.parse(file.read_text()), name)
    assert isinstance(node, ast.FunctionDef), name
    return {argument.arg for argument in (*node.args.args, *node.args.kwonlyargs)}


def fields(file: Path, name: str) -> set[str]:
    node = find(ast.parse(file.read_text()), name)
    assert isinstance(node, ast.ClassDef), name
    return {child.target.id for child in node.body if isinstance(child, ast.AnnAssign)}


def test_flashinfer_takes_the_arguments_that_we_pass(flashinfer_source: Path) -> None:
    moe = flashinfer_source / "flashinfer/experimental/b12x/moe/fused_moe"
    core = flashinfer_source / "flashinfer/fused_moe/core.py"
    weights = shared().weights()
    spec = LayerSpec(MoeActivation("silu"), torch.bfloat16, K)
    key = b12x.plan_key(weights, spec, 3)
    assert set(b12x.weight_plan_arguments(key)) <= keywords(moe / "_impl.py", "plan_b12x_fp4_moe_weights")
    caps = fields(moe / "_impl.py", "TPMoEScratchCaps")
    assert set(b12x.capacity_arguments(key, None)) <= caps
    assert set(b12x.weight_arguments(weights)) < keywords(moe / "_impl.py", "prepare_b12x_fp4_moe_weights")
    bind = keywords(moe / "_impl.py", "TPMoEScratchPlan.bind")
    assert {"scratch", "a", "experts", "topk_weights", "topk_ids", "output", "input_scales_static"} <= bind
    experts = fields(moe / "_impl.py", "B12XFP4ExpertWeights")
    assert {"a1_gscale", "a2_gscale", "w1_alphas", "w2_alphas"} <= experts  # refreshed in place
    size = keywords(core, "cutlass_fused_moe_workspace_size")
    assert {"max_num_tokens", "hidden_size", "intermediate_size", "num_experts_total", "top_k", "x_dtype",
            "weight_dtype", "output_dtype", "activation_type", "use_fused_finalize", "device", "ep_size",
            "ep_rank"} <= size  # fmt: skip


@pytest.mark.parametrize("limit", [None, 0.5])
def test_cutlass_gets_what_sglangs_own_runner_hands_over(fakes, monkeypatch, limit: float | None) -> None:  # noqa: F811
    """SGLang's functions prepare and call; then ours; a recorder in the kernel's place compares the two."""
    import sglang.srt.layers.moe.moe_runner.flashinfer_cutlass as stock
    from sglang.srt.layers.quantization.modelopt_quant import _compute_gemm1_alphas

    calls: list[dict] = []

    def record(**arguments):
        calls.append(arguments)
        return [arguments["output"]]

    weights = shared().weights()
    activation = MoeActivation("silu", alpha=1.5 if limit else None, limit=limit)
    monkeypatch.setattr(stock, "_flashinfer_cutlass_fused_moe", lambda: (record, None))
    monkeypatch.setattr(stock, "_activation_type", lambda config: "Swiglu")
    monkeypatch.setattr(stock, "_cutlass_moe_tune_max_num_tokens", lambda tokens: 8192)
    config = SimpleNamespace(
        activation="silu", is_gated=True, gemm1_alpha=activation.alpha, gemm1_beta=None, gemm1_clamp_limit=limit,
        swiglu_limit=None, apply_router_weight_on_input=False, routed_scaling_factor=None, moe_ep_size=2,
        moe_ep_rank=1, moe_tp_size=1, moe_tp_rank=0,
    )  # fmt: skip
    in13, in2 = weights.w13_input_scale.max(), weights.w2_input_scale.max()
    alphas, _ = _compute_gemm1_alphas(weights.w13_global_scale, in13, True)
    swiglu = stock.materialize_swiglu_params_for_cutlass(config, E, torch.device("cpu"))
    info = stock.FlashInferCutlassMoeQuantInfo(
        quant_type="fp4", w13_weight=weights.w13_weight, w2_weight=weights.w2_weight, output_dtype=torch.bfloat16,
        quant_scales=[1 / in13, weights.w13_blockscale, alphas, 1 / in2, weights.w2_blockscale,
                      in2 * weights.w2_global_scale],
        swiglu_alpha=swiglu[0], swiglu_beta=swiglu[1], swiglu_limit=swiglu[2], apply_routed_scaling_factor=False,
    )  # fmt: skip
    x, router, ids = inputs(5, K, 2 * E, H, torch.bfloat16)
    topk = SimpleNamespace(topk_weights=router, topk_ids=ids.to(torch.int64))
    dispatched = SimpleNamespace(hidden_states=x, hidden_states_scale=None, topk_output=topk)
    stock._run_flashinfer_cutlass(
        dispatch_output=dispatched, quant_info=info, runner_config=config, output=torch.empty_like(x)
    )

    fake = fakes.flashinfer_cutlass
    monkeypatch.setattr(fake, "cutlass_fused_moe", record)
    monkeypatch.setattr(flashinfer_cutlass, "is_capturing", lambda device: True)  # no second call that tunes
    spec = LayerSpec(activation, torch.bfloat16, K, expert_offset=E, num_global_experts=2 * E)
    flashinfer_cutlass.FlashinferCutlassRunner().bind(weights, spec, "w4a4")(x, weights, router, topk.topk_ids)

    theirs, ours = calls
    defaults = {"tp_size": 1, "tp_rank": 0, "enable_alltoall": False}  # as cutlass_fused_moe has them
    assert {name: value for name, value in theirs.items() if name not in ours} == defaults
    assert set(ours) <= set(theirs)
    for name, value in ours.items():
        if name == "output":
            assert (value.shape, value.dtype) == (theirs[name].shape, theirs[name].dtype)
        elif isinstance(value, list):
            assert len(value) == len(theirs[name]) == 6
            assert [t.shape for t in value] == [t.shape for t in theirs[name]]
            assert all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(value, theirs[name], strict=True))
        elif isinstance(value, torch.Tensor):
            assert value.dtype == theirs[name].dtype, name
            assert torch.equal(value, theirs[name]), name
        else:
            assert value == theirs[name], name


def test_the_defaults_that_are_left_out(flashinfer_source: Path) -> None:
    node = find(ast.parse((flashinfer_source / "flashinfer/fused_moe/core.py").read_text()), "cutlass_fused_moe")
    assert isinstance(node, ast.FunctionDef)
    names = [argument.arg for argument in node.args.args]
    values = dict(zip(reversed(names), [ast.unparse(value) for value in reversed(node.args.defaults)], strict=False))
    assert {name: values[name] for name in ("tp_size", "tp_rank", "enable_alltoall")} == {
        "tp_size": "1", "tp_rank": "0", "enable_alltoall": "False"
    }  # fmt: skip
    assert values["tune_max_num_tokens"] == str(flashinfer_cutlass.TUNE_MAX_NUM_TOKENS)


def test_sglang_does_not_fuse_the_finalize() -> None:
    from sglang.srt.environ import envs

    assert envs.SGLANG_FLASHINFER_MOE_FUSED_FINALIZE.get() is flashinfer_cutlass.USE_FUSED_FINALIZE
