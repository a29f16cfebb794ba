"""The helpers of common.cuh and nvfp4_mma.cuh, as built for the CPU, against numpy: bits, but for sums and e^x."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
import pytest
import torch

from sglang_sm120.errors import ContractError
from sglang_sm120.kernels.cuda.module import load

SOURCE = Path(__file__).with_name("numerics.cu")
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
E4M3 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double().numpy()  # NaN at 0x7f and 0xff
NUMERICS = [(), ("SM120_EMULATE_MMA",)]


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


class MmaArgs(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("a", "a_scale", "b", "b_scale", "d")), ("tiles", ctypes.c_int),
    )  # fmt: skip


class HalfMmaArgs(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_void_p) for name in ("a", "b", "d"))


class MapArgs(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("a", "b", "out")), ("count", ctypes.c_int), ("width", ctypes.c_int),
    )  # fmt: skip


def each(name: str, a: np.ndarray, b: np.ndarray | None = None, width: int = 1) -> np.ndarray:
    """What map kernel `name` makes of each pair of 32-bit words."""
    a = np.ascontiguousarray(a, np.uint32)
    b = np.zeros_like(a) if b is None else np.ascontiguousarray(b, np.uint32)
    assert a.shape == b.shape
    out = np.zeros((a.size, width), np.uint32)
    args = MapArgs(a.ctypes.data, b.ctypes.data, out.ctypes.data, a.size, width)
    load(SOURCE, torch.device("cpu")).launch(f"map_{name}", 3, 64, args)
    return out if width > 1 else out[:, 0]


def decode(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """float64 [tiles, rows, 64] of packed [tiles, rows, 32] and e4m3 codes [tiles, rows, 4]; the sign of a scale is
    ignored."""
    elements = np.stack([codes & 15, codes >> 4], -1).reshape(*codes.shape[:-1], 64)
    return E2M1[elements] * np.repeat(np.abs(E4M3[scales]), 16, -1)


def run_mma(name: str, defines: tuple[str, ...], *operands: np.ndarray) -> np.ndarray:
    operands = tuple(np.ascontiguousarray(x, np.uint8) for x in operands)
    d = np.full((16, 8), np.nan, np.float32)
    args = MmaArgs(*(x.ctypes.data for x in operands), d.ctypes.data, len(operands[0]))
    load(SOURCE, torch.device("cpu"), defines).launch(name, 1, 32, args)
    return d


@pytest.mark.parametrize("defines", NUMERICS, ids=["native", "emulated"])
@pytest.mark.parametrize("name", ["mma_nvfp4_0_0", "mma_nvfp4_1_3", "mma_nvfp4_0_2", "mma_nvfp4_1_1"])
@pytest.mark.parametrize("tiles", [1, 8])
def test_mma_nvfp4(name: str, tiles: int, defines: tuple[str, ...], rng: np.random.Generator) -> None:
    a, b = (rng.integers(0, 256, (tiles, rows, 32), dtype=np.uint8) for rows in (16, 8))
    a_scale, b_scale = (rng.integers(0, 0x7F, (tiles, rows, 4), dtype=np.uint8) for rows in (16, 8))
    if tiles == 8:
        a_scale.reshape(-1)[:254] = np.delete(np.arange(256), [0x7F, 0xFF])  # every finite code, negative ones too
    found = run_mma(name, defines, a, a_scale, b, b_scale)
    x, y = decode(a, a_scale), decode(b, b_scale)
    exact = np.einsum("tik,tjk->ij", x, y)
    magnitude = np.einsum("tik,tjk->ij", np.abs(x), np.abs(y))  # no partial sum is larger
    roundings = tiles * (6 if defines else 1)  # in float32, each by at most 2^-24 of the sum
    assert (np.abs(found - exact) <= roundings * 2.0**-24 * magnitude).all()


@pytest.mark.parametrize("defines", NUMERICS, ids=["native", "emulated"])
@pytest.mark.parametrize("side", ["a", "b"])
def test_mma_nvfp4_of_every_element_and_scale_is_exact(side: str, defines: tuple[str, ...]) -> None:
    """One nonzero product in each sum, so that nothing is rounded: all 16 x 127 values pass through the operand."""
    codes = np.arange(0x7F, dtype=np.uint8)
    for k in (0, 17, 46, 63):
        shift, byte = 4 * (k % 2), k // 2
        a, b = np.zeros((1, 16, 32), np.uint8), np.zeros((1, 8, 32), np.uint8)
        a_scale, b_scale = np.full((1, 16, 4), 0x38, np.uint8), np.full((1, 8, 4), 0x38, np.uint8)  # 1.0
        operand, scale, other = (a, a_scale, b) if side == "a" else (b, b_scale, a)
        other[0, :, byte] = 2 << shift  # 1.0
        rows = operand.shape[1]
        for element in range(16):
            for first in range(0, len(codes), rows):
                some = np.resize(codes[first : first + rows], rows)
                operand[0, :, byte] = element << shift
                scale[0, :, k // 16] = some
                found = run_mma("mma_nvfp4_1_3", defines, a, a_scale, b, b_scale)
                expected = np.broadcast_to((E2M1[element] * E4M3[some])[:, None], (rows, 24 - rows))
                np.testing.assert_array_equal(found, expected if side == "a" else expected.T)


@pytest.mark.parametrize("kind", ["bf16", "f16"])
def test_mma_of_16_bit_operands(kind: str) -> None:
    dtype = torch.bfloat16 if kind == "bf16" else torch.float16
    generator = torch.Generator().manual_seed(1)
    a, b = (torch.randn(rows, 16, generator=generator).to(dtype) for rows in (16, 8))
    start = torch.randn(16, 8, generator=generator)
    d = start.clone()
    args = HalfMmaArgs(a.data_ptr(), b.data_ptr(), d.data_ptr())
    load(SOURCE, torch.device("cpu")).launch(f"mma_16_bit_{kind}", 1, 32, args)
    exact = start.double() + a.double() @ b.double().T
    assert torch.equal(d, exact.float()), "products are exact, one rounding at the end"
    with pytest.raises(ContractError, match="mma by a warp without all its 32 lanes"):
        load(SOURCE, torch.device("cpu")).launch(f"mma_16_bit_{kind}", 1, 31, args)


def canonical(bits: np.ndarray, infinity: int) -> np.ndarray:
    """16-bit floats with every NaN as 0x7fff, as the GPU's conversions give it."""
    return np.where((bits & 0x7FFF) > infinity, 0x7FFF, bits).astype(np.uint32)


