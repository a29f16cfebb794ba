"""The command: its outputs, its exit statuses, and that it changes nothing."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from recorded_machines import HEALTHY, MACHINES, NAMES, Silent, arguments, facts_of, said
from rich.console import Console

from sglang_sm120 import cli
from sglang_sm120.doctor import command, report
from sglang_sm120.doctor.checks import judge, run_checks
from sglang_sm120.doctor.machine import Machine, Recording
from sglang_sm120.errors import ConfigError
from sglang_sm120.findings import LEVELS, Finding

SWITCH, DESKTOP = "switch-4-rtx-pro-6000-acs", "desktop-2-rtx-5090-iommu"


def test_fixes_are_shown_under_what_has_to_be_mended_and_under_the_rest_when_asked() -> None:
    found = [Finding("fail", "a", "1", "2", "3\n4"), Finding("note", "b", "5", "6", "7")]
    assert report.plain(found, fix_hints=False) == (
        "fail  a: 1\n      needed: 2\n      fix: 3\n      fix: 4\nnote  b: 5\n2 findings: 1 fail, 1 note\n"
    )
    assert "note  b: 5\n      needed: 6\n      fix: 7\n" in report.plain(found, fix_hints=True)
    assert report.summary([]) == "no findings"


@pytest.mark.parametrize("width", [60, 100, 200])
def test_the_table_says_all_of_it_at_any_width(width: int) -> None:
    findings = run_checks(Recording(MACHINES / DESKTOP))
    console = Console(record=True, width=width, force_terminal=True, file=io.StringIO())
    report.show(findings, console, fix_hints=True)
    text = console.export_text()
    assert max(len(line) for line in text.splitlines()) <= width
    joined = "".join(text.split())
    for finding in findings:
        assert finding.level in text
    for command_of_a_fix in ("iommu=pt", "setSGLANG_PLUGINS=smg,sm120" if width == 200 else "SGLANG_PLUGINS"):
        assert command_of_a_fix in joined
    order = [line.split()[0] for line in text.splitlines() if line.split() and line.split()[0] in LEVELS]
    assert order == sorted(order, key=LEVELS.index) and len(order) == len(findings), "worst first"


def test_text_of_a_finding_is_no_markup() -> None:
    console = Console(record=True, width=120, file=io.StringIO())
    report.show([Finding("ok", "[bold]x", "/a[/b] [red]")], console, fix_hints=False)
    assert "[bold]x" in (text := console.export_text()) and "/a[/b] [red]" in text


def test_json_has_a_format_and_a_list_of_steps() -> None:
    told = json.loads(said(DESKTOP, "--json"))
    assert told["format"] == "sglang-sm120 doctor 1" and list(told["counts"]) == list(LEVELS)
    assert told["exit_status"] == 1
    for entry in told["findings"]:
        assert set(entry) == {"check", "level", "what", "found", "needed", "fix"}
        assert isinstance(entry["fix"], list)


@pytest.mark.parametrize(
    ("name", "status"), [(HEALTHY, 0), (SWITCH, 0), (DESKTOP, 1), ("no-gpu", 0), ("container-without-sys", 0)]
)
def test_exit_status(name: str, status: int, capsys: pytest.CaptureFixture[str]) -> None:
    """1 for "fail" alone: the switch box has eight warnings."""
    assert cli.main(["doctor", "--machine", str(MACHINES / name)]) == status
    assert capsys.readouterr().out


@pytest.mark.parametrize(
    "words",
    [
        ["--machine", "no/such/folder"],
        ["--machine", str(MACHINES / HEALTHY), "--probe"],
        ["--machine", str(MACHINES / HEALTHY), "--report", "no/such/folder/report.txt"],
    ],
)
def test_options_that_make_no_sense(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", *words]) == 2
    err = capsys.readouterr().err
    assert "needed: " in err and "fix: " in err and "Traceback" not in err


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"environ": 1}'])
def test_a_damaged_recording(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "machine.json").write_text(text)
    (tmp_path / "files.txt").write_text("no heading\n=== /proc/cmdline\nro\n")
    assert cli.main(["doctor", "--machine", str(tmp_path)]) == 2
    assert "a folder that --record wrote" in capsys.readouterr().err


def test_the_probe_is_asked_only_where_there_are_peers() -> None:
    def never() -> list[Finding]:
        raise AssertionError("must not run")

    (one,) = command.probe_findings(facts_of("h200"), never)
    assert (one.level, one.check) == ("ok", "p2p.probe")
    found = [Finding("fail", "P2P hangs", "0-1", check="p2p.p2p-hangs")]
    assert command.probe_findings(facts_of(HEALTHY), lambda: found) == found


@pytest.mark.parametrize("error", [ImportError("no torch"), ConfigError("two", "one", "mend it")])
def test_a_probe_that_cannot_run_is_a_finding(error: Exception) -> None:
    def fails() -> list[Finding]:
        raise error

    (found,) = command.probe_findings(facts_of(HEALTHY), fails)
    assert found.level == "warn" and found.fix
    assert ("no torch" if isinstance(error, ImportError) else "two") in found.found


@pytest.mark.parametrize("make", [lambda: Silent(), lambda: Recording(MACHINES / "no-gpu")])
def test_reading_changes_nothing(make: Callable[[], Machine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    command.run(arguments(), make())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", NAMES)
def test_judging_is_pure(name: str) -> None:
    facts = facts_of(name)
    assert judge(facts) == judge(facts)
