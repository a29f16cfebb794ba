"""NVFP4 from the bit layouts alone, in numpy: what the torch code is held against. It shares no code with it.

Rounding is done by looking for the nearest entry in the table of all values; scales are laid out by the written
offset formula. Only where the contract names an fp32 operation does it use np.float32, which is IEEE too.
"""

from __future__ import annotations

import math

import numpy as np
import torch


def e2m1_value(code: int) -> float:
    sign = -1.0 if code & 8 else 1.0
    exponent, mantissa = (code >> 1) & 3, code & 1
    return sign * (mantissa / 2 if exponent == 0 else math.ldexp(1 + mantissa / 2, exponent - 1))


def e4m3_value(code: int) -> float:
    sign = -1.0 if code & 0x80 else 1.0
    exponent, mantissa = (code >> 3) & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    return sign * (math.ldexp(mantissa / 8, -6) if exponent == 0 else math.ldexp(1 + mantissa / 8, exponent - 7))


E2M1 = np.array([e2m1_value(code) for code in range(16)])
E4M3 = np.array([e4m3_value(code) for code in range(256)])


def nearest_code(magnitude: np.ndarray, table: np.ndarray) -> np.ndarray:
    """The code whose value is nearest; of two equally near ones the even code; the largest one beyond the table."""
    codes = np.array([*range(0, len(table), 2), *range(1, len(table), 2)])  # argmin takes the first: the even one
    bounded = np.minimum(np.asarray(magnitude, dtype=np.float64), table[-1])
    return codes[np.abs(bounded[..., None] - table[codes]).argmin(-1)].astype(np.uint8)


def unpack(packed: np.ndarray) -> np.ndarray:
    codes = np.empty((*packed.shape[:-1], packed.shape[-1] * 2), dtype=np.uint8)
    codes[..., 0::2], codes[..., 1::2] = packed % 16, packed // 16
    return codes


def dequantize(packed: np.ndarray, scale_codes: np.ndarray, s2: np.ndarray | float) -> np.ndarray:
    """float64; s2 broadcastable to the leading dimensions."""
    scale = np.repeat(E4M3[scale_codes], 16, axis=-1)
    return E2M1[unpack(packed)] * scale * np.asarray(s2, dtype=np.float64)[..., None]


def quantize(x: np.ndarray, s2: np.ndarray | float) -> tuple[np.ndarray, np.ndarray]:
    """float32 x -> (packed, scale codes), for finite x and s2 above 0."""
    assert x.dtype == np.float32
    blocks = x.reshape(*x.shape[:-1], -1, 16)
    s2 = np.asarray(s2, dtype=np.float32)[..., None]
    amax = np.abs(blocks).max(-1)
    scale_codes = nearest_code(amax / np.float32(6) / s2, E4M3[:127])
    divisor = E4M3[scale_codes].astype(np.float32) * s2
    with np.errstate(divide="ignore", invalid="ignore"):
        scaled = np.where(divisor[..., None] > 0, blocks / divisor[..., None], np.float32(0))
    codes = nearest_code(np.abs(scaled), E2M1[:8])
    codes |= ((np.signbit(blocks) & (divisor[..., None] > 0)) * 8).astype(np.uint8)
    codes = codes.reshape(x.shape)
    return codes[..., 0::2] + codes[..., 1::2] * 16, scale_codes


def swizzle(scale_codes: np.ndarray, padding: int = 0) -> np.ndarray:
    """[..., M, K16] -> [..., pad128(M), pad4(K16)] by the offset formula, with a chosen code in the padding."""
    *lead, rows, cols = scale_codes.shape
    padded_rows, padded_cols = -(-rows // 128) * 128, -(-cols // 4) * 4
    row, col = np.arange(rows)[:, None], np.arange(cols)[None, :]
    tile = (row // 128) * (padded_cols // 4) + col // 4
    offset = (tile * 32 + row % 32) * 16 + (row // 32) % 4 * 4 + col % 4
    flat = np.full((*lead, padded_rows * padded_cols), padding, dtype=np.uint8)
    flat[..., offset.reshape(-1)] = scale_codes.reshape(*lead, -1)
    return flat.reshape(*lead, padded_rows, padded_cols)


def as_e4m3(codes: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(codes)).view(torch.float8_e4m3fn)


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a tensor, for comparisons in which NaN equals NaN and -0.0 differs from 0.0."""
    return tensor.detach().contiguous().view(torch.uint8)
