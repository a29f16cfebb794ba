"""Fixtures of the MoE operations' tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

FENCE = 256  # bytes


@pytest.fixture
def poisoned_memory(monkeypatch) -> Iterator[None]:
    """On the CPU `torch.empty` gives memory of 0xFF bytes, NaN in every float; writing around it is an error."""
    empty, fences = torch.empty, []

    def poisoned_empty(*size, dtype=None, device=None, **more):
        if more or (device is not None and torch.device(device).type != "cpu"):
            return empty(*size, dtype=dtype, device=device, **more)
        shape = size[0] if len(size) == 1 and not isinstance(size[0], int) else size
        wanted = empty(shape, dtype=dtype, device="meta")
        count = wanted.numel() * wanted.element_size()
        memory = empty(count + 2 * FENCE, dtype=torch.uint8).fill_(0xFF)
        fences.append((memory, count))
        return memory[FENCE : FENCE + count].view(wanted.dtype).view(wanted.shape)

    monkeypatch.setattr(torch, "empty", poisoned_empty)
    yield
    for memory, count in fences:
        assert (memory[:FENCE] == 0xFF).all() and (memory[FENCE + count :] == 0xFF).all(), f"beside {count} bytes"
