"""The KV cache against SGLang's own pool configurator, exactly, and against public figures."""

from __future__ import annotations

from typing import Any

import pytest

from sglang_sm120.plan import kv
from sglang_sm120.plan.memory import Split, kv_bytes_per_token
from sglang_sm120.plan.shapes import read_shape
from tests.plan.conftest import CASES, Case

WHOLE = [case for case in CASES if not case.mtp]


@pytest.mark.parametrize("case", WHOLE, ids=lambda case: case.id)
def test_a_token_takes_what_sglang_says(case: Case, sglang_built: dict[str, dict[str, Any]]) -> None:
    shape, width = case.shape, case.split.widths.attention
    ours = kv.cell_bytes(shape, width, case.kv_dtype, 0, shape.num_layers, mtp=case.draft_layers > 0)
    assert ours == int(sglang_built[case.id]["cell"])


@pytest.mark.parametrize("case", WHOLE, ids=lambda case: case.id)
def test_linear_attention_keeps_what_sglang_says(case: Case, sglang_built: dict[str, dict[str, Any]]) -> None:
    shape = case.shape
    assert kv.state_bytes(shape, case.split.widths.attention, 0, shape.num_layers) == sglang_built[case.id]["state"]


def test_the_cases_have_every_kind_of_cache() -> None:
    assert {case.shape.attention.kind for case in WHOLE} == {"mla", "dsa", "gqa", "linear-hybrid"}
    assert any(case.shape.attention.sliding_layers for case in WHOLE)


def test_glm_5_by_hand_and_by_a_public_figure() -> None:
    """78 layers of 512 + 64 in 16 bits and of a 128-byte key with a scale; public: 29.32 GiB for 314,304 tokens."""
    shape = read_shape("glm-5-nvfp4")
    a_token = 78 * (2 * (512 + 64) + 128 + 4)
    assert kv_bytes_per_token(shape, Split(8), "bfloat16") == a_token == 100152
    assert 314304 * a_token / 1024**3 == pytest.approx(29.32, abs=0.005)
    fp8 = kv_bytes_per_token(shape, Split(8), "fp8_e4m3")
    assert fp8 == 78 * (512 + 4 * 4 + 2 * 64 + 132)


def test_mla_is_whole_whatever_tp_and_gqa_is_not() -> None:
    mla, gqa = read_shape("deepseek-v3"), read_shape("qwen3-235b-a22b")
    assert len({kv_bytes_per_token(mla, Split(tp), "bfloat16") for tp in (1, 2, 4, 8, 16)}) == 1
    sizes = [kv_bytes_per_token(gqa, Split(tp), "bfloat16") for tp in (1, 2, 4, 8)]
    assert sizes == [94 * heads * 2 * 128 * 2 for heads in (4, 2, 1, 1)], "with fewer KV heads than GPUs each has one"
    assert kv_bytes_per_token(gqa, Split(8, dp_attention=4), "bfloat16") == sizes[1]


def test_shared_indexers_keep_no_keys() -> None:
    every, shared = (kv_bytes_per_token(read_shape(name), Split(8), "bfloat16") for name in ("glm-5", "glm-5.2"))
    assert every - shared == 57 * 132


def test_a_stage_has_the_cache_of_its_layers() -> None:
    shape = read_shape("glm-5-nvfp4")
    assert kv_bytes_per_token(shape, Split(4, pp=2), "bfloat16") == 39 * 1284
    assert kv_bytes_per_token(shape, Split(2, pp=4), "bfloat16") == 20 * 1284, "78 layers in four: 19, 19, 20, 20"
