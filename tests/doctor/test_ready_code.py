"""Compiled code, driver and NVRTC against the GPUs: what runs, what is compiled first, what does not run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from mutated import mutated
from recorded_machines import bad, facts_of, of, with_gpus, with_python

from sglang_sm120.doctor import facts_python
from sglang_sm120.doctor.facts import Facts
from sglang_sm120.doctor.machine import Output
from sglang_sm120.kernels.cuda import build


def with_code(archs: dict[str, list[str]], *, cuda: str = "13.0", minor: int = 0, **changes: Any) -> Facts:
    """The healthy machine with these architectures; cuda: the driver's."""
    facts = with_python(with_gpus(facts_of(), 8, capability=(12, minor)), archs=archs, **changes)
    facts = replace(facts, torch=replace(facts.torch, archs=()))
    return replace(facts, driver=replace(facts.driver, cuda=cuda))


def code(facts: Facts, package: str) -> tuple[str, str]:
    """Level and text of the finding about that package."""
    (found,) = [f for f in of(facts, "software.ready-code") if f.what == f"code of {package}"]
    return found.level, found.found


@pytest.mark.parametrize(
    ("archs", "minor", "cuda", "level", "says"),
    [
        (["sm_90", "sm_120"], 0, "13.0", "ok", "sm_120 for 12.0"),
        (["sm_120a"], 0, "13.0", "ok", "sm_120a for 12.0"),
        (["sm_120f"], 1, "13.0", "ok", "sm_120f for 12.1"),
        (["sm_120"], 1, "12.8", "ok", "sm_120 for 12.1"),
        (["sm_120a"], 1, "13.0", "fail", "none for 12.1"),
        (["sm_90", "compute_90"], 0, "13.0", "warn", "only as PTX (compute_90)"),
        (["sm_90", "compute_120"], 0, "13.2", "warn", "only as PTX"),
        (["sm_90", "compute_120"], 0, "12.9", "fail", "CUDA 12.9 does not compile"),
        (["sm_90", "compute_120"], 0, "", "warn", "only as PTX"),
        (["sm_90a", "compute_90a"], 0, "13.0", "fail", "none for 12.0"),
        (["sm_120", "..."], 0, "13.0", "ok", "sm_120"),
        ([], 0, "13.0", "warn", "could be read"),
    ],
)
@pytest.mark.parametrize("package", ["torch", "sglang-kernel"])
def test_code_of_packages(archs: list[str], minor: int, cuda: str, level: str, says: str, package: str) -> None:
    found = code(with_code({package: archs}, cuda=cuda, minor=minor), package)
    assert found[0] == level and says in found[1]


def test_torch_itself_is_believed_before_its_files() -> None:
    facts = with_code({"torch": ["sm_90"]})
    facts = replace(facts, torch=replace(facts.torch, archs=("sm_120",)))
    assert code(facts, "torch")[0] == "ok"


@pytest.mark.parametrize(
    ("caches", "level", "says"),
    [
        ([("0.7.2", "120f", 14)], "ok", "14 kernels for 12.0"),
        ([("0.7.2", "90a_120a", 3), ("0.7.2", "120f", 4)], "ok", "7 kernels"),
        ([("0.7.2", "90a", 14)], "note", "none for 12.0"),
        ([("0.6.1", "120f", 14)], "note", "none for 12.0"),
        ([("0.7.2", "120f", 0)], "note", "none for 12.0"),
        ([], "note", "none for 12.0"),
    ],
)
def test_code_of_flashinfer_without_its_package_of_it(
    caches: list[tuple[str, str, int]], level: str, says: str
) -> None:
    cache = [{"version": v, "archs": a, "operations": n, "cuda_homes": []} for v, a, n in caches]
    found = code(with_code({}, jit_cache=cache), "flashinfer")
    assert found[0] == level and says in found[1]


def test_code_of_flashinfers_package() -> None:
    facts = with_code({"flashinfer-jit-cache": ["sm_120f"]}, jit_cache=[])
    assert code(facts, "flashinfer-jit-cache")[0] == "ok"
    assert len(of(facts, "software.ready-code")) == 1


