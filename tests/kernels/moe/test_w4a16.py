"""What both CUDA W4A16 operations compute, as built for the host, against the float64 loop of moe_oracle."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from moe_oracle import SILU, Layer, assert_close, inputs, layer, map_tensors, oracle, run, tensors_of
from nvfp4_oracle import bytes_of
from slots_oracle import (
    DTYPES,
    EXACT,
    ROUTINGS,
    TOLERANCE,
    bits,
    exact_inputs,
    exact_layer,
    fenced,
    fenced_weights,
    held,
    routing,
    slots_oracle,
)

from sglang_sm120.errors import UnsupportedError
from sglang_sm120.kernels.cuda.module import load
from sglang_sm120.kernels.moe import w4a16
from sglang_sm120.kernels.moe.expert_schedule import kernel as schedule_kernel
from sglang_sm120.kernels.moe.grouped_gemm_decode import api as decode
from sglang_sm120.kernels.moe.grouped_gemm_decode import kernel as decode_kernel
from sglang_sm120.kernels.moe.grouped_gemm_middle import api as middle
from sglang_sm120.kernels.moe.grouped_gemm_middle import kernel as middle_kernel
from sglang_sm120.kernels.moe.layer import MoeActivation
from sglang_sm120.kernels.moe.w4a16 import LayerShape

NAN = float("nan")
CPU = torch.device("cpu")
BACKENDS = ["decode", "middle"]
CALLS = {"decode": decode.grouped_gemm_decode, "middle": middle.grouped_gemm_middle}
CONFIGS = {"decode": decode.choose, "middle": middle.choose}

pytestmark = pytest.mark.usefixtures("poisoned_memory")
both = pytest.mark.parametrize("backend", BACKENDS)


def slots_of(backend, x, weights, topk_weights, topk_ids, *, activation=SILU, **more) -> torch.Tensor:
    return CALLS[backend](x, weights, topk_weights, topk_ids, activation=activation, **more)


def small_inputs(tokens, top_k, experts, hidden, dtype, seed=0):
    """Small enough for float16, and large enough."""
    x, topk_weights, topk_ids = inputs(tokens, top_k, experts, hidden, dtype, seed)
    return x / 2, topk_weights, topk_ids


def check_exact(backend, lay: Layer, x, topk_weights, topk_ids, *, order="up_gate", **more) -> torch.Tensor:
    """Every slot to the bit, and nothing written to the slots that are skipped."""
    activation = EXACT[lay.is_gated]
    weights = fenced_weights(lay.weights(order))
    got = slots_of(backend, fenced(x), weights, topk_weights, topk_ids, activation=activation, **more)
    want = slots_oracle(x, lay, topk_weights, topk_ids, activation).to(x.dtype)
    mine = held(topk_ids, len(lay.s2["down"]))
    assert got.dtype == x.dtype and got.shape == want.shape
    wrong = (got[mine] != want[mine]).nonzero()
    assert len(wrong) == 0, (
        f"{len(wrong)} of {got[mine].numel()} elements, from [slot held, column] {wrong[:3].tolist()}"
    )
    assert (bits(got)[~mine] == -1).all(), "a skipped slot was written"
    return got


# --- shapes ---------------------------------------------------------------------------------------------------------

# E, k, H, I: multiples of 128 and 256; of 32 only, with one and several blocks of 128 rows; K shorter than a chunk; a
# K that ends in the middle of one; a hidden size of the kind of 1600
SHAPES = [
    (8, 4, 256, 128),
    (8, 4, 512, 256),
    (8, 2, 384, 384),
    (8, 4, 160, 96),
    (8, 4, 352, 160),
    (8, 4, 160, 352),
    (8, 4, 416, 192),
    (4, 2, 32, 32),
    (4, 2, 128, 160),
    (4, 1, 800, 96),
]
TOKENS = [1, 2, 7, 8, 9, 16, 17]
MANY_TOKENS = [63, 64, 65, 127, 128, 129]


@both
@pytest.mark.parametrize("is_gated", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("experts", "top_k", "hidden", "intermediate"), SHAPES)
def test_every_bit_where_nothing_is_rounded(backend, experts, top_k, hidden, intermediate, dtype, is_gated):
    lay = exact_layer(experts, hidden, intermediate, is_gated)
    for tokens in TOKENS:
        check_exact(backend, lay, *exact_inputs(tokens, top_k, experts, hidden, dtype))


@both
@pytest.mark.parametrize("tokens", MANY_TOKENS)
@pytest.mark.parametrize(("experts", "top_k", "hidden", "intermediate"), [(4, 2, 256, 128), (3, 2, 160, 96)])
def test_several_row_blocks_an_expert(backend, tokens, experts, top_k, hidden, intermediate):
    """From one to eleven blocks of 8 rows, and from one to three of middle's 16 or 32."""
    for is_gated in (True, False):
        lay = exact_layer(experts, hidden, intermediate, is_gated)
        check_exact(backend, lay, *exact_inputs(tokens, top_k, experts, hidden, torch.bfloat16))


