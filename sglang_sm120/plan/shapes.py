"""A model's sizes: from a checkpoint's files or from the catalogue."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sglang_sm120.errors import ConfigError
from sglang_sm120.plan.catalogue import find
from sglang_sm120.plan.shapes_config import shape_of
from sglang_sm120.plan.shapes_types import Attention, LinearAttention, ModelShape, Moe, Quantization

__all__ = ["Attention", "LinearAttention", "ModelShape", "Moe", "Quantization", "read_shape"]


def read_shape(model: str) -> ModelShape:
    """Read a model's sizes.

    Args:
        model: a checkpoint's folder, its config.json, or a name of the catalogue.

    Raises:
        ConfigError: no config, a damaged one, numbers that no model has, or a name that is not in the catalogue.
    """
    return _read_files(model) or find(model)


def _read_files(model: str) -> ModelShape | None:
    """The shape of a folder or a config.json; None if `model` names neither.

    Raises:
        ConfigError: a folder without a config, a damaged file, or numbers that no model has.
    """
    path = Path(model)
    try:
        if path.is_dir():
            folder = path
        elif path.is_file():
            folder = path.parent
        else:
            return None
    except (OSError, ValueError):
        return None
    file = folder / "config.json" if path.is_dir() else path
    config = _read_json(file)
    if config is None:
        raise ConfigError(
            f"{file} cannot be read",
            "a checkpoint's folder with its config.json",
            "download the checkpoint's config.json",
        )
    index = _read_json(folder / "model.safetensors.index.json")
    tensors = _tensor_names(folder / "model.safetensors.index.json", index)
    name = folder.resolve().name or str(folder)
    return shape_of(
        config, name=name, source=str(file), quant=_read_json(folder / "hf_quant_config.json"), tensors=tensors
    )


def _tensor_names(file: Path, index: dict[str, Any] | None) -> list[str]:
    if index is None:
        return []
    names = index.get("weight_map")
    if not isinstance(names, dict):
        raise ConfigError(f"{file} has no weight_map", "the index of a sharded checkpoint", "download it again")
    return [str(name) for name in names]


def _read_json(file: Path) -> dict[str, Any] | None:
    """A file's object; None if it cannot be opened.

    Raises:
        ConfigError: it is truncated or is not an object.
    """
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except OSError:
        return None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file} is damaged ({error})", "a complete JSON file", "download it again") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{file} is not an object", "a model's config.json", "download it again")
    return value
