"""What an NVFP4 mixture-of-experts checkpoint on disk is, read from its config and its safetensors headers alone.

Standard library only, so that a damaged checkpoint is refused before anything heavy is imported or any weight is read.
"""

from __future__ import annotations

import functools
import json
import math
import mmap
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sglang_sm120.errors import ConfigError

GROUP_SIZE = 16
"""Elements per e4m3 scale in NVFP4. MXFP4 has 32 and e8m0 scales."""

_EXPERT_WEIGHT = re.compile(r"^(?P<linear>.*\.experts\.\d+\.[^.]+)\.(?P<leaf>weight|weight_packed)$")
_SHARED_EXPERT_WEIGHT = re.compile(r"\.shared_experts?\.[^.]+\.weight$")
_MAX_LISTED = 3
_EXPERTS_KEYS = ("num_experts", "n_routed_experts", "num_local_experts")


@dataclass(frozen=True)
class _Layout:
    """The tensor names that a format puts beside each packed expert weight."""

    weight: str
    block_scale: str
    global_scale: str
    input_scale: str


_LAYOUTS = {
    "modelopt": _Layout("weight", "weight_scale", "weight_scale_2", "input_scale"),
    "compressed-tensors": _Layout("weight_packed", "weight_scale", "weight_global_scale", "input_global_scale"),
}


@dataclass(frozen=True)
class Problem:
    """One fault of a checkpoint: what was found, how to put it right, and whether a tensor is just not there."""

    found: str
    fix: str
    missing: bool = False


@dataclass(frozen=True)
class CheckpointFacts:
    """What the files say.

    nvfp4_format: "modelopt", "compressed-tensors", or None if the routed experts are not NVFP4.
    num_experts: routed experts of a layer, None if the config does not name them.
    has_input_scales: every expert weight has an activation scale that is finite and above zero.
    has_plain_shared_experts: there are shared experts, and they are not NVFP4 as the routed ones are.
    weight_problems: faults that make the weights unusable. input_problems: faults of the activation scales, which
    only W4A4 needs.
    """

    path: Path
    nvfp4_format: str | None = None
    num_experts: int | None = None
    has_input_scales: bool = False
    has_plain_shared_experts: bool = False
    weight_problems: tuple[Problem, ...] = ()
    input_problems: tuple[Problem, ...] = ()


@dataclass
class _Findings:
    weight: list[Problem] = field(default_factory=list)
    inputs: list[Problem] = field(default_factory=list)


def inspect_checkpoint(model_path: str | Path) -> CheckpointFacts | None:
    """Read a local checkpoint's config and headers; None if `model_path` is not a local folder with a config.json.

    Raises: ConfigError for a file that is truncated or not what its name says.
    """
    path = Path(model_path)
    config = _read_json(path / "config.json")
    if config is None:
        return None
    text_config = _text_config(config)
    num_experts = next(
        (c[key] for c in (config, text_config) for key in _EXPERTS_KEYS if isinstance(c.get(key), int)), None
    )
    declared = _declared_format(config, _read_json(path / "hf_quant_config.json"))
    if declared is None:
        return CheckpointFacts(path, None, num_experts)
    tensors = dict(_tensors(path))
    layout = _LAYOUTS[declared]
    linears = [
        match["linear"]
        for name, entry in tensors.items()
        if (match := _EXPERT_WEIGHT.match(name)) and match["leaf"] == layout.weight and entry.dtype == "U8"
    ]
    if not linears:
        return CheckpointFacts(path, None, num_experts)
    findings = _Findings()
    try:
        for linear in linears:
            _check_linear(linear, tensors, layout, findings)
    finally:
        _mapped.cache_clear()
    return CheckpointFacts(
        path,
        declared,
        num_experts,
        has_input_scales=not findings.inputs,
        has_plain_shared_experts=any(
            entry.dtype != "U8" for name, entry in tensors.items() if _SHARED_EXPERT_WEIGHT.search(name)
        ),
        weight_problems=_shorten(findings.weight),
        input_problems=_shorten(findings.inputs),
    )


@dataclass(frozen=True)
class RoutedExperts:
    """The routed experts of one layer over all ranks, as config.json has them.

    intermediate_size: of one expert, and of one half where it is gated. activation: None if the config names none.
    """

    num_experts: int
    top_k: int
    hidden_size: int
    intermediate_size: int
    activation: str | None


def routed_experts(model_path: str | Path) -> RoutedExperts:
    """Read the sizes of a model's MoE layers from config.json, by the names of any of the families that have them.

    Raises: ConfigError: the file is missing or damaged, or does not describe routed experts.
    """
    file = Path(model_path) / "config.json"
    whole = _read_json(file)
    if whole is None:
        raise ConfigError(f"{file} cannot be read", "a checkpoint's folder", "name the folder that config.json is in")
    config = next((c for c in (whole, _text_config(whole)) if any(key in c for key in _EXPERTS_KEYS)), {})
    # Where experts have no size of their own (Mixtral), intermediate_size is theirs. Elsewhere it is a dense layer's.
    own_size = ("moe_intermediate_size", *(("intermediate_size",) if "num_local_experts" in config else ()))

    def size(*keys: str) -> int:
        key = next((key for key in keys if config.get(key) is not None), None)
        value = None if key is None else config[key]
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            found = f"has no {' or '.join(keys)}" if key is None else f"has {key} = {value!r}"
            raise ConfigError(
                f"{file} {found}", "a mixture-of-experts model's sizes", "give the layer as four numbers E,k,H,I"
            )
        return value

    activation = config.get("hidden_act") or config.get("hidden_activation") or config.get("mlp_hidden_act")
    return RoutedExperts(
        num_experts=size(*_EXPERTS_KEYS),
        top_k=size("num_experts_per_tok"),
        hidden_size=size("hidden_size"),
        intermediate_size=size(*own_size),
        activation=None if activation is None else str(activation),
    )