def test_our_own_code(monkeypatch: pytest.MonkeyPatch) -> None:
    assert facts_python._shipped() == list(build.PREBUILT_ARCHS), "or tools/build_cubins.py was not run"
    assert code(with_code({"sglang-sm120": ["sm_120a", "sm_121a"]}, minor=1), "sglang-sm120") == (
        "ok", "sm_121a for 12.1",
    )  # fmt: skip
    monkeypatch.setattr(build, "stale", lambda source, arch, entry: "changed" if arch == "sm_120a" else "")
    shipped = facts_python._shipped()
    assert shipped == ["sm_121a"] and code(with_code({"sglang-sm120": shipped}), "sglang-sm120")[0] == "note"
    monkeypatch.setattr(build, "read_manifest", dict)
    assert facts_python._shipped() == []


def test_gpus_of_another_kind_are_not_judged_by_sm120s_code() -> None:
    facts = with_gpus(facts_of(), 8, capability=(9, 0))
    assert not of(facts, "software.ready-code")


@pytest.mark.parametrize(
    ("cuda", "torch_sees", "level"),
    [("13.0", True, ""), ("13.3", True, ""), ("14.0", True, ""), ("12.9", False, "fail"), ("12.9", True, "note")],
)
def test_driver_for_torch(cuda: str, torch_sees: bool, level: str) -> None:
    """Another major version of CUDA is refused, but for compat libraries; a newer one is not."""
    facts = facts_of()
    facts = replace(facts, driver=replace(facts.driver, cuda=cuda))
    if not torch_sees:
        facts = replace(facts, torch=replace(facts.torch, gpus=None))
    assert [f.level for f in of(facts, "software.driver-for-torch")] == ([level] if level else [])


@pytest.mark.parametrize(
    ("bindings", "packages", "level", "says"),
    [
        ("13.0.3", {"nvidia-cuda-nvrtc": ["13.0.88"]}, "ok", "13.0.88"),
        ("12.9.0", {"nvidia-cuda-nvrtc-cu12": ["12.9.86"]}, "ok", "12.9.86"),
        ("12.9.0", {"nvidia-cuda-nvrtc-cu12": ["12.6.77"]}, "note", "does not know sm_120a"),
        ("12.9.0", {"nvidia-cuda-nvrtc-cu12": ["12.6.77"], "nvidia-cuda-nvrtc": ["13.0.88"]}, "note", "12.6.77 does"),
        ("13.0.3", {"nvidia-cuda-nvrtc-cu12": ["12.9.86"]}, "note", "another major version"),
        ("", {"nvidia-cuda-nvrtc": ["13.0.88"]}, "note", "not installed"),
        ("13.0.3", {}, "note", "not installed"),
    ],
)  # fmt: skip
def test_nvrtc(bindings: str, packages: dict[str, list[str]], level: str, says: str) -> None:
    changes: dict[str, Any] = {"nvidia-cuda-nvrtc": None, "cuda-bindings": [bindings] if bindings else None, **packages}
    (found,) = of(with_python(facts_of(), packages=changes), "software.nvrtc")
    assert found.level == level and says in found.found


def test_torch_that_dies_when_cuda_starts() -> None:
    said = '{"version": "2.14.1+cu130", "cuda": "13.0", "archs": ["sm_120"]}\n'
    (found,) = of(mutated(commands={"torch": Output("failed", said, -11)}), "software.torch")
    assert found.level == "fail" and "imports" in found.found and "SIGSEGV" in found.found


def test_a_gpu_that_torch_does_not_see() -> None:
    facts = facts_of()
    fewer = replace(facts, torch=replace(facts.torch, gpus=(facts.torch.gpus or ())[:7]))
    assert bad(fewer) == {("warn", "software.torch")}
    assert bad(replace(fewer, environ={"CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6"})) == set()
    assert bad(with_gpus(fewer, 8, mig="Enabled")) == {("warn", "gpu.mode")}
