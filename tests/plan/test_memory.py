"""The whole account: what makes a split impossible, SGLang's own fraction, public figures, and that more is more."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_sm120.plan import kv
from sglang_sm120.plan.memory import (
    Serving,
    Split,
    default_mem_fraction,
    fixed,
    kv_bytes_per_token,
    kv_tokens,
    load_peak_bytes,
    problems,
    stages,
    suggested_mem_fraction,
)
from sglang_sm120.plan.shapes import read_shape
from tests.plan.conftest import CASES, REFUSED, Case

GIB, MIB = 1024**3, 1024**2
PRO_6000 = int(94.97 * GIB)
SERVING = Serving(131072, 2, 8192, "bfloat16", False, (1, 2), True, True)
GLM_5 = "glm-5-nvfp4"


def weight_gib(name: str, split: Split, mtp: bool = False) -> float:
    parts = fixed(read_shape(name), split, replace(SERVING, mtp=mtp))
    return sum(part.bytes for part in parts if part.kind == "weights") / GIB


# --- public figures -----------------------------------------------------------------------------------------------


def test_glm_5_on_eight_cards_of_96_gb() -> None:
    """Public, TP8 with --mem-fraction-static 0.92 and KV in bfloat16: 314,304 tokens; others report up to 371,000."""
    shape = read_shape(GLM_5)
    assert kv_tokens(shape, Split(8), SERVING, PRO_6000, 0.92) == pytest.approx(314304, rel=0.10)
    fractions = [fraction / 1000 for fraction in range(900, 970, 5)]
    tokens = [kv_tokens(shape, Split(8), SERVING, PRO_6000, fraction) for fraction in fractions]
    assert tokens == sorted(tokens)
    assert tokens[0] < 314304 < 371000 < tokens[-1], "the public range is within fractions that people pass"


def test_glm_5_total_of_the_static_part() -> None:
    """Public: weights and KV are 86.38 GiB a GPU at 0.92, and 7.43 to 7.53 are left."""
    shape = read_shape(GLM_5)
    tokens = kv_tokens(shape, Split(8), SERVING, PRO_6000, 0.92)
    held = weight_gib(GLM_5, Split(8)) + tokens * kv_bytes_per_token(shape, Split(8), "bfloat16") / GIB
    assert held == pytest.approx(86.38, rel=0.01)
    before = sum(part.bytes for part in fixed(shape, Split(8), SERVING) if part.name in ("CUDA context", "NCCL"))
    assert PRO_6000 / GIB - before / GIB - held == pytest.approx(7.48, abs=0.15)


def test_glm_5_2_in_a_public_recipe() -> None:
    """TP8 with 0.85: 54 GB of weights, and a pool of 23.91 GB, both by SGLang's log and so GiB."""
    shape, name = read_shape("glm-5.2-nvfp4"), "glm-5.2-nvfp4"
    assert weight_gib(name, Split(8)) == pytest.approx(54, rel=0.03)
    pool = kv_tokens(shape, Split(8), SERVING, PRO_6000, 0.85) * kv_bytes_per_token(shape, Split(8), "bfloat16")
    assert pool / GIB == pytest.approx(23.91, rel=0.10)


def test_what_ran_in_public_is_within_a_tenth_of_the_card() -> None:
    """The same report: chunks of 16,384, graphs up to 32, 64 requests, an MTP head in BF16, and it served. So all of it
    is at most what the card has, and the account of it is no more than a tenth off."""
    shape = read_shape(GLM_5)
    serving = Serving(202752, 64, 16384, "bfloat16", True, tuple(range(1, 33)), False, False)
    held = sum(part.bytes for part in fixed(shape, Split(8), serving))
    held += 314304 * kv_bytes_per_token(shape, Split(8), "bfloat16", mtp=True)
    assert held / GIB == pytest.approx(94.97, rel=0.10)


def test_glm_5_does_not_fit_four_cards_nor_dp2_x_tp4() -> None:
    """Two replicas of TP4 are what --dp-size 2 --tp-size 4 is: each GPU holds a quarter of all weights."""
    shape = read_shape(GLM_5)
    assert weight_gib(GLM_5, Split(4)) > 95
    assert kv_tokens(shape, Split(4), SERVING, PRO_6000, 0.97) == 0
    assert weight_gib(GLM_5, Split(8, dp_attention=2)) > weight_gib(GLM_5, Split(8)) + 2


