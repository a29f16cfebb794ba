"""The results of `bench l2` as JSON, tables on the terminal, and Markdown. Nothing here measures."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from sglang_sm120.bench import report
from sglang_sm120.bench.l2_options import CACHES

FORMAT = "sglang-sm120 bench l2 1"

LABELS = {
    "off": "off",
    "attention": "o_proj under attention",
    "ffn": "router, shared expert under all-reduce 1",
    "next": "next attention under all-reduce 2",
    "prefetch": "both all-reduces (prefetch)",
    "set-aside": "L2 set aside, no more",
    "persist": "windows over what fits (persist)",
    "window": "windows over everything",
    "both": "prefetch and persist (both)",
}
STAND_IN = (
    "Each all-reduce is stood for by a wait of one thread, which moves no data. A real one reads and writes memory "
    "beside the prefetch, so that a server can gain less."
)
_STEP_COLUMNS = ("model", "tokens", "wait us", "candidate", "MB fetched", "us a layer", "captures", "ratio", "worst")
_PROJECTION_COLUMNS = ("model", "projection", "MB", "tokens", "case", "us", "min..max", "of cold", "stream us")
_LEFT = ("model", "candidate", "projection", "case")


@dataclass(frozen=True)
class StepRow:
    """One candidate at one point. Times are of a layer, microseconds; empty or None where there are none, and why.

    captures_us: the median of each captured graph. median_us: over those; ratio: off's median over it, above 1 is
    faster; worst_ratio, best_ratio: off's median over the slowest and the fastest capture.
    """

    model: str
    tokens: int
    wait_us: float
    candidate: str
    prefetched_mb: float
    captures_us: tuple[float, ...]
    median_us: float | None
    ratio: float | None
    worst_ratio: float | None
    best_ratio: float | None
    note: str


@dataclass(frozen=True)
class ProjectionRow:
    """One case of one projection: its kernels' time, and that of the stream of 5 times L2 before it."""

    model: str
    name: str
    num_bytes: int
    tokens: int
    case: str
    median_us: float | None
    min_us: float | None
    max_us: float | None
    of_cold: float | None
    stream_us: float | None
    note: str


def read(path: str) -> dict[str, Any]:
    """What `--json` wrote. Raises: ConfigError if it is not that."""
    return report.read(path, FORMAT)


def step_rows(results: dict[str, Any]) -> Iterator[StepRow]:
    """Every candidate of every point."""
    for point in results["steps"]:
        captures = {row["candidate"]: tuple(map(statistics.median, row["captures"])) for row in point["rows"]}
        off_us = statistics.median(captures["off"]) if captures["off"] else None
        for row in point["rows"]:
            times_us = captures[row["candidate"]]
            median_us = statistics.median(times_us) if times_us else None
            compared = off_us is not None and bool(times_us)
            yield StepRow(
                model=point["model"],
                tokens=point["tokens"],
                wait_us=point["wait_us"],
                candidate=row["candidate"],
                prefetched_mb=row.get("prefetched_bytes", 0) / (1 << 20),
                captures_us=times_us,
                median_us=median_us,
                ratio=off_us / median_us if off_us is not None and median_us is not None else None,
                worst_ratio=off_us / max(times_us) if off_us is not None and compared else None,
                best_ratio=off_us / min(times_us) if off_us is not None and compared else None,
                note=_note(row),
            )


def _note(row: dict[str, Any]) -> str:
    return row.get("failure", f"not covered: {row['not_covered']}" if "not_covered" in row else "")


def projection_rows(results: dict[str, Any]) -> Iterator[ProjectionRow]:
    """Every case of every projection."""
    for point in results["projections"]:
        cold_us = next((statistics.median(row["samples_us"]) for row in point["rows"][:1] if "samples_us" in row), None)
        for row in point["rows"]:
            samples_us = row.get("samples_us", ())
            median_us = statistics.median(samples_us) if samples_us else None
            yield ProjectionRow(
                model=point["model"],
                name=point["name"],
                num_bytes=point["bytes"],
                tokens=point["tokens"],
                case=row["case"],
                median_us=median_us,
                min_us=min(samples_us, default=None),
                max_us=max(samples_us, default=None),
                of_cold=median_us / cold_us if median_us is not None and cold_us else None,
                stream_us=statistics.median(row["stream_us"]) if row.get("stream_us") else None,
                note=_note(row),
            )


def failures(results: dict[str, Any]) -> list[str]:
    """What was wrong or broke; a case that this GPU cannot do is neither."""
    return [
        *(
            f"{point['model']}, {point['tokens']} tokens, wait {point['wait_us']:g} us, {row['candidate']}: "
            f"{row['failure']}"
            for point in results["steps"]
            for row in point["rows"]
            if "failure" in row
        ),
        *(
            f"{point['model']}, {point['name']}, {point['tokens']} tokens, {row['case']}: {row['failure']}"
            for point in results["projections"]
            for row in point["rows"]
            if "failure" in row
        ),
    ]