@both
@pytest.mark.parametrize("top_k", [1, 8, 10])
@pytest.mark.parametrize("experts", [1, 12, 130])
def test_experts_and_choices(backend, experts, top_k):
    lay = exact_layer(experts, 64, 32)
    for tokens in (1, 9, 33):
        check_exact(backend, lay, *exact_inputs(tokens, top_k, experts, 64, torch.float16))


@both
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("experts", "top_k", "hidden", "intermediate"), SHAPES)
def test_matches_the_oracle(backend, experts, top_k, hidden, intermediate, dtype):
    lay = layer(experts, hidden, intermediate)
    for tokens in (1, 17):
        arguments = small_inputs(tokens, top_k, experts, hidden, dtype)
        got = slots_of(backend, arguments[0], lay.weights(), *arguments[1:])
        want = slots_oracle(arguments[0], lay, *arguments[1:], SILU)
        assert_close(got, want, TOLERANCE[dtype])
        # After the same last rounding nearly every element is the oracle's. In a short sum one rounding shows in all.
        assert got.numel() < 2000 or (got == want.to(dtype)).double().mean() > 0.95
        out = run(arguments[0], lay.weights(), *arguments[1:], backend=backend)
        assert out.dtype == dtype and out.is_contiguous()
        assert_close(out, oracle(arguments[0], lay, *arguments[1:]), TOLERANCE[dtype])


@both
@pytest.mark.parametrize("tokens", MANY_TOKENS)
def test_matches_the_oracle_with_many_tokens(backend, tokens):
    for hidden, intermediate in ((256, 128), (160, 96)):
        lay = layer(8, hidden, intermediate)
        x, topk_weights, topk_ids = small_inputs(tokens, 4, 8, hidden, torch.bfloat16)
        got = run(x, lay.weights(), topk_weights, topk_ids, backend=backend)
        assert_close(got, oracle(x, lay, topk_weights, topk_ids), TOLERANCE[torch.bfloat16])


# --- activations ----------------------------------------------------------------------------------------------------

ACTIVATIONS = [(True, MoeActivation(name)) for name in ("silu", "gelu")]
ACTIVATIONS += [(False, MoeActivation(name)) for name in ("silu", "gelu", "relu2", "identity")]
ACTIVATIONS += [
    (True, MoeActivation("silu", limit=2.0)),
    (True, MoeActivation("silu", alpha=1.702, limit=2.0)),
    (True, MoeActivation("silu", alpha=1.702, beta=0.25, limit=2.0)),
    (True, MoeActivation("silu", beta=0.5, limit=0.7)),
]


@both
@pytest.mark.parametrize(("is_gated", "activation"), ACTIVATIONS)
@pytest.mark.parametrize("order", ["up_gate", "gate_up"])
@pytest.mark.parametrize(("hidden", "intermediate"), [(256, 128), (160, 96)])
def test_activations(backend, is_gated, activation, order, hidden, intermediate):
    lay = layer(8, hidden, intermediate, is_gated)
    for dtype in DTYPES:
        x, topk_weights, topk_ids = small_inputs(9, 4, 8, hidden, dtype)
        got = slots_of(backend, x, lay.weights(order), topk_weights, topk_ids, activation=activation)
        want = slots_oracle(x, lay, topk_weights, topk_ids, activation)
        assert_close(got, want, TOLERANCE[dtype])
        assert (got == want.to(dtype)).double().mean() > 0.95
        if activation.limit is not None:  # it does clamp here
            assert (want - slots_oracle(x, lay, topk_weights, topk_ids, SILU)).norm() > 0.05 * want.norm()


