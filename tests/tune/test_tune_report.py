"""A profile on the terminal and as a picture, against values worked by hand."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from sglang_sm120.errors import UnsupportedError
from sglang_sm120.runners import profile as profiles
from sglang_sm120.runners.base import Choice
from sglang_sm120.runners.profile import Candidate, Layer, Machine, Point, Profile, Shape
from sglang_sm120.tune import plot, report

NATIVE, STOCK, B12X = Choice("native", "w4a16"), Choice("flashinfer_cutlass", "w4a4"), Choice("b12x", "w4a4")


def candidate(choice: Choice, *samples_us: float, **more: Any) -> Candidate:
    return Candidate(runner=choice.runner, numerics=choice.numerics, samples_us=list(samples_us), **more)


def canned() -> Profile:
    """Native is faster at 1 and 8 tokens, the stock path at 128; at 2048 the stock path has no time."""
    points = [
        Point(tokens=1, candidates=[
            candidate(NATIVE, 10.0, 9.0, 11.0), candidate(STOCK, 30.0, 31.0, 29.0), candidate(B12X, 20.0)]),
        Point(tokens=8, candidates=[
            candidate(NATIVE, 20.0, 19.0, 25.5), candidate(STOCK, 25.0, 26.0, 24.0),
            candidate(B12X, reason="not here")]),
        Point(tokens=128, candidates=[
            candidate(NATIVE, 80.0), candidate(STOCK, 40.0), candidate(B12X, reason="not here")]),
        Point(tokens=2048, candidates=[
            candidate(NATIVE, 800.0), candidate(STOCK, reason="no memory"),
            candidate(B12X, reason="WRONG, not timed: x", failed=True)]),
    ]  # fmt: skip
    shape = Shape(
        num_experts=256, top_k=8, hidden_size=6144, intermediate_size=256, is_gated=True, activation="silu",
        hidden_dtype="bfloat16",
    )  # fmt: skip
    machine = Machine(
        gpu="Test GPU", capability="9.0", multiprocessors=4, driver="1.2", torch="2.0", triton="3.0", flashinfer="0.6",
        sglang_sm120="0.1",
    )  # fmt: skip
    return Profile(
        format=profiles.FORMAT, created="2026-01-01T00:00:00+00:00", command="sglang-sm120 tune --model m",
        machine=machine, layers=[Layer(shape=shape, points=points)],
    )  # fmt: skip


def shown(profile: Profile) -> str:
    console = Console(width=140, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    report.show(console, profile, profile.layers)
    return console.export_text()


def test_lines_worked_by_hand() -> None:
    one, eight, many, most = report.lines(canned().layers[0])
    assert [line.chosen for line in (one, eight, many, most)] == [NATIVE, NATIVE, STOCK, NATIVE]
    assert [line.is_close for line in (one, eight, many, most)] == [False, True, False, False]
    assert {choice: (cell.median_us, cell.ratio) for choice, cell in one.cells.items()} == {
        NATIVE: (10.0, 3.0), STOCK: (30.0, 1.0), B12X: (20.0, 1.5),
    }  # fmt: skip
    assert many.cells[NATIVE].ratio == 0.5
    assert (most.cells[NATIVE].median_us, most.cells[NATIVE].ratio) == (800.0, None)


def test_without_the_stock_path_it_is_the_fastest_other() -> None:
    point = Point(
        tokens=1, candidates=[candidate(NATIVE, 10.0), candidate(B12X, 40.0), candidate(Choice("c", "w"), 20)]
    )
    layer = canned().layers[0]
    (line,) = report.lines(Layer(shape=layer.shape, points=[point]))
    assert [cell.ratio for cell in line.cells.values()] == [2.0, 0.25, 0.5]


def test_lines_in_one_numerics() -> None:
    found = report.lines(canned().layers[0], "w4a4")
    assert [(line.tokens, line.chosen) for line in found] == [(1, B12X), (8, STOCK), (128, STOCK)]
    assert report.lines(canned().layers[0], "w8a8") == []


def test_the_table() -> None:
    text = shown(canned())
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert lines[0].startswith("GPU Test GPU, compute capability 9.0, 4 multiprocessors, driver 1.2; torch 2.0")
    assert "sglang-sm120 tune --model m" in lines[1]
    assert "1 * 10.0 3.00 30.0 1.00 20.0 1.50" in lines
    assert "8~ * 20.0 1.25 25.0 1.00 -" in lines
    assert "128 80.0 0.50 * 40.0 1.00 -" in lines
    assert "2048 * 800.0 - failed" in lines
    assert "auto: native w4a16 up to 32 tokens, flashinfer_cutlass w4a4 up to 512 tokens, native w4a16 above" in lines
    assert "w4a16: native w4a16 for every batch" in lines
    assert "b12x w4a4 not timed at 8, 128 tokens: not here" in lines
    assert "flashinfer_cutlass w4a4 not timed at 2048 tokens: no memory" in lines
    assert "2048 tokens, b12x w4a4: WRONG, not timed: x" in text
    assert report.failures(canned().layers)[0].endswith("2048 tokens, b12x w4a4: WRONG, not timed: x")


def test_counts_in_a_row_are_shortened() -> None:
    reasons = {1: "no", 2: "no", 4: "no", 8: "", 16: "small", 32: "small", 64: "small"}
    points = [
        Point(tokens=n, candidates=[candidate(NATIVE, 1.0), candidate(B12X, reason=reason)])
        for n, reason in reasons.items()
    ]
    found = report.untimed(Layer(shape=canned().layers[0].shape, points=points))
    assert found == ["b12x w4a4 not timed at 1 to 4 tokens: no", "b12x w4a4 not timed at 16 to 64 tokens: small"]


def test_a_profile_without_times_says_so() -> None:
    layer = canned().layers[0]
    empty = Layer(shape=layer.shape, points=[Point(tokens=1, candidates=[candidate(NATIVE, reason="no GPU")])])
    profile = Profile(**{**{name: getattr(canned(), name) for name in Profile.__struct_fields__}, "layers": [empty]})
    assert "auto: nothing was timed" in " ".join(shown(profile).split())
    assert plot.figure(profile, profile.layers).axes


def test_the_picture() -> None:
    """A line a candidate, a ring at each count around the chosen one, a line where the choice changes."""
    profile = canned()
    (axes,) = plot.figure(profile, profile.layers).axes
    lines = {line.get_label(): [list(xy) for xy in line.get_xydata()] for line in axes.get_lines()}
    assert lines["native w4a16"] == [[1, 10], [8, 20], [128, 80], [2048, 800]]
    assert lines["flashinfer_cutlass w4a4"] == [[1, 30], [8, 25], [128, 40]]
    assert lines["b12x w4a4"] == [[1, 20]]
    (rings,) = (found for found in axes.collections if found.get_label() == "chosen")
    assert rings.get_offsets().tolist() == [[1, 10], [8, 20], [128, 40], [2048, 800]]
    assert plot.borders(profile.layers[0]) == [32, 512]
    vertical = [x for x, *_ in (line.get_xdata() for line in axes.get_lines() if line.get_label().startswith("_"))]
    assert vertical == [32, 512]
    assert [text.get_text().strip() for text in axes.texts] == ["up to 32", "up to 512"]
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")


def test_the_picture_is_a_png_with_a_row_a_layer(tmp_path: Path) -> None:
    profile = canned()
    assert len(plot.figure(profile, profile.layers * 2).axes) == 2
    path = tmp_path / "picture.png"
    plot.draw(profile, profile.layers, str(path))
    assert path.read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "matplotlib" else found(name))
    with pytest.raises(UnsupportedError, match="without matplotlib"):
        plot.draw(canned(), canned().layers, "unused.png")
