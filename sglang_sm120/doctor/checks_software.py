"""torch, compiled kernels and what FlashInfer needs to compile its own: whether they are for these GPUs."""

from __future__ import annotations

from collections.abc import Iterator

from sglang_sm120.doctor.check import Check, listed
from sglang_sm120.doctor.facts import Facts
from sglang_sm120.doctor.facts_fatbin import covers
from sglang_sm120.findings import Finding

_REINSTALL = "reinstall torch as SGLang pins it, from the index of a CUDA build"
# FlashInfer 0.7.2, compilation_context.py: 12.0 needs CUDA 12.8 and prefers 12.9; 12.1 needs 12.9.
_JIT_MINIMUM = {(12, 0): (12, 8), (12, 1): (12, 9)}


def _torch(facts: Facts) -> Iterator[Finding]:
    torch, has_gpu = facts.torch, bool(facts.driver.gpus)
    if torch.state in ("failed", "missing"):
        installed = facts.version("torch")
        found = f"torch {installed} does not start: {torch.detail}" if installed else "not installed"
        yield Finding("fail", "torch", found, "a torch that imports", _REINSTALL)
    elif torch.state == "hung" and not torch.version:
        found = "importing it takes more than a minute and a half"
        yield Finding("fail", "torch", found, "a torch that imports", "look at the disk it is on; then reinstall it")
    elif torch.state == "hung":
        yield Finding(
            "fail", "torch", f"torch {torch.version} hangs when it starts CUDA", "GPUs that answer",
            "`dmesg | grep -iE 'xid|nvrm'`; reboot",
        )  # fmt: skip
    elif torch.state == "ok" and not torch.cuda and has_gpu:
        yield Finding("fail", "torch", f"{torch.version} is a build without CUDA", "a CUDA build", _REINSTALL)
    elif torch.cuda_error and has_gpu:
        fix = "install a newer driver, if that is what it says\nelse look at CUDA_VISIBLE_DEVICES and `nvidia-smi`"
        yield Finding(
            "fail", "torch", f"{torch.version} cannot use the GPUs: {torch.cuda_error}", "GPUs for torch", fix
        )
    elif torch.state == "ok" and torch.cuda:
        yield Finding("ok", "torch", f"{torch.version}, built with CUDA {torch.cuda}")


def _driver(facts: Facts) -> Iterator[Finding]:
    """Within one major version of CUDA an older driver runs newer code, except PTX, which it would have to compile."""
    built, driver = _numbers(facts.torch.cuda), _numbers(facts.driver.cuda)
    if not built or not driver:
        return
    said = f"driver {facts.driver.version} is for CUDA {facts.driver.cuda}, torch was built with {facts.torch.cuda}"
    if driver[0] < built[0]:
        yield Finding(
            "fail", "driver for torch", said, f"a driver for CUDA {built[0]}.0 or newer", "install a newer driver"
        )
    elif driver < built:
        yield Finding(
            "note", "driver for torch", f"{said}: code that comes as PTX alone does not run", fix="a newer driver"
        )


def _archs(facts: Facts) -> Iterator[Finding]:
    """Whether compiled code is there for these GPUs, package by package."""
    capabilities = facts.sm120_capabilities
    if not capabilities:
        return
    compiled = {name: tuple(archs) for name, archs in facts.python.get("archs", {}).items()}
    if facts.torch.archs:
        compiled["torch"] = facts.torch.archs
    for name, archs in sorted(compiled.items()):
        if "..." in archs:  # there was no time to read all of it
            continue
        for capability in capabilities:
            number = f"{capability[0]}.{capability[1]}"
            machine = [arch for arch in archs if arch.startswith("sm_") and covers(arch, capability)]
            text = [arch for arch in archs if arch.startswith("compute_") and covers(arch, capability)]
            have = listed(archs, 12) or "none"
            if machine:
                yield Finding("ok", f"code of {name}", f"{listed(machine)} for {number}")
            elif text:
                yield Finding(
                    "warn", f"code of {name}", f"for {number} only as PTX ({listed(text)}), which the driver compiles",
                    f"machine code for {number}", "a build of a newer CUDA; the first start takes minutes otherwise",
                )  # fmt: skip
            else:
                # FlashInfer compiles what its cache of ready code does not have; the other two do not.
                level = "warn" if name.startswith("flashinfer") else "fail"
                found = f"none for {number} (there is {have}): kernels fail to launch, often reported as another error"
                yield Finding(
                    level, f"code of {name}", found, f"a build with sm_{number.replace('.', '')}", _newer(name)
                )


def _newer(name: str) -> str:
    if name == "torch":
        return _REINSTALL
    return f"pip install --force-reinstall --no-deps {name} in the version that SGLang pins, for CUDA 12.8 or newer"