@both
def test_alpha_and_beta_without_a_limit_are_ignored(backend):
    lay = layer(8, 160, 96)
    x, topk_weights, topk_ids = small_inputs(9, 4, 8, 160, torch.bfloat16)
    odd = MoeActivation("silu", alpha=1.7, beta=2.0)
    got = slots_of(backend, x, lay.weights(), topk_weights, topk_ids, activation=odd)
    assert torch.equal(got, slots_of(backend, x, lay.weights(), topk_weights, topk_ids))


@both
@pytest.mark.parametrize("shape", [(8,), (8, 1)])
def test_a_shared_global_scale(backend, shape):
    for hidden, intermediate in ((256, 128), (160, 96)):
        lay = exact_layer(8, hidden, intermediate)
        shared = dataclasses.replace(lay, s2=lay.s2 | {"gate": lay.s2["up"]})
        x, topk_weights, topk_ids = exact_inputs(9, 4, 8, hidden, torch.bfloat16)
        weights = lay.weights(w13_global_scale=torch.from_numpy(lay.s2["up"]).reshape(shape))
        got = slots_of(backend, x, weights, topk_weights, topk_ids, activation=EXACT[True])
        assert torch.equal(got, slots_oracle(x, shared, topk_weights, topk_ids, EXACT[True]).to(x.dtype))


# --- routing --------------------------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("kind", ROUTINGS)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_routing(backend, kind, dtype):
    for hidden, intermediate in ((256, 128), (160, 96)):
        lay = exact_layer(8, hidden, intermediate)
        for tokens in (1, 9, 40):
            ids = routing(kind, tokens, 4, 8).to(dtype)
            x, topk_weights, _ = exact_inputs(tokens, 4, 8, hidden, torch.bfloat16)
            check_exact(backend, lay, x, topk_weights, ids)
            out = run(x, lay.weights(), topk_weights, ids, backend=backend, activation=EXACT[True])
            assert (out[(ids < 0).all(dim=1)] == 0).all()


@both
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(("first", "count"), [(0, 6), (5, 6), (11, 1)])
def test_global_ids(backend, first, count, dtype):
    for hidden, intermediate, tokens in ((256, 128, 9), (1024, 128, 4), (160, 96, 17)):
        lay = exact_layer(12, hidden, intermediate)
        x, topk_weights, ids = exact_inputs(tokens, 4, 12, hidden, torch.bfloat16)
        ids[0] = torch.tensor([first, -1, first + count - 1, (first + count) % 12])
        part = map_tensors(lay.weights(), lambda tensor: tensor[first : first + count])
        got = slots_of(
            backend, x, part, topk_weights, ids.to(dtype), activation=EXACT[True], expert_offset=first,
            num_global_experts=12,
        )  # fmt: skip
        mine = held(ids, count, first)
        want = slots_oracle(x, lay, topk_weights, ids, EXACT[True]).to(x.dtype)
        assert torch.equal(got[mine], want[mine]) and (bits(got)[~mine] == -1).all()


@both
def test_ids_far_outside_are_skipped(backend):
    """2**32 + 3 must not be taken for 3."""
    for hidden, tokens in ((256, 1), (1024, 1)):
        lay = exact_layer(8, hidden, 128)
        far = [2**32 + 3, -(2**32) + 3, 2**63 - 1, -(2**63), 8, 3, -1, 2**31]
        ids = torch.tensor([far], dtype=torch.int64)
        x, topk_weights, _ = exact_inputs(tokens, 8, 8, hidden, torch.bfloat16)
        check_exact(backend, lay, x, topk_weights, ids)


@settings(deadline=None, max_examples=60)
@given(data=st.data(), backend=st.sampled_from(BACKENDS), is_gated=st.booleans(), dtype=st.sampled_from(DTYPES))
def test_anything(data, backend, is_gated, dtype):
    tokens, top_k = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 5))
    hidden, intermediate = (32 * data.draw(st.integers(1, 9)) for _ in range(2))
    experts = data.draw(st.integers(1, 6))
    lay = exact_layer(experts, hidden, intermediate, is_gated)
    x, topk_weights, ids = exact_inputs(tokens, top_k, experts, hidden, dtype)
    skip = np.random.default_rng(data.draw(st.integers(0, 99))).random(ids.shape) < data.draw(st.sampled_from([0, 0.5]))
    ids[torch.from_numpy(skip)] = -1
    order = data.draw(st.sampled_from(["up_gate", "gate_up"]))
    check_exact(backend, lay, x, topk_weights, ids, order=order)


# --- memory ---------------------------------------------------------------------------------------------------------


