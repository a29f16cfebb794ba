"""A profile of all-reduces as a picture: time against message size, with residual add and norm, and the sum alone."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from sglang_sm120.bench.plot import COLOURS, MARKERS, require_matplotlib
from sglang_sm120.kernels.communication.all_reduce_rmsnorm.config import ALGORITHMS
from sglang_sm120.tune import comm_report as report
from sglang_sm120.tune import comm_stock
from sglang_sm120.tune.comm_profile import CommProfile

_BORDER = "0.45"
_BASELINE_STYLES = ("--", ":", "-.")


def draw(profile: CommProfile, path: str) -> None:
    """Write the picture; its format is that of the file's name."""
    figure(profile).savefig(path, dpi=130)


def figure(profile: CommProfile) -> Any:
    """The matplotlib figure.

    Raises: UnsupportedError without matplotlib.
    """
    require_matplotlib()
    from matplotlib.figure import Figure  # noqa: PLC0415 - optional

    drawn = Figure(figsize=(15, 7), layout="constrained")
    kinds = [fused for fused in report.TITLES if profile.of(fused)]
    shown = list(dict.fromkeys(name for fused in kinds for name in report.names(profile, fused)))
    panels = drawn.subplots(1, len(kinds), squeeze=False, sharey=True)[0]
    for axes, fused in zip(panels, kinds, strict=True):
        _draw_kind(axes, profile, fused, shown)
    handles = {name: line for axes in panels for line, name in zip(*axes.get_legend_handles_labels(), strict=True)}
    drawn.legend(handles.values(), handles.keys(), fontsize=9, loc="outside lower center", ncols=5, handlelength=3)
    gpus, software, measured = report.header(profile)
    drawn.suptitle(f"All-reduce: {gpus}\n{software}; {measured.partition(';')[0]}", fontsize=11)
    return drawn


def _draw_kind(axes: Any, profile: CommProfile, fused: bool, shown: list[str]) -> None:
    from matplotlib.ticker import LogLocator  # noqa: PLC0415 - optional

    lines = report.lines(profile, fused)
    for name in shown:
        of_name = [line for line in lines if name in line.medians]
        if of_name:
            sizes = [line.point.bytes for line in of_name]
            style = _style(name, shown)
            axes.plot(sizes, [line.medians[name] for line in of_name], **style, markersize=5, linewidth=1.5, label=name)
    marked = [(line.point.bytes, line.medians[line.marked]) for line in lines if line.marked is not None]
    if marked:
        axes.scatter(*zip(*marked, strict=True), s=130, facecolors="none", edgecolors="black", linewidths=1.2, zorder=5,
                     label="chosen (stock: the fastest baseline)")  # fmt: skip
    for entry, after in pairwise(comm_stock.ranges(profile, fused)):
        axes.axvline(entry.max_bytes, color=_BORDER, linewidth=0.8, linestyle="--")
        axes.annotate(f"{entry.algorithm} | {after.algorithm} ", (entry.max_bytes, 1), va="top", ha="right",
                      xycoords=("data", "axes fraction"), xytext=(-1, -3), textcoords="offset points", rotation=90,
                      fontsize=8, color=_BORDER)  # fmt: skip
    axes.set_title(report.TITLES[fused], fontsize=10)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    sizes = [line.point.bytes for line in lines]
    axes.set_xticks(sizes, [short(size) for size in sizes], fontsize=8, rotation=45)
    axes.xaxis.minorticks_off()
    axes.tick_params(axis="y", labelsize=8, labelleft=True)
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))  # 20, 50, 100 and not 2 x 10**1
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("")
    axes.set_xlabel("bytes of a message")
    axes.set_ylabel("microseconds a call, median of the slowest rank", fontsize=9)
    axes.grid(True, which="both", alpha=0.2)


def short(size: int) -> str:
    """Bytes for an axis: 12K, 1020K, 1.5M."""
    for unit, letter in ((1 << 20, "M"), (1 << 10, "K")):
        if size >= unit:
            value = size / unit
            return f"{value:.0f}{letter}" if value >= 100 else f"{value:.3g}{letter}"
    return str(size)


def _style(name: str, shown: list[str]) -> dict[str, Any]:
    """Ours in colours and whole lines, baselines in black and broken ones."""
    if name in ALGORITHMS:
        number = ALGORITHMS.index(name)
        return {"color": COLOURS[number % len(COLOURS)], "marker": MARKERS[number % len(MARKERS)]}
    number = [other for other in shown if other not in ALGORITHMS].index(name)
    style = _BASELINE_STYLES[number % len(_BASELINE_STYLES)]
    return {"color": "black", "marker": "x+1"[number % 3], "linestyle": style}
