"""Reading a model's sizes: folders, files, names, quantisation, and what no model has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_sm120.errors import ConfigError
from sglang_sm120.plan.memory import Serving, Split, fixed, problems
from sglang_sm120.plan.shapes import ModelShape, read_shape
from sglang_sm120.plan.shapes_config import KNOWN, shape_of
from sglang_sm120.plan.shapes_quantization import quantization_of

MOE: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"], "num_hidden_layers": 48, "hidden_size": 2048, "vocab_size": 151936,
    "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8,
    "moe_intermediate_size": 768, "intermediate_size": 6144, "max_position_embeddings": 40960,
}  # fmt: skip
MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4"}


def shape(**changes: Any) -> ModelShape:
    config = {key: value for key, value in {**MOE, **changes}.items() if value is not None}
    return shape_of(config, name="a-model", source="config.json")


def test_a_folder_its_config_and_the_catalogue_say_the_same(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MOE))
    by_folder, by_file = read_shape(str(tmp_path)), read_shape(str(tmp_path / "config.json"))
    assert by_folder == by_file
    named = read_shape("Qwen3-30B-A3B")
    assert (by_folder.attention, by_folder.moe, by_folder.num_layers) == (named.attention, named.moe, named.num_layers)
    assert by_folder.unknown == ()


def test_sizes_of_a_moe_model() -> None:
    found = shape()
    assert (found.attention.kind, found.attention.kv_heads, found.attention.qk_norm) == ("gqa", 4, "head")
    assert found.moe is not None
    assert (found.moe.num_experts, found.moe.top_k, found.moe.moe_intermediate_size) == (128, 8, 768)
    assert found.dense_intermediate_size == 0, "no layer without experts"
    assert found.mtp_layers == 0
    assert found.quantization.method == ""


def test_older_checkpoints_have_their_quantisation_in_a_file_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MOE))
    (tmp_path / "hf_quant_config.json").write_text(
        json.dumps(
            {"quantization": {"quant_algo": "NVFP4", "exclude_modules": ["lm_head", "model.layers.*.self_attn*"]}}
        )
    )
    found = read_shape(str(tmp_path)).quantization
    assert (found.method, found.experts, found.attention, found.lm_head) == ("modelopt_fp4", "nvfp4", "bf16", "bf16")


def test_an_mtp_head_without_tensors_does_not_count(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**MOE, "num_nextn_predict_layers": 1}))
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"model.layers.47.mlp.gate.weight": "a"}}))
    without = read_shape(str(tmp_path))
    assert without.mtp_layers == 0
    assert any("MTP" in one for one in without.unknown)
    index.write_text(json.dumps({"weight_map": {"model.layers.48.eh_proj.weight": "a"}}))
    assert read_shape(str(tmp_path)).mtp_layers == 1


@pytest.mark.parametrize(
    ("declared", "expected"),
    [
        ({**MODELOPT, "ignore": ["lm_head"]}, ("nvfp4", "nvfp4", "nvfp4", "bf16")),
        ({**MODELOPT, "ignore": ["lm_head", "*self_attn*", "*shared_expert*"]}, ("nvfp4", "bf16", "bf16", "bf16")),
        ({"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]}, ("fp8", "fp8", "fp8", "bf16")),
        (
            {
                "quant_method": "compressed-tensors", "ignore": ["re:.*self_attn.*", "lm_head"],
                "config_groups": {
                    "g": {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "float", "group_size": 16}}
                },
            },
            ("nvfp4", "bf16", "nvfp4", "bf16"),
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {
                    "g": {
                        "targets": ["re:.*experts.*"],
                        "weights": {"num_bits": 4, "type": "float", "group_size": 16},
                    }
                },
            },
            ("nvfp4", "bf16", "bf16", "bf16"),
        ),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, ("fp8_block", "fp8_block", "fp8_block", "bf16")),
        ({"quant_method": "mxfp4"}, ("mxfp4", "bf16", "bf16", "bf16")),
        (  # models that take more than text name their parts so
            {**MODELOPT, "ignore": ["language_model.lm_head", "model.language_model.layers.*.self_attn*"]},
            ("nvfp4", "bf16", "nvfp4", "bf16"),
        ),
        (
            {**MODELOPT, "ignore": ["lm_head", "language_model.model.layers.47.mlp.shared_experts*", "self_attn"]},
            ("nvfp4", "bf16", "bf16", "bf16"),
        ),
        (
            {
                "quant_method": "modelopt", "quant_algo": "MIXED_PRECISION",
                "quantized_layers": {
                    "model.language_model.layers.47.mlp.experts.0.gate_proj": {"quant_algo": "NVFP4"},
                    "model.language_model.layers.47.self_attn.q_proj": {"quant_algo": "FP8"},
                    "model.language_model.layers.47.mlp.shared_expert.gate_proj": {"quant_algo": "FP8_PB_WO"},
                },
            },
            ("nvfp4", "fp8", "fp8_block", "bf16"),
        ),
    ],
)  # fmt: skip
def test_what_is_quantised(declared: dict[str, Any], expected: tuple[str, ...]) -> None:
    found, notes = quantization_of({"quantization_config": declared}, None, layers=48, has_moe=True)
    assert (found.experts, found.attention, found.shared_expert, found.lm_head) == expected
    assert notes == []


@pytest.mark.parametrize(
    "declared",
    [
        {"quant_method": "gptq", "bits": 4},
        {
            "quant_method": "compressed-tensors",
            "config_groups": {
                "g": {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", "group_size": 32}}
            },
        },
    ],
)
def test_other_quantisations_are_counted_in_two_bytes_and_say_so(declared: dict[str, Any]) -> None:
    found, notes = quantization_of({"quantization_config": declared}, None, layers=48, has_moe=True)
    assert found.experts == "bf16"
    assert len(notes) == 1
    assert "too much" in notes[0]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_hidden_layers": -3}, "num_hidden_layers = -3"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
        ({"hidden_size": "2048"}, "hidden_size = '2048'"),
        ({"hidden_size": True}, "hidden_size = True"),
        ({"hidden_size": None}, "no hidden_size"),
        ({"vocab_size": 2.5}, "vocab_size = 2.5"),
        ({"num_attention_heads": 30}, "30 heads and 4 KV heads"),
        ({"head_dim": None, "hidden_size": 2050}, "hidden_size 2050"),
        ({"num_experts_per_tok": 200}, "200 experts a token of 128"),
        ({"architectures": None}, "neither architectures nor model_type"),
        ({"num_experts": 10**6}, "num_experts"),
    ],
)
def test_numbers_that_no_model_has(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        shape(**changes)
    assert said in caught.value.found
    assert caught.value.needed
    assert caught.value.fix


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("config.json", json.dumps(MOE)[:50]),
        ("config.json", "[1, 2]"),
        ("config.json", ""),
        ("model.safetensors.index.json", '{"weight_map": {"a": '),
        ("model.safetensors.index.json", "{}"),
        ("hf_quant_config.json", '"text"'),
    ],
)
def test_damaged_files_are_one_error_that_names_them(tmp_path: Path, file: str, text: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MOE))
    (tmp_path / file).write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_shape(str(tmp_path))
    assert file in caught.value.found


def test_a_folder_without_a_config(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json"):
        read_shape(str(tmp_path))


def test_an_unknown_name_names_its_neighbours() -> None:
    with pytest.raises(ConfigError) as caught:
        read_shape("minimax-m2.7-nvpf4")
    assert "minimax-m2.7-nvfp4" in caught.value.fix
    with pytest.raises(ConfigError, match="catalogue"):
        read_shape("\0")


def test_an_unknown_architecture_is_counted_as_far_as_its_keys_go() -> None:
    found = shape(architectures=["NobodysForCausalLM"])
    assert any("NobodysForCausalLM" in one for one in found.unknown)
    assert problems(found, Split(2)) == []
    assert any("vision" in one for one in shape(vision_config={"depth": 3}).unknown)
    parts = fixed(found, Split(2), Serving(4096, 4, 2048, "bfloat16", False, (1, 2), False, False))
    known = fixed(shape(), Split(2), Serving(4096, 4, 2048, "bfloat16", False, (1, 2), False, False))
    assert sum(part.bytes for part in parts) == pytest.approx(sum(part.bytes for part in known), rel=0.01)


def test_a_model_that_takes_more_than_text_has_its_sizes_inside() -> None:
    plain = shape(quantization_config={"quant_method": "fp8"})
    inside = {key: value for key, value in MOE.items() if key != "architectures"}
    for key in ("text_config", "llm_config", "language_config"):
        nested = {
            "architectures": MOE["architectures"],
            key: {**inside, "quantization_config": {"quant_method": "fp8"}},
        }
        assert shape_of(nested, name="a-model", source="config.json") == plain


def test_a_context_that_is_not_said_is_taken_and_said() -> None:
    found = shape(max_position_embeddings=None)
    assert found.max_context == 32768
    assert any("longest context" in said for said in found.unknown)


@pytest.mark.parametrize(
    ("changes", "dense"),
    [
        ({"decoder_sparse_step": 2}, 24),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [0, 1]}, 25),
        ({"mlp_only_layers": [3, 4, 100]}, 2),
        ({"moe_layer_freq": 2}, 24),
        ({"moe_layer_freq": 1, "first_k_dense_replace": 3}, 3),
        ({"moe_layer_freq": [0, 0, *[1] * 46]}, 2),
        ({"mlp_layer_types": ["dense", *["sparse"] * 47]}, 1),
    ],
)
def test_layers_without_experts(changes: dict[str, Any], dense: int) -> None:
    found = shape(**changes)
    assert found.moe is not None
    assert (found.moe.first_dense_layers, found.dense_intermediate_size) == (dense, 6144)


def test_known_architectures_are_sglangs() -> None:
    import sglang.srt.models

    folder = Path(next(iter(sglang.srt.models.__path__)))
    names = {name for file in folder.glob("*.py") for name in KNOWN if f"class {name}(" in file.read_text()}
    assert names == KNOWN


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**40), 2**40) | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.text(max_size=6), children, max_size=3),
    max_leaves=6,
)


@settings(max_examples=300, deadline=None)
@given(
    key=st.sampled_from([*MOE, "quantization_config", "text_config", "layer_types", "rope_scaling", "kv_lora_rank",
                         "n_shared_experts", "first_k_dense_replace", "mlp_only_layers", "torch_dtype", "index_topk"]),
    value=_JSON,
)  # fmt: skip
def test_whatever_a_config_says_it_is_read_or_refused(key: str, value: Any) -> None:
    try:
        found = shape(**{key: value})
    except ConfigError as error:
        assert error.found
        return
    assert isinstance(problems(found, Split(2)), list)