@both
def test_strides_and_places_of_hidden_states(backend):
    lay = exact_layer(8, 160, 96)
    x, topk_weights, topk_ids = exact_inputs(9, 4, 8, 160, torch.bfloat16)
    want = check_exact(backend, lay, x, topk_weights, topk_ids)
    for columns, first in ((320, 0), (320, 8), (168, 8), (161, 0), (161, 1), (320, 3)):  # aligned ones and others
        storage = torch.full((9, columns), NAN, dtype=x.dtype)
        storage[:, first : first + 160] = x
        strided = storage[:, first : first + 160]
        got = slots_of(backend, strided, lay.weights(), topk_weights, topk_ids, activation=EXACT[True])
        assert torch.equal(got, want)
    for first in (1, 8, 13):  # contiguous, but not at a multiple of 16 bytes: `contiguous()` would make no copy
        for rows in (9, 1):
            storage = torch.full((9 * 160 + 16,), NAN, dtype=x.dtype)
            placed = storage[first : first + rows * 160].view(rows, 160)
            placed.copy_(x[:rows])
            got = slots_of(backend, placed, lay.weights(), topk_weights[:rows], topk_ids[:rows], activation=EXACT[True])
            assert placed.is_contiguous() and torch.equal(got, want[: rows * 4])
    turned = x.T.contiguous().T
    assert torch.equal(slots_of(backend, turned, lay.weights(), topk_weights, topk_ids, activation=EXACT[True]), want)
    same = x[:1].expand(9, 160)
    got = slots_of(backend, same, lay.weights(), topk_weights, topk_ids, activation=EXACT[True])
    assert torch.equal(got, check_exact(backend, lay, same.contiguous(), topk_weights, topk_ids))


@both
def test_strides_of_the_routing_and_inputs_stay(backend):
    lay = exact_layer(8, 160, 96)
    x, topk_weights, topk_ids = exact_inputs(9, 4, 8, 160, torch.bfloat16)
    weights = lay.weights()
    want = check_exact(backend, lay, x, topk_weights, topk_ids)
    wide_ids, wide_weights = torch.full((9, 6), 3), torch.full((9, 6), NAN)
    wide_ids[:, 1:5], wide_weights[:, 1:5] = topk_ids, topk_weights
    tensors = [x, wide_ids, wide_weights, *tensors_of(weights).values()]
    before = [tensor.clone() for tensor in tensors]
    got = slots_of(backend, x, weights, wide_weights[:, 1:5], wide_ids[:, 1:5], activation=EXACT[True])
    assert torch.equal(got, want)
    assert all(torch.equal(bytes_of(a), bytes_of(b)) for a, b in zip(tensors, before, strict=True))


@both
def test_topk_weights_in_half_precision(backend):
    lay = exact_layer(8, 160, 96)
    x, topk_weights, topk_ids = exact_inputs(9, 4, 8, 160, torch.bfloat16)  # quarters are bfloat16 already
    want = check_exact(backend, lay, x, topk_weights, topk_ids)
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        got = slots_of(backend, x, lay.weights(), topk_weights.to(dtype), topk_ids, activation=EXACT[True])
        assert torch.equal(got, want)


@both
def test_no_barrier_is_missing(backend, monkeypatch):
    """The host runs threads and blocks in ascending order; here in descending order.

    Decode's GEMM1 gets one block: among several, one waits for those that started before it.
    """
    cases = []
    for hidden, intermediate in ((256, 128), (1024, 128), (160, 96)):
        for tokens, is_gated in ((4, True), (33, True), (33, False)):
            lay = layer(8, hidden, intermediate, is_gated)
            x, topk_weights, topk_ids = small_inputs(tokens, 4, 8, hidden, torch.bfloat16)
            config = CONFIGS[backend](LayerShape(8, hidden, intermediate, is_gated), topk_ids.numel(), 3)
            if backend == "decode" and not config.tiny:
                config = dataclasses.replace(config, gemm1=dataclasses.replace(config.gemm1, grid=1))
            cases.append(((x, lay.weights(), topk_weights, topk_ids), config))
    forward = [slots_of(backend, *arguments, config=config) for arguments, config in cases]
    seen = set()

    def reversed_load(source, device):
        seen.add(source)
        return load(source, device, ("SM120_HOST_REVERSE",))

    monkeypatch.setattr({"decode": decode_kernel, "middle": middle_kernel}[backend], "load", reversed_load)
    monkeypatch.setitem(schedule_kernel._modules, CPU, reversed_load(schedule_kernel.SOURCE, CPU))
    backward = [slots_of(backend, *arguments, config=config) for arguments, config in cases]
    assert len(seen) == 2
    for a, b in zip(forward, backward, strict=True):
        assert torch.equal(bits(a), bits(b))


