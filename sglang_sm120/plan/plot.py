"""Memory of a GPU by component, a bar a split, with a line at what the GPU has. Made from `record` alone."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from typing import Any

from sglang_sm120.errors import UnsupportedError
from sglang_sm120.plan.gpus import GIB
from sglang_sm120.plan.record import at, shown_requests

# The colour map of each kind of component; its components are shades of it.
_MAPS = {
    "weights": "Blues", "graphs": "YlOrBr", "workspace": "Purples", "communication": "Reds", "activations": "RdPu",
    "runtime": "Greys", "margin": "Greys", "kv": "Greens",
}  # fmt: skip
_SMALL = 0.02
"""Components below this share of the GPU's memory on every bar are drawn together, by kind."""
_MOST_BARS = 24
_WIDEST = 1.5
"""Of the GPU's memory. A longer bar is cut and says how long it is, so that those that fit can be told apart."""


def formats() -> list[str]:
    """The endings of files that can be drawn to.

    Raises:
        UnsupportedError: no matplotlib.
    """
    _require_matplotlib()
    figure = importlib.import_module("matplotlib.figure").Figure()
    return sorted(figure.canvas.get_supported_filetypes())


def draw(record: dict[str, Any], path: str) -> None:
    """Write the picture; its format is that of the file's name.

    Args:
        record: what `record.record` made, or read back from JSON.
        path: such as plan.png.

    Raises:
        UnsupportedError: no matplotlib, or no split that could be counted.
        OSError, ValueError: the file cannot be written, or has no known format.
    """
    _require_matplotlib()
    splits = [split for split in record["splits"] if split["concurrency"]][:_MOST_BARS]
    if not splits:
        raise UnsupportedError("no split of this model can be counted", "one split to draw", "leave out --plot")
    requests = shown_requests(record)
    figure_module = importlib.import_module("matplotlib.figure")
    figure = figure_module.Figure(figsize=(13, 2.6 + 0.42 * len(splits)), layout="constrained")
    axes = figure.subplots()
    bars = _grouped([_pieces(at(split, requests)) for split in splits], record["gpu"]["cuda_bytes"])
    _bars(axes, bars)
    limit = record["gpu"]["cuda_bytes"] / GIB
    axes.axvline(limit, color="#b00020", linewidth=1.6)
    axes.annotate(f"the GPU: {limit:.1f} GiB", (limit, 1), xycoords=("data", "axes fraction"), xytext=(4, 4),
        textcoords="offset points", color="#b00020", fontsize=9)  # fmt: skip
    axes.set_yticks(range(len(splits)), [_name(record, split) for split in splits], fontsize=9)
    axes.invert_yaxis()
    axes.set_xlabel("GiB of the fullest GPU; counted, not measured")
    end = min(axes.get_xlim()[1], _WIDEST * limit)
    axes.set_xlim(0, end)
    _name_cut_bars(axes, bars, end)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(*_legend(axes), loc="upper left", bbox_to_anchor=(1.01, 1), fontsize=8, frameon=False)
    axes.set_title(
        f"{record['model']['name']} on {record['nodes'] * record['gpus']} x {record['gpu']['title']}: "
        f"{requests:,} requests at once, context {record['context']:,}, KV {record['kv_dtype']}\n",
        fontsize=11, loc="left",
    )  # fmt: skip
    figure.savefig(path, dpi=130)


def _require_matplotlib() -> None:
    if importlib.util.find_spec("matplotlib") is None:
        raise UnsupportedError(
            "matplotlib is not installed", "matplotlib, for --plot", "pip install 'sglang-sm120[bench]'"
        )


def _bars(axes: Any, bars: Sequence[Sequence[tuple[str, str, int]]]) -> None:
    """One piece a component, weights first and the KV cache last, in the same colour on every bar."""
    colours = _colours(bars)
    for row, pieces in enumerate(bars):
        left = 0.0
        for name, _, size in pieces:
            style = {"color": colours[name], "edgecolor": "white", "linewidth": 0.4, "height": 0.72}
            axes.barh(row, size / GIB, left=left, label=name, **style)
            left += size / GIB


def _colours(bars: Sequence[Sequence[tuple[str, str, int]]]) -> dict[str, Any]:
    """A shade a component, from dark to light by its size."""
    maps = importlib.import_module("matplotlib").colormaps
    largest: dict[tuple[str, str], int] = {}
    for name, kind, size in (piece for pieces in bars for piece in pieces):
        largest[kind, name] = max(size, largest.get((kind, name), 0))
    found: dict[str, Any] = {}
    for kind in {kind for kind, _ in largest}:
        names = sorted((name for k, name in largest if k == kind), key=lambda name: -largest[kind, name])
        for place, name in enumerate(names):
            shade = 0.85 - 0.6 * place / max(len(names) - 1, 1) if len(names) > 1 else 0.6
            found[name] = maps[_MAPS.get(kind, "Greys")](shade if kind != "margin" else 0.25)
    return found


def _grouped(bars: Sequence[list[tuple[str, str, int]]], gpu_bytes: int) -> list[list[tuple[str, str, int]]]:
    """The same bars with what is small everywhere put together, largest first within a kind."""
    largest: dict[str, int] = {}
    for name, _, size in (piece for pieces in bars for piece in pieces):
        largest[name] = max(size, largest.get(name, 0))
    found = []
    for pieces in bars:
        sums: dict[tuple[str, str], int] = {}
        for name, kind, size in pieces:
            shown = name if kind == "kv" or largest[name] >= _SMALL * gpu_bytes else f"other {kind}"
            sums[shown, kind] = sums.get((shown, kind), 0) + size
        order = list(_MAPS)
        found.append(
            sorted(
                ((name, kind, size) for (name, kind), size in sums.items()),
                key=lambda piece: (order.index(piece[1]), piece[0].startswith("other "), -largest.get(piece[0], 0)),
            )
        )
    return found


def _name_cut_bars(axes: Any, bars: Sequence[Sequence[tuple[str, str, int]]], end: float) -> None:
    for row, pieces in enumerate(bars):
        total = sum(size for _, _, size in pieces) / GIB
        if total > end:
            axes.text(
                end, row, f"{total:.0f} GiB > ", ha="right", va="center", fontsize=9, color="white", weight="bold"
            )


def _pieces(fit: dict[str, Any]) -> list[tuple[str, str, int]]:
    """Name, kind and bytes of all that a GPU holds."""
    parts = [
        (part["name"], part["kind"] if part["kind"] in _MAPS else "runtime", part["bytes"])
        for part in fit["components"]
        if part["bytes"]
    ]
    return [*parts, ("KV cache", "kv", fit["kv_tokens"] * fit["kv_bytes_per_token"])]


def _name(record: dict[str, Any], split: dict[str, Any]) -> str:
    picked = [goal for goal in ("latency", "throughput") if record[goal] and record[goal]["split"] == split["label"]]
    mark = f"  [{', '.join(picked)}]" if picked else ""
    return split["label"] + (mark if split["holds_one"] else "  (does not fit)")


def _legend(axes: Any) -> tuple[list[Any], list[str]]:
    handles, labels = axes.get_legend_handles_labels()
    first = {label: handle for handle, label in reversed(list(zip(handles, labels, strict=True)))}
    ordered = list(dict.fromkeys(labels))
    return [first[label] for label in ordered], ordered