def test_glm_5_with_ep8_takes_the_fraction_that_is_suggested() -> None:
    """EP8 has as many weights as TP8, and a larger workspace: an expert is whole on its GPU. What TP8 leaves for it at
    its own fraction is too little, and SGLang's default leaves half of the KV cache unused."""
    shape = read_shape(GLM_5)
    tp, ep = Split(8), Split(8, ep=8)
    assert weight_gib(GLM_5, ep) == pytest.approx(weight_gib(GLM_5, tp), rel=1e-3)
    of_tp, of_ep = (suggested_mem_fraction(shape, split, SERVING, PRO_6000) for split in (tp, ep))
    assert of_ep < of_tp
    parts = {part.name: part.bytes for part in fixed(shape, ep, SERVING)}
    less = {part.name: part.bytes for part in fixed(shape, tp, SERVING)}
    slots = 8192 * 8
    assert parts["prefill chunk"] - less["prefill chunk"] == slots * (2048 - 256) * (4 + 9 / 16)
    free = PRO_6000 - sum(parts.values())
    assert kv_tokens(shape, ep, SERVING, PRO_6000, of_tp) * kv_bytes_per_token(shape, ep, "bfloat16") > free
    assert kv_tokens(shape, ep, SERVING, PRO_6000, of_ep) * kv_bytes_per_token(shape, ep, "bfloat16") <= free
    default = default_mem_fraction(shape, ep, SERVING, 97887 * MIB)
    assert 0 < kv_tokens(shape, ep, SERVING, PRO_6000, default) < 0.8 * kv_tokens(shape, ep, SERVING, PRO_6000, of_ep)


def test_attention_dp_of_eight_replicates_attention() -> None:
    """By hand: seven more eighths of q_b, kv_b, its absorbed copy and o, 78 layers in BF16, and of the embedding."""
    sharded = 64 * 256 * 2048 + 2 * 64 * (192 + 256) * 512 + 6144 * 64 * 256
    more = weight_gib(GLM_5, Split(8, dp_attention=8)) - weight_gib(GLM_5, Split(8))
    assert more == pytest.approx((78 * sharded + 154880 * 6144) * 7 / 8 * 2 / GIB, rel=1e-3)


