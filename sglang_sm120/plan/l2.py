"""Which dense weights are worth L2, and when: from their sizes alone. Standard library only.

Between two uses of a layer's weights the whole model streams past, so L2 can help in two ways only: bring a weight in
shortly before it is read, while the bus has nothing else to do (`prefetches`), or keep a few megabytes of weights from
one step to the next and save just those (`pinned`). Routed experts are in neither: which are needed is not known before
the router has run, and they are read once.
"""

from __future__ import annotations

import re
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

MB = 1 << 20
_SMALL_BYTES = MB // 10
_MOST_RUNS = 4
_LAYER = re.compile(r"^.*?layers\.\d+\.")

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
    """The plan in a line for each phase and layers that are alike, and one for what is kept; for the log."""
    lines = []
    for phase in PHASES:
        alike: dict[tuple[str, ...], list[int]] = {}
        for number, plan in enumerate(plans):
            if phase in plan:
                alike.setdefault(tuple(_in_words(plan[phase])), []).append(number)
        for words, numbers in alike.items():
            mb = sum(part.num_bytes for part in plans[numbers[0]][phase]) / MB
            lines.append(f"{PHASE_TEXT[phase]}, {mb:.1f} MB in {_layers(numbers)}: {', '.join(words)}")
    if pins:
        mb = sum(weight.num_bytes for weight in pins) / MB
        names = ", ".join(f"{weight.name} {weight.num_bytes / MB:.1f}" for weight in pins)
        lines.append(f"kept from step to step, {mb:.1f} MB: {names}")
    return lines


def _in_words(parts: Sequence[Part[T]]) -> Iterator[str]:
    """Names without their layer, and MB; what is cut by the budget says so; the small ones together."""
    small = [part for part in parts if part.num_bytes < _SMALL_BYTES and part.num_bytes == part.weight.num_bytes]
    for part in parts:
        if part not in small:
            cut = "" if part.num_bytes == part.weight.num_bytes else f" of {part.weight.num_bytes / MB:.1f}"
            yield f"{_LAYER.sub('', part.weight.name)} {part.num_bytes / MB:.1f}{cut}"
    if small:
        kb = sum(part.num_bytes for part in small) / 1024
        yield f"{len(small)} small {'one' if len(small) == 1 else 'ones'}, {kb:.0f} KB"


def _layers(numbers: list[int]) -> str:
    """ "layers 0, 3 to 5"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    if len(runs) > _MOST_RUNS:
        return f"{len(numbers)} layers, {numbers[0]} to {numbers[-1]}"
    text = ", ".join(f"{run[0]}" if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs)
    return f"{'layer' if len(numbers) == 1 else 'layers'} {text}"


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
