"""The results of `bench moe` as a picture: a row a model, bandwidth on the left, the ratio to the baseline right."""

from __future__ import annotations

import importlib.util
from typing import Any

from sglang_sm120.bench import report
from sglang_sm120.errors import UnsupportedError

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6d31", "#6a51a3")
MARKERS = "osD^vP*X"
_LEGEND_COLUMNS = 4
_STYLES = {"uniform": "-", "zipf": "--"}


def require_matplotlib() -> None:
    """Raises: UnsupportedError if it is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        raise UnsupportedError(
            "--plot without matplotlib", "matplotlib", "pip install 'sglang-sm120[bench]', or leave --plot out"
        )


def draw(results: dict[str, Any], path: str) -> None:
    """Write the picture; its format is that of the file's name."""
    require_matplotlib()
    from matplotlib.figure import Figure

    rows = [row for row in report.rows(results) if row.median_us is not None]
    models = list(dict.fromkeys(point["model"]["name"] for point in results["points"]))
    labels = list(dict.fromkeys(row.label for row in rows if not row.is_baseline))
    routings = list(dict.fromkeys(row.routing for row in rows))
    figure = Figure(figsize=(13, 1.6 + 4.3 * max(1, len(models))), layout="constrained")
    grid = figure.subplots(max(1, len(models)), 2, squeeze=False)
    copy = report.copy_median(results)
    for (left, right), model in zip(grid, models, strict=False):
        for label in [*labels, "baseline"]:
            for routing in routings:
                line = [row for row in rows if (row.model, row.label, row.routing) == (model, label, routing)]
                line.sort(key=lambda row: row.tokens)
                if not line:
                    continue
                style = _style(label, labels, routing)
                name = report.baseline_name(line[0].backend) if line[0].is_baseline else label
                style["label"] = f"{name}, {routing}" if len(routings) > 1 else name
                left.plot([row.tokens for row in line], [row.tb_s for row in line], **style)
                compared = [(row.tokens, row.ratio) for row in line if row.ratio is not None]
                if compared and not line[0].is_baseline:
                    right.plot(*zip(*compared, strict=True), **style)
        if copy is not None:
            left.axhline(copy, color="0.45", linestyle=":", label=f"copy, read + written: {copy:.2f} TB/s")
        _dress(left, model, "TB/s: active experts' weights and scales / time", rows)
        _dress(right, model, "ratio to the baseline (above 1: faster)", rows)
        left.set_ylim(bottom=0)
        if right.has_data():
            right.axhline(1, color="black", linewidth=1)
            right.set_ylim(bottom=0)
        else:
            right.text(0.5, 0.5, "no baseline was measured", ha="center", va="center", transform=right.transAxes)
    lines = {text: line for axes in grid[:, 0] for line, text in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(
        lines.values(), lines.keys(), fontsize=9, loc="outside lower center", ncols=_LEGEND_COLUMNS, handlelength=3
    )
    machine = results["machine"]
    figure.suptitle(
        f"NVFP4 MoE layer on {machine['gpu']} (compute capability {machine['capability']}); driver "
        f"{machine['driver']}, torch {machine['torch']}, Triton {machine['triton']}",
        fontsize=11,
    )
    figure.savefig(path, dpi=130)


def _style(label: str, labels: list[str], routing: str) -> dict[str, Any]:
    number = labels.index(label) if label in labels else 0
    style = {"linestyle": _STYLES.get(routing, "-."), "linewidth": 1.6, "markersize": 5}
    if label == "baseline":
        return {**style, "color": "black", "marker": "x"}
    return {**style, "color": COLOURS[number % len(COLOURS)], "marker": MARKERS[number % len(MARKERS)]}


def _dress(axes: Any, model: str, what: str, rows: list[report.Row]) -> None:
    tokens = sorted({row.tokens for row in rows})
    axes.set_title(model, fontsize=10)
    axes.set_xscale("log", base=2)
    axes.set_xticks(tokens, [str(number) for number in tokens], fontsize=8)
    axes.minorticks_off()
    axes.set_xlabel("tokens")
    axes.set_ylabel(what, fontsize=9)
    axes.grid(True, alpha=0.25)
