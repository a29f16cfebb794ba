"""The MoE layer by our kernels on a GPU: against float64, replayed in CUDA graphs, in poisoned and in large memory."""

from __future__ import annotations

import dataclasses
import gc
from dataclasses import dataclass

import pytest
import torch
from moe_oracle import SILU, map_tensors

from sglang_sm120.kernels.moe.fused_moe.api import MoeActivation, Nvfp4MoeWeights, fused_moe
from sglang_sm120.kernels.moe.grouped_gemm_decode import api as decode
from sglang_sm120.kernels.moe.grouped_gemm_middle import api as middle
from sglang_sm120.kernels.moe.w4a16 import LayerShape, num_sms
from sglang_sm120.kernels.quantization.nvfp4.api import (
    dequantize_nvfp4,
    quantize_nvfp4,
    swizzle_blockscale,
    unswizzle_blockscale,
)

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

NAN = float("nan")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Of a row's norm. With few slots a row can hang on one large value between the GEMMs, which float64 may round the other
# way (one step, 2^-8 or 2^-11); the result's rounding is less than half of that.
TOLERANCE = {torch.bfloat16: 5e-3, torch.float16: 6e-4}
W4A4_TOLERANCE = 2e-2  # an fp32 rounding may move a code by a step

# backend and numerics
PATHS = [("decode", "w4a16"), ("middle", "w4a16"), ("prefill", "w4a16"), ("prefill", "w4a4")]


# --- layers and what they are to give -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Size:
    experts: int
    top_k: int
    hidden: int
    intermediate: int
    is_gated: bool = True


def swizzled_codes(experts: int, rows: int, columns: int, generator: torch.Generator) -> torch.Tensor:
    """Scales of 2^-5 to 1, swizzled; NaN in the padding."""
    codes = torch.randint(16, 56, (experts, rows, columns), dtype=torch.uint8, device=DEVICE, generator=generator)
    swizzled = swizzle_blockscale(codes.view(torch.float8_e4m3fn)).view(torch.uint8)
    swizzled[swizzled == 0] = 0x7F  # no real one is zero
    return swizzled.view(torch.float8_e4m3fn)


