"""The self-check at start: right runners pass, planted faults are caught and named, bounds and inputs hold."""

from __future__ import annotations

import functools
import math
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "kernels"))

import moe_oracle
from moe_oracle import SILU, map_tensors, oracle

from sglang_sm120.errors import ContractError
from sglang_sm120.kernels.moe.layer import MoeActivation
from sglang_sm120.kernels.quantization.nvfp4.api import swizzle_blockscale, unswizzle_blockscale
from sglang_sm120.runners import verify
from sglang_sm120.runners.base import Choice, LayerSpec
from sglang_sm120.runners.native import NativeRunner, ReferenceRunner
from sglang_sm120.runners.verify import THRESHOLDS, Finding, check_layer, default_token_counts, describe

NUMERICS = ["w4a16", "w4a4"]
LAYER = "model.layers.3.mlp.experts"
COUNTS = (1, 17, 40)
EXPERTS = 8


@functools.cache
def layer(experts: int, hidden: int, intermediate: int, is_gated: bool = True) -> moe_oracle.Layer:
    """The oracle's, with scales under which the projections are not tiny, nor most quantised activations saturated."""
    lay = moe_oracle.layer(experts, hidden, intermediate, is_gated)
    lay = replace(lay, input_scale={name: scale * np.float32(10) for name, scale in lay.input_scale.items()})
    wide, deep = np.float32(3 * hidden**-0.5), np.float32(intermediate**-0.5)
    return replace(lay, s2={name: s2 * (deep if name == "down" else wide) for name, s2 in lay.s2.items()})


@functools.cache
def even_layer() -> moe_oracle.Layer:
    """Its experts add about as much: in W4A4 one that adds a tenth of another is not told apart, as THRESHOLDS says."""
    lay = layer(EXPERTS, 256, 128)
    scales = (
        {name: np.full_like(scale, scale.mean()) for name, scale in of.items()} for of in (lay.s2, lay.input_scale)
    )
    return replace(lay, **dict(zip(("s2", "input_scale"), scales, strict=True)))


def spec_of(dtype=torch.bfloat16, top_k=4, activation=SILU, **more) -> LayerSpec:
    return LayerSpec(activation, dtype, top_k, **more)


def check(bound, numerics="w4a16", lay=None, counts=COUNTS, spec=None, **weights) -> dict[int, Finding]:
    """The findings by count of one candidate, on a layer without padding in its scales unless told otherwise."""
    lay = lay or layer(EXPERTS, 256, 128)
    choice = Choice("planted", numerics)
    findings = check_layer(LAYER, lay.weights(**weights), spec or spec_of(), {choice: bound}, counts)
    assert all((finding.layer, finding.choice) == (LAYER, choice) for finding in findings)
    assert [finding.num_tokens for finding in findings] == sorted(counts)
    return {finding.num_tokens: finding for finding in findings}


def planted(numerics, weights=None, inputs=None, output=None, spec=None):
    """The reference, with a fault in what it reads, is given, or returns."""

    def run(x, its_weights, topk_weights, topk_ids):
        if weights is not None:
            its_weights = weights(its_weights)
        if inputs is not None:
            x, topk_weights, topk_ids = inputs(x, topk_weights, topk_ids)
        bound = ReferenceRunner().bind(its_weights, spec or spec_of(), numerics)
        out = bound(x, its_weights, topk_weights, topk_ids)
        return out if output is None else output(out)

    return run


def edited(tensor, index, factor):
    tensor = tensor.clone()
    tensor[index] *= factor
    return tensor


