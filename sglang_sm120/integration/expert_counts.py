"""How many experts a batch touches, for `/metrics`: counted on the GPU in one MoE layer, read back without waiting.

What a MoE layer costs at few tokens is the weights of the experts that the batch touches, so this number says what a
batch of a given size will cost, and how even a model's routing is. Python does not run while a CUDA graph is replayed:
the count is a few small kernels in the graph itself, in one layer of the model, and only with --enable-metrics.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

MAX_LOG2_ROWS = 20
"""Batches of more rows than 2 ** 20 are counted with those."""

READ_EVERY_S = 1.0
"""At most this often is a copy of the sums asked for."""

Report = Callable[[int, int, int], None]
"""(rows_le, distinct experts summed, batches), what came since the last report."""


class ExpertCounts:
    """Sums over batches by their number of rows, rounded up to a power of two.

    num_experts: on this rank. expert_offset: the id of its first expert. device: of the layer.
    """

    def __init__(self, num_experts: int, expert_offset: int, device: torch.device) -> None:
        self._num_experts, self._offset = num_experts, expert_offset
        on_gpu = device.type == "cuda"
        self._sums = torch.zeros(MAX_LOG2_ROWS + 1, 2, dtype=torch.int64, device=device)  # distinct experts, batches
        self._copy = torch.zeros(self._sums.shape, dtype=torch.int64, pin_memory=on_gpu)
        self._reported = torch.zeros(self._sums.shape, dtype=torch.int64)
        self._copied = torch.cuda.Event() if on_gpu else None
        self._pending = False
        self._next_read = 0.0
        self._started = False

    def add(self, topk_ids: Tensor) -> None:
        """Count one batch. topk_ids: [rows, k]; ids of other ranks, and -1, are not held here. Capturable, no sync."""
        rows = topk_ids.shape[0]
        if rows == 0:
            return
        ids = topk_ids.reshape(-1).long() - self._offset
        nowhere = self._num_experts
        ids = torch.where((ids >= 0) & (ids < nowhere), ids, nowhere)
        touched = torch.zeros(nowhere + 1, dtype=torch.int64, device=ids.device).index_fill_(0, ids, 1)
        sums = self._sums[min((rows - 1).bit_length(), MAX_LOG2_ROWS)]
        sums[0] += touched[:nowhere].sum()
        sums[1] += 1

    def publish(self, report: Report) -> None:
        """After a forward pass: ask for a copy of the sums, or report the one that has come. Never waits.

        What ran before the first call (captures, warm-up) is not reported, nor is the pass that it follows.
        """
        if not self._started:
            self._sums.zero_()
            self._started = True
            return
        if self._pending:
            if self._copied is not None and not self._copied.query():
                return
            self._pending = False
            new = self._copy - self._reported
            self._reported += new
            for log2_rows in new[:, 1].nonzero().flatten().tolist():
                report(1 << log2_rows, *new[log2_rows].tolist())
        now = time.monotonic()
        if now >= self._next_read:
            self._next_read = now + READ_EVERY_S
            self._copy.copy_(self._sums, non_blocking=True)
            if self._copied is not None:
                self._copied.record()
            self._pending = True
