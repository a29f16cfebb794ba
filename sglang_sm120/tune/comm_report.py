"""A profile of all-reduces on the terminal and as Markdown: times by size, what is chosen, and what has no time."""

from __future__ import annotations

from dataclasses import dataclass

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from sglang_sm120.kernels.communication.all_reduce_rmsnorm.config import ALGORITHMS, STOCK
from sglang_sm120.tune import comm_stock
from sglang_sm120.tune.comm_host import NVLINK, SOME_NVLINK
from sglang_sm120.tune.comm_profile import MARGIN, CommCandidate, CommPoint, CommProfile
from sglang_sm120.tune.report import CHOSEN, CLOSE

TITLES = {True: "sum, residual add and RMSNorm", False: "the sum alone"}
_NOT_PCIE = ", which is not PCIe: these times say nothing about GPUs on PCIe"
_RATIO = "ours / baseline"


@dataclass(frozen=True)
class CommLine:
    """One size. medians: of what was timed. ratio: our fastest over the fastest baseline. chosen: ours, or
    STOCK. named: chosen, with the name of what won in the place of STOCK. is_close: ours was fastest,
    but not by enough."""

    point: CommPoint
    medians: dict[str, float]
    ratio: float | None
    chosen: str
    named: str
    is_close: bool

    @property
    def marked(self) -> str | None:
        """The candidate whose time the choice stands for; of stock, the fastest baseline."""
        baseline = comm_stock.winner(self.point)
        return self.chosen if self.chosen != STOCK else None if baseline is None else baseline.name


def lines(profile: CommProfile, fused: bool) -> list[CommLine]:
    """Every size of one kind."""
    found = []
    for point in profile.of(fused):
        ours, baseline = point.best(ours=True), point.best(ours=False)
        ratio = ours.median_us / baseline.median_us if ours is not None and baseline is not None else None
        chosen = profile.choice(point)
        medians = {c.name: c.median_us for c in point.candidates if c.samples_us}
        is_close = ratio is not None and ratio < 1 and chosen == STOCK
        found.append(CommLine(point, medians, ratio, chosen, comm_stock.choice(profile, point), is_close))
    return found


def names(profile: CommProfile, fused: bool) -> list[str]:
    """What was tried: ours, then the baselines."""
    tried = dict.fromkeys(candidate.name for point in profile.of(fused) for candidate in point.candidates)
    return sorted(tried, key=lambda name: ALGORITHMS.index(name) if name in ALGORITHMS else len(ALGORITHMS))


def header(profile: CommProfile) -> list[str]:
    """The GPUs and what connects them, the versions, and what was measured."""
    machine = profile.machine
    kinds = {name: profile.gpus.count(name) for name in profile.gpus}
    gpus = ", ".join(f"{count} x {name}" for name, count in kinds.items())
    not_pcie = _NOT_PCIE if profile.link in (NVLINK, SOME_NVLINK) else ""
    return [
        f"{gpus}; {profile.link}{not_pcie}",
        f"driver {machine.driver or 'none'}, torch {machine.torch}, sglang-sm120 {machine.sglang_sm120}",
        f"hidden size {profile.hidden_size}, {profile.dtype}; measured {profile.created}: {profile.command}",
    ]


def served(profile: CommProfile, fused: bool) -> str:
    """The ranges, in words."""
    ranges = comm_stock.ranges(profile, fused)
    if not ranges:
        return "nothing is chosen: SGLang's own path, or the shipped default"
    return "; ".join(f"up to {entry.max_bytes:,} bytes {entry.algorithm}" for entry in ranges)


def notes(profile: CommProfile) -> list[str]:
    """Which baselines are not there, and what follows where there is none; where ours won by too little."""
    found = [f"no baseline {reason}" for reason in profile.missing]
    for fused, title in TITLES.items():
        if profile.of(fused) and not profile.has_baseline(fused):
            found.append(
                f"{title}: without a baseline there is nothing to choose against; ours is taken up to "
                f"{profile.default_end:,} bytes, where the shipped default ends"
            )
        found += [_close(line, title) for line in lines(profile, fused) if line.is_close]
        rows = [str(line.point.rows) for line in lines(profile, fused) if line.named == comm_stock.MSCCLPP]
        if rows:
            found.append(
                f"{title}: MSCCL++ is the fastest at {', '.join(rows)} tokens; a server has it by "
                "--enable-mscclpp, with which our kernels do not serve"
            )
    return found


def _close(line: CommLine, title: str) -> str:
    point = line.point
    ours, baseline = point.best(ours=True), point.best(ours=False)
    assert ours is not None and baseline is not None, "both were compared"
    return (
        f"{title}, {point.rows} tokens: {ours.name} is faster by {baseline.median_us / ours.median_us - 1:.1%} than "
        f"{baseline.name}, and needs more than {point.needed_margin:.1%}: left to {STOCK} (samples {_span(ours)} and "
        f"{_span(baseline)} us)"
    )


