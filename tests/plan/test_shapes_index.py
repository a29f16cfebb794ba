"""A checkpoint's index against its config and its folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sglang_sm120.errors import ConfigError
from sglang_sm120.plan import catalogue
from sglang_sm120.plan.shapes import read_shape
from sglang_sm120.plan.shapes_index import INDEX, checkpoint_bytes

MODEL = "qwen3-30b-a3b"
SHARDS = {"model.embed_tokens.weight": "model-1.safetensors", "lm_head.weight": "model-2.safetensors"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(catalogue.config_of(MODEL)))
    return tmp_path


def write(folder: Path, index: Any) -> None:
    (folder / INDEX).write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("index", "said"),
    [
        ({"weight_map": {}}, "no weight_map"),
        ({"weight_map": []}, "no weight_map"),
        ({"weight_map": {"a": 5}}, "5 as the file of a"),
        ({"metadata": {"total_size": -5}, "weight_map": SHARDS}, "total_size = -5"),
        ({"metadata": {"total_size": 0}, "weight_map": SHARDS}, "total_size = 0"),
        ({"metadata": {"total_size": 1e30}, "weight_map": SHARDS}, "total_size = 1e+30"),
        ({"metadata": {"total_size": float("nan")}, "weight_map": SHARDS}, "total_size = nan"),
        ({"metadata": {"total_size": "61 GB"}, "weight_map": SHARDS}, "total_size = '61 GB'"),
    ],
)
def test_an_index_that_no_checkpoint_has_is_refused(folder: Path, index: Any, said: str) -> None:
    write(folder, index)
    with pytest.raises(ConfigError) as caught:
        read_shape(str(folder))
    assert said in caught.value.found
    assert INDEX in caught.value.found


@pytest.mark.parametrize("file", ["config.json", "hf_quant_config.json", INDEX])
def test_a_file_that_is_there_and_cannot_be_read_is_not_passed_over(folder: Path, file: str) -> None:
    (folder / file).unlink(missing_ok=True)
    (folder / file).mkdir()
    with pytest.raises(ConfigError) as caught:
        read_shape(str(folder))
    assert f"{file} cannot be read" in caught.value.found


@pytest.mark.parametrize("metadata", [None, [], {}, {"total_size": None}])
def test_an_index_may_say_no_size(folder: Path, metadata: Any) -> None:
    write(folder, {"metadata": metadata, "weight_map": SHARDS})
    assert read_shape(str(folder)).unknown == ()


def test_files_that_are_not_there_are_named_unless_none_is(folder: Path) -> None:
    write(folder, {"weight_map": SHARDS})
    assert read_shape(str(folder)).unknown == (), "a config and an index, to plan from"
    (folder / "model-1.safetensors").touch()
    (note,) = read_shape(str(folder)).unknown
    assert note.startswith("1 of 2 files of the index are not in the folder, model-2.safetensors first")
    (folder / "model-2.safetensors").touch()
    assert read_shape(str(folder)).unknown == ()


@pytest.mark.parametrize("share", [0.3, 0.8, 1.2, 3.0])
def test_an_index_of_another_size_than_its_config_gives_says_so(folder: Path, share: float) -> None:
    counted = checkpoint_bytes(read_shape(MODEL))
    write(folder, {"metadata": {"total_size": counted * share}, "weight_map": SHARDS})
    (note,) = read_shape(str(folder)).unknown
    assert f"its config gives {counted / 2**30:.1f}" in note
    write(folder, {"metadata": {"total_size": int(counted * 1.05)}, "weight_map": SHARDS})
    assert read_shape(str(folder)).unknown == ()


@pytest.mark.parametrize(
    ("model", "total"),
    [("qwen3-30b-a3b", 61_064_245_248), ("kimi-k2", 1_029_173_256_720)],
)
def test_models_have_the_bytes_that_their_public_index_says(model: str, total: int) -> None:
    assert checkpoint_bytes(read_shape(model)) == pytest.approx(total, rel=0.001)
