"""Launches kernel.cu, on a GPU or as built for the host. No checks of arguments here; none is empty."""

from __future__ import annotations

import ctypes
import math
from pathlib import Path

import torch
from torch import Tensor

from sglang_sm120.kernels.cuda.availability import Modules
from sglang_sm120.kernels.quantization.nvfp4 import config
from sglang_sm120.kernels.quantization.nvfp4.config import GROUP_SIZE, SWIZZLE_COLS, SWIZZLE_ROWS, round_up

_SOURCE = Path(__file__).with_name("kernel.cu")
_TYPES = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}
_modules = Modules(_SOURCE, min_capability=config.MIN_CAPABILITY, name="NVFP4")

device_reason, ready = _modules.device_reason, _modules.ready


class _QuantizeArgs(ctypes.Structure):
    _fields_ = (
        ("x", ctypes.c_void_p),
        ("global_scale", ctypes.c_void_p),
        ("packed", ctypes.c_void_p),
        ("block_scale", ctypes.c_void_p),
        ("batch_stride", ctypes.c_int64),
        ("row_stride", ctypes.c_int64),
        ("global_scale_stride", ctypes.c_int64),
        ("rows", ctypes.c_int),
        ("groups", ctypes.c_int),
        ("swizzled", ctypes.c_int),
        ("log2_threads_along", ctypes.c_int),
        ("blocks_along", ctypes.c_int),
        ("blocks_down", ctypes.c_int),
        ("aligned", ctypes.c_int),
    )


