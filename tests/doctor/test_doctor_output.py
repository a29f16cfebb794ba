"""Where doctor's texts go: any encoding, any width, a broken rich, and files that are whole or not there."""

from __future__ import annotations

import errno
import io
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest
from recorded_machines import HEALTHY, MACHINES, NAMES
from rich.console import Console

from sglang_sm120 import cli
from sglang_sm120.doctor import output, report
from sglang_sm120.doctor.checks import run_checks
from sglang_sm120.doctor.machine import Recording
from sglang_sm120.errors import ConfigError
from sglang_sm120.findings import Finding

ROOT = Path(__file__).resolve().parents[2]
MACHINE = ["--machine", str(MACHINES / HEALTHY)]


def squeezed(text: str) -> str:
    return "".join(text.split())


def start(words: list[str], environ: dict[str, str], stdout: int) -> subprocess.CompletedProcess[bytes]:
    """The command in a process of its own, with nothing of this environment that changes how it prints."""
    kept = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    return subprocess.run(
        [sys.executable, "-m", "sglang_sm120.cli", "doctor", *words], stdout=stdout, stderr=subprocess.PIPE,
        timeout=100, env=kept | {"PYTHONPATH": str(ROOT)} | environ,
    )  # fmt: skip


def on_terminal(words: list[str], **environ: str) -> str:
    """What it writes on a terminal; lines end as on any other output."""
    mine, theirs = pty.openpty()
    pieces = []
    process = subprocess.Popen(
        [sys.executable, "-m", "sglang_sm120.cli", "doctor", *words], stdout=theirs, stderr=subprocess.PIPE,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "TERM": "xterm-256color", **environ},
    )  # fmt: skip
    os.close(theirs)
    while True:
        try:
            piece = os.read(mine, 1 << 16)
        except OSError:  # the other end is closed
            break
        if not piece:
            break
        pieces.append(piece)
    os.close(mine)
    _, err = process.communicate(timeout=100)
    assert process.returncode == 0 and b"Traceback" not in err, err
    return b"".join(pieces).decode().replace("\r\n", "\n")


@pytest.mark.parametrize("width", [60, 80, 200])
@pytest.mark.parametrize("name", NAMES)
def test_no_text_is_lost_in_a_table(name: str, width: int) -> None:
    findings = run_checks(Recording(MACHINES / name))
    findings.append(Finding("note", "A_VARIABLE_WITH_A_LONG_NAME_AND_MORE", "x" * 300, "n" * 100, "f" * 100))
    console = Console(record=True, width=width, force_terminal=True, file=io.StringIO())
    report.show(findings, console, fix_hints=True)
    lines = console.export_text().splitlines()
    head = next(line for line in lines if line.split() == ["about", "found"])
    about, found = head.index("about"), head.index("found")
    columns = [squeezed("".join(line[a:b] for line in lines)) for a, b in ((0, about), (about, found), (found, None))]
    at = 0
    for each in findings:
        assert squeezed(each.what) in columns[1]
        text = squeezed("".join([each.found, f"needed: {each.needed}" if each.needed else ""]))
        at = columns[2].index(text, at) + len(text)
        assert all(squeezed(f"fix: {step}") in columns[2][at - 1 :] for step in each.fix.splitlines())


@pytest.mark.parametrize("columns", ["20", "40", "59"])
def test_a_narrow_terminal_gets_lines(columns: str) -> None:
    findings = run_checks(Recording(MACHINES / HEALTHY))
    assert on_terminal(MACHINE, COLUMNS=columns) == report.plain(findings, fix_hints=False)


def test_a_wide_terminal_gets_a_table_and_no_color_none() -> None:
    assert "\x1b[" in on_terminal(MACHINE, COLUMNS="100")
    without = on_terminal(MACHINE, COLUMNS="100", NO_COLOR="1")
    assert "about" in without and not re.search(r"\x1b\[[0-9;]*3[0-9]m", without)
    assert "about" in on_terminal(MACHINE, COLUMNS="100", TERM="dumb")


BROKEN_RICH = {
    "not importable": "raise RuntimeError('rich is damaged')",
    "another version": "class Console:\n    is_terminal = True\n    width = 100\n",
    "fails later": "class Console:\n    is_terminal = True\n    def __getattr__(self, name): raise TypeError(name)\n",
}


@pytest.mark.parametrize("code", BROKEN_RICH.values(), ids=BROKEN_RICH)
def test_a_broken_rich(code: str, tmp_path: Path) -> None:
    (tmp_path / "rich").mkdir()
    (tmp_path / "rich" / "__init__.py").touch()
    (tmp_path / "rich" / "console.py").write_text(code)
    findings = run_checks(Recording(MACHINES / HEALTHY))
    shown = on_terminal(MACHINE, COLUMNS="100", PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}")
    assert shown == report.plain(findings, fix_hints=False)