def bits_of(values: torch.Tensor) -> np.ndarray:
    return values.contiguous().view(torch.int16).numpy().view(np.uint16).astype(np.uint32)


def test_f32_to_16_bits(rng: np.random.Generator) -> None:
    words = rng.integers(0, 1 << 32, 200_000, dtype=np.uint32)
    # float16 and bfloat16 values, halfway between two, and one float32 next to that; both signs; tiny and huge.
    near = (np.arange(1 << 16, dtype=np.uint32) << 16)[:, None] + np.array([0, 0x7FFF, 0x8000, 0x8001], np.uint32)
    halves = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float32)
    middle = ((halves[1:].astype(np.float64) + halves[:-1]) / 2).astype(np.float32).view(np.uint32)
    edge = np.array([65519.9, 65520, 65535, 65536, 2**-25, 2**-24, 1.5 * 2**-24], np.float32).view(np.uint32)
    words = np.concatenate([words, near.reshape(-1), middle, middle + 1, middle - 1, edge, edge | 0x80000000])
    floats = torch.from_numpy(words.view(np.float32).copy())
    for kind, dtype, infinity in (("bf16", torch.bfloat16, 0x7F80), ("f16", torch.float16, 0x7C00)):
        expected = canonical(bits_of(floats.to(dtype)), infinity)
        np.testing.assert_array_equal(each(f"f32_to_{kind}", words), expected)
        pair = each(f"f32_to_{kind}x2", words, words[::-1])
        np.testing.assert_array_equal(pair, expected | expected[::-1] << 16)


def test_16_bits_to_f32() -> None:
    codes = np.arange(1 << 16, dtype=np.uint32)
    for kind, dtype in (("bf16", torch.bfloat16), ("f16", torch.float16)):
        expected = torch.from_numpy(codes.astype(np.uint16).view(np.int16)).view(dtype).float().numpy()
        found = each(f"{kind}_to_f32", codes).view(np.float32)
        np.testing.assert_array_equal(found, expected)  # NaN where NaN
        np.testing.assert_array_equal(np.signbit(found), np.signbit(expected))


def test_products_of_16_bit_pairs_round_once(rng: np.random.Generator) -> None:
    x, y = rng.integers(0, 1 << 32, (2, 400_000), dtype=np.uint32)
    x[:100_000] = x[:100_000] & 0x9FFF9FFF  # small exponents: subnormal products
    with np.errstate(all="ignore"):
        for kind, dtype, infinity in (("bf16", torch.bfloat16, 0x7F80), ("f16", torch.float16, 0x7C00)):
            halves = []
            for shift in (0, 16):
                a, b = (
                    torch.from_numpy((z >> shift).astype(np.uint16).view(np.int16)).view(dtype).double().numpy()
                    for z in (x, y)
                )
                halves.append(canonical(round_to(a * b, kind), infinity))
            np.testing.assert_array_equal(each(f"mul_{kind}x2", x, y), halves[0] | halves[1] << 16)


