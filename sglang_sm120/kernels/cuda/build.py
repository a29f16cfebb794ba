"""Hashing, compiling and storing of CUDA C++ kernels. Standard library only; NVRTC (through cuda.bindings) on use.

A source is `kernel.cu` in an op's folder. It sees two folders' headers by bare name: `kernels/cuda/*.cuh` and the
`*.cuh` next to it. `tools/build_cubins.py` writes the prebuilt cubins, `module.py` chooses between them and NVRTC.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import lzma
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from sglang_sm120.errors import ConfigError, UnsupportedError

KERNELS = Path(__file__).resolve().parent.parent
SHARED_HEADERS = Path(__file__).resolve().parent
CUBINS = SHARED_HEADERS / "cubins"
MANIFEST = "manifest.json"
PREBUILT_ARCHS = ("sm_120a", "sm_121a")
_ARCH_SPECIFIC = {(9, 0): "sm_90a", (12, 0): "sm_120a", (12, 1): "sm_121a"}
_NVRTC_FIX = "pip install cuda-bindings nvidia-cuda-nvrtc (both come with a CUDA build of torch)"


def arch_name(capability: tuple[int, int]) -> str:
    """NVRTC's name for a compute capability: (12, 0) -> "sm_120a", whose code has the block-scaled mma."""
    major, minor = capability
    return _ARCH_SPECIFIC.get((major, minor), f"sm_{major}{minor}")


def sources() -> list[Path]:
    """Every op's kernel.cu, sorted."""
    return sorted(KERNELS.rglob("kernel.cu"))


def op_name(source: Path) -> str:
    """ "moe.fused_moe" for kernels/moe/fused_moe/kernel.cu; the file's stem for a source from elsewhere."""
    source = source.resolve()
    if source.is_relative_to(KERNELS):
        return ".".join(source.parent.relative_to(KERNELS).parts)
    return source.stem


def cubin_name(source: Path, arch: str) -> str:
    """File name of a prebuilt cubin, and its key in the manifest. Unrolled loops compress tenfold."""
    return f"{op_name(source)}-{arch}.cubin.xz"


def pack_cubin(cubin: bytes) -> bytes:
    """A cubin as it is stored."""
    return lzma.compress(cubin, preset=9)


def unpack_cubin(stored: bytes) -> bytes:
    """And back. Raises lzma.LZMAError."""
    return lzma.decompress(stored)


def headers(source: Path, pattern: str = "*.cuh") -> dict[str, Path]:
    """The headers that a source may include, by bare name.

    Raises:
        ConfigError: an op's own header has the name of a shared one.
    """
    shared = {path.name: path for path in sorted(SHARED_HEADERS.glob(pattern))}
    own = {path.name: path for path in sorted(source.resolve().parent.glob(pattern))}
    if source.resolve().parent != SHARED_HEADERS and (clash := sorted(shared.keys() & own.keys())):
        raise ConfigError(
            f"{source.parent} has its own {clash[0]}", "a name that kernels/cuda does not use", f"rename {clash[0]}"
        )
    return shared | own


def source_hash(source: Path, extra: Iterable[Path] = ()) -> str:
    """sha256 of a source, its headers and `extra` files: names and contents, not places."""
    digest = hashlib.sha256()
    for path in [source, *headers(source).values(), *sorted(extra)]:
        content = path.read_bytes()
        digest.update(f"{path.name} {len(content)}\n".encode() + content)
    return digest.hexdigest()


def options(arch: str, defines: tuple[str, ...] = ()) -> list[str]:
    return [f"--gpu-architecture={arch}", "--std=c++17", *(f"--define-macro={name}" for name in defines)]


def nvrtc_version() -> str:
    """ "13.5", of the NVRTC that would compile.

    Raises:
        UnsupportedError: cuda.bindings or the NVRTC library is not installed.
    """
    major, minor = _call(_nvrtc(), "nvrtcVersion")
    return f"{major}.{minor}"


