"""Broken copies of NVFP4 checkpoints, for tests of how bad input is reported."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from sglang_sm120.errors import UnsupportedError
from sglang_sm120.kernels.quantization.nvfp4.api import dequantize_nvfp4
from sglang_sm120.testing.checkpoint_files import (
    SUFFIXES,
    convert_files,
    copy_side_files,
    new_directory,
    read_format,
    read_scale,
    read_tensor,
    routed_expert_modules,
    tensor_files,
)

DAMAGE_KINDS = (
    "missing_weight_scale",
    "missing_weight_scale_2",
    "missing_input_scale",
    "zero_weight_scale_2",
    "nan_weight_scale_2",
    "inf_weight_scale_2",
    "zero_input_scale",
    "nan_input_scale",
    "mxfp4_as_nvfp4",
)
_MXFP4_GROUP_SIZE = 32
_E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def damage(src: Path, dst: Path, kind: str, *, module: str | None = None) -> Path:
    """Write a copy of an NVFP4 checkpoint in which one tensor of one linear is broken.

    Args:
        src: from `quantize_checkpoint`.
        dst: directory to create; it must be missing or empty.
        kind: one of `DAMAGE_KINDS`. missing_*: the tensor is left out. zero_*, nan_*, inf_*: the stored value (for
            compressed-tensors that is the reciprocal). mxfp4_as_nvfp4: weight and block scales are MXFP4 (e8m0 as
            uint8, groups of 32), everything else still says NVFP4.
        module: linear to damage; default: `routed_expert_modules(src)[0]`.

    Returns:
        `dst`.

    Raises:
        UnsupportedError: an unknown kind.
        ConfigError: `src` is not NVFP4, or lacks the tensor.
    """
    src, dst = Path(src), Path(dst)
    if kind not in DAMAGE_KINDS:
        raise UnsupportedError(f"damage kind {kind!r}", f"one of {', '.join(DAMAGE_KINDS)}", "name one of them")
    fmt = read_format(src)
    module = module or routed_expert_modules(src)[0]
    tensors = {role: module + suffix for role, suffix in SUFFIXES[fmt].items()}
    files = tensor_files(src)
    replaced: dict[str, torch.Tensor | None]
    if kind == "mxfp4_as_nvfp4":
        packed, block_scale = (read_tensor(files, tensors[role]) for role in ("packed", "block_scale"))
        weight = dequantize_nvfp4(packed, block_scale, read_scale(files, tensors["weight_scale_2"], fmt))
        replaced = dict(zip((tensors["packed"], tensors["block_scale"]), _quantize_mxfp4(weight), strict=True))
    else:
        how, role = kind.split("_", 1)
        name = tensors["block_scale" if role == "weight_scale" else role]
        original = read_tensor(files, name)
        value = {"missing": None, "zero": 0.0, "nan": float("nan"), "inf": float("inf")}[how]
        replaced = {name: None if value is None else torch.full_like(original, value)}

    def convert(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        new = replaced.get(name, tensor)
        if new is not None:
            yield name, new

    with new_directory(dst) as directory:
        copy_side_files(src, directory, quantised=True)
        convert_files(files, directory, convert)
    return dst


def _quantize_mxfp4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """fp32 [N, K] -> packed uint8 [N, K/2], e8m0 as uint8 [N, K/32]: OCP MX, scale 2^(floor(log2 amax) - 2)."""
    blocks = weight.unflatten(-1, (-1, _MXFP4_GROUP_SIZE))
    exponent = blocks.abs().amax(-1).clamp_min(2.0**-120).log2().floor() - 2
    scaled = blocks / torch.exp2(exponent)[..., None]
    nearest = (scaled.abs()[..., None] - torch.tensor(_E2M1_VALUES)).abs().argmin(-1)
    codes = (nearest + 8 * scaled.signbit()).flatten(-2).to(torch.uint8)
    return codes[..., 0::2] | (codes[..., 1::2] << 4), (exponent + 127).to(torch.uint8)
