"""What `bench l2` needs of a GPU: waits of a known length, prefetches beside a capture, kernel times, windows."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from sglang_sm120.bench.l2_cases import Prefetches
from sglang_sm120.bench.timing import GraphTimer, Replay, Timer
from sglang_sm120.errors import Sm120Error, UnsupportedError
from sglang_sm120.kernels.memory.l2_prefetch.api import Prefetcher
from sglang_sm120.kernels.memory.l2_window import api as l2_window

_SPIN_CYCLES = (1_000_000, 3_000_000)  # about 0.5 and 1.5 ms: what a launch costs is in both
_SPIN_SAMPLES = 5
_SPIN_WARM_UP = 100  # until an idle GPU's clock has risen
_STREAMS = 32  # torch hands these out in turn


@dataclass(frozen=True)
class Kernel:
    """One kernel of a profile."""

    name: str
    start_us: float
    duration_us: float


class L2Device(Protocol):
    """A GPU, or what stands for one in tests."""

    @property
    def device(self) -> torch.device: ...
    @property
    def l2_bytes(self) -> int: ...
    @property
    def max_set_aside_bytes(self) -> int: ...
    @property
    def windows_reason(self) -> str | None: ...
    @property
    def timer(self) -> Timer: ...
    @property
    def prefetcher(self) -> Prefetches: ...

    def wait(self, wait_us: float) -> None:
        """Put a kernel of one thread, which waits and moves no data, on the current stream; 0: nothing."""

    def profile(self, replay: Replay, count: int) -> list[Kernel]:
        """The kernels of `count` replays, which have ended."""

    def set_aside(self, num_bytes: int) -> AbstractContextManager[int]:
        """L2 set aside for what persists: what was granted; the old size again behind it."""

    def window(self, weight: Tensor, hit_ratio: float) -> AbstractContextManager[None]:
        """An access policy window over a weight, on the current stream."""

    def reset_persisting(self) -> None:
        """Nothing persists in L2 any more. Waits for the device."""

    def settle(self) -> None:
        """Behind something that broke, perhaps inside a capture: no fork is left open."""


class CudaL2Device:
    """The current CUDA device.

    Raises: UnsupportedError if its memory cannot be prefetched.
    """

    def __init__(self, device: torch.device, l2_bytes: int) -> None:
        self.device, self.l2_bytes = device, l2_bytes
        self.timer: Timer = GraphTimer()
        self.cycles_per_us = _cycles_per_us(self.timer)
        self.prefetcher: Prefetches = _prefetcher_beside_captures(device, self.timer)
        self.max_set_aside_bytes = 0
        self.windows_reason: str | None = None
        try:
            self.max_set_aside_bytes = l2_window.limits(device).persisting_max_bytes
            if self.max_set_aside_bytes == 0:
                self.windows_reason = "this GPU lets no L2 be set aside"
        except Sm120Error as error:
            self.windows_reason = error.found

    def wait(self, wait_us: float) -> None:
        if wait_us:
            torch.cuda._sleep(round(wait_us * self.cycles_per_us))

    def profile(self, replay: Replay, count: int) -> list[Kernel]:
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as of:
            for _ in range(count):
                replay()
            torch.cuda.synchronize()
        kernels = [
            Kernel(event.name, event.time_range.start, event.time_range.elapsed_us())
            for event in of.events() or []
            if event.device_type == DeviceType.CUDA
        ]
        return sorted(kernels, key=lambda kernel: kernel.start_us)

    def set_aside(self, num_bytes: int) -> AbstractContextManager[int]:
        return l2_window.set_aside(num_bytes)

    def window(self, weight: Tensor, hit_ratio: float) -> AbstractContextManager[None]:
        window = l2_window.AccessPolicyWindow(weight.data_ptr(), weight.nbytes, hit_ratio)
        return l2_window.stream_window(torch.cuda.current_stream(self.device), window)

    def reset_persisting(self) -> None:
        torch.cuda.synchronize()
        if self.windows_reason is None:
            try:
                l2_window.reset_persisting()
            except UnsupportedError as error:
                self.windows_reason = error.found

    def settle(self) -> None:
        with suppress(Exception):  # what broke is reported; this only makes the next capture possible
            self.prefetcher.join()
            torch.cuda.synchronize()


def _cycles_per_us(timer: Timer) -> float:
    """Of the clock that `torch.cuda._sleep` counts by, at the speed that this GPU has under a load."""

    def spin(cycles: int) -> Callable[[], None]:
        return lambda: torch.cuda._sleep(cycles)

    short, long = _SPIN_CYCLES
    timer.elapsed_us(spin(long), _SPIN_WARM_UP)
    rates = [
        (long - short) / (timer.elapsed_us(spin(long), 1) - timer.elapsed_us(spin(short), 1))
        for _ in range(_SPIN_SAMPLES)
    ]
    return statistics.median(rates)


def _prefetcher_beside_captures(device: torch.device, timer: Timer) -> Prefetcher:
    """One whose side stream is not the stream that graphs are captured on.

    torch hands out 32 streams in turn, to captures too. A fork to the stream that it forks from is a prefetch in the
    main stream: nothing runs beside it, and the graph is slower by the prefetch.
    """
    seen: list[int] = []

    def current() -> None:
        seen.append(torch.cuda.current_stream(device).cuda_stream)
        torch.cuda._sleep(1)  # an empty graph is a warning

    timer.capture(current)
    for _ in range(_STREAMS + 1):
        prefetcher = Prefetcher(device)
        if prefetcher._stream is not None and prefetcher._stream.cuda_stream not in seen:
            return prefetcher
    raise UnsupportedError("no second stream", "a side stream for prefetches", "report this")
