"""Real checkpoints with NVFP4 experts, small enough for tests: written, damaged, and read back dequantised.

Two layouts, as NVIDIA ModelOpt and llm-compressor (compressed-tensors) export them; routed experts alone are NVFP4,
everything else stays as it is. For an expert's linear `P` with weight [N, K], s2 being the fp32 multiplier of
`kernels/quantization/nvfp4`:

    modelopt                                 compressed-tensors
    P.weight          uint8 [N, K/2]         P.weight_packed         uint8 [N, K/2]
    P.weight_scale    e4m3  [N, K/16]        P.weight_scale          e4m3  [N, K/16]
    P.weight_scale_2  fp32 [], s2            P.weight_global_scale   fp32 [1], 1 / s2
    P.input_scale     fp32 [], s2            P.input_global_scale    fp32 [1], 1 / s2
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from sglang_sm120.errors import ConfigError, ContractError
from sglang_sm120.kernels.quantization.nvfp4.api import (
    GROUP_SIZE,
    amax_global_scale,
    dequantize_nvfp4,
    quantize_nvfp4,
)
from sglang_sm120.testing.checkpoint_damage import DAMAGE_KINDS, damage
from sglang_sm120.testing.checkpoint_files import (
    EXPERT_LINEAR,
    FORMATS,
    INPUT_SCALES_FILE,
    SUFFIXES,
    convert_files,
    copy_side_files,
    need_format,
    new_directory,
    read_config,
    read_format,
    read_scale,
    read_tensor,
    routed_expert_modules,
    stored_scale,
    tensor_files,
    update_json,
    value_of_stored,
)
from sglang_sm120.testing.checkpoint_models import MODEL_STYLES, write_random_model
from sglang_sm120.testing.checkpoint_reference import (
    ReferenceModel,
    ReferenceOutput,
    StepScore,
    calibrate_input_scales,
    random_token_batches,
    reference_greedy,
    score_tokens,
)

__all__ = [
    "DAMAGE_KINDS",
    "FORMATS",
    "INPUT_SCALES_FILE",
    "MODEL_STYLES",
    "ReferenceModel",
    "ReferenceOutput",
    "StepScore",
    "calibrate_input_scales",
    "damage",
    "dequantize_checkpoint",
    "quantize_checkpoint",
    "random_token_batches",
    "reference_greedy",
    "routed_expert_modules",
    "score_tokens",
    "write_random_model",
]


def quantize_checkpoint(
    src: Path,
    dst: Path,
    fmt: str,
    *,
    input_scales: Mapping[str, float] | None = None,
    w4a16_only: bool = False,
    separate_gate_up_scales: bool = False,
) -> Path:
    """Write an NVFP4 copy of a plain checkpoint in which the routed experts' linears, and nothing else, are quantised.

        s2 = amax(W) / (6 * 448),  W ~ e2m1 * e4m3 * s2  in groups of 16 along K

    Args:
        src: plain checkpoint with weights `*.mlp.experts.<i>.{gate,up,down}_proj.weight`, floating [N, K], K a
            multiple of 16; one or several safetensors files.
        dst: directory to create; it must be missing or empty.
        fmt: "modelopt" or "compressed-tensors".
        input_scales: {expert linear's module name: s2 of its input}, as from `calibrate_input_scales`; default: those
            of random tokens.
        w4a16_only: declare the checkpoint weight-only and store no input scales.
        separate_gate_up_scales: give gate and up of an expert their own s2; by default they share the larger, as both
            exporters do.

    Returns:
        `dst`.

    Raises:
        ConfigError: `src` is quantised already, has no safetensors or no routed experts; or `dst` is in use.
        ContractError: `input_scales` lacks a linear; or a shape that NVFP4 cannot hold.
        UnsupportedError: an unknown `fmt`.
    """
    src, dst = Path(src), Path(dst)
    need_format(fmt)
    config = read_config(src)
    if "quantization_config" in config:
        raise ConfigError(f"{src} is quantised already", "a plain checkpoint", "start from the BF16 one")
    files = tensor_files(src)
    modules = routed_expert_modules(src)
    if not modules:
        raise ConfigError(f"{src} has no routed experts", "tensors *.mlp.experts.<i>.gate_proj.weight", "use a MoE")
    if w4a16_only:
        input_scales = None
    elif input_scales is None:
        input_scales = calibrate_input_scales(src, random_token_batches(config["vocab_size"]))
    stored_scales = _stored_weight_scales(files, modules, fmt, separate_gate_up_scales)

    def convert(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        module = name.removesuffix(".weight")
        if module not in stored_scales:
            yield name, tensor
            return
        suffixes = SUFFIXES[fmt]
        packed, block_scale = quantize_nvfp4(tensor.float(), value_of_stored(stored_scales[module], fmt))
        yield module + suffixes["packed"], packed
        yield module + suffixes["block_scale"], block_scale
        yield module + suffixes["weight_scale_2"], stored_scales[module]
        if input_scales is not None:
            if module not in input_scales:
                raise ContractError(f"input_scales lacks {module}", "one for each routed linear", "calibrate all")
            scale = torch.tensor(input_scales[module], dtype=torch.float32)
            yield module + suffixes["input_scale"], stored_scale(scale, fmt)

    with new_directory(dst) as directory:
        copy_side_files(src, directory)
        convert_files(files, directory, convert)
        _write_quantization_config(directory, config, fmt, w4a16_only)
    return dst


def dequantize_checkpoint(src: Path, dst: Path, dtype: torch.dtype = torch.float32) -> Path:
    """Write the plain checkpoint that an NVFP4 one stands for; AutoModelForCausalLM loads it.

    Experts become e2m1 * e4m3 * s2 (one fp32 rounding); all other floating tensors are widened to `dtype`, never
    narrowed. The input scales go to `INPUT_SCALES_FILE` as serving on CUTLASS reduces them: for modelopt the largest
    of the layer, for compressed-tensors the larger of each expert's gate and up.

    Args:
        src: from `quantize_checkpoint`, or any checkpoint in one of the two layouts with the same tensor names.
        dst: directory to create; it must be missing or empty.
        dtype: of the result.

    Returns:
        `dst`.

    Raises:
        ConfigError: a tensor is missing, has the wrong dtype or shape, or a scale is not finite and positive.
    """
    src, dst = Path(src), Path(dst)
    fmt = read_format(src)
    suffixes = SUFFIXES[fmt]
    files = tensor_files(src)
    scale_suffixes = tuple(suffix for role, suffix in suffixes.items() if role != "packed")
    input_scales: dict[str, float] = {}

    def convert(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        if name.endswith(scale_suffixes):
            return
        if not (name.endswith(suffixes["packed"]) and tensor.dtype == torch.uint8):
            yield name, tensor.to(torch.promote_types(tensor.dtype, dtype)) if tensor.is_floating_point() else tensor
            return
        module = name.removesuffix(suffixes["packed"])
        block_scale = read_tensor(files, module + suffixes["block_scale"])
        weight_scale_2 = read_scale(files, module + suffixes["weight_scale_2"], fmt)
        if module + suffixes["input_scale"] in files:
            input_scales[module] = float(read_scale(files, module + suffixes["input_scale"], fmt))
        try:
            weight = dequantize_nvfp4(tensor, block_scale, weight_scale_2)
        except ContractError as error:
            raise ConfigError(f"{module} in {src}: {error.found}", error.needed, error.fix) from error
        if not torch.isfinite(weight).all():
            raise ConfigError(f"{module} in {src} has NaN block scales", "finite values", "write the checkpoint again")
        yield f"{module}.weight", weight.to(dtype)

    with new_directory(dst) as directory:
        copy_side_files(src, directory)
        convert_files(files, directory, convert)
        dtype_name = str(dtype).removeprefix("torch.")
        update_json(directory / "config.json", quantization_config=None, torch_dtype=None, dtype=dtype_name)
        if input_scales:
            without = sorted(set(routed_expert_modules(src)) - set(input_scales))
            if without:
                raise ConfigError(f"{without[0]} in {src} has no input scale", "all or none", "write it again")
            update_json(directory / INPUT_SCALES_FILE, **_serving_input_scales(input_scales, fmt))
    return dst


def _stored_weight_scales(
    files: Mapping[str, Path], modules: Iterable[str], fmt: str, separate_gate_up: bool
) -> dict[str, torch.Tensor]:
    """The tensor that holds each linear's s2; quantisation uses the value that a reader gets back from it."""
    scales = {module: amax_global_scale(read_tensor(files, f"{module}.weight").float()) for module in modules}
    if not separate_gate_up:
        for module in [name for name in scales if name.endswith(".gate_proj")]:
            up = module.removesuffix("gate_proj") + "up_proj"
            scales[module] = scales[up] = torch.maximum(scales[module], scales[up])
    return {module: stored_scale(scale, fmt) for module, scale in scales.items()}


def _serving_input_scales(scales: Mapping[str, float], fmt: str) -> dict[str, dict[str, list[float]]]:
    """{experts module: {"w13": [scale of each expert], "w2": [...]}}, see `dequantize_checkpoint`."""
    layers: dict[str, dict[str, dict[int, float]]] = {}
    for module, scale in scales.items():
        match = EXPERT_LINEAR.fullmatch(module)
        if not match:
            raise ConfigError(f"NVFP4 linear {module}", "NVFP4 only in routed experts", "dequantise by other means")
        which = "w2" if match["projection"] == "down_proj" else "w13"
        experts = layers.setdefault(match["experts"], {"w13": {}, "w2": {}})[which]
        experts[int(match["index"])] = max(scale, experts.get(int(match["index"]), 0.0))
    return {
        layer: {
            which: [max(own.values()) if fmt == "modelopt" else own[i] for i in sorted(own)]
            for which, own in by_input.items()
        }
        for layer, by_input in layers.items()
    }


def _write_quantization_config(directory: Path, config: Mapping[str, Any], fmt: str, w4a16_only: bool) -> None:
    weights = {"num_bits": 4, "type": "float", "group_size": GROUP_SIZE}
    if fmt == "modelopt":
        ignore = _modelopt_ignore(config)
        algo = "W4A16_NVFP4" if w4a16_only else "NVFP4"
        group: dict[str, Any] = {"weights": {"dynamic": False, **weights}, "targets": ["Linear"]}
        if not w4a16_only:
            group["input_activations"] = {"dynamic": False, **weights}
        producer = {"name": "modelopt", "version": "sglang_sm120.testing"}
        flat = {"quant_method": "modelopt", "quant_algo": algo, "group_size": GROUP_SIZE, "ignore": ignore}
        flat |= {"config_groups": {"group_0": group}, "producer": producer}
        nested = {"quant_algo": algo, "kv_cache_quant_algo": None, "group_size": GROUP_SIZE, "exclude_modules": ignore}
        update_json(directory / "config.json", quantization_config=flat)
        update_json(directory / "hf_quant_config.json", producer=producer, quantization=nested)
        return
    weights |= {"strategy": "tensor_group", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "format": "nvfp4-pack-quantized",
        "weights": {"dynamic": False, "observer": "static_minmax", **weights},
        "input_activations": None if w4a16_only else {"dynamic": "local", "observer": "static_minmax", **weights},
        "output_activations": None,
    }
    quantization = {
        "quant_method": "compressed-tensors",
        "format": "nvfp4-pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": _compressed_tensors_ignore(config),
        "kv_cache_scheme": None,
    }
    update_json(directory / "config.json", quantization_config=quantization)


def _dense_layers(config: Mapping[str, Any]) -> range:
    return range(config.get("first_k_dense_replace") or 0)


def _modelopt_ignore(config: Mapping[str, Any]) -> list[str]:
    """Globs as ModelOpt writes them. A trailing * also covers the fused linears that SGLang makes of several."""
    dense = [f"model.layers.{i}.mlp*" for i in _dense_layers(config)]
    moe = [i for i in range(config["num_hidden_layers"]) if i not in _dense_layers(config)]
    attention = [f"model.layers.{i}.self_attn*" for i in range(config["num_hidden_layers"])]
    routers = [f"model.layers.{i}.mlp.gate" for i in moe]
    shared = [f"model.layers.{i}.mlp.shared_experts*" for i in moe if config.get("n_shared_experts")]
    return ["lm_head", "model.embed_tokens", *attention, *dense, *routers, *shared]


def _compressed_tensors_ignore(config: Mapping[str, Any]) -> list[str]:
    """Regular expressions, since SGLang asks about fused names (qkv_proj) for which not every model lists the parts."""
    dense = [rf"re:model\.layers\.{i}\.mlp\..*_proj$" for i in _dense_layers(config)]
    return ["lm_head", r"re:.*\.self_attn\..*", r"re:.*\.mlp\.gate$", r"re:.*\.mlp\.shared_experts\..*", *dense]
