"""torch, and what FlashInfer needs to compile its kernels: whether they are for these GPUs and this driver."""

from __future__ import annotations

from collections.abc import Iterator

from sglang_sm120.doctor.check import Check, listed, version_numbers
from sglang_sm120.doctor.checks_code import REINSTALL
from sglang_sm120.doctor.facts import Facts
from sglang_sm120.findings import Finding

# FlashInfer 0.7.2, compilation_context.py: 12.0 needs CUDA 12.8 and prefers 12.9; 12.1 needs 12.9.
_JIT_MINIMUM = {(12, 0): (12, 8), (12, 1): (12, 9)}


def _torch(facts: Facts) -> Iterator[Finding]:
    torch, has_gpu = facts.torch, bool(facts.driver.gpus)
    if torch.state == "failed" and torch.version:
        yield Finding(
            "fail", "torch", f"torch {torch.version} imports, and its process ends when CUDA starts: {torch.detail}",
            "GPUs that answer", "`sudo dmesg | grep -iE 'xid|nvrm'`; a driver and a torch that fit; reboot",
        )  # fmt: skip
    elif torch.state in ("failed", "missing"):
        installed = facts.version("torch")
        found = f"torch {installed} does not start: {torch.detail}" if installed else "not installed"
        yield Finding("fail", "torch", found, "a torch that imports", REINSTALL)
    elif torch.state == "hung" and not torch.version:
        found = "importing it takes more than a minute and a half"
        yield Finding("fail", "torch", found, "a torch that imports", "look at the disk it is on; then reinstall it")
    elif torch.state == "hung":
        yield Finding(
            "fail", "torch", f"torch {torch.version} hangs when it starts CUDA", "GPUs that answer",
            "`dmesg | grep -iE 'xid|nvrm'`; reboot",
        )  # fmt: skip
    elif torch.state == "ok" and not torch.cuda and has_gpu:
        yield Finding("fail", "torch", f"{torch.version} is a build without CUDA", "a CUDA build", REINSTALL)
    elif torch.cuda_error and has_gpu:
        fix = "install a newer driver, if that is what it says\nelse look at CUDA_VISIBLE_DEVICES and `nvidia-smi`"
        yield Finding(
            "fail", "torch", f"{torch.version} cannot use the GPUs: {torch.cuda_error}", "GPUs for torch", fix
        )
    elif torch.state == "ok" and torch.cuda:
        yield Finding("ok", "torch", f"{torch.version}, built with CUDA {torch.cuda}")
        yield from _unseen(facts)


def _unseen(facts: Facts) -> Iterator[Finding]:
    """GPUs that the driver has and CUDA does not. With MIG, CUDA has parts, and one of them at a time; those that are
    prohibited to it gpu.mode names."""
    seen, gpus = facts.torch.gpus or (), facts.driver.gpus
    chosen = "CUDA_VISIBLE_DEVICES" in facts.environ
    if (
        seen
        and len(seen) < len(gpus)
        and not chosen
        and not any(gpu.mig == "Enabled" or gpu.compute_mode == "Prohibited" for gpu in gpus)
    ):
        found = f"torch sees {len(seen)} of the {len(gpus)} GPUs that the driver has"
        fix = "`sudo dmesg | grep -iE 'xid|nvrm'`; nvidia-smi -q on the one that is missing; reboot"
        yield Finding("warn", "GPUs for torch", found, "all of them, or a choice by CUDA_VISIBLE_DEVICES", fix)


def _driver(facts: Facts) -> Iterator[Finding]:
    """Within one major version of CUDA an older driver runs newer code, except PTX, which it would have to compile."""
    built, driver = version_numbers(facts.torch.cuda), version_numbers(facts.driver.cuda)
    if not built or not driver:
        return
    said = f"driver {facts.driver.version} is for CUDA {facts.driver.cuda}, torch was built with {facts.torch.cuda}"
    if driver[0] < built[0] and facts.torch.gpus:  # CUDA's compat libraries stand in for the driver's
        yield Finding("note", "driver for torch", f"{said}; torch sees the GPUs all the same, by compat libraries")
    elif driver[0] < built[0]:
        yield Finding(
            "fail", "driver for torch", said, f"a driver for CUDA {built[0]}.0 or newer", "install a newer driver"
        )
    elif driver < built:
        yield Finding(
            "note",
            "driver for torch",
            f"{said}: within one major version its machine code runs, PTX does not",
            fix="a newer driver, where something comes as PTX alone (software.ready-code)",
        )


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
    version = version_numbers(facts.nvcc)
    if not version:
        return
    driver = version_numbers(facts.driver.cuda)
    if driver and driver[0] < version[0]:
        found = f"nvcc {facts.nvcc} compiles for a newer major version of CUDA than the driver's, {facts.driver.cuda}"
        fix = f"a newer driver; or set CUDA_HOME to a toolkit of CUDA {driver[0]}"
        yield Finding("fail", "FlashInfer's compiler", found, "nvcc of the driver's major version, or older", fix)
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


CHECKS = (
    Check("software.torch", _torch),
    Check("software.driver-for-torch", _driver),
    Check("software.jit", _jit),
    Check("software.jit-cache", _stale),
)
