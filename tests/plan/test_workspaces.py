"""Workspaces against the kernels' own `workspace_bytes`, and against what SGLang's source says."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sglang_sm120.kernels.communication.all_reduce_rmsnorm import api as all_reduce
from sglang_sm120.kernels.communication.all_reduce_rmsnorm import config as all_reduce_config
from sglang_sm120.kernels.moe.fused_moe import api as fused_moe
from sglang_sm120.plan import workspaces
from sglang_sm120.plan.shapes import read_shape
from sglang_sm120.runners import table

MIB = 1024**2


@settings(max_examples=300, deadline=None)
@given(
    backend=st.sampled_from(["decode", "middle", "prefill"]), experts=st.sampled_from([1, 8, 32, 128, 256, 384, 512]),
    hidden=st.sampled_from([1600, 2048, 2880, 4096, 5120, 6144, 7168]),
    inner=st.sampled_from([80, 96, 160, 192, 256, 352, 512, 1024, 2048]), tokens=st.integers(1, 9000),
    top_k=st.integers(1, 10),
)  # fmt: skip
@example("decode", 256, 6144, 256, 1, 8)
@example("decode", 128, 2048, 768, 4, 8)
@example("middle", 256, 6144, 256, 64, 8)
@example("prefill", 32, 6144, 2048, 8192, 8)
def test_ours_are_what_the_kernels_say(
    backend: str, experts: int, hidden: int, inner: int, tokens: int, top_k: int
) -> None:
    theirs = fused_moe.workspace_bytes(
        num_tokens=tokens, top_k=top_k, hidden_size=hidden, intermediate_size=inner, backend=backend,
        num_experts=experts, num_sms=workspaces.NUM_SMS,
    )  # fmt: skip
    assert workspaces.fused_moe_bytes(backend, experts, hidden, inner, tokens, top_k) == theirs


def test_the_component_is_the_larger_of_what_may_serve() -> None:
    of = [
        fused_moe.workspace_bytes(
            num_tokens=64, top_k=8, hidden_size=6144, intermediate_size=256, backend=backend, num_experts=256
        )
        for backend in ("decode", "middle")
    ]
    assert workspaces.native_bytes(256, 6144, 256, 8192, 8) == max(of)


def test_ours_serve_up_to_as_many_tokens_as_counted() -> None:
    assert workspaces.NATIVE_TOKENS == table.NATIVE_TOKENS


@pytest.mark.parametrize("hidden", [2048, 4096, 6144, 7168])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_the_window_is_what_the_all_reduce_says(ranks: int, hidden: int) -> None:
    theirs = all_reduce.workspace_bytes(all_reduce_config.DEFAULT_RANGES[ranks], world_size=ranks, hidden_size=hidden)
    assert workspaces.window_bytes(ranks) == theirs


def test_other_numbers_of_ranks_have_no_window() -> None:
    assert workspaces.window_bytes(1) == workspaces.window_bytes(6) == 0
    assert set(workspaces.WINDOW_MESSAGE_BYTES) == set(all_reduce_config.WORLD_SIZES)


def test_flashinfers_workspace_is_sglangs_default() -> None:
    from sglang.srt.environ import envs

    assert type(envs).SGLANG_FLASHINFER_WORKSPACE_SIZE.default == workspaces.FLASHINFER_WORKSPACE_BYTES


@pytest.mark.parametrize("chunk", [1, 4, 100, 512, 2048, 4096, 4607, 8192, 16384])
def test_prefill_graphs_are_as_many_as_sglang_captures(chunk: int) -> None:
    from sglang.srt.arg_groups.cuda_graph_hook import generate_prefill_cuda_graph_batch_sizes

    assert workspaces.prefill_sizes(chunk) == len(generate_prefill_cuda_graph_batch_sizes(chunk))


def test_who_has_a_flashinfer_workspace() -> None:
    """On compute capability 12.x SGLang takes Triton for MLA and for sinks, else FlashInfer."""
    have = {name: workspaces.attention_workspace_bytes(read_shape(name)) > 0
            for name in ("deepseek-v3", "gpt-oss-20b", "glm-5", "glm-4.5", "qwen3.5-397b-a17b")}  # fmt: skip
    assert have == {
        "deepseek-v3": False,
        "gpt-oss-20b": False,
        "glm-5": True,
        "glm-4.5": True,
        "qwen3.5-397b-a17b": True,
    }


def test_activations_by_hand() -> None:
    """GLM-4.5 at TP8, 1,000 tokens: 12 heads and one KV head of 128; 160 experts; a dense layer's 12288 / 8."""
    attention, mlp = workspaces.activation_bytes(
        read_shape("glm-4.5"), attention_tp=8, inner=1536, tokens=1000, moe_tokens=1000
    )
    stream = 2 * 1000 * 5120 * 2
    assert attention == stream + 1000 * 2 * 2 * (12 + 2) * 128 + 1000 * 5120 * 2
    assert mlp == stream + 1000 * 2 * (2 * 5120 + 3 * 1536) + 2 * 1000 * 160 * 4
    gathered = workspaces.activation_bytes(
        read_shape("glm-4.5"), attention_tp=1, inner=1536, tokens=1000, moe_tokens=8000
    )[1]
    assert gathered > 5 * mlp, "experts see the tokens of all attention groups"


