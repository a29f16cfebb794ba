"""What a checkpoint on disk is said to be, for checkpoints of both formats, whole and damaged."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from sglang_sm120.errors import ConfigError
from sglang_sm120.plan.checkpoint import CheckpointFacts, inspect_checkpoint
from sglang_sm120.testing.checkpoints import (
    DAMAGE_KINDS,
    FORMATS,
    MODEL_STYLES,
    damage,
    quantize_checkpoint,
    write_random_model,
)

NUM_EXPERTS = 6  # not the default, so that it is read from the config
INPUT_SCALE = 0.01
NAMES = {
    "modelopt": {"weight_scale": "weight_scale", "weight_scale_2": "weight_scale_2", "input_scale": "input_scale"},
    "compressed-tensors": {
        "weight_scale": "weight_scale",
        "weight_scale_2": "weight_global_scale",
        "input_scale": "input_global_scale",
    },
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """(style, format or None for plain BF16, w4a16_only) -> a checkpoint, each written once."""
    root = tmp_path_factory.mktemp("checkpoints")

    def get(style: str = "qwen3_moe", fmt: str | None = "modelopt", w4a16_only: bool = False) -> Path:
        plain = root / style
        if not plain.exists():
            write_random_model(plain, style, num_experts=NUM_EXPERTS)
        if fmt is None:
            return plain
        out = root / f"{style}-{fmt}-{w4a16_only}"
        if not out.exists():
            scales = dict.fromkeys(expert_linears(plain), INPUT_SCALE)  # no calibration: nothing is served here
            quantize_checkpoint(plain, out, fmt, w4a16_only=w4a16_only, input_scales=None if w4a16_only else scales)
        return out

    return get


@pytest.fixture
def writable(checkpoint, tmp_path: Path) -> Path:
    """A ModelOpt checkpoint with one safetensors file, to be broken by hand."""
    return damage(checkpoint(), tmp_path / "copy", "zero_input_scale")


def tensor_file(path: Path) -> Path:
    (file,) = path.glob("*.safetensors")
    return file


def expert_linears(plain: Path) -> list[str]:
    names = load_file(tensor_file(plain))
    return [name.removesuffix(".weight") for name in names if ".experts." in name and name.endswith("_proj.weight")]


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("style", MODEL_STYLES)
def test_a_whole_checkpoint(style: str, fmt: str, checkpoint) -> None:
    path = checkpoint(style, fmt)
    shared = any(".shared_experts." in name for name in load_file(tensor_file(path)))
    assert shared == (style != "qwen3_moe")
    facts = CheckpointFacts(path, fmt, NUM_EXPERTS, has_input_scales=True, has_plain_shared_experts=shared)
    assert inspect_checkpoint(path) == facts
    assert inspect_checkpoint(str(path)) == inspect_checkpoint(path)


@pytest.mark.parametrize("style", MODEL_STYLES)
def test_a_plain_checkpoint_is_not_nvfp4(style: str, checkpoint) -> None:
    path = checkpoint(style, None)
    assert inspect_checkpoint(path) == CheckpointFacts(path, None, NUM_EXPERTS)


def test_packed_shared_experts_are_not_plain(checkpoint, tmp_path: Path) -> None:
    path = damage(checkpoint("glm4_moe"), tmp_path / "packed", "zero_input_scale")
    tensors = load_file(tensor_file(path))
    packed = {name: tensor.to(torch.uint8) for name, tensor in tensors.items() if ".shared_experts." in name}
    assert inspect_checkpoint(path).has_plain_shared_experts
    save_file(tensors | packed, tensor_file(path))
    assert not inspect_checkpoint(path).has_plain_shared_experts


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("kind", DAMAGE_KINDS)
def test_a_damaged_tensor_is_named(kind: str, fmt: str, checkpoint, tmp_path: Path) -> None:
    style = "qwen3_moe"
    module = sorted(expert_linears(checkpoint(style, None)))[-1]
    facts = inspect_checkpoint(damage(checkpoint(style, fmt), tmp_path / kind, kind, module=module))
    of_inputs = kind.endswith("_input_scale")
    (problem,) = facts.input_problems if of_inputs else facts.weight_problems
    assert not (facts.weight_problems if of_inputs else facts.input_problems)
    assert facts.has_input_scales is not of_inputs
    assert facts.nvfp4_format == fmt
    how, _, role = kind.partition("_")
    said = {"missing": "is missing", "zero": "is 0;", "nan": "is nan;", "inf": "is inf;", "mxfp4": "(MXFP4)"}[how]
    tensor = NAMES[fmt].get(role, "weight_scale")
    assert problem.found.startswith(f"{module}.{tensor} is ")
    assert said in problem.found
    assert problem.fix


@pytest.mark.parametrize("fmt", FORMATS)
def test_weight_only_checkpoints_have_no_input_scales(fmt: str, checkpoint) -> None:
    facts = inspect_checkpoint(checkpoint("qwen3_moe", fmt, w4a16_only=True))
    assert facts.nvfp4_format == fmt
    assert not facts.has_input_scales
    assert not facts.weight_problems
    assert "input" in facts.input_problems[0].found
    assert "--sm120-moe-numerics w4a16" in facts.input_problems[0].fix


def test_thousands_of_problems_are_shortened(checkpoint) -> None:
    path = checkpoint("qwen3_moe", "modelopt", w4a16_only=True)
    *listed, rest = inspect_checkpoint(path).input_problems
    count = len(expert_linears(checkpoint("qwen3_moe", None)))
    assert len(listed) == 3
    assert all(problem.found.endswith("input_scale is missing") for problem in listed)
    assert rest.found == f"and {count - 3} more like these"


def test_the_older_config_file_is_enough(writable: Path, checkpoint) -> None:
    config = json.loads((writable / "config.json").read_text())
    del config["quantization_config"]
    (writable / "config.json").write_text(json.dumps(config))
    assert inspect_checkpoint(writable).nvfp4_format == "modelopt"
    (writable / "hf_quant_config.json").unlink()
    assert inspect_checkpoint(writable).nvfp4_format is None


def test_a_model_inside_a_multimodal_config(writable: Path) -> None:
    config = json.loads((writable / "config.json").read_text())
    (writable / "config.json").write_text(json.dumps({"text_config": config}))
    facts = inspect_checkpoint(writable)
    assert (facts.nvfp4_format, facts.num_experts) == ("modelopt", NUM_EXPERTS)


def test_declared_nvfp4_without_packed_experts_is_not_nvfp4(writable: Path) -> None:
    """Attention may be the only quantised part; a BF16 expert weight is not a fault."""
    tensors = load_file(tensor_file(writable))
    kept = {name: tensor for name, tensor in tensors.items() if tensor.dtype != torch.uint8}
    save_file(kept, tensor_file(writable))
    assert inspect_checkpoint(writable) == CheckpointFacts(writable, None, NUM_EXPERTS)


def test_a_global_scale_of_another_type_is_a_problem(writable: Path) -> None:
    tensors = load_file(tensor_file(writable))
    name = next(name for name in sorted(tensors) if name.endswith("weight_scale_2"))
    save_file(tensors | {name: tensors[name].bfloat16()}, tensor_file(writable))
    (problem,) = inspect_checkpoint(writable).weight_problems
    assert problem.found == f"{name} is BF16, not F32"


def test_one_block_scale_for_a_whole_weight_is_a_problem(writable: Path) -> None:
    tensors = load_file(tensor_file(writable))
    name = next(name for name in sorted(tensors) if name.endswith("_proj.weight_scale"))
    save_file(tensors | {name: tensors[name].flatten()[0].clone()}, tensor_file(writable))
    (problem,) = inspect_checkpoint(writable).weight_problems
    assert problem.found == f"{name} is F8_E4M3 with 128 elements a scale (not NVFP4), declared NVFP4"


def test_not_a_local_checkpoint(tmp_path: Path) -> None:
    assert inspect_checkpoint(tmp_path) is None
    assert inspect_checkpoint(tmp_path / "missing") is None
    assert inspect_checkpoint("nvidia/Qwen3-30B-A3B-NVFP4") is None


def _entry(**changes: object) -> bytes:
    entry = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]} | changes
    header = json.dumps({"t": {name: value for name, value in entry.items() if value is not None}}).encode()
    return struct.pack("<Q", len(header)) + header + bytes(4)


def test_a_safetensors_file_with_one_tensor_is_whole(writable: Path) -> None:
    """The file that the damaged ones below are made of."""
    tensor_file(writable).write_bytes(_entry())
    assert inspect_checkpoint(writable).nvfp4_format is None


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"1234",
        b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n",
        struct.pack("<Q", 100) + b'{"t": {',
        struct.pack("<Q", 4) + b"\xff\xfe\x00\x01",
        struct.pack("<Q", 2) + b"[]",
        struct.pack("<Q", 7) + b'{"t":0}',
        _entry(shape=None),
        _entry(data_offsets=[0]),
        _entry(data_offsets=[0, 5]),
    ],
    ids=["empty", "short", "lfs", "cut", "binary", "list", "no entry", "no shape", "one offset", "beyond the end"],
)
def test_a_damaged_safetensors_file_is_named(content: bytes, writable: Path) -> None:
    tensor_file(writable).write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        inspect_checkpoint(writable)
    assert str(tensor_file(writable)) in caught.value.found
    assert caught.value.fix


def test_a_download_that_was_cut_off_is_named(writable: Path) -> None:
    """The header is whole; the tensors are not."""
    file = tensor_file(writable)
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ConfigError, match="ends at byte"):
        inspect_checkpoint(writable)


@pytest.mark.parametrize("name", ["config.json", "hf_quant_config.json"])
@pytest.mark.parametrize("content", [b'{"num_experts": ', b"[]", b"\xff\xff"])
def test_a_damaged_config_is_named(name: str, content: bytes, writable: Path) -> None:
    (writable / name).write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        inspect_checkpoint(writable)
    assert str(writable / name) in caught.value.found
