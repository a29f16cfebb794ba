"""What the grouped GEMM has to compute, against float64: on the GPU as it is, on the CPU under TRITON_INTERPRET=1.

Not collected by its name: `test_grouped_gemm_prefill.py` runs it in a process of its own, because Triton looks at
TRITON_INTERPRET when it is imported, and other tests of the same process have imported it, or compile.
By hand: `TRITON_INTERPRET=1 pytest tests/kernels/moe/grouped_gemm_prefill_cases.py`, or without it on a GPU.
"""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
import mmap
import os
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from moe_oracle import activate
from nvfp4_oracle import as_e4m3, bytes_of, dequantize, swizzle

from sglang_sm120.errors import ContractError, UnsupportedError
from sglang_sm120.kernels.moe.expert_schedule.api import ExpertSchedule, expert_schedule
from sglang_sm120.kernels.moe.fused_moe.api import MoeActivation
from sglang_sm120.kernels.moe.grouped_gemm_prefill import api, kernel
from sglang_sm120.kernels.moe.grouped_gemm_prefill.config import GemmConfig
from sglang_sm120.kernels.quantization.nvfp4.api import quantize_nvfp4

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
REFERENCE = not INTERPRETED and not torch.cuda.is_available()  # then the plain torch code is what runs here
DEVICE = torch.device("cpu" if INTERPRETED or REFERENCE else "cuda")
FLOAT = torch.float16 if INTERPRETED else torch.bfloat16  # the interpreter computes bfloat16 on its raw bits
SILU = MoeActivation("silu")
NAN_CODE = 0x7F


@pytest.fixture(autouse=True)
def the_interpreter_knows_nan(monkeypatch) -> None:
    """It decodes e4m3's NaN as 480, which times 0 is harmless: padding that leaks would not show."""
    if not INTERPRETED:
        return
    from triton.runtime import interpreter

    convert = interpreter._convert_float

    def with_nan(data, from_dtype, to_dtype, rounding):
        result = convert(data, from_dtype, to_dtype, rounding)
        if from_dtype.name == "fp8e4nv":
            nan = {"fp16": 0x7E00, "fp32": 0x7FC00000}[to_dtype.name]
            result = np.where(data.view(np.uint8) & 0x7F == NAN_CODE, nan, result).astype(result.dtype)
        return result

    monkeypatch.setattr(interpreter, "_convert_float", with_nan)


@dataclass(frozen=True, eq=False)
class Problem:
    """Weights as codes, and which slots each expert has."""

    codes: np.ndarray
    scales: np.ndarray
    alpha: np.ndarray
    slots: list[list[int]]  # by expert
    num_slots: int

    @property
    def n(self) -> int:
        return self.codes.shape[1]

    @property
    def k(self) -> int:
        return self.codes.shape[2] * 2


