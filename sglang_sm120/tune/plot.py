"""A profile as a picture: time against tokens, a row a layer, with what is chosen and where that changes."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from sglang_sm120.bench.plot import COLOURS, MARKERS, require_matplotlib
from sglang_sm120.runners.base import Choice
from sglang_sm120.runners.profile import Layer, Profile, table
from sglang_sm120.tune.report import describe, lines

_BORDER = "0.45"


def draw(profile: Profile, layers: Sequence[Layer], path: str) -> None:
    """Write the picture; its format is that of the file's name."""
    figure(profile, layers).savefig(path, dpi=130)


def figure(profile: Profile, layers: Sequence[Layer]) -> Any:
    """The matplotlib figure.

    Raises: UnsupportedError without matplotlib.
    """
    require_matplotlib()
    from matplotlib.figure import Figure  # noqa: PLC0415 - optional

    timed = [choice for layer in layers for line in lines(layer) for choice in line.cells]
    order = list(dict.fromkeys(c.choice for layer in layers for point in layer.points for c in point.candidates))
    shown = [choice for choice in order if choice in timed]
    drawn = Figure(figsize=(10, 1.5 + 4.8 * max(1, len(layers))), layout="constrained")
    for axes, layer in zip(drawn.subplots(max(1, len(layers)), squeeze=False)[:, 0], layers, strict=False):
        _draw_layer(axes, layer, shown)
    handles = {name: line for axes in drawn.axes for line, name in zip(*axes.get_legend_handles_labels(), strict=True)}
    drawn.legend(handles.values(), handles.keys(), fontsize=9, loc="outside lower center", ncols=4)
    machine = profile.machine
    gpu = f"{machine.gpu} (compute capability {machine.capability})" if machine.capability else "a CPU"
    drawn.suptitle(
        f"NVFP4 MoE layer on {gpu}; torch {machine.torch}, Triton {machine.triton or 'not installed'}, FlashInfer "
        f"{machine.flashinfer or 'not installed'}, "
        f"sglang-sm120 {machine.sglang_sm120}",
        fontsize=10,
    )
    return drawn


def borders(layer: Layer) -> list[int]:
    """The last token counts before another candidate is chosen, whatever its numerics."""
    chosen = table(layer, "auto", "")
    rows = () if chosen is None else chosen.rows
    return [
        row.up_to
        for row, after in itertools.pairwise(rows)
        if row.up_to is not None and row.ranking[0] != after.ranking[0]
    ]


def _draw_layer(axes: Any, layer: Layer, shown: list[Choice]) -> None:
    from matplotlib.ticker import LogLocator  # noqa: PLC0415 - optional

    points = lines(layer)
    spread = {(point.tokens, c.choice): c.samples_us for point in layer.points for c in point.candidates}
    for number, choice in enumerate(shown):
        of_choice = [(line.tokens, line.cells[choice].median_us) for line in points if choice in line.cells]
        if not of_choice:
            continue
        tokens = [count for count, _ in of_choice]
        colour = COLOURS[number % len(COLOURS)]
        axes.plot(*zip(*of_choice, strict=True), color=colour, marker=MARKERS[number % len(MARKERS)], markersize=5,
                  linewidth=1.5, label=str(choice))  # fmt: skip
        samples = [spread[count, choice] for count in tokens]
        axes.fill_between(tokens, [min(of) for of in samples], [max(of) for of in samples], color=colour, alpha=0.2)
    if points:
        axes.scatter([line.tokens for line in points], [line.cells[line.chosen].median_us for line in points], s=130,
                     facecolors="none", edgecolors="black", linewidths=1.2, zorder=5, label="chosen")  # fmt: skip
    for border in borders(layer):
        axes.axvline(border, color=_BORDER, linewidth=0.8, linestyle="--")
        axes.annotate(f" up to {border}", (border, 1), xycoords=("data", "axes fraction"), va="top", ha="left",
                      xytext=(0, -3), textcoords="offset points", fontsize=8, color=_BORDER)  # fmt: skip
    axes.set_title(describe(layer.shape), fontsize=10)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    counts = [line.tokens for line in points]
    axes.set_xticks(counts, [str(count) for count in counts], fontsize=8)
    axes.xaxis.minorticks_off()
    axes.tick_params(axis="y", labelsize=8)
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))  # 20, 50, 100 and not 2 x 10**1
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("")
    axes.set_xlabel("tokens")
    axes.set_ylabel("microseconds a call, median; band: all samples", fontsize=9)
    axes.grid(True, which="both", alpha=0.2)