def _text_config(config: dict[str, Any]) -> dict[str, Any]:
    """Where a model that takes more than text keeps its language model's values."""
    nested = config.get("text_config")
    return nested if isinstance(nested, dict) else {}


def _declared_format(config: dict[str, Any], hf_quant: dict[str, Any] | None) -> str | None:
    """The NVFP4 format that the config declares, or None."""
    quant = config.get("quantization_config") or _text_config(config).get("quantization_config") or {}
    if quant.get("quant_method") == "compressed-tensors":
        return "compressed-tensors" if "nvfp4" in str(quant.get("format", "")) else None
    legacy = (hf_quant or {}).get("quantization") or {}
    algo = quant.get("quant_algo") or legacy.get("quant_algo") or ""
    return "modelopt" if "NVFP4" in str(algo) or str(algo).upper() == "MIXED_PRECISION" else None


@dataclass(frozen=True)
class _Tensor:
    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int

    def scalars(self) -> tuple[float, ...]:
        """The values of a small float32 tensor."""
        count = math.prod(self.shape)
        return struct.unpack_from(f"<{count}f", _mapped(self.file), self.offset)


@functools.lru_cache(maxsize=2)
def _mapped(file: Path) -> mmap.mmap:
    """A file's bytes. Kept, since a big model has some hundred thousand scalars in few files."""
    with file.open("rb") as stream:
        return mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)


def _tensors(path: Path) -> Iterator[tuple[str, _Tensor]]:
    for file in sorted(path.glob("*.safetensors")):
        size = file.stat().st_size
        try:
            with file.open("rb") as stream:
                (length,) = struct.unpack("<Q", stream.read(8))
                header = json.loads(stream.read(min(length, size)))
            header.pop("__metadata__", None)
            for name, entry in header.items():
                start, end = (8 + length + offset for offset in entry["data_offsets"])
                if end > size:
                    raise ValueError(f"{name} ends at byte {end} of {size}")
                yield name, _Tensor(file, entry["dtype"], tuple(entry["shape"]), start)
        except (struct.error, ValueError, LookupError, TypeError, AttributeError) as error:
            raise _unreadable(file, error) from error


def _unreadable(file: Path, error: Exception) -> ConfigError:
    return ConfigError(f"{file} is damaged ({error})", "a complete file", "download or export it again")


def _check_linear(linear: str, tensors: dict[str, _Tensor], layout: _Layout, findings: _Findings) -> None:
    weight = tensors[f"{linear}.{layout.weight}"]
    name = f"{linear}.{layout.block_scale}"
    block = tensors.get(name)
    packed, scales = (t.shape[-1] if t and t.shape else 1 for t in (weight, block))
    if block is None:
        findings.weight.append(Problem(f"{name} is missing", "export the checkpoint again"))
    elif block.dtype != "F8_E4M3" or scales * GROUP_SIZE != packed * 2:
        group = packed * 2 // max(scales, 1)
        kind = "MXFP4" if group == 32 else "not NVFP4"
        findings.weight.append(
            Problem(
                f"{name} is {block.dtype} with {group} elements a scale ({kind}), declared NVFP4",
                "serve it with the quantization that it really has, or export it as NVFP4",
            )
        )
    _check_scalar(f"{linear}.{layout.global_scale}", tensors, findings.weight, "export the checkpoint again")
    _check_scalar(
        f"{linear}.{layout.input_scale}", tensors, findings.inputs,
        "calibrate the checkpoint's activations again, or pass --sm120-moe-numerics w4a16",
    )  # fmt: skip


def _check_scalar(name: str, tensors: dict[str, _Tensor], problems: list[Problem], fix: str) -> None:
    tensor = tensors.get(name)
    if tensor is None:
        problems.append(Problem(f"{name} is missing", fix, missing=True))
        return
    if tensor.dtype != "F32":
        problems.append(Problem(f"{name} is {tensor.dtype}, not F32", fix))
        return
    bad = [value for value in tensor.scalars() if not (math.isfinite(value) and value > 0)]
    if bad:
        problems.append(Problem(f"{name} is {bad[0]:g}; a global scale is finite and above zero", fix))


def _shorten(problems: list[Problem]) -> tuple[Problem, ...]:
    """The first few: a checkpoint that lacks one kind of tensor lacks thousands."""
    if len(problems) <= _MAX_LISTED:
        return tuple(problems)
    rest = Problem(
        f"and {len(problems) - _MAX_LISTED} more like these", problems[0].fix, all(p.missing for p in problems)
    )
    return (*problems[:_MAX_LISTED], rest)


def _read_json(file: Path) -> dict[str, Any] | None:
    try:
        with file.open(encoding="utf-8") as stream:
            value = json.load(stream)
    except OSError:
        return None
    except ValueError as error:
        raise _unreadable(file, error) from error
    if not isinstance(value, dict):
        raise _unreadable(file, TypeError("not an object"))
    return value
