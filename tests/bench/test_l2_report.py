"""What `bench l2` says of measurements that are given: tables, Markdown, files, picture, exit status."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from sglang_sm120.bench import l2, l2_plot, l2_report
from sglang_sm120.bench.l2_cases import CANDIDATES
from sglang_sm120.bench.l2_options import L2BenchOptions
from sglang_sm120.bench.l2_projections import CASES
from sglang_sm120.cli import main
from sglang_sm120.errors import ConfigError

L2_BYTES = 60 << 20
NOT_MEASURED = "SM120: not measured; this command measures it there"
MACHINE = {
    "gpu": "Test GPU", "capability": "9.0", "multiprocessors": 4, "memory_bytes": 1 << 34, "l2_bytes": L2_BYTES,
    "driver": "1.2", "torch": "2.0", "cuda": "13.0", "triton": "3.0", "python": "3.11",
}  # fmt: skip


def step(model: str = "glm5-tp8", tokens: int = 1, wait_us: float = 10.0, faster: float = 0.25) -> dict[str, Any]:
    """off: 100 us; attention 125; ffn 80; next 100; prefetch: 80, 100 and 80, the median being 80. faster 0.25: so."""

    def row(candidate: str, *captures_us: float) -> dict[str, Any]:
        captures = [[time_us, time_us - 1, time_us + 3] for time_us in captures_us]
        return {"candidate": candidate, "captures": captures, "prefetched_bytes": 3 << 19}

    best = 100 / (1 + faster)
    return {
        "model": model, "tokens": tokens, "wait_us": wait_us, "layers": 8, "reuse_bytes": 6 * L2_BYTES,
        "rows": [row("off", 100.0, 101.0, 99.0), row("attention", 125.0, 125.0, 125.0), row("ffn", best, best, best),
                 row("next", 100.0, 100.0, 100.0), row("prefetch", best, 100.0, best),
                 row("set-aside", 101.0, 101.0, 101.0), row("persist", 102.0, 102.0, 102.0),
                 row("window", 103.0, 103.0, 103.0), row("both", 96.0, 96.0, 96.0)],
    }  # fmt: skip


def projection(
    name: str = "o_proj", model: str = "glm5-tp8", num_bytes: int = 24 << 20, tokens: int = 1
) -> dict[str, Any]:
    times_us = dict(zip([case.label for case in CASES], (10.0, 8.5, 9.0, 8.5, 10.0, 9.5, 8.25, 7.5), strict=True))
    streams_us = dict(zip(times_us, (270.0, 270.0, 271.0, 380.0, 690.0, 691.0, 690.0, None), strict=True))
    return {
        "model": model, "name": name, "shape": [6144, 2048], "bytes": num_bytes, "tokens": tokens,
        "set_aside_bytes": 30 << 20, "hit_ratio": 1.0,
        "rows": [
            {"case": case, "samples_us": [time_us, time_us - 0.25, time_us + 1], "kernels": ["gemv"],
             "stream_us": [] if streams_us[case] is None else [streams_us[case]]}
            for case, time_us in times_us.items()
        ],
    }  # fmt: skip


def results(**changes: Any) -> dict[str, Any]:
    return {
        "format": l2_report.FORMAT, "command": "sglang-sm120 bench l2", "machine": MACHINE, "context": 4096,
        "budget_bytes": 15 << 20, "blocks": None, "captures": 3, "samples": 3, "seed": 0, "set_aside_bytes": 30 << 20,
        "windows_reason": None, "steps": [step()], "projections": [projection()], **changes,
    }  # fmt: skip


def shown(of: dict[str, Any]) -> str:
    console = Console(width=140, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    l2_report.show(console, of)
    return console.export_text()


def test_every_candidate_has_a_name() -> None:
    assert list(l2_report.LABELS) == list(CANDIDATES)


def test_ratios_are_of_medians_and_the_worst_capture_is_there() -> None:
    rows = {row.candidate: row for row in l2_report.step_rows(results())}
    assert rows["off"].captures_us == (100.0, 101.0, 99.0)
    assert (rows["off"].ratio, rows["off"].worst_ratio) == (1.0, 100 / 101)
    assert (rows["attention"].ratio, rows["attention"].worst_ratio) == (0.8, 0.8)
    best = rows["prefetch"]
    assert (best.median_us, best.ratio, best.worst_ratio, best.best_ratio) == (80.0, 1.25, 1.0, 1.25)
    assert best.prefetched_mb == 1.5


def test_projections_beside_the_cold_one_and_what_the_stream_took() -> None:
    rows = {row.case: row for row in l2_report.projection_rows(results())}
    assert (rows["cold"].of_cold, rows["prefetched"].of_cold, rows["hot"].of_cold) == (1.0, 0.85, 0.75)
    assert rows["cold"].stream_us == 270.0
    assert rows["set-aside: window, hit ratio 1"].stream_us == 690.0
    assert rows["hot"].stream_us is None
    assert (rows["prefetched"].min_us, rows["prefetched"].max_us) == (8.25, 9.5)


def test_the_tables() -> None:
    text = shown(results())
    for part in ("Test GPU", "L2 cache 60 MB", "driver 1.2", "torch 2.0", "sglang-sm120 bench l2", "30.0 MB can be set",
                 "wait of one thread", "15.0 MB at most", "3 captures", NOT_MEASURED):  # fmt: skip
        assert part in text
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert "1 10 both all-reduces (prefetch) 1.5 80.00 80.00..100.00 1.250 1.000" in lines
    assert "1 10 off 1.5 100.00 99.00..101.00 1.000 0.990" in lines
    assert "o_proj 24.0 1 set-aside: window, hit ratio 1 10.00 9.75..11.00 1.00 690" in lines
    assert "o_proj 24.0 1 hot 7.50 7.25..8.50 0.75" in lines


def test_nothing_is_said_of_sm120_but_that_it_was_not_measured() -> None:
    lines = [line for line in shown(results()).splitlines() if "SM120" in line]
    assert lines == [NOT_MEASURED]
    assert NOT_MEASURED not in shown(results(machine={**MACHINE, "capability": "12.0"}))


def test_markdown() -> None:
    text = l2_report.markdown(results())
    assert "| glm5-tp8 | 1 | 10 | both all-reduces (prefetch) | 1.5 | 80.00 | 80.00..100.00 | 1.250 | 1.000 |" in text
    assert "| glm5-tp8 | o_proj | 24.0 | 1 | cold | 10.00 | 9.75..11.00 | 1.00 | 270 |" in text
    tables = [line for line in text.splitlines() if line.startswith("|")]
    assert {line.count("|") for line in tables} == {10}
    assert len(tables) == 2 + 9 + 2 + 8


def test_what_was_wrong_or_could_not_be_measured() -> None:
    of = results()
    of["steps"][0]["rows"][2] = {"candidate": "ffn", "captures": [], "failure": "WRONG, not timed: differs"}
    for number in (3, 4, 5, 6):
        of["projections"][0]["rows"][number] = {"case": CASES[number].label, "not_covered": "MIG forbids it"}
    of["steps"][0]["rows"][6] = {"candidate": "persist", "captures": [], "not_covered": "MIG forbids it"}
    of["projections"][0]["rows"][1] = {"case": "prefetched", "failure": "failed: RuntimeError: no"}
    text = shown(of)
    assert "glm5-tp8, 1 tokens, wait 10 us, ffn: WRONG, not timed: differs" in text
    assert "glm5-tp8, o_proj, 1 tokens, prefetched: failed: RuntimeError: no" in text
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert "1 10 windows over what fits (persist) 0.0 not covered" in lines
    assert "o_proj 24.0 1 set-aside: window, hit ratio 1 not covered" in lines
    assert len(l2_report.failures(of)) == 2
    assert [row.ratio for row in l2_report.step_rows(of)][2] is None
    assert "- glm5-tp8, o_proj, 1 tokens, prefetched: failed" in l2_report.markdown(of)


def test_without_off_there_is_no_ratio() -> None:
    of = results()
    of["steps"][0]["rows"][0] = {"candidate": "off", "captures": [], "failure": "failed: no"}
    assert all(row.ratio is None and row.worst_ratio is None for row in l2_report.step_rows(of))
    assert "failed" in shown(of)


def test_too_little_between_two_uses_is_said() -> None:
    of = results()
    assert "L2 may have helped" not in shown(of)
    of["steps"][0]["reuse_bytes"] = 2 * L2_BYTES
    assert "a weight is used again after 2.0 times its size, not 5" in shown(of)


# ---- files and exit status ----
def test_from_json_works_without_a_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, markdown = tmp_path / "l2.json", tmp_path / "l2.md"
    source.write_text(json.dumps(results()))
    assert main(["bench", "l2", "--from-json", str(source), "--markdown", str(markdown)]) == 0
    assert "both all-reduces (prefetch)" in capsys.readouterr().out
    assert markdown.read_text() == l2_report.markdown(results()) + "\n"
    wrong = results()
    wrong["steps"][0]["rows"][1] = {"candidate": "attention", "captures": [], "failure": "WRONG"}
    source.write_text(json.dumps(wrong))
    assert main(["bench", "l2", "--from-json", str(source)]) == 1


@pytest.mark.parametrize("text", [None, "{", "[]", '{"format": "sglang-sm120 bench moe 1"}'])
def test_another_file_is_refused(text: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "l2.json"
    if text is not None:
        source.write_text(text)
    assert main(["bench", "l2", "--from-json", str(source)]) == 1
    error = capsys.readouterr().err
    assert str(source) in error
    assert error.count("\n") == 3


@pytest.mark.parametrize("option", ["--markdown", "--plot"])
def test_a_file_that_cannot_be_written(option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    source = tmp_path / "l2.json"
    source.write_text(json.dumps(results()))
    assert main(["bench", "l2", "--from-json", str(source), option, str(tmp_path / "missing" / "x.png")]) == 1
    assert option in capsys.readouterr().err


def many() -> dict[str, Any]:
    """Two models, four numbers of tokens, three waits."""
    models = ("glm5-tp8", "qwen3-235b-tp4")
    steps = [
        step(model, tokens, wait_us, faster=0.1 * wait_us / 20 / (1 + number))
        for model in models
        for number, tokens in enumerate((1, 2, 10, 64))
        for wait_us in (5.0, 10.0, 20.0)
    ]
    projections = [
        projection(name, model, tokens=tokens)
        for model in models
        for name in ("fused_qkv_a_proj", "o_proj", "router")
        for tokens in (1, 64)
    ]
    return results(steps=steps, projections=projections)


def test_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    source, path = tmp_path / "l2.json", tmp_path / "l2.png"
    source.write_text(json.dumps(many()))
    assert main(["bench", "l2", "--from-json", str(source), "--plot", str(path)]) == 0
    assert path.read_bytes().startswith(b"\x89PNG")
    for of in (results(steps=[]), results(projections=[]), results(steps=[], projections=[])):
        l2_plot.draw(of, str(path))


def test_what_the_picture_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    figures: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda self, *args, **more: figures.append(self))
    l2_plot.draw(many(), "unused.png")
    (figure,) = figures
    assert [axes.get_title() for axes in figure.axes[:4]] == [
        "glm5-tp8: wait 5 us", "glm5-tp8: wait 10 us", "glm5-tp8: wait 20 us",
        "glm5-tp8: dense projections alone, 1 token",
    ]  # fmt: skip
    assert len(figure.axes) == 8
    lines = {container.get_label(): container for container in figure.axes[2].containers}
    best = lines["both all-reduces (prefetch)"]
    assert list(best.lines[0].get_ydata()) == pytest.approx([1.1, 1.05, 1 + 0.1 / 3, 1.025])
    low, high = best.lines[2][0].get_segments()[0][:, 1]
    assert (low, high) == pytest.approx((1.0, 1.1)), "the slowest and the fastest capture"
    for axes in figure.axes[:3]:
        assert axes.get_ylim() == figure.axes[0].get_ylim(), "one scale"
        assert axes.get_ylim()[0] < 0.8
        assert axes.get_ylim()[1] > 1.1
    bars = {container.get_label(): container for container in figure.axes[3].containers}
    assert [bar.get_height() for bar in bars["cold"]] == [10.0] * 3
    assert len(bars) == len(CASES)
    title = figure.get_suptitle()
    for part in ("Test GPU", "driver 1.2", "torch 2.0", "L2 60 MB", "a wait of one thread stands for each all-reduce"):
        assert part in title


def test_a_plot_is_refused_before_anything_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise ConfigError("no matplotlib", "it", "install it")

    monkeypatch.setattr(l2.plot, "require_matplotlib", missing)
    with pytest.raises(ConfigError, match="no matplotlib"):
        l2.run(L2BenchOptions(from_json="missing.json", plot="x.png"))


def test_a_report_changes_nothing() -> None:
    of = results()
    before = copy.deepcopy(of)
    shown(of)
    l2_report.markdown(of)
    assert of == before
