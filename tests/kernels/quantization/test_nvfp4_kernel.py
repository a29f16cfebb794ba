"""kernel.cu, built for the host and on a GPU, against the plain torch of reference.py: the same bits."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from nvfp4_oracle import E2M1, E4M3, as_e4m3, bytes_of, quantize, swizzle

from sglang_sm120.errors import ContractError, UnsupportedError
from sglang_sm120.kernels.cuda.module import load
from sglang_sm120.kernels.quantization.nvfp4 import config, kernel, reference
from sglang_sm120.kernels.quantization.nvfp4.api import (
    dequantize_nvfp4,
    quantize_nvfp4,
    swizzle_blockscale,
    unswizzle_blockscale,
)

ONE = torch.ones(())
INF, NAN = float("inf"), float("nan")
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
SHAPES = [(1, 16), (1, 4096), (9, 80), (17, 208), (129, 48), (2, 3, 1600), (3, 130, 96), (32,), (5, 4112)]
SCALE_SHAPES = [(1, 1), (128, 4), (127, 3), (129, 5), (160, 10), (352, 13), (300, 100), (3, 80, 5), (2, 2, 130, 34)]
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


def random_rows(shape: tuple[int, ...], dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Many magnitudes, and now and then a zero of either sign, an infinity, a NaN of either sign, a subnormal."""
    generator = torch.Generator().manual_seed(seed + sum(shape))
    x = torch.randn(shape, generator=generator) * torch.rand(shape, generator=generator).pow(-0.7)
    for index, special in enumerate((0.0, -0.0, INF, -INF, NAN, -NAN, 1e-40, -1e-40, 3e38, 6e-8)):
        x[torch.rand(shape, generator=generator) < 0.002 * (index < 2 or x.numel() > 1000)] = special
    return x.to(dtype)


def random_scale(lead: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    return torch.rand(lead, generator=torch.Generator().manual_seed(seed)) * 0.02 + 1e-4


def random_codes(shape: tuple[int, ...]) -> np.ndarray:
    return np.random.default_rng(sum(shape)).integers(0, 256, shape, dtype=np.uint8)  # NaN codes among them


def assert_same_codes(got, want) -> None:
    """Scales and elements apart: which of the two is off says where to look."""
    assert got[1].shape == want[1].shape and got[0].shape == want[0].shape
    assert got[1].is_contiguous() and got[0].is_contiguous()
    assert torch.equal(bytes_of(got[1]).cpu(), bytes_of(want[1]).cpu()), "block scales"
    assert torch.equal(got[0].cpu() & 15, want[0].cpu() & 15), "even elements"
    assert torch.equal(got[0].cpu() >> 4, want[0].cpu() >> 4), "odd elements"


def assert_same_values(got: torch.Tensor, want: torch.Tensor) -> None:
    """Bit for bit, but for the bits of a NaN."""
    got, want = got.cpu(), want.cpu()
    nan = torch.isnan(want)
    assert got.dtype == want.dtype and torch.equal(torch.isnan(got), nan)
    assert torch.equal(bytes_of(got[~nan]), bytes_of(want[~nan]))


def check_quantize(x: torch.Tensor, s2: torch.Tensor, swizzled: bool = False) -> None:
    got = quantize_nvfp4(x, s2, swizzled=swizzled, implementation="kernel")
    assert_same_codes(got, quantize_nvfp4(x, s2, swizzled=swizzled, implementation="reference"))


@pytest.fixture
def poisoned_empty(monkeypatch):
    """Fresh memory that holds what would be noticed: NaN scales, code 15, and as floats NaN."""
    empty = torch.empty

    def poisoned(*args, **more):
        tensor = empty(*args, **more)
        tensor.view(torch.uint8).fill_(0xFF)
        return tensor

    monkeypatch.setattr(torch, "empty", poisoned)


# --- quantise -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("per_row", [False, True])
def test_quantize(dtype, shape, per_row, poisoned_empty):
    x, s2 = random_rows(shape, dtype), random_scale(shape[:-1] if per_row else ())
    check_quantize(x, s2)


@pytest.mark.parametrize("shape", [(1, 16), (9, 80), (129, 48), (127, 64), (3, 130, 96), (2, 2, 5, 16), (4, 4160)])
@pytest.mark.parametrize("per_row", [False, True])
def test_swizzled_scales_and_their_padding(shape, per_row, poisoned_empty):
    x, s2 = random_rows(shape, torch.bfloat16), random_scale(shape[:-1] if per_row else ())
    check_quantize(x, s2, swizzled=True)
    plain = quantize_nvfp4(x, s2, implementation="kernel")[1]
    swizzled = quantize_nvfp4(x, s2, swizzled=True, implementation="kernel")[1]
    assert torch.equal(bytes_of(swizzled), torch.from_numpy(swizzle(bytes_of(plain).numpy())))


@pytest.mark.parametrize("code", range(127))
def test_ties_of_the_block_scale_and_of_every_element(code):
    """Under each block scale: a little below, on and a little above every boundary, of either sign."""
    unit = np.float32(E4M3[code])
    ties = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 0.5, 1.0, 3.0, 4.0, 5.9], dtype=np.float32) * unit
    x = np.zeros((6, 16), dtype=np.float32)
    x[:, 0] = unit * np.float32(6)
    x[:3, 1:13] = np.stack((np.nextafter(ties, np.float32(0)), ties, np.nextafter(ties, np.float32(INF))))
    x[3:, 1:13] = -x[:3, 1:13]
    for s2 in (1.0, 0.01234, 2.0**-120, 1.7e30):
        scale = torch.tensor(s2, dtype=torch.float32)
        check_quantize(torch.from_numpy(x) * scale, scale)
    if code < 126:
        middle = np.float32((E4M3[code] + E4M3[code + 1]) / 2) * np.float32(6)
        edges = np.stack((np.nextafter(middle, np.float32(0)), middle, np.nextafter(middle, np.float32(INF))))
        check_quantize(torch.from_numpy(np.repeat(edges[:, None], 16, 1)), ONE)


