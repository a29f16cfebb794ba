"""The results of `bench l2` as a picture: a row a model; the step's ratio at each wait, then the projections alone,
at the fewest tokens."""

from __future__ import annotations

import importlib
from typing import Any

from sglang_sm120.bench.l2_report import LABELS, ProjectionRow, StepRow, projection_rows, step_rows
from sglang_sm120.bench.plot import COLOURS, MARKERS, require_matplotlib

_BAR = 0.8  # of the distance between two projections
_DODGE = 0.07  # of the distance between two token counts: error bars beside each other

_OFF = {"color": "black", "marker": "x", "linestyle": ":"}


def draw(results: dict[str, Any], path: str) -> None:
    """Write the picture; its format is that of the file's name.

    Raises:
        UnsupportedError: no matplotlib. OSError, ValueError: the file cannot be written, or has no known format.
    """
    require_matplotlib()
    figure_module = importlib.import_module("matplotlib.figure")
    steps = [row for row in step_rows(results) if row.ratio is not None]
    projections = [row for row in projection_rows(results) if row.median_us is not None]
    found_models = [*(row.model for row in steps), *(row.model for row in projections)]
    models = list(dict.fromkeys(found_models)) or ["nothing measured"]
    waits = sorted({row.wait_us for row in steps})
    figure = figure_module.Figure(figsize=(4.2 * len(waits) + 7.5, 1.9 + 3.8 * len(models)), layout="constrained")
    grid = figure.subplots(len(models), len(waits) + 1, squeeze=False, width_ratios=[1.0] * len(waits) + [1.8])
    for line, model in zip(grid, models, strict=True):
        for axes, wait_us in zip(line, waits, strict=False):
            axes.set_title(f"{model}: wait {wait_us:g} us", fontsize=10)
            _steps(axes, [row for row in steps if (row.model, row.wait_us) == (model, wait_us)])
        of_model = [row for row in steps if row.model == model]
        for axes in line[: len(waits)] if of_model else ():
            axes.set_ylim(*_limits(of_model))
        alone = [row for row in projections if row.model == model]
        fewest = min((row.tokens for row in alone), default=None)
        at = "" if fewest is None else f", {fewest} token{'s' if fewest > 1 else ''}"
        line[-1].set_title(f"{model}: dense projections alone{at}", fontsize=10)
        _projections(line[-1], [row for row in alone if row.tokens == fewest])
    for column, place in ((0, "outside lower left"), (-1, "outside lower right")):
        found = {
            text: handle
            for axes in grid[:, column]
            for handle, text in zip(*axes.get_legend_handles_labels(), strict=True)
        }
        if found and (column or waits):
            figure.legend(found.values(), found.keys(), fontsize=8, loc=place, ncols=2)
    machine = results["machine"]
    figure.suptitle(
        f"L2 prefetches and windows on {machine['gpu']} (compute capability {machine['capability']}, L2 "
        f"{machine['l2_bytes'] / 2**20:.0f} MB); driver {machine['driver']}, torch {machine['torch']}\n"
        f"a wait of one thread stands for each all-reduce; bars: fastest and slowest of {results['captures']} captures",
        fontsize=11,
    )
    figure.savefig(path, dpi=130)


def _steps(axes: Any, rows: list[StepRow]) -> None:
    tokens = sorted({row.tokens for row in rows})
    for number, (candidate, label) in enumerate(LABELS.items()):
        line = sorted((row for row in rows if row.candidate == candidate), key=lambda row: row.tokens)
        points = [
            (
                tokens.index(row.tokens) + _DODGE * (number - len(LABELS) // 2),
                row.ratio,
                row.worst_ratio,
                row.best_ratio,
            )
            for row in line
            if row.ratio is not None and row.worst_ratio is not None and row.best_ratio is not None
        ]
        if not points:
            continue
        places, ratios, worst, best = zip(*points, strict=True)
        below = [ratio - low for ratio, low in zip(ratios, worst, strict=True)]
        above = [high - ratio for ratio, high in zip(ratios, best, strict=True)]
        axes.errorbar(
            places, ratios, yerr=[below, above], label=label, capsize=2.5, linewidth=1.2, markersize=4.5,
            **(_OFF if candidate == "off" else _style(number - 1)),
        )  # fmt: skip
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_xticks(range(len(tokens)), [str(number) for number in tokens])
    axes.set_xlabel("tokens")
    axes.set_ylabel("off / candidate (above 1: faster)", fontsize=9)
    axes.grid(True, alpha=0.25)


def _style(number: int) -> dict[str, str]:
    return {"color": COLOURS[number], "marker": MARKERS[number], "linestyle": "-"}


def _limits(rows: list[StepRow]) -> tuple[float, float]:
    """One scale for all waits of a model, with 1 and every error bar inside."""
    low = min(1.0, *(row.worst_ratio for row in rows if row.worst_ratio is not None))
    high = max(1.0, *(row.best_ratio for row in rows if row.best_ratio is not None))
    margin = max(0.01, 0.06 * (high - low))
    return low - margin, high + margin


def _projections(axes: Any, rows: list[ProjectionRow]) -> None:
    names = list(dict.fromkeys(row.name for row in rows))
    cases = list(dict.fromkeys(row.case for row in rows))
    width = _BAR / max(1, len(cases))
    for number, case in enumerate(cases):
        of_case = [row for row in rows if row.case == case]
        axes.bar(
            [names.index(row.name) + (number - (len(cases) - 1) / 2) * width for row in of_case],
            [row.median_us for row in of_case],
            width,
            label=case,
            color=COLOURS[number % len(COLOURS)],
        )
    sizes = {row.name: row.num_bytes / 2**20 for row in rows}
    axes.set_xticks(range(len(names)), [f"{name}\n{sizes[name]:.1f} MB" for name in names], fontsize=8)
    axes.set_ylabel("us of its kernels", fontsize=9)
    axes.grid(True, axis="y", alpha=0.25)