# --- SGLang's own fraction ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [GLM_5, "qwen3-30b-a3b-nvfp4"])
@pytest.mark.parametrize(("tp", "groups", "rows"), [(1, 1, 8), (8, 1, 256), (8, 8, 64), (8, 2, 512), (4, 1, 1)])
@pytest.mark.parametrize("shown", [32607, 97887, 143771])
def test_the_default_fraction_is_sglangs(
    name: str, tp: int, groups: int, rows: int, shown: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sglang.srt.arg_groups import memory_hook
    from sglang.srt.arg_groups.cuda_graph_hook import generate_prefill_cuda_graph_batch_sizes
    from sglang.srt.arg_groups.model_overrides import qwen3_vl
    from sglang.srt.model_executor.cuda_graph_config import Backend, default_cuda_graph_config

    shape, chunk = read_shape(name), 2048
    graphs = default_cuda_graph_config()
    graphs.decode.backend, graphs.prefill.backend = Backend.FULL, Backend.BREAKABLE
    graphs.decode.bs, graphs.prefill.bs = [rows], generate_prefill_cuda_graph_batch_sizes(chunk * groups)
    graphs.prefill.max_bs = chunk * groups
    declared: dict[str, object] = {}
    view = SimpleNamespace(
        device="cuda", cuda_graph_config=graphs, chunked_prefill_size=chunk * groups, tp_size=tp, pp_size=1,
        max_running_requests=None, max_total_tokens=None, model_path="x", mem_fraction_static=None,
        enable_symm_mem=False, disaggregation_mode="null", attn_dp_size=groups, moe_a2a_backend="none",
        language_only=False, language_model_only=False, speculative_num_draft_tokens=None, max_prefill_tokens=16384,
    )  # fmt: skip

    def declare(args: object, source: str, **values: object) -> None:
        declared.update(values)
        for key, value in values.items():
            setattr(view, key, value)

    for hook, value in (
        ("resolving_view", lambda args: view), ("resolved_view", lambda args: view),
        ("declare_resolution", declare),
        ("use_mla_backend", lambda args: shape.attention.latent), ("attn_dp_enabled_of", lambda cfg: groups > 1),
        ("get_device_memory_capacity", lambda device: shown), ("post_capture_kv_sizing_planned", lambda args: False),
        ("model_config_of", lambda args: SimpleNamespace(is_multimodal=False)),
    ):  # fmt: skip
        monkeypatch.setattr(memory_hook, hook, value)
    monkeypatch.setattr(qwen3_vl, "expand_multimodal_decode_graph_to_running_limit", lambda *args: None)
    memory_hook.handle_gpu_memory_settings(None)
    serving = replace(SERVING, chunked_prefill=chunk, graph_batch_sizes=(rows,))
    ours = default_mem_fraction(shape, Split(tp, dp_attention=groups), serving, shown * MIB)
    assert ours == pytest.approx(declared["mem_fraction_static"], abs=1e-9)


def test_pages_and_draft_cache() -> None:
    shape = read_shape(GLM_5)
    tokens = kv_tokens(shape, Split(8), SERVING, PRO_6000, 0.9)
    assert tokens % 64 == 0, "SGLang pages sparse attention by 64"
    assert kv.page_size(read_shape("glm-4.5")) == 1
    with_head = kv_tokens(shape, Split(8), replace(SERVING, mtp=True), PRO_6000, 0.9)
    head = weight_gib(GLM_5, Split(8), mtp=True) - weight_gib(GLM_5, Split(8))
    assert head == pytest.approx(2.5, abs=0.3), "256 experts in BF16, 19 GB over 8 GPUs, and what is whole on each"
    a_token = kv_bytes_per_token(shape, Split(8), "bfloat16", mtp=True)
    assert a_token == 79 * 1284
    before = PRO_6000 - (616 + 7 * 70) * MIB
    assert (
        with_head == (int(before * 0.9) - int(weight_gib(GLM_5, Split(8), mtp=True) * GIB + 0.5)) // a_token // 64 * 64
    )


def test_weights_that_do_not_load_leave_no_cache() -> None:
    """NVFP4 scales are there twice while they load: a GPU that holds the weights alone is too small."""
    shape = read_shape("qwen3-30b-a3b-nvfp4")
    peak = load_peak_bytes(shape, Split(1))
    assert peak == pytest.approx(48 * 128 * 3 * 2048 * 768 / 16, rel=0.01)
    assert load_peak_bytes(read_shape("qwen3-30b-a3b"), Split(1)) == 0
    held = sum(part.bytes for part in fixed(shape, Split(1), SERVING) if part.kind == "weights")
    small = held + 616 * MIB
    assert kv_tokens(shape, Split(1), SERVING, small + peak - 1, 1.0) == 0
    assert kv_tokens(shape, Split(1), SERVING, small + peak, 1.0) > 0


def test_linear_attention_shares_the_pool() -> None:
    shape = read_shape("qwen3.5-397b-a17b-nvfp4")
    parts = {part.name: part for part in fixed(shape, Split(8), replace(SERVING, concurrency=10))}
    state = parts["linear attention state"]
    by_hand = 45 * (8 * 128 * 128 * 4 + (2 * 16 * 128 + 64 * 128) // 8 * 3 * 2)
    assert state.bytes == 51 * by_hand
    tokens = kv_tokens(shape, Split(8), SERVING, PRO_6000, 0.9)
    before = PRO_6000 - (616 + 7 * 70) * MIB
    rest = before * 0.9 - weight_gib("qwen3.5-397b-a17b-nvfp4", Split(8)) * GIB
    assert tokens * 15 * 2 * 256 * 2 == pytest.approx(rest / 1.9, rel=1e-3), "SGLang by itself"
    few = replace(SERVING, concurrency=10)
    states = (1 + 5 * 10) * by_hand
    held = sum(part.bytes for part in fixed(shape, Split(8), few))
    tokens = kv_tokens(shape, Split(8), few, PRO_6000)
    assert tokens * 15 * 2 * 256 * 2 == pytest.approx(PRO_6000 - held, rel=5e-3), "the command sizes the states"
    drafting = {part.name: part for part in fixed(shape, Split(8), replace(few, mtp=True))}
    assert drafting["linear attention state"].bytes == states + 4 * (1 + 10) * by_hand


def test_where_all_else_has_no_room_there_is_no_cache() -> None:
    """Logits of 100,000 requests are larger than the GPU: little weights do not make room for a cache."""
    shape = read_shape("qwen3-30b-a3b-nvfp4")
    many = replace(SERVING, concurrency=100_000, context=1)
    held = sum(part.bytes for part in fixed(shape, Split(8), many))
    assert held > PRO_6000
    assert kv_tokens(shape, Split(8), many, PRO_6000) == 0
    for room in range(6):  # and just as little where there is hardly any
        tokens = kv_tokens(shape, Split(8), many, held + room * GIB)
        assert tokens * kv_bytes_per_token(shape, Split(8), many.kv_dtype) <= room * GIB


# --- impossible splits ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "split", "word"),
    [
        (GLM_5, Split(3), "attention heads"),
        (GLM_5, Split(8, ep=3), "EP 3 does not divide TP 8"),
        (GLM_5, Split(8, dp_attention=5), "attention DP 5"),
        (GLM_5, Split(1, pp=79), "79 stages"),
        (GLM_5, Split(4, nodes=3), "3 nodes"),
        (GLM_5, Split(0), "at least one GPU"),
        ("minimax-m2.7-nvfp4", Split(64), "24 of its intermediate size"),
        ("minimax-m2", Split(8), "192 of its intermediate size"),
        ("kimi-k2.6-nvfp4", Split(9), "attention heads"),
        ("qwen3-235b-a22b", Split(64, ep=64), ""),
        ("qwen3.5-397b-a17b", Split(32), "linear attention"),
    ],
)
def test_what_rules_a_split_out(name: str, split: Split, word: str) -> None:
    found = problems(read_shape(name), split)
    assert any(word in one for one in found) if word else found == []


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case.id)
def test_what_sglang_refuses_is_ruled_out(case: Case, sglang_built: dict[str, dict[str, Any]]) -> None:
    assert "error" in sglang_built[case.id]
    assert problems(case.shape, case.split)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_what_sglang_builds_is_not_ruled_out(case: Case, sglang_built: dict[str, dict[str, Any]]) -> None:
    assert sglang_built[case.id].get("error") is None
    assert problems(case.shape, case.split) == []


