"""SGLang's own ways to sum, each where the host's profile has it as the fastest, as far as a server can follow it.

What is there without us is NCCL, and a custom all-reduce where SGLang turns it on. FlashInfer's pcie_ipc is made here.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from sglang_sm120.errors import UnsupportedError
from sglang_sm120.integration.all_reduce_setup import clipped, exchange_of
from sglang_sm120.kernels.communication.agreement import agree
from sglang_sm120.kernels.communication.all_reduce_rmsnorm import config
from sglang_sm120.kernels.communication.all_reduce_rmsnorm.config import Range
from sglang_sm120.tune import comm_stock
from sglang_sm120.tune.comm_profile import CommProfile

logger = logging.getLogger(__name__)

PCIE_IPC_BYTES = 2 << 20
"""The largest message that pcie_ipc is measured with and serves: its workspace grows with it. Guess: decode sends
less."""


class PcieIpc:
    """SGLang's PcieIpcCommunicator, for the sizes that a profile gives to it."""

    def __init__(self, communicator: Any, ranges: Sequence[Range]) -> None:
        """ranges: of `comm_stock.ranges`, one of them at least PCIE_IPC's."""
        self._communicator, self._ranges = communicator, tuple(ranges)

    @property
    def disabled(self) -> bool:
        return self._communicator.disabled

    def should_pcie_ipc_ar(self, inp: Tensor) -> bool:
        """By size, dtype and layout, and so the same on every rank."""
        named = config.choose(self._ranges, inp.numel() * inp.element_size()) == comm_stock.PCIE_IPC
        return named and not self.disabled and self._communicator.should_pcie_ipc_ar(inp)

    def pcie_ipc_all_reduce(self, inp: Tensor) -> Tensor | None:
        return self._communicator.pcie_ipc_all_reduce(inp)

    def prepare(self, *, hidden: int, max_rows: int | None = None) -> None:
        """Before graphs are captured. The workspace holds what the profile gives, whatever decode's widest batch is."""
        largest = max(end for _, end in comm_stock.spans(self._ranges, comm_stock.PCIE_IPC))
        self._communicator.prepare(hidden=hidden, max_rows=max(1, largest // (2 * hidden)))

    def destroy(self) -> None:
        self._communicator.destroy()


def follow(profile: CommProfile | None, group: Any) -> PcieIpc | None:
    """pcie_ipc, if the profile gives it sums without a norm and it can be made; a line for what cannot be followed.

    A collective. group: SGLang's, without a pcie_ipc of its own.
    """
    if profile is None:
        return None
    ranges = comm_stock.ranges(profile, False, with_mscclpp=False)
    made, lines = None, []
    small = clipped(ranges, PCIE_IPC_BYTES)
    sizes = _sizes(small, comm_stock.PCIE_IPC)
    if sizes:
        try:
            made = PcieIpc(_made(group), small)
            lines.append(f"FlashInfer's pcie_ipc serves {sizes}, as the profile says")
        except UnsupportedError as error:
            lines.append(f"the profile has pcie_ipc as the fastest for {sizes}, but {error.found}")
    custom_is_on = group.ca_comm is not None and not group.ca_comm.disabled
    sizes = _sizes(ranges, comm_stock.NCCL)
    if sizes and custom_is_on:
        lines.append(f"the profile has NCCL as the fastest for {sizes}, but SGLang asks its custom all-reduce first")
    sizes = _sizes(ranges, comm_stock.CUSTOM)
    if sizes and not custom_is_on:
        lines.append(f"the profile has SGLang's custom all-reduce as the fastest for {sizes}, but SGLang leaves it off")
    sizes = _sizes(comm_stock.ranges(profile, False), comm_stock.MSCCLPP)
    if sizes:
        lines.append(
            f"the profile has MSCCL++ as the fastest for {sizes}, but it goes with --enable-mscclpp, with which our "
            "kernels do not serve"
        )
    if group.rank_in_group == 0:
        for line in lines:
            logger.info("sglang-sm120: all-reduce: %s", line)
    return made


def _made(group: Any) -> Any:
    """SGLang's communicator on every rank. Raises UnsupportedError if one cannot have it."""
    made: list[Any] = []

    def make() -> None:
        from sglang.srt.distributed.device_communicators.pcie_ipc_ar import PcieIpcCommunicator

        made.append(PcieIpcCommunicator(group=group.device_group, device=group.device, cpu_group=group.cpu_group))
        if made[0].disabled:
            raise RuntimeError("SGLang turns it off here")

    agree(exchange_of(group), "it cannot be made", make)
    return made[0]


def _sizes(ranges: Sequence[Range], name: str) -> str:
    """For the log: "8 to 64 KiB, 256 to 512 KiB"."""
    spans = comm_stock.spans(ranges, name)
    return ", ".join(f"{start / 1024:.4g} to {end / 1024:.4g} KiB" for start, end in spans)