class _DequantizeArgs(ctypes.Structure):
    _fields_ = (
        ("packed", ctypes.c_void_p),
        ("block_scale", ctypes.c_void_p),
        ("global_scale", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("packed_stride", ctypes.c_int64),
        ("block_scale_stride", ctypes.c_int64),
        ("global_scale_stride", ctypes.c_int64),
        ("rows", ctypes.c_int),
        ("groups", ctypes.c_int),
        ("log2_threads_along", ctypes.c_int),
        ("blocks_along", ctypes.c_int),
        ("aligned", ctypes.c_int),
    )


class _SwizzleArgs(ctypes.Structure):
    _fields_ = (
        ("plain", ctypes.c_void_p),
        ("swizzled", ctypes.c_void_p),
        ("batch_stride", ctypes.c_int64),
        ("row_stride", ctypes.c_int64),
        ("rows", ctypes.c_int),
        ("columns", ctypes.c_int),
        ("blocks_along", ctypes.c_int),
        ("blocks_down", ctypes.c_int),
        ("words", ctypes.c_int),
    )


def size_reason(rows: int, columns: int) -> str | None:
    """One sentence on why a matrix, or all rows of a batch of them, is too large for the kernels, or None."""
    if max(rows, columns) > config.MAX_SIDE:
        return f"{rows} rows of {columns} block scales: the kernels index {config.MAX_SIDE} of either at most"
    return None


def quantize_nvfp4(x: Tensor, global_scale: Tensor, *, swizzled: bool) -> tuple[Tensor, Tensor]:
    """See `api.quantize_nvfp4`."""
    *lead, k = x.shape
    groups = k // GROUP_SIZE
    rows = lead[-1] if swizzled else math.prod(lead)
    batches = math.prod(lead[:-1]) if swizzled else 1
    packed = torch.empty(*lead, k // 2, dtype=torch.uint8, device=x.device)
    scale_shape = [*lead, groups]
    if swizzled:
        scale_shape[-2:] = round_up(rows, SWIZZLE_ROWS), round_up(groups, SWIZZLE_COLS)
    block_scale = torch.empty(scale_shape, dtype=torch.float8_e4m3fn, device=x.device)

    matrices = _rows_of(x, (batches, rows, k))
    scale, scale_stride = _by_row(global_scale, x.shape[:-1])
    blocks = config.blocks(scale_shape[-2] if swizzled else rows, scale_shape[-1])
    args = _QuantizeArgs(
        x=matrices.data_ptr(),
        global_scale=scale.data_ptr(),
        packed=packed.data_ptr(),
        block_scale=block_scale.data_ptr(),
        batch_stride=matrices.stride(0),
        row_stride=matrices.stride(1),
        global_scale_stride=scale_stride,
        rows=rows,
        groups=groups,
        swizzled=swizzled,
        log2_threads_along=blocks.log2_threads_along,
        blocks_along=blocks.along,
        blocks_down=blocks.down,
        aligned=_starts_aligned(matrices, 16),
    )
    _launch(f"quantize_{_TYPES[x.dtype]}", batches * blocks.down * blocks.along, config.THREADS, args, x)
    return packed, block_scale


def dequantize_nvfp4(packed: Tensor, block_scale: Tensor, global_scale: Tensor, *, dtype: torch.dtype) -> Tensor:
    """See `api.dequantize_nvfp4`; not for float64."""
    *lead, half = packed.shape
    rows, groups = math.prod(lead), half * 2 // GROUP_SIZE
    out = torch.empty(*lead, half * 2, dtype=dtype, device=packed.device)
    codes = _rows_of(packed, (1, rows, half))
    scales = _rows_of(block_scale.view(torch.uint8), (1, rows, groups))
    scale, scale_stride = _by_row(global_scale, packed.shape[:-1])
    blocks = config.blocks(rows, groups)
    args = _DequantizeArgs(
        packed=codes.data_ptr(),
        block_scale=scales.data_ptr(),
        global_scale=scale.data_ptr(),
        out=out.data_ptr(),
        packed_stride=codes.stride(1),
        block_scale_stride=scales.stride(1),
        global_scale_stride=scale_stride,
        rows=rows,
        groups=groups,
        log2_threads_along=blocks.log2_threads_along,
        blocks_along=blocks.along,
        aligned=_starts_aligned(codes, 8),
    )
    _launch(f"dequantize_{_TYPES[dtype]}", blocks.down * blocks.along, config.THREADS, args, packed)
    return out


def swizzle_blockscale(scale: Tensor) -> Tensor:
    """See `api.swizzle_blockscale`."""
    *lead, rows, columns = scale.shape
    padded = (*lead, round_up(rows, SWIZZLE_ROWS), round_up(columns, SWIZZLE_COLS))
    out = torch.empty(padded, dtype=scale.dtype, device=scale.device)
    _move_scales("swizzle_blockscale", scale, out)
    return out


def unswizzle_blockscale(swizzled: Tensor, rows: int, cols: int) -> Tensor:
    """See `api.unswizzle_blockscale`."""
    out = torch.empty(*swizzled.shape[:-2], rows, cols, dtype=swizzled.dtype, device=swizzled.device)
    _move_scales("unswizzle_blockscale", out, swizzled.contiguous())
    return out


def _move_scales(name: str, plain: Tensor, swizzled: Tensor) -> None:
    *lead, rows, columns = plain.shape
    matrices = _rows_of(plain.view(torch.uint8), (math.prod(lead), rows, columns))
    along, down = -(-columns // config.SWIZZLE_BLOCK_COLUMNS), -(-rows // SWIZZLE_ROWS)
    args = _SwizzleArgs(
        plain=matrices.data_ptr(),
        swizzled=swizzled.data_ptr(),
        batch_stride=matrices.stride(0),
        row_stride=matrices.stride(1),
        rows=rows,
        columns=columns,
        blocks_along=along,
        blocks_down=down,
        words=columns % SWIZZLE_COLS == 0 and _starts_aligned(matrices, 4),
    )
    _launch(name, matrices.shape[0] * down * along, config.SWIZZLE_THREADS, args, plain)


def _rows_of(x: Tensor, shape: tuple[int, int, int]) -> Tensor:
    """x as [batches, rows, columns] with its elements next to each other in a row: a view where that is one."""
    matrices = x.reshape(shape)
    return matrices if matrices.stride(-1) == 1 or shape[-1] == 1 else matrices.contiguous()


def _by_row(global_scale: Tensor, lead: torch.Size) -> tuple[Tensor, int]:
    """The scales, and the distance from one row's to the next one's."""
    if global_scale.numel() == 1:
        return global_scale, 0
    flat = global_scale.expand(lead).reshape(-1)
    return flat, flat.stride(0)


def _starts_aligned(matrices: Tensor, size: int) -> bool:
    """Whether every row starts at a multiple of `size` bytes."""
    starts = [matrices.data_ptr()]
    starts += [matrices.stride(dim) * matrices.element_size() for dim in (0, 1) if matrices.shape[dim] > 1]
    return all(start % size == 0 for start in starts)


def _launch(name: str, grid: int, block: int, args: ctypes.Structure, on: Tensor) -> None:
    module = _modules.on(on.device)
    with torch.cuda.device_of(on):  # the driver launches on the current device
        module.launch(name, grid, block, args, programmatic=True)
