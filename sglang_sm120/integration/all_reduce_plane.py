"""Our all-reduce over one tensor-parallel group of SGLang's: on its GPUs, or with plain torch on the CPU.

Every rank makes the same calls in the same order, so what is asked of a tensor here is what all ranks have in common:
shape, dtype and layout.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sglang_sm120.kernels.communication.all_reduce_rmsnorm import config
from sglang_sm120.kernels.communication.all_reduce_rmsnorm.api import Communicator, Range, reference
from sglang_sm120.tune.comm_profile import CommProfile

logger = logging.getLogger(__name__)


class Plane(ABC):
    """All-reduce over one group. Its calls are one order: one stream, or streams that wait for each other."""

    dtypes: tuple[torch.dtype, ...]
    device_type: str

    def __init__(self, group: Any, ranges: Sequence[Range]) -> None:
        """group: SGLang's GroupCoordinator. ranges: which algorithm serves which size."""
        self.group, self.ranges = group, tuple(ranges)
        self.profile: CommProfile | None = None  # that they were chosen by
        self._said_first = False

    def takes(self, x: Tensor, *, norm: bool = False) -> bool:
        """Whether `all_reduce(x)`, or with `norm` the fused one, serves this tensor."""
        return (
            x.dtype in self.dtypes
            and x.device.type == self.device_type
            and x.is_contiguous()
            and (x.dim() == 2 or not norm)
            and self.algorithm(x.shape, norm=norm) is not None
        )

    def all_reduce(self, x: Tensor) -> Tensor:
        """A new tensor with the sum of all ranks' x, which `takes` has accepted."""
        return self._sum(_aligned(x))

    def all_reduce_rmsnorm(
        self, x: Tensor, residual: Tensor, gamma: Tensor, eps: float, *, gamma_offset: float = 0.0
    ) -> tuple[Tensor, Tensor]:
        """(norm of the sum plus residual, the sum plus residual), as new tensors. Weight: gamma + gamma_offset."""
        if not self._said_first:
            self._said_first = True
            algorithm = self.algorithm(x.shape, norm=True)
            logger.info("sglang-sm120: first fused all-reduce: %d x %d by %s", x.shape[0], x.shape[1], algorithm)
        return self._fused(_aligned(x), _aligned(residual), gamma, eps, gamma_offset)

    @abstractmethod
    def algorithm(self, shape: Sequence[int], *, norm: bool = False) -> str | None:
        """What serves a tensor of this shape, or None."""

    @abstractmethod
    def describe(self) -> str:
        """For the log: what serves which size, and where."""

    @abstractmethod
    def check(self) -> None:
        """Raise PeerLostError if a kernel has given up waiting. Right from any thread."""

    @abstractmethod
    def close(self) -> None:
        """Give the memory back; a collective. No call may follow."""

    @abstractmethod
    def _sum(self, x: Tensor) -> Tensor: ...

    @abstractmethod
    def _fused(
        self, x: Tensor, residual: Tensor, gamma: Tensor, eps: float, gamma_offset: float
    ) -> tuple[Tensor, Tensor]: ...


class GpuPlane(Plane):
    """By our kernels, over memory that the group's GPUs share."""

    dtypes = (torch.bfloat16, torch.float16)
    device_type = "cuda"

    def __init__(self, group: Any, communicator: Communicator, profile: CommProfile | None = None) -> None:
        super().__init__(group, communicator.ranges)
        self._communicator, self.profile = communicator, profile

    def algorithm(self, shape: Sequence[int], *, norm: bool = False) -> str | None:
        return self._communicator.algorithm(shape, norm=norm)

    def describe(self) -> str:
        return f"{_describe(self.ranges)}; windows of {self._communicator.window.num_bytes / 2**20:.1f} MiB"

    def check(self) -> None:
        self._communicator.check()

    def close(self) -> None:
        self._communicator.close()

    def _sum(self, x: Tensor) -> Tensor:
        return self._communicator.all_reduce(x)

    def _fused(
        self, x: Tensor, residual: Tensor, gamma: Tensor, eps: float, gamma_offset: float
    ) -> tuple[Tensor, Tensor]:
        return self._communicator.all_reduce_rmsnorm(x, residual, gamma, eps, gamma_offset=gamma_offset)


class HostPlane(Plane):
    """On the CPU, for emulation: gathers over SGLang's group, then the reference. The same bits on all ranks."""

    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    device_type = "cpu"

    def algorithm(self, shape: Sequence[int], *, norm: bool = False) -> str | None:
        # As on a GPU, where an element has two bytes: the same calls go the same ways.
        elements = torch.Size(shape).numel()
        return None if elements == 0 or elements % config.VECTOR else config.choose(self.ranges, 2 * elements)

    def describe(self) -> str:
        return f"{_describe(self.ranges)}; plain torch on the CPU, emulated"

    def check(self) -> None:
        pass

    def close(self) -> None:
        pass

    def _sum(self, x: Tensor) -> Tensor:
        return reference.all_reduce(self._gathered(x))

    def _fused(
        self, x: Tensor, residual: Tensor, gamma: Tensor, eps: float, gamma_offset: float
    ) -> tuple[Tensor, Tensor]:
        return reference.all_reduce_rmsnorm(self._gathered(x), residual, gamma, eps, gamma_offset=gamma_offset)

    def _gathered(self, x: Tensor) -> list[Tensor]:
        parts = [torch.empty_like(x) for _ in range(self.group.world_size)]
        # As bytes: gloo does not know every dtype.
        into = [part.view(torch.uint8) for part in parts]
        torch.distributed.all_gather(into, x.view(torch.uint8), group=self.group.device_group)
        return parts


def _aligned(x: Tensor) -> Tensor:
    """Addresses may differ from rank to rank, so one that the kernels cannot take must not change who serves."""
    return x if x.data_ptr() % 16 == 0 else x.clone()


def _describe(ranges: Sequence[Range]) -> str:
    return ", ".join(f"{entry.algorithm} up to {entry.max_bytes / 1024:g} KiB" for entry in ranges)
