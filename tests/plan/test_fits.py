"""One split at one concurrency: SGLang's own defaults, what is asked of the KV cache, and that more is more."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_sm120.plan.fits import Request, default_chunk, default_graph_max_bs, fit, graph_batch_sizes
from sglang_sm120.plan.gpus import GPUS, MIB, find
from sglang_sm120.plan.memory import Split, fixed
from sglang_sm120.plan.shapes import read_shape
from sglang_sm120.plan.splits import Candidate, candidates, obstacles

GLM_5, QWEN = "glm-5-nvfp4", "qwen3-30b-a3b-nvfp4"
PRO_6000 = find("rtx-pro-6000")
REQUEST = Request(context=131072, concurrency=(1,), kv_dtype="fp8_e4m3", mtp=False, gpu=PRO_6000)


@pytest.mark.parametrize("mtp", [False, True])
@pytest.mark.parametrize("max_bs", [1, 2, 3, 8, 12, 13, 33, 64, 250, 256, 300, 511, 512, 513, 640])
def test_captured_batches_are_sglangs(max_bs: int, mtp: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.arg_groups import cuda_graph_hook

    view = SimpleNamespace(disable_cuda_graph_padding=False, speculative_algorithm="EAGLE" if mtp else None)
    monkeypatch.setattr(cuda_graph_hook, "resolving_view", lambda args: view)
    theirs = cuda_graph_hook.generate_decode_cuda_graph_batch_sizes(None, max_bs)
    assert graph_batch_sizes(max_bs, mtp) == tuple(sorted(set(theirs)))


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@pytest.mark.parametrize(
    "gpu", [*GPUS, find("16GiB"), find("40GiB"), find("80GiB"), find("192GiB")], ids=lambda g: g.name
)
def test_defaults_are_sglangs(gpu, tp: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's own handler, told of a GPU with this much memory."""
    from sglang.srt.arg_groups import memory_hook
    from sglang.srt.model_executor.cuda_graph_config import default_cuda_graph_config

    declared: dict[str, object] = {}
    view = SimpleNamespace(
        device="cuda", cuda_graph_config=default_cuda_graph_config(), chunked_prefill_size=None, tp_size=tp, pp_size=1,
        max_running_requests=None, max_total_tokens=None, model_path="x", mem_fraction_static=0.5,
        enable_symm_mem=False, disable_cuda_graph_padding=False, speculative_algorithm=None,
    )  # fmt: skip

    def declare(args: object, source: str, **values: object) -> None:
        declared.update(values)
        for name, value in values.items():
            setattr(view, name, value)

    monkeypatch.setattr(memory_hook, "resolving_view", lambda args: view)
    monkeypatch.setattr(memory_hook, "declare_resolution", declare)
    monkeypatch.setattr(memory_hook, "use_mla_backend", lambda args: False)
    monkeypatch.setattr(memory_hook, "get_device_memory_capacity", lambda device: gpu.shown_bytes / MIB)
    from sglang.srt.arg_groups import cuda_graph_hook
    from sglang.srt.arg_groups.model_overrides import qwen3_vl

    monkeypatch.setattr(cuda_graph_hook, "resolving_view", lambda args: view)
    monkeypatch.setattr(qwen3_vl, "expand_multimodal_decode_graph_to_running_limit", lambda *args: None)
    memory_hook.handle_gpu_memory_settings(None)
    assert declared["chunked_prefill_size"] == default_chunk(gpu)
    assert declared["cuda_graph_config"].decode.max_bs == default_graph_max_bs(gpu, tp)


def test_glm_5_fits_eight_cards_and_not_four() -> None:
    shape = read_shape(GLM_5)
    eight = fit(shape, Candidate(Split(tp=8)), REQUEST, 1)
    four = fit(shape, Candidate(Split(tp=4)), REQUEST, 1)
    assert eight.fits
    assert eight.why == ""
    assert not four.holds_one
    assert four.kv_tokens == 0
    assert "weights alone are" in four.why
    assert "95.0 there are" in four.why


def test_requests_are_spread_over_groups() -> None:
    shape = read_shape(QWEN)
    request = replace(REQUEST, context=4096)
    one = fit(shape, Candidate(Split(tp=1)), request, 10)
    four = fit(shape, Candidate(Split(tp=1), replicas=4), request, 10)
    assert one.needed_tokens == 10 * 4096
    assert four.needed_tokens == 3 * 4096, "the fullest of four replicas has three of ten requests"
    assert four.all_kv_tokens == 4 * four.kv_tokens
    assert four.running_flag == 3
    assert four.graph_max_bs == 3
    attention = fit(shape, Candidate(Split(tp=4, dp_attention=4)), request, 10)
    assert attention.needed_tokens == 3 * 4096
    assert attention.running_flag == 12, "SGLang divides --max-running-requests by attention DP"
    assert attention.tokens_each == min(attention.kv_tokens // 3, 4096)
    assert attention.chunk_flag == 4 * attention.serving.chunked_prefill == 8192, "and --chunked-prefill-size"


def test_the_parts_add_up_and_leave_room_outside_the_pool() -> None:
    shape = read_shape(GLM_5)
    for candidate in candidates(8):
        if obstacles(shape, candidate):
            continue
        one = fit(shape, candidate, REQUEST, 2)
        assert one.fixed_bytes == sum(part.bytes for part in fixed(shape, candidate.split, one.serving))
        assert all(isinstance(part.bytes, int) and part.bytes >= 0 for part in one.components)
        assert one.fits == (one.kv_tokens >= 2 * 131072 / candidate.groups)
        if one.holds_one:
            assert one.fixed_bytes + one.kv_tokens * one.kv_bytes_per_token <= PRO_6000.cuda_bytes
            assert 0 < one.mem_fraction < 1


@settings(max_examples=60, deadline=None)
@given(
    context=st.integers(1, 200_000), more=st.integers(0, 200_000), requests=st.integers(1, 2000),
    more_requests=st.integers(0, 2000), index=st.integers(0, 200), mtp=st.booleans(),
    kv_dtype=st.sampled_from(["bfloat16", "fp8_e4m3"]),
)  # fmt: skip
def test_more_context_or_requests_never_need_less(
    context: int, more: int, requests: int, more_requests: int, index: int, mtp: bool, kv_dtype: str
) -> None:
    shape = read_shape(GLM_5)
    able = [one for one in candidates(8) if not obstacles(shape, one, mtp)]
    candidate = able[index % len(able)]
    small = Request(context, (requests,), kv_dtype, mtp, PRO_6000)
    large = replace(small, context=context + more)

    def needed(request: Request, number: int) -> int:
        one = fit(shape, candidate, request, number)
        same_chunk = replace(one.serving, chunked_prefill=4096)
        parts = fixed(shape, candidate.split, same_chunk)
        return sum(part.bytes for part in parts) + one.needed_tokens * one.kv_bytes_per_token

    less, most = needed(small, requests), needed(large, requests + more_requests)
    assert less <= most


@pytest.mark.parametrize("context", [1, 63, 64, 65])
def test_a_request_takes_whole_pages(context: int) -> None:
    """Sparse attention has pages of 64 tokens: 1,000 requests of one token take 64,000."""
    found = fit(read_shape(GLM_5), Candidate(Split(tp=8)), replace(REQUEST, context=context), 1000)
    assert found.needed_tokens == 1000 * (128 if context == 65 else 64)
    assert found.most_requests == found.kv_tokens // (128 if context == 65 else 64)
