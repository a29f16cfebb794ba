"""NVFP4 in plain torch: quantise, dequantise, and the 128x4 scale swizzle. No checks here; `api.py` has them.

Every step is a comparison, an exact conversion, or ONE correctly rounded fp32 operation, so a CPU and a GPU return the
same bits. Two things keep that true:
- no division by a Python number. On CUDA torch turns `x / 6.0` into `x * (1 / 6)`, which differs in the last bit; a
  division by a tensor on the same device is a real one (`_divide`). For the same reason a global scale has to live
  on the device of `x`;
- nothing is compiled or fused, so no fused multiply-add and no approximate reciprocal.

Nothing reads a value back to the host and no constant is copied to the device, so all of it can be captured in a CUDA
graph.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sglang_sm120.kernels.quantization.nvfp4.config import GROUP_SIZE, SWIZZLE_COLS, SWIZZLE_ROWS, round_up

E2M1_MAX = 6.0
E4M3_MAX = 448.0

# Magnitude codes of e2m1 are 0..7 for 0, .5, 1, 1.5, 2, 3, 4, 6. Between neighbours lies one boundary; a value that is
# exactly on it goes to the even code, so the boundary belongs to the upper side (True) when the upper code is even.
_E2M1_BOUNDARIES = ((0.25, False), (0.75, True), (1.25, False), (1.75, True), (2.5, False), (3.5, True), (5.0, False))


def quantize_nvfp4(x: Tensor, global_scale: Tensor, *, swizzled: bool = False) -> tuple[Tensor, Tensor]:
    """See `api.quantize_nvfp4`.

    The CUTLASS-derived quantiser in FlashInfer is given 1 / s2; where this divides, it multiplies by that and by
    `rcp.approx.ftz.f32` of 6 and of e4m3 * s2. A value very near a tie can so come out one code apart from here.
    """
    s2 = global_scale.unsqueeze(-1)
    blocks = x.to(torch.float32).unflatten(-1, (x.shape[-1] // GROUP_SIZE, GROUP_SIZE))
    block_scale = _encode_e4m3(_divide(blocks.abs().amax(-1), E2M1_MAX) / s2)
    divisor = block_scale.to(torch.float32) * s2
    usable = divisor > 0  # false for a scale that is 0 or NaN: such a block gets codes 0
    scaled = blocks / torch.where(usable, divisor, torch.ones_like(divisor)).unsqueeze(-1)
    codes = _encode_e2m1(scaled)
    codes = torch.where(usable.unsqueeze(-1), codes, torch.zeros_like(codes)).flatten(-2)
    packed = codes[..., 0::2] | (codes[..., 1::2] << 4)
    return packed, swizzle_blockscale(block_scale) if swizzled else block_scale


def dequantize_nvfp4(
    packed: Tensor, block_scale: Tensor, global_scale: Tensor, *, dtype: torch.dtype = torch.float32
) -> Tensor:
    """See `api.dequantize_nvfp4`."""
    work = torch.float64 if dtype == torch.float64 else torch.float32
    elements = _decode_e2m1(packed, work).unflatten(-1, (block_scale.shape[-1], GROUP_SIZE))
    # e2m1 * e4m3 has 6 significant bits: exact. So s2, which may differ by row, brings the only rounding.
    elements *= block_scale.to(work).unsqueeze(-1)
    elements *= global_scale.to(work)[..., None, None]
    return elements.flatten(-2).to(dtype)


def swizzle_blockscale(scale: Tensor) -> Tensor:
    """See `api.swizzle_blockscale`."""
    *lead, rows, cols = scale.shape
    padded_rows, padded_cols = round_up(rows, SWIZZLE_ROWS), round_up(cols, SWIZZLE_COLS)
    padded = torch.zeros(*lead, padded_rows, padded_cols, dtype=torch.uint8, device=scale.device)
    padded[..., :rows, :cols] = scale.view(torch.uint8)
    # A row is (tile, quarter of 32, row in the quarter), a column (tile, column): memory runs over column tiles, then
    # the 32 rows of a quarter, then the 4 quarters, then the 4 columns.
    tiles = padded.unflatten(-1, (padded_cols // SWIZZLE_COLS, SWIZZLE_COLS)).unflatten(-3, (padded_rows // 128, 4, 32))
    return tiles.movedim((-2, -3, -4), (-4, -3, -2)).reshape(padded.shape).view(scale.dtype)


def unswizzle_blockscale(swizzled: Tensor, rows: int, cols: int) -> Tensor:
    """See `api.unswizzle_blockscale`."""
    *lead, padded_rows, padded_cols = swizzled.shape
    tiles = swizzled.view(torch.uint8).reshape(*lead, padded_rows // 128, padded_cols // SWIZZLE_COLS, 32, 4, 4)
    plain = tiles.movedim((-4, -3, -2), (-2, -3, -4)).reshape(swizzled.shape)
    return plain[..., :rows, :cols].contiguous().view(swizzled.dtype)


def amax_global_scale(x: Tensor) -> Tensor:
    """See `api.amax_global_scale`."""
    amax = x.abs().amax().to(torch.float32)
    scale = _divide(amax, E2M1_MAX * E4M3_MAX).clamp(min=torch.finfo(torch.float32).tiny)
    return torch.where(amax == 0, torch.ones_like(scale), scale)


def _divide(x: Tensor, by: float) -> Tensor:
    """`x / by`, correctly rounded on every device (the module docstring says why this is not simply written so)."""
    return x / torch.full((), by, dtype=x.dtype, device=x.device)


def _encode_e4m3(x: Tensor) -> Tensor:
    """fp32 -> float8_e4m3fn, nearest even, saturating at 448; negative and -0.0 -> 0; NaN of either sign -> 0x7F."""
    code = x.clamp(min=0.0, max=E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)
    return (code & 0x7F).view(torch.float8_e4m3fn)


def _encode_e2m1(x: Tensor) -> Tensor:
    """fp32 -> e2m1 code in a uint8, nearest even, saturating at 6; the sign bit of x is kept, also for zero."""
    magnitude = x.abs()
    code = torch.signbit(x).to(torch.uint8) << 3
    for boundary, belongs_above in _E2M1_BOUNDARIES:
        # The comparisons that hold are as many as the magnitude code, and 8 + 7 still fits in the four bits.
        code += magnitude >= boundary if belongs_above else magnitude > boundary
    return code


def _decode_e2m1(packed: Tensor, dtype: torch.dtype) -> Tensor:
    """Two codes a byte -> values, low nibble first. By arithmetic: a lookup table would be a copy to the device."""
    codes = torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)
    signed_half = 0.5 - (codes >> 3).to(dtype)  # so that code 8 becomes -0.0
    return _doubled_magnitude(codes) * signed_half


def _doubled_magnitude(codes: Tensor) -> Tensor:
    """Twice |e2m1|, a small integer in uint8: m for exponent 0, else (2 + m) * 2**(exponent - 1)."""
    exponent, mantissa = (codes >> 1) & 3, codes & 1
    normal = (exponent > 0).to(torch.uint8)
    return (mantissa + 2 * normal) << (exponent - normal)