# --- right runners pass ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("numerics", NUMERICS)
@pytest.mark.parametrize(
    ("sizes", "order", "top_k"),
    [((3, 256, 96), "up_gate", 1), ((16, 256, 128), "gate_up", 4), ((5, 1600, 96), "up_gate", 2),
     ((4, 2880, 32), "gate_up", 8)],
)  # fmt: skip
@pytest.mark.parametrize("is_gated", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_right_runner_passes(numerics, sizes, order, top_k, is_gated, dtype):
    """The oracle in float64, which shares no code with the reference; k above E leaves slots empty."""
    lay, activation = layer(*sizes, is_gated), SILU if is_gated else MoeActivation("relu2")
    found = check(
        lambda x, _, topk_weights, ids: oracle(x, lay, topk_weights, ids, activation, numerics).to(dtype),
        numerics, lay, (1, 5), spec_of(dtype, top_k, activation), order=order,
    )  # fmt: skip
    assert all(finding.passed and finding.detail == "" for finding in found.values()), found
    assert all(finding.relative_error < (0.01 if numerics == "w4a16" else 0.12) for finding in found.values())


@pytest.mark.parametrize("numerics", NUMERICS)
def test_a_runner_that_rounds_between_the_gemms_passes(numerics, monkeypatch):
    """To 16 bits, before and after the activation: what stock kernels do, and what W4A4's bounds are for."""

    def rounded(gate, up, activation):
        gate, up, out = (torch.from_numpy(np.asarray(a)).bfloat16().double().numpy() for a in (gate, up, up))
        out = moe_oracle.ACTIVATIONS[activation.name](gate) * up
        return torch.from_numpy(out).bfloat16().double().numpy()

    monkeypatch.setattr(moe_oracle, "activate", rounded)
    worst = 0.0
    for sizes, top_k in (((4, 256, 96), 1), ((8, 1600, 96), 4)):
        lay = layer(*sizes)
        found = check(
            lambda x, _, topk_weights, ids, lay=lay: oracle(x, lay, topk_weights, ids, SILU, numerics).bfloat16(),
            numerics, lay, (1, 40), spec_of(top_k=top_k),
        )  # fmt: skip
        assert all(finding.passed for finding in found.values()), found
        worst = max(worst, found[40].relative_error)
    assert worst > (0.003 if numerics == "w4a16" else 0.03), "it rounds nothing, and so tests nothing"


@pytest.mark.parametrize("numerics", NUMERICS)
@pytest.mark.parametrize(("first", "count"), [(0, 5), (5, 6), (11, 1)])
def test_a_right_runner_passes_under_expert_parallelism(numerics, first, count):
    lay = layer(12, 256, 96)
    weights = map_tensors(lay.weights(), lambda tensor: tensor[first : first + count])
    held = range(first, first + count)

    def right(x, _, topk_weights, ids):
        return oracle(x, lay, topk_weights, ids, SILU, numerics, held).bfloat16()

    def reads_local_ids(x, _, topk_weights, ids):
        return oracle(x, lay, topk_weights, ids + 1, SILU, numerics, held).bfloat16()

    spec = spec_of(expert_offset=first, num_global_experts=12)
    candidates = {Choice("right", numerics): right, Choice("wrong", numerics): reads_local_ids}
    findings = check_layer(LAYER, weights, spec, candidates, (1, 8))
    assert {finding.choice.runner: finding.passed for finding in findings} == {"right": True, "wrong": False}
    assert len(findings) == 4


@pytest.mark.parametrize("numerics", NUMERICS)
def test_the_router_weight_on_the_input(numerics):
    """k = 1, and not all router weights 1: a runner that applies them to the output is told apart."""
    spec = spec_of(top_k=1, apply_router_weight_on_input=True)
    assert all(finding.passed for finding in check(planted(numerics, spec=spec), numerics, spec=spec).values())
    late = planted(numerics, spec=spec_of(top_k=1))
    assert not any(finding.passed for finding in check(late, numerics, spec=spec).values())


def test_our_kernels_pass_as_built_for_the_host():
    """decode, middle and prefill by the batch size, in both numerics."""
    lay, spec = layer(3, 160, 96), spec_of(torch.float16, 2)
    weights = lay.weights("gate_up")
    candidates = {Choice("native", numerics): NativeRunner().bind(weights, spec, numerics) for numerics in NUMERICS}
    findings = check_layer(LAYER, weights, spec, candidates, (1, 17))
    assert len(findings) == 4 and all(finding.passed for finding in findings), findings
    swapped = replace(weights, w13_order="up_gate")
    wrong = {choice: lambda x, _, *rest, f=bound: f(x, swapped, *rest) for choice, bound in candidates.items()}
    findings = check_layer(LAYER, weights, spec, wrong, (1, 17))
    assert {(finding.passed, finding.detail) for finding in findings} == {(False, "looks like gate and up swapped")}


# --- planted faults are caught and named ----------------------------------------------------------------------------


def one_block_scale_for_32(weights):
    changed = {}
    for name in ("w13", "w2"):
        rows, packed = getattr(weights, f"{name}_weight").shape[1:]
        plain = unswizzle_blockscale(getattr(weights, f"{name}_blockscale"), rows, packed // 8).view(torch.uint8)
        doubled = plain[..., ::2].repeat_interleave(2, -1)
        changed[f"{name}_blockscale"] = swizzle_blockscale(doubled.view(torch.float8_e4m3fn))
    return replace(weights, **changed)


def scales_as_they_lie(weights):
    return replace(weights, **{n: swizzle_blockscale(getattr(weights, n)) for n in ("w13_blockscale", "w2_blockscale")})


def global_scales_inverted(weights):
    return replace(weights, w13_global_scale=1 / weights.w13_global_scale, w2_global_scale=1 / weights.w2_global_scale)


def changed_scale(field, of):
    return {"weights": lambda weights: replace(weights, **{field: of(getattr(weights, field))})}


WRONG_EVERYWHERE = {
    "gate and up": ({"weights": lambda w: replace(w, w13_order="gate_up")}, "looks like gate and up swapped"),
    "gate and up, with their scales": (
        {"weights": lambda w: replace(w, w13_order="gate_up", w13_global_scale=w.w13_global_scale.flip(1))},
        "looks like gate and up swapped",
    ),
    "columns of the global scales": (
        changed_scale("w13_global_scale", lambda s: s.flip(1)), "looks like the global scales of gate and up swapped",
    ),
    "global scale of w2 dropped": (
        changed_scale("w2_global_scale", torch.ones_like), "looks like global scales of w2 left out",
    ),
    "global scale of w13 dropped": (
        changed_scale("w13_global_scale", torch.ones_like), "looks like global scales of w13 left out",
    ),
    "global scale of w2 inverted": (
        changed_scale("w2_global_scale", torch.reciprocal), "looks like global scales of w2 inverted",
    ),
    "global scales inverted": (
        {"weights": global_scales_inverted},
        "looks like global scales of w13 and w2 inverted",
    ),
    "router weights": (
        {"inputs": lambda x, w, ids: (x, torch.ones_like(w), ids)}, "looks like router weights left out",
    ),
    "MXFP4": ({"weights": one_block_scale_for_32}, "looks like MXFP4: one block scale for 32 elements"),
    "not swizzled": ({"weights": scales_as_they_lie}, "looks like block scales read as if not swizzled"),
    "a factor": ({"output": lambda out: out * 2.5}, "looks like every value multiplied by 2.5"),
    "zeros": ({"output": torch.zeros_like}, "the result is all zero"),
    "last expert zero": (
        changed_scale("w2_global_scale", lambda s: edited(s, -1, 0)), "; each of them has expert 7",
    ),
    "first expert twice": (
        changed_scale("w2_global_scale", lambda s: edited(s, 0, 2)), "; each of them has expert 0",
    ),
}  # fmt: skip


@pytest.mark.parametrize("numerics", NUMERICS)
@pytest.mark.parametrize("fault", WRONG_EVERYWHERE)
def test_a_fault_that_shows_at_every_size(fault, numerics):
    changes, detail = WRONG_EVERYWHERE[fault]
    found = check(planted(numerics, **changes), numerics)
    assert not found[17].passed and not found[40].passed, found
    assert not found[1].passed or numerics == "w4a4"  # one row may be off by a fifth
    assert found[40].detail.endswith(detail), found[40]
    most, least = THRESHOLDS[numerics]
    assert math.isfinite(found[40].relative_error)
    assert found[40].relative_error > most or found[40].cosine < least
    line = describe(list(found.values()))[0]
    assert line.startswith(f"planted {numerics} differs from the reference on {LAYER}: relative error ")


def test_activation_scales_left_out():
    found = check(planted("w4a4", **changed_scale("w13_input_scale", torch.ones_like)), "w4a4")
    assert not found[17].passed and not found[40].passed
    assert found[40].detail.startswith("looks like activation scales of w13") and found[40].detail.endswith(" left out")


def test_activations_that_are_not_quantised_are_not_w4a4():
    found = check(planted("w4a16"), "w4a4")
    assert not found[17].passed and not found[40].passed


@pytest.mark.parametrize("numerics", NUMERICS)
@pytest.mark.parametrize("factor", [0.5, 2.0, 0.0])
@pytest.mark.parametrize("field", ["w13_global_scale", "w2_global_scale"])
@pytest.mark.parametrize("expert", [0, 3, 4, 7])
def test_the_scale_of_one_expert(expert, field, factor, numerics):
    """Off by two, for one expert only: among 40 tokens each expert leads in some."""
    fault = planted(numerics, **changed_scale(field, lambda scale: edited(scale, expert, factor)))
    found = check(fault, numerics, even_layer(), counts=(40,))[40]
    assert not found.passed and found.detail.endswith(f"; each of them has expert {expert}"), found


@settings(max_examples=20, deadline=None)
@given(row=st.integers(0, 39), slot=st.integers(0, 3), numerics=st.sampled_from(NUMERICS))
def test_one_token_with_a_wrong_expert(row, slot, numerics):
    """Any slot of any token; the sizes without that token pass."""
    skipped = []

    def next_expert(x, topk_weights, ids):
        ids = ids.clone()
        if len(ids) > row:
            skipped.append(int(ids[row, slot]) < 0)
            if not skipped[-1]:
                others = [expert for expert in range(EXPERTS) if expert not in ids[row]]
                ids[row, slot] = others[0]
        return x, topk_weights, ids

    found = check(planted(numerics, inputs=next_expert), numerics, even_layer())
    for count, finding in found.items():
        assert finding.passed == (count <= row or skipped[0]), finding
        if not finding.passed and count > 1:
            assert finding.detail == f"1 of {count} rows differ or are not finite, the first is row {row}"


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("numerics", NUMERICS)
def test_one_value_that_is_not_finite(numerics, value):
    def poison(out):
        if len(out) > 9:
            out[9, 5] = value
        return out

    found = check(planted(numerics, output=poison), numerics)
    assert found[1].passed
    for count in (17, 40):
        assert found[count] == Finding(
            LAYER, Choice("planted", numerics), count, math.inf, 0.0, False,
            f"1 of {count} rows differ or are not finite, the first is row 9",
        )  # fmt: skip


def test_rows_in_the_wrong_order_at_one_size_only():
    found = check(planted("w4a16", output=lambda out: out.roll(1, 0) if len(out) == 17 else out))
    assert {count: finding.passed for count, finding in found.items()} == {1: True, 17: False, 40: True}
    assert found[17].detail == (
        "17 of 17 rows differ or are not finite, the first is row 0, which holds the result of row 16"
    )
    (failure, success) = describe(list(found.values()))
    assert " at 17 tokens (bound 0.02), cosine " in failure and "also at" not in failure
    assert success.startswith("planted w4a16 agrees with the reference on 1 layer(s) at 1, 40 tokens: ")


def raises(out):
    raise ValueError("no tile\nfits")


@pytest.mark.parametrize(
    ("output", "detail"),
    [
        (torch.Tensor.float, "TypeError: the result is [17, 256] torch.float32 on cpu, not [17, 256]"),
        (lambda out: out[:, :-1], "TypeError: the result is [17, 255] torch.bfloat16 on cpu, not [17, 256]"),
        (lambda out: out[:1], "TypeError: the result is [1, 256] torch.bfloat16 on cpu, not [17, 256]"),
        (lambda out: None, "TypeError: the result is None, not [17, 256] torch.bfloat16 on cpu"),
        (lambda out: out.to("meta"), "TypeError: the result is [17, 256] torch.bfloat16 on meta, not"),
        (raises, "ValueError: no tile fits"),
    ],
    ids=["dtype", "columns", "rows", "none", "device", "raises"],
)  # fmt: skip
def test_a_result_that_cannot_be_compared(output, detail):
    found = check(planted("w4a16", output=output), counts=(17,))[17]
    assert found.detail.startswith(detail), found
    assert (found.passed, found.relative_error, found.cosine) == (False, math.inf, 0.0)
    assert describe([found]) == [f"planted w4a16 failed on {LAYER} at 17 tokens: {found.detail}"]


def test_an_interrupt_passes_through():
    def interrupts(*_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        check(interrupts)


@pytest.mark.parametrize("skips", [True, False])
def test_ids_of_minus_one_only_where_they_are_wanted(skips: bool) -> None:
    seen: list[torch.Tensor] = []
    weights, spec = layer(EXPERTS, 256, 128).weights(), spec_of()

    def keep(x, weights, topk_weights, topk_ids):
        seen.append(topk_ids)
        return x

    check_layer("layer", weights, spec, {Choice("kept", "w4a16"): keep}, [20], skips=skips)
    assert bool((seen[0] == -1).any()) is skips and int(seen[0].max()) == weights.num_experts - 1


def test_a_fault_of_one_candidate_does_not_touch_the_others():
    """Also not when it overwrites what it was given."""

    def overwrites(x, weights, topk_weights, topk_ids):
        for tensor in (x, topk_weights, topk_ids):
            tensor.zero_()
        return x

    weights = layer(EXPERTS, 256, 128).weights()
    bounds = (overwrites, planted("w4a16"), planted("w4a4"))
    choices = (Choice("bad", "w4a16"), Choice("good", "w4a16"), Choice("good", "w4a4"))
    findings = check_layer(LAYER, weights, spec_of(), dict(zip(choices, bounds, strict=True)), COUNTS)
    assert [(finding.choice, finding.passed) for finding in findings] == [
        (choice, choice.runner == "good") for choice in choices for _ in COUNTS
    ]


def test_memory_is_poisoned_before_a_call(monkeypatch):
    """NaN is written to blocks as large as a result and as the slots, after the last candidate's result was freed."""
    events, new_full = [], torch.Tensor.new_full

    def noting(tensor, size, value, *rest, **more):
        events.append((tuple(size), value))
        return new_full(tensor, size, value, *rest, **more)

    def runs(*arguments):
        events.append("call")
        return planted("w4a16")(*arguments)

    monkeypatch.setattr(torch.Tensor, "new_full", noting)
    check(runs, counts=(5, 17))
    assert [events[:4], events[4:]] == [
        [((tokens * 4, 256), pytest.approx(math.nan, nan_ok=True))]
        + [((tokens, 256), pytest.approx(math.nan, nan_ok=True))] * 2
        + ["call"]
        for tokens in (5, 17)
    ]


# --- a reference that nothing can be compared with ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"w2_global_scale": torch.zeros(EXPERTS)}, "the reference is all zero: scales unset?"),
        ({"w13_global_scale": torch.zeros(EXPERTS, 2)}, "the reference is all zero: scales unset?"),
        ({"w2_global_scale": torch.full((EXPERTS,), math.nan)}, "the reference is not finite: scales unset?"),
        ({"w13_global_scale": torch.full((EXPERTS, 2), math.inf)}, "the reference is not finite: scales unset?"),
        ({"w2_global_scale": torch.ones(EXPERTS - 1)}, "w2_global_scale has shape [7]"),
    ],
)  # fmt: skip
def test_a_broken_layer_is_a_finding_of_its_own(changes, says):
    called = []
    lay, spec = layer(EXPERTS, 256, 128), spec_of()
    candidates = {Choice(name, "w4a16"): lambda *_: called.append(1) for name in ("a", "b")}
    (found,) = check_layer(LAYER, lay.weights(**changes), spec, candidates, COUNTS)
    assert found == Finding(LAYER, Choice("reference", "w4a16"), 40, math.inf, 0.0, False, says) and not called
    assert describe([found]) == [f"reference w4a16 failed on {LAYER} at 40 tokens: {says}"]


def test_missing_activation_scales_fail_w4a4_only():
    weights = layer(EXPERTS, 256, 128).weights(w13_input_scale=None)
    candidates = {Choice("planted", numerics): planted("w4a16") for numerics in NUMERICS}
    findings = check_layer(LAYER, weights, spec_of(), candidates, (1, 5))
    assert [(f.choice.runner, f.choice.numerics, f.passed) for f in findings] == [
        ("planted", "w4a16", True), ("planted", "w4a16", True), ("reference", "w4a4", False),
    ]  # fmt: skip
    assert "w4a4 needs w13_input_scale" in findings[-1].detail


@pytest.mark.parametrize("counts", [(), (0, 4), (-1,)])
def test_a_check_of_nothing_is_refused(counts):
    with pytest.raises(ContractError, match="batch sizes"):
        check(planted("w4a16"), counts=counts)


# --- bounds ---------------------------------------------------------------------------------------------------------


@settings(max_examples=12, deadline=None)
@given(
    numerics=st.sampled_from(NUMERICS), row=st.integers(0, 16), off=st.sampled_from([0.9, 0.99, 1.01, 1.1]),
    sign=st.sampled_from([-1, 1]),
)  # fmt: skip
def test_the_bound_on_a_rows_error(numerics, row, off, sign):
    """In float32, so that the planted error is what is measured. One row is enough."""
    spec, (most, _) = spec_of(torch.float32), THRESHOLDS[numerics]
    fault = planted(numerics, output=lambda out: edited(out, row, 1 + sign * off * most), spec=spec)
    found = check(fault, numerics, counts=(17,), spec=spec)[17]
    assert found.relative_error == pytest.approx(off * most, rel=1e-3)
    assert found.passed == (off < 1)
    assert found.cosine == pytest.approx(1, abs=1e-6), "a factor turns no row"
    assert (f"1 of 17 rows differ or are not finite, the first is row {row}" == found.detail) == (off > 1)


@pytest.mark.parametrize(("size", "passed"), [(0.9, True), (1.1, False)])
def test_the_bound_on_the_cosine(size, passed):
    """An error at a right angle to each row, too small for a row's bound, that all rows have."""
    spec, (most, least) = spec_of(torch.float32), THRESHOLDS["w4a4"]
    tangent = math.sqrt(2 * size * (1 - least + most**2 / 34))
    assert tangent < most

    def turned(out):
        other = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
        other -= (other * out).sum(1, keepdim=True) / out.square().sum(1, keepdim=True) * out
        return out + tangent * other * (out.norm(dim=1) / other.norm(dim=1))[:, None]

    found = check(planted("w4a4", output=turned, spec=spec), "w4a4", counts=(17,), spec=spec)[17]
    assert found.relative_error == pytest.approx(tangent, rel=1e-3)
    assert found.cosine == pytest.approx(1 / math.sqrt(1 + tangent**2), rel=1e-5) and found.cosine < 0.998
    assert (found.passed, found.detail) == (passed, "" if passed else "each row is within its bound, the cosine is not")


def test_a_row_of_zeros_has_to_be_met_exactly():
    """With k = 1 the row of a skipped slot (row 3) is zero."""
    spec = spec_of(top_k=1)

    def tiny(out):
        assert not out[3].any()
        out[3, 0] = 1e-30
        return out

    assert check(planted("w4a16", spec=spec), counts=(5,), spec=spec)[5].passed
    assert not check(planted("w4a16", output=tiny, spec=spec), counts=(5,), spec=spec)[5].passed


# --- inputs and batch sizes -----------------------------------------------------------------------------------------


def inputs_of(experts, top_k, tokens, offset=0, total=None, dtype=torch.bfloat16, seed=0):
    """What candidates are given; the layer is as small as it can be."""
    seen = {}
    spec = spec_of(dtype, top_k, expert_offset=offset, num_global_experts=total)

    def spy(*arguments):
        seen[len(arguments[0])] = arguments
        raise ValueError

    check_layer(LAYER, layer(experts, 32, 32).weights(), spec, {Choice("spy", "w4a16"): spy}, tokens, seed=seed)
    return seen


@settings(max_examples=40, deadline=None)
@given(
    experts=st.integers(1, 16), top_k=st.integers(1, 10), tokens=st.integers(1, 64), before=st.integers(0, 9),
    after=st.integers(0, 9), is_global=st.booleans(), seed=st.integers(0, 9),
)  # fmt: skip
def test_routing(experts, top_k, tokens, before, after, is_global, seed):
    first = before if is_global else 0
    more = {"offset": first, "total": before + experts + after} if is_global else {}
    x, _, topk_weights, ids = inputs_of(experts, top_k, (tokens,), seed=seed, **more)[tokens]
    assert ids.shape == topk_weights.shape == (tokens, top_k) and ids.dtype == torch.int32
    assert (x.shape, x.dtype, topk_weights.dtype) == ((tokens, 32), torch.bfloat16, torch.float32)
    rows = [[expert for expert in row if expert >= 0] for row in ids.tolist()]
    assert all(len(row) == len(set(row)) for row in rows), "distinct in a row"
    assert {expert for row in rows for expert in row} <= set(range(more.get("total", experts)))
    held = [[expert - first for expert in row if first <= expert < first + experts] for row in rows]
    used = {expert for row in held for expert in row}
    assert len(used) >= min(experts, sum(map(len, held))), "no expert twice before each came once"
    assert held[0][0] == experts - 1 if top_k == 1 else {0, experts - 1} <= set(held[0])
    if tokens > 3:
        assert len(held[3]) == min(top_k - 1, experts) and (ids[3] < 0).any()
    foreign = [expert for row in rows for expert in row if not first <= expert < first + experts]
    if tokens > 2 and is_global and before + after:
        assert foreign and foreign[0] in (first - 1, first + experts)
    if top_k > 1:
        assert torch.allclose(topk_weights.sum(1), torch.ones(tokens)) and (topk_weights > 0).all()
        assert (topk_weights.max(1).values > 2 * topk_weights.topk(2).values[:, 1]).all(), "one leads"
    else:
        assert ((topk_weights >= 0.25) & (topk_weights <= 1)).all()


def test_each_of_256_experts_leads():
    ids, topk_weights = inputs_of(256, 8, (256,))[256][3], inputs_of(256, 8, (256,))[256][2]
    leads = ids.gather(1, topk_weights.argmax(1, keepdim=True)).flatten().tolist()
    assert sorted(leads) == list(range(256))
    assert len(ids[:64].unique()) > 250  # -1 is one of them


def test_smaller_batches_are_the_first_rows():
    seen = inputs_of(8, 2, (17, 1, 5))
    assert list(seen) == [1, 5, 17]
    for count, (x, _, topk_weights, ids) in seen.items():
        for got, whole in zip((x, topk_weights, ids), (seen[17][0], *seen[17][2:]), strict=True):
            assert torch.equal(got, whole[:count])
    again, other = inputs_of(8, 2, (17,))[17], inputs_of(8, 2, (17,), seed=1)[17]
    assert torch.equal(again[0], seen[17][0]) and not torch.equal(other[0], seen[17][0])


def test_hidden_states_have_outliers_and_nothing_depends_on_the_global_generator():
    spec, seen, state = spec_of(), [], torch.get_rng_state()
    check(lambda x, *_: seen.append(x) or x, counts=(64,), lay=layer(EXPERTS, 1600, 96), spec=spec)
    x = seen[0].float()
    outliers = torch.arange(1600) % 257 == 0
    assert 15 < x[:, outliers].std() < 25 and 0.95 < x[:, ~outliers].std() < 1.05
    assert torch.equal(torch.get_rng_state(), state)


def test_the_reference_runs_once_for_each_numerics(monkeypatch):
    calls = []

    class Counting(ReferenceRunner):
        def bind(self, weights, spec, numerics):
            calls.append(numerics)
            return super().bind(weights, spec, numerics)

    monkeypatch.setattr(verify, "ReferenceRunner", Counting)
    candidates = {Choice(name, numerics): planted(numerics) for name in ("a", "b") for numerics in NUMERICS}
    weights = layer(EXPERTS, 256, 128).weights()
    findings = check_layer(LAYER, weights, spec_of(), candidates, COUNTS)
    assert calls == NUMERICS and len(findings) == 12 and all(finding.passed for finding in findings)
    calls.clear()
    wrong = {Choice(name, "w4a16"): planted("w4a16", output=torch.neg) for name in ("a", "b")}
    check_layer(LAYER, weights, spec_of(), wrong, COUNTS)
    assert len(calls) == 1 + len(
        list(verify._mistakes(verify._Case(weights, spec_of(), "w4a16", *[torch.ones(1)] * 3)))
    )


@pytest.mark.parametrize(
    ("captured", "prefill", "counts"),
    [
        ([1, 2, 4, 8, 12, 16, 24, 32, 40, 48, 56, 64, 72, 80, 160], 8192, (1, 8, 32, 64, 256)),
        ([1, 2, 4], 100, (1, 2, 4, 100)),
        ([], 8192, (1, 256)),
        ([], 1, (1,)),
        ([160, 128], 8192, (128, 256)),
        ([512], 0, (1, 256)),
        ([1, 64], 64, (1, 64)),
    ],
)  # fmt: skip
def test_default_token_counts(captured, prefill, counts):
    assert default_token_counts(captured, prefill) == counts


@given(captured=st.lists(st.integers(1, 600)), prefill=st.integers(0, 10**5))
def test_default_token_counts_are_few_and_small(captured, prefill):
    counts = default_token_counts(captured, prefill)
    assert 1 <= len(counts) <= 5 and list(counts) == sorted(set(counts)) and counts[0] >= 1 and counts[-1] <= 256
    small = [count for count in captured if count <= 64]
    assert not small or {min(small), max(small), min(max(prefill, 1), 256)} <= set(counts)


# --- the log --------------------------------------------------------------------------------------------------------


def test_describe():
    native, stock = Choice("native", "w4a16"), Choice("flashinfer_cutlass", "w4a4")
    findings = [
        Finding(LAYER, stock, 1, 0.0412, 0.99981, True, ""),
        Finding(LAYER, native, 1, 1.3149, 0.0204, False, "looks like gate and up swapped"),
        Finding(LAYER, native, 17, 1.2, 0.03, False, "looks like gate and up swapped"),
        Finding(LAYER, native, 64, 1.1, 0.03, False, "other"),
        Finding("model.layers.4.mlp.experts", stock, 17, 0.0537, 0.9997, True, ""),
        Finding("model.layers.4.mlp.experts", native, 1, math.inf, 0.0, False, "ValueError: no"),
    ]
    assert describe(findings) == [
        f"native w4a16 differs from the reference on {LAYER}: relative error 1.31 at 1 token (bound 0.02), "
        "cosine 0.0204 (bound 0.9993): looks like gate and up swapped; also at 17, 64 tokens",
        "native w4a16 failed on model.layers.4.mlp.experts at 1 token: ValueError: no",
        "flashinfer_cutlass w4a4 agrees with the reference on 2 layer(s) at 1, 17 tokens: relative error up to 0.054, "
        "cosine from 0.999700",
    ]
    assert describe([]) == []
