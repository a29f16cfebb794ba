"""`sglang-sm120 bench moe` as far as it goes without a GPU: everything but the clock."""

from __future__ import annotations

import importlib.util
import json
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from sglang_sm120.bench import moe, moe_cases, plot, report, timing
from sglang_sm120.bench.options import ROUTINGS, ModelShape, MoeBenchOptions
from sglang_sm120.cli import main
from sglang_sm120.errors import ConfigError, UnsupportedError

SMALL = ModelShape("small", 8, 2, 256, 128)
L2_BYTES = 1 << 17
MACHINE = {
    "gpu": "Test GPU", "capability": "9.0", "multiprocessors": 4, "memory_bytes": 1 << 34, "l2_bytes": L2_BYTES,
    "driver": "1.2", "torch": "2.0", "cuda": "13.0", "triton": "3.0", "python": "3.11",
}  # fmt: skip
needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="refused on a machine without a CUDA GPU only")


class FakeTimer:
    """A clock that adds one microsecond at every look."""

    looks = 0

    def capture(self, calls: Callable[[], None]) -> Callable[[], None]:
        calls()
        return lambda: None

    def elapsed_us(self, replay: Callable[[], None], count: int) -> float:
        self.looks += 1
        return 100.0 * count + self.looks


def point(prepare: Any = None, tokens: int = 5, **options: Any) -> dict[str, Any]:
    """measure_point on the CPU, with the fake clock."""
    layers = moe.Layers(SMALL, torch.device("cpu"), L2_BYTES, prepare, seed=0)
    chosen = {"models": (SMALL,), "backends": ("prefill",), "baseline": "some.baseline:prepare", **options}
    return moe.measure_point(layers, tokens, "uniform", MoeBenchOptions(**chosen), FakeTimer())