@both
def test_the_same_input_gives_the_same_bits(backend):
    for hidden, intermediate in ((256, 128), (160, 96)):
        lay = layer(8, hidden, intermediate)
        x, topk_weights, topk_ids = small_inputs(33, 4, 8, hidden, torch.bfloat16)
        runs = [slots_of(backend, x, lay.weights(), topk_weights, topk_ids) for _ in range(2)]
        assert torch.equal(bits(runs[0]), bits(runs[1]))


# --- scales ---------------------------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize(("hidden", "intermediate"), [(160, 96), (416, 352)])
def test_padding_of_the_scales_does_not_matter(backend, hidden, intermediate):
    for is_gated in (True, False):
        lay = layer(8, hidden, intermediate, is_gated)
        x, topk_weights, topk_ids = small_inputs(17, 4, 8, hidden, torch.bfloat16)
        zero, nan = (run(x, lay.weights(padding=p), topk_weights, topk_ids, backend=backend) for p in (0, 0x7F))
        assert torch.isfinite(zero).all() and torch.equal(bits(zero), bits(nan))


@both
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["448", "0", "all"])
@pytest.mark.parametrize(("hidden", "intermediate"), [(256, 128), (160, 96)])
def test_block_scales(backend, dtype, kind, hidden, intermediate):
    """448 and 0 among others; all finite codes, negative and subnormal ones too. In fp16 448 * 6 just fits."""
    base = layer(8, hidden, intermediate)
    finite = np.array([code for code in range(256) if code & 0x7F != 0x7F], np.uint8)
    some = {"448": np.array([0x7E, 0xFE], np.uint8), "0": np.array([0, 0x80, 0x30], np.uint8), "all": finite}[kind]
    rng = np.random.default_rng(7)
    scales = {name: rng.choice(some, s.shape) for name, s in base.scales.items()}
    size = np.float32(1 if kind == "0" else 1e-3)
    lay = dataclasses.replace(base, scales=scales, s2={name: s * size for name, s in base.s2.items()})
    x, topk_weights, topk_ids = small_inputs(9, 4, 8, hidden, dtype)
    got = slots_of(backend, x, lay.weights(), topk_weights, topk_ids)
    want = slots_oracle(x, lay, topk_weights, topk_ids, SILU)
    assert torch.isfinite(want).all()
    subnormal = 0 if dtype == torch.bfloat16 else 2.0**-25 * hidden**0.5
    error = (got.double() - want).norm(dim=1)
    assert (error <= TOLERANCE[dtype] * want.norm(dim=1) + subnormal).all()


@both
@pytest.mark.parametrize(("hidden", "intermediate"), [(256, 128), (160, 96)])
def test_a_nan_block_scale_reaches_exactly_the_rows_of_its_expert(backend, hidden, intermediate):
    base = layer(8, hidden, intermediate)
    x, topk_weights, topk_ids = small_inputs(17, 4, 8, hidden, torch.bfloat16)
    clean = slots_of(backend, x, base.weights(), topk_weights, topk_ids)
    its = (topk_ids == 3).reshape(-1)
    assert 0 < its.sum() < len(its)
    for name in ("gate", "up", "down"):
        for row, column in ((0, 0), (37, 3), (-1, -1)):
            scales = {key: codes.copy() for key, codes in base.scales.items()}
            scales[name][3, row, column] = 0x7F if row else 0xFF
            lay = dataclasses.replace(base, scales=scales)
            got = slots_of(backend, x, lay.weights(), topk_weights, topk_ids)
            assert torch.equal(bits(got)[~its], bits(clean)[~its])
            if name == "down":  # one column of the result
                assert torch.isnan(got[its][:, row]).all()
                others = torch.arange(hidden) != row % hidden
                assert torch.equal(bits(got)[its][:, others], bits(clean)[its][:, others])
            else:
                assert torch.isnan(got[its]).all()


