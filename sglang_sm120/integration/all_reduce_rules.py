"""What --sm120-all-reduce asks for, and which servers it is not for: from settings alone, before weights are read."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sglang_sm120.errors import UnsupportedError
from sglang_sm120.integration.settings import in_use
from sglang_sm120.options import Sm120Options

NAMED = ("one-shot", "two-shot")
"""Choices that are our kernels or nothing."""

_STOCK_VARIABLE = "SGLANG_ENABLE_PCIE_IPC_ALLREDUCE"
_ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
_PROFILE = "--sm120-all-reduce-profile"


@dataclass(frozen=True)
class Obstacle:
    """Why our kernels, or those that were asked for, cannot serve: as an error's three parts."""

    found: str
    needed: str
    fix: str = ""

    def error(self, options: Sm120Options) -> UnsupportedError:
        """For a choice by name, or a profile."""
        flag, value = "--sm120-all-reduce", options.sm120_all_reduce
        if options.sm120_all_reduce_profile:
            flag, value = _PROFILE, options.sm120_all_reduce_profile
        drop = f"drop {flag}, which leaves the sums to SGLang where our kernels cannot serve"
        found = f"{flag} {value}: {self.found}"
        return UnsupportedError(found, self.needed, f"{self.fix}, or {drop}" if self.fix else drop)


def by_name(options: Sm120Options) -> bool:
    """Whether our kernels were asked for, by name or by a profile: they serve, or the server stops."""
    return options.sm120_all_reduce in NAMED or bool(options.sm120_all_reduce_profile)


def wanted(options: Sm120Options, view: Any) -> bool:
    """Whether our kernels are to serve if they can. view: SGLang's resolved settings."""
    return options.sm120_all_reduce in ("auto", *NAMED) and view.tp_size > 1


def require(options: Sm120Options, view: Any, environ: Mapping[str, str] | None = None) -> None:
    """For a choice by name, or a profile. In the launching process.

    Raises: UnsupportedError: these settings rule it out. ConfigError: the profile cannot be read, or is of another
        number of ranks.
    """
    choice, named = options.sm120_all_reduce, by_name(options)
    obstacle = None
    if named and view.tp_size == 1:
        obstacle = Obstacle("one tensor-parallel rank has nothing to sum", "--tp 2, 4 or 8")
    elif named:
        obstacle = _no_gpu() or uncovered(options, view, environ)
    elif choice == "stock" and view.tp_size > 1:
        obstacle = _no_gpu() or _stock_obstacle(view)
    if obstacle is not None:
        raise obstacle.error(options)
    if options.sm120_all_reduce_profile:
        _require_profile(options.sm120_all_reduce_profile, view.tp_size)


def _require_profile(path: str, world_size: int) -> None:
    """What can be said of the file before weights are read; the GPU and the model are asked in the schedulers."""
    from sglang_sm120.tune import comm_profile

    found = comm_profile.read(path)
    comm_profile.require_covers(found, path, world_size, found.hidden_size, found.dtype)


def uncovered(options: Sm120Options, view: Any, environ: Mapping[str, str] | None = None) -> Obstacle | None:
    """What of a server keeps our kernels out. On auto SGLang's own path serves it then."""
    from sglang_sm120.kernels.communication.all_reduce_rmsnorm.config import WORLD_SIZES

    environ = os.environ if environ is None else environ
    if view.tp_size not in WORLD_SIZES:
        return Obstacle(f"--tp {view.tp_size}", "a tensor-parallel size of 2, 4 or 8")
    if view.nnodes > 1:
        return Obstacle(f"--nnodes {view.nnodes}", "one host, whose GPUs map each other's memory")
    obstacle = _allocator(environ)
    if obstacle is not None:
        return obstacle
    if view.attn_dp_size > 1 or view.enable_dp_attention:
        return Obstacle("attention data parallelism", "attention over all tensor-parallel ranks")
    for flag, given in in_use(view, _FLAGS):
        return Obstacle(given, _FLAGS[flag], f"drop {flag}")
    return _p2p_disabled(environ) if options.sm120_all_reduce == "auto" else None


def of_environment(environ: Mapping[str, str]) -> list[Obstacle]:
    """What of the environment alone keeps our kernels out on auto. For `doctor`: imports neither torch nor SGLang."""
    return [obstacle for obstacle in (_allocator(environ), _p2p_disabled(environ)) if obstacle is not None]


def _allocator(environ: Mapping[str, str]) -> Obstacle | None:
    for name in _ALLOCATOR_VARIABLES:
        if "expandable_segments:true" in environ.get(name, "").replace(" ", "").lower():
            needed = (
                "ordinary segments: CUDA IPC, by which GPUs share memory, does not go together with expandable ones"
            )
            return Obstacle(f"{name}={environ[name]}", needed, f"take expandable_segments out of {name}")
    return None


def _p2p_disabled(environ: Mapping[str, str]) -> Obstacle | None:
    if environ.get("NCCL_P2P_DISABLE", "0") in ("", "0"):
        return None
    found = f"NCCL_P2P_DISABLE={environ['NCCL_P2P_DISABLE']}"
    return Obstacle(found, "GPUs that may reach each other's memory", "unset NCCL_P2P_DISABLE")


# A communicator is one order of calls: on one stream, or on streams that wait for each other.
_ONE_STREAM = "one reduction after the other: with this option two batches, or parts of one, run side by side"
_OTHER_WAY = "no other way of reducing that was asked for"
_FLAGS = {
    "--enable-two-batch-overlap": _ONE_STREAM,
    "--enable-single-batch-overlap": _ONE_STREAM,
    "--enable-pdmux": _ONE_STREAM,
    "--enable-deterministic-inference": "norms other than those that SGLang takes for this mode",
    "--enable-mscclpp": _OTHER_WAY,
    "--enable-symm-mem": _OTHER_WAY,
    "--elastic-ep-backend": "ranks that stay: memory is mapped once",
}


def turn_stock_on(options: Sm120Options) -> None:
    """In a scheduler, before SGLang makes its groups: with `stock`, FlashInfer's pcie_ipc as the user would."""
    if options.sm120_all_reduce == "stock":
        os.environ[_STOCK_VARIABLE] = "1"


def require_stock_is_on(options: Sm120Options, group: Any) -> None:
    """Raises UnsupportedError unless SGLang has made its pcie_ipc communicator: where it cannot it only warns."""
    communicator = group.pcie_ipc_comm
    if group.world_size > 1 and (communicator is None or communicator.disabled):
        found = "SGLang could not set up FlashInfer's pcie_ipc (its own warning above says why)"
        raise Obstacle(found, "GPUs on which it can be set up").error(options)


def _stock_obstacle(view: Any) -> Obstacle | None:
    if view.tp_size not in (2, 4, 8):
        return Obstacle(f"--tp {view.tp_size}", "a tensor-parallel size of 2, 4 or 8, which pcie_ipc has")
    if view.enable_deterministic_inference:
        flag = "--enable-deterministic-inference"
        return Obstacle(f"{flag}, with which SGLang leaves pcie_ipc off", "another mode", f"drop {flag}")
    try:
        from flashinfer.comm import PcieIpcAllReduceWorkspace  # noqa: F401
    except ImportError as error:
        found = f"FlashInfer's pcie_ipc cannot be imported ({error})"
        return Obstacle(found, "the FlashInfer that SGLang pins", "pip install flashinfer-python==0.7.2")
    return None


def _no_gpu() -> Obstacle | None:
    from sglang_sm120.testing.cpu_platform import is_active

    return Obstacle("this machine has no CUDA GPU", "a GPU for each rank, on one host") if is_active() else None
