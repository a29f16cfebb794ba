"""Compiled code for these GPUs: there, to be compiled by the driver, to be compiled by FlashInfer, or missing.

Machine code is for an architecture: sm_120 runs on 12.0 and 12.1, sm_120f too, sm_120a on 12.0 alone. PTX is compiled
by the driver when it is loaded, which a driver older than the CUDA that made it refuses.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from sglang_sm120.doctor.check import Check, listed, version_numbers
from sglang_sm120.doctor.facts import Facts
from sglang_sm120.doctor.facts_fatbin import covers
from sglang_sm120.findings import Finding

REINSTALL = "reinstall torch as SGLang pins it, from the index of a CUDA build"
_OURS = "sglang-sm120"


def _ready_code(facts: Facts) -> Iterator[Finding]:
    compiled = {name: tuple(archs) for name, archs in facts.python.get("archs", {}).items()}
    if facts.torch.archs:
        compiled["torch"] = facts.torch.archs
    for capability in facts.sm120_capabilities:
        for name, archs in sorted(compiled.items()):
            yield from _ours(facts, archs, capability) if name == _OURS else _package(facts, name, archs, capability)
        if not any(name.startswith("flashinfer") for name in compiled):
            yield from _flashinfer(facts, capability)


def _package(facts: Facts, name: str, archs: Sequence[str], capability: tuple[int, int]) -> Iterator[Finding]:
    what, number = f"code of {name}", _number(capability)
    machine = _fitting(archs, "sm_", capability)
    text = _fitting(archs, "compute_", capability)
    sm = f"sm_{number.replace('.', '')}"
    if machine:
        yield Finding("ok", what, f"{listed(machine)} for {number}")
    elif "..." in archs:  # there was no time to read all of it
        return
    elif text and _compiles(facts):
        yield Finding(
            "warn", what, f"for {number} only as PTX ({listed(text)}), which the driver compiles",
            f"machine code for {number}", "a build of a newer CUDA; the first start takes minutes otherwise",
        )  # fmt: skip
    elif text:
        found = f"for {number} only as PTX ({listed(text)}) of CUDA {facts.torch.cuda}, which a driver for CUDA "
        fix = f"a driver for CUDA {facts.torch.cuda} or newer\n{_newer(name)}"
        yield Finding("fail", what, f"{found}{facts.driver.cuda} does not compile", f"machine code for {number}", fix)
    elif archs:
        # FlashInfer compiles what its cache of ready code does not have; the other two do not.
        level = "warn" if name.startswith("flashinfer") else "fail"
        found = (
            f"none for {number} (there is {listed(archs, 12)}): kernels fail to launch, often reported as another error"
        )
        yield Finding(level, what, found, f"a build with {sm}", _newer(name))
    else:
        found = "none that could be read: a build without CUDA, or of a CUDA that is newer than this package"
        yield Finding("warn", what, found, f"a build with {sm}", _newer(name))


def _compiles(facts: Facts) -> bool:
    """Whether the driver takes PTX of the CUDA that torch and packages beside it were built with; if unknown, yes."""
    built, driver = version_numbers(facts.torch.cuda), version_numbers(facts.driver.cuda)
    return not built or not driver or driver >= built


def _flashinfer(facts: Facts, capability: tuple[int, int]) -> Iterator[Finding]:
    """Without its package of ready code: what was compiled here before, by this version."""
    version, caches = facts.version("flashinfer-python").partition("+")[0], facts.python.get("jit_cache")
    if not version or caches is None:
        return
    count = sum(
        cache["operations"]
        for cache in caches
        if cache["version"] == version
        and _fitting([f"sm_{arch}" for arch in cache["archs"].split("_")], "sm_", capability)
    )
    if count:
        found = f"{count} kernels for {_number(capability)}, compiled here before; others at their first use"
        yield Finding("ok", "code of flashinfer", found)
    else:
        yield Finding(
            "note", "code of flashinfer", f"none for {_number(capability)}: the first start compiles it, for minutes",
            fix=f"to have it ready: flashinfer-jit-cache {version}, from FlashInfer's index for this CUDA",
        )  # fmt: skip


def _ours(facts: Facts, archs: Sequence[str], capability: tuple[int, int]) -> Iterator[Finding]:
    """This package's own kernels, which NVRTC compiles where they did not come compiled."""
    what = f"code of {_OURS}"
    if machine := _fitting(archs, "sm_", capability):
        yield Finding("ok", what, f"{listed(machine)} for {_number(capability)}")
    else:
        found = (
            f"not all of it for {_number(capability)} (there is {listed(archs) or 'none'}): compiled at its first use"
        )
        yield Finding("note", what, found, "NVRTC (software.nvrtc)", f"pip install --force-reinstall --no-deps {_OURS}")


def _fitting(archs: Sequence[str], kind: str, capability: tuple[int, int]) -> list[str]:
    return [arch for arch in archs if arch.startswith(kind) and covers(arch, capability)]


def _number(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"


def _newer(name: str) -> str:
    if name == "torch":
        return REINSTALL
    return f"pip install --force-reinstall --no-deps {name} in the version that SGLang pins, for CUDA 12.8 or newer"


def _nvrtc(facts: Facts) -> Iterator[Finding]:
    """Our kernels come compiled; NVRTC serves where those do not fit. cuda-bindings loads that of its major version."""
    packages = facts.python.get("packages", {})
    versions = [str(found[0]) for name, found in packages.items() if name.startswith("nvidia-cuda-nvrtc")]
    bindings = facts.version("cuda-bindings")
    fitting = [version for version in versions if version.partition(".")[0] == bindings.partition(".")[0]]
    newest = max(fitting, key=version_numbers, default="")
    if not versions or not bindings:
        fix = "pip install cuda-bindings nvidia-cuda-nvrtc (both come with a CUDA build of torch)"
        yield Finding(
            "note", "NVRTC", "not installed; our kernels come compiled, and need it where those do not fit", fix=fix
        )
    elif not fitting:
        found = f"{', '.join(versions)}, and cuda-bindings {bindings} loads another major version"
        yield Finding("note", "NVRTC", found, "one major version of both", f"pip install {_of_major(bindings)}")
    elif version_numbers(newest) < (12, 8):
        yield Finding("note", "NVRTC", f"{newest} does not know sm_120a", "12.8 or newer", "a newer nvidia-cuda-nvrtc")
    elif version_numbers(newest) < (12, 9) and (12, 1) in facts.sm120_capabilities:
        yield Finding("note", "NVRTC", f"{newest} does not know sm_121a", "12.9 or newer", "a newer nvidia-cuda-nvrtc")
    else:
        runtime = [str(found[0]) for name, found in packages.items() if re.match("nvidia-cuda-runtime", name)]
        newest_runtime = f", CUDA runtime {max(runtime, key=version_numbers)}" if runtime else ""
        yield Finding("ok", "NVRTC", newest + newest_runtime)


def _of_major(bindings: str) -> str:
    """The package that brings it; from 13 on its name has no CUDA version."""
    major = version_numbers(bindings)[:1]
    return "nvidia-cuda-nvrtc" if major >= (13,) else f"nvidia-cuda-nvrtc-cu{bindings.partition('.')[0]}"


CHECKS = (
    Check("software.ready-code", _ready_code),
    Check("software.nvrtc", _nvrtc),
)
