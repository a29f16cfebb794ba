"""Recordings that were cut, edited or are none: one error that says what is wrong, and the status of bad options."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from recorded_machines import HEALTHY, MACHINES, Silent

from sglang_sm120 import cli
from sglang_sm120.doctor.facts import gather
from sglang_sm120.doctor.machine import Output, Recording


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(MACHINES / HEALTHY, tmp_path / "machine"))


def refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """The first line of the error, without what begins each."""
    assert cli.main(["doctor", "--machine", str(folder)]) == 2
    out, err = capsys.readouterr()
    first, *rest = err.splitlines()
    assert not out and "Traceback" not in err
    assert [line.split()[0] for line in rest] == ["needed:", "fix:"]
    assert first.startswith(f"sglang-sm120: --machine {folder}: ")
    return first.removeprefix(f"sglang-sm120: --machine {folder}: ")


def put(folder: Path, change: dict[str, Any]) -> None:
    file = folder / "machine.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))


PYTHON = json.loads((MACHINES / HEALTHY / "machine.json").read_text())["python"]


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("environ", {"environ": None}),
        ("environ", {"environ": {"NCCL_DEBUG": 1}}),
        ("states", {"states": {"lspci": "hung"}}),
        ("states", {"states": {"lspci": ["wrong", 0]}}),
        ("folders", {"folders": {"/sys/class/iommu": "ivhd0"}}),
        ("links", {"links": ["/x"]}),
        ("spaces", {"spaces": {"/dev/shm": [1]}}),
        ("spaces", {"spaces": {"/dev/shm": 7}}),
        ("acs", {"acs": {"/sys/x/config": 1 << 16}}),
        ("python", {"python": []}),
        ("packages", {"python": {"packages": {"sglang": "0.5.23"}}}),
        ("packages", {"python": {"packages": {"sglang": []}}}),
        ("jit_cache", {"python": {"jit_cache": [{}]}}),
        ("hook_problems", {"python": {"hook_problems": [["one", "two"]]}}),
        ("sglang_tree", {"python": {"hook_problems": []}}),
        ("profiles", {"profiles": [{"kind": "MoE"}]}),
    ],
)
def test_values_of_another_kind(
    name: str, change: dict[str, Any], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    put(folder, change)
    found = refused(folder, capsys)
    assert found.startswith("machine.json: ") and f"'{name}'" in found


@pytest.mark.parametrize("file", ["machine.json", "files.txt"])
@pytest.mark.parametrize("damage", ["missing", "folder", "unreadable text"])
def test_a_file_that_is_not_there_or_no_file(
    file: str, damage: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / file).unlink()
    if damage == "folder":
        (folder / file).mkdir()
    if damage == "unreadable text":
        (folder / file).write_bytes(b"\xff\xfe{\x00")
    assert file in refused(folder, capsys)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", "[" * 100_000, '{"environ": {}'])
def test_no_json_of_a_recording(text: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "machine.json").write_text(text)
    assert refused(folder, capsys).startswith("machine.json ")


def test_other_things_than_a_recording(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "machine.json: No such file" in refused(tmp_path, capsys)
    assert "No such file" in refused(tmp_path / "missing", capsys)
    (tmp_path / "file").touch()
    assert "Not a directory" in refused(tmp_path / "file", capsys)


def test_a_command_whose_text_is_a_folder(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "nvcc.txt").unlink()
    (folder / "nvcc.txt").mkdir()
    assert "nvcc.txt: Is a directory" in refused(folder, capsys)


def test_each_text_cut_anywhere_or_replaced_by_nonsense(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for file in sorted(folder.glob("*.txt")):
        if file.name == "expected.txt":
            continue
        whole = file.read_bytes()
        for content in (b"", whole[: len(whole) // 2], whole[len(whole) // 3 :], b"\xff\x00\xfe", b"7\n[]\n{}\n"):
            file.write_bytes(content)
            status = cli.main(["doctor", "--machine", str(folder), "--json"])
            out, err = capsys.readouterr()
            assert "Traceback" not in err
            if status == 2:
                assert not out and "needed: " in err
            else:
                whats = [each["what"] for each in json.loads(out)["findings"]]
                assert not [what for what in whats if what.startswith("check ")], "a check failed itself"
        file.write_bytes(whole)


@pytest.mark.parametrize("file", ["machine.json", "files.txt", "lspci.txt"])
def test_an_empty_file_is_told_from_a_missing_one(file: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / file).write_text("")
    if file == "machine.json":
        assert "no JSON" in refused(folder, capsys)
    else:
        assert cli.main(["doctor", "--machine", str(folder)]) in (0, 1)


def test_parts_that_older_recordings_lack(folder: Path) -> None:
    (folder / "machine.json").write_text('{"environ": {}}')
    assert Recording(folder).profiles((), "") == []
    assert gather(Recording(folder)).python == {}


@pytest.mark.parametrize(
    "said",
    [
        '{"gpus": 3}', '{"gpus": [3]}', '{"gpus": [{"name": "x"}]}', '{"archs": 5, "cuda": 13}', '{"version": null}',
        '{"gpus": [{"name": "x", "capability": [12], "multiprocessors": 1}]}', "[]", "7",
    ],
)  # fmt: skip
def test_json_that_another_package_prints_when_torch_starts(said: str) -> None:
    class Printing(Silent):
        def run(self, name: str) -> Output:
            return Output("ok", said + "\n") if name == "torch" else Output("missing")

    torch = gather(Printing()).torch
    assert torch.gpus is None and isinstance(torch.cuda, str) and torch.archs == ()
