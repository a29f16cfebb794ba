"""`plan MODEL --l2`: the dense weights of a config, beside sums by hand and what the memory plan counts."""

from __future__ import annotations

import json

import pytest

from sglang_sm120.cli import main
from sglang_sm120.plan import weights
from sglang_sm120.plan.l2_layers import can_pin, layers_of
from sglang_sm120.plan.shapes import read_shape

MB = 1 << 20


def test_glm5_by_hand() -> None:
    """64 heads of 192 + 64 (value 256), q_lora 2048, kv_lora 512, rope 64; indexer of 32 heads of 128; hidden 6144."""
    layer = layers_of(read_shape("glm-5-nvfp4"), 8)[40]
    heads, hidden, bf16 = 64 // 8, 6144, 2
    down = (2048 + 512 + 64) * hidden
    up = heads * (192 + 64) * 2048
    indexer = 32 * 128 * 2048 + 128 * hidden + 32 * hidden
    keys = heads * 192 * 512
    own, mlp = "layers.40.self_attn", "layers.40.mlp"
    small = bf16 * (2048 + 512) + 2 * 4 * 128  # norms of the two latents, the indexer's own
    assert {weight.name: weight.num_bytes for weight in layer.all()} == {
        "layers.40.input_layernorm": bf16 * hidden,
        f"{own}.fused_qkv_a_proj_with_mqa": bf16 * down,
        f"{own}.q_b_proj": bf16 * up,
        f"{own}.*": bf16 * (2048 + 512),
        f"{own}.indexer.*": bf16 * indexer + small - bf16 * (2048 + 512),
        f"{own}.w_kc": bf16 * keys,
        f"{own}.w_vc": bf16 * heads * 512 * 256,
        f"{own}.o_proj": bf16 * hidden * heads * 256,
        "layers.40.post_attention_layernorm": bf16 * hidden,
        f"{mlp}.gate": 256 * (bf16 * hidden + 4),
        f"{mlp}.shared_experts.gate_up_proj": bf16 * 2 * hidden * 2048 // 8,
        f"{mlp}.shared_experts.down_proj": bf16 * hidden * 2048 // 8,
    }
    names = [weight.name for weight in layer.all()]
    assert names.index(f"{own}.w_vc") > names.index(f"{own}.w_kc") and names[-1] == f"{mlp}.shared_experts.down_proj"


def test_qwen3_by_hand() -> None:
    """64 heads and 4 KV heads of 128 on 4 GPUs, hidden 4096, no shared expert."""
    layer = layers_of(read_shape("qwen3-235b-a22b"), 4)[0]
    sizes = {weight.name.removeprefix("layers.0."): weight.num_bytes for weight in layer.all()}
    assert sizes["self_attn.qkv_proj"] == 2 * 4096 * (16 + 2) * 128
    assert sizes["self_attn.o_proj"] == 2 * 4096 * 16 * 128
    assert sizes["self_attn.*"] == 2 * 2 * 128, "q and k norms"


def test_what_a_window_can_keep() -> None:
    """Not what SGLang reads without a call of the module: BF16 projections in front of MLA; nor sums of small ones."""

    def pinned(model: str, number: int) -> set[str]:
        shape = read_shape(model)
        layer = layers_of(shape, 4)[number]
        return {weight.name.rpartition(".")[2] for weight in layer.all() if can_pin(shape, weight)}

    ffn = {"gate", "gate_up_proj", "down_proj"}
    assert pinned("glm-5-nvfp4", 40) == {"o_proj", *ffn}
    assert pinned("deepseek-v3", 40) == {"fused_qkv_a_proj_with_mqa", "q_b_proj", "o_proj", *ffn}, "FP8"
    assert pinned("qwen3-235b-a22b", 0) == {"qkv_proj", "o_proj", "gate"}
    assert pinned("qwen3.5-397b-a17b", 0) == {"in_proj_qkvz", "out_proj", *ffn}


@pytest.mark.parametrize(
    ("model", "tp"),
    [("glm-5-nvfp4", 8), ("deepseek-v3", 8), ("qwen3-235b-a22b", 4), ("gpt-oss-120b", 2), ("qwen3.5-397b-a17b", 4)],
)
def test_all_but_experts_and_what_decode_does_not_read(model: str, tp: int) -> None:
    shape = read_shape(model)
    widths = weights.Widths(tp, tp, 1)
    for number, layer in enumerate(layers_of(shape, tp)):
        counted = weights.layer_weights(shape, widths, number)
        left_out = counted[weights.EXPERTS] + counted[weights.SCALES] + weights.kv_b_bytes(shape, widths)
        assert sum(weight.num_bytes for weight in layer.all()) == counted.total() - left_out
        assert all(weight.num_bytes > 0 for weight in layer.all())


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "glm-5-nvfp4", "--l2"]) == 0
    out = capsys.readouterr().out
    assert "glm-5-nvfp4, TP8, RTX PRO 6000" in out and "128 MB of L2" in out
    assert "12.0 MB in layers 3 to 77: mlp.gate 3.0, mlp.shared_experts.gate_up_proj 6.0" in out
    assert "32.0 MB in layers 0 to 76: self_attn.fused_qkv_a_proj_with_mqa 30.8, self_attn.q_b_proj 1.2 of 8.0" in out
    assert "layers.0.self_attn.o_proj 24.0" in out.partition("kept from step to step")[2]
    assert main(["plan", "glm-5-nvfp4", "--l2", "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert len(made["layers"]) == 78
    assert all(sum(part["bytes"] for part in parts) <= 32 * MB for layer in made["layers"] for parts in layer.values())
    assert 0 < sum(weight["bytes"] for weight in made["kept"]) <= 84 * MB


def test_the_sizes_of_the_servers_flags(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--sm120-l2-prefetch-mb", "26,35,20", "--sm120-l2-persist-mb", "30"]
    assert main(["plan", "glm-5-nvfp4", "--l2", "--json", *sizes]) == 0
    made = json.loads(capsys.readouterr().out)
    layer = {phase: sum(part["bytes"] for part in parts) for phase, parts in made["layers"][0].items()}
    assert layer == {"attention": 26 * MB, "ffn": 35 * MB, "next": 20 * MB}
    assert 0 < sum(weight["bytes"] for weight in made["kept"]) <= 30 * MB


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        (["--gpu", "96GiB"], "is not known here"),
        (["--gpus", "7"], "--gpus 7"),
        (["--sm120-l2-persist-mb", "90"], "--sm120-l2-persist-mb of 90 MB"),
        (["--sm120-l2-persist-mb", "0"], "a size of 0"),
        (["--sm120-l2-prefetch-mb", "1,2"], "--sm120-l2-prefetch-mb 1,2"),
    ],
)
def test_what_cannot_be_told(arguments: list[str], found: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "glm-5-nvfp4", "--l2", *arguments]) == 2
    assert found in capsys.readouterr().err


def test_sizes_without_the_plan_that_they_are_of(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "glm-5-nvfp4", "--sm120-l2-prefetch-mb", "16"]) == 2
    assert "without --l2" in capsys.readouterr().err