@pytest.mark.parametrize("options", [[], ["--json"], ["--fix-hints"]])
@pytest.mark.parametrize(
    "environ",
    [
        {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"},
        {"PYTHONIOENCODING": "ascii"},
        {"PYTHONIOENCODING": "latin-1:strict"},
        {"PYTHONIOENCODING": "utf-8:strict"},
    ],
)
def test_any_encoding(environ: dict[str, str], options: list[str], tmp_path: Path) -> None:
    """A variable with an umlaut, a sign outside of the plane and a byte that is no UTF-8."""
    folder = tmp_path / "machine"
    folder.mkdir()
    for file in (MACHINES / HEALTHY).iterdir():
        text = file.read_text().replace('"environ": {}', r'"environ": {"NCCL_ALGO": "Bäume😀\udcff"}')
        (folder / file.name).write_text(text)
    report_file = tmp_path / "report.txt"
    done = start(["--machine", str(folder), *options, "--report", str(report_file)], environ, subprocess.PIPE)
    assert done.returncode == 0 and b"Traceback" not in done.stderr, done.stderr
    assert b"NCCL_ALGO" in done.stdout
    assert "NCCL_ALGO" in report_file.read_text(encoding="utf-8")


def test_a_reader_that_goes_away() -> None:
    read, write = os.pipe()
    os.close(read)
    done = start(MACHINE, {}, write)
    os.close(write)
    assert done.returncode == 0 and not done.stderr, done.stderr


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_behind_standard_output() -> None:
    with open("/dev/full", "wb") as full:
        done = start(MACHINE, {}, full.fileno())
    assert done.returncode == 2, done.stderr
    assert b"needed: " in done.stderr and b"fix: " in done.stderr and b"Traceback" not in done.stderr


def fails(*args: object, **kwargs: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("call", ["replace", "fdopen", "chmod"])
def test_a_write_that_fails_leaves_what_was_there(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "report.txt"
    file.write_text("mine")
    monkeypatch.setattr(output.os, call, fails)
    assert cli.main(["doctor", *MACHINE, "--report", str(file), "--force"]) == 2
    monkeypatch.undo()
    err = capsys.readouterr().err
    assert err.splitlines()[0] == f"sglang-sm120: --report {file}: No space left on device"
    assert "needed: " in err and "fix: " in err
    assert file.read_text() == "mine" and [path.name for path in tmp_path.iterdir()] == ["report.txt"]


def test_a_file_that_came_up_in_the_meantime_stays(tmp_path: Path) -> None:
    file = tmp_path / "report.txt"
    file.write_text("theirs")
    with pytest.raises(ConfigError, match="exists"):
        output.write_file("--report", file, "ours", force=False)
    assert file.read_text() == "theirs" and len(list(tmp_path.iterdir())) == 1


def test_without_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_links(*args: object, **kwargs: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(output.os, "link", no_links)
    output.write_file("--report", tmp_path / "a", "x", force=False)
    with pytest.raises(ConfigError, match="exists"):
        output.write_file("--report", tmp_path / "a", "y", force=False)
    assert (tmp_path / "a").read_text() == "x"


def test_what_is_no_ordinary_file_is_written_through_and_not_replaced(tmp_path: Path) -> None:
    """As /dev/stdout is, which a rename would take away from the whole machine."""
    (tmp_path / "real").write_text("old")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    output.write_file("--report", tmp_path / "link", "new", force=True)
    assert (tmp_path / "link").is_symlink() and (tmp_path / "real").read_text() == "new"
    (tmp_path / "null").symlink_to("/dev/null")
    output.write_file("--report", tmp_path / "null", "new", force=True)
    assert (tmp_path / "null").is_symlink() and Path("/dev/null").is_char_device()


def test_a_file_keeps_its_mode_and_a_new_one_gets_the_usual(tmp_path: Path) -> None:
    old = tmp_path / "old"
    old.touch(mode=0o600)
    output.write_file("--report", old, "x", force=True)
    assert old.stat().st_mode & 0o777 == 0o600
    (tmp_path / "usual").touch()
    output.write_file("--report", tmp_path / "new", "x", force=False)
    assert (tmp_path / "new").stat().st_mode == (tmp_path / "usual").stat().st_mode


@pytest.mark.parametrize("force", [[], ["--force"]])
@pytest.mark.parametrize(
    ("option", "make"),
    [
        ("--report", lambda folder: folder),
        ("--report", lambda folder: folder / "missing" / "report.txt"),
        ("--report", lambda folder: folder / "file" / "report.txt"),
        ("--record", lambda folder: folder / "file"),
        ("--record", lambda folder: folder / "file" / "recorded"),
        ("--record", lambda folder: Path("/proc/recorded")),
        ("--report", lambda folder: Path("/proc/report.txt")),
    ],
)
def test_targets_that_cannot_be_written(
    option: str, make, force: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("mine")
    target = make(tmp_path)
    assert cli.main(["doctor", *MACHINE, option, str(target), *force]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"sglang-sm120: {option} {target}") and "needed: " in err and "fix: " in err
    assert "None" not in err and (tmp_path / "file").read_text() == "mine"
