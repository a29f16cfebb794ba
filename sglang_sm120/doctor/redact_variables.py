"""Which environment variables a report shows the values of: those that are known to be harmless, and plain numbers."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from sglang_sm120.doctor import redact_paths
from sglang_sm120.options import OPTIONS

SECRET = re.compile(r"key|token|secret|passw|passphrase|pwd|credential|auth|cookie|login|_pin(?:_|$)", re.IGNORECASE)
"""In a name: the value is blanked, whatever it is."""

_BLANK = "[...]"
_SWITCH = re.compile(r"[01]|true|false|yes|no|on|off", re.IGNORECASE)
_NUMBER = re.compile(r"-?\d{1,7}(?:\.\d{1,4})?")
_VERSION = re.compile(r"\d[\w.+-]{0,30}")

# Names whose values say how a machine is set up, and cannot well say whose it is.
_KNOWN = frozenset(
    [
        *(f"NCCL_{name}" for name in (
            "ALGO", "BUFFSIZE", "CHECKS_DISABLE", "CROSS_NIC", "CUMEM_ENABLE", "CUMEM_HOST_ENABLE", "DEBUG",
            "DEBUG_SUBSYS", "DMABUF_ENABLE", "GRAPH_MIXING_SUPPORT", "GRAPH_REGISTER", "IB_DISABLE",
            "IGNORE_CPU_AFFINITY", "LAUNCH_MODE", "MAX_CTAS", "MAX_NCHANNELS", "MIN_CTAS", "MIN_NCHANNELS",
            "MNNVL_ENABLE", "NET_GDR_LEVEL", "NET_GDR_READ", "NTHREADS", "NVLS_ENABLE", "P2P_DIRECT_DISABLE",
            "P2P_DISABLE", "P2P_LEVEL", "PROTO", "SHM_DISABLE", "SOCKET_FAMILY", "VERSION",
        )),
        *(f"CUDA_{name}" for name in (
            "CACHE_DISABLE", "CACHE_MAXSIZE", "DEVICE_MAX_CONNECTIONS", "DEVICE_ORDER", "FORCE_PTX_JIT",
            "LAUNCH_BLOCKING", "MODULE_DATA_LOADING", "MODULE_LOADING", "SCALE_LAUNCH_QUEUES", "VERSION",
            "VISIBLE_DEVICES",
        )),
        "FLASHINFER_CUDA_ARCH_LIST", "FLASHINFER_DISABLE_VERSION_CHECK", "FLASHINFER_JIT_DEBUG",
        "FLASHINFER_JIT_VERBOSE", "FLASHINFER_LOGLEVEL", "FLASHINFER_NVCC_THREADS",
        "NVIDIA_DRIVER_CAPABILITIES", "NVIDIA_REQUIRE_CUDA", "NVIDIA_VISIBLE_DEVICES", "OMP_NUM_THREADS",
        "OMP_PROC_BIND", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_NO_CUDA_MEMORY_CACHING",
        "SGLANG_ENABLE_PCIE_IPC_ALLREDUCE", "SGLANG_PLATFORM", "SGLANG_PLUGINS", "TORCH_CUDA_ARCH_LIST",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_AVOID_RECORD_STREAMS", "TORCH_NCCL_BLOCKING_WAIT",
    ]
)  # fmt: skip
_PATHS = frozenset(
    [
        "CUDA_HOME", "CUDA_PATH", "CUDA_CACHE_PATH", "CXX", "FLASHINFER_NVCC", "FLASHINFER_WORKSPACE_BASE",
        "LD_LIBRARY_PATH", "LD_PRELOAD", "PYTHONPATH", "SGLANG_CACHE_DIR", "TORCH_EXTENSIONS_DIR", "TORCH_HOME",
        "TRITON_CACHE_DIR", "TRITON_HOME", "TRITON_PTXAS_PATH", "XDG_CACHE_HOME",
    ]
)  # fmt: skip
_DEVICES = re.compile(r"\b(?:MIG-)?(?:GPU|MIG|GI|CI)-[0-9a-f][0-9a-f/-]*", re.IGNORECASE)


def variables(environ: Mapping[str, str], redact: Callable[[str], str]) -> dict[str, str]:
    """The environment as a report shows it; names stay.

    Args:
        redact: what takes addresses, UUIDs and the like out of a value that stays.
    """
    ours = {option.env for option in OPTIONS}
    numbers: dict[str, int] = {}

    def numbered(match: re.Match[str]) -> str:
        """Which of the GPUs it is, so that two stay two."""
        return f"[uuid {numbers.setdefault(match[0].lower(), len(numbers) + 1)}]"

    def value(name: str, given: str) -> str:
        if SECRET.search(name):
            return _BLANK if given else given
        if _SWITCH.fullmatch(given) or not given:
            return given
        if name in _PATHS:
            return ":".join(_piece(piece, redact) for piece in given.split(":"))
        if name in _KNOWN or name in ours:
            return _whole(_DEVICES.sub(numbered, given), redact)
        if name.startswith(("SGLANG_", "SGL_")):  # so many that anything may be among them
            return _BLANK
        plain = _NUMBER.fullmatch(given) or (name.endswith("_VERSION") and _VERSION.fullmatch(given))
        return redact(given) if plain else _BLANK

    return {name: value(name, given) for name, given in environ.items()}


def _whole(text: str, redact: Callable[[str], str]) -> str:
    return redact_paths.blanked(text) if text.startswith("/") else redact(text)


def _piece(piece: str, redact: Callable[[str], str]) -> str:
    """One entry of a list of paths; a path that is not absolute may be anything."""
    if piece.startswith("/") or re.fullmatch(r"[\w.+-]*", piece):
        return _whole(piece, redact)
    return _BLANK