def compile_cubin(source: Path, arch: str, defines: tuple[str, ...] = ()) -> bytes:
    """Compile a source for one architecture; needs no GPU. The same inputs give the same bytes.

    Raises:
        UnsupportedError: cuda.bindings or the NVRTC library is not installed.
        ConfigError: the source does not compile for this architecture; the message holds NVRTC's log.
    """
    nvrtc = _nvrtc()
    included = headers(source)
    program = _call(
        nvrtc,
        "nvrtcCreateProgram",
        source.read_bytes(),
        f"{op_name(source)}/{source.name}".encode(),
        len(included),
        [path.read_bytes() for path in included.values()],
        [name.encode() for name in included],
    )
    try:
        arguments = [option.encode() for option in options(arch, defines)]
        (error,) = nvrtc.nvrtcCompileProgram(program, len(arguments), arguments)
        if int(error):
            log = bytearray(_call(nvrtc, "nvrtcGetProgramLogSize", program))
            nvrtc.nvrtcGetProgramLog(program, log)
            raise ConfigError(
                f"{source} does not compile for {arch} ({error.name}):\n{log.decode(errors='replace').rstrip(chr(0))}",
                f"a source that NVRTC {nvrtc_version()} accepts for {arch}",
                "correct the source; for an unknown architecture, install a newer nvidia-cuda-nvrtc",
            )
        cubin = bytearray(_call(nvrtc, "nvrtcGetCUBINSize", program))
        _call(nvrtc, "nvrtcGetCUBIN", program, cubin)
        return bytes(cubin)
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def cached_cubin(source: Path, arch: str, defines: tuple[str, ...] = ()) -> bytes:
    """`compile_cubin` behind a cache on disk, named by the hash of all that goes in. Errors as there.

    The file ends with the sha256 of what precedes it; one that does not fit is compiled again. A cache that cannot be
    written to is done without.
    """
    key = [source_hash(source), nvrtc_version(), *options(arch, defines)]
    name = f"{op_name(source)}-{arch}-{hashlib.sha256(json.dumps(key).encode()).hexdigest()[:24]}.cubin"
    path = cache_dir() / name
    try:
        stored = path.read_bytes()
    except OSError:
        stored = b""
    if len(stored) > 32 and hashlib.sha256(stored[:-32]).digest() == stored[-32:]:
        return stored[:-32]
    cubin = compile_cubin(source, arch, defines)
    with contextlib.suppress(OSError):
        write_atomic(path, cubin + hashlib.sha256(cubin).digest())
    return cubin


def prebuilt_cubin(source: Path, arch: str) -> tuple[bytes | None, str]:
    """The shipped cubin of a source, or None; and, in words, which one or why none."""
    name = cubin_name(source, arch)
    try:
        entry = read_manifest().get(name)
    except (OSError, ValueError) as error:
        return None, f"the manifest of prebuilt cubins cannot be read ({error})"
    if entry is None:
        return None, f"there is no prebuilt cubin for {arch}"
    try:
        cubin = unpack_cubin((CUBINS / name).read_bytes())
    except (OSError, lzma.LZMAError) as error:
        return None, f"the prebuilt {name} cannot be read ({error})"
    if hashlib.sha256(cubin).hexdigest() != entry["sha256"]:
        return None, f"the prebuilt {name} is damaged: its sha256 is not the manifest's"
    if reason := stale(source, arch, entry):
        return None, f"the prebuilt {name} is stale: {reason}"
    return cubin, f"prebuilt {name}"


def stale(source: Path, arch: str, entry: dict[str, Any]) -> str:
    """Why a manifest entry does not belong to the source as it is now; "" when it does."""
    if entry.get("source_hash") != source_hash(source):
        return "the source or a header has changed since"
    if entry.get("options") != options(arch):
        return "it was compiled with other options"
    return ""


def read_manifest() -> dict[str, dict[str, Any]]:
    """File name of a cubin -> sha256, source_hash, nvrtc, options. Empty when there is no manifest.

    Raises:
        OSError, ValueError: it cannot be read, or is not JSON of that form.
    """
    path = CUBINS / MANIFEST
    if not path.exists():
        return {}
    manifest = json.loads(path.read_text())
    if not isinstance(manifest, dict) or not all(
        isinstance(entry, dict) and isinstance(entry.get("sha256"), str) for entry in manifest.values()
    ):
        raise ValueError("not a table of cubins")
    return manifest


def cache_dir() -> Path:
    """$XDG_CACHE_HOME/sglang-sm120/kernels, where XDG_CACHE_HOME is ~/.cache unless set."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "sglang-sm120" / "kernels"


def write_atomic(path: Path, content: bytes) -> None:
    """A reader sees the whole file or none, whoever else writes it.

    Raises:
        OSError: the folder cannot be made or written to.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def _nvrtc() -> Any:
    try:
        from cuda.bindings import nvrtc
    except ImportError as error:
        raise UnsupportedError(
            f"a kernel has to be compiled, and cuda.bindings cannot be imported ({error})",
            "cuda-bindings and the NVRTC library",
            _NVRTC_FIX,
        ) from error
    return nvrtc


def _call(nvrtc: Any, function: str, *arguments: Any) -> Any:
    try:
        error, *results = getattr(nvrtc, function)(*arguments)
    except (OSError, RuntimeError) as missing:  # the library is looked for on the first call
        raise UnsupportedError(
            f"a kernel has to be compiled, and NVRTC cannot be loaded ({missing})", "the NVRTC library", _NVRTC_FIX
        ) from missing
    if int(error):
        raise UnsupportedError(f"{function} failed: {error.name}", "a working NVRTC library", _NVRTC_FIX)
    return results[0] if len(results) == 1 else results
