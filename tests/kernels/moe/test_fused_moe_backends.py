"""fused_moe by our kernels: which one serves a batch, what falls back and how that is said."""

from __future__ import annotations

import dataclasses
import logging

import numpy as np
import pytest
import torch
from moe_oracle import SILU, assert_close, inputs, layer, map_tensors, oracle, run
from slots_oracle import DTYPES, EXACT, ROUTINGS, TOLERANCE, bits, exact_inputs, exact_layer, routing

from sglang_sm120.errors import ContractError, UnsupportedError
from sglang_sm120.kernels.moe.fused_moe import kernel
from sglang_sm120.kernels.moe.fused_moe.api import backend_reason
from sglang_sm120.kernels.moe.fused_moe.config import BACKENDS, choose_backend
from sglang_sm120.kernels.moe.sum_slots.api import sum_slots
from sglang_sm120.kernels.moe.w4a16 import LayerShape

NAN = float("nan")
CPU = torch.device("cpu")
OURS = ["decode", "middle", "prefill"]

pytestmark = pytest.mark.usefixtures("poisoned_memory")


# --- the choice -----------------------------------------------------------------------------------------------------

GLM, QWEN, DEEPSEEK = (256, 6144, 256), (128, 4096, 384), (256, 7168, 256)


@pytest.mark.parametrize(
    ("sizes", "last_of_decode"), [(GLM, 192), (QWEN, 96), (DEEPSEEK, 192)], ids=["GLM-5", "Qwen3", "DeepSeek-V3"]
)
def test_chosen_backends(sizes, last_of_decode):
    """Pinned, so that a change of the rules shows: decode up to a mean of 6 rows an expert."""
    shape = LayerShape(*sizes, True)
    for tokens in (1, 2, 4, 10, 16, 64, 96, 97, 192, 193, 256, 1000, 4096, 8192):
        first = "decode" if tokens <= last_of_decode else "middle"
        assert choose_backend(shape, tokens * 8, "w4a16") == (first, "prefill", "reference")
        assert choose_backend(shape, tokens * 8, "w4a4") == ("prefill", "reference")


def test_every_choice_ends_with_the_reference():
    for slots in (1, 10**6):
        for numerics in ("w4a16", "w4a4"):
            order = choose_backend(LayerShape(8, 80, 96, False), slots, numerics)
            assert order[-1] == "reference" and set(order) <= set(BACKENDS)


# --- each backend by name -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", OURS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("is_gated", [True, False])
def test_w4a16_matches_the_oracle(backend, dtype, is_gated):
    for hidden, intermediate, order in ((256, 128, "up_gate"), (160, 96, "gate_up")):
        lay = layer(8, hidden, intermediate, is_gated)
        x, topk_weights, ids = inputs(17, 4, 8, hidden, dtype)
        x /= 2
        got = run(x, lay.weights(order), topk_weights, ids, backend=backend)
        assert got.shape == x.shape and got.dtype == dtype and got.is_contiguous()
        assert_close(got, oracle(x, lay, topk_weights, ids), TOLERANCE[dtype])


def with_input_scales(lay, scalar: bool):
    """[E], far apart, or one for all; and the layer whose oracle that is."""
    if not scalar:
        return lay, lay.weights()
    largest = {name: np.full_like(scale, scale.max()) for name, scale in lay.input_scale.items()}
    lay = dataclasses.replace(lay, input_scale=largest)
    weights = lay.weights()
    return lay, dataclasses.replace(
        weights, w13_input_scale=weights.w13_input_scale[0].clone(), w2_input_scale=weights.w2_input_scale[:1]
    )


