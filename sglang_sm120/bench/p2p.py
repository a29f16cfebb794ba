"""`sglang-sm120 bench p2p`: whether the GPUs of this host can share memory, how fast, and what is wrong if not.

What is measured and what the findings mean: docs/kernels/p2p-probe.md.
"""

from __future__ import annotations

import platform
import shlex
import sys
from collections.abc import Callable
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from sglang_sm120.bench import p2p_plot, plot
from sglang_sm120.bench.p2p_options import P2pBenchOptions
from sglang_sm120.bench.report import write_json
from sglang_sm120.errors import ConfigError
from sglang_sm120.findings import Finding, failed
from sglang_sm120.kernels.communication.p2p_probe.api import Pair, ProbeReport, find, probe
from sglang_sm120.runners.profile import driver_version

FORMAT = "sglang-sm120 bench p2p 1"

_PIPE_COLUMNS = 140
_STYLES = {"fail": "bold red", "warn": "yellow", "note": "cyan", "ok": "green"}

Probe = Callable[..., ProbeReport]


def run(options: P2pBenchOptions, console: Console | None = None, probe_with: Probe = probe) -> int:
    """Probe and report; 1 if a finding forbids sharing memory, else 0.

    Args:
        options: what to probe and which files to write.
        console: None for the terminal.
        probe_with: what measures; for tests.

    Raises:
        UnsupportedError: fewer than two GPUs; --plot without matplotlib. ContractError: devices that are not there.
        ConfigError: a file that cannot be written.
    """
    console = console or _terminal()
    if options.plot is not None:
        plot.require_matplotlib()
    results: dict[str, Any] = {
        "format": FORMAT,
        "command": shlex.join(["sglang-sm120", *sys.argv[1:]]),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "driver": driver_version(),
        "torch": str(torch.__version__),
        "python": platform.python_version(),
    }
    write_json(options.json, results)  # a path that cannot be written is noticed now
    report = _probe(options, console, probe_with)
    findings = find(report)
    results |= {"report": report.to_dict(), "findings": [asdict(finding) for finding in findings]}
    write_json(options.json, results)
    show(console, report, findings, f"driver {results['driver']}, torch {results['torch']}")
    if options.plot is not None:
        _draw(report, options.plot)
        console.print(f"wrote {options.plot}", markup=False)
    return 1 if failed(findings) else 0


def show(console: Console, report: ProbeReport, findings: list[Finding], software: str) -> None:
    """GPUs, matrices, all at once, the machine's facts, findings."""
    console.print(header(report, software), markup=False, highlight=False)
    for title, cell in (
        ("GB/s, push / pull", lambda pair: _both(pair.push_gb_s, pair.pull_gb_s)),
        ("us, push / pull", lambda pair: _both(pair.push_latency_us, pair.pull_latency_us, 2)),
    ):
        console.print(_matrix(report, title, cell))
    if report.all_to_all.push_gb_s or report.all_to_all.pull_gb_s:
        console.print(_together(report))
    for line in report.environment.lines():
        console.print(line, style="dim", markup=False, highlight=False)
    for finding in findings:
        line = f"{finding.level:4}  {finding.what}: {finding.found}"
        console.print(line, style=_STYLES[finding.level], markup=False, highlight=False, soft_wrap=True)
        for step in finding.fix.splitlines():
            console.print(f"      fix: {step}", markup=False, highlight=False, soft_wrap=True)


def header(report: ProbeReport, software: str) -> str:
    """The GPUs and their links, and with what it was measured."""
    lines = []
    for gpu in report.gpus:
        link = "" if gpu.link_gb_s is None else f", PCIe link {gpu.link_gb_s:.1f} GB/s ({gpu.link_lanes} lanes)"
        name = gpu.name or "no answer"
        place = f" at {gpu.pci_bus_id}" if gpu.pci_bus_id else ""
        lines.append(f"GPU {gpu.index}: {name}{place}{link}")
    lines.append(f"{software}; {report.seconds:.0f} s")
    lines.append("push: the row's GPU writes the column's memory; pull: it reads it. us: one flag one way; one read.")
    return "\n".join(lines)


def _matrix(report: ProbeReport, title: str, cell: Callable[[Pair], str]) -> Table:
    table = Table(title=title, box=box.SIMPLE_HEAD)
    table.add_column("GPU", justify="right")
    for gpu in report.gpus:
        table.add_column(str(gpu.index), justify="right")
    for row in report.gpus:
        cells = []
        for column in report.gpus:
            if row.index == column.index:
                cells.append("-")
                continue
            pair = report.pair(row.index, column.index)
            numbers = cell(pair)
            cells.append(numbers if pair.status == "ok" else f"{numbers} {pair.status}".strip())
        table.add_row(str(row.index), *cells)
    return table


def _together(report: ProbeReport) -> Table:
    together = report.all_to_all
    table = Table(title="all GPUs at once, GB/s a GPU", box=box.SIMPLE_HEAD)
    for column in ("GPU", "push", "pull"):
        table.add_column(column, justify="right")
    for i, gpu in enumerate(report.gpus):
        rates = (f"{rates[i]:.1f}" if rates else "" for rates in (together.push_gb_s, together.pull_gb_s))
        table.add_row(str(gpu.index), *rates)
    return table


def _both(push: float | None, pull: float | None, digits: int = 1) -> str:
    if push is None and pull is None:
        return ""
    return " / ".join("?" if number is None else f"{number:.{digits}f}" for number in (push, pull))


def _probe(options: P2pBenchOptions, console: Console, probe_with: Probe) -> ProbeReport:
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("", total=None)

        def show_step(what: str, number: int, total: int) -> None:
            progress.update(task, description=what, completed=number, total=total)

        return probe_with(options.devices, time_limit_s=options.time_limit_s, progress=show_step)


def _terminal() -> Console:
    """The terminal; into a pipe or a file, wide enough that no row of a table is folded."""
    console = Console()
    return console if console.is_terminal else Console(width=_PIPE_COLUMNS)


def _draw(report: ProbeReport, path: str) -> None:
    try:
        p2p_plot.draw(report, path)
    except (OSError, ValueError) as error:  # ValueError: a format that matplotlib does not know
        raise ConfigError(f"--plot {path}: {error}", "a file like probe.png", "name another") from error
