"""A model's sizes: from a checkpoint's files or from the catalogue."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from sglang_sm120.errors import ConfigError
from sglang_sm120.plan.catalogue import find
from sglang_sm120.plan.shapes_config import shape_of
from sglang_sm120.plan.shapes_index import index_notes, read_index, read_json
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
    config = read_json(file)
    if config is None:
        raise ConfigError(
            f"{file} cannot be read",
            "a checkpoint's folder with its config.json",
            "download the checkpoint's config.json",
        )
    index = read_index(folder)
    quant = read_json(folder / "hf_quant_config.json")
    name = folder.resolve().name or str(folder)
    shape = shape_of(config, name=name, source=str(file), quant=quant, tensors=index.tensors if index else ())
    return shape if index is None else replace(shape, unknown=(*shape.unknown, *index_notes(index, shape, folder)))
