"""Which split is picked: the rules on models whose answer is known, and what is said where nothing fits."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_sm120.plan.choose import CLOSE, Plan, plan
from sglang_sm120.plan.fits import Request
from sglang_sm120.plan.gpus import find
from sglang_sm120.plan.reasons import token_facts
from sglang_sm120.plan.shapes import read_shape

GLM_5, QWEN = "glm-5-nvfp4", "qwen3-30b-a3b-nvfp4"
REQUEST = Request(131072, (1, 2, 10, 1000), "fp8_e4m3", False, find("rtx-pro-6000"))


def planned(model: str, gpus: int, nodes: int = 1, **changes: object) -> Plan:
    return plan(read_shape(model), replace(REQUEST, **changes), gpus, nodes)


def test_glm_5_on_eight_cards() -> None:
    found = planned(GLM_5, 8)
    assert found.latency is not None
    assert found.latency.candidate.label == "TP8"
    assert found.latency.fit.concurrency == 2, "the largest number up to 2"
    assert found.throughput is not None
    assert found.throughput.fit.concurrency == 1000
    assert found.throughput.candidate.split.pp == 1, "pipelines are left aside while anything else fits"
    assert found.larger is None
    assert found.smaller_context is None
    too_large = [one.candidate.label for one in found.verdicts if one.fits and not one.holds_one]
    assert {"2 replicas of TP4", "4 replicas of TP2", "8 replicas of TP1"} <= set(too_large), "DP2 x TP4 does not fit"


def test_throughput_takes_the_most_kv_or_close_to_it() -> None:
    found = planned(GLM_5, 8)
    assert found.throughput is not None
    flat = [one.fits[-1].all_kv_tokens for one in found.verdicts if one.holds_one and one.candidate.split.pp == 1]
    assert found.throughput.fit.all_kv_tokens >= CLOSE * max(flat)


def test_glm_5_on_four_cards_says_what_would_do() -> None:
    found = planned(GLM_5, 4)
    assert (found.latency, found.throughput) == (None, None)
    assert found.larger is not None
    assert (found.larger.gpus, found.larger.nodes) == (8, 1)
    assert found.smaller_context is None, "the weights alone are too much"


def test_glm_5_on_small_cards_needs_several_machines() -> None:
    found = planned(GLM_5, 8, gpu=find("rtx-5090"))
    assert found.latency is None
    assert found.larger is not None
    assert found.larger.nodes > 1
    again = planned(GLM_5, found.larger.gpus, found.larger.nodes, gpu=find("rtx-5090"))
    assert again.latency is not None, "what was said to fit fits"


def test_a_shorter_context_that_is_named_fits() -> None:
    gpu = find("30GiB")
    found = planned(QWEN, 1, gpu=gpu, context=131072, concurrency=(4,), kv_dtype="bfloat16")
    if found.latency is not None:
        pytest.skip("this model got smaller")
    assert found.smaller_context is not None
    less = planned(QWEN, 1, gpu=gpu, context=found.smaller_context, concurrency=(4,), kv_dtype="bfloat16")
    assert less.latency is not None


def test_a_small_model_is_replicated_for_throughput() -> None:
    found = planned(QWEN, 8, context=8192, kv_dtype="bfloat16")
    assert found.latency is not None
    assert found.latency.candidate.replicas == 1
    assert found.throughput is not None
    assert found.throughput.candidate.split.tp < 8
    assert found.throughput.candidate.replicas > 1


def test_a_machine_of_seven_uses_a_part() -> None:
    found = planned(QWEN, 7, context=8192, kv_dtype="bfloat16")
    assert found.latency is not None
    assert found.latency.candidate.label == "TP4", "32 heads do not divide by 7, 6 or 5"
    assert found.throughput is not None
    assert found.throughput.candidate.gpus == 7, "seven replicas"


def test_where_many_requests_leave_no_cache_fewer_are_planned() -> None:
    """671 B parameters in FP8 on 8 x 95 GiB: TP8 holds one request, and none beside the logits of 1000."""
    found = planned("deepseek-v3", 8, kv_dtype="bfloat16", context=65536)
    assert found.latency is not None
    assert found.latency.candidate.label == "TP8", "one request at a time wants plain TP, though others hold more"
    assert found.throughput is not None
    assert found.throughput.candidate.split.pp == 1
    if found.throughput.fit.concurrency < 1000:
        assert any("Planned for" in reason for reason in found.throughput.reasons)


def test_two_nodes_put_stages_along_the_nodes() -> None:
    found = planned(GLM_5, 8, 2)
    assert found.latency is not None
    assert found.latency.candidate.label == "PP2 x TP8 on 2 nodes"
    assert found.throughput is not None
    assert not found.throughput.candidate.sums_cross_nodes


def test_arithmetic_of_a_token() -> None:
    found = planned(GLM_5, 8)
    assert found.latency is not None
    facts = token_facts(found.shape, found.latency.candidate, found.latency.fit)
    assert (facts.sums, facts.sum_ranks, facts.sum_bytes) == (156, 8, 6144 * 2), "78 layers, twice; 12 KiB"
    parts = {part.name: part.bytes for part in found.latency.fit.components if part.kind == "weights"}
    others = sum(held for name, held in parts.items() if name != "embedding" and "routed experts" not in name)
    # 75 MoE layers, 8 experts of three matrices of 6144 x 2048, 4 bits and a scale byte for 16 elements, over 8 GPUs.
    by_hand = 75 * 8 * 3 * 6144 * 2048 * (0.5 + 1 / 16) / 8
    kv_b = 78 * 64 * (192 + 256) * 512 * 2 // 8  # its absorbed form is read instead, which is as large
    assert parts["attention, absorbed kv_b"] == kv_b
    assert facts.read_bytes - (others - kv_b) == pytest.approx(by_hand, rel=0.01)


def test_no_reason_is_a_time() -> None:
    found = planned(GLM_5, 8)
    assert found.latency is not None
    assert found.throughput is not None
    for text in (*found.latency.reasons, *found.throughput.reasons):
        assert not any(word in text for word in (" us", " ms", "tok/s", "tokens/s", "faster", "GB/s")), text


@settings(max_examples=25, deadline=None)
@given(
    gpus=st.integers(1, 4), more=st.integers(1, 4), context=st.sampled_from([1024, 8192, 40960]),
    size_gib=st.integers(8, 120), requests=st.integers(1, 64),
)  # fmt: skip
def test_more_gpus_never_turn_a_plan_to_none(gpus: int, more: int, context: int, size_gib: int, requests: int) -> None:
    changes = {
        "gpu": find(f"{size_gib}GiB"), "context": context, "concurrency": (requests,), "kv_dtype": "bfloat16",
    }  # fmt: skip
    if planned(QWEN, gpus, **changes).latency is not None:
        assert planned(QWEN, gpus + more, **changes).latency is not None
