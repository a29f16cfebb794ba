"""SGLang's own all-reduces with its residual add and RMSNorm behind, as baselines for `bench all-reduce`."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from sglang_sm120.errors import UnsupportedError
from sglang_sm120.integration.all_reduce_stock import PCIE_IPC_BYTES
from sglang_sm120.kernels.communication.all_reduce_rmsnorm.config import WORLD_SIZES
from sglang_sm120.tune.comm_profile import MSCCLPP_NAME
from sglang_sm120.tune.comm_stock import PCIE_IPC_NAME


@dataclass
class Baseline:
    """One all-reduce. covers: whether it serves a tensor. capture: to be entered around a graph's capture."""

    name: str
    covers: Callable[[Tensor], bool]
    all_reduce: Callable[[Tensor], Tensor]
    capture: Callable[[], contextlib.AbstractContextManager]

    def all_reduce_rmsnorm(self, x: Tensor, residual: Tensor, gamma: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """As SGLang's layers do it: the sum, then one kernel for the residual and the norm, in place."""
        from sgl_kernel import fused_add_rmsnorm

        total = self.all_reduce(x)
        fused_add_rmsnorm(total, residual, gamma, eps)
        return total, residual


def prepare(device: torch.device) -> tuple[list[Baseline], list[str]]:
    """The baselines of this rank, and why others are not there. A collective; the default group is gloo."""
    from sglang.srt.distributed.device_communicators.pynccl import PyNcclCommunicator
    from sglang.srt.runtime_context import get_parallel

    # All that they ask of SGLang's world group.
    world = SimpleNamespace(local_rank=dist.get_rank(), barrier=dist.barrier)
    get_parallel().override_permanently(world_group=world)
    group = dist.group.WORLD
    found, missing = [], []
    nccl = PyNcclCommunicator(group=group, device=device)
    nccl.disabled = False

    @contextlib.contextmanager
    def enabled() -> Iterator[None]:
        with nccl.change_state(enable=True):
            yield

    def by_nccl(x: Tensor) -> Tensor:
        with nccl.change_state(enable=True):
            return nccl.outplace_all_reduce(x)

    found.append(Baseline("nccl", lambda x: True, by_nccl, enabled))
    for name, make in _MAKERS.items():
        try:
            found.append(make(name, group, device))
        except UnsupportedError as error:
            missing.append(f"{name}: {error.found}")
        except Exception as error:  # of SGLang's JIT compiler, of symmetric memory: all say why
            missing.append(f"{name}: {type(error).__name__}: {str(error)[:300]}")
    return found, missing


def _custom_baseline(name: str, custom: Any) -> Baseline:
    if custom.disabled:
        raise _unsupported("SGLang turns it off on this machine")
    return Baseline(name, custom.should_custom_ar, custom.custom_all_reduce, custom.capture)


def _unsupported(found: str) -> UnsupportedError:
    return UnsupportedError(found, "a machine that has it", "measure without")


def _custom_v2(name: str, group: Any, device: torch.device) -> Baseline:
    """What SGLang uses where NVLink connects all GPUs."""
    from sglang.srt.distributed.device_communicators.custom_all_reduce_v2 import CustomAllReduceV2

    return _custom_baseline(name, CustomAllReduceV2(group=group, device=device))


def _custom(name: str, group: Any, device: torch.device) -> Baseline:
    """What SGLang uses between two GPUs on PCIe."""
    from sglang.srt.distributed.device_communicators.custom_all_reduce import CustomAllreduce

    return _custom_baseline(name, CustomAllreduce(group=group, device=device))


def _pcie_ipc(name: str, group: Any, device: torch.device) -> Baseline:
    """FlashInfer's, by SGLang's adapter. Its workspace is made, and its launches are tuned, at the first message."""
    if dist.get_world_size(group) not in WORLD_SIZES:
        raise _unsupported("TP 2, 4 or 8 and bfloat16 only")
    if importlib.util.find_spec("flashinfer") is None:
        raise _unsupported("FlashInfer is not installed")
    from sglang.srt.distributed.device_communicators.pcie_ipc_ar import PcieIpcCommunicator

    # The handshake needs a group of GPUs, the tuning one of hosts: as SGLang gives them.
    communicator = PcieIpcCommunicator(group=dist.new_group(backend="nccl"), device=device, cpu_group=group)
    if communicator.disabled:
        raise _unsupported("this FlashInfer does not have it")

    def covers(x: Tensor) -> bool:
        if x.dtype != torch.bfloat16 or x.numel() * x.element_size() > PCIE_IPC_BYTES:
            return False
        hidden = x.shape[-1]
        communicator.prepare(hidden=hidden, max_rows=max(1, PCIE_IPC_BYTES // (2 * hidden)))
        return communicator.should_pcie_ipc_ar(x)

    return Baseline(name, covers, communicator.pcie_ipc_all_reduce, contextlib.nullcontext)


def _mscclpp(name: str, group: Any, device: torch.device) -> Baseline:
    """What SGLang uses with --enable-mscclpp. It sums in place, and SGLang gives it a copy."""
    if importlib.util.find_spec("mscclpp") is None:
        raise _unsupported("not installed")
    from sglang.srt.distributed.device_communicators.pymscclpp import PyMscclppCommunicator

    communicator = PyMscclppCommunicator(group=group, device=device, group_name="tp", collectives={"allreduce"})
    if not communicator.available:
        raise _unsupported("SGLang turns it off on this machine")

    def enabled() -> contextlib.AbstractContextManager:
        return communicator.change_state(enable=True)

    def covers(x: Tensor) -> bool:
        with enabled():
            return communicator.should_mscclpp_allreduce(x)

    return Baseline(name, covers, lambda x: communicator.all_reduce(x.clone()), enabled)


_MAKERS: dict[str, Callable[[str, Any, torch.device], Baseline]] = {
    "sglang custom v2": _custom_v2,
    "sglang custom": _custom,
    PCIE_IPC_NAME: _pcie_ipc,
    MSCCLPP_NAME: _mscclpp,
}
