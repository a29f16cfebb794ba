"""Kernel tests. This file being here puts tests/kernels on sys.path, so `import nvfp4_oracle` works in every test."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class PeakBytes(TorchDispatchMode):
    """Counts the bytes of the storages that operations inside the block created, at the moment of the most of them."""

    def __init__(self) -> None:
        super().__init__()
        self._live: dict[int, tuple[int, int]] = {}  # storage -> (bytes, tensors that look at it)
        self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        before = {t.untyped_storage().data_ptr() for t in tree_iter((args, kwargs)) if isinstance(t, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        for tensor in tree_iter(result):
            if isinstance(tensor, torch.Tensor):
                key = tensor.untyped_storage().data_ptr()
                if key in self._live or key not in before:  # a view of an argument from outside is not ours
                    size, users = self._live.get(key, (tensor.untyped_storage().nbytes(), 0))
                    self._live[key] = (size, users + 1)
                    weakref.finalize(tensor, self._dropped, key)
        self.peak = max(self.peak, sum(size for size, _ in self._live.values()))
        return result

    def _dropped(self, key: int) -> None:
        size, users = self._live[key]
        if users == 1:
            del self._live[key]
        else:
            self._live[key] = (size, users - 1)


@pytest.fixture
def peak_bytes() -> PeakBytes:
    return PeakBytes()
