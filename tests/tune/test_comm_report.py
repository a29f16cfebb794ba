"""An all-reduce profile as tables, as Markdown and as a picture, against values worked by hand."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from comm_work import LAMPORT, NCCL, PUSH, TWO_SHOT, canned, point, profile, with_names
from rich.console import Console

from sglang_sm120.errors import UnsupportedError
from sglang_sm120.tune import comm_plot, comm_profile, comm_report
from sglang_sm120.tune.comm_host import NVLINK, SOME_NVLINK, UNKNOWN
from sglang_sm120.tune.comm_profile import CommProfile


def shown(of: CommProfile) -> str:
    console = Console(width=160, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    comm_report.show(console, of)
    return console.export_text()


def cells(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines()]


def test_lines_worked_by_hand() -> None:
    one, eight, many, most = comm_report.lines(canned(), True)
    assert [line.chosen for line in (one, eight, many, most)] == [LAMPORT, LAMPORT, TWO_SHOT, "stock"]
    assert [line.marked for line in (one, eight, many, most)] == [LAMPORT, LAMPORT, TWO_SHOT, NCCL]
    assert [line.ratio for line in (one, eight, many, most)] == [4 / 12, 5 / 14, 20 / 25, 200 / 150]
    assert one.medians == {LAMPORT: 4.0, PUSH: 5.0, TWO_SHOT: 8.0, NCCL: 12.0}
    _, close, none = comm_report.lines(canned(), False)
    assert (close.chosen, close.marked, close.is_close) == ("stock", NCCL, True)
    assert (none.chosen, none.ratio, none.is_close) == ("stock", None, False)


def test_the_tables() -> None:
    text = shown(canned())
    rows = cells(text)
    assert ["4,096", "1", "*", "4.00", "5.00", "8.00", "12.00", "0.33", LAMPORT] in rows
    assert ["262,144", "64", "30.00", "wrong", "*", "20.00", "25.00", "0.80", TWO_SHOT] in rows
    assert ["2,097,152", "512", "-", "-", "200.0", "*", "150.0", "1.33", "stock:nccl"] in rows
    assert ["32,768", "8", "7.00", "*", "8.00", "0.88", "stock:nccl", "~"] in rows
    assert ["262,144", "64", "failed", "*", "25.00", "stock:nccl"] in rows
    assert text.index("sum, residual add and RMSNorm") < text.index("the sum alone")
    assert (
        "up to 92,672 bytes one-shot-lamport; up to 741,440 bytes two-shot-push; up to 2,097,152 bytes stock:nccl"
        in text
    )


def test_what_is_wrong_failed_or_too_close_is_said() -> None:
    text = shown(canned())
    assert "one-shot-push, sum, residual add and RMSNorm, at 64 tokens: wrong: rank 1: relative error 0.5" in text
    assert "one-shot-lamport, the sum alone, at 64 tokens: failed: rank 0: RuntimeError: no" in text
    assert (
        "the sum alone, 8 tokens: one-shot-lamport is faster by 14.3% than nccl, and needs more than 28.6%: left to "
        "stock (samples 7.00 to 9.00 and 8.00 to 8.00 us)"
    ) in text
    assert len(comm_report.failures(canned())) == 2


def test_which_of_sglangs_ways_won() -> None:
    of = profile(
        with_names(point(1), {LAMPORT: 9.0, "nccl": 8.0, "flashinfer pcie_ipc": 5.0}),
        with_names(point(2), {LAMPORT: 9.0, "nccl": 8.0, "flashinfer pcie_ipc": 7.9}),
        with_names(point(4), {LAMPORT: 9.0, "nccl": 8.0, "mscclpp": 2.0}),
        with_names(point(8), {LAMPORT: 2.5, "nccl": 8.0, "mscclpp": 2.0}),
        with_names(point(16), {LAMPORT: 9.0, "of another": 3.0, "nccl": 8.0}),
    )
    lines = comm_report.lines(of, True)
    assert [line.named for line in lines] == ["stock:pcie_ipc", "stock:nccl", "stock:mscclpp", LAMPORT, "stock"]
    assert [line.marked for line in lines] == ["flashinfer pcie_ipc", "nccl", "mscclpp", LAMPORT, "of another"]
    assert lines[3].ratio == 2.5 / 8.0, "a server with ours has not MSCCL++"
    text = shown(of)
    assert "sum, residual add and RMSNorm: MSCCL++ is the fastest at 4 tokens; a server has it by" in text
    assert "up to 5,792 bytes stock:pcie_ipc; up to 11,584 bytes stock:nccl; up to 23,168 bytes stock:mscclpp" in text


def test_one_reason_is_one_line() -> None:
    of = profile(*(point(n, one_shot_push="failed: x", nccl=1.0) for n in (1, 2, 4)))
    assert comm_report.failures(of) == [
        "one-shot-push, sum, residual add and RMSNorm, at 1, 2, 4 tokens: failed: x"
    ]  # fmt: skip


def test_without_a_baseline() -> None:
    of = profile(point(1, one_shot_push=5.0), missing=["at all: sgl_kernel not installed"])
    text = shown(of)
    assert "no baseline at all: sgl_kernel not installed" in text
    assert "without a baseline there is nothing to choose against" in text
    assert f"ours is taken up to {of.default_end:,} bytes" in text
    assert ["4,096", "1", "*", "5.00", PUSH] in cells(text)
    assert "the sum alone" not in text


def test_nothing_chosen() -> None:
    assert "nothing is chosen" in shown(profile(point(4096, one_shot_push=5.0)))


@pytest.mark.parametrize(("link", "warned"), [(NVLINK, True), (SOME_NVLINK, True), ("PCIe", False), (UNKNOWN, False)])
def test_the_header_says_what_was_measured_and_over_what(link: str, warned: bool) -> None:
    of = profile(*canned().points, gpus=["GPU A", "GPU B"], link=link)
    gpus, software, measured = comm_report.header(of)
    assert gpus.startswith(f"1 x GPU A, 1 x GPU B; {link}")
    assert ("is not PCIe" in gpus) == warned
    assert software == "driver 1.2, torch 2.0, sglang-sm120 0.1"
    assert measured.startswith("hidden size 2048, bfloat16; measured 2026-01-01")
    for text in (shown(of), comm_report.markdown(of)):
        assert gpus in text
        assert software in text


def test_markdown() -> None:
    text = comm_report.markdown(canned())
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert rows[0] == (
        "| bytes | tokens | one-shot-lamport, us | one-shot-push, us | two-shot-push, us | nccl, us "
        "| ours / baseline | chosen |"
    )
    assert rows[1] == "| ---: | ---: | ---: | ---: | ---: | ---: | ---: | --- |"
    assert rows[4] == "| 262,144 | 64 | 30.00 | wrong | **20.00** | 25.00 | 0.80 | two-shot-push |"
    assert len({row.count("|") for row in rows[:6]}) == 1
    assert "- one-shot-push, sum, residual add and RMSNorm, at 64 tokens: wrong" in text
    assert "Chosen: up to 92,672 bytes one-shot-lamport;" in text


# ---- the picture ----
def test_what_is_drawn() -> None:
    pytest.importorskip("matplotlib")
    figure = comm_plot.figure(canned())
    fused, alone = figure.axes
    assert (fused.get_title(), alone.get_title()) == ("sum, residual add and RMSNorm", "the sum alone")
    for axes in figure.axes:
        assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    drawn = {line.get_label(): line.get_xydata().tolist() for line in fused.lines if line.get_label()[0] != "_"}
    assert drawn[PUSH] == [[4096, 5.0], [32768, 5.0]], "nothing where it was wrong"
    assert drawn[NCCL][-1] == [2097152, 150.0]
    assert set(drawn) == {LAMPORT, PUSH, TWO_SHOT, NCCL}
    (chosen,) = fused.collections
    assert chosen.get_offsets().tolist() == [[4096, 4.0], [32768, 5.0], [262144, 20.0], [2097152, 150.0]]
    assert [text.get_text().strip() for text in fused.texts] == [f"{LAMPORT} | {TWO_SHOT}", f"{TWO_SHOT} | stock:nccl"]
    assert "2 x Test GPU; PCIe" in figure.get_suptitle()


@pytest.mark.parametrize(
    "of",
    [canned(), profile(point(1, one_shot_push=5.0)), profile(point(1, one_shot_push="failed: x"), point(1, False))],
    ids=["whole", "one point", "nothing timed"],
)
@pytest.mark.filterwarnings("error::UserWarning")
def test_the_picture_is_written(of: CommProfile, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    comm_plot.draw(of, str(tmp_path / "comm.png"))
    assert (tmp_path / "comm.png").read_bytes().startswith(b"\x89PNG")
    comm_plot.draw(of, str(tmp_path / "comm.svg"))
    assert (tmp_path / "comm.svg").read_text().startswith("<?xml")


def test_without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    found: Any = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "matplotlib" else found(name))
    with pytest.raises(UnsupportedError, match="without matplotlib"):
        comm_plot.draw(canned(), "unused.png")


@pytest.mark.parametrize(
    ("size", "text"), [(512, "512"), (4096, "4K"), (12288, "12K"), (1 << 21, "2M"), (1536, "1.5K")]
)
def test_sizes_on_the_axis(size: int, text: str) -> None:
    assert comm_plot.short(size) == text


def test_a_profile_is_reported_anywhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On a machine that is not the profile's, with another number of GPUs."""
    from sglang_sm120.cli import main

    path, picture, page = (tmp_path / name for name in ("profile.json", "comm.png", "comm.md"))
    comm_profile.write(profile(point(1, one_shot_push=5.0, nccl=9.0)), path)
    asked = ["tune", "--comm", "--from-profile", str(path), "--plot", str(picture), "--markdown", str(page)]
    assert main(asked) == 0
    assert "up to 4,096 bytes one-shot-push" in capsys.readouterr().out
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "| 4,096 | 1 | **5.00** | 9.00 | 0.56 | one-shot-push |" in page.read_text()
    comm_profile.write(canned(), path)
    assert main(["tune", "--comm", "--from-profile", str(path)]) == 1, "something was wrong when it was measured"
    for option in ("--plot", "--markdown"):
        assert main(["tune", "--comm", "--from-profile", str(path), option, str(tmp_path / "absent" / "x.png")]) == 1
        assert "a file that can be written" in capsys.readouterr().err
