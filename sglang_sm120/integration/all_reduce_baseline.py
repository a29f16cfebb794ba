"""SGLang's own all-reduces with its residual add and RMSNorm behind, as baselines for `bench all-reduce`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


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
    for name, make in (("sglang custom v2", _custom_v2), ("sglang custom", _custom)):
        try:
            found.append(_baseline(name, make(group, device)))
        except Exception as error:  # of SGLang's JIT compiler, of symmetric memory: all say why
            missing.append(f"{name}: {type(error).__name__}: {str(error)[:300]}")
    return found, missing


def _baseline(name: str, custom: Any) -> Baseline:
    if custom.disabled:
        raise RuntimeError("SGLang turns it off on this machine")
    return Baseline(name, custom.should_custom_ar, custom.custom_all_reduce, custom.capture)


def _custom_v2(group: Any, device: torch.device) -> Any:
    """What SGLang uses where NVLink connects all GPUs."""
    from sglang.srt.distributed.device_communicators.custom_all_reduce_v2 import CustomAllReduceV2

    return CustomAllReduceV2(group=group, device=device)


def _custom(group: Any, device: torch.device) -> Any:
    """What SGLang uses between two GPUs on PCIe."""
    from sglang.srt.distributed.device_communicators.custom_all_reduce import CustomAllreduce

    return CustomAllreduce(group=group, device=device)
