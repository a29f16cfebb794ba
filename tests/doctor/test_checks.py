"""Doctor: silent when all is well, and every fault of an environment named with its fix, even where little works."""

from __future__ import annotations

import importlib.util
import os
import sys
from importlib import metadata
from pathlib import Path

import pytest

from sglang_sm120 import cli
from sglang_sm120.doctor.checks import Finding, run_checks, sglang_tree
from sglang_sm120.integration.hooks import HOOKS


def errors(environ: dict[str, str]) -> dict[str, Finding]:
    """What is in error -> its finding. Each says how to put it right."""
    found = {finding.what: finding for finding in run_checks(environ) if finding.level == "error"}
    assert all(finding.found and finding.fix for finding in found.values())
    return found


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("SGLANG_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def pretend_version(monkeypatch: pytest.MonkeyPatch):
    """version -> as if the installed SGLang were that one; None: as if there were none."""
    installed = metadata.version

    def pretend(version: str | None) -> None:
        def fake(name: str) -> str:
            if name != "sglang":
                return installed(name)
            if version is None:
                raise metadata.PackageNotFoundError(name)
            return version

        monkeypatch.setattr(metadata, "version", fake)

    return pretend


@pytest.fixture
def no_sglang(pretend_version, monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    pretend_version(None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "sglang" else find_spec(name))


def test_a_healthy_installation() -> None:
    findings = run_checks({})
    assert not [finding for finding in findings if finding.level == "error"]
    assert {finding.what for finding in findings if finding.level == "ok"} >= {
        "SGLang",
        "plugin entry point",
        "hooks",
        "environment",
    }
    assert [finding.level for finding in findings if finding.what == "GPU"] in (["ok"], ["warning"])


def test_the_tree_is_the_one_that_would_be_imported() -> None:
    sglang = pytest.importorskip("sglang")
    assert str(sglang_tree()) == next(iter(sglang.__path__))


@pytest.mark.parametrize("value", ["", "smg", "sm120", "smg, sm120", "smg,sm120x", "SM120", ","])
def test_plugins_that_leave_us_out(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against SGLang's own reading of the variable."""
    plugins = pytest.importorskip("sglang.srt.plugins")
    monkeypatch.setenv("SGLANG_PLUGINS", value)
    loaded = "sm120" in plugins.load_plugins_by_group("sglang.srt.plugins")
    found = errors({"SGLANG_PLUGINS": value})
    assert set(found) == (set() if loaded else {"SGLANG_PLUGINS"})
    if not loaded:
        assert repr(value) in found["SGLANG_PLUGINS"].found
        assert f"set SGLANG_PLUGINS={value},sm120" in found["SGLANG_PLUGINS"].fix


def test_another_platform(monkeypatch: pytest.MonkeyPatch) -> None:
    plugins = pytest.importorskip("sglang.srt.plugins")
    monkeypatch.setenv("SGLANG_PLATFORM", "other")
    assert "sglang-sm120" in plugins._get_excluded_dists(), "SGLang then leaves out our plugin too"
    found = errors({"SGLANG_PLATFORM": "other"})
    assert set(found) == {"SGLANG_PLATFORM"}
    assert found["SGLANG_PLATFORM"].fix == "unset SGLANG_PLATFORM"


@pytest.mark.parametrize(
    ("name", "value", "fix"),
    [
        ("SGLANG_SM120_MOE_BACKND", "reference", "did you mean SGLANG_SM120_MOE_BACKEND?"),
        ("SGLANG_SM120_MOE_BACKEND", "referense", "did you mean reference?"),
        ("SGLANG_SM120_EMULATE", "perhaps", "set SGLANG_SM120_EMULATE to 1 or 0"),
    ],
)
def test_a_misspelt_variable_or_value(name: str, value: str, fix: str) -> None:
    found = errors({name: value})
    assert set(found) == {"environment"}
    assert name in found["environment"].found
    assert found["environment"].fix == fix


def test_variables_that_are_set_are_shown() -> None:
    (shown,) = [f for f in run_checks({"SGLANG_SM120_MOE_NUMERICS": "w4a16"}) if f.what == "environment"]
    assert (shown.level, shown.found) == ("ok", "sm120_moe_numerics=w4a16")


def test_a_newer_sglang(pretend_version) -> None:
    pretend_version("0.5.99")
    found = errors({})
    assert found["SGLang"].found == "SGLang 0.5.99; needed: SGLang >= 0.5.23, < 0.5.24"
    assert set(found) == {"SGLang", *(f"hook {hook.name}" for hook in HOOKS)}


def test_the_plugin_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "entry_points", lambda **selection: metadata.EntryPoints())
    assert set(errors({})) == {"plugin entry point"}


def test_no_sglang(no_sglang) -> None:
    found = errors({})
    assert set(found) == {"SGLang"}
    assert found["SGLang"].found == "not installed"


def test_no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    assert set(errors({})) == {"torch"}


def test_command_when_all_is_well(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "checks, 0 errors\n" in out
    assert out.count("\nok ") + out.startswith("ok ") >= 4


def test_command_with_two_faults(
    no_sglang, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SGLANG_PLUGINS", "smg")
    assert cli.main(["doctor"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "error    SGLang: not installed"
    assert lines[1].startswith("         fix: pip install sglang-sm120")
    assert "         fix: set SGLANG_PLUGINS=smg,sm120, or unset it" in lines
    assert lines[-1].endswith("checks, 2 errors")


def test_command_with_one_fault(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("SGLANG_PLUGINS", "smg")
    assert cli.main(["doctor"]) == 1
    assert capsys.readouterr().out.endswith("checks, 1 error\n")


@pytest.mark.parametrize(
    ("environ", "fix"),
    [
        (
            {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64, expandable_segments: True"},
            "take expandable_segments out",
        ),
        ({"PYTORCH_ALLOC_CONF": "expandable_segments:true"}, "take expandable_segments out of PYTORCH_ALLOC_CONF"),
        ({"NCCL_P2P_DISABLE": "1"}, "unset NCCL_P2P_DISABLE"),
    ],
)
def test_what_keeps_the_all_reduce_out(environ: dict[str, str], fix: str) -> None:
    (found,) = [finding for finding in run_checks(environ) if finding.what == "all-reduce"]
    assert found.level == "warning" and fix in found.fix and "is left out" in found.found


def test_what_lets_the_all_reduce_be() -> None:
    harmless = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False", "NCCL_P2P_DISABLE": "0"}
    assert not [finding for finding in run_checks(harmless) if finding.what == "all-reduce"]


@pytest.mark.parametrize("there", [False, True])
def test_mscclpp(there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if there:
        (tmp_path / "mscclpp.py").touch()
        monkeypatch.syspath_prepend(str(tmp_path))
    (found,) = [finding for finding in run_checks({}) if finding.what == "MSCCL++"]
    assert found.level == "ok" and found.found.startswith("installed" if there else "not installed")
    assert bool(found.fix) is not there