def _jit(facts: Facts) -> Iterator[Finding]:
    """FlashInfer compiles kernels at first use; without the tools the first request fails."""
    tools = facts.python.get("tools")
    if tools is None or not facts.version("flashinfer-python") or not facts.sm120_capabilities:
        return
    ready = any(name.startswith("flashinfer-jit-cache") for name in facts.python.get("packages", {}))
    level = "warn" if ready else "fail"
    at_first = "FlashInfer compiles kernels at their first use" + (", those that its ready code lacks" if ready else "")
    needed = f"{at_first}, with nvcc, ninja, a C++ compiler and libcudart"
    missing = [name for name in ("nvcc", "ninja", "c++") if name not in tools]
    if missing:
        yield Finding(level, "FlashInfer's compiler", f"not found: {', '.join(missing)}", needed, _tools_fix(facts))
    if "nvcc" in tools and "libcudart" not in tools:
        found = f"no libcudart.so under {tools.get('cuda_home', '')}, which every kernel is linked with"
        yield Finding(level, "FlashInfer's compiler", found, needed, "install the toolkit's cudart development package")
    version = _numbers(facts.nvcc)
    if not version:
        return
    for capability in facts.sm120_capabilities:
        least = _JIT_MINIMUM.get(capability, (12, 9))
        number, wanted = f"{capability[0]}.{capability[1]}", f"{least[0]}.{least[1]}"
        if version < least:
            found = f"nvcc {facts.nvcc} ({tools.get('nvcc', '')}) does not know compute capability {number}"
            fix = f"install CUDA {wanted} or newer beside it, and set CUDA_HOME to it"
            yield Finding("fail", "FlashInfer's compiler", found, f"nvcc {wanted} or newer", fix)
        elif version < (12, 9):
            found = f"nvcc {facts.nvcc}: enough for most; FlashInfer's dense b12x kernel needs 12.9"
            yield Finding("note", "FlashInfer's compiler", found, fix="CUDA 12.9 or newer")
        elif not missing:
            yield Finding("ok", "FlashInfer's compiler", f"nvcc {facts.nvcc}, ninja, C++ compiler")


def _tools_fix(facts: Facts) -> str:
    steps = []
    tools = facts.python.get("tools", {})
    if "nvcc" not in tools:
        pip = tools.get("pip_cuda_home")
        steps.append(
            f"set CUDA_HOME={pip}, where pip put it" if pip else "install the CUDA toolkit and set CUDA_HOME to it"
        )
    if "ninja" not in tools:
        steps.append("pip install ninja")
    if "c++" not in tools:
        steps.append("install g++ (build-essential)")
    return "\n".join(steps)


def _stale(facts: Facts) -> Iterator[Finding]:
    """FlashInfer's cache has its version in the path, so older ones only take space; another toolkit builds anew."""
    version, tools = facts.version("flashinfer-python"), facts.python.get("tools", {})
    if not version:
        return
    caches = facts.python.get("jit_cache", ())
    old = [cache for cache in caches if cache["version"] != version.partition("+")[0]]
    if old:
        told = [
            f"{cache['version'] or 'without a version'}, for {cache['archs']} ({cache['operations']} kernels)"
            for cache in old
        ]
        yield Finding(
            "note", "FlashInfer's old kernels", f"{'; '.join(told[:4])}: {version} does not use them",
            fix="they may be deleted from ~/.cache/flashinfer (or FLASHINFER_WORKSPACE_BASE)",
        )  # fmt: skip
    home = tools.get("cuda_home", "")
    others = sorted({built for cache in caches if cache not in old for built in cache["cuda_homes"] if built != home})
    if others:
        found = f"compiled kernels are of {listed(others, 3)}, and the toolkit is now {home or 'none'}"
        fix = "keep CUDA_HOME the same, or let the first start compile anew"
        yield Finding("note", "FlashInfer's compiled kernels", found, "the same toolkit", fix)


def _nvrtc(facts: Facts) -> Iterator[Finding]:
    """Our kernels come compiled; NVRTC serves where those do not fit."""
    packages = facts.python.get("packages", {})
    versions = [packages[name][-1] for name in packages if name.startswith("nvidia-cuda-nvrtc")]
    newest = max(versions, key=_numbers, default="")
    if not versions or "cuda-bindings" not in packages:
        fix = "pip install cuda-bindings nvidia-cuda-nvrtc (both come with a CUDA build of torch)"
        yield Finding(
            "note", "NVRTC", "not installed; our kernels come compiled, and need it where those do not fit", fix=fix
        )
    elif _numbers(newest) < (12, 8):
        yield Finding("note", "NVRTC", f"{newest} does not know sm_120a", "12.8 or newer", "a newer nvidia-cuda-nvrtc")
    else:
        runtime = [packages[name][-1] for name in packages if name.startswith("nvidia-cuda-runtime")]
        yield Finding("ok", "NVRTC", newest + (f", CUDA runtime {max(runtime, key=_numbers)}" if runtime else ""))


def _numbers(version: str) -> tuple[int, ...]:
    """(13, 0) of "13.0.88"; empty where it is no version."""
    parts = version.split(".")[:2]
    return tuple(int(part) for part in parts) if version and all(part.isdecimal() for part in parts) else ()


CHECKS = (
    Check("software.torch", _torch),
    Check("software.driver-for-torch", _driver),
    Check("software.archs", _archs),
    Check("software.jit", _jit),
    Check("software.jit-cache", _stale),
    Check("software.nvrtc", _nvrtc),
)