def header(results: dict[str, Any]) -> str:
    """Where, with what and how it was measured; lines of text."""
    machine = results["machine"]
    blocks = "its own" if results["blocks"] is None else str(results["blocks"])
    aside = results["windows_reason"] or f"{results['set_aside_bytes'] / 2**20:.1f} MB can be set aside"
    lines = [
        f"GPU: {machine['gpu']}, compute capability {machine['capability']}, {machine['multiprocessors']} "
        f"multiprocessors, L2 cache {machine['l2_bytes'] / 2**20:.0f} MB; windows: {aside}",
        f"versions: driver {machine['driver']}, CUDA {machine['cuda']}, torch {machine['torch']}, Python "
        f"{machine['python']}",
        f"command: {results['command']}",
        f"context {results['context']} tokens; a prefetch: {results['budget_bytes'] / 2**20:.1f} MB at most, blocks: "
        f"{blocks}; {results['captures']} captures of {results['samples']} samples",
        STAND_IN,
    ]
    if not machine["capability"].startswith("12."):
        lines.append("SM120: not measured; this command measures it there")
    return "\n".join(lines)


def notes(results: dict[str, Any]) -> list[str]:
    """What a reader has to know about these results."""
    lines = [
        "Steps: us of one layer, the median over captures of each one's median, with the fastest and slowest capture; "
        "ratio: off over it, above 1 is faster; worst: off over the slowest capture. Left out of a layer: q and k "
        "norms, rotary embedding, the write to the KV cache, GLM-5's sparse index. Attention is plain torch.",
        "The last four: as much of L2 set aside as the GPU allows; windows over the first projections that fit into "
        "it, with hit ratio 1, or over all of the stack, with hit ratio set-aside / their size.",
        f"Projections: the kernels' own time, behind a stream of {CACHES} times L2, whose time in the same graph is "
        "stream us: what a set-aside costs everything else shows there; all: all projections of a step.",
    ]
    l2_bytes = results["machine"]["l2_bytes"]
    short = [point for point in results["steps"] if 0 < point["reuse_bytes"] < CACHES * l2_bytes]
    if short:
        least = min(point["reuse_bytes"] for point in short) / l2_bytes
        lines.append(f"L2 may have helped: a weight is used again after {least:.1f} times its size, not {CACHES}.")
    return lines


def show(console: Console, results: dict[str, Any]) -> None:
    """Header, two tables for each model, notes and failures."""
    console.print(header(results), markup=False, highlight=False)
    steps, projections = list(step_rows(results)), list(projection_rows(results))
    for model in dict.fromkeys([*(row.model for row in steps), *(row.model for row in projections)]):
        of_steps = [row for row in steps if row.model == model]
        if of_steps:
            _print(console, f"{model}: the whole step", _STEP_COLUMNS,
                   [(_step_cells(row), (row.tokens, row.wait_us), row.note) for row in of_steps])  # fmt: skip
        of_projections = [row for row in projections if row.model == model]
        if of_projections:
            _print(console, f"{model}: dense projections alone", _PROJECTION_COLUMNS,
                   [(_projection_cells(row), (row.name, row.tokens), row.note) for row in of_projections])  # fmt: skip
    for line in notes(results):
        console.print(line, markup=False, highlight=False)
    for line in failures(results):
        console.print(line, style="bold red", markup=False, highlight=False)


def markdown(results: dict[str, Any]) -> str:
    """As docs/measurements.md has it."""
    lines = [*(f"{line}  " for line in header(results).split("\n")), "", *notes(results)]
    for columns, cells in (
        (_STEP_COLUMNS, [_step_cells(row) for row in step_rows(results)]),
        (_PROJECTION_COLUMNS, [_projection_cells(row) for row in projection_rows(results)]),
    ):
        if cells:
            lines += ["", "| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
            lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in cells]
    failed = [f"- {line}" for line in failures(results)]
    return "\n".join([*lines, *([""] if failed else []), *failed])


def _print(console: Console, title: str, columns: tuple[str, ...], rows: list[tuple[list[str], object, str]]) -> None:
    """rows: the cells, what a section is told from the next by, a note."""
    table = Table(title=title, box=box.SIMPLE_HEAD)
    for column in columns[1:]:
        table.add_column(column, justify="left" if column in _LEFT else "right", overflow="fold")
    before: object = None
    for cells, section, note in rows:
        if before not in (None, section):
            table.add_section()
        before = section
        failed = note and not note.startswith("not covered")
        table.add_row(*cells[1:], style="red" if failed else "dim" if note else None)
    console.print(table)


def _short(note: str) -> str:
    return note.partition(":")[0].partition(",")[0]


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _spread(values: tuple[float, ...], digits: int = 1) -> str:
    return f"{min(values):.{digits}f}..{max(values):.{digits}f}" if values else ""


def _step_cells(row: StepRow) -> list[str]:
    return [
        row.model,
        str(row.tokens),
        f"{row.wait_us:g}",
        LABELS[row.candidate],
        f"{row.prefetched_mb:.1f}",
        _short(row.note) or _number(row.median_us, 2),
        _spread(row.captures_us, 2),
        _number(row.ratio, 3),
        _number(row.worst_ratio, 3),
    ]


def _projection_cells(row: ProjectionRow) -> list[str]:
    spread = () if row.min_us is None or row.max_us is None else (row.min_us, row.max_us)
    return [
        row.model,
        row.name,
        f"{row.num_bytes / 2**20:.1f}",
        str(row.tokens),
        row.case,
        _short(row.note) or _number(row.median_us, 2),
        _spread(spread, 2),
        _number(row.of_cold, 2),
        _number(row.stream_us, 0),
    ]