def test_the_kernel_agrees_with_the_oracle_too():
    """Not only with the reference."""
    x, s2 = torch.randn(65, 208, generator=torch.Generator().manual_seed(2)), random_scale((65,))
    want_packed, want_scale = quantize(x.numpy(), s2.numpy())
    got = quantize_nvfp4(x, s2, implementation="kernel")
    assert_same_codes(got, (torch.from_numpy(want_packed), as_e4m3(want_scale)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("s2", [1.0, 0.0371, 1e-30])
def test_every_16_bit_number(dtype, s2):
    """Each alone in its block, and beside others: subnormals, infinities and all NaNs among them."""
    numbers = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(dtype)
    alone = torch.zeros(65536, 16, dtype=dtype)
    alone[:, 3] = numbers
    for x in (alone, numbers.reshape(16, 4096), numbers[torch.randperm(65536)].reshape(64, 1024)):
        check_quantize(x, torch.tensor(s2))


@pytest.mark.parametrize("s2", [0.0, -0.0, -1.0, INF, -INF, NAN, 1e-45, 3e-39, 3e38])
def test_global_scales_that_only_the_cpu_refuses(s2):
    """The kernel itself, as on a GPU, where nobody looks at the value."""
    x, scale = random_rows((40, 64)), torch.tensor(s2)
    x[0], x[1, :16], x[2, 3] = 0.0, 1e-45, INF
    got = kernel.quantize_nvfp4(x, scale, swizzled=False)
    assert_same_codes(got, reference.quantize_nvfp4(x, scale))


@pytest.mark.parametrize("dtype", DTYPES)
def test_strides_and_unaligned_rows(dtype):
    """A row that starts anywhere, matrices apart, columns first: by a view or by a copy, the same bits."""
    wide = random_rows((9, 3 * 64 + 5), dtype)
    cubes = random_rows((4, 6, 80), dtype)
    for x in (
        wide[:, 64:128], wide[:, 1:65], wide[::2, 3:67], wide[:, 128:192].T.contiguous().T, wide[:1, 7:23],
        wide[:, :64].expand(2, 9, 64), cubes[:, 1:4], cubes.transpose(0, 1), cubes[::2, ::2, 16:64], cubes[1, 2],
    ):  # fmt: skip
        before = bytes_of(x).clone()
        check_quantize(x, torch.tensor(0.02))
        if x.dim() > 1:
            check_quantize(x, random_scale(x.shape[:-1]), swizzled=True)
        assert torch.equal(bytes_of(x), before)


@pytest.mark.parametrize("scale_shape", [(1,), (1, 1), (6,), (4, 1), (4, 6), (1, 6)])
def test_global_scales_that_broadcast(scale_shape):
    x = random_rows((4, 6, 32))
    s2 = random_scale(scale_shape)
    check_quantize(x, s2)
    check_quantize(x, random_scale((4, 12))[:, ::2])
    packed, scale = quantize_nvfp4(x, s2)
    want = dequantize_nvfp4(packed, scale, s2)
    assert_same_values(dequantize_nvfp4(packed, scale, s2, implementation="kernel"), want)


@settings(deadline=None, max_examples=100)
@given(bits=st.lists(st.integers(0, 2**32 - 1), min_size=16, max_size=48), exponent=st.integers(-30, 20))
def test_any_float32(bits, exponent):
    bits = bits[: len(bits) // 16 * 16]
    x = torch.from_numpy(np.array(bits, dtype=np.uint32).view(np.float32)[None].copy())
    check_quantize(x, torch.tensor(2.0**exponent * 1.1))


# --- dequantise -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("s2", [1.0, 0.0123, 3e-39, 1e37])
def test_dequantize_every_scale_code_with_every_byte(dtype, s2, poisoned_empty):
    packed = torch.arange(256, dtype=torch.uint8).repeat(256, 1)
    scale = torch.arange(256, dtype=torch.uint8)[:, None].expand(256, 32).view(torch.float8_e4m3fn)
    arguments = (packed, scale, torch.tensor(s2))
    got = dequantize_nvfp4(*arguments, dtype=dtype, implementation="kernel")
    assert_same_values(got, dequantize_nvfp4(*arguments, dtype=dtype))
    if dtype == torch.float32 and s2 == 1:
        assert got[0x38].tolist()[:4] == [E2M1[0], E2M1[0], E2M1[1], E2M1[0]]  # bytes 0 and 1 under scale 1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("per_row", [False, True])
def test_dequantize(dtype, shape, per_row, poisoned_empty):
    lead, k = shape[:-1], shape[-1]
    packed = torch.from_numpy(random_codes((*lead, k // 2)))
    scale = as_e4m3(random_codes((*lead, k // 16)))
    s2 = random_scale(lead if per_row else ())
    got = dequantize_nvfp4(packed, scale, s2, dtype=dtype, implementation="kernel")
    assert got.is_contiguous()
    assert_same_values(got, dequantize_nvfp4(packed, scale, s2, dtype=dtype))


def test_dequantize_strides():
    packed, scale = torch.from_numpy(random_codes((9, 90))), as_e4m3(random_codes((9, 20)))
    for codes, scales in (
        (packed[:, 8:72], scale[:, 3:11]),
        (packed[:, 5:69], scale[:, 1:9]),
        (packed[::2, 16:80], scale[::2, :8]),
        (packed[:, :64].T.contiguous().T, scale[:, ::2][:, :8]),
    ):
        s2 = random_scale(codes.shape[:-1])
        want = dequantize_nvfp4(codes, scales, s2)
        assert_same_values(dequantize_nvfp4(codes, scales, s2, implementation="kernel"), want)


# --- swizzle --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SCALE_SHAPES)
def test_swizzle(shape, poisoned_empty):
    codes = random_codes(shape)
    got = swizzle_blockscale(as_e4m3(codes), implementation="kernel")
    assert got.is_contiguous() and torch.equal(bytes_of(got), torch.from_numpy(swizzle(codes)))


@pytest.mark.parametrize("shape", SCALE_SHAPES)
@pytest.mark.parametrize("padding", [0, 0x7F])
def test_unswizzle_whatever_the_padding_holds(shape, padding, poisoned_empty):
    codes = random_codes(shape)
    got = unswizzle_blockscale(as_e4m3(swizzle(codes, padding)), *shape[-2:], implementation="kernel")
    assert got.is_contiguous() and torch.equal(bytes_of(got), torch.from_numpy(codes))


def test_swizzle_strides():
    codes = random_codes((3, 140, 41))
    for part in (codes[:, 3:133, 1:9], codes[::2, :, 4:8], codes[1, ::3], codes.transpose(0, 2, 1), codes[0, :1]):
        got = swizzle_blockscale(torch.from_numpy(part).view(torch.float8_e4m3fn), implementation="kernel")
        assert torch.equal(bytes_of(got), torch.from_numpy(swizzle(np.ascontiguousarray(part))))


@pytest.mark.parametrize("shape", [(0, 4), (3, 0), (0, 128, 4)])
def test_empty(shape):
    scale = as_e4m3(random_codes(shape))
    swizzled = swizzle_blockscale(scale, implementation="kernel")
    assert swizzled.shape == swizzle_blockscale(scale).shape
    assert unswizzle_blockscale(swizzled, *shape[-2:], implementation="kernel").shape == shape
    x = torch.empty(*shape[:-1], shape[-1] * 16)
    packed, block_scale = quantize_nvfp4(x, ONE, swizzled=True, implementation="kernel")
    assert block_scale.shape == swizzled.shape and (bytes_of(block_scale) == 0).all()
    assert dequantize_nvfp4(packed, scale, ONE, implementation="kernel").shape == x.shape


# --- which implementation -------------------------------------------------------------------------------------------


def test_unless_asked_the_cpu_uses_the_reference(monkeypatch):
    monkeypatch.setattr(kernel, "_launch", None)
    packed, scale = quantize_nvfp4(torch.ones(2, 64), ONE, swizzled=True)
    dequantize_nvfp4(packed, unswizzle_blockscale(scale, 2, 4), ONE)
    with pytest.raises(TypeError):
        quantize_nvfp4(torch.ones(2, 64), ONE, implementation="kernel")


BYTES, BYTES_SCALE = torch.zeros(2, 8, dtype=torch.uint8), as_e4m3(np.zeros((2, 1), np.uint8))


def on_meta(*shape: int) -> torch.Tensor:
    return torch.empty(shape, device="meta")


@pytest.mark.parametrize(
    "call",
    [
        lambda: quantize_nvfp4(on_meta(2, 16), on_meta(), implementation="kernel"),
        lambda: quantize_nvfp4(on_meta(2**30 + 1, 16), on_meta(), implementation="kernel"),
        lambda: dequantize_nvfp4(BYTES, BYTES_SCALE, ONE, dtype=torch.float64, implementation="kernel"),
    ],
)
def test_what_the_kernels_do_not_cover_raises_when_asked_for(call):
    with pytest.raises(UnsupportedError) as error:
        call()
    assert all((error.value.found, error.value.needed, error.value.fix))


def test_broken_contracts():
    with pytest.raises(ContractError, match="implementation"):
        quantize_nvfp4(torch.ones(2, 16), ONE, implementation="fast")
    with pytest.raises(ContractError, match="swizzled"):
        quantize_nvfp4(torch.ones(16), ONE, swizzled=True)


def test_no_result_depends_on_the_order_of_threads_and_blocks(monkeypatch):
    cpu = torch.device("cpu")
    monkeypatch.setitem(kernel._modules, cpu, load(kernel._SOURCE, cpu, ("SM120_HOST_REVERSE",)))
    check_quantize(random_rows((130, 96)), random_scale((130,)), swizzled=True)
    codes = random_codes((130, 37))
    swizzled = swizzle_blockscale(as_e4m3(codes), implementation="kernel")
    assert torch.equal(bytes_of(swizzled), torch.from_numpy(swizzle(codes)))


@pytest.mark.parametrize("columns", [1, 2, 3, 4, 5, 255, 256, 257, 512, 10_000])
@pytest.mark.parametrize("rows", [1, 2, 127, 128, 129, 100_000])
def test_blocks_cover_every_group_without_a_block_to_spare(rows, columns):
    log2, along, down = config.blocks(rows, columns)
    wide, high = 2**log2, config.THREADS >> log2
    assert (along - 1) * wide < columns <= along * wide and (down - 1) * high < rows <= down * high
    assert wide * high == config.THREADS and (wide < 2 * columns)


# --- GPU ------------------------------------------------------------------------------------------------------------


@needs_gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [*SHAPES, (2049, 6144), (8, 7168)])
@pytest.mark.parametrize("swizzled", [False, True])
def test_gpu_quantize(dtype, shape, swizzled):
    x, s2 = random_rows(shape, dtype).cuda(), random_scale(shape[:-1]).cuda()
    swizzled = swizzled and len(shape) > 1
    check_quantize(x, s2, swizzled)
    want = quantize_nvfp4(x.cpu(), s2.cpu(), swizzled=swizzled)
    assert_same_codes(quantize_nvfp4(x, s2, swizzled=swizzled, implementation="kernel"), want)


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gpu_every_16_bit_number(dtype):
    numbers = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(dtype).cuda()
    alone = torch.zeros(65536, 16, dtype=dtype, device="cuda")
    alone[:, 3] = numbers
    for s2 in (1.0, 0.0371, 1e-30):
        check_quantize(alone, torch.tensor(s2, device="cuda"))
        check_quantize(numbers.reshape(16, 4096), torch.tensor(s2, device="cuda"))


@needs_gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_gpu_dequantize_and_swizzle(dtype):
    packed = torch.arange(256, dtype=torch.uint8).repeat(256, 1).cuda()
    scale = torch.arange(256, dtype=torch.uint8)[:, None].expand(256, 32).contiguous().cuda().view(torch.float8_e4m3fn)
    for s2 in (1.0, 0.0123, 3e-39, 1e37):
        arguments = (packed, scale, torch.tensor(s2, device="cuda"))
        got = dequantize_nvfp4(*arguments, dtype=dtype, implementation="kernel")
        assert_same_values(got, dequantize_nvfp4(*arguments, dtype=dtype, implementation="reference"))
    for shape in SCALE_SHAPES:
        codes = random_codes(shape)
        swizzled = swizzle_blockscale(as_e4m3(codes).cuda(), implementation="kernel")
        assert torch.equal(bytes_of(swizzled).cpu(), torch.from_numpy(swizzle(codes)))
        plain = unswizzle_blockscale(swizzled, *shape[-2:], implementation="kernel")
        assert torch.equal(bytes_of(plain).cpu(), torch.from_numpy(codes))


@needs_gpu
def test_gpu_capture_and_replay_without_waiting():
    x, s2 = random_rows((64, 4096), torch.bfloat16).cuda(), torch.tensor(0.01, device="cuda")

    def step():
        packed, swizzled = quantize_nvfp4(x, s2, swizzled=True, implementation="kernel")
        plain = unswizzle_blockscale(swizzled, 64, 256, implementation="kernel")
        return packed, swizzled, dequantize_nvfp4(packed, plain, s2, dtype=x.dtype, implementation="kernel")

    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        packed, swizzled, decoded = step()
    for seed in range(3):
        x.copy_(random_rows((64, 4096), torch.bfloat16, seed))
        graph.replay()
        want = quantize_nvfp4(x.cpu(), s2.cpu(), swizzled=True)
        assert_same_codes((packed, swizzled), want)
        plain = unswizzle_blockscale(want[1], 64, 256)
        assert_same_values(decoded, dequantize_nvfp4(want[0], plain, s2.cpu(), dtype=x.dtype))
