"""Our all-reduce in the place that SGLang has for one of PCIe: for sums without a norm behind them.

`GroupCoordinator.pcie_ipc_comm` is asked by `all_reduce`, eagerly and inside a graph, after `ca_comm` and before NCCL.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from torch import Tensor

from sglang_sm120.integration.all_reduce_plane import Plane

logger = logging.getLogger(__name__)


class Slot:
    """What SGLang sees there: its PcieIpcCommunicator in all but type. One that it has made itself is asked second."""

    def __init__(self, plane: Plane, inner: Any | None, *, before_close: Callable[[], None] = lambda: None) -> None:
        self._plane, self._inner, self._before_close = plane, inner, before_close
        self._closed = False

    @property
    def disabled(self) -> bool:
        return self._closed

    def should_pcie_ipc_ar(self, inp: Tensor) -> bool:
        """Whether `pcie_ipc_all_reduce` serves this tensor."""
        return self._plane.takes(inp) or self._inner_takes(inp)

    def pcie_ipc_all_reduce(self, inp: Tensor) -> Tensor | None:
        """A new tensor with the sum."""
        if self._plane.takes(inp):
            return self._plane.all_reduce(inp)
        assert self._inner is not None, "should_pcie_ipc_ar said no"
        return self._inner.pcie_ipc_all_reduce(inp)

    def prepare(self, *, hidden: int, max_rows: int | None = None) -> None:
        """Before graphs are captured: ours is ready since the model is."""
        if self._inner is not None:
            self._inner.prepare(hidden=hidden, max_rows=max_rows)

    def destroy(self) -> None:
        """When SGLang takes its group down; the group still works."""
        if self._inner is not None:
            self._inner.destroy()
        if self._closed:
            return
        self._closed = True
        self._before_close()
        try:
            self._plane.close()
        except RuntimeError as error:  # a peer that died: nothing is left to give back to
            logger.warning("sglang-sm120: all-reduce could not be taken down in order: %s", error)

    def _inner_takes(self, inp: Tensor) -> bool:
        return self._inner is not None and not self._inner.disabled and self._inner.should_pcie_ipc_ar(inp)


def go_first(takes: Callable[[Tensor], bool], ca_comm: Any) -> None:
    """Let SGLang's custom all-reduce, which is asked before the slot, leave to the slot what this takes."""
    original = ca_comm.should_custom_ar

    def should_custom_ar(inp: Tensor) -> bool:
        return not takes(inp) and original(inp)

    ca_comm.should_custom_ar = should_custom_ar