def round_to(values: np.ndarray, kind: str) -> np.ndarray:
    """Bits of float64 values rounded once, nearest even, by scaling: torch and numpy may go through float32."""
    mantissa, least, bias = (7, -126, 127) if kind == "bf16" else (10, -14, 15)
    magnitude = np.abs(values)
    exponent = np.maximum(np.frexp(np.where(np.isfinite(magnitude), magnitude, 0))[1] - 1, least)
    steps = np.rint(np.ldexp(np.where(np.isfinite(magnitude), magnitude, 0), mantissa - exponent)).astype(np.int64)
    bits = np.where(steps >> mantissa, steps + ((exponent + bias - 1) << mantissa), steps)
    infinity = (2 * bias + 1) << mantissa
    bits = np.where(np.isfinite(magnitude), np.minimum(bits, infinity), np.where(np.isnan(values), 0x7FFF, infinity))
    return (bits | np.where(np.isnan(values), 0, np.signbit(values).astype(np.int64) << 15)).astype(np.uint32)


def test_e4m3_to_f16_of_every_pair() -> None:
    pairs = np.arange(1 << 16, dtype=np.uint32)
    expected = canonical(E4M3.astype(np.float16).view(np.uint16).astype(np.uint32), 0x7C00)
    expected = expected[pairs & 0xFF] | expected[pairs >> 8] << 16
    np.testing.assert_array_equal(each("e4m3x2_to_f16x2", pairs), expected)
    finite = ((pairs & 0x7F) != 0x7F) & ((pairs >> 8 & 0x7F) != 0x7F)
    np.testing.assert_array_equal(each("e4m3x2_to_f16x2_by_bits", pairs)[finite], expected[finite])


def test_e2m1_to_f16_of_every_code_in_every_place(rng: np.random.Generator) -> None:
    codes = np.concatenate([np.uint32(0x11111111) * np.arange(16, dtype=np.uint32), rng.integers(0, 1 << 32, 1000)])
    codes = codes.astype(np.uint32)
    found = each("e2m1x8_to_f16x2", codes, width=4).view(np.float16).reshape(-1, 8)
    expected = (E2M1[codes[:, None] >> (4 * np.arange(8, dtype=np.uint32)) & 15] * 2.0**-14).astype(np.float16)
    np.testing.assert_array_equal(found.view(np.uint16), expected.view(np.uint16))


def test_prmt(rng: np.random.Generator) -> None:
    x, selectors = rng.integers(0, 1 << 32, (2, 1000), dtype=np.uint32)
    source = np.stack([x, ~x], 1).view(np.uint8)
    nibbles = selectors[:, None] >> (4 * np.arange(4, dtype=np.uint32)) & 15
    chosen = np.take_along_axis(source, (nibbles & 7).astype(np.int64), 1)
    sign = np.where(chosen & 0x80, 0xFF, 0).astype(np.uint8)
    expected = np.ascontiguousarray(np.where(nibbles & 8, sign, chosen)).view(np.uint32)[:, 0]
    np.testing.assert_array_equal(each("prmt", x, selectors), expected)


def test_loads(rng: np.random.Generator) -> None:
    count = 40
    data = np.zeros(count + 8, np.uint32)
    start = -data.ctypes.data // 4 % 4  # in words, to a multiple of 16 bytes
    words = data[start : start + count]
    words[:] = rng.integers(0, 1 << 32, count, dtype=np.uint32)
    places = np.arange(count, dtype=np.uint32) % 10 * 4
    out = np.zeros((count, 8), np.uint32)
    args = MapArgs(words.ctypes.data, places.ctypes.data, out.ctypes.data, count, 8)
    load(SOURCE, torch.device("cpu")).launch("map_loads", 1, 32, args)
    np.testing.assert_array_equal(out, np.tile(words[places[:, None] + np.arange(4)], 2))


def test_fast_exp(rng: np.random.Generator) -> None:
    x = rng.uniform(-20, 20, 10_000).astype(np.float32)
    np.testing.assert_allclose(each("fast_exp", x.view(np.uint32)).view(np.float32), np.exp(x.astype(np.float64)), 1e-6)
