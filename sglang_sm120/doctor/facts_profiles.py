"""What `tune` wrote for this machine, as its own readers see it. Imports torch, so ask only where torch starts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from sglang_sm120 import __version__
from sglang_sm120.errors import ConfigError


def read(gpus: Sequence[Mapping[str, Any]], driver: str) -> list[dict[str, str]]:
    """The profile of MoE layers, and that of the all-reduce where there are several GPUs.

    Args:
        gpus: name, capability and multiprocessors of each, as torch named them; not asked again.
        driver: its version.

    Returns:
        For each kind: kind; path; state, "none", "ok", "unreadable" or "elsewhere"; detail, of what it holds or why
        it is not used.
    """
    try:
        import torch

        from sglang_sm120.runners import profile
        from sglang_sm120.tune import comm_profile
    except Exception as error:  # torch, or what the runners need of it
        return [{"kind": "MoE", "path": "", "state": "unreadable", "detail": f"{type(error).__name__}: {error}"}]
    first = gpus[0]
    machine = profile.Machine(
        gpu=first["name"],
        capability=".".join(map(str, first["capability"])),
        multiprocessors=first["multiprocessors"],
        driver=driver,
        torch=str(torch.__version__),  # the metadata may leave "+cu130" out
        triton=_installed("triton"),
        flashinfer=_installed("flashinfer-python"),
        sglang_sm120=__version__,
    )

    def moe(path: Path) -> tuple[str | None, str]:
        of = profile.read(path)
        counts = [str(len(layer.points)) for layer in of.layers]
        return of.machine.mismatch(machine), f"{len(of.layers)} layer shapes at {', '.join(counts)} token counts"

    def comm(path: Path) -> tuple[str | None, str]:
        of = comm_profile.read(path)
        return of.machine.mismatch(machine), f"{of.world_size} GPUs, hidden size {of.hidden_size}"

    found = [_one("MoE", profile.default_path(machine.gpu), moe)]
    for count in (2, 4, 8):
        path = comm_profile.default_path(count, machine.gpu)
        if count == len(gpus) or path.exists():
            found.append(_one(f"all-reduce over {count}", path, comm))
    return found


def _one(kind: str, path: Path, look: Any) -> dict[str, str]:
    entry = {"kind": kind, "path": str(path)}
    if not path.exists():
        return entry | {"state": "none", "detail": ""}
    try:
        mismatch, detail = look(path)
    except ConfigError as error:
        return entry | {"state": "unreadable", "detail": error.found}
    return entry | ({"state": "elsewhere", "detail": mismatch} if mismatch else {"state": "ok", "detail": detail})


def _installed(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
