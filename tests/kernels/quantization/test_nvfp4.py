"""NVFP4 quantise, dequantise and swizzle, against the bit layouts (nvfp4_oracle) and SGLang's own functions."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from nvfp4_oracle import E2M1, E4M3, as_e4m3, bytes_of, dequantize, e2m1_value, e4m3_value, quantize, swizzle

from sglang_sm120.errors import ContractError
from sglang_sm120.kernels.quantization.nvfp4 import reference
from sglang_sm120.kernels.quantization.nvfp4.api import (
    amax_global_scale,
    dequantize_nvfp4,
    quantize_nvfp4,
    swizzle_blockscale,
    unswizzle_blockscale,
)

ONE = torch.ones(())
NAN_SCALE = 0x7F
INF, NAN = float("inf"), float("nan")


def block(*values: float) -> torch.Tensor:
    """One row of 16: the values, then zeros."""
    return torch.tensor([[*values, *[0.0] * (16 - len(values))]])


def codes_of(packed: torch.Tensor) -> list[int]:
    return torch.stack((packed & 15, packed >> 4), -1).flatten().tolist()


# --- decoding -------------------------------------------------------------------------------------------------------


def test_the_oracle_knows_the_two_formats():
    """Hand-written anchors, so that the oracle is not only compared with itself."""
    assert [e2m1_value(code) for code in range(8)] == [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    assert e4m3_value(0x7E) == 448 and e4m3_value(0xFE) == -448 and e4m3_value(0x38) == 1
    assert e4m3_value(0x01) == 2**-9 and np.isnan([e4m3_value(0x7F), e4m3_value(0xFF)]).all()


@pytest.mark.parametrize("s2", [1.0, 0.0123, 3e-39])
def test_dequantize_every_scale_code_with_every_byte(s2):
    """Row r: all 256 bytes under scale code r."""
    packed = torch.arange(256, dtype=torch.uint8).repeat(256, 1)
    scale = torch.arange(256, dtype=torch.uint8)[:, None].expand(256, 32).contiguous().view(torch.float8_e4m3fn)
    got = dequantize_nvfp4(packed, scale, torch.tensor(s2))
    factor = float(np.float32(s2))
    want = torch.empty(256, 512)
    for row in range(256):
        for byte in range(256):
            for half, code in enumerate((byte % 16, byte // 16)):
                want[row, 2 * byte + half] = e2m1_value(code) * e4m3_value(row) * factor
    nan = torch.isnan(want)
    assert nan.any(dim=1).sum() == 2 and torch.equal(torch.isnan(got), nan)
    assert torch.equal(bytes_of(got[~nan]), bytes_of(want[~nan]))  # bytes: the sign of zero too


def test_low_nibble_is_the_even_element():
    packed = torch.tensor([[0x21, 0xF3, *[0] * 6]], dtype=torch.uint8)
    got = dequantize_nvfp4(packed, as_e4m3(np.array([[0x40]], dtype=np.uint8)), ONE)  # scale 2
    assert got[0, :4].tolist() == [1.0, 2.0, 3.0, -12.0]


def test_dequantize_takes_a_global_scale_a_row_and_any_dtype():
    rng = np.random.default_rng(1)
    packed = rng.integers(0, 256, (2, 3, 40), dtype=np.uint8)
    scale = rng.integers(0, 127, (2, 3, 5), dtype=np.uint8)
    s2 = rng.random((2, 3), dtype=np.float32)
    arguments = torch.from_numpy(packed), as_e4m3(scale), torch.from_numpy(s2)
    exact = torch.from_numpy(dequantize(packed, scale, s2))
    assert torch.equal(dequantize_nvfp4(*arguments, dtype=torch.float64), exact)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert torch.equal(dequantize_nvfp4(*arguments, dtype=dtype), exact.to(torch.float32).to(dtype))
    shared = dequantize_nvfp4(*arguments[:2], arguments[2][:, :1], dtype=torch.float64)
    assert torch.equal(shared, torch.from_numpy(dequantize(packed, scale, s2[:, :1])))


def test_dequantize_agrees_with_sglang():
    theirs = pytest.importorskip("sglang.srt.layers.quantization.dequantization").dequantize_nvfp4
    rng = np.random.default_rng(2)
    packed = torch.from_numpy(rng.integers(0, 256, (3, 7, 24), dtype=np.uint8))
    scale = as_e4m3(rng.integers(0, 127, (3, 7, 3), dtype=np.uint8))
    s2 = torch.tensor(2.0**-7)  # a power of two: their order of the products then rounds as ours
    ours = dequantize_nvfp4(packed, scale, s2)
    assert torch.equal(bytes_of(ours), bytes_of(theirs(packed, scale, s2, out_dtype=torch.float32)))


# --- quantising -----------------------------------------------------------------------------------------------------


def test_elements_round_to_nearest_even_at_every_tie():
    ties = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]
    even = [0, 2, 2, 4, 4, 6, 6]
    down, up = [0, 1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6, 7]
    below = [float(np.nextafter(np.float32(t), np.float32(0))) for t in ties]
    above = [float(np.nextafter(np.float32(t), np.float32(9))) for t in ties]
    for values, codes in ((ties, even), (below, down), (above, up)):
        packed, scale = quantize_nvfp4(block(6.0, *values, *[-v for v in values]), ONE)  # the 6 makes the scale 1
        assert scale.float().item() == 1
        assert codes_of(packed) == [7, *codes, *[code + 8 for code in codes], 0]


def test_block_scales_round_to_nearest_even_between_all_neighbours():
    """amax / 6 in the middle between two e4m3 values, a little below and a little above, for all 126 gaps."""
    middle = ((E4M3[:126] + E4M3[1:127]) / 2).astype(np.float32)
    for nudge, want in ((0, None), (-1e-5, np.arange(126)), (1e-5, np.arange(1, 127))):
        amax = torch.from_numpy(middle * np.float32(1 + nudge) * np.float32(6))
        scale = quantize_nvfp4(torch.cat((amax[:, None], torch.zeros(126, 15)), 1), ONE)[1]
        expected = np.arange(126) + np.arange(126) % 2 if want is None else want
        assert scale.view(torch.uint8).flatten().tolist() == expected.tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 16), (9, 80), (17, 208), (2, 3, 1600), (32,)])
@pytest.mark.parametrize("per_row", [False, True])
def test_quantize_matches_the_oracle_bit_for_bit(dtype, shape, per_row):
    generator = torch.Generator().manual_seed(sum(shape))
    x = (torch.randn(shape, generator=generator) * torch.rand(shape, generator=generator).pow(-0.7)).to(dtype)
    s2 = torch.rand(shape[:-1] if per_row else (), generator=generator) * 0.02 + 1e-4
    packed, scale = quantize_nvfp4(x, s2)
    want_packed, want_scale = quantize(x.float().numpy(), s2.numpy())
    assert packed.dtype == torch.uint8 and scale.dtype == torch.float8_e4m3fn
    assert torch.equal(scale.view(torch.uint8), torch.from_numpy(want_scale))
    assert torch.equal(packed, torch.from_numpy(want_packed))


def test_division_is_not_a_multiplication_by_a_reciprocal():
    """Divisors whose reciprocal gives another code: the exactly rounded quotient decides."""
    rng = np.random.default_rng(3)
    s2 = rng.random(4000, dtype=np.float32) * np.float32(0.1) + np.float32(0.01)
    amax = ((E4M3[40] + E4M3[41]) / 2).astype(np.float32) * s2 * np.float32(6)  # near a tie of the block scale
    x = np.zeros((4000, 16), dtype=np.float32)
    x[:, 0] = amax
    exact = amax / np.float32(6) / s2
    approximate = amax * (np.float32(1) / np.float32(6)) * (np.float32(1) / s2)
    tie = np.float32((E4M3[40] + E4M3[41]) / 2)
    assert ((exact <= tie) != (approximate <= tie)).any(), "the test would not notice the difference"
    got = quantize_nvfp4(torch.from_numpy(x), torch.from_numpy(s2))[1].view(torch.uint8).flatten().numpy()
    assert np.array_equal(got, np.where(exact <= tie, 40, 41))  # 40 is the even one


def test_elements_are_divided_too():
    """The same for the elements, at all their ties."""
    rng = np.random.default_rng(10)
    s2 = rng.random(2000, dtype=np.float32) * np.float32(0.1) + np.float32(0.01)
    divisor = E4M3[0x55].astype(np.float32) * s2  # a block scale with an odd mantissa
    x = np.zeros((2000, 16), dtype=np.float32)
    x[:, 0] = divisor * np.float32(6)
    x[:, 1:8] = divisor[:, None] * np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], dtype=np.float32)
    reciprocal = np.float32(1) / divisor[:, None]
    assert (x[:, 1:8] / divisor[:, None] != x[:, 1:8] * reciprocal).any(), "the test would not notice the difference"
    packed, scale = quantize_nvfp4(torch.from_numpy(x), torch.from_numpy(s2))
    assert (scale.view(torch.uint8) == 0x55).all()
    assert torch.equal(packed, torch.from_numpy(quantize(x, s2)[0]))


def test_packing_agrees_with_compressed_tensors():
    helpers = pytest.importorskip("compressed_tensors.compressors.nvfp4.helpers")
    rng = np.random.default_rng(4)
    codes = rng.integers(0, 16, (6, 48))
    codes[:, ::16] = 7  # a 6 in every block: scale 1
    values = torch.from_numpy(E2M1[codes]).float()
    packed, scale = quantize_nvfp4(values, ONE)
    assert (scale.float() == 1).all()
    assert torch.equal(packed, helpers.pack_fp4_to_uint8(values))


def test_zero_blocks_and_blocks_too_small_for_the_scale_have_codes_zero():
    x = torch.cat((block(0.0, -0.0), block(1e-3, -1e-3), block(6.0)), 1)
    packed, scale = quantize_nvfp4(x, torch.tensor(1.0))
    assert scale.view(torch.uint8).flatten().tolist() == [0, 0, 0x38]
    assert codes_of(packed)[:32] == [0] * 32 and codes_of(packed)[32] == 7


def test_the_sign_of_zero_and_of_what_rounds_to_zero_is_kept():
    assert codes_of(quantize_nvfp4(block(6.0, -0.0, -0.1, 0.1), ONE)[0])[:4] == [7, 8, 8, 0]


def test_infinity_saturates():
    packed, scale = quantize_nvfp4(block(INF, -INF, 448.0, 6 * 448.0, -1.0), ONE)
    assert scale.float().item() == 448
    assert codes_of(packed)[:5] == [7, 15, 2, 7, 8]


def test_values_beyond_the_global_scale_saturate():
    packed, scale = quantize_nvfp4(block(1e6, -1e6, 448.0), ONE)
    assert scale.float().item() == 448 and codes_of(packed)[:3] == [7, 15, 2]


@pytest.mark.parametrize("nan", [NAN, -NAN])
def test_nan_makes_its_own_block_nan_and_no_other(nan):
    clean = torch.randn(3, 48, generator=torch.Generator().manual_seed(5))
    poisoned = clean.clone()
    poisoned[1, 20] = nan
    packed, scale = quantize_nvfp4(poisoned, ONE)
    assert scale.view(torch.uint8)[1, 1] == NAN_SCALE and codes_of(packed[1])[16:32] == [0] * 16
    decoded = dequantize_nvfp4(packed, scale, ONE)
    want = dequantize_nvfp4(*quantize_nvfp4(clean, ONE), ONE)
    want[1, 16:32] = NAN
    assert torch.equal(torch.isnan(decoded), torch.isnan(want))
    assert torch.equal(decoded.nan_to_num(), want.nan_to_num())


def test_strides_do_not_matter_and_inputs_stay():
    wide = torch.randn(9, 3 * 64, generator=torch.Generator().manual_seed(6))
    x, s2 = wide[:, 64:128], torch.full((9,), 0.01)
    before = wide.clone(), s2.clone()
    packed, scale = quantize_nvfp4(x, s2)
    packed_copy, scale_copy = packed.clone(), bytes_of(scale).clone()
    dequantize_nvfp4(packed, scale, s2)
    swizzle_blockscale(scale)
    assert torch.equal(wide, before[0]) and torch.equal(s2, before[1])
    assert torch.equal(packed, packed_copy) and torch.equal(bytes_of(scale), scale_copy)
    contiguous = quantize_nvfp4(x.contiguous(), s2)
    assert torch.equal(packed, contiguous[0]) and torch.equal(bytes_of(scale), bytes_of(contiguous[1]))
    transposed = quantize_nvfp4(x.T.contiguous().T, s2)
    assert torch.equal(packed, transposed[0])


@pytest.mark.parametrize("shape", [(0, 64), (0,), (4, 0), (2, 0, 32)])
def test_empty_input(shape):
    packed, scale = quantize_nvfp4(torch.empty(shape), ONE)
    assert packed.shape == (*shape[:-1], shape[-1] // 2) and scale.shape == (*shape[:-1], shape[-1] // 16)
    assert dequantize_nvfp4(packed, scale, ONE).shape == shape


# --- the global scale -----------------------------------------------------------------------------------------------


def test_amax_global_scale_is_the_smallest_without_saturation():
    x = torch.randn(7, 96, generator=torch.Generator().manual_seed(7)) * 5
    s2 = amax_global_scale(x)
    assert s2.shape == () and s2.item() == np.float32(x.abs().max().item()) / np.float32(6 * 448)
    packed, scale = quantize_nvfp4(x, s2)
    assert scale.float().max() == 448
    where = x.abs().argmax()
    assert dequantize_nvfp4(packed, scale, s2).flatten()[where] == pytest.approx(x.flatten()[where].item(), rel=1e-6)


def test_amax_global_scale_is_never_zero():
    for x in (torch.zeros(2, 16), torch.empty(0, 16), -torch.zeros(3, dtype=torch.bfloat16)):
        assert amax_global_scale(x).item() == 1.0
    tiny = amax_global_scale(torch.full((16,), 1e-44))
    assert tiny.item() == torch.finfo(torch.float32).tiny
    quantize_nvfp4(torch.full((16,), 1e-44), tiny)
    assert torch.isnan(amax_global_scale(torch.tensor([1.0, NAN])))


# --- swizzle --------------------------------------------------------------------------------------------------------

SHAPES = [(1, 1), (128, 4), (127, 3), (129, 5), (160, 10), (352, 13), (300, 100), (3, 80, 5), (2, 256, 8), (5, 704, 1)]


def random_codes(shape: tuple[int, ...]) -> np.ndarray:
    return np.random.default_rng(sum(shape)).integers(0, 256, shape, dtype=np.uint8)  # NaN codes among them


@pytest.mark.parametrize("shape", SHAPES)
def test_swizzle_matches_the_offset_formula(shape):
    codes = random_codes(shape)
    assert torch.equal(bytes_of(swizzle_blockscale(as_e4m3(codes))), torch.from_numpy(swizzle(codes)))


@pytest.mark.parametrize("shape", SHAPES)
def test_swizzle_matches_sglang(shape):
    theirs = pytest.importorskip("sglang.srt.layers.quantization.utils").swizzle_blockscale
    scale = as_e4m3(random_codes(shape))
    ours = swizzle_blockscale(scale)
    assert ours.is_contiguous() and torch.equal(bytes_of(ours), bytes_of(theirs(scale)))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("padding", [0, NAN_SCALE])
def test_unswizzle_inverts_whatever_the_padding_holds(shape, padding):
    codes = random_codes(shape)
    plain = unswizzle_blockscale(as_e4m3(swizzle(codes, padding)), *shape[-2:])
    assert torch.equal(bytes_of(plain), torch.from_numpy(codes))


@pytest.mark.parametrize("shape", [(0, 4), (3, 0), (0, 128, 4), (2, 2, 130, 5)])
def test_swizzle_round_trip_of_empty_and_deeper_shapes(shape):
    codes = random_codes(shape)
    swizzled = swizzle_blockscale(as_e4m3(codes))
    assert swizzled.shape == (*shape[:-2], -(-shape[-2] // 128) * 128, -(-shape[-1] // 4) * 4)
    assert torch.equal(bytes_of(unswizzle_blockscale(swizzled, *shape[-2:])), torch.from_numpy(codes))


# --- contracts ------------------------------------------------------------------------------------------------------

E4M3_ROW = as_e4m3(np.zeros((2, 2), dtype=np.uint8))


@pytest.mark.parametrize(
    "call",
    [
        lambda: quantize_nvfp4(torch.zeros(2, 24), ONE),
        lambda: quantize_nvfp4(torch.zeros(()), ONE),
        lambda: quantize_nvfp4(torch.zeros(2, 16, dtype=torch.float64), ONE),
        lambda: quantize_nvfp4(torch.zeros(2, 16), ONE.double()),
        lambda: quantize_nvfp4(torch.zeros(2, 16), torch.ones(3)),
        lambda: quantize_nvfp4(torch.zeros(2, 16), torch.ones(2, 2)),
        lambda: quantize_nvfp4(torch.zeros(2, 16), torch.ones((), device="meta")),
        lambda: dequantize_nvfp4(torch.zeros(2, 16, dtype=torch.int8), E4M3_ROW, ONE),
        lambda: dequantize_nvfp4(torch.zeros(2, 16, dtype=torch.uint8), E4M3_ROW.view(torch.uint8), ONE),
        lambda: dequantize_nvfp4(torch.zeros(2, 32, dtype=torch.uint8), E4M3_ROW, ONE),  # a scale for 32: MXFP4
        lambda: dequantize_nvfp4(torch.zeros(2, 15, dtype=torch.uint8), E4M3_ROW, ONE),
        lambda: dequantize_nvfp4(torch.zeros(2, 16, dtype=torch.uint8), E4M3_ROW, ONE, dtype=torch.int32),
        lambda: swizzle_blockscale(torch.zeros(2, 2)),
        lambda: swizzle_blockscale(E4M3_ROW[0]),
        lambda: unswizzle_blockscale(swizzle_blockscale(E4M3_ROW), 129, 2),
        lambda: unswizzle_blockscale(swizzle_blockscale(E4M3_ROW), 2, 5),
        lambda: unswizzle_blockscale(E4M3_ROW, 2, 2),
        lambda: amax_global_scale(torch.zeros(4, dtype=torch.int32)),
    ],
)
def test_a_broken_contract_raises(call):
    with pytest.raises(ContractError) as error:
        call()
    assert all((error.value.found, error.value.needed, error.value.fix))


@pytest.mark.parametrize("s2", [0.0, -1.0, INF, NAN])
def test_an_unusable_global_scale_is_refused_on_the_cpu(s2):
    with pytest.raises(ContractError, match="zero, negative, infinite or NaN"):
        quantize_nvfp4(torch.ones(2, 16), torch.tensor([1.0, s2]))


def test_an_unusable_global_scale_gives_defined_bits_where_it_is_not_looked_for():
    """As on a GPU, where looking would wait for it. 0 / 0 is a NaN with its sign set on x86 and without on a GPU."""
    x = torch.cat((block(0.0), block(1.0, -2.0)), 1)
    for s2, scales in ((0.0, [NAN_SCALE, 0x7E]), (INF, [0, 0]), (-1.0, [0, 0]), (NAN, [NAN_SCALE, NAN_SCALE])):
        packed, scale = reference.quantize_nvfp4(x, torch.tensor(s2))
        assert scale.view(torch.uint8).flatten().tolist() == scales and (packed == 0).all()


def test_meta_tensors_pass_so_nothing_reads_a_value():
    """On the meta device reading a value, or a shape that depends on one, raises."""
    x = torch.empty(3, 64, device="meta", dtype=torch.bfloat16)
    s2 = amax_global_scale(x)
    packed, scale = quantize_nvfp4(x, s2)
    plain = unswizzle_blockscale(swizzle_blockscale(scale), 3, 4)
    assert dequantize_nvfp4(packed, plain, s2).shape == (3, 64)


# --- properties -----------------------------------------------------------------------------------------------------

finite = st.floats(-(2.0**20), 2.0**20, width=32)
rows_of_16 = st.lists(finite, min_size=16, max_size=16)
powers = st.integers(-20, 10).map(lambda exponent: torch.tensor(2.0**exponent))


def round_trip(x: torch.Tensor, s2: torch.Tensor) -> torch.Tensor:
    return dequantize_nvfp4(*quantize_nvfp4(x, s2), s2)


@settings(deadline=None, max_examples=150)
@given(values=rows_of_16, s2=powers)
def test_rounding_is_monotonic_odd_and_idempotent(values, s2):
    x = torch.tensor([sorted(values)])
    y = round_trip(x, s2)
    assert (y.diff() >= 0).all()
    assert torch.equal(round_trip(-x, s2), -y)
    if y.abs().max() == 6 * quantize_nvfp4(x, s2)[1].float() * s2:  # the scale can be found again
        assert torch.equal(round_trip(y, s2), y)


@settings(deadline=None, max_examples=150)
@given(values=rows_of_16, halvings=st.integers(0, 8))
def test_the_error_is_at_most_half_a_step(values, halvings):
    x = torch.tensor([values], dtype=torch.float32)
    assume(x.abs().max() > 1e-20)
    s2 = amax_global_scale(x) * 2.0**halvings  # block scales from 448 down to 1.75, none of them subnormal
    packed, scale = quantize_nvfp4(x, s2)
    unit = scale.double() * s2.double()
    error = (dequantize_nvfp4(packed, scale, s2, dtype=torch.float64) - x.double()).abs()
    magnitude = x.double().abs() / unit
    assert (magnitude <= 6 * (1 + 1 / 16)).all()  # the block scale is within half of its own step
    step = torch.where(magnitude < 2, 0.5, torch.where(magnitude < 4, 1.0, 2.0)) * unit
    beyond = (magnitude - 6).clamp(min=0) * unit
    assert (error <= step / 2 * (1 + 1e-5) + beyond).all()


# --- GPU ------------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_gpu_gives_the_same_bits_and_can_be_captured():
    generator = torch.Generator().manual_seed(8)
    x = (torch.randn(2000, 256, generator=generator) * torch.rand(2000, 256, generator=generator).pow(-0.7)).bfloat16()
    x[3, 5], x[4, 6], x[5, 7] = NAN, INF, -INF
    s2 = torch.rand(2000, generator=generator) * 0.02 + 1e-4
    want = quantize_nvfp4(x, s2)
    x, s2 = x.cuda(), s2.cuda()
    graph = torch.cuda.CUDAGraph()
    quantize_nvfp4(x, s2)
    with torch.cuda.graph(graph):
        packed, scale = quantize_nvfp4(x, s2)
        decoded = dequantize_nvfp4(packed, unswizzle_blockscale(swizzle_blockscale(scale), 2000, 16), s2)
        amax_global_scale(x)
    graph.replay()
    assert torch.equal(packed.cpu(), want[0]) and torch.equal(bytes_of(scale).cpu(), bytes_of(want[1]))
    expected = dequantize_nvfp4(*want, s2.cpu())
    assert torch.equal(decoded.cpu().nan_to_num(), expected.nan_to_num())
