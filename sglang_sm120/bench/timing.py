"""Times on a CUDA GPU: calls captured in a graph, candidates in turn, and the bandwidth of a plain copy."""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
import triton

from sglang_sm120.device import current_device
from sglang_sm120.errors import UnsupportedError
from sglang_sm120.runners.profile import driver_version

Replay = Callable[[], None]

_SAMPLE_US = 2000.0  # one sample is as many replays as take about this long
_MAX_REPLAYS = 16
_COPY_BYTES = 2 << 30
_COPY_SAMPLES = 9


class Timer(Protocol):
    """What `measure` needs of a clock."""

    def capture(self, calls: Callable[[], None]) -> Replay:
        """Something that repeats what `calls` launches. `calls` has run before."""

    def elapsed_us(self, replay: Replay, count: int) -> float:
        """Microseconds of `count` replays, right after one that is not timed."""


class GraphTimer:
    """CUDA graphs and events."""

    def capture(self, calls: Callable[[], None]) -> Replay:
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            calls()
        return graph.replay

    def elapsed_us(self, replay: Replay, count: int) -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        replay()  # while it runs, the host queues the rest: no launch latency is timed
        start.record()
        for _ in range(count):
            replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e3


def _nothing(_name: str) -> AbstractContextManager[object]:
    return nullcontext()


def interleaved_us(
    timer: Timer,
    replays: Mapping[str, Replay],
    samples: int,
    around: Callable[[str], AbstractContextManager[object]] = _nothing,
) -> dict[str, list[float]]:
    """Microseconds a replay, `samples` of each; in turn, from another one in each round, the first round dropped.

    around: of a name, what holds while a sample of it is taken: a setting of the device.
    """
    counts = {}
    for name, replay in replays.items():
        with around(name):
            once_us = max(timer.elapsed_us(replay, 1), 1.0)
        counts[name] = max(1, min(_MAX_REPLAYS, round(_SAMPLE_US / once_us)))
    times: dict[str, list[float]] = {name: [] for name in replays}
    names = list(replays)
    for number in range(samples + 1):
        shift = number % max(1, len(names))
        for name in names[shift:] + names[:shift]:
            with around(name):
                elapsed_us = timer.elapsed_us(replays[name], counts[name])
            if number:
                times[name].append(elapsed_us / counts[name])
    return times


def copy_tb_s() -> list[float]:
    """Bandwidth of `Tensor.copy_` on the device, bytes read plus bytes written, in TB/s (1e12); several samples."""
    free_bytes, _ = torch.cuda.mem_get_info()
    size_bytes = min(_COPY_BYTES, free_bytes // 4)
    source = torch.zeros(size_bytes, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    timer = GraphTimer()

    def copy() -> None:
        target.copy_(source)

    samples_us = [timer.elapsed_us(copy, 1) for _ in range(_COPY_SAMPLES + 1)][1:]
    return [2 * size_bytes / time_us / 1e6 for time_us in samples_us]


def require_gpu(report_option: str = "--from-json") -> torch.device:
    """The current CUDA device. report_option: what reports an earlier run without one.

    Raises: UnsupportedError where there is none.
    """
    device = current_device()
    if device.capability is None:
        raise UnsupportedError(
            f"this benchmark found {device.name}",
            "a CUDA GPU: times of kernels on anything else say nothing about it",
            f"run it on the machine with the GPU and a CUDA build of torch; {report_option} FILE reports without one",
        )
    return torch.device("cuda", torch.cuda.current_device())


def machine_facts() -> dict[str, Any]:
    """The GPU and the software, as the report's header names them."""
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return {
        "gpu": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "memory_bytes": properties.total_memory,
        "l2_bytes": properties.L2_cache_size,
        "driver": driver_version(),
        "torch": str(torch.__version__),
        "cuda": str(torch.version.cuda),
        "triton": str(triton.__version__),
        "python": platform.python_version(),
    }
