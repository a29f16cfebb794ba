"""A sharded checkpoint's index: whether it is whole, and whether it has as many bytes as its config gives."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_sm120.errors import ConfigError
from sglang_sm120.plan import weights
from sglang_sm120.plan.gpus import GIB
from sglang_sm120.plan.shapes_types import ModelShape

INDEX = "model.safetensors.index.json"

CLOSE = 0.1
"""Of the index's bytes: what padding, copies and tensors that SGLang does not keep may add up to."""


@dataclass(frozen=True)
class Index:
    """tensors, shards: names of tensors and of files. total_bytes: of all tensors, None where it is not said."""

    tensors: tuple[str, ...]
    shards: tuple[str, ...]
    total_bytes: int | None


def read_index(folder: Path) -> Index | None:
    """The index of a folder; None if there is none.

    Raises:
        ConfigError: it is truncated, names no tensors, or has sizes that no checkpoint has.
    """
    file = folder / INDEX
    read = read_json(file)
    if read is None:
        return None
    names, metadata = read.get("weight_map"), read.get("metadata")
    if not isinstance(names, dict) or not names:
        raise _damaged(f"{file} has no weight_map")
    odd = next((name for name, shard in names.items() if not isinstance(shard, str)), None)
    if odd is not None:
        raise _damaged(f"{file} has {names[odd]!r} as the file of {odd}")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    if total is not None and (isinstance(total, bool) or not isinstance(total, int | float) or not 0 < total < 2**60):
        raise _damaged(f"{file} has total_size = {total!r}")
    return Index(tuple(names), tuple(dict.fromkeys(names.values())), None if total is None else int(total))


def index_notes(index: Index, shape: ModelShape, folder: Path) -> Iterator[str]:
    """What in a checkpoint's index does not go with its config or its folder, in sentences.

    Args:
        index: what `read_index` read.
        shape: what the config says.
        folder: where both are. A folder without any of the files is one to plan from, not an incomplete one.
    """
    missing = [shard for shard in index.shards if not (folder / shard).is_file()]
    if missing and len(missing) < len(index.shards):
        of = f"{len(missing)} of {len(index.shards)} files of the index"
        yield f"{of} are not in the folder, {missing[0]} first: the checkpoint is incomplete."
    counted = checkpoint_bytes(shape)
    served_in_other_bytes = any("dtype" in said for said in shape.unknown)
    if index.total_bytes is None or served_in_other_bytes or abs(counted / index.total_bytes - 1) <= CLOSE:
        return
    yield (
        f"The checkpoint's index has {index.total_bytes / GIB:.1f} GiB of tensors, and its config gives "
        f"{counted / GIB:.1f}: the weights counted here are off by as much."
    )


def checkpoint_bytes(shape: ModelShape) -> int:
    """All weights, undivided, without the copies that SGLang makes."""
    whole = weights.Widths(tp=1, attention=1, ep=1)
    held = weights.stage_weights(shape, whole, 0, shape.num_layers)
    return sum(held.values()) - held[weights.ABSORBED] + weights.mtp_bytes(shape, whole)


def read_json(file: Path) -> dict[str, Any] | None:
    """A JSON file's object; None if it is not there.

    Raises:
        ConfigError: it cannot be read, is truncated or is not an object.
    """
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(
            f"{file} cannot be read ({error})", "a JSON file", "see what it is, and who may read it"
        ) from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file} is damaged ({error})", "a complete JSON file", "download it again") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{file} is not an object", "a JSON object", "download it again")
    return value


def _damaged(found: str) -> ConfigError:
    return ConfigError(found, "the index of a sharded checkpoint", "download it again")