def results(*points: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {
        "format": report.FORMAT, "command": "sglang-sm120 bench moe", "machine": MACHINE, "samples": 3, "seed": 0,
        "baseline": "some.marlin_baseline:prepare", "copy_tb_s": [2.0, 2.2, 1.8], "points": list(points), **changes,
    }  # fmt: skip


def canned(tokens: int = 16, routing: str = "uniform", scale: float = 1.0) -> dict[str, Any]:
    """40 MB in 20 us are 2 TB/s; the baseline takes 30 us."""

    def row(label: str, backend: str, *times_us: float) -> dict[str, Any]:
        return {"label": label, "backend": backend, "order": "", "numerics": "w4a16",
                "samples_us": [time_us * scale for time_us in times_us]}  # fmt: skip

    return {
        "model": {"name": "glm5-tp8"}, "tokens": tokens, "routing": routing, "calls": 4, "weight_copies": 1,
        "active_experts": 12.5, "weight_bytes": 40e6, "reuse_bytes": 3 * L2_BYTES,
        "rows": [
            row("decode column_major w4a16", "decode", 20.0, 19.0, 25.0),
            {**row("auto w4a16", "auto", 21.0, 21.0, 21.0), "served_by": "decode"},
            {"label": "middle w4a4", "backend": "middle", "order": "", "numerics": "w4a4", "not_covered": "no w4a4"},
            row("baseline", "some.marlin_baseline:prepare", 30.0, 31.0, 29.0),
        ],
    }  # fmt: skip


def shown(of: dict[str, Any]) -> str:
    console = Console(width=140, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    report.show(console, of)
    return console.export_text()


@needs_no_gpu
def test_without_a_gpu_there_is_one_clear_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "moe"]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 3
    assert "a CUDA GPU" in error
    assert "--from-json" in error


def test_every_order_of_every_backend_is_right_here_too() -> None:
    rows = point(
        backends=("auto", "prefill", "decode"), orders=("column_major", "row_major"), numerics=("w4a16", "w4a4")
    )["rows"]
    labels = {row["label"]: row for row in rows}
    assert labels["auto w4a16"]["not_covered"] == "the reference serves it here, which is not timed"
    assert labels["decode row_major w4a4"]["not_covered"] == "decode computes in w4a16, not in w4a4"
    for numerics in ("w4a16", "w4a4"):
        for order in ("column_major", "row_major"):
            row = labels[f"prefill {order} {numerics}"]
            assert row["relative_error"] <= row["bound"]
            assert len(row["samples_us"]) == 9


def test_a_time_is_of_one_call() -> None:
    one = point()
    (row,) = one["rows"]
    assert one["calls"] >= 4
    # 16 replays a sample at most: about 100 us each by the fake clock, for all calls of the cycle
    assert all(100 / one["calls"] < time_us < 120 / one["calls"] for time_us in row["samples_us"])


def test_no_timing_from_a_red_test(monkeypatch: pytest.MonkeyPatch) -> None:
    right = moe_cases.Candidate.bind

    def bind(self: moe_cases.Candidate, weights: Any) -> moe_cases.Call:
        call = right(self, weights)
        return (lambda *args: call(*args) * 1.05) if self.order == "row_major" else call

    monkeypatch.setattr(moe_cases.Candidate, "bind", bind)
    of = results(point(orders=("column_major", "row_major")))
    good, wrong = of["points"][0]["rows"]
    assert "samples_us" in good
    assert "samples_us" not in wrong
    assert wrong["failure"].startswith("WRONG, not timed: relative error 5.0")
    text = shown(of)
    assert "prefill row_major w4a16: WRONG, not timed" in text
    assert [row.median_us for row in report.rows(of)][1] is None
    assert len(report.failures(of)) == 1


def test_what_the_timed_replays_left_is_checked_too() -> None:
    outputs: list[torch.Tensor] = []
    right = moe_cases.Candidate("prefill", "column_major", "w4a16").bind

    def prepare(weights: Any) -> moe_cases.Call:
        call = right(weights)

        def kept(*args: torch.Tensor) -> torch.Tensor:
            outputs.append(call(*args))
            return outputs[-1]

        return kept

    class Spoils(FakeTimer):
        def elapsed_us(self, replay: Callable[[], None], count: int) -> float:
            outputs[-1].zero_()
            return super().elapsed_us(replay, count)

    layers = moe.Layers(SMALL, torch.device("cpu"), L2_BYTES, prepare, seed=0)
    options = MoeBenchOptions(models=(SMALL,), backends=("prefill",), baseline="some.baseline:prepare")
    ours, baseline = moe.measure_point(layers, 5, "uniform", options, Spoils())["rows"]
    assert "samples_us" in ours
    assert "samples_us" not in baseline
    assert baseline["failure"].startswith("WRONG, not timed: relative error 1.0")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nan_and_infinity_are_wrong(value: float) -> None:
    want = torch.ones(2, 4)
    got = want.clone()
    got[1, 2] = value
    assert moe_cases.relative_error(got, want) == float("inf")
    assert moe_cases.relative_error(want[:1], want) == float("inf")
    assert moe_cases.relative_error(want, want) == 0


def test_a_baseline_is_checked_timed_and_compared() -> None:
    prepare = moe_cases.Candidate("prefill", "column_major", "w4a16").bind
    of = results(point(prepare))
    ours, baseline = report.rows(of)
    assert baseline.is_baseline
    assert baseline.ratio == 1
    assert ours.ratio == pytest.approx(baseline.median_us / ours.median_us)


def test_a_baseline_that_breaks_is_reported_and_ours_is_measured() -> None:
    def prepare(weights: Any) -> Any:
        raise RuntimeError("no such GPU")

    def broken(*args: Any) -> Any:
        raise RuntimeError("bad batch")

    for bad, said in ((prepare, "RuntimeError: no such GPU"), (lambda weights: broken, "RuntimeError: bad batch")):
        of = results(point(bad))
        ours, baseline = report.rows(of)
        assert ours.median_us is not None
        assert ours.ratio is None
        assert baseline.median_us is None
        assert said in report.failures(of)[0]


def test_load_baseline(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("a_baseline")
    module.prepare = len  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "a_baseline", module)
    assert moe.load_baseline("none") is None
    assert moe.load_baseline("a_baseline:prepare") is len
    for name, reason in (("no_such_module_x:f", "No module named"), ("a_baseline:missing", "no attribute")):
        with pytest.raises(ConfigError, match=reason):
            moe.load_baseline(name)


def test_candidates_take_turns_and_the_first_round_is_dropped() -> None:
    order: list[str] = []

    class Recorder(FakeTimer):
        def elapsed_us(self, replay: Callable[[], None], count: int) -> float:
            replay()
            return 1000.0 * count

    replays = {name: (lambda name=name: order.append(name)) for name in "abc"}
    times = timing.interleaved_us(Recorder(), replays, 3)
    assert order == [*"abc", *"abc", *"bca", *"cab", *"abc"]
    assert {name: len(values) for name, values in times.items()} == {"a": 3, "b": 3, "c": 3}
    assert times["a"] == [1000.0] * 3


def test_a_setting_holds_while_its_candidate_is_looked_at() -> None:
    held: list[str] = []
    seen: list[list[str]] = []

    @contextmanager
    def around(name: str) -> Iterator[None]:
        held.append(name)
        yield
        held.remove(name)

    class Recorder(FakeTimer):
        def elapsed_us(self, replay: Callable[[], None], count: int) -> float:
            replay()
            seen.append(list(held))
            return 1000.0 * count

    order: list[str] = []
    timing.interleaved_us(Recorder(), {name: (lambda name=name: order.append(name)) for name in "ab"}, 2, around)
    assert seen == [[name] for name in order]
    assert len(order) == 2 * (1 + 3)


def test_rows_of_a_canned_result() -> None:
    ours, auto, not_covered, baseline = report.rows(results(canned()))
    assert (ours.median_us, ours.min_us, ours.max_us) == (20.0, 19.0, 25.0)
    assert ours.tb_s == pytest.approx(2.0)
    assert ours.of_copy == pytest.approx(1.0)
    assert ours.ratio == pytest.approx(1.5)
    assert auto.served_by == "decode"
    assert not_covered.median_us is None
    assert baseline.ratio == 1


def test_the_table_names_machine_versions_and_command() -> None:
    text = shown(results(canned()))
    for part in ("Test GPU", "driver 1.2", "torch 2.0", "Triton 3.0", "sglang-sm120 bench moe", "2.000 TB/s"):
        assert part in text
    assert "19.0..25.0" in text
    assert "auto w4a16 (decode)" in text
    assert "baseline (marlin_baseline)" in text
    assert "middle w4a4: not covered: no w4a4" in text
    assert "L2 cache may have helped" not in text
    assert "may have helped at glm5-tp8 16 uniform" in shown(results({**canned(), "reuse_bytes": L2_BYTES}))


def test_markdown() -> None:
    text = report.markdown(results(canned()))
    table = [line for line in text.splitlines() if line.startswith("|")]
    assert len(table) == 2 + 3
    assert (
        "| glm5-tp8 | 16 | uniform | 12 | decode column_major w4a16 | 20.0 | 19.0..25.0 | 2.00 | 1.00 | 1.50 |" in table
    )
    assert len({line.count("|") for line in table}) == 1


def test_from_json_reports_without_a_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    saved, picture = tmp_path / "saved.json", tmp_path / "picture.png"
    points = [canned(tokens, routing, tokens / 16) for tokens in (1, 16, 1000) for routing in ROUTINGS]
    saved.write_text(json.dumps(results(*points)))
    assert main(["bench", "moe", "--from-json", str(saved), "--plot", str(picture), "--markdown"]) == 0
    assert "| 20.0 | 19.0..25.0 |" in capsys.readouterr().out
    assert picture.read_bytes().startswith(b"\x89PNG")
    points[0]["rows"][0]["failure"] = "failed: x"
    saved.write_text(json.dumps(results(*points)))
    assert main(["bench", "moe", "--from-json", str(saved)]) == 1


@pytest.mark.parametrize("content", [None, "no json", "[]", '{"format": "other"}'])
def test_a_file_that_json_did_not_write(content: str | None, tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=r"file\.json"):
        report.read(str(path))


def test_plot_without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "matplotlib" else found(name))
    with pytest.raises(UnsupportedError, match="without matplotlib"):
        plot.draw(results(canned()), "unused.png")