def problem(rows: list[int], n: int, k: int, seed: int = 0, halves: bool = False) -> Problem:
    """rows: of each expert; the slots are dealt out at random, and some belong to no expert."""
    rng = np.random.default_rng([len(rows), n, k, seed])
    num_slots = sum(rows) + 3
    dealt = rng.permutation(num_slots)
    ends = np.cumsum([0, *rows])
    shape = (len(rows), 2) if halves else (len(rows),)
    return Problem(
        codes=rng.integers(0, 256, (len(rows), n, k // 2), dtype=np.uint8),
        scales=rng.integers(16, 64, (len(rows), n, k // 16), dtype=np.uint8),
        alpha=rng.uniform(0.02, 0.2, shape).astype(np.float32),  # far apart, so that a mixed-up one shows
        slots=[sorted(dealt[a:b].tolist()) for a, b in itertools.pairwise(ends)],
        num_slots=num_slots,
    )


def schedule_of(p: Problem, block_rows: int, order: str = "column_major", garbage: int = 2**30) -> ExpertSchedule:
    """By hand, with `garbage` wherever nothing has to be."""
    sorted_slots, block_expert, firsts = [], [], []
    for expert, slots in enumerate(p.slots):
        firsts.append(len(block_expert))
        blocks = -(-len(slots) // block_rows)
        sorted_slots += slots + [garbage] * (blocks * block_rows - len(slots))
        block_expert += [expert] * blocks
    count = len(block_expert)
    tensors = [
        sorted_slots + [garbage] * (2 * block_rows),
        block_expert + [garbage] * 2,
        firsts,
        [len(slots) for slots in p.slots],
        [count],
        [[e, firsts[e], -(-len(p.slots[e]) // block_rows), len(p.slots[e])] for e in block_expert]
        + [[garbage] * 4] * 2,
    ]
    on_device = [torch.tensor(values, dtype=torch.int32, device=DEVICE) for values in tensors]
    return ExpertSchedule(*on_device, block_rows=block_rows, order=order)


def activations(rows: int, k: int, numerics: str, dtype: torch.dtype, seed: int = 1):
    """A, its scales or None, and its values in float64."""
    x = torch.randn(rows, k, generator=torch.Generator().manual_seed(seed)).to(dtype)
    if numerics == "w4a16":
        return x.to(DEVICE), None, x.double().numpy()
    packed, scale = quantize_nvfp4(x, torch.tensor(0.01))
    values = dequantize(packed.numpy(), scale.view(torch.uint8).numpy(), 1.0)
    return packed.to(DEVICE), scale.to(DEVICE), values


def weights_of(p: Problem) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    tensors = torch.from_numpy(p.codes), as_e4m3(swizzle(p.scales, NAN_CODE)), torch.from_numpy(p.alpha)
    return tuple(tensor.to(DEVICE) for tensor in tensors)


def oracle(
    p: Problem, values: np.ndarray, a_div: int = 1, activation=None, is_gated=False, order="up_gate", router=None
) -> np.ndarray:
    """float64 [slots, columns], NaN for a slot that no expert has."""
    out = np.full((p.num_slots, p.n // 2 if is_gated else p.n), np.nan)
    for expert, slots in enumerate(p.slots):
        weight = dequantize(p.codes[expert], p.scales[expert], 1.0)
        alpha = np.repeat(p.alpha[expert].reshape(-1).astype(float), p.n // p.alpha[expert].size)
        for slot in slots:
            y = (weight @ values[slot // a_div]) * alpha
            if is_gated:
                first, second = y[: p.n // 2], y[p.n // 2 :]
                y = activate(*((second, first) if order == "up_gate" else (first, second)), activation)
            elif activation is not None:
                y = activate(None, y, activation)
            out[slot] = y * (1.0 if router is None else router[slot])
    return out


def tile(block_rows: int, block_n: int, block_k: int) -> GemmConfig:
    return GemmConfig(block_rows, block_n, block_k, num_warps=4, num_stages=2)


def tickets() -> torch.Tensor:
    return torch.zeros(2, dtype=torch.int32, device=DEVICE)


def poisoned(rows: int, columns: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full((rows, columns), float("nan"), dtype=dtype, device=DEVICE)


# Tensor cores add less exactly than fp32 does, and the GPU approximates exp.
TOLERANCE = 1e-5 if DEVICE.type == "cuda" else 3e-6


def assert_rows(got: torch.Tensor, want: np.ndarray, tolerance: float = TOLERANCE) -> None:
    """Every row within `tolerance` of its size; a row that is NaN in `want` was not written."""
    got, want = got.cpu().double(), torch.from_numpy(want)
    written = ~want.isnan().all(1)
    assert got[~written].isnan().all()
    size = want[written].norm(dim=1) + 1e-30
    error = (got[written] - want[written]).norm(dim=1) / size
    assert (error <= tolerance).all(), f"relative error by row up to {error.max().item():.2e}"


def check(p: Problem, numerics: str, order: str, with_tickets: bool, config: GemmConfig, dtype=FLOAT, **more) -> None:
    a, a_scale, values = activations(p.num_slots, p.k, numerics, dtype)
    counters = tickets() if with_tickets else None
    out = poisoned(p.num_slots, p.n // 2 if more.get("is_gated") else p.n)
    result = api.grouped_gemm_prefill(
        a, *weights_of(p), schedule_of(p, config.block_rows, order), out,
        a_scale=a_scale, tickets=counters, config=config, **more,
    )  # fmt: skip
    assert result is out
    if "w13_order" in more:
        more["order"] = more.pop("w13_order")
    assert_rows(out, oracle(p, values, **more))
    assert counters is None or counters.tolist() == [0, 0]


NUMERICS = pytest.mark.parametrize("numerics", ["w4a4", "w4a16"])


@pytest.mark.parametrize("with_tickets", [False, True], ids=["static", "tickets"])
@pytest.mark.parametrize("order", ["column_major", "row_major"])
@NUMERICS
@pytest.mark.parametrize(
    ("rows", "n", "k", "config"),
    [
        ([3, 0, 40, 0, 16, 1], 160, 80, tile(16, 64, 64)),  # N and K off the tile, K off 64, experts without rows
        ([0, 0, 70, 0], 352, 96, tile(32, 128, 128)),  # all on one expert, K shorter than a step
        ([17, 5, 0, 130], 144, 176, tile(64, 64, 128)),
        ([130, 1], 64, 256, tile(128, 64, 128)),  # all on the tile
    ],
)
def test_agrees_with_float64(rows, n, k, config, numerics, order, with_tickets) -> None:
    check(problem(rows, n, k), numerics, order, with_tickets, config)


@NUMERICS
@pytest.mark.parametrize(
    "rows", [[0, 0, 0], [1, 0, 0], [0, 0, 1], [15, 16, 17], [31, 32, 33], [0, 49, 0]], ids=lambda rows: str(rows)
)
def test_numbers_of_rows(rows, numerics) -> None:
    check(problem(rows, 32, 64), numerics, "column_major", True, tile(16, 64, 64))
    check(problem(rows, 32, 64), numerics, "row_major", False, tile(16, 64, 64))


@NUMERICS
@pytest.mark.parametrize(("n", "k"), [(2 * 80, 48), (2 * 160, 80), (2 * 45, 720), (2 * 352, 112), (2880, 16)])
def test_sizes_of_models(n, k, numerics) -> None:
    """One step or many, columns to spare, and halves that end inside a tile."""
    check(problem([2, 0, 18], n, k, halves=True), numerics, "column_major", False, tile(16, 128, 128))


GATED = [
    SILU,
    MoeActivation("gelu"),
    MoeActivation("silu", alpha=1.702, limit=0.5),
    MoeActivation("silu", limit=0.5, beta=0.25),
    MoeActivation("silu", alpha=1.702),  # without a limit: ignored
]


@pytest.mark.parametrize("w13_order", ["up_gate", "gate_up"])
@pytest.mark.parametrize("activation", GATED, ids=str)
@NUMERICS
def test_gated_activations(numerics, activation, w13_order) -> None:
    """Half of 80 rows on tiles of 32 columns, with a global scale for each half."""
    check(
        problem([20, 0, 3], 160, 64, halves=True), numerics, "column_major", False, tile(16, 64, 64),
        activation=activation, is_gated=True, w13_order=w13_order,
    )  # fmt: skip


def test_gated_with_one_alpha() -> None:
    check(problem([5, 0], 64, 64), "w4a4", "column_major", False, tile(16, 64, 64), activation=SILU, is_gated=True)


@pytest.mark.parametrize("name", ["silu", "gelu", "relu2", "identity"])
@NUMERICS
def test_ungated_activations(numerics, name) -> None:
    p = problem([20, 0, 3], 96, 64)
    check(p, numerics, "column_major", False, tile(16, 64, 64), activation=MoeActivation(name))


@NUMERICS
def test_one_row_of_a_for_each_token(numerics) -> None:
    check(problem([9, 0, 20], 64, 64), numerics, "column_major", False, tile(16, 64, 64), a_div=4)


@NUMERICS
def test_rows_in_sorted_order(numerics) -> None:
    """A GEMM into sorted rows and one out of them, with NaN in the rows of the padding of both."""
    p, config = problem([9, 0, 20], 64, 64), tile(16, 64, 64)
    schedule = schedule_of(p, 16, garbage=-1)
    positions = [i for i, slot in enumerate(schedule.sorted_slots.tolist()) if slot >= 0]
    slots = schedule.sorted_slots[positions].long().cpu()
    a, a_scale, values = activations(p.num_slots, p.k, numerics, FLOAT)
    capacity = schedule.sorted_slots.numel()
    want = oracle(p, values)

    out = poisoned(capacity, p.n)
    more = {"a_scale": a_scale, "config": config}
    api.grouped_gemm_prefill(a, *weights_of(p), schedule, out, out_rows="sorted", **more)
    in_order = np.full((capacity, p.n), np.nan)
    in_order[positions] = want[slots]
    assert_rows(out, in_order)

    sorted_a = torch.full((capacity, a.shape[1]), 0xFF if numerics == "w4a4" else float("nan"), dtype=a.dtype)
    sorted_a[positions] = a.cpu()[slots]
    if a_scale is not None:
        sorted_scale = torch.full((capacity, a_scale.shape[1]), NAN_CODE, dtype=torch.uint8)
        sorted_scale[positions] = a_scale.cpu().view(torch.uint8)[slots]
        more["a_scale"] = sorted_scale.view(torch.float8_e4m3fn).to(DEVICE)
    out = poisoned(p.num_slots, p.n)
    api.grouped_gemm_prefill(sorted_a.to(DEVICE), *weights_of(p), schedule, out, a_rows="sorted", **more)
    assert_rows(out, want)


@NUMERICS
def test_router_weights(numerics) -> None:
    p = problem([9, 0, 20], 96, 64)
    router = torch.rand(p.num_slots, generator=torch.Generator().manual_seed(3))
    a, a_scale, values = activations(p.num_slots, p.k, numerics, FLOAT)
    out, more = poisoned(p.num_slots, p.n), {"a_scale": a_scale, "config": tile(16, 64, 64)}
    api.grouped_gemm_prefill(a, *weights_of(p), schedule_of(p, 16), out, router_weights=router.to(DEVICE), **more)
    assert_rows(out, oracle(p, values, router=router.double().numpy()))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, *([] if INTERPRETED else [torch.bfloat16])], ids=str)
def test_dtypes(dtype) -> None:
    """Of A, and of the result: one rounding."""
    p = problem([9, 0, 20], 96, 80)
    a, _, values = activations(p.num_slots, p.k, "w4a16", FLOAT if DEVICE.type == "cuda" else dtype)
    out = poisoned(p.num_slots, p.n, dtype)
    api.grouped_gemm_prefill(a, *weights_of(p), schedule_of(p, 16), out, config=tile(16, 64, 64))
    assert_rows(out, oracle(p, values), tolerance=max(torch.finfo(dtype).eps, TOLERANCE))


@NUMERICS
def test_every_code_of_a_weight(numerics) -> None:
    """All 256 scales with all 16 elements, one at a time: a row of A with a single 1. NaN stays in its column."""
    p = problem([16, 0], 256, 16)
    p.codes[0] = np.arange(0x10, 0x100, 0x22, dtype=np.uint8)  # 0, 1, ..., 15 along K
    p.scales[0, :, 0] = np.arange(256)
    values = np.zeros((p.num_slots, 16))
    values[p.slots[0], np.arange(16)] = 1
    x = torch.from_numpy(values)
    a, a_scale = x.to(FLOAT).to(DEVICE), None
    if numerics == "w4a4":
        a, a_scale = (tensor.to(DEVICE) for tensor in quantize_nvfp4(x.float(), torch.tensor(1 / 6)))
        values = values * 6
    out = poisoned(p.num_slots, p.n)
    api.grouped_gemm_prefill(
        a, *weights_of(p), schedule_of(p, 16), out, a_scale=a_scale, config=tile(16, 128, 64)
    )  # fmt: skip
    want = oracle(p, values)[p.slots[0]]
    got = out.cpu().double().numpy()[p.slots[0]]
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
    assert np.isnan(want[:, [0x7F, 0xFF]]).all()
    np.testing.assert_allclose(got, want, rtol=2e-7)


def test_nan_stays_in_its_row() -> None:
    p = problem([9, 0, 20], 96, 64)
    a, _, values = activations(p.num_slots, p.k, "w4a16", FLOAT)
    router = torch.ones(p.num_slots)
    bad_a, bad_router = p.slots[0][4], p.slots[2][11]
    a[bad_a, 7], router[bad_router] = float("nan"), float("nan")
    out = poisoned(p.num_slots, p.n)
    api.grouped_gemm_prefill(
        a, *weights_of(p), schedule_of(p, 16), out, router_weights=router.to(DEVICE), config=tile(16, 64, 64)
    )
    want = oracle(p, values)
    want[[bad_a, bad_router]] = np.nan
    assert_rows(out, want)


@NUMERICS
def test_again_and_again_with_the_same_tickets(numerics) -> None:
    """The last program out leaves the counters at zero: no memset between launches, of any grid. Same bits, too."""
    p, counters, results = problem([9, 0, 50], 96, 64), tickets(), []
    a, a_scale, _ = activations(p.num_slots, p.k, numerics, FLOAT)
    for programs in (1, 2, 5, 100):
        out = poisoned(p.num_slots, p.n)
        api.grouped_gemm_prefill(
            a, *weights_of(p), schedule_of(p, 16), out,
            a_scale=a_scale, config=tile(16, 64, 64), tickets=counters, num_programs=programs,
        )  # fmt: skip
        assert counters.tolist() == [0, 0]
        results.append(bytes_of(out))
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("order", ["column_major", "row_major"])
def test_with_the_schedule_of_a_routing(order) -> None:
    """expert_schedule's result, with ids to skip; the tile is the one chosen for it."""
    ids = torch.tensor([[0, 2], [-1, 2], [2, 1], [1, -1], [2, 0]], dtype=torch.int32)
    p = dataclasses.replace(
        problem([1, 1, 1], 96, 64),
        slots=[[s for s, e in enumerate(ids.flatten().tolist()) if e == expert] for expert in range(3)],
        num_slots=10,
    )
    schedule = expert_schedule(ids.to(DEVICE), num_experts=3, block_rows=16, order=order)
    a, a_scale, values = activations(5, p.k, "w4a4", FLOAT)
    out = poisoned(10, p.n)
    api.grouped_gemm_prefill(a, *weights_of(p), schedule, out, a_scale=a_scale, a_div=2)
    assert_rows(out, oracle(p, values, a_div=2))


@pytest.mark.parametrize("tokens", [0, 1])
def test_nothing_is_routed_here(tokens) -> None:
    p = problem([0, 0], 96, 64)
    schedule = expert_schedule(torch.full((tokens, 2), -1, device=DEVICE), num_experts=2, block_rows=16)
    out = poisoned(2 * tokens, p.n)
    a, a_scale, _ = activations(tokens, p.k, "w4a4", FLOAT)
    counters = tickets()
    api.grouped_gemm_prefill(a, *weights_of(p), schedule, out, a_scale=a_scale, a_div=2, tickets=counters)
    assert out.isnan().all()
    assert counters.tolist() == [0, 0]


@triton.jit
def list_tiles(out_ptr, block_expert_ptr, first_ptr, rows_ptr, NT: tl.constexpr, COLUMN_MAJOR: tl.constexpr):
    t = tl.program_id(0)
    expert, _first_block, _rows, m, n = kernel.tile_of(t, block_expert_ptr, first_ptr, rows_ptr, NT, COLUMN_MAJOR, 16)
    tl.store(out_ptr + t * 3, expert)
    tl.store(out_ptr + t * 3 + 1, m)
    tl.store(out_ptr + t * 3 + 2, n)


@pytest.mark.skipif(REFERENCE, reason="of the kernel")
@pytest.mark.parametrize("order", ["column_major", "row_major"])
def test_order_of_the_tiles(order) -> None:
    schedule = schedule_of(problem([0, 33, 16, 0, 5], 32, 64), 16, order)
    out = torch.full((5 * 3, 3), -1, dtype=torch.int32, device=DEVICE)
    tensors = schedule.block_expert, schedule.expert_first_block, schedule.expert_rows
    list_tiles[(5 * 3,)](out, *tensors, NT=3, COLUMN_MAJOR=order == "column_major")
    if order == "column_major":
        want = [[e, m, n] for e, blocks in ((1, 3), (2, 1), (4, 1)) for n in range(3) for m in range(blocks)]
    else:
        want = [[e, m, n] for e, blocks in ((1, 3), (2, 1), (4, 1)) for m in range(blocks) for n in range(3)]
    assert out.tolist() == want


def before_a_wall(tensor: torch.Tensor) -> torch.Tensor:
    """A copy that ends where a page ends, before a page that cannot be read: the process dies of a step too far."""
    data = bytes_of(tensor).flatten()
    pages = -(-data.numel() // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = mmap.mmap(-1, pages + mmap.PAGESIZE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(address + pages), mmap.PAGESIZE, 0) == 0
    copy = torch.frombuffer(memory, dtype=torch.uint8, offset=pages - data.numel(), count=data.numel())
    copy.copy_(data)
    return copy.view(tensor.dtype).reshape(tensor.shape)


@pytest.mark.skipif(not INTERPRETED, reason="of the kernel, in memory of the CPU")
@NUMERICS
@pytest.mark.parametrize("is_gated", [False, True], ids=["ungated", "gated"])
@pytest.mark.parametrize(("n", "k"), [(96 + 2, 80), (128 + 32, 96)])
def test_touches_nothing_beyond_its_tensors(n, k, is_gated, numerics) -> None:
    p = problem([9, 0, 17], n, k)
    a, a_scale, values = activations(p.num_slots, k, numerics, FLOAT)
    weight, blockscale, alpha = (before_a_wall(tensor) for tensor in weights_of(p))
    schedule = schedule_of(p, 16)
    blocks = int(schedule.num_blocks)
    schedule = dataclasses.replace(
        schedule,
        sorted_slots=before_a_wall(schedule.sorted_slots[: blocks * 16]),
        block_expert=before_a_wall(schedule.block_expert[:blocks]),
        expert_first_block=before_a_wall(schedule.expert_first_block),
        expert_rows=before_a_wall(schedule.expert_rows),
        num_blocks=before_a_wall(schedule.num_blocks),
    )
    out = before_a_wall(poisoned(p.num_slots, n // 2 if is_gated else n))
    more = {"activation": SILU, "is_gated": is_gated}
    api.grouped_gemm_prefill(
        before_a_wall(a), weight, blockscale, alpha, schedule, out, config=tile(16, 64, 64), **more,
        a_scale=None if a_scale is None else before_a_wall(a_scale),
        router_weights=before_a_wall(torch.ones(p.num_slots)),
    )  # fmt: skip
    assert_rows(out, oracle(p, values, **more))


@pytest.mark.skipif(REFERENCE, reason="of the kernel's offsets")
def test_offsets_beyond_two_to_the_31() -> None:
    """A row of A, an expert's weight and a row of the result whose bytes lie beyond what int32 counts."""
    n, k = 64, 2**16
    experts = 2**31 // (n * k // 2) + 1
    rows = 2**31 // (k // 2) + 1
    p = problem([0, 1], n, k)
    p = dataclasses.replace(p, slots=[[], [rows - 1]], num_slots=rows)
    weight = torch.zeros(experts, n, k // 2, dtype=torch.uint8, device=DEVICE)
    scales = torch.zeros(experts, 128, k // 16, dtype=torch.uint8, device=DEVICE)
    weight[-1], scales[-1] = torch.from_numpy(p.codes[1]), torch.from_numpy(swizzle(p.scales[1]))
    a1, a1_scale, values = activations(1, k, "w4a4", FLOAT)
    a = torch.zeros(rows, k // 2, dtype=torch.uint8, device=DEVICE)
    a_scale = torch.zeros(rows, k // 16, dtype=torch.uint8, device=DEVICE).view(torch.float8_e4m3fn)
    a[-1:], a_scale[-1:] = a1, a1_scale
    schedule = schedule_of(dataclasses.replace(p, slots=[[]] * (experts - 1) + [[rows - 1]]), 16)
    out = poisoned(rows, n)
    alpha = torch.ones(experts, device=DEVICE)
    api.grouped_gemm_prefill(
        a, weight, scales.view(torch.float8_e4m3fn), alpha, schedule, out, a_scale=a_scale, config=tile(16, 64, 256)
    )
    weight_values = dequantize(p.codes[1], p.scales[1], 1.0)
    assert out[:-1].isnan().all()
    assert_rows(out[-1:], (weight_values @ values[0])[None], tolerance=1e-5)


@pytest.mark.skipif(DEVICE.type != "cuda", reason="CUDA graphs")
@pytest.mark.parametrize("with_tickets", [False, True], ids=["static", "tickets"])
def test_replayed_in_a_cuda_graph(with_tickets) -> None:
    """Captured once; replayed with other schedules of the same size, the smaller ones leaving a stale tail."""
    p, config = problem([40, 0, 23], 192, 256, halves=True), tile(16, 64, 128)
    a, a_scale, values = activations(p.num_slots, p.k, "w4a4", FLOAT)
    schedule, out = schedule_of(p, 16), poisoned(p.num_slots, p.n)
    counters = tickets() if with_tickets else None
    weights = weights_of(p)

    def run() -> None:
        api.grouped_gemm_prefill(a, *weights, schedule, out, a_scale=a_scale, config=config, tickets=counters)

    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for slots in (p.slots, [p.slots[0][:7], [], p.slots[2]], [[], [], []], p.slots):
        now = dataclasses.replace(p, slots=slots)
        fresh = schedule_of(now, 16)
        for name in ("sorted_slots", "block_expert", "expert_first_block", "expert_rows", "num_blocks"):
            getattr(schedule, name)[: getattr(fresh, name).numel()] = getattr(fresh, name)
        for _ in range(20):
            out.fill_(float("nan"))
            graph.replay()
        assert_rows(out, oracle(now, values))


@pytest.mark.skipif(not INTERPRETED, reason="of the interpreter")
def test_the_interpreter_refuses_bfloat16() -> None:
    p = problem([1], 32, 64)
    a = torch.zeros(p.num_slots, p.k, dtype=torch.bfloat16)
    with pytest.raises(UnsupportedError, match="bfloat16"):
        api.grouped_gemm_prefill(a, *weights_of(p), schedule_of(p, 16), poisoned(p.num_slots, p.n))


def test_a_tile_for_another_schedule_is_refused() -> None:
    if REFERENCE:
        pytest.skip("the reference has no tile")
    p = problem([1], 32, 64)
    a, a_scale, _ = activations(p.num_slots, p.k, "w4a4", FLOAT)
    out = poisoned(p.num_slots, p.n)
    with pytest.raises(ContractError, match="a tile of 32 rows for a schedule of 16"):
        api.grouped_gemm_prefill(
            a, *weights_of(p), schedule_of(p, 16), out, a_scale=a_scale, config=tile(32, 64, 64)
        )  # fmt: skip
    with pytest.raises(ContractError, match="may take"):
        api.grouped_gemm_prefill(
            a, *weights_of(p), schedule_of(p, 16), out, a_scale=a_scale, config=GemmConfig(16, 256, 512, 4, 8)
        )  # fmt: skip