@pytest.mark.parametrize("scalar", [True, False], ids=["scalar", "an expert"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("is_gated", [True, False])
def test_w4a4_matches_the_oracle(scalar, dtype, is_gated):
    for hidden, intermediate, order in ((256, 128, "up_gate"), (80, 96, "gate_up")):
        lay, weights = with_input_scales(layer(8, hidden, intermediate, is_gated), scalar)
        weights = dataclasses.replace(weights, w13_order=order) if is_gated else weights
        if order == "gate_up" and is_gated:
            other = lay.weights(order)
            weights = dataclasses.replace(weights, w13_weight=other.w13_weight, w13_blockscale=other.w13_blockscale)
        x, topk_weights, ids = inputs(17, 4, 8, hidden, dtype)
        x /= 2
        got = run(x, weights, topk_weights, ids, numerics="w4a4", backend="prefill")
        want = oracle(x, lay, topk_weights, ids, numerics="w4a4")
        assert_close(got, want, 2e-2)
        unquantised = oracle(x, lay, topk_weights, ids)
        assert (want - unquantised).norm() > 0.04 * unquantised.norm()  # what the tolerance can tell apart


def test_w4a4_scales_of_other_experts_do_not_matter():
    lay = layer(8, 80, 96)
    x, topk_weights, ids = inputs(17, 2, 8, 80, torch.bfloat16)
    ids %= 4
    want = run(x, lay.weights(), topk_weights, ids, numerics="w4a4", backend="prefill")
    weights = lay.weights()
    weights.w13_input_scale[4:], weights.w2_input_scale[4:] = 3.0, 5.0
    assert torch.equal(run(x, weights, topk_weights, ids, numerics="w4a4", backend="prefill"), want)
    weights.w13_input_scale[0] *= 1.37  # a power of two would be made up for by the block scales
    changed = run(x, weights, topk_weights, ids, numerics="w4a4", backend="prefill")
    its = (ids == 0).any(dim=1)
    assert torch.equal(changed[~its], want[~its]) and not torch.equal(changed[its], want[its])


@pytest.mark.parametrize("numerics", ["w4a16", "w4a4"])
@pytest.mark.parametrize("backend", OURS)
@pytest.mark.parametrize("kind", ROUTINGS)
def test_routing(backend, kind, numerics):
    if numerics == "w4a4" and backend != "prefill":
        return
    lay = layer(8, 160, 96)
    for tokens, dtype in ((9, torch.int32), (40, torch.int64)):
        ids = routing(kind, tokens, 4, 8).to(dtype)
        x, topk_weights, _ = inputs(tokens, 4, 8, 160, torch.bfloat16)
        got = run(x, lay.weights(), topk_weights, ids, numerics=numerics, backend=backend)
        want = oracle(x, lay, topk_weights, ids, numerics=numerics)
        assert_close(got, want, TOLERANCE[torch.bfloat16] if numerics == "w4a16" else 2e-2)
        assert (got[(ids < 0).all(dim=1)] == 0).all()


@pytest.mark.parametrize("numerics", ["w4a16", "w4a4"])
@pytest.mark.parametrize("backend", OURS)
def test_expert_parallel_ids_are_global(backend, numerics):
    if numerics == "w4a4" and backend != "prefill":
        return
    lay = layer(12, 160, 96)
    x, topk_weights, ids = inputs(17, 4, 12, 160, torch.bfloat16)
    ids[0] = torch.tensor([-1, 0, 11, 6])
    total = torch.zeros(17, 160, dtype=torch.float64)
    for first, count in ((0, 5), (5, 6), (11, 1)):
        part = map_tensors(lay.weights(), lambda t, first=first, count=count: t[first : first + count])
        more = {"numerics": numerics, "backend": backend}
        got = run(x, part, topk_weights, ids, expert_offset=first, num_global_experts=12, **more)
        local = torch.where((ids >= first) & (ids < first + count), ids - first, -1)
        assert torch.equal(got, run(x, part, topk_weights, local, **more))
        total += got
    tolerance = TOLERANCE[torch.bfloat16] if numerics == "w4a16" else 2e-2
    assert_close(total, oracle(x, lay, topk_weights, ids, numerics=numerics), tolerance)


@pytest.mark.parametrize("backend", OURS)
def test_router_weight_on_the_input(backend):
    lay = layer(8, 160, 96)
    x, topk_weights, ids = inputs(9, 1, 8, 160, torch.bfloat16)
    ids[4], topk_weights[4] = -1, NAN
    got = run(x, lay.weights(), topk_weights, ids, apply_router_weight_on_input=True, backend=backend)
    want = oracle(x * topk_weights.bfloat16(), lay, torch.ones(9, 1), ids)
    assert_close(got, want, TOLERANCE[torch.bfloat16])
    assert (got[4] == 0).all()


@pytest.mark.parametrize("numerics", ["w4a16", "w4a4"])
@pytest.mark.parametrize("backend", OURS)
def test_a_poisoned_row_stays_its_own_problem(backend, numerics):
    if numerics == "w4a4" and backend != "prefill":
        return
    lay = layer(8, 160, 96)
    x, topk_weights, ids = inputs(17, 4, 8, 160, torch.bfloat16)
    ids[3] = -1
    more = {"numerics": numerics, "backend": backend}
    clean = run(x, lay.weights(), topk_weights, ids, **more)
    dirty = x.clone()
    dirty[3], dirty[5, 7], topk_weights[3] = NAN, NAN, NAN
    got = run(dirty, lay.weights(), topk_weights, ids, **more)
    others = [row for row in range(17) if row != 5]
    assert torch.isnan(got[5]).all() and torch.equal(bits(got)[others], bits(clean)[others])


@pytest.mark.parametrize("backend", OURS)
def test_slots_are_added_in_fp32_from_the_first(backend):
    lay = exact_layer(4, 160, 96)
    x, topk_weights, ids = exact_inputs(9, 4, 4, 160, torch.bfloat16)
    slots = [
        run(x, lay.weights(), topk_weights[:, [j]], ids[:, [j]], activation=EXACT[True], backend=backend).float()
        for j in range(4)
    ]
    want = (((slots[0] + slots[1]) + slots[2]) + slots[3]).bfloat16()
    assert torch.equal(run(x, lay.weights(), topk_weights, ids, activation=EXACT[True], backend=backend), want)


@pytest.mark.parametrize("backend", [*OURS, "reference", "auto"])
def test_nothing_to_do(backend):
    lay = layer(8, 160, 96)
    x, topk_weights, ids = inputs(0, 4, 8, 160, torch.bfloat16)
    assert run(x, lay.weights(), topk_weights, ids, backend=backend).shape == (0, 160)
    no_choice = run(
        torch.ones(3, 160).bfloat16(), lay.weights(), torch.ones(3, 0), torch.ones(3, 0).int(), backend=backend
    )
    assert torch.equal(no_choice, torch.zeros(3, 160).bfloat16())


# --- what is not covered --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("backend", "hidden", "dtype", "numerics", "says"),
    [
        ("decode", 80, torch.bfloat16, "w4a16", "hidden size 80 is not covered: a multiple of 32"),
        ("middle", 80, torch.bfloat16, "w4a16", "hidden size 80 is not covered: a multiple of 32"),
        ("decode", 160, torch.float32, "w4a16", "float32"),
        ("middle", 160, torch.float32, "w4a16", "float32"),
        ("prefill", 160, torch.float32, "w4a16", "float32"),
        ("decode", 160, torch.bfloat16, "w4a4", "decode computes in w4a16, not in w4a4"),
        ("middle", 160, torch.bfloat16, "w4a4", "middle computes in w4a16, not in w4a4"),
    ],
)
def test_a_backend_asked_for_by_name_raises(backend, hidden, dtype, numerics, says):
    weights = layer(8, hidden, 96).weights()
    x, topk_weights, ids = inputs(3, 2, 8, hidden, dtype)
    call = {"activation": SILU, "numerics": numerics}
    reason = backend_reason(backend, weights, 6, hidden_dtype=dtype, device=CPU, **call)
    assert reason is not None and says in reason and "\n" not in reason
    with pytest.raises(UnsupportedError, match=says) as error:
        run(x, weights, topk_weights, ids, numerics=numerics, backend=backend)
    assert f"backend '{backend}'" in error.value.found
    assert backend_reason("reference", weights, 6, hidden_dtype=dtype, device=CPU, **call) is None


def test_an_unknown_backend_is_refused():
    x, topk_weights, ids = inputs(3, 2, 8, 160, torch.bfloat16)
    with pytest.raises(ContractError, match="'fast'"):
        run(x, layer(8, 160, 96).weights(), topk_weights, ids, backend="fast")


def run_auto(x, weights, topk_weights, ids, numerics="w4a16"):
    """`auto` as on a GPU, though the tensors are on the CPU."""
    return kernel.run(
        x, weights, topk_weights, ids, activation=SILU, numerics=numerics, apply_router_weight_on_input=False,
        expert_offset=0, num_global_experts=None, backend="auto", order="",
    )  # fmt: skip


@pytest.fixture
def served(monkeypatch, caplog) -> list[str]:
    """The backends that were run, in order; and a log that has said nothing."""
    monkeypatch.setattr(kernel, "_said", set())
    caplog.set_level(logging.INFO, logger=kernel.__name__)
    names: list[str] = []

    def noting(name, original):
        def call(*arguments):
            names.append(name)
            return original(*arguments)

        return call

    monkeypatch.setattr(kernel, "_BACKENDS", {name: noting(name, f) for name, f in kernel._BACKENDS.items()})
    return names


def test_auto_takes_what_covers_the_layer(served, caplog):
    lay = layer(8, 160, 96)
    for tokens, backend in ((24, "decode"), (25, "middle")):
        x, topk_weights, ids = inputs(tokens, 2, 8, 160, torch.bfloat16)
        assert torch.equal(
            run_auto(x, lay.weights(), topk_weights, ids), run(x, lay.weights(), topk_weights, ids, backend=backend)
        )
        assert served == [backend, backend]
        served.clear()
    run_auto(x, lay.weights(), topk_weights, ids, "w4a4")
    assert served == ["prefill"] and not caplog.messages


def test_auto_falls_back_and_says_so_once(served, caplog):
    lay = layer(8, 80, 96)
    x, topk_weights, ids = inputs(5, 2, 8, 80, torch.bfloat16)
    for _ in range(3):
        got = run_auto(x, lay.weights(), topk_weights, ids)
    assert served == ["prefill"] * 3
    assert_close(got, oracle(x, lay, topk_weights, ids), TOLERANCE[torch.bfloat16])
    (message,) = caplog.messages
    assert message.startswith("fused_moe: not by decode, since the hidden size 80 is not covered")


def test_auto_ends_with_the_reference(served, caplog):
    lay = layer(8, 80, 96)
    x, topk_weights, ids = inputs(5, 2, 8, 80, torch.float32)
    for _ in range(2):
        assert run_auto(x, lay.weights(), topk_weights, ids) is None
    assert served == [] and len(caplog.messages) == 2
    assert "not by decode" in caplog.messages[0] and "not by prefill" in caplog.messages[1]


def test_a_kernel_that_does_not_load_is_a_fallback_unless_asked_for(served, caplog, monkeypatch):
    def refuses(*_):
        raise UnsupportedError("no driver today", "a driver", "install one")

    monkeypatch.setitem(kernel._BACKENDS, "decode", refuses)
    lay = layer(8, 160, 96)
    x, topk_weights, ids = inputs(5, 2, 8, 160, torch.bfloat16)
    run_auto(x, lay.weights(), topk_weights, ids)
    assert served == ["prefill"] and "not by decode, since no driver today" in caplog.text
    with pytest.raises(UnsupportedError, match="no driver today"):
        run(x, lay.weights(), topk_weights, ids, backend="decode")


def test_auto_on_the_cpu_is_the_reference(served):
    lay = layer(8, 160, 96)
    x, topk_weights, ids = inputs(5, 2, 8, 160, torch.bfloat16)
    auto, reference = (run(x, lay.weights(), topk_weights, ids, backend=name) for name in ("auto", "reference"))
    assert torch.equal(auto, reference) and served == []


@pytest.mark.parametrize("backend", ["decode", "middle"])
def test_weights_that_do_not_lie_as_the_kernels_read_them(backend):
    """They are read by pointer, so strides would be ignored silently."""
    lay = layer(4, 128, 128)
    x, topk_weights, topk_ids = inputs(5, 2, 4, 128, torch.float16)
    weights = lay.weights()
    weights = dataclasses.replace(weights, w13_global_scale=weights.w13_global_scale.T.contiguous().T)
    with pytest.raises(UnsupportedError, match="w13_global_scale has strides"):
        run(x / 8, weights, topk_weights, topk_ids, backend=backend)


def test_slots_that_are_not_aligned_are_left_to_the_reference():
    slots = torch.ones(4 * 64 + 1, dtype=torch.float16)[1:].view(4, 64)
    ids = torch.zeros(2, 2, dtype=torch.int32)
    with pytest.raises(UnsupportedError, match="aligned"):
        sum_slots(slots, ids, num_experts=1, implementation="kernel")
    assert (sum_slots(slots, ids, num_experts=1) == 2).all()
