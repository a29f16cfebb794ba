"""The checks of the installation: silent when all is well, and every fault named with its fix."""

from __future__ import annotations

import shlex
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import pytest
from recorded_machines import bad, facts_of, of, with_python

from sglang_sm120.doctor import facts_python
from sglang_sm120.doctor.check import Check
from sglang_sm120.doctor.checks import judge, run_checks, sglang_tree
from sglang_sm120.doctor.facts import Facts
from sglang_sm120.doctor.machine import ThisMachine
from sglang_sm120.findings import Finding, failed, worst_first
from sglang_sm120.integration.hooks import HOOKS


def with_environ(**environ: str) -> Facts:
    return replace(facts_of(), environ=environ)


def errors(facts: Facts) -> dict[str, Finding]:
    """What is "fail" -> its finding."""
    return {finding.what: finding for finding in judge(facts) if finding.level == "fail"}


def test_levels() -> None:
    found = [Finding(level, "", "") for level in ("ok", "warn", "fail", "note", "fail")]
    assert [each.level for each in worst_first(found)] == ["fail", "fail", "warn", "note", "ok"]
    assert failed(found) and not failed(found[:2])
    with pytest.raises(ValueError, match="level 'error'"):
        Finding("error", "", "")


def test_the_tree_is_the_one_that_would_be_imported() -> None:
    sglang = pytest.importorskip("sglang")
    assert str(sglang_tree()) == next(iter(sglang.__path__))


@pytest.mark.parametrize("value", [
        "", "smg", "sm120", "smg, sm120", "smg,sm120x", "SM120", ",", " ", " , ", "smg,", ",smg,,", " sm120 ", "sm120,",
        "sm120;smg", "smg sm120", "'sm120'", "\tsm120\n", "smg,smg",
    ],
)  # fmt: skip
def test_plugins_that_leave_us_out(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against SGLang's own reading of the variable."""
    plugins = pytest.importorskip("sglang.srt.plugins")
    given = with_environ(SGLANG_PLUGINS=value)
    monkeypatch.setenv("SGLANG_PLUGINS", value)
    loaded = "sm120" in plugins.load_plugins_by_group("sglang.srt.plugins")
    found = errors(given)
    assert set(found) == (set() if loaded else {"SGLANG_PLUGINS"})
    if not loaded:
        assert repr(value) in found["SGLANG_PLUGINS"].found
        words = shlex.split(found["SGLANG_PLUGINS"].fix.removesuffix(", or unset it"))  # as a shell reads it
        name, _, advised = words[-1].partition("=")
        monkeypatch.setenv(name, advised)
        assert "sm120" in plugins.load_plugins_by_group("sglang.srt.plugins"), "the advice helps"
        names = {word.strip() for word in value.split(",") if word.strip()}
        assert set(advised.split(",")) == {*names, "sm120"}


def test_another_platform(monkeypatch: pytest.MonkeyPatch) -> None:
    plugins = pytest.importorskip("sglang.srt.plugins")
    monkeypatch.setenv("SGLANG_PLATFORM", "other")
    assert "sglang-sm120" in plugins._get_excluded_dists(), "SGLang then leaves out our plugin too"
    found = errors(with_environ(SGLANG_PLATFORM="other"))
    assert set(found) == {"SGLANG_PLATFORM"}
    assert found["SGLANG_PLATFORM"].fix == "unset SGLANG_PLATFORM"


def test_the_platform_of_the_emulation() -> None:
    assert set(errors(with_environ(SGLANG_PLATFORM="sm120"))) == {"SGLANG_PLATFORM"}
    assert not errors(with_environ(SGLANG_PLATFORM="sm120", SGLANG_SM120_EMULATE="1"))


@pytest.mark.parametrize(
    ("name", "value", "fix"),
    [
        ("SGLANG_SM120_MOE_BACKND", "reference", "did you mean SGLANG_SM120_MOE_BACKEND?"),
        ("SGLANG_SM120_MOE_BACKEND", "referense", "did you mean reference?"),
        ("SGLANG_SM120_EMULATE", "perhaps", "set SGLANG_SM120_EMULATE to 1 or 0"),
    ],
)
def test_a_misspelt_variable_or_value(name: str, value: str, fix: str) -> None:
    found = errors(with_environ(**{name: value}))
    assert set(found) == {"options"}
    assert name in found["options"].found
    assert found["options"].fix == fix


def test_variables_that_are_set_are_shown() -> None:
    (shown,) = of(with_environ(SGLANG_SM120_MOE_NUMERICS="w4a16"), "installation.options")
    assert (shown.level, shown.found) == ("ok", "sm120_moe_numerics=w4a16")


def test_another_sglang() -> None:
    found = errors(with_python(facts_of(), packages={"sglang": ["0.5.99"]}))
    assert set(found) == {"SGLang"}
    assert (found["SGLang"].found, found["SGLang"].needed) == ("SGLang 0.5.99", "SGLang >= 0.5.23, < 0.5.24")


def test_hooks_are_compared_with_the_installed_source(monkeypatch: pytest.MonkeyPatch) -> None:
    """An unknown version has no digest that was tested, so no hook fits."""
    pytest.importorskip("sglang")
    real = facts_python._packages
    monkeypatch.setattr(facts_python, "_packages", lambda: (real()[0] | {"sglang": ["0.5.99"]}, {}, []))
    found = errors(with_python(facts_of(), **facts_python._hooks({"sglang": ["0.5.99"]})))
    assert set(found) == {f"hook {hook.name}" for hook in HOOKS}


def test_the_plugin_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "entry_points", lambda **selection: metadata.EntryPoints())
    assert facts_python.gather({}, quick=True)["entry_points"] == []
    assert set(errors(with_python(facts_of(), entry_points=[]))) == {"plugin entry point"}


