"""Which classes of a model's tensors are quantised, and how, from its quantisation config."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from sglang_sm120.plan.shapes_types import Quantization

_TEXT_CONFIGS = ("text_config", "llm_config", "language_config")


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """Where a model that takes more than text has its language model's values; empty where it has no such place."""
    return next((config[key] for key in _TEXT_CONFIGS if isinstance(config.get(key), dict)), {})


def quantization_of(
    config: dict[str, Any], quant: dict[str, Any] | None, *, layers: int, has_moe: bool
) -> tuple[Quantization, list[str]]:
    """How each class of tensors is stored.

    Args:
        config: config.json.
        quant: hf_quant_config.json, which ModelOpt writes and which older checkpoints have alone.
        layers: without the MTP head.
        has_moe: whether there are experts.

    Returns:
        The classes, and sentences on what could not be told.
    """
    declared = config.get("quantization_config")
    if not isinstance(declared, dict):
        declared = text_config(config).get("quantization_config", declared)
    legacy = (quant or {}).get("quantization")
    if not isinstance(declared, dict):
        if not isinstance(legacy, dict):
            odd = declared is not None or legacy is not None
            return Quantization(), ["Its quantization_config is no object: all weights are counted in 2 bytes."] * odd
        declared = {"quant_method": "modelopt", "ignore": legacy.get("exclude_modules"), **legacy}
    method = str(declared.get("quant_method", "")).lower()
    readers: dict[str, Callable[[dict[str, Any], str], str | None]] = {
        "modelopt": _modelopt, "modelopt_fp4": _modelopt, "modelopt_mixed": _modelopt, "nvfp4": _modelopt,
        "compressed-tensors": _compressed, "fp8": _fp8, "mxfp4": _mxfp4,
    }  # fmt: skip
    if method not in readers:
        return Quantization(method=method), [
            f"Its quantisation ({method or 'unnamed'}) is not known here: all weights are counted in 2 bytes, which is "
            "too much."
        ]
    kinds: dict[str, str] = {}
    notes: list[str] = []
    for part, names in _names(layers, has_moe).items():
        found = [readers[method](declared, name) for name in names]  # a model has one of the names
        if _is_mixed(declared):  # which lists what is quantised: a name that is not there says nothing
            found = [kind for kind in found if kind] or [None]
        kinds[part] = "bf16" if None in found else str(found[0])
    if any(kind.startswith("?") for kind in kinds.values()):
        notes.append(
            f"Its quantisation ({method}) has parts that are neither NVFP4, MXFP4 nor FP8; they are counted in 2 "
            "bytes, which is too much."
        )
        kinds = {part: "bf16" if kind.startswith("?") else kind for part, kind in kinds.items()}
    return Quantization(method=_method(method, declared), **kinds), notes


def _names(layers: int, has_moe: bool) -> dict[str, tuple[str, ...]]:
    """Tensors that stand for their class, in the spellings that models have."""
    last, head = f"model.layers.{layers - 1}", f"model.layers.{layers}"
    return {
        "experts": (f"{last}.mlp.experts.0.gate_proj", f"{last}.mlp.experts")
        if has_moe
        else (f"{last}.mlp.gate_proj",),
        "shared_expert": (f"{last}.mlp.shared_experts.gate_proj", f"{last}.mlp.shared_expert.gate_proj"),
        "dense_mlp": ("model.layers.0.mlp.gate_proj", "model.layers.0.mlp.down_proj"),
        "attention": (f"{last}.self_attn.q_proj", f"{last}.self_attn.q_b_proj", f"{last}.self_attn.kv_b_proj"),
        "attention_out": (f"{last}.self_attn.o_proj",),
        "lm_head": ("lm_head",),
        "mtp": (f"{head}.mlp.experts.0.gate_proj", f"{head}.mlp.experts", "mtp.layers.0.mlp.experts.0.gate_proj"),
    }