def test_minimax_in_fp8_serves_eight_gpus_with_ep() -> None:
    assert problems(read_shape("minimax-m2"), Split(8, ep=8)) == []
    assert problems(read_shape("minimax-m2"), Split(4)) == []


def test_stages_are_sglangs() -> None:
    from sglang.srt.distributed.utils import get_pp_indices

    for layers in (1, 5, 61, 78, 94):
        for pp in range(1, min(layers, 9) + 1):
            assert stages(layers, pp) == [tuple(get_pp_indices(layers, rank, pp)) for rank in range(pp)]


def test_the_parts_of_glm_5_are_what_the_issue_asks_for() -> None:
    names = {part.name: part.kind for part in fixed(read_shape(GLM_5), Split(8), replace(SERVING, mtp=True))}
    for name, kind in {
        "embedding": "weights", "lm_head": "weights", "attention": "weights", "norms": "weights", "router": "weights",
        "shared expert": "weights", "routed experts": "weights", "routed experts, scales": "weights",
        "dense MLP": "weights", "MTP head": "weights", "CUDA graphs": "graphs", "MoE kernels": "workspace",
        "FlashInfer attention": "workspace",
        "NCCL": "communication", "all-reduce window": "communication", "prefill chunk": "activations",
        "CUDA context": "runtime", "margin": "margin",
    }.items():  # fmt: skip
        assert names.get(name) == kind, name


def test_what_is_a_guess_says_so() -> None:
    parts = {part.name: part.detail for part in fixed(read_shape(GLM_5), Split(8), SERVING)}
    for name in ("CUDA context", "NCCL", "prefill chunk", "margin"):
        assert "guess" in parts[name]