def make_weights(size: Size, order: str = "up_gate", seed: int = 0) -> Nvfp4MoeWeights:
    generator = torch.Generator(DEVICE).manual_seed(seed)

    def uniform(low: float, high: float, *shape: int) -> torch.Tensor:
        return torch.rand(*shape, device=DEVICE, generator=generator) * (high - low) + low

    def codes(*shape: int) -> torch.Tensor:
        return torch.randint(0, 256, shape, dtype=torch.uint8, device=DEVICE, generator=generator)

    experts, hidden, intermediate = size.experts, size.hidden, size.intermediate
    rows = (2 if size.is_gated else 1) * intermediate
    width, depth = hidden**0.5, intermediate**0.5  # results of about 1 for inputs of about 1
    s2 = uniform(0.5 / width, 4 / width, experts, 2) if size.is_gated else uniform(0.5 / width, 4 / width, experts)
    return Nvfp4MoeWeights(
        w13_weight=codes(experts, rows, hidden // 2),
        w13_blockscale=swizzled_codes(experts, rows, hidden // 16, generator),
        w13_global_scale=s2,
        w2_weight=codes(experts, hidden, intermediate // 2),
        w2_blockscale=swizzled_codes(experts, hidden, intermediate // 16, generator),
        w2_global_scale=uniform(0.5 / depth, 4 / depth, experts),
        w13_input_scale=uniform(0.001, 0.01, experts),
        w2_input_scale=uniform(0.001, 0.01, experts),
        w13_order=order,
        is_gated=size.is_gated,
    )


def make_inputs(size: Size, tokens: int, dtype: torch.dtype, seed: int = 0):
    generator = torch.Generator(DEVICE).manual_seed(1000 * seed + tokens)
    x = torch.randn(tokens, size.hidden, device=DEVICE, generator=generator).to(dtype)
    topk_weights = torch.rand(tokens, size.top_k, device=DEVICE, generator=generator)
    scores = torch.rand(tokens, size.experts, device=DEVICE, generator=generator)
    scores *= torch.rand(size.experts, device=DEVICE, generator=generator)  # some experts are popular
    return x, topk_weights, scores.topk(size.top_k, dim=1).indices.to(torch.int32)


def through(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    packed, block = quantize_nvfp4(x.float(), scale, implementation="reference")
    return dequantize_nvfp4(packed, block, scale, dtype=torch.float64, implementation="reference")


def activate(gate: torch.Tensor | None, up: torch.Tensor, activation: MoeActivation) -> torch.Tensor:
    if gate is None:
        return up.clamp(min=0) ** 2 if activation.name == "relu2" else up * torch.sigmoid(up)
    if activation.limit is None:
        act = torch.nn.functional.gelu(gate) if activation.name == "gelu" else gate * torch.sigmoid(gate)
        return act * up
    alpha, beta = activation.swiglu_alpha_beta()
    gate, up = gate.clamp(max=activation.limit), up.clamp(-activation.limit, activation.limit)
    return gate * torch.sigmoid(alpha * gate) * (up + beta)


def float64_layer(x, weights: Nvfp4MoeWeights, topk_weights, topk_ids, activation=SILU, numerics="w4a16"):
    """Expert after expert, its rows only. Waits for the GPU."""

    def matrix(name: str, expert: int) -> torch.Tensor:
        weight, scale = getattr(weights, f"{name}_weight")[expert], getattr(weights, f"{name}_blockscale")[expert]
        rows, columns = weight.shape[0], weight.shape[1] // 8
        plain = unswizzle_blockscale(scale, rows, columns, implementation="reference")
        one = torch.ones((), device=x.device)
        return dequantize_nvfp4(weight, plain, one, dtype=torch.float64, implementation="reference")

    out = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for expert in topk_ids.unique().tolist():
        if not 0 <= expert < weights.num_experts:
            continue
        tokens, choices = (topk_ids == expert).nonzero(as_tuple=True)
        rows = x[tokens].double()
        if numerics == "w4a4":
            rows = through(x[tokens], weights.w13_input_scale[expert])
        projected = rows @ matrix("w13", expert).T
        scale = weights.w13_global_scale[expert].double()
        if weights.is_gated:
            first, second = projected.chunk(2, dim=1)
            gate, up = (second, first) if weights.w13_order == "up_gate" else (first, second)
            between = activate(gate * scale[0], up * scale[1], activation)
        else:
            between = activate(None, projected * scale, activation)
        if numerics == "w4a4":
            between = through(between, weights.w2_input_scale[expert])
        else:
            between = between.to(x.dtype).double()
        y = between @ matrix("w2", expert).T * weights.w2_global_scale[expert].double()
        out.index_add_(0, tokens, y * topk_weights[tokens, choices].double()[:, None])
    return out


def run(path: tuple[str, str], x, weights, topk_weights, topk_ids, activation=SILU, **more) -> torch.Tensor:
    backend, numerics = path
    return fused_moe(
        x, weights, topk_weights, topk_ids, activation=activation, numerics=numerics, backend=backend, **more
    )


def assert_close(got: torch.Tensor, want: torch.Tensor, tolerance: float) -> None:
    assert got.shape == want.shape and torch.isfinite(got).all()
    error = (got.double() - want).norm(dim=1) / (want.norm(dim=1) + 1e-30)
    assert (error <= tolerance).all(), f"relative error by row up to {error.max().item():.2e}"


def tolerance_of(path: tuple[str, str], dtype: torch.dtype) -> float:
    return W4A4_TOLERANCE if path[1] == "w4a4" else TOLERANCE[dtype]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.int16)


def poison_free_memory() -> None:
    """What torch allocates next is full of NaN: blocks of many sizes are filled and given back to its cache."""
    held = [torch.full((1 << power,), NAN, device=DEVICE) for power in range(7, 27) for _ in range(3)]
    del held


def free_everything() -> None:
    gc.collect()
    torch.cuda.empty_cache()


# --- against float64 ------------------------------------------------------------------------------------------------

SIZES = [
    Size(8, 1, 256, 128),
    Size(8, 4, 1600, 352),
    Size(8, 4, 2880, 96, is_gated=False),
    Size(128, 8, 2048, 384),
    Size(128, 8, 1024, 256, is_gated=False),
    Size(256, 8, 1024, 256),
    Size(512, 10, 1024, 128),
]
TOKENS = [0, 1, 2, 7, 8, 9, 16, 17, 63, 64, 65, 127, 128, 129, 2047, 2048, 2049]


@pytest.mark.parametrize("numerics", ["w4a16", "w4a4"])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_matches_float64(size, numerics):
    weights = make_weights(size, "gate_up" if size.experts == 128 else "up_gate")
    activation = SILU if size.is_gated else MoeActivation("relu2")
    for index, tokens in enumerate(TOKENS):
        dtype = torch.float16 if index % 3 == 1 else torch.bfloat16
        x, topk_weights, ids = make_inputs(size, tokens, dtype)
        x /= 4
        ids = ids.long() if index % 2 else ids
        if tokens > 4:
            ids[3], ids[4, 0] = -1, -1
        want = float64_layer(x, weights, topk_weights, ids, activation, numerics)
        for path in PATHS:
            if path[1] != numerics:
                continue
            poison_free_memory()
            got = run(path, x, weights, topk_weights, ids, activation)
            again = run(path, x, weights, topk_weights, ids, activation)
            assert torch.equal(bits(got), bits(again)), f"{tokens} tokens by {path}: not the same bits"
            assert_close(got, want, tolerance_of(path, dtype))


@pytest.mark.parametrize("path", PATHS, ids="-".join)
def test_8192_tokens(path):
    size = Size(256, 8, 2048, 256)
    weights = make_weights(size)
    x, topk_weights, ids = make_inputs(size, 8192, torch.bfloat16)
    got = run(path, x, weights, topk_weights, ids)
    some = torch.cat((torch.arange(64), torch.arange(8128, 8192))).to(DEVICE)
    want = float64_layer(x[some], weights, topk_weights[some], ids[some], SILU, path[1])
    assert_close(got[some], want, tolerance_of(path, torch.bfloat16))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("hidden", [1024, 2048, 6144])
def test_tiny_decode_and_scheduled_decode(hidden, dtype):
    """The kernels that make their schedule themselves are chosen by the number of multiprocessors: here by hand."""
    size = Size(64, 8, hidden, 256)
    weights, shape = make_weights(size), LayerShape(64, hidden, 256, True)
    for tokens in (1, 2, 3, 4):
        x, topk_weights, ids = make_inputs(size, tokens, dtype)
        x /= 4
        ids[0, 1], ids[-1, 2] = ids[0, 0], -1
        want = float64_layer(x, weights, topk_weights, ids)
        tiny, scheduled = decode.choose(shape, 8 * tokens, 1), decode.choose(shape, 33, num_sms(x.device))
        assert tiny.tiny and not scheduled.tiny
        held = (ids >= 0).reshape(-1)
        for config, grids in (
            (tiny, (1, 1)),
            (tiny, (7, 60)),
            (tiny, (128, 500)),
            (scheduled, (3, 5)),
            (scheduled, None),
        ):
            if grids is not None:
                config = dataclasses.replace(
                    config,
                    gemm1=dataclasses.replace(config.gemm1, grid=grids[0]),
                    gemm2=dataclasses.replace(config.gemm2, grid=grids[1]),
                )
            poison_free_memory()
            slots = decode.grouped_gemm_decode(x, weights, topk_weights, ids, activation=SILU, config=config)
            slots[~held] = 0
            assert_close(slots.double().unflatten(0, (tokens, 8)).sum(1), want, TOLERANCE[dtype])


@pytest.mark.parametrize("block_rows", [16, 32, 48, 64])
def test_middle_block_rows_give_the_same_bits(block_rows):
    size = Size(8, 4, 2048, 256)
    weights, shape = make_weights(size), LayerShape(8, 2048, 256, True)
    for tokens in (1, 17, 129, 400):
        x, topk_weights, ids = make_inputs(size, tokens, torch.bfloat16)
        sms = num_sms(x.device)
        slots = [
            middle.grouped_gemm_middle(
                x, weights, topk_weights, ids, activation=SILU, order=order,
                config=middle.choose(shape, ids.numel(), sms, rows),
            )
            for rows, order in ((block_rows, "column_major"), (block_rows, "row_major"), (32, None))
        ]  # fmt: skip
        assert torch.equal(bits(slots[0]), bits(slots[1])) and torch.equal(bits(slots[0]), bits(slots[2]))
        want = float64_layer(x, weights, topk_weights, ids)
        assert_close(slots[0].double().unflatten(0, (tokens, 4)).sum(1), want, TOLERANCE[torch.bfloat16])


@pytest.mark.parametrize("path", PATHS, ids="-".join)
@pytest.mark.parametrize(
    "activation",
    [MoeActivation("gelu"), MoeActivation("silu", limit=1.0), MoeActivation("silu", 1.702, None, 1.0)],
    ids=str,
)
def test_activations(path, activation):
    size = Size(16, 4, 512, 256)
    weights = make_weights(size)
    x, topk_weights, ids = make_inputs(size, 40, torch.bfloat16)
    got = run(path, x, weights, topk_weights, ids, activation)
    want = float64_layer(x, weights, topk_weights, ids, activation, path[1])
    assert_close(got, want, tolerance_of(path, torch.bfloat16))


@pytest.mark.parametrize("path", PATHS, ids="-".join)
def test_global_ids_and_all_tokens_on_one_expert(path):
    size = Size(32, 4, 512, 128)
    weights = make_weights(size)
    part = map_tensors(weights, lambda tensor: tensor[8:24])
    for tokens in (3, 200):
        x, topk_weights, ids = make_inputs(size, tokens, torch.bfloat16)
        for these in (ids, torch.full_like(ids, 23), torch.full_like(ids, 24), torch.full_like(ids, -1)):
            got = run(path, x, part, topk_weights, these, expert_offset=8, num_global_experts=32)
            mine = torch.where((these >= 8) & (these < 24), these, -1)
            want = float64_layer(x, weights, topk_weights, mine, SILU, path[1])
            assert_close(got, want, tolerance_of(path, torch.bfloat16))
            assert (got[(mine < 0).all(dim=1)] == 0).all()


# --- poison ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PATHS, ids="-".join)
@pytest.mark.parametrize("tokens", [3, 33, 300])
def test_a_poisoned_row_stays_its_own_problem(path, tokens):
    size = Size(16, 4, 512, 256)
    weights = make_weights(size)
    x, topk_weights, ids = make_inputs(size, tokens, torch.bfloat16)
    ids[0] = -1
    clean = run(path, x, weights, topk_weights, ids)
    x[0], topk_weights[0] = NAN, NAN
    poison_free_memory()
    assert torch.equal(bits(run(path, x, weights, topk_weights, ids)), bits(clean))
    x[tokens // 2, 5] = NAN
    got = run(path, x, weights, topk_weights, ids)
    others = torch.arange(tokens, device=DEVICE) != tokens // 2
    assert torch.isnan(got[tokens // 2]).all() and torch.equal(bits(got[others]), bits(clean[others]))


# --- graphs ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [*PATHS, ("auto", "w4a16")], ids="-".join)
@pytest.mark.parametrize("tokens", [4, 64])
def test_a_thousand_replays_with_other_inputs(path, tokens):
    """Bit for bit what eager gives, also for a smaller batch with NaN behind its end."""
    size = Size(64, 8, 2048, 256)
    weights = make_weights(size)
    pool = []
    for seed in range(20):
        x, topk_weights, ids = make_inputs(size, tokens, torch.bfloat16, seed)
        if seed % 3 == 1:
            ids %= 5  # all on a few experts, some twice
        if seed % 4 == 3:
            real = tokens // (seed % 5 + 2)
            x[real:], topk_weights[real:], ids[real:] = NAN, NAN, -1
        pool.append((x, topk_weights, ids, run(path, x, weights, topk_weights, ids).clone()))
    static = [tensor.clone() for tensor in pool[0][:3]]
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        out = run(path, static[0], weights, *static[1:])
    wrong = torch.zeros((), dtype=torch.int64, device=DEVICE)
    for index in range(1000):
        *arguments, want = pool[index * 7 % len(pool)]
        for target, source in zip(static, arguments, strict=True):
            target.copy_(source)
        graph.replay()
        wrong += (bits(out) != bits(want)).any()
    assert wrong.item() == 0


@pytest.mark.parametrize("path", [*PATHS, ("auto", "w4a16")], ids="-".join)
@pytest.mark.parametrize("tokens", [1, 64, 1000])
def test_it_never_waits_for_the_stream(path, tokens):
    size = Size(64, 8, 1024, 256)
    weights = make_weights(size)
    arguments = make_inputs(size, tokens, torch.bfloat16)
    want = run(path, arguments[0], weights, *arguments[1:])
    torch.cuda.set_sync_debug_mode("error")
    try:
        got = run(path, arguments[0], weights, *arguments[1:])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(bits(got), bits(want))


def test_another_stream():
    size = Size(64, 8, 1024, 256)
    weights = make_weights(size)
    arguments = make_inputs(size, 8, torch.bfloat16)
    want = run(("decode", "w4a16"), arguments[0], weights, *arguments[1:])
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        found = [run(path, arguments[0], weights, *arguments[1:]) for path in PATHS[:1] * 50]
    stream.synchronize()
    assert all(torch.equal(bits(got), bits(want)) for got in found)


# --- beyond 2**31 bytes ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PATHS, ids="-".join)
def test_weights_beyond_2_31_bytes(path):
    if torch.cuda.mem_get_info()[0] < 24 * 2**30:
        pytest.skip("needs 24 GiB of GPU memory")
    size = Size(512, 8, 4096, 1280)
    weights = make_weights(size)
    assert weights.w13_weight.numel() > 2**31 and weights.w2_weight.numel() > 2**30
    for tokens in (2, 40):
        x, topk_weights, ids = make_inputs(size, tokens, torch.bfloat16)
        ids[0] = torch.tensor([0, 511, 510, 409, 410, 411, 205, 1])
        got = run(path, x, weights, topk_weights, ids)
        assert_close(got, float64_layer(x, weights, topk_weights, ids, SILU, path[1]), tolerance_of(path, x.dtype))
    del weights
    free_everything()


@pytest.mark.parametrize("path", PATHS, ids="-".join)
def test_slots_beyond_2_31_bytes(path):
    if torch.cuda.mem_get_info()[0] < 40 * 2**30:
        pytest.skip("needs 40 GiB of GPU memory")
    size, tokens = Size(8, 8, 8192, 128), 2**14 + 100
    assert tokens * size.top_k * size.hidden * 2 > 2**31
    weights = make_weights(size)
    x, topk_weights, ids = make_inputs(size, tokens, torch.bfloat16)
    got = run(path, x, weights, topk_weights, ids)
    border = 2**31 // (size.top_k * size.hidden * 2)
    some = torch.cat((torch.arange(8), torch.arange(border - 8, border + 8), torch.arange(tokens - 8, tokens))).to(
        DEVICE
    )
    want = float64_layer(x[some], weights, topk_weights[some], ids[some], SILU, path[1])
    assert_close(got[some], want, tolerance_of(path, x.dtype))
    assert torch.isfinite(got).all()
    del got, x
    free_everything()


# --- fuzz -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(8))
def test_random_layers(seed):
    """A layer, then batches of it by every path that covers it."""
    generator = torch.Generator().manual_seed(seed)

    def pick(*choices):
        return choices[int(torch.randint(len(choices), (), generator=generator))]

    size = Size(
        pick(1, 3, 8, 60, 160),
        pick(1, 2, 6),
        32 * int(torch.randint(1, 80, (), generator=generator)),
        32 * int(torch.randint(1, 24, (), generator=generator)),
        pick(True, True, False),
    )
    size = dataclasses.replace(size, top_k=min(size.top_k, size.experts))
    weights = make_weights(size, pick("up_gate", "gate_up"), seed)
    activation = SILU if size.is_gated else MoeActivation(pick("relu2", "silu"))
    for call in range(12):
        tokens, dtype = (
            int(torch.randint(1, pick(10, 70, 400), (), generator=generator)),
            pick(torch.bfloat16, torch.float16),
        )
        x, topk_weights, ids = make_inputs(size, tokens, dtype, seed)
        x /= 4
        ids[torch.rand(ids.shape, device=DEVICE) < pick(0.0, 0.2)] = -1
        for path in PATHS:
            want = float64_layer(x, weights, topk_weights, ids, activation, path[1])
            poison_free_memory() if call == 0 else None
            got = run(path, x, weights, topk_weights, ids, activation)
            error = (got.double() - want).norm(dim=1) / (want.norm(dim=1) + 1e-30)
            assert (error <= tolerance_of(path, dtype)).all(), (size, tokens, dtype, path, error.max().item())
