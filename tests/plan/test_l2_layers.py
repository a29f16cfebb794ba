"""`plan MODEL --l2`: the dense weights of a config, beside sums by hand and what the memory plan counts."""

from __future__ import annotations

import json

import pytest

from sglang_sm120.cli import main
from sglang_sm120.plan import weights
from sglang_sm120.plan.l2_layers import layers_of
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
    (_, before) = layer.before_attention
    small = bf16 * (2048 + 512) + 2 * 4 * 128  # norms of the two latents, the indexer's own
    assert before.num_bytes == bf16 * (down + up + indexer + keys) + small
    value, output = layer.behind_attention
    assert value.num_bytes == bf16 * heads * 512 * 256
    assert output.num_bytes == bf16 * hidden * heads * 256
    _, router, shared = layer.ffn
    assert router.num_bytes == 256 * (bf16 * hidden + 4)
    assert shared.num_bytes == bf16 * 3 * hidden * 2048 // 8


@pytest.mark.parametrize(
    ("model", "tp"), [("glm-5-nvfp4", 8), ("deepseek-v3", 8), ("qwen3-235b-a22b", 4), ("gpt-oss-120b", 2)]
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
    assert "12.8 MB in each of 78 layers" in out and "32.0 MB in each of 77 layers" in out
    assert main(["plan", "glm-5-nvfp4", "--l2", "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert len(made["layers"]) == 78
    assert all(sum(part["bytes"] for part in parts) <= 32 * MB for layer in made["layers"] for parts in layer.values())
    assert sum(weight["bytes"] for weight in made["kept"]) <= 84 * MB


@pytest.mark.parametrize(
    ("arguments", "found"), [(["--gpu", "96GiB"], "is not known here"), (["--gpus", "7"], "--gpus 7")]
)
def test_what_cannot_be_told(arguments: list[str], found: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "glm-5-nvfp4", "--l2", *arguments]) == 2
    assert found in capsys.readouterr().err
