"""A profile on the terminal: times by token count, what is chosen, and why a candidate has no time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from sglang_sm120.bench.options import NUMERICS
from sglang_sm120.runners.base import STOCK, Choice
from sglang_sm120.runners.profile import Candidate, Layer, Machine, Point, Profile, Shape, table

CHOSEN, CLOSE = "*", "~"


@dataclass(frozen=True)
class Cell:
    """A candidate's median time of one call in microseconds; ratio: what it is compared with over this, None alone."""

    median_us: float
    ratio: float | None


@dataclass(frozen=True)
class Line:
    """One token count. cells: of what was timed. is_close: samples of the chosen one and the next overlap."""

    tokens: int
    cells: dict[Choice, Cell]
    chosen: Choice
    is_close: bool


def lines(layer: Layer, numerics: str = "auto") -> list[Line]:
    """Every count at which something was timed in these numerics ("auto": in any)."""
    chosen = table(layer, numerics, "")
    if chosen is None:
        return []
    found = []
    for point in layer.points:
        timed = {c.choice: c for c in point.candidates if c.samples_us and numerics in ("auto", c.numerics)}
        if not timed:
            continue
        first, *rest = chosen.ranking(point.tokens)
        found.append(
            Line(
                point.tokens,
                _cells(timed),
                first,
                bool(rest) and min(timed[rest[0]].samples_us) <= max(timed[first].samples_us),
            )
        )
    return found


def _cells(timed: dict[Choice, Candidate]) -> dict[Choice, Cell]:
    medians = {choice: candidate.median_us or 0.0 for choice, candidate in timed.items()}
    stock = [median for choice, median in medians.items() if choice.runner == STOCK]
    cells = {}
    for choice, median in medians.items():
        compared = stock or [other for name, other in medians.items() if name != choice]
        cells[choice] = Cell(median, min(compared) / median if compared else None)
    return cells


def failures(layers: Sequence[Layer]) -> list[str]:
    """What was wrong or broke; a candidate that does not cover a point is neither."""
    return [
        f"{describe(layer.shape)}; {point.tokens} tokens, {candidate.choice}: {candidate.reason}"
        for layer in layers
        for point in layer.points
        for candidate in point.candidates
        if candidate.failed
    ]


def describe(shape: Shape) -> str:
    """One line: a layer by its sizes."""
    gated = "gated " if shape.is_gated else ""
    return (
        f"{shape.num_experts} experts, top {shape.top_k}, hidden size {shape.hidden_size}, intermediate size "
        f"{shape.intermediate_size} ({gated}{shape.activation}, {shape.hidden_dtype})"
    )


def machine_line(machine: Machine) -> str:
    """The GPU and the versions that times depend on."""
    gpu = f"GPU {machine.gpu}, compute capability {machine.capability}, {machine.multiprocessors} multiprocessors, "
    return (
        (f"{gpu}driver {machine.driver}" if machine.capability else "no GPU: these are times of a CPU")
        + f"; torch {machine.torch}, Triton {machine.triton or 'not installed'}, FlashInfer "
        f"{machine.flashinfer or 'not installed'}, sglang-sm120 {machine.sglang_sm120}"
    )


def show(console: Console, profile: Profile, layers: Sequence[Layer]) -> None:
    """Header, and for each layer its table, what is chosen, and what has no time."""
    console.print(machine_line(profile.machine), markup=False, highlight=False)
    console.print(f"measured {profile.created}: {profile.command}", markup=False, highlight=False)
    for layer in layers:
        console.print()
        console.print(_table(layer))
        console.print("  chosen, by --sm120-moe-numerics:", markup=False, highlight=False)
        for numerics in ("auto", *NUMERICS):
            chosen = table(layer, numerics, "")
            said = "nothing was timed" if chosen is None else chosen.describe()
            console.print(f"    {numerics + ':':6} {said}", markup=False, highlight=False)
        for text in untimed(layer):
            console.print(f"  {text}", style="dim", markup=False, highlight=False)
    console.print()
    console.print(
        f"us: one call of the whole layer, median of the samples. {CHOSEN} is the fastest, which `sglang serve` takes; "
        f"{CLOSE} behind the count: its samples and the next one's overlap.\nx: the time of {STOCK}, where it was "
        "timed, else of the fastest other candidate, over this one's; above 1 is faster.",
        markup=False,
        highlight=False,
    )
    for text in failures(layers):
        console.print(text, style="bold red", markup=False, highlight=False)


def _table(layer: Layer) -> Table:
    shown = lines(layer)
    timed = [choice for choice in _choices(layer) if any(choice in line.cells for line in shown)]
    drawn = Table(title=describe(layer.shape), title_justify="left", box=box.SIMPLE_HEAD)
    drawn.add_column("\ntokens", justify="right")
    for choice in timed:
        drawn.add_column(f"{choice.runner}\n{choice.numerics}: us      x", justify="right", no_wrap=True)
    for line in shown:
        point = next(point for point in layer.points if point.tokens == line.tokens)
        drawn.add_row(
            f"{line.tokens}{CLOSE if line.is_close else ' '}", *(_cell(point, line, choice) for choice in timed)
        )
    return drawn


def _cell(point: Point, line: Line, choice: Choice) -> Text:
    cell = line.cells.get(choice)
    if cell is None:
        failed = any(c.failed for c in point.candidates if c.choice == choice)
        return Text("failed" if failed else "-", style="red" if failed else "dim")
    ratio = "" if cell.ratio is None else f"{cell.ratio:.{2 if cell.ratio >= 0.1 else 3}f}"
    text = f"{CHOSEN if choice == line.chosen else ''} {cell.median_us:.1f} {ratio:>6}"
    return Text(text, style="bold green" if choice == line.chosen else "")


def _choices(layer: Layer) -> list[Choice]:
    return list(dict.fromkeys(candidate.choice for point in layer.points for candidate in point.candidates))


def untimed(layer: Layer) -> list[str]:
    """Why a candidate that did not fail has no time, and at which counts; a line a reason."""
    counts = [point.tokens for point in layer.points]
    reasons: dict[tuple[Choice, str], list[int]] = {}
    for point in layer.points:
        for candidate in point.candidates:
            if candidate.reason and not candidate.failed:
                reasons.setdefault((candidate.choice, candidate.reason), []).append(point.tokens)
    return [f"{choice} {_where(at, counts)}: {reason}" for (choice, reason), at in reasons.items()]


def _where(at: list[int], counts: list[int]) -> str:
    if at == counts:
        return "not timed"
    first = counts.index(at[0])
    if len(at) > 2 and at == counts[first : first + len(at)]:
        return f"not timed at {at[0]} to {at[-1]} tokens"
    return f"not timed at {', '.join(map(str, at))} tokens"
