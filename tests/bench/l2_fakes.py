"""What stands for a GPU in the tests of `bench l2`: small layers, a clock, a prefetcher, a profile."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from sglang_sm120.bench.l2_device import Kernel
from sglang_sm120.bench.l2_options import Gqa, Mla, StackShape
from sglang_sm120.bench.options import ModelShape

CPU = torch.device("cpu")
EXPERTS = ModelShape("small", 8, 2, 256, 128)
SMALL = StackShape(EXPERTS, Mla(2, 64, 32, 16, 8, 24), 64)
SMALL_GQA = StackShape(EXPERTS, Gqa(4, 2, 32))
SPIN = "at::cuda::(anonymous namespace)::spin_kernel(long)"
SUM = "void at::native::reduce_kernel<512, 1, sum>"


class FakePrefetcher:
    """Says what was asked of it, in order."""

    def __init__(self) -> None:
        self.log: list[Any] = []
        self.how: dict[str, object] = {}
        self.open = False

    def fork(self, ranges: Iterable[tuple[int, int]], **how: object) -> int:
        ranges, self.how, self.open = list(ranges), how, True
        self.log.append(ranges)
        return sum(num_bytes for _, num_bytes in ranges)

    def join(self) -> None:
        self.open = False


class FakeTimer:
    """Replays are calls, and each takes a microsecond more than the last."""

    looks = 0

    def capture(self, calls: Callable[[], None]) -> Callable[[], None]:
        calls()
        return calls

    def elapsed_us(self, replay: Callable[[], None], count: int) -> float:
        self.looks += 1
        return 100.0 * count + self.looks


class FakeDevice:
    """The CPU, with a profile in which the projection takes 7.5 us in two kernels and a stream 100."""

    device, l2_bytes = CPU, 1 << 16

    def __init__(self, max_set_aside_bytes: int = 1 << 15, windows_reason: str | None = None) -> None:
        self.max_set_aside_bytes, self.windows_reason = max_set_aside_bytes, windows_reason
        self.timer, self.prefetcher = FakeTimer(), FakePrefetcher()
        self.waits: list[float] = []
        self.log: list[Any] = []
        self.settled = 0

    def wait(self, wait_us: float) -> None:
        self.waits.append(wait_us)

    def profile(self, replay: Callable[[], None], count: int) -> list[Kernel]:
        self.log.append("profile")
        names = [(SPIN, 1.0), (SUM, 99.0), (SUM, 1.0), ("l2_prefetch_bulk", 9.0), (SPIN, 30.0), (SUM, 20.0),
                 ("gemvx::kernel", 7.0), ("cublasLt::splitKreduce_kernel", 0.5), ("Memset (Device)", 1.0)]  # fmt: skip
        for _ in range(count):
            replay()
        return [Kernel(name, float(number), us) for number, (name, us) in enumerate(names * count)]

    @contextmanager
    def set_aside(self, num_bytes: int) -> Iterator[int]:
        self.log.append(("set aside", num_bytes))
        try:
            yield num_bytes
        finally:
            self.log.append("restored")

    @contextmanager
    def window(self, weight: Tensor, hit_ratio: float) -> Iterator[None]:
        self.log.append(("window", weight.data_ptr(), hit_ratio))
        yield
        self.log.append("no window")

    def reset_persisting(self) -> None:
        self.log.append("reset")

    def settle(self) -> None:
        self.settled += 1
        self.prefetcher.join()
