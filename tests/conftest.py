"""For every test: one torch thread. With more, the threads of several processes on few cores wait for each other."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

os.environ.setdefault("OMP_NUM_THREADS", "1")  # for the servers and programs that tests start


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """These models and tensors are small, so here it is one thread whatever the variable says."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
