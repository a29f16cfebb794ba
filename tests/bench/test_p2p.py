"""`sglang-sm120 bench p2p` around a probe that is replaced: report, files, exit status, options."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from sglang_sm120.bench import p2p, p2p_plot
from sglang_sm120.bench.p2p_options import DEFAULT_TIME_LIMIT_S, P2pBenchOptions
from sglang_sm120.cli import main
from sglang_sm120.errors import ConfigError, UnsupportedError
from sglang_sm120.kernels.communication.p2p_probe import config
from sglang_sm120.kernels.communication.p2p_probe.environment import Environment
from sglang_sm120.kernels.communication.p2p_probe.report import AllToAll, Gpu, Pair, ProbeReport

ROOT = Path(__file__).resolve().parents[2]
needs_no_gpu = pytest.mark.skipif(torch.cuda.device_count() > 1, reason="refused with fewer than two GPUs only")


def canned(count: int = 3, **changes: Any) -> ProbeReport:
    """Numbers by which a cell is known: row r and column c have r c in them."""
    pairs = [
        Pair(
            row, column, "ok", "", True, True, True, True, True, push_latency_us=0.5 + row / 100 + column / 1000,
            pull_latency_us=1.2, message_latency_us=2.0, push_gb_s=50 + row + column / 10, pull_gb_s=48.7,
        )
        for row in range(count)
        for column in range(count)
        if row != column
    ]  # fmt: skip
    of = ProbeReport(
        gpus=tuple(Gpu(i, "Test GPU", f"0000:0{i}:00.0", "12.0", 63.0, 16, 16) for i in range(count)),
        pairs=tuple(pairs),
        all_to_all=AllToAll("ok", "", tuple(41.5 + i for i in range(count)), (39.25,) * count),
        environment=Environment(iommus=("dmar0",)),
        seconds=12.0,
    )
    return replace(of, **changes)


def hung(of: ProbeReport, one: int, other: int) -> ProbeReport:
    pairs = tuple(
        Pair(pair.source, pair.target, "hung", "GPU 1 gave no answer to 'push' in time")
        if {pair.source, pair.target} == {one, other}
        else pair
        for pair in of.pairs
    )
    return replace(of, pairs=pairs, all_to_all=AllToAll())


def run(of: ProbeReport, asked: list[Any] | None = None, **options: Any) -> tuple[int, str]:
    """Exit status and what was printed; `asked` gets what the probe was asked."""
    console = Console(width=140, record=True, file=open("/dev/null", "w"))  # noqa: SIM115

    def probe(devices: Any, **more: Any) -> ProbeReport:
        if asked is not None:
            asked.append((devices, more["time_limit_s"]))
        more["progress"]("GPUs 0 and 1", 1, 5)
        return of

    code = p2p.run(P2pBenchOptions(**options), console, probe)
    return code, console.export_text()


def test_the_tables_have_every_pair() -> None:
    asked: list[Any] = []
    code, text = run(canned(), asked, devices=(0, 1, 2), time_limit_s=3.0)
    assert code == 0
    assert asked == [((0, 1, 2), 3.0)]
    assert "GPU 1: Test GPU at 0000:01:00.0, PCIe link 63.0 GB/s (16 lanes)" in text
    for cell in ("50.1 / 48.7", "51.2 / 48.7", "52.0 / 48.7", "0.52 / 1.20"):
        assert cell in text
    rows = [line.split() for line in text.splitlines()]
    assert ["2", "52.0", "/", "48.7", "52.1", "/", "48.7", "-"] in rows
    assert ["2", "43.5", "39.2"] in rows, "all at once"
    assert "IOMMUs: dmar0" in text
    assert "ok    P2P: right between all 3 GPUs" in text
    assert "driver " in text and f"torch {torch.__version__}" in text


def test_a_fail_is_exit_status_1_with_what_to_do() -> None:
    code, text = run(hung(canned(), 0, 1))
    assert code == 1
    assert "fail  P2P hangs: GPUs 0-1" in text
    assert "      fix: where the IOMMU is on: iommu=pt" in text
    assert "hung" in next(line for line in text.splitlines() if line.split()[:1] == ["0"])
    assert "all GPUs at once, GB/s" not in text


def test_a_pair_that_was_measured_in_part() -> None:
    of = canned(2)
    of = replace(of, pairs=(replace(of.pairs[0], status="hung", pull_gb_s=None), of.pairs[1]))
    assert "50.1 / ? hung" in run(of)[1]


def test_json(tmp_path: Path) -> None:
    path = tmp_path / "p2p.json"
    of = hung(canned(), 1, 2)
    assert run(of, json=str(path))[0] == 1
    saved = json.loads(path.read_text())
    assert saved["format"] == p2p.FORMAT
    assert {"command", "started", "driver", "torch", "python"} <= saved.keys()
    assert ProbeReport.from_dict(saved["report"]) == of
    assert [finding["level"] for finding in saved["findings"]] == ["fail"]
    assert saved["findings"][0]["fix"]


def test_a_json_path_that_cannot_be_written_is_noticed_before_anything_is_measured(tmp_path: Path) -> None:
    asked: list[Any] = []
    with pytest.raises(ConfigError, match="--json"):
        run(canned(), asked, json=str(tmp_path / "missing" / "p2p.json"))
    assert not asked


@pytest.mark.parametrize("of", [canned(2), canned(8), hung(canned(), 0, 2)], ids=["two", "eight", "hung"])
def test_plot(of: ProbeReport, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "p2p.png"
    assert f"wrote {path}" in run(of, plot=str(path))[1].replace("\n", "")
    assert path.read_bytes().startswith(b"\x89PNG")
    p2p_plot.draw(of, str(tmp_path / "p2p.svg"))
    assert (tmp_path / "p2p.svg").read_text().startswith("<?xml")
    with pytest.raises(ConfigError, match="--plot"):
        run(of, plot=str(tmp_path / "p2p.nothing"))


def test_the_numbers_in_the_cells(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    figures: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda self, *args, **more: figures.append(self))
    p2p_plot.draw(hung(canned(), 0, 2), "unused.png")
    push, pull, push_us, pull_us = figures[0].axes

    def cells(axes: Any) -> dict[tuple[int, int], str]:
        return {(round(text.get_position()[1]), round(text.get_position()[0])): text.get_text() for text in axes.texts}

    assert cells(push) == {
        (0, 1): "50.1", (1, 0): "51.0", (1, 2): "51.2", (2, 1): "52.1", (0, 2): "hung", (2, 0): "hung",
    }  # fmt: skip
    assert cells(pull)[1, 2] == "48.7"
    assert cells(push_us)[2, 1] == "0.52"
    assert cells(pull_us)[0, 1] == "1.20"
    assert "Test GPU" in figures[0].get_suptitle()


def test_plot_without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "matplotlib" else found(name))
    asked: list[Any] = []
    with pytest.raises(UnsupportedError, match="without matplotlib"):
        run(canned(), asked, plot="unused.png")
    assert not asked


# ---- the command line ----
@needs_no_gpu
def test_fewer_than_two_gpus_are_one_clear_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "p2p"]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 3
    assert "CUDA GPU is visible" in error
    assert "needed: two or more" in error
    assert "fix:" in error


def test_devices_that_are_not_there_are_exit_status_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert main(["bench", "p2p", "--devices", "0,5"]) == 2
    assert "of 0 to 1" in capsys.readouterr().err
    assert main(["bench", "p2p", "--json", str(tmp_path)]) == 2
    assert "a file that can be written" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [["--devices", "0"], ["--devices", "0,0"], ["--devices", "0,x"], ["--devices", ""], ["--devices", "0,00"],
     ["--time-limit", "0"], ["--time-limit", "soon"], ["--time-limit", "inf"], ["more"]],
)  # fmt: skip
def test_options_that_make_no_sense(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bench", "p2p", *arguments])
    assert ended.value.code == 2
    assert "error: " in capsys.readouterr().err


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bench", "p2p", "--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    for option in ("--devices N,N,...", "--time-limit S", "--json FILE", "--plot FILE.png"):
        assert option in text
    assert "(default: 20)" in text
    assert DEFAULT_TIME_LIMIT_S == config.DEFAULT_TIME_LIMIT_S


def test_the_options_reach_the_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[P2pBenchOptions] = []
    monkeypatch.setattr(p2p, "run", lambda options: seen.append(options) or 0)
    assert main(["bench", "p2p", "--devices", "2,0", "--time-limit", "1.5", "--json", "a", "--plot", "b"]) == 0
    assert main(["bench", "p2p"]) == 0
    assert seen == [P2pBenchOptions((2, 0), 1.5, "a", "b"), P2pBenchOptions()]


def test_the_options_load_without_anything_installed() -> None:
    code = "import sys; sys.path.insert(0, sys.argv[1]); import sglang_sm120.bench.p2p_options; "
    code += "print({'torch', 'rich', 'matplotlib', 'numpy'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code, str(ROOT)], capture_output=True, text=True)
    assert done.stdout == "set()\n", done.stderr
