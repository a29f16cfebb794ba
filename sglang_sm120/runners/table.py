"""Which runner serves a batch: a table by token count, ranked, from which a runner that fails can be struck."""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from dataclasses import dataclass, field

from sglang_sm120.runners.base import STOCK, Choice

# Tokens up to which our kernels are tried before the stock path on an SM120 GPU. A guess: on an H200 decode is faster
# than SGLang's Marlin by a third and more up to there (docs/measurements.md#moe); not measured on SM120.
# `sglang-sm120 tune` replaces it.
NATIVE_TOKENS = 64


@dataclass(frozen=True)
class Row:
    """Batches of up to `up_to` tokens (None: of any size) that the row before does not cover; the best choice first."""

    up_to: int | None
    ranking: tuple[Choice, ...]


@dataclass
class RunnerTable:
    """Rows in ascending order, the last one without a bound. source: where it comes from, for the log.

    Not frozen: `strike` is what the self-check does to a choice that gave wrong results.
    """

    rows: tuple[Row, ...]
    source: str
    struck: dict[Choice, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        bounds = [row.up_to for row in self.rows]
        if not self.rows or bounds[-1] is not None or None in bounds[:-1] or any(not row.ranking for row in self.rows):
            raise ValueError(f"rows of a table end without a bound and hold a choice each: {self.rows}")
        self._bounds = [bound for bound in bounds if bound is not None]
        if self._bounds != sorted(set(self._bounds)):
            raise ValueError(f"rows of a table ascend: {self._bounds}")

    def ranking(self, num_tokens: int) -> tuple[Choice, ...]:
        """What may serve a batch of this size, the best first, without what was struck. May be empty."""
        row = self.rows[bisect.bisect_left(self._bounds, num_tokens)]
        return tuple(choice for choice in row.ranking if choice not in self.struck)

    def choices(self) -> tuple[Choice, ...]:
        """Every choice in it that was not struck, in the order of the rows."""
        return tuple(dict.fromkeys(c for row in self.rows for c in row.ranking if c not in self.struck))

    def strike(self, choice: Choice, reason: str) -> None:
        """Never use this choice again."""
        self.struck[choice] = reason

    def describe(self) -> str:
        """One line: "native w4a16 up to 64 tokens, flashinfer_cutlass w4a4 above"."""
        parts: list[tuple[str, int | None]] = []
        for row in self.rows:
            first = next((str(choice) for choice in row.ranking if choice not in self.struck), "SGLang's own path")
            if parts and parts[-1][0] == first:
                parts.pop()
            parts.append((first, row.up_to))
        if len(parts) == 1:
            return f"{parts[0][0]} for every batch"
        return ", ".join(f"{name} above" if bound is None else f"{name} up to {bound} tokens" for name, bound in parts)


def only(choices: Iterable[Choice], source: str) -> RunnerTable:
    """The same ranking for every batch size."""
    return RunnerTable((Row(None, tuple(choices)),), source)


def shipped_default(*, is_sm120: bool, numerics: str, native: bool) -> RunnerTable:
    """The table without a profile.

    Args:
        is_sm120: whether the stock FlashInfer CUTLASS path can run.
        numerics: "auto" leaves each runner its own; "w4a16" or "w4a4" holds for all of them.
        native: whether our kernels can be loaded. On the CPU they are an emulation for tests, slower than `reference`.
    """
    reference = Choice("reference", "w4a4" if numerics == "auto" else numerics)
    ours = (Choice("native", "w4a16" if numerics == "auto" else numerics),) if native else ()
    if not is_sm120:
        return only((*ours, reference), "the shipped default for emulation")
    stock = (Choice(STOCK, "w4a4"),) if numerics != "w4a16" else ()
    if numerics == "w4a4" or not ours:  # one numerics throughout: nothing says that our W4A4 kernel is the faster one
        return only((*stock, *ours, reference), "the shipped default, not measured on SM120")
    if not stock:
        return only((*ours, reference), "the shipped default, not measured on SM120")
    small = Row(NATIVE_TOKENS, (*ours, *stock, reference))
    return RunnerTable((small, Row(None, (*stock, *ours, reference))), "the shipped default, not measured on SM120")
