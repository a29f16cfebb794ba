"""NVFP4: e2m1 elements, one float8_e4m3fn scale for 16 of them along K, one fp32 global scale `s2` above that.

    value = e2m1 * e4m3 * s2

`s2` multiplies. It is ModelOpt's `*_scale_2` and `input_scale`; FlashInfer's quantiser and compressed-tensors'
`*_global_scale` hold the RECIPROCAL, 1 / s2. Elements are packed two a byte along K, even k in the low nibble.

Each function checks, returns early when there is nothing to do, and calls one of two implementations with the same
bits: the plain torch of `reference.py`, or the kernels of `kernel.cu`. None of them writes to its inputs, and none
waits for a GPU: values are checked on the CPU only.

`implementation` is "auto": the kernels on a GPU that has them (compute capability 8.9 or newer), plain torch elsewhere;
"reference": plain torch; "kernel": the kernels, on the CPU as built for the host. The first call on a GPU loads the
kernels; within a CUDA graph capture plain torch is used until they are loaded, so call once before.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from sglang_sm120.errors import ContractError, UnsupportedError
from sglang_sm120.kernels.quantization.nvfp4 import kernel, reference
from sglang_sm120.kernels.quantization.nvfp4.config import GROUP_SIZE, SWIZZLE_COLS, SWIZZLE_ROWS, round_up

__all__ = [
    "GROUP_SIZE",
    "Implementation",
    "amax_global_scale",
    "dequantize_nvfp4",
    "quantize_nvfp4",
    "round_up",
    "swizzle_blockscale",
    "unswizzle_blockscale",
]

Implementation = Literal["auto", "reference", "kernel"]

_INPUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_OUTPUT_DTYPES = (*_INPUT_DTYPES, torch.float64)


def quantize_nvfp4(
    x: Tensor, global_scale: Tensor, *, swizzled: bool = False, implementation: Implementation = "auto"
) -> tuple[Tensor, Tensor]:
    """Quantise along the last dimension to NVFP4 under a given global scale.

        block_scale = e4m3(amax / 6 / s2)             amax of the 16 elements, nearest even, saturating at 448
        code        = e2m1(x / (block_scale * s2))    nearest even, saturating at 6

    Args:
        x: bfloat16, float16 or float32 [..., K], any strides; K a multiple of 16.
        global_scale: float32, one element or broadcastable to x.shape[:-1] (a scale a row), on x's device; s2, the
            value multiplier; finite and above 0.
        swizzled: give block_scale as `swizzle_blockscale` would, its padding zero; x then has two dimensions or more.
        implementation: see the module.

    Returns:
        packed: uint8 [..., K / 2]; block_scale: float8_e4m3fn [..., K / 16], row-major, or swizzled [..., pad128(M),
        pad4(K / 16)] for x [..., M, K]. Both contiguous.

    Raises:
        ContractError: K not a multiple of 16, a wrong dtype, shape or device; on the CPU also an s2 that is zero,
            negative, infinite or NaN. On a GPU such an s2 is not looked for (that would wait for the GPU): infinite,
            negative or zero gives codes 0 in every block, NaN gives NaN block scales.
        UnsupportedError: implementation="kernel" on a device, or for sizes, that the kernels do not cover.

    Numerics:
        The same bits on CPU and GPU. A block whose scale rounds to 0 (all zero, or tiny against s2) has codes 0. A NaN
        anywhere in a block makes its scale NaN (0x7F) and its 16 codes 0: the block dequantises to NaN, its
        neighbours are untouched. An infinite element makes the scale 448 and its own code +-6. The sign bit is kept:
        -0.0, and a negative number that rounds to zero, get code 8 (also -0.0), as the hardware conversion does.

    Source: reference.py; format as in the OCP MX e2m1 and NVIDIA's NVFP4 description.
    """
    _need(x.dtype in _INPUT_DTYPES, f"x is {x.dtype}", "bfloat16, float16 or float32", "convert x")
    _need(
        x.dim() >= 1 and x.shape[-1] % GROUP_SIZE == 0,
        f"x has shape {list(x.shape)}",
        f"a last dimension (K) that is a multiple of {GROUP_SIZE}",
        "pad K with zeros to the next multiple of 16",
    )
    _need(
        not swizzled or x.dim() >= 2,
        f"x has shape {list(x.shape)}",
        "[..., M, K] for swizzled scales",
        "add a dimension",
    )
    scale = _check_global_scale(global_scale, x.shape[:-1], x.device)
    _check_positive(scale)
    use_kernel = _use_kernel(implementation, x)
    if x.numel() == 0:
        lead, k = x.shape[:-1], x.shape[-1]
        packed = torch.empty(*lead, k // 2, dtype=torch.uint8, device=x.device)
        block_scale = torch.empty(*lead, k // GROUP_SIZE, dtype=torch.float8_e4m3fn, device=x.device)
        return packed, reference.swizzle_blockscale(block_scale) if swizzled else block_scale
    return (kernel if use_kernel else reference).quantize_nvfp4(x, scale, swizzled=swizzled)


def dequantize_nvfp4(
    packed: Tensor,
    block_scale: Tensor,
    global_scale: Tensor,
    *,
    dtype: torch.dtype = torch.float32,
    implementation: Implementation = "auto",
) -> Tensor:
    """Decode NVFP4: value = e2m1 * e4m3 * s2.

    Args:
        packed: uint8 [..., K / 2], even k in the low nibble.
        block_scale: float8_e4m3fn [..., K / 16], row-major (unswizzle it first); all 256 codes are decoded, so a
            negative scale negates and NaN gives NaN.
        global_scale: float32, one element or broadcastable to packed.shape[:-1], on packed's device; s2, the value
            multiplier.
        dtype: of the result: float32, bfloat16, float16 or float64 (by plain torch only).
        implementation: see the module.

    Returns:
        Tensor of dtype [..., K].

    Raises:
        ContractError: a wrong dtype, shape or device.
        UnsupportedError: implementation="kernel" for float64, or as in quantize_nvfp4.

    Numerics:
        e2m1 * e4m3 is exact; the product with s2 is rounded once to fp32 and then to dtype. With float64 it is exact.
        The same bits by either implementation, but for the bits of a NaN.

    Source: reference.py.
    """
    _need(packed.dtype == torch.uint8, f"packed is {packed.dtype}", "uint8, two e2m1 a byte", "view it as uint8")
    _check_scale_dtype(block_scale)
    _need(dtype in _OUTPUT_DTYPES, f"dtype is {dtype}", "float32, bfloat16, float16 or float64", "convert afterwards")
    expected = [*packed.shape[:-1], packed.shape[-1] * 2 // GROUP_SIZE] if packed.dim() else []
    _need(
        packed.dim() >= 1 and packed.shape[-1] % (GROUP_SIZE // 2) == 0 and list(block_scale.shape) == expected,
        f"packed {list(packed.shape)} with block_scale {list(block_scale.shape)}",
        "packed [..., K / 2] and block_scale [..., K / 16] with equal leading dimensions",
        "use unswizzle_blockscale(swizzled, rows, K // 16); NVFP4 has one scale for 16 elements (MXFP4: 32)",
    )
    _need_device("block_scale", block_scale, packed.device)
    scale = _check_global_scale(global_scale, packed.shape[:-1], packed.device)
    use_kernel = _use_kernel(implementation, packed, "float64 results" if dtype == torch.float64 else None)
    if packed.numel() == 0:
        return torch.empty(*packed.shape[:-1], packed.shape[-1] * 2, dtype=dtype, device=packed.device)
    return (kernel if use_kernel else reference).dequantize_nvfp4(packed, block_scale, scale, dtype=dtype)


def swizzle_blockscale(scale: Tensor, *, implementation: Implementation = "auto") -> Tensor:
    """Put row-major block scales into the 128x4 layout that tensor cores read, padding with zeros.

        offset(row, col) = ((row/128 * Kp/4 + col/4) * 32 + row%32) * 16 + (row/32)%4 * 4 + col%4    ('/' floors)

    Args:
        scale: float8_e4m3fn [..., M, K16], row-major, any strides.
        implementation: see the module.

    Returns:
        float8_e4m3fn [..., pad128(M), Kp = pad4(K16)], contiguous, the same bytes as SGLang's `swizzle_blockscale`.

    Raises:
        ContractError: a wrong dtype, or fewer than two dimensions.
        UnsupportedError: as in quantize_nvfp4.

    Numerics: moves bytes; NaN codes stay as they are.

    Source: reference.py; the layout is CUTLASS's blockscaled scale-factor atom.
    """
    _check_scale_dtype(scale)
    _need(scale.dim() >= 2, f"scale has shape {list(scale.shape)}", "[..., M, K16]", "add the missing dimension")
    use_kernel = _use_kernel(implementation, scale) and scale.numel() > 0
    return (kernel if use_kernel else reference).swizzle_blockscale(scale)


def unswizzle_blockscale(swizzled: Tensor, rows: int, cols: int, *, implementation: Implementation = "auto") -> Tensor:
    """Undo `swizzle_blockscale`: the first `rows` x `cols` scales, row-major; the padding is not read into the result.

    Args:
        swizzled: float8_e4m3fn [..., pad128(rows), pad4(cols)], 128x4 layout.
        rows: M before padding.
        cols: K / 16 before padding.
        implementation: see the module.

    Returns:
        float8_e4m3fn [..., rows, cols], contiguous, a copy.

    Raises:
        ContractError: a wrong dtype, or a shape that is not exactly rows and cols padded.
        UnsupportedError: as in quantize_nvfp4.

    Numerics: moves bytes.

    Source: reference.py.
    """
    _check_scale_dtype(swizzled)
    expected = [round_up(rows, SWIZZLE_ROWS), round_up(cols, SWIZZLE_COLS)]
    _need(
        rows >= 0 and cols >= 0 and swizzled.dim() >= 2 and list(swizzled.shape[-2:]) == expected,
        f"swizzled scales {list(swizzled.shape)} for {rows} rows and {cols} columns",
        f"[..., {expected[0]}, {expected[1]}]",
        "pass the weight's row count and K // 16, both before padding",
    )
    use_kernel = _use_kernel(implementation, swizzled) and swizzled.numel() > 0
    return (kernel if use_kernel else reference).unswizzle_blockscale(swizzled, rows, cols)


def amax_global_scale(x: Tensor) -> Tensor:
    """The smallest global scale under which no block of x saturates: s2 = amax / (6 * 448).

    Args:
        x: bfloat16, float16 or float32, any shape.

    Returns:
        float32 scalar on x's device; 1.0 when x is empty or all zero; never below the smallest normal float32.

    Raises:
        ContractError: a wrong dtype.

    Numerics: one correctly rounded fp32 division. NaN or infinity in x gives NaN or infinity, which
        `quantize_nvfp4` refuses (on the CPU).

    Source: reference.py.
    """
    _need(x.dtype in _INPUT_DTYPES, f"x is {x.dtype}", "bfloat16, float16 or float32", "convert x")
    if x.numel() == 0:
        return torch.ones((), dtype=torch.float32, device=x.device)
    return reference.amax_global_scale(x)


def _use_kernel(implementation: str, data: Tensor, not_covered: str | None = None) -> bool:
    known = implementation in ("auto", "reference", "kernel")
    _need(known, f"implementation {implementation!r}", "auto, reference or kernel", "leave it out")
    if implementation == "reference":
        return False
    reason = f"the kernels do not cover {not_covered}" if not_covered else None
    reason = reason or kernel.size_reason(math.prod(data.shape[:-1]), data.shape[-1] if data.dim() else 1)
    if implementation == "auto":
        return reason is None and kernel.ready(data.device)
    reason = reason or kernel.device_reason(data.device)
    if reason is not None:
        raise UnsupportedError(reason, "what the NVFP4 kernels cover", "use implementation='reference' or 'auto'")
    return True


def _need(holds: bool, found: str, needed: str, fix: str) -> None:
    if not holds:
        raise ContractError(found, needed, fix)


def _need_device(name: str, tensor: Tensor, device: torch.device) -> None:
    _need(tensor.device == device, f"{name} is on {tensor.device}", f"{device}, as the data", f"move {name} there")


def _check_scale_dtype(scale: Tensor) -> None:
    _need(
        scale.dtype == torch.float8_e4m3fn,
        f"the block scales are {scale.dtype}",
        "float8_e4m3fn",
        "view raw bytes as float8_e4m3fn; e8m0 scales are MXFP4, another format",
    )


def _check_global_scale(scale: Tensor, lead: torch.Size, device: torch.device) -> Tensor:
    """Returns the scale ready to broadcast against `lead`, as a scalar when it has one element."""
    _need(scale.dtype == torch.float32, f"global_scale is {scale.dtype}", "float32", "convert it to float32")
    _need_device("global_scale", scale, device)
    if scale.numel() == 1:
        return scale.reshape(())
    fits = scale.dim() <= len(lead) and all(
        have in (1, want) for have, want in zip(reversed(scale.shape), reversed(lead), strict=False)
    )
    _need(
        fits,
        f"global_scale has shape {list(scale.shape)}",
        f"one element, or broadcastable to {list(lead)} (a scale a row)",
        "pass s2 as a scalar, or one value for each row",
    )
    return scale


def _check_positive(scale: Tensor) -> None:
    # A comparison read on the CPU costs nothing there; on a GPU it would wait for the stream and break a capture.
    if scale.device.type != "cpu" or torch.compiler.is_compiling():
        return
    _need(
        bool(((scale > 0) & torch.isfinite(scale)).all()),
        "global_scale holds a value that is zero, negative, infinite or NaN",
        "finite values above 0: s2 multiplies the stored values",
        "a weight-only checkpoint has no input scale: use numerics w4a16; for a tensor, amax_global_scale(x)",
    )
