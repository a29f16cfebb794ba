"""Which dense weights go into L2, on the shapes of real models and at the edges of a budget."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_sm120.plan.l2 import (
    ATTENTION,
    FFN,
    NEXT,
    PHASES,
    Layer,
    Part,
    Weight,
    default_prefetch_bytes,
    describe,
    pinned,
    prefetches,
    total_bytes,
)

MB = 1 << 20


def bf16(name: str, rows: int, columns: int) -> Weight:
    return Weight(name, 2 * rows * columns)


def glm5_tp8(number: int) -> Layer[Weight]:
    """MLA of 64 heads in 8 ranks, hidden 6144; a shared expert of 2048 in 8 ranks."""
    name = f"layers.{number}"
    return Layer(
        (bf16(f"{name}.fused_qkv_a_proj", 2048 + 576, 6144), bf16(f"{name}.q_b_proj", 8 * 256, 2048)),
        (bf16(f"{name}.o_proj", 6144, 8 * 256),),
        (bf16(f"{name}.gate", 256, 6144), bf16(f"{name}.up", 512, 6144), bf16(f"{name}.down", 6144, 256)),
    )


def test_each_phase_fetches_what_the_next_one_reads() -> None:
    layers = [glm5_tp8(0), glm5_tp8(1)]
    first, last = prefetches(layers, (64 * MB, 64 * MB, 64 * MB))
    assert {phase: [part.weight.name for part in parts] for phase, parts in first.items()} == {
        ATTENTION: ["layers.0.o_proj"],
        FFN: ["layers.0.gate", "layers.0.up", "layers.0.down"],
        NEXT: ["layers.1.fused_qkv_a_proj", "layers.1.q_b_proj"],
    }
    assert set(last) == {ATTENTION, FFN}, "behind the last layer there is none"
    assert total_bytes(first) == 2 * (6144 * 2048 + (256 + 512 + 256) * 6144 + 2624 * 6144 + 2048 * 2048)
    assert all(part.num_bytes == part.weight.num_bytes for parts in first.values() for part in parts)


def test_a_budget_cuts_the_weight_that_crosses_it() -> None:
    (plan, _) = prefetches([glm5_tp8(0), glm5_tp8(1)], (0, 4 * MB, 31 * MB))
    assert ATTENTION not in plan
    gate, up = plan[FFN]
    assert (gate.num_bytes, up.num_bytes) == (3 * MB, 1 * MB)
    assert up.weight.num_bytes == 6 * MB
    a, b = plan[NEXT]
    assert a.num_bytes == 2 * 2624 * 6144 and a.num_bytes + b.num_bytes == 31 * MB


def test_what_is_pinned_is_not_fetched() -> None:
    layers = [glm5_tp8(0), glm5_tp8(1)]
    pins = pinned(layers, 40 * MB)
    assert [weight.name for weight in pins] == ["layers.0.fused_qkv_a_proj", "layers.0.q_b_proj"], "o_proj has 24 MB"
    assert sum(weight.num_bytes for weight in pins) <= 40 * MB
    names = {weight.name for weight in pinned(layers, 70 * MB)}
    plans = prefetches(layers, (99 * MB,) * 3, without=names)
    assert not names & {part.weight.name for plan in plans for parts in plan.values() for part in parts}


def test_a_weight_that_cannot_be_pinned_is_passed_over() -> None:
    pins = pinned([glm5_tp8(0)], 12 * MB, lambda weight: not weight.name.endswith("q_b_proj"))
    assert [weight.name for weight in pins] == ["layers.0.gate", "layers.0.up", "layers.0.down"]
    assert pinned([glm5_tp8(0)], MB) == []


@given(
    st.lists(st.lists(st.integers(0, 50), min_size=3, max_size=3), max_size=5),
    st.tuples(*[st.integers(0, 60)] * 3),
)
def test_no_phase_is_over_its_budget_and_nothing_is_fetched_twice(
    sizes: list[list[int]], budgets: tuple[int, int, int]
) -> None:
    layers = [Layer(*((Weight(f"{n}.{i}", size),) for i, size in enumerate(three))) for n, three in enumerate(sizes)]
    plans = prefetches(layers, budgets)
    assert len(plans) == len(layers)
    fetched = []
    for plan in plans:
        for phase, budget in zip(PHASES, budgets, strict=True):
            parts = plan.get(phase, ())
            assert sum(part.num_bytes for part in parts) <= budget
            assert all(0 < part.num_bytes <= part.weight.num_bytes for part in parts)
            fetched += [part.weight.name for part in parts]
    assert len(fetched) == len(set(fetched))


@pytest.mark.parametrize(("l2_mb", "share_mb"), [(128, 32), (96, 24), (60, 15)])
def test_the_default_is_a_quarter_of_l2_and_nothing_under_attention(l2_mb: int, share_mb: int) -> None:
    assert default_prefetch_bytes(l2_mb * MB) == (0, share_mb * MB, share_mb * MB)


def test_the_plan_in_words() -> None:
    layers = [glm5_tp8(0), glm5_tp8(1)]
    lines = describe(prefetches(layers, (32 * MB, 0, 16 * MB)), pinned(layers, 39 * MB))
    assert lines == [
        "under attention: what comes behind it, 24.0 MB in layers 0 to 1: o_proj 24.0",
        "under the all-reduce behind the FFN: the next layer's attention, 16.0 MB in layer 0: "
        "fused_qkv_a_proj 16.0 of 30.8",
        "kept from step to step, 38.8 MB: layers.0.fused_qkv_a_proj 30.8, layers.0.q_b_proj 8.0",
    ]
    assert describe([{}], []) == []
    part = Part(Weight("w", 5), 5)
    assert total_bytes({ATTENTION: (part,), NEXT: (part, part)}) == 15


def test_layers_that_are_alike_are_one_line() -> None:
    def plan(number: int, mb: int) -> dict[str, tuple[Part[Weight], ...]]:
        norm, down = Weight(f"model.layers.{number}.norm", 2048), Weight(f"model.layers.{number}.mlp.down", mb * MB)
        return {FFN: (Part(norm, 2048), Part(down, down.num_bytes))}

    sizes = [5, 5, 5, 2, 5, 2]
    first, second = describe([plan(number, mb) for number, mb in enumerate(sizes)], [])
    assert first.endswith("5.0 MB in layers 0 to 2, 4: mlp.down 5.0, 1 small one, 2 KB")
    assert second.endswith("2.0 MB in layers 3, 5: mlp.down 2.0, 1 small one, 2 KB")
    every_other = [plan(number, 5) if number % 2 else {} for number in range(20)]
    (line,) = describe(every_other, [])
    assert "5.0 MB in 10 layers, 1 to 19: " in line
