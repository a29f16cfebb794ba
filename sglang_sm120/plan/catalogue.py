"""Models by name: the shapes of public configs, shipped in models.json, each with its source in words."""

from __future__ import annotations

import difflib
import functools
import json
from pathlib import Path
from typing import Any

from sglang_sm120.errors import ConfigError
from sglang_sm120.plan.shapes_config import shape_of
from sglang_sm120.plan.shapes_types import ModelShape

_FILE = Path(__file__).with_name("models.json")
_CLOSE = 4


def names() -> list[str]:
    """Every name that `find` takes, in the file's order."""
    return list(_entries())


def find(name: str) -> ModelShape:
    """The shape of a name, in any case.

    Raises:
        ConfigError: it is not there; near misses are named.
    """
    entries = _entries()
    key = name.strip().lower()
    if key not in entries:
        near = difflib.get_close_matches(key, entries, n=_CLOSE, cutoff=0.5)
        raise ConfigError(
            f"{name!r} is neither a folder, nor a file, nor a model of the catalogue",
            "a checkpoint's folder, its config.json, or a name of the catalogue",
            f"did you mean {', '.join(near)}?" if near else "`sglang-sm120 plan --list` lists the names",
        )
    return _shape(key)


def config_of(name: str) -> dict[str, Any]:
    """The config of a name, as config.json has it, sizes only."""
    return dict(_entries()[name]["config"])


def entries() -> list[dict[str, Any]]:
    """name, architecture, layers, experts (0: none) and source of every model."""
    rows = []
    for name, entry in _entries().items():
        shape = _shape(name)
        rows.append(
            {
                "name": name,
                "architecture": shape.architecture,
                "layers": shape.num_layers,
                "experts": 0 if shape.moe is None else shape.moe.num_experts,
                "source": str(entry["source"]),
            }
        )
    return rows


@functools.cache
def _shape(name: str) -> ModelShape:
    entry = _entries()[name]
    return shape_of(entry["config"], name=name, source=f"the catalogue's {name}")


@functools.cache
def _entries() -> dict[str, dict[str, Any]]:
    """By name. A variant is its base's config with other keys; a null takes a key away."""
    with _FILE.open(encoding="utf-8") as stream:
        listed = json.load(stream)["models"]
    found: dict[str, dict[str, Any]] = {}
    for entry in listed:
        config = dict(found[entry["base"]]["config"]) if "base" in entry else {}
        config.update(entry["config"])
        config = {key: value for key, value in config.items() if value is not None}
        found[entry["name"]] = {"source": entry["source"], "config": config}
    return found
