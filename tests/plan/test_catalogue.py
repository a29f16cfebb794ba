"""The shipped catalogue: every entry is read, has a source, and comes out at the size that it is known by."""

from __future__ import annotations

import re

import pytest

from sglang_sm120.plan import catalogue, weights
from sglang_sm120.plan.memory import Split
from sglang_sm120.plan.shapes import read_shape
from sglang_sm120.plan.shapes_config import KNOWN

# Parameters in billions, as each model is known by; MTP heads left out.
PARAMETERS = {
    "glm-5": 744, "glm-5.2": 744, "glm-4.5": 355, "glm-4.5-air": 106, "glm-4.6": 355, "glm-4.7": 355,
    "deepseek-v3": 671, "deepseek-v3.2": 671, "kimi-k2": 1026, "qwen3-30b-a3b": 30.5, "qwen3-235b-a22b": 235,
    "qwen3.5-397b-a17b": 397, "minimax-m2": 230, "gpt-oss-120b": 117, "gpt-oss-20b": 20.9,
}  # fmt: skip


@pytest.mark.parametrize("name", catalogue.names())
def test_every_entry_is_read_and_says_where_it_is_from(name: str) -> None:
    shape = read_shape(name.upper())
    assert shape.name == name
    assert shape.architecture in KNOWN
    row = next(row for row in catalogue.entries() if row["name"] == name)
    assert (row["layers"], row["architecture"]) == (shape.num_layers, shape.architecture)
    assert len(row["source"]) > 20
    assert not re.search(r"https?:|\.co\b|\.com\b", row["source"])
    assert not any("not known here" in one for one in shape.unknown)


@pytest.mark.parametrize(("name", "billions"), PARAMETERS.items())
def test_the_size_that_a_model_is_known_by(name: str, billions: float) -> None:
    """All weights of one GPU, counted in 16 bits whatever the checkpoint has, by two bytes each."""
    from dataclasses import replace

    from sglang_sm120.plan.shapes import Quantization

    shape = replace(read_shape(name), quantization=Quantization())
    parts = weights.stage_weights(shape, Split(1).widths, 0, shape.num_layers)
    parts.pop(weights.ABSORBED, 0)
    assert sum(parts.values()) / 2e9 == pytest.approx(billions, rel=0.02)


# Public NVFP4 checkpoints: bytes on disk by their cards. They say GB; MiniMax-M2.5's 126 can only be GiB, since its
# experts alone (62 x 256 x 3 x 3072 x 1536 elements of 9 / 16 byte) are 126.4 GB.
CHECKPOINTS = {
    "glm-5.1-nvfp4": 434e9, "minimax-m2.5-nvfp4": 126 * 1024**3, "kimi-k2.5-nvfp4": 595e9,
    "qwen3.5-397b-a17b-nvfp4": 233e9,
}  # fmt: skip


@pytest.mark.parametrize(("name", "size"), CHECKPOINTS.items())
def test_a_public_checkpoint_is_as_large_as_its_card_says(name: str, size: float) -> None:
    shape = read_shape(name)
    parts = weights.stage_weights(shape, Split(1).widths, 0, shape.num_layers)
    parts.pop(weights.ABSORBED, 0)
    assert sum(parts.values()) == pytest.approx(size, rel=0.03)


def test_names_are_unique_and_lower_case() -> None:
    names = catalogue.names()
    assert len(names) == len(set(names))
    assert all(name == name.lower() for name in names)


def test_what_the_issue_asks_for_is_there() -> None:
    for start in ("glm-4.5", "glm-4.7", "glm-5", "glm-5.1", "glm-5.2", "deepseek-v3.2", "kimi-k2", "qwen3-30b",
                  "qwen3-235b", "qwen3.5-397b", "minimax-m2", "gpt-oss"):  # fmt: skip
        assert any(name.startswith(start) for name in catalogue.names()), start