def _method(method: str, declared: dict[str, Any]) -> str:
    if method.startswith("modelopt") or method == "nvfp4":
        algo = str(declared.get("quant_algo", "")).upper()
        return "modelopt_mixed" if _is_mixed(declared) else "modelopt_fp4" if "FP4" in algo else "modelopt_fp8"
    return method


def _modelopt(declared: dict[str, Any], name: str) -> str | None:
    algo = _mixed_algo(declared, name) if _is_mixed(declared) else str(declared.get("quant_algo", "")).upper()
    if algo is None or _excluded(name, declared.get("ignore") or declared.get("exclude_modules")):
        return None
    if algo in ("FP8_PB_WO", "FP8_BLOCK_SCALES"):
        return "fp8_block"
    return "nvfp4" if "NVFP4" in algo else "fp8" if algo.startswith("FP8") else f"?{algo}"


def _is_mixed(declared: dict[str, Any]) -> bool:
    return str(declared.get("quant_algo", "")).upper() == "MIXED_PRECISION"


def _mixed_algo(declared: dict[str, Any], name: str) -> str | None:
    """What MIXED_PRECISION lists for a module, or for one inside it; None if neither is listed."""
    layers = declared.get("quantized_layers")
    if not isinstance(layers, dict):
        return None
    spelt = _spellings(name)
    inside = tuple(f"{one}." for one in spelt)
    listed = next((layers[one] for one in spelt if one in layers), None)
    listed = listed or next((info for key, info in layers.items() if key.startswith(inside)), None)
    return str(listed.get("quant_algo", "")).upper() if isinstance(listed, dict) else None


def _compressed(declared: dict[str, Any], name: str) -> str | None:
    groups = declared.get("config_groups")
    if _excluded(name, declared.get("ignore")) or not isinstance(groups, dict):
        return None
    for group in groups.values():
        targets = group.get("targets") if isinstance(group, dict) else None
        if not isinstance(targets, list) or not (
            ("Linear" in targets and name != "lm_head") or _excluded(name, targets)
        ):
            continue
        weights = group.get("weights")
        weights = weights if isinstance(weights, dict) else {}
        bits, kind, size = weights.get("num_bits"), weights.get("type"), weights.get("group_size")
        if bits == 4 and kind == "float" and size in (16, 32):
            return "nvfp4" if size == 16 else "mxfp4"
        elif bits == 8 and kind == "float":
            return "fp8_block" if weights.get("strategy") == "block" else "fp8"
        else:
            return f"?{bits}{kind}"
    return None


def _fp8(declared: dict[str, Any], name: str) -> str | None:
    if name == "lm_head" or _excluded(name, declared.get("modules_to_not_convert") or declared.get("ignored_layers")):
        return None
    return "fp8_block" if declared.get("weight_block_size") else "fp8"


def _mxfp4(declared: dict[str, Any], name: str) -> str | None:
    """gpt-oss: experts only."""
    if ".experts" in name and not _excluded(name, declared.get("modules_to_not_convert")):
        return "mxfp4"
    return None


def _spellings(name: str) -> tuple[str, ...]:
    """A module's name, and where models that take more than text have it."""
    return name, f"language_model.{name}", name.replace("model.", "model.language_model.", 1)


def _excluded(name: str, patterns: object) -> bool:
    """Whether a module is left out, as SGLang reads the list.

    By its name or a parent's, * for anything; by one word of its name, such as `self_attn`; by an expression behind
    `re:`.
    """
    if not isinstance(patterns, list):
        return False
    for pattern in patterns:
        if not isinstance(pattern, str):
            continue
        is_expression = pattern.startswith("re:")
        expression = pattern[3:] if is_expression else re.escape(pattern).replace(r"\*", ".*") + r"(\..*)?$"
        words = () if is_expression else name.split(".")
        try:
            if any(re.match(expression, one) for one in (*_spellings(name), *words)):
                return True
        except re.error:
            continue
    return False