def test_the_experts_workspace_by_hand() -> None:
    """A slot of H 6144 and I 256: 3,456 bytes in, 1,024 between, 144 to the second GEMM, 12,288 out."""
    assert workspaces.cutlass_moe_bytes(6144, 256, 10) == 10 * (3456 + 1024 + 144 + 12288)
    assert workspaces.plain_moe_bytes(6144, 256, 10) == 10 * (1024 + 512 + 12288)


def test_logits_by_hand() -> None:
    assert workspaces.logits_bytes(154880, 10, 8) == 10 * (2 * 19360 + 10 * 154880)


def test_index_buffers_grow_with_context_and_rows() -> None:
    shape = read_shape("glm-5")
    assert workspaces.decode_buffer_bytes(shape, attention_tp=8, rows=10, context=1000) == 4 * 10 * 1000
    triton = workspaces.decode_buffer_bytes(read_shape("deepseek-v3"), attention_tp=8, rows=10, context=1000)
    assert triton == 8 * 10 * 1000 + 4 * 10 * 16 * 8 * 513
    drafting = workspaces.decode_buffer_bytes(shape, attention_tp=8, rows=10, context=1000, mtp=True)
    assert drafting == 4 * 10 * 12 * 1000
    drafting = workspaces.decode_buffer_bytes(
        read_shape("deepseek-v3"), attention_tp=8, rows=10, context=1000, mtp=True
    )
    assert drafting == 8 * 10 * 12 * 1000 + 4 * 40 * 16 * 8 * 513


@pytest.mark.parametrize(("file", "dtype"), [("triton_backend", "int64"), ("flashinfer_backend", "int32")])
def test_an_index_is_as_wide_as_in_sglangs_source(file: str, dtype: str) -> None:
    import sglang.srt

    source = (Path(next(iter(sglang.srt.__path__))) / "layers" / "attention" / f"{file}.py").read_text()
    made = re.findall(r"cuda_graph_kv_indices = torch\.zeros\((.*?)dtype=torch\.(\w+)", source, re.DOTALL)
    assert [found for _, found in made] == [dtype] * 2, "of decoding, and of drafting"
    assert "max_num_tokens * self.max_context_len" in made[0][0]
    assert "speculative_num_steps, kv_indices_width" in made[1][0]


@pytest.mark.parametrize("model", ["glm-5", "glm-4.5", "deepseek-v3", "qwen3.5-397b-a17b"])
def test_as_many_tokens_are_checked_as_sglang_drafts(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.arg_groups import speculative_hook

    view = SimpleNamespace(speculative_algorithm="EAGLE")
    monkeypatch.setattr(speculative_hook, "resolving_view", lambda args: view)
    steps, topk, tokens = speculative_hook._auto_choose_speculative_params(None, read_shape(model).architecture)
    assert (steps, topk, tokens) == (workspaces.DRAFT_TOKENS - 1, 1, workspaces.DRAFT_TOKENS)