def _span(candidate: CommCandidate) -> str:
    return f"{_us(min(candidate.samples_us))} to {_us(max(candidate.samples_us))}"


def failures(profile: CommProfile) -> list[str]:
    """What was wrong or failed, a line a reason."""
    reasons: dict[tuple[str, bool, str], list[int]] = {}
    for point in profile.points:
        for candidate in point.candidates:
            if candidate.reason:
                reasons.setdefault((candidate.name, point.fused, candidate.reason), []).append(point.rows)
    return [
        f"{name}, {TITLES[fused]}, at {', '.join(map(str, rows))} tokens: {reason}"
        for (name, fused, reason), rows in reasons.items()
    ]


def show(console: Console, profile: CommProfile) -> None:
    """Header, and for each kind its table and what is chosen; then what is missing, wrong or failed."""
    for text in header(profile):
        console.print(text, markup=False, highlight=False, soft_wrap=True)
    for fused in TITLES:
        if profile.of(fused):
            console.print()
            console.print(_table(profile, fused))
            console.print(f"  {served(profile, fused)}", markup=False, highlight=False, soft_wrap=True)
    console.print()
    console.print(_LEGEND, markup=False, highlight=False)
    for text in notes(profile):
        console.print(text, style="yellow", markup=False, highlight=False, soft_wrap=True)
    for text in failures(profile):
        console.print(text, style="bold red", markup=False, highlight=False, soft_wrap=True)


def markdown(profile: CommProfile) -> str:
    """The same for a page."""
    parts = ["\n".join(f"- {text}" for text in header(profile))]
    for fused, title in TITLES.items():
        if not profile.of(fused):
            continue
        columns = ["bytes", "tokens", *(f"{name}, us" for name in names(profile, fused)), _RATIO, "chosen"]
        rows = [columns, ["---:"] * (len(columns) - 1) + ["---"]]
        for line in lines(profile, fused):
            cells = [f"**{text}**" if mark else text for text, mark in _cells(profile, line)]
            rows.append([*_size(line), *cells, _ratio(line), _choice(line)])
        table = "\n".join("| " + " | ".join(row) + " |" for row in rows)
        parts.append(f"{title[0].upper()}{title[1:]}:\n\n{table}\n\nChosen: {served(profile, fused)}.")
    listed = [*notes(profile), *failures(profile)]
    parts += ["\n".join(f"- {text}" for text in listed)] if listed else []
    return "\n\n".join([*parts, _LEGEND.replace(CHOSEN, "Bold", 1).replace("\n", " ")]) + "\n"


_LEGEND = (
    f"us: one call, median of the samples, each of which is the slowest rank's. {CHOSEN} is what is chosen, and where "
    f"that is {STOCK}:NAME the fastest of what is there without us.\n{_RATIO}: of the fastest; below 1 ours is faster. "
    f"{CLOSE}: ours was faster, but by less than the samples spread or than {MARGIN:.0%}: left to {STOCK}."
)


def _table(profile: CommProfile, fused: bool) -> Table:
    table = Table(title=TITLES[fused], title_justify="left", box=box.SIMPLE_HEAD)
    for column in ("\nbytes", "\ntokens"):
        table.add_column(column, justify="right", no_wrap=True)
    for name in names(profile, fused):
        first, _, last = name.rpartition("-") if name in ALGORITHMS else name.partition(" ")
        table.add_column(f"{first}\n{last}", justify="right", no_wrap=True)
    table.add_column("ours /\nbaseline", justify="right", no_wrap=True)
    table.add_column("\nchosen", no_wrap=True)
    for line in lines(profile, fused):
        cells = [
            Text(f"{CHOSEN} {text}" if mark else text, style="bold green" if mark else _STYLES.get(text, ""))
            for text, mark in _cells(profile, line)
        ]
        table.add_row(*_size(line), *cells, _ratio(line), _choice(line))
    return table


_STYLES = {"wrong": "bold red", "failed": "bold red", "-": "dim"}


def _cells(profile: CommProfile, line: CommLine) -> list[tuple[str, bool]]:
    """Every candidate's time or why it has none, and whether it is the one that is chosen."""
    reasons = {candidate.name: candidate.reason.partition(":")[0] for candidate in line.point.candidates}
    return [
        (_us(line.medians[name]) if name in line.medians else reasons.get(name) or "-", name == line.marked)
        for name in names(profile, line.point.fused)
    ]


def _size(line: CommLine) -> tuple[str, str]:
    return f"{line.point.bytes:,}", str(line.point.rows)


def _ratio(line: CommLine) -> str:
    return "" if line.ratio is None else f"{line.ratio:.2f}"


def _choice(line: CommLine) -> str:
    return line.named + (f" {CLOSE}" if line.is_close else "")


def _us(median: float) -> str:
    return f"{median:.{2 if median < 100 else 1}f}"
