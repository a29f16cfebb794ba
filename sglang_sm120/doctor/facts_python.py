"""What of the Python that serves is known without importing anything foreign: packages, their device code, tools."""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from sglang_sm120.doctor import facts_fatbin
from sglang_sm120.integration.check import check_tree
from sglang_sm120.kernels.cuda import build

_ARCH_LIMIT_S = 4.0
_PINNED = ("torch", "flashinfer-python", "sglang-kernel", "nvidia-cutlass-dsl", "transformers")
_SHOWN = re.compile(
    r"torch|triton|flashinfer|sglang|sgl-|nvidia-cu(?:da|tlass)|nvidia-nccl|nvidia-nvshmem|cuda-|b12x|nccl|mscclpp|deep-|ninja|numpy|transformers|safetensors|"
    r"tilelang|xgrammar|flash-|quack|apache-tvm|vllm|msgspec|rich|psutil"
)
_DEVICE_CODE = ("sglang-kernel", "sgl-kernel", "flashinfer-jit-cache")


def gather(environ: Mapping[str, str], *, quick: bool) -> dict[str, Any]:
    """Plain data, as a recording holds it. quick: leaves out what opens large files or searches folders.

    Returns:
        version; packages: name -> versions, in the order of Python's path, so the first is what is imported; places:
        name -> the folders of those, where there are several; entry_points; pins: what SGLang asks for exactly;
        b12x_owners: distributions whose list of files has the package b12x; mscclpp: whether it is there; and unless
        quick: sglang_tree, hook_problems; archs: distribution -> names of architectures; tools: name -> path of it;
        jit_cache. unreadable: part -> why, of those that are left empty since reading them failed.
    """
    unreadable: dict[str, str] = {}

    def part(name: str, read: Callable[[], Any], default: Any) -> Any:
        """Other people's packages and import hooks are asked, and one that is damaged raises anything."""
        try:
            return read()
        except Exception as error:
            unreadable[name] = f"{type(error).__name__}: {error}"
            return default

    packages, places, owners = part("packages", _packages, ({}, {}, []))
    facts: dict[str, Any] = {
        "version": platform.python_version(),
        "packages": packages,
        "places": places,
        "entry_points": part("entry points", _entry_points, []),
        "pins": part("requirements of SGLang", lambda: dict(_pins()), {}),
        "b12x_owners": owners,
        "mscclpp": part("mscclpp", lambda: importlib.util.find_spec("mscclpp") is not None, False),
    }
    if not quick:
        facts |= part("source of SGLang", lambda: _hooks(packages), {})
        facts["archs"] = part("compiled code", lambda: _all_archs(packages), {})
        facts["tools"] = part("compilers", lambda: _tools(environ), {})
        facts["jit_cache"] = part("FlashInfer's cache", lambda: _jit_cache(environ), [])
    if unreadable:
        facts["unreadable"] = unreadable
    return facts


def _entry_points() -> list[str]:
    return [point.value for point in metadata.entry_points(group="sglang.srt.plugins") if point.name == "sm120"]


def sglang_tree() -> Path | None:
    """The folder of the installed package `sglang`, found without importing it."""
    return next((Path(folder) for folder in _folders("sglang")), None)


def _folders(package: str) -> Iterator[str]:
    """The folders of a package, or of one inside it such as "nvidia.cu13"; none where finding them fails.

    Nothing is imported: Python's own search for a name with a dot imports what is before it, and that may do anything.
    """
    first, *rest = package.split(".")
    try:
        spec = importlib.util.find_spec(first)
        roots = [str(root) for root in (spec.submodule_search_locations if spec else None) or ()]
    except Exception:  # a broken import hook; a namespace package asks the hooks again
        return
    for root in roots:
        folder = os.path.join(root, *rest)
        if os.path.isdir(folder):
            yield folder