def test_no_sglang() -> None:
    found = errors(with_python(facts_of(), packages={"sglang": None}, pins={}, hook_problems=None))
    assert set(found) == {"SGLang"}
    assert found["SGLang"].found == "not installed"


def test_this_installation() -> None:
    """The environment of the tests: nothing will be refused."""
    pytest.importorskip("sglang")
    findings = run_checks(ThisMachine({}))
    assert not failed(findings)
    ok = {finding.what for finding in findings if finding.level == "ok"}
    assert ok >= {"SGLang", "plugin entry point", "hooks", "options"}


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
    (found,) = of(with_environ(**environ), "all-reduce.environment")
    assert found.level == "warn" and fix in found.fix and "is left out" in found.found


def test_what_lets_the_all_reduce_be() -> None:
    harmless = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False", "NCCL_P2P_DISABLE": "0"}
    assert not of(with_environ(**harmless), "all-reduce.environment")


@pytest.mark.parametrize("there", [False, True])
def test_mscclpp(there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if there:
        (tmp_path / "mscclpp.py").touch()
        monkeypatch.syspath_prepend(str(tmp_path))
    facts = with_python(facts_of(), mscclpp=facts_python.gather({}, quick=True)["mscclpp"])
    (found,) = of(facts, "all-reduce.mscclpp")
    assert found.level == "ok" and found.found.startswith("installed" if there else "not installed")
    assert bool(found.fix) is not there


def test_versions_against_sglangs_own_metadata() -> None:
    pins = dict(facts_python._pins())
    required = metadata.requires("sglang") or []
    assert f"torch=={pins['torch']}" in required
    assert any(line.startswith("flashinfer_python") and f"=={pins['flashinfer-python']}" in line for line in required)
    facts = with_python(facts_of(), packages={"torch": ["2.13.0+cu130"], "sglang-kernel": None})
    wrong, missing = of(facts, "installation.pins")
    assert (wrong.level, wrong.found) == ("warn", "torch 2.13.0+cu130 (SGLang asks for 2.14.1)")
    assert (missing.level, missing.found) == ("warn", "sglang-kernel==0.4.10")


@pytest.mark.parametrize(("owners", "level"), [(["b12x", "flashinfer-python"], "warn"), (["b12x"], "note")])
def test_b12x_from_the_index(owners: list[str], level: str) -> None:
    facts = with_python(facts_of(), packages={"b12x": ["1.5.1"]}, b12x_owners=owners)
    (found,) = of(facts, "installation.b12x")
    assert found.level == level and "pip uninstall -y b12x" in found.fix


def test_owners_of_a_file_are_read_from_the_installed_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two distributions that own the same file, and one package installed twice."""
    for name, version, file in (
        ("b12x", "1.5.1", "b12x/__init__.py"),
        ("flashinfer_python", "0.7.2", "b12x/__init__.py"),
        ("triton", "3.0.0", "triton/other.py"),
    ):
        info = tmp_path / f"{name}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        (info / "RECORD").write_text(f"{file},,\n")
    broken = tmp_path / "torch_broken-1.0.dist-info"
    broken.mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    facts = facts_python.gather({}, quick=True)
    assert facts["b12x_owners"] == ["b12x", "flashinfer-python"]
    assert facts["packages"]["triton"][0] == "3.0.0", "what comes first on the path is imported"
    if len(facts["packages"]["triton"]) > 1:
        assert facts["places"]["triton"][0] == str(tmp_path)


def test_a_package_that_hides_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In another folder, which comes first; and two records in one folder, as an upgrade that was broken off leaves."""
    user, venv = tmp_path / ".local" / "lib", tmp_path / "venv"
    for folder, name, version in (
        (venv, "tilelang", "0.10"), (user, "tilelang", "0.2"), (venv, "quack_kernels", "1.0"),
        (venv, "quack-kernels", "1.1"), (user, "nvidia_nccl_cu13", "2.1"), (venv, "nvidia_nccl_cu13", "2.1"),
    ):  # fmt: skip
        info = folder / f"{name}-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    for folder in (venv, user):
        monkeypatch.syspath_prepend(str(folder))
    gathered = facts_python.gather({}, quick=True)
    assert gathered["packages"]["tilelang"][:2] == ["0.2", "0.10"], "as Python finds them, not sorted"
    assert gathered["places"]["tilelang"][:2] == [str(user), str(venv)]
    assert "nvidia-nccl-cu13" not in gathered["places"] or len(gathered["packages"]["nvidia-nccl-cu13"]) > 1
    changed = {name: gathered["packages"][name] for name in ("tilelang", "quack-kernels")}
    (found,) = of(with_python(facts_of(), packages=changed, places=gathered["places"]), "installation.duplicates")
    assert found.level == "warn" and "PYTHONNOUSERSITE=1" in found.fix
    assert f"tilelang 0.2 ({user}) hides 0.10 ({venv})" in found.found
    assert f"in one folder ({venv})" in found.found


def test_what_is_imported_is_what_is_judged() -> None:
    facts = with_python(facts_of(), packages={"torch": ["2.13.0+cu130", "2.14.1+cu130"]})
    (wrong,) = of(facts, "installation.pins")
    assert (wrong.level, wrong.found) == ("warn", "torch 2.13.0+cu130 (SGLang asks for 2.14.1)")


def test_a_check_that_fails_says_so_and_stops_nothing() -> None:
    def broken(facts: Facts) -> list[Finding]:
        raise KeyError("a field that is not there")

    (found,) = Check("gpu.broken", broken).run(facts_of())
    assert (found.level, found.check) == ("warn", "gpu.broken") and "a field that is not there" in found.found


def test_a_healthy_machine_has_nothing_to_mend() -> None:
    assert bad(facts_of()) == set()
