"""The results of `bench moe` as JSON, a table on the terminal, and Markdown. Nothing here measures."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from sglang_sm120.bench.routing import CACHES
from sglang_sm120.errors import ConfigError

FORMAT = "sglang-sm120 bench moe 1"

_COLUMNS = ("model", "tokens", "routing", "experts", "candidate", "us", "min..max", "TB/s", "of copy", "vs baseline")


@dataclass(frozen=True)
class Row:
    """One candidate at one point. Times are of one call of the whole layer; None where there is none, and why.

    tb_s: bytes of the active experts' weights and block scales, each once, over the median time, in 1e12 bytes/s.
    served_by: for backend "auto", the backend that it came to.
    of_copy: that over the copy's bandwidth, bytes read plus written. ratio: the baseline's median time over this one's.
    """

    model: str
    tokens: int
    routing: str
    active_experts: float
    label: str
    backend: str
    served_by: str | None
    is_baseline: bool
    median_us: float | None
    min_us: float | None
    max_us: float | None
    tb_s: float | None
    of_copy: float | None
    ratio: float | None
    note: str


def read(path: str, wanted: str = FORMAT) -> dict[str, Any]:
    """What `--json` wrote. wanted: its format.

    Raises: ConfigError if it is not that.
    """
    try:
        results = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}", "a file that --json wrote", "name that file") from error
    if not isinstance(results, dict) or results.get("format") != wanted:
        found = results.get("format") if isinstance(results, dict) else type(results).__name__
        raise ConfigError(f"{path} has format {found!r}", repr(wanted), "measure again, with --json")
    return results


def write(option: str, path: str, text: str) -> None:
    """A file that an option names. Raises: ConfigError if it cannot be written."""
    try:
        Path(path).write_text(text)
    except OSError as error:
        raise ConfigError(f"{option} {path}: {error}", "a file that can be written", "name another") from error


def write_json(path: str | None, results: dict[str, Any]) -> None:
    """What `read` reads, where `--json` was given. Raises: ConfigError if it cannot be written."""
    if path is not None:
        write("--json", path, json.dumps(results, indent=1) + "\n")


def rows(results: dict[str, Any]) -> Iterator[Row]:
    """Every candidate of every point."""
    copy = copy_median(results)
    for point in results["points"]:
        median_of = {row["label"]: statistics.median(row["samples_us"]) for row in point["rows"] if "samples_us" in row}
        baseline_us = median_of.get("baseline")
        for row in point["rows"]:
            median_us = median_of.get(row["label"])
            samples_us = row.get("samples_us", ())
            tb_s = None if median_us is None else point["weight_bytes"] / median_us / 1e6
            not_covered = f"not covered: {row['not_covered']}" if "not_covered" in row else ""
            yield Row(
                model=point["model"]["name"],
                tokens=point["tokens"],
                routing=point["routing"],
                active_experts=point["active_experts"],
                label=row["label"],
                backend=row["backend"],
                served_by=row.get("served_by"),
                is_baseline=row["label"] == "baseline",
                median_us=median_us,
                min_us=min(samples_us, default=None),
                max_us=max(samples_us, default=None),
                tb_s=tb_s,
                of_copy=tb_s / copy if tb_s is not None and copy else None,
                ratio=baseline_us / median_us if baseline_us is not None and median_us is not None else None,
                note=row.get("failure", not_covered),
            )


def copy_median(results: dict[str, Any]) -> float | None:
    """TB/s of a plain copy, read plus written."""
    return statistics.median(results["copy_tb_s"]) if results["copy_tb_s"] else None


def failures(results: dict[str, Any]) -> list[str]:
    """What was wrong or broke; a candidate that does not cover a point is neither."""
    return [
        f"{point['model']['name']}, {point['tokens']} tokens, {point['routing']}, {row['label']}: {row['failure']}"
        for point in results["points"]
        for row in point["rows"]
        if "failure" in row
    ]


def header(results: dict[str, Any]) -> str:
    """Where, with what and how it was measured; lines of text."""
    machine = results["machine"]
    lines = [
        f"GPU: {machine['gpu']}, compute capability {machine['capability']}, {machine['multiprocessors']} "
        f"multiprocessors, L2 cache {machine['l2_bytes'] / 2**20:.0f} MiB",
        f"versions: driver {machine['driver']}, CUDA {machine['cuda']}, torch {machine['torch']}, Triton "
        f"{machine['triton']}, Python {machine['python']}",
        f"command: {results['command']}",
    ]
    copy = copy_median(results)
    if copy is not None:
        lines.append(f"copy of a large tensor, read plus written: {copy:.3f} TB/s ({_spread(results['copy_tb_s'])})")
    if results["baseline"] != "none":
        lines.append(f"baseline: {results['baseline']}")
    return "\n".join(lines)


def notes(results: dict[str, Any]) -> list[str]:
    """What a reader has to know about these results."""
    lines = [
        f"us: one call of the whole layer (schedule, both GEMMs, sum), median of {results['samples']}; all candidates "
        "in turn in one run. TB/s: each active expert's weights and block scales once. vs baseline: above 1 is faster."
    ]
    short = [point for point in results["points"] if point["reuse_bytes"] < CACHES * results["machine"]["l2_bytes"]]
    if short:
        least = min(point["reuse_bytes"] for point in short) / results["machine"]["l2_bytes"]
        names = ", ".join(f"{point['model']['name']} {point['tokens']} {point['routing']}" for point in short)
        lines.append(
            f"The L2 cache may have helped at {names}: a weight is read again after {least:.1f} times its size, not "
            f"{CACHES}, for want of memory."
        )
    return lines


def show(console: Console, results: dict[str, Any]) -> None:
    """Header, a table for each model, notes and failures."""
    console.print(header(results), markup=False, highlight=False)
    by_model: dict[str, list[Row]] = {}
    for row in rows(results):
        by_model.setdefault(row.model, []).append(row)
    for model, of_model in by_model.items():
        table = Table(title=model, box=box.SIMPLE_HEAD)
        for column in _COLUMNS[1:]:
            left = column in ("routing", "candidate")
            table.add_column(column, justify="left" if left else "right", overflow="fold")
        before: tuple[int, str] | None = None
        for row in of_model:
            if row.note.startswith("not covered"):
                continue
            if before not in (None, (row.tokens, row.routing)):
                table.add_section()
            before = (row.tokens, row.routing)
            cells = _cells(row)[1:]
            table.add_row(*cells, style="red" if row.note else "cyan" if row.is_baseline else None)
        console.print(table)
        for note in dict.fromkeys(f"{row.label}: {row.note}" for row in of_model if row.note.startswith("not covered")):
            console.print(f"  {note}", style="dim", markup=False, highlight=False)
    for line in notes(results):
        console.print(line, markup=False, highlight=False)
    for line in failures(results):
        console.print(line, style="bold red", markup=False, highlight=False)


def markdown(results: dict[str, Any]) -> str:
    """As docs/measurements.md has it."""
    lines = [*(f"{line}  " for line in header(results).split("\n")), "", " ".join(notes(results)), ""]
    lines += ["| " + " | ".join(_COLUMNS) + " |", "|" + "---|" * len(_COLUMNS)]
    for row in rows(results):
        if row.note.startswith("not covered"):
            continue
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in _cells(row)) + " |")
    lines += [f"- {line}" for line in failures(results)]
    return "\n".join(lines)


def baseline_name(backend: str) -> str:
    """The last part of the module's name in MODULE:FUNCTION."""
    return backend.partition(":")[0].rpartition(".")[2]


def _cells(row: Row) -> list[str]:
    label = row.label if row.served_by is None else f"{row.label} ({row.served_by})"
    if row.is_baseline:
        label = f"baseline ({baseline_name(row.backend)})"
    numbers = ["", "", "", "", ""]
    if row.note:
        numbers[0] = row.note.partition(":")[0].partition(",")[0]
    elif row.median_us is not None and row.min_us is not None and row.max_us is not None and row.tb_s is not None:
        numbers = [
            f"{row.median_us:.1f}",
            f"{row.min_us:.1f}..{row.max_us:.1f}",
            f"{row.tb_s:.2f}",
            "" if row.of_copy is None else f"{row.of_copy:.2f}",
            "" if row.ratio is None else f"{row.ratio:.2f}",
        ]
    return [row.model, str(row.tokens), row.routing, f"{row.active_experts:.0f}", label, *numbers]


def _spread(values: list[float]) -> str:
    return f"{min(values):.3f}..{max(values):.3f}"
