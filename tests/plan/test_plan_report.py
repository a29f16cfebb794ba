"""What is printed: golden outputs, JSON that comes back as it went, sums that add up, and the picture.

The golden files are read by a person when they change. Write them again with

    SGLANG_PLAN_GOLDEN=write python -m pytest tests/plan/test_plan_report.py

and look at the difference before it is committed.
"""

from __future__ import annotations

import io
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from sglang_sm120.cli import main
from sglang_sm120.errors import UnsupportedError
from sglang_sm120.plan import plot
from sglang_sm120.plan.record import FORMAT
from sglang_sm120.plan.report import print_plan

GOLDEN = Path(__file__).parent / "golden"
WRITE = os.environ.get("SGLANG_PLAN_GOLDEN") == "write"

CASES = {
    "glm-5-nvfp4-8x96": ("glm-5-nvfp4",),
    "glm-5-nvfp4-8x96-all": ("glm-5-nvfp4", "--all", "--mtp", "--concurrency", "1,64"),
    "glm-5-nvfp4-4x96": ("glm-5-nvfp4", "--gpus", "4"),
    "glm-5-nvfp4-2-nodes": ("glm-5-nvfp4", "--nodes", "2", "--concurrency", "4"),
    "qwen3-30b-2x5090": ("qwen3-30b-a3b-nvfp4", "--gpus", "2", "--gpu", "rtx-5090", "--context", "32k"),
    "qwen3-30b-7x96": ("qwen3-30b-a3b-nvfp4", "--gpus", "7", "--context", "32k", "--concurrency", "8"),
    "gpt-oss-120b-1x96": ("gpt-oss-120b", "--gpus", "1"),
}
NOTHING = {"glm-5-nvfp4-4x96"}


def planned(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    status = main(["plan", *words])
    out = capsys.readouterr()
    assert out.err == ""
    return status, out.out


def as_json(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    return json.loads(planned(capsys, *words, "--json")[1])


@pytest.mark.parametrize("name", CASES)
def test_golden_outputs(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, text = planned(capsys, *CASES[name])
    text = "\n".join(line.rstrip() for line in text.splitlines()) + "\n"
    file = GOLDEN / f"{name}.txt"
    if WRITE:
        file.write_text(text)
    assert text == file.read_text(), "look at the difference; the file's head says how to write it again"
    assert status == (1 if name in NOTHING else 0)


@pytest.mark.parametrize("name", CASES)
def test_tables_come_from_the_json_alone(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = [word for word in CASES[name] if word != "--all"]
    record = as_json(capsys, *words)
    assert record["format"] == FORMAT
    again = io.StringIO()
    print_plan(json.loads(json.dumps(record)), again)
    assert again.getvalue() == planned(capsys, *words)[1]


@pytest.mark.parametrize("name", CASES)
def test_sums_add_up(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    record = as_json(capsys, *CASES[name])
    seen = 0
    for split in record["splits"]:
        assert bool(split["obstacles"]) != bool(split["concurrency"])
        for one in split["concurrency"]:
            parts = one["components"]
            assert one["fixed_bytes"] == sum(part["bytes"] for part in parts)
            assert one["weight_bytes"] == sum(part["bytes"] for part in parts if part["kind"] == "weights")
            assert one["all_kv_tokens"] == one["kv_tokens"] * split["replicas"] * split["dp_attention"]
            assert one["fits"] == (one["why"] == "") == (one["kv_tokens"] >= one["needed_tokens"])
            held = one["fixed_bytes"] + one["kv_tokens"] * one["kv_bytes_per_token"]
            assert one["kv_tokens"] == 0 or held <= one["gpu_bytes"]
            assert all(part["detail"] for part in parts)
            seen += 1
    assert seen
    for goal in ("latency", "throughput"):
        if record[goal] is not None:
            assert record[goal]["split"] in [split["label"] for split in record["splits"]]


def test_the_fixed_order_of_names_in_json(capsys: pytest.CaptureFixture[str]) -> None:
    """Others read it: a name that goes or changes is a new format."""
    record = as_json(capsys, "glm-5-nvfp4")
    assert list(record) == [
        "format", "model", "gpu", "gpus", "nodes", "context", "concurrency", "kv_dtype", "mtp", "splits",
        "latency", "throughput", "larger", "smaller_context",
    ]  # fmt: skip
    page = (Path(__file__).parents[2] / "docs" / "plan.md").read_text()
    named = {*record, *record["splits"][0], *record["splits"][0]["concurrency"][0], *record["latency"]} - {"requests"}
    assert [name for name in sorted(named) if not re.search(rf"`{name}(\[\])?`", page)] == []


def test_nothing_printed_is_a_time(capsys: pytest.CaptureFixture[str]) -> None:
    for words in CASES.values():
        text = planned(capsys, *words)[1]
        assert not re.search(r"\d\s*(us|ms|s|tok/s|tokens/s|GB/s|TB/s)\b", text)
        assert "Counted, not measured" in text


def test_the_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its bars are as long as the sums, so that the line means something."""
    pytest.importorskip("matplotlib")
    record = as_json(capsys, "glm-5-nvfp4")
    pieces = [plot._pieces(split["concurrency"][-1]) for split in record["splits"] if split["concurrency"]]
    for split, parts in zip([s for s in record["splits"] if s["concurrency"]], pieces, strict=True):
        one = split["concurrency"][-1]
        kv = one["kv_tokens"] * one["kv_bytes_per_token"]
        assert sum(size for _, _, size in parts) == one["fixed_bytes"] + kv
    bars = plot._grouped(pieces, record["gpu"]["cuda_bytes"])
    assert [sum(size for _, _, size in bar) for bar in bars] == [sum(size for _, _, size in bar) for bar in pieces]
    colours = plot._colours(bars)
    assert len({tuple(colour) for colour in colours.values()}) == len(colours), "no two components look alike"
    file = tmp_path / "plan.png"
    assert main(["plan", "glm-5-nvfp4", "--plot", str(file)]) == 0
    assert file.read_bytes().startswith(b"\x89PNG")


def test_pictures_that_cannot_be_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    for bad in (tmp_path / "no" / "plan.png", tmp_path / "plan.what"):
        assert main(["plan", "glm-5-nvfp4", "--plot", str(bad)]) == 2
        assert "cannot be written" in capsys.readouterr().err
    record = as_json(capsys, "glm-5-nvfp4")
    monkeypatch.setattr(plot.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UnsupportedError, match="matplotlib"):
        plot.draw(record, str(tmp_path / "plan.png"))


def test_tables_show_a_pick_at_what_it_is_planned_for(capsys: pytest.CaptureFixture[str]) -> None:
    """100,000 requests leave no cache, so both picks are for fewer, and that is what the columns are of."""
    words = ("glm-5-nvfp4", "--nodes", "2", "--concurrency", "2,100000")
    record = as_json(capsys, *words)
    assert (record["latency"]["requests"], record["throughput"]["requests"]) == (2, 2)
    _, text = planned(capsys, *words)
    assert "Middle columns: at 2 at once" in text
    (line,) = [line for line in text.splitlines() if line.split()[:1] == ["sum"]]
    assert all(float(held) <= record["gpu"]["cuda_bytes"] / 2**30 + 0.05 for held in line.split()[1:])