@both
@pytest.mark.parametrize("field", ["w13_global_scale", "w2_global_scale"])
def test_a_nan_global_scale_reaches_exactly_its_expert(backend, field):
    for hidden, intermediate in ((256, 128), (160, 96)):
        lay = layer(8, hidden, intermediate)
        x, topk_weights, topk_ids = small_inputs(17, 4, 8, hidden, torch.bfloat16)
        clean = slots_of(backend, x, lay.weights(), topk_weights, topk_ids)
        weights = lay.weights()
        getattr(weights, field)[3] = NAN
        got, its = slots_of(backend, x, weights, topk_weights, topk_ids), (topk_ids == 3).reshape(-1)
        assert torch.isnan(got[its]).all() and torch.equal(bits(got)[~its], bits(clean)[~its])


@both
@pytest.mark.parametrize("poison", [NAN, float("inf")])
@pytest.mark.parametrize(("hidden", "intermediate"), [(256, 128), (160, 96)])
def test_a_poisoned_row_stays_its_own_problem(backend, poison, hidden, intermediate):
    lay = layer(4, hidden, intermediate)
    for tokens in (3, 17, 40):  # its row of MMA columns is full, or not
        x, topk_weights, topk_ids = small_inputs(tokens, 2, 4, hidden, torch.bfloat16)
        topk_ids[0] = -1  # a padding row
        clean = run(x, lay.weights(), topk_weights, topk_ids, backend=backend)
        dirty = x.clone()
        dirty[0], topk_weights[0] = poison, NAN
        got = run(dirty, lay.weights(), topk_weights, topk_ids, backend=backend)
        assert torch.equal(bits(got), bits(clean)) and (got[0] == 0).all()
        for row in {1, tokens // 2, tokens - 1}:
            dirty[row, -1] = poison
            got = run(dirty, lay.weights(), topk_weights, topk_ids, backend=backend)
            others = [other for other in range(tokens) if other != row]
            assert not torch.isfinite(got[row]).all() and torch.equal(bits(got)[others], bits(clean)[others])
            dirty[row] = x[row]


# --- what is not covered --------------------------------------------------------------------------------------------

GOOD = LayerShape(8, 256, 128, True)


@pytest.mark.parametrize(
    ("shape", "slots", "dtype", "device", "says"),
    [
        (GOOD, 8, torch.float32, CPU, "hidden states of torch.float32 are not covered: bfloat16 and float16 are"),
        (LayerShape(8, 80, 128, True), 8, torch.bfloat16, CPU, "the hidden size 80 is not covered: a multiple of 32"),
        (LayerShape(8, 256, 144, True), 8, torch.bfloat16, CPU, "the intermediate size 144 is not covered"),
        (LayerShape(8, 2**16, 2**16, True), 8, torch.bfloat16, CPU, "more than 2**31 bytes"),
        (LayerShape(1025, 256, 128, True), 8, torch.bfloat16, CPU, "1025 experts"),
        (GOOD, 2**30, torch.bfloat16, CPU, "rows"),
        (GOOD, 8, torch.bfloat16, torch.device("meta"), "device meta is not covered"),
    ],
)
@pytest.mark.parametrize("operation", [decode, middle], ids=BACKENDS)
def test_unsupported_reason(operation, shape, slots, dtype, device, says):
    assert operation.unsupported_reason(GOOD, 8, hidden_dtype=torch.bfloat16, device=CPU) is None
    reason = operation.unsupported_reason(shape, slots, hidden_dtype=dtype, device=device)
    assert reason is not None and says in reason and "\n" not in reason


def test_an_old_gpu_is_not_covered(monkeypatch):
    cuda = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    assert "8.9" in w4a16.unsupported_reason(GOOD, hidden_dtype=torch.bfloat16, device=cuda)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    assert w4a16.unsupported_reason(GOOD, hidden_dtype=torch.bfloat16, device=cuda) is None


def test_steps_of_work_are_counted():
    reason = decode.unsupported_reason(LayerShape(512, 7168, 2048, True), 2**23, hidden_dtype=torch.float16, device=CPU)
    assert "31 bits" in reason


@both
def test_what_is_not_covered_is_raised(backend):
    lay = layer(8, 80, 96)
    with pytest.raises(UnsupportedError, match="hidden size 80"):
        slots_of(backend, torch.zeros(1, 80).bfloat16(), lay.weights(), torch.ones(1, 1), torch.zeros(1, 1).int())
    lay = layer(8, 160, 96)
    with pytest.raises(UnsupportedError, match="float32"):
        slots_of(backend, torch.zeros(1, 160), lay.weights(), torch.ones(1, 1), torch.zeros(1, 1).int())
