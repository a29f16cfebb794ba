"""Weights against SGLang's own models, tensor by tensor, and against sizes computed by hand."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import pytest

from sglang_sm120.plan import weights
from sglang_sm120.plan.memory import Split
from sglang_sm120.plan.shapes import read_shape
from tests.plan.conftest import CASES, Case

# SGLang's parameter names, the first that matches, and the class that they are counted in.
_CLASSES = (
    (r"embed_tokens", weights.EMBEDDING), (r"^lm_head", weights.LM_HEAD), (r"indexer", weights.INDEXER),
    (r"experts\.w.*_(weight|bias)$", weights.EXPERTS), (r"experts\.w", weights.SCALES),
    (r"shared_expert_gate|mlp\.gate\.|block_sparse_moe\.gate|mlp\.router|correction_bias|routing_bias", weights.ROUTER),
    (r"shared_expert", weights.SHARED), (r"mlp\.(gate_up_proj|down_proj)", weights.DENSE),
    (r"linear_attn", weights.LINEAR), (r"q_norm|k_norm|q_a_layernorm|kv_a_layernorm|sinks", weights.ATTENTION),
    (r"norm", weights.NORMS), (r"self_attn|\.attn\.|\.(qkv_proj|o_proj)\.", weights.ATTENTION),
)  # fmt: skip


def by_class(tensors: dict[str, int]) -> Counter[str]:
    """SGLang's tensors, in this package's classes."""
    found: Counter[str] = Counter()
    for name, size in tensors.items():
        found[next((kind for pattern, kind in _CLASSES if re.search(pattern, name)), f"unknown: {name}")] += size
    return found


@pytest.mark.parametrize(
    "case", [case for case in CASES if not case.mtp and not case.draft_layers], ids=lambda case: case.id
)
def test_every_class_is_what_sglang_builds(case: Case, sglang_built: dict[str, dict[str, Any]]) -> None:
    shape = case.shape
    ours = weights.stage_weights(shape, case.split.widths, 0, shape.num_layers)
    ours.pop(weights.ABSORBED, 0)  # made when the weights are loaded
    theirs = by_class(sglang_built[case.id]["tensors"])
    assert set(ours) == set(theirs) - ({weights.SCALES} - set(ours))
    assert sum(ours.values()) == pytest.approx(sum(theirs.values()), rel=1e-3)
    for kind, size in ours.items():
        if kind == weights.SCALES and shape.quantization.experts == "fp8_block":
            continue  # counted with the experts' by name; the sum holds
        assert size == pytest.approx(theirs[kind], rel=0.01, abs=4096 * shape.num_layers), kind


@pytest.mark.parametrize("case", [case for case in CASES if case.mtp], ids=lambda case: case.id)
def test_the_mtp_head_is_what_sglang_builds(case: Case, sglang_built: dict[str, dict[str, Any]]) -> None:
    tensors = sglang_built[case.id]["tensors"]
    own = sum(size for name, size in tensors.items() if not re.search("embed_tokens|lm_head", name))
    shape = case.shape
    attention = shape.attention
    rows = attention.heads // 8 * (attention.qk_nope_head_dim + attention.v_head_dim)
    absorbed = (1 if shape.quantization.mtp == "fp8_block" else 2) * rows * attention.kv_lora_rank
    assert weights.mtp_bytes(shape, case.split.widths) - absorbed == pytest.approx(own, rel=1e-3)


def test_glm_5_by_hand() -> None:
    """75 layers of 256 experts of 3 x 6144 x 2048, over 8 GPUs: 4 bits, and 8 bits for every 16 of them."""
    shape = read_shape("glm-5-nvfp4")
    found = weights.stage_weights(shape, Split(8).widths, 0, 78)
    elements = 75 * 256 * 3 * 6144 * 2048 // 8
    assert found[weights.EXPERTS] == elements // 2
    assert found[weights.SCALES] == pytest.approx(elements // 16, rel=1e-3)
    assert found[weights.EMBEDDING] == 154880 * 6144 * 2 // 8
    assert found[weights.SHARED] == 75 * 3 * 6144 * 2048 * 2 // 8
    indexer = 2048 * 32 * 128 * 2 + 6144 * 128 * 2 + 32 * 6144 * 2 + 2 * 128 * 4
    assert found[weights.INDEXER] == 78 * indexer, "whole on every GPU"


def test_the_public_figure_of_glm_5_in_nvfp4() -> None:
    """57.06 GiB a GPU with TP8, by SGLang's log, which says GB and divides by 2^30: the same report has 29.32 for
    314,304 tokens of 100,152 bytes, which is GiB. The log counts what torch's allocator took, so ours is less."""
    shape = read_shape("glm-5-nvfp4")
    ours = sum(weights.stage_weights(shape, Split(8).widths, 0, 78).values()) / 1024**3
    assert ours == pytest.approx(57.06, rel=0.03)
    assert ours < 57.06


def test_scales_are_padded_to_tiles() -> None:
    assert weights.nvfp4_scale_bytes(128, 64) == 128 * 4
    assert weights.nvfp4_scale_bytes(129, 80) == 256 * 8
    assert weights.linear_bytes(256, 96, "nvfp4") == 256 * 48 + 256 * 8 + 12
    assert weights.linear_bytes(130, 260, "fp8_block") == 130 * 260 + 4 * 2 * 3
    assert weights.linear_bytes(10, 64, "mxfp4") == 320 + 20
    with pytest.raises(ValueError, match="unknown kind"):
        weights.linear_bytes(1, 16, "int3")


@pytest.mark.parametrize("name", ["glm-5-nvfp4", "deepseek-v3", "qwen3-235b-a22b", "gpt-oss-120b", "qwen3.5-397b-a17b"])
def test_stages_add_up_to_the_whole(name: str) -> None:
    from sglang_sm120.plan.memory import stages

    shape = read_shape(name)
    widths = Split(4).widths
    whole = weights.stage_weights(shape, widths, 0, shape.num_layers)
    for pp in (2, 3, 8):
        parts: Counter[str] = Counter()
        for stage in stages(shape.num_layers, pp):
            parts += weights.stage_weights(shape, widths, *stage)
        assert parts == whole


def test_ep_holds_whole_experts_and_tp_a_part_of_each() -> None:
    shape = read_shape("glm-5-nvfp4")
    tp, ep = (weights.stage_weights(shape, split.widths, 0, 78) for split in (Split(8), Split(8, ep=8)))
    assert tp[weights.EXPERTS] == ep[weights.EXPERTS]
    assert tp[weights.ATTENTION] == ep[weights.ATTENTION]
