"""Which dense weights are worth L2, and when: from their sizes alone. Standard library only.

Between two uses of a layer's weights the whole model streams past, so L2 can help in two ways only: bring a weight in
shortly before it is read, while the bus has nothing else to do (`prefetches`), or keep a few megabytes of weights from
one step to the next and save just those (`pinned`). Routed experts are in neither: which are needed is not known before
the router has run, and they are read once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

ATTENTION, FFN, NEXT = PHASES = ("attention", "ffn", "next")
"""What runs while a phase's weights are fetched: attention, the all-reduce behind it, the one behind the FFN."""

PHASE_TEXT = {
    ATTENTION: "under attention: what comes behind it",
    FFN: "under the all-reduce behind attention: the FFN's dense weights",
    NEXT: "under the all-reduce behind the FFN: the next layer's attention",
}

DEFAULT_SHARE = 4
"""A prefetch takes a quarter of L2 at most. Published windows of 20 to 35 MB on 128 MB of L2 gained there; more than
what comes while the bus idles only competes (H200: docs/measurements.md#l2)."""

MAX_TOKENS = 64
"""Decode graphs of more tokens prefetch nothing: on an H200 nothing is gained from 10 tokens on
(docs/measurements.md#l2); published gains on SM120 were switched off above 256."""


class Sized(Protocol):
    """A weight: `name` in the model, and the bytes that one use reads."""

    @property
    def name(self) -> str: ...
    @property
    def num_bytes(self) -> int: ...


@dataclass(frozen=True)
class Weight:
    """A weight of a model that is not loaded."""

    name: str
    num_bytes: int


T = TypeVar("T", bound=Sized)


@dataclass(frozen=True)
class Layer(Generic[T]):
    """The dense weights of a layer, in the order of use: before attention's core, behind it, and in the FFN."""

    before_attention: tuple[T, ...] = ()
    behind_attention: tuple[T, ...] = ()
    ffn: tuple[T, ...] = ()

    def all(self) -> Iterator[T]:
        yield from (*self.before_attention, *self.behind_attention, *self.ffn)


@dataclass(frozen=True)
class Part(Generic[T]):
    """The first `num_bytes` of a weight."""

    weight: T
    num_bytes: int


Phases = dict[str, tuple[Part[T], ...]]
"""Phase -> what is fetched in it, in the order of need."""


def default_prefetch_bytes(l2_bytes: int) -> tuple[int, int, int]:
    """The bounds of the three phases on a device with so much L2.

    Nothing under attention: on an H200 that slows attention itself by more than the projection behind it gains
    (docs/measurements.md#l2). Published gains on SM120 include it, so it can be asked for.
    """
    share = l2_bytes // DEFAULT_SHARE
    return 0, share, share


def prefetches(
    layers: Sequence[Layer[T]], budgets: tuple[int, int, int], *, without: Iterable[str] = ()
) -> list[Phases[T]]:
    """What each layer's phases fetch.

    Args:
        layers: in the order of the model.
        budgets: bytes of a phase at most, in the order of PHASES; 0 leaves a phase out.
        without: names of weights that stay in L2 anyway.

    Returns:
        For each layer its phases, those that fetch something. The last layer has no "next": behind it comes the
        language model head, which alone is larger than L2, and then sampling.
    """
    known = set(without)
    plans = []
    for number, layer in enumerate(layers):
        following = layers[number + 1].before_attention if number + 1 < len(layers) else ()
        wanted = (layer.behind_attention, layer.ffn, following)
        plan: Phases[T] = {}
        for phase, budget, weights in zip(PHASES, budgets, wanted, strict=True):
            parts = tuple(_up_to(budget, (weight for weight in weights if weight.name not in known)))
            if parts:
                plan[phase] = parts
        plans.append(plan)
    return plans


def pinned(
    layers: Sequence[Layer[T]], set_aside_bytes: int, can_pin: Callable[[T], bool] = lambda _weight: True
) -> list[T]:
    """The weights that stay in L2 from step to step: whole ones, from the first layer on, until no more fits.

    What is pinned is read from L2 once a step: so many bytes less of DRAM, whichever weights they are.
    """
    chosen, left = [], set_aside_bytes
    for weight in (weight for layer in layers for weight in layer.all()):
        if 0 < weight.num_bytes <= left and can_pin(weight):
            chosen.append(weight)
            left -= weight.num_bytes
    return chosen


def total_bytes(plan: Phases[T]) -> int:
    """Of one layer's phases."""
    return sum(part.num_bytes for parts in plan.values() for part in parts)


def describe(plans: Sequence[Phases[T]], pins: Sequence[T]) -> list[str]:
    """The plan in a line a phase, and one for what is pinned; for the log."""
    lines = []
    for phase in PHASES:
        sizes = [sum(part.num_bytes for part in plan[phase]) for plan in plans if phase in plan]
        if sizes:
            mb = sum(sizes) / len(sizes) / (1 << 20)
            largest = max((part for plan in plans for part in plan.get(phase, ())), key=lambda part: part.num_bytes)
            lines.append(
                f"{PHASE_TEXT[phase]}, {mb:.1f} MB in each of {len(sizes)} layers (the largest: {largest.weight.name})"
            )
    if pins:
        mb = sum(weight.num_bytes for weight in pins) / (1 << 20)
        lines.append(f"kept from step to step: {len(pins)} weights, {mb:.1f} MB, {pins[0].name} to {pins[-1].name}")
    return lines


def record(model: str, tp: int, l2_bytes: int, plans: Sequence[Phases[T]], pins: Sequence[T]) -> dict[str, object]:
    """The plan as plain values, for `plan MODEL --l2 --json`."""
    return {
        "format": "sglang-sm120 plan l2 1",
        "model": model,
        "tp": tp,
        "l2_bytes": l2_bytes,
        "max_tokens": MAX_TOKENS,
        "layers": [
            {
                phase: [
                    {"name": part.weight.name, "bytes": part.num_bytes, "of": part.weight.num_bytes} for part in parts
                ]
                for phase, parts in plan.items()
            }
            for plan in plans
        ],
        "kept": [{"name": weight.name, "bytes": weight.num_bytes} for weight in pins],
    }


def _up_to(budget: int, weights: Iterable[T]) -> Iterator[Part[T]]:
    for weight in weights:
        size = min(weight.num_bytes, budget)
        if size > 0:
            yield Part(weight, size)
            budget -= size