def normal(name: str) -> str:
    """A distribution's name as the index compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def cuda_home(environ: Mapping[str, str]) -> str:
    """The toolkit that FlashInfer 0.7.2 builds with, in the order of its `get_cuda_path`; empty where there is none."""
    given = environ.get("CUDA_HOME") or environ.get("CUDA_PATH")
    if given:
        return given
    program = shutil.which("nvcc")
    if program is not None:
        return str(Path(program).parent.parent)
    return "/usr/local/cuda" if os.path.isdir("/usr/local/cuda") else ""


def nvcc_path(environ: Mapping[str, str]) -> str:
    """The compiler that FlashInfer starts, or empty where there is none."""
    given, home = environ.get("FLASHINFER_NVCC", ""), cuda_home(environ)
    path = given or (f"{home}/bin/nvcc" if home else "")
    return path if path and shutil.which(path) else ""


def _packages() -> tuple[dict[str, list[str]], dict[str, list[str]], list[str]]:
    """Versions, the folders of packages that have several, and the owners of b12x; as `gather` says."""
    found: dict[str, list[str]] = {}
    places: dict[str, list[str]] = {}
    owners = []
    for distribution in metadata.distributions():
        try:
            name, version = normal(distribution.metadata["Name"] or ""), distribution.version
        except Exception:  # damaged metadata
            continue
        if not name or not _SHOWN.match(name) or version in found.get(name, ()):
            continue  # an editable installation is listed twice
        found.setdefault(name, []).append(str(version))
        places.setdefault(name, []).append(_place(distribution))
        if name in ("b12x", "flashinfer-python") and _owns(distribution, "b12x/__init__.py"):
            owners.append(name)
    several = {name: folders for name, folders in sorted(places.items()) if len(folders) > 1}
    return dict(sorted(found.items())), several, sorted(owners)


def _place(distribution: metadata.Distribution) -> str:
    try:
        return os.path.abspath(str(distribution.locate_file("")))
    except (OSError, ValueError, NotImplementedError):
        return ""


def _hooks(packages: Mapping[str, list[str]]) -> dict[str, Any]:
    """The hook table against the installed source, which is not imported."""
    tree, versions = sglang_tree(), packages.get("sglang")
    if tree is None or not versions:
        return {}
    problems = check_tree(tree, versions[0])
    return {"sglang_tree": str(tree), "hook_problems": [[each.hook, each.found, each.needed] for each in problems]}


def _owns(distribution: metadata.Distribution, path: str) -> bool:
    try:
        return any(file.as_posix() == path for file in distribution.files or ())
    except (OSError, ValueError):
        return False


def _pins() -> Iterator[tuple[str, str]]:
    """Packages that SGLang asks for in exactly one version."""
    try:
        required = metadata.requires("sglang") or []
    except metadata.PackageNotFoundError:
        return
    for line in required:
        asked, _, marker = line.partition(";")
        match = re.fullmatch(r"\s*([A-Za-z0-9._-]+)(?:\[[^\]]*\])?\s*\(?==\s*([^,()\s]+)\)?\s*", asked)
        if match and normal(match[1]) in _PINNED and "extra" not in marker:
            yield normal(match[1]), match[2]


def _all_archs(packages: Mapping[str, list[str]]) -> dict[str, list[str]]:
    """Of the packages that bring compiled kernels, this one too; and of torch's own, should torch not start."""
    found = {"sglang-sm120": _shipped()}
    for name in packages:
        if name.startswith(_DEVICE_CODE) or name == "torch":
            libraries = list(_libraries(name))
            archs, complete = facts_fatbin.read_archs(libraries, _ARCH_LIMIT_S)
            if libraries:
                found[name] = sorted(archs) + ([] if complete else ["..."])
    return found


def _shipped() -> list[str]:
    """The architectures for which every kernel of this package came compiled, from its source as it is."""
    try:
        manifest, sources = build.read_manifest(), build.sources()
        return [
            arch
            for arch in build.PREBUILT_ARCHS
            if all(
                (entry := manifest.get(build.cubin_name(source, arch))) and not build.stale(source, arch, entry)
                for source in sources
            )
        ]
    except (OSError, ValueError):
        return []


def _libraries(name: str) -> Iterator[Path]:
    try:
        distribution = metadata.distribution(name)
        files = distribution.files or []
    except (metadata.PackageNotFoundError, OSError, ValueError):
        return
    for file in files:
        if ".so" in file.name and (name != "torch" or "torch_cuda" in file.name):
            yield Path(str(distribution.locate_file(file)))


def _tools(environ: Mapping[str, str]) -> dict[str, str]:
    """Name -> path of what FlashInfer's JIT needs; missing ones are left out. libcudart: what the linker looks for."""
    home = cuda_home(environ)
    paths = {
        "cuda_home": home,
        "nvcc": nvcc_path(environ),
        "ninja": shutil.which("ninja") or "",
        "c++": shutil.which(environ.get("CXX", "c++")) or "",
    }
    for folder in ("lib64", "lib"):
        library = f"{home}/{folder}/libcudart.so"
        if home and os.path.exists(library):
            paths.setdefault("libcudart", library)
    for package in ("nvidia.cu13", "nvidia.cuda_nvcc"):  # pip's compiler, which CUDA_HOME may point to
        for root in _folders(package):
            if os.path.exists(f"{root}/bin/nvcc"):
                paths.setdefault("pip_cuda_home", root)
    return {name: path for name, path in paths.items() if path}


def _jit_cache(environ: Mapping[str, str]) -> list[dict[str, Any]]:
    """FlashInfer's caches: version (empty: from before there was one in the path), archs, number of operations, and the
    toolkits that they were built with."""
    try:
        base = Path(environ.get("FLASHINFER_WORKSPACE_BASE") or Path.home()) / ".cache" / "flashinfer"
        folders = sorted([*base.glob("*/cached_ops"), *base.glob("*/*/cached_ops")])
    except (OSError, RuntimeError):  # unreadable; a user without a home
        return []
    found = []
    for folder in folders:
        inside = folder.parent.relative_to(base).parts
        try:
            operations = [entry for entry in sorted(folder.iterdir()) if entry.is_dir()][:2000]
        except OSError:
            continue
        homes = {home for entry in operations[:50] for home in _cuda_home_of(entry / "build.ninja")}
        found.append(
            {
                "version": inside[0] if len(inside) > 1 else "",
                "archs": inside[-1],
                "operations": len(operations),
                "cuda_homes": sorted(homes),
            }
        )
    return found


def _cuda_home_of(ninja: Path) -> Iterator[str]:
    try:
        with ninja.open(errors="replace") as file:
            for _, line in zip(range(20), file, strict=False):
                if line.startswith("cuda_home = "):
                    yield line.removeprefix("cuda_home = ").strip()
    except OSError:
        return
