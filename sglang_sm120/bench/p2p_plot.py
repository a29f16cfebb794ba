"""The numbers of a P2P probe as heat maps: bandwidth above, latency below, pushes left, pulls right, on one scale."""

from __future__ import annotations

import importlib
import math
from typing import Any

from sglang_sm120.bench.plot import require_matplotlib
from sglang_sm120.kernels.communication.p2p_probe.report import OK, Pair, ProbeReport

_PANELS = (
    ("push_gb_s", "push: GB/s written to the other GPU", "Blues", "{:.1f}"),
    ("pull_gb_s", "pull: GB/s read from the other GPU", "Blues", "{:.1f}"),
    ("push_latency_us", "push: us, a flag one way", "Oranges", "{:.2f}"),
    ("pull_latency_us", "pull: us, one read", "Oranges", "{:.2f}"),
)


def draw(report: ProbeReport, path: str) -> None:
    """Write the picture; its format is that of the file's name.

    Raises:
        UnsupportedError: no matplotlib. OSError, ValueError: the file cannot be written, or has no known format.
    """
    require_matplotlib()
    figure_module = importlib.import_module("matplotlib.figure")
    side = max(3.6, 1.2 + 0.55 * len(report.gpus))
    figure = figure_module.Figure(figsize=(2 * side, 2 * side + 0.5), layout="constrained")
    for axes, (field, title, colours, form) in zip(figure.subplots(2, 2).flat, _PANELS, strict=True):
        alike = [other for other, _, other_colours, _ in _PANELS if other_colours == colours]
        numbers = [getattr(pair, other) for pair in report.pairs for other in alike]
        most = max((number for number in numbers if number is not None), default=0.0) or 1.0
        _panel(axes, report, field, colours, form, most)
        axes.set_title(title, fontsize=10)
    names = ", ".join(dict.fromkeys(gpu.name for gpu in report.gpus if gpu.name)) or "no answer"
    figure.suptitle(f"Peer-to-peer memory of {len(report.gpus)} GPUs: {names}\n{_together(report)}", fontsize=11)
    figure.savefig(path, dpi=130)


def _panel(axes: Any, report: ProbeReport, field: str, colours: str, form: str, most: float) -> None:
    """most: the largest number of the panels that are to be compared."""
    order = [gpu.index for gpu in report.gpus]
    values = [[_value(report, row, column, field) for column in order] for row in order]
    axes.imshow(values, cmap=colours, vmin=0, vmax=most * 1.25)
    axes.set_xticks(range(len(order)), [str(index) for index in order])
    axes.set_yticks(range(len(order)), [str(index) for index in order])
    axes.set_xlabel("memory of GPU", fontsize=9)
    axes.set_ylabel("by GPU", fontsize=9)
    for i, row in enumerate(order):
        for j, column in enumerate(order):
            if row == column:
                continue
            pair, value = report.pair(row, column), values[i][j]
            text = pair.status if math.isnan(value) or pair.status != OK else form.format(value)
            axes.text(j, i, text, ha="center", va="center", fontsize=9, color=_ink(value, most, pair))


def _value(report: ProbeReport, row: int, column: int, field: str) -> float:
    value = None if row == column else getattr(report.pair(row, column), field)
    return math.nan if value is None else float(value)


def _ink(value: float, most: float, pair: Pair) -> str:
    if pair.status != OK:
        return "#b00020"
    return "white" if value > 0.8 * most else "black"


def _together(report: ProbeReport) -> str:
    parts = []
    for way, rates in (("push", report.all_to_all.push_gb_s), ("pull", report.all_to_all.pull_gb_s)):
        if rates:
            low, high = f"{min(rates):.1f}", f"{max(rates):.1f}"
            parts.append(f"{way} {low if low == high else f'{low}..{high}'} GB/s a GPU")
    return f"all at once: {', '.join(parts) if parts else report.all_to_all.status}"
