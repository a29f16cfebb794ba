"""Prefetches, windows and set-asides on a GPU: nothing changes but time, and everything is put back."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from sglang_sm120.errors import ContractError
from sglang_sm120.kernels.memory.l2_prefetch import api as l2_prefetch
from sglang_sm120.kernels.memory.l2_prefetch import kernel
from sglang_sm120.kernels.memory.l2_prefetch.api import Prefetcher, prefetch
from sglang_sm120.kernels.memory.l2_window import api
from sglang_sm120.kernels.memory.l2_window.api import AccessPolicyWindow

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
MB = 1 << 20
ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def device() -> torch.device:
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    if reason := l2_prefetch.unsupported_reason(device):
        pytest.skip(reason)
    torch.zeros(1, device=device)  # makes the context
    return device


@pytest.fixture
def windows(device: torch.device) -> Iterator[api.L2Limits]:
    """What there is; behind the test, nothing may be left of what it set."""
    found = api.limits(device)
    if not (found.persisting_max_bytes and found.window_max_bytes):
        pytest.skip("this GPU sets no L2 aside")
    before = api.get_set_aside()
    yield found
    torch.cuda.synchronize()
    assert api.get_set_aside() == before
    assert api.get_stream_window(torch.cuda.current_stream()) is None


def guarded(device: torch.device, num_bytes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random bytes, and a copy of them on the host."""
    generator = torch.Generator().manual_seed(num_bytes)
    kept = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=generator)
    return kept.to(device), kept


@pytest.mark.parametrize("implementation", ["auto", "lines"])
@pytest.mark.parametrize("keep", [True, False])
def test_memory_stays_as_it_is(device: torch.device, keep: bool, implementation: str) -> None:
    memory, kept = guarded(device, 8 * MB)
    address = memory.data_ptr()
    ranges = [(address + 4099, 3 * MB + 5), (address + 5 * MB + 1, 2 * MB), (address + 8 * MB - 16, 16), (address, 7)]
    for how in ({}, {"rate_gb_s": 20.0}, {"blocks": 64, "chunk_bytes": 256}, {"max_bytes": MB + 3}):
        how = {"keep": keep, "implementation": implementation, **how}
        asked = prefetch(ranges, device=device, **how)  # type: ignore[arg-type]
        assert asked == sum(n for _, n in l2_prefetch.parts(ranges, how.get("max_bytes", 1 << 62)))  # type: ignore[arg-type]
        torch.cuda.synchronize()
        assert torch.equal(memory.cpu(), kept)


def test_nothing_faults_at_the_end_of_an_allocation(device: torch.device) -> None:
    memory, kept = guarded(device, 32 * MB)
    for size in (16, 4096, 4112, 100_000):
        prefetch([(memory.data_ptr() + memory.nbytes - size, size)], device=device)
    prefetch([(memory.data_ptr() + n * 4096, 4096) for n in range(100)], device=device)
    torch.cuda.synchronize()
    assert torch.equal(memory.cpu(), kept)


class Layers:
    """Four projections one after the other, with a fork under each for the weight of the next."""

    def __init__(self, device: torch.device) -> None:
        generator = torch.Generator().manual_seed(3)
        weights = torch.randn(4, 1024, 1024, generator=generator) / 32
        self.weights = weights.to(device, torch.bfloat16)
        self.x = torch.randn(2, 1024, generator=generator).to(device, torch.bfloat16)
        self.prefetcher = Prefetcher(device)

    def __call__(self, how: dict[str, Any] | None, *, windows: bool = False) -> torch.Tensor:
        y = self.x
        for n, weight in enumerate(self.weights):
            if how is not None:
                following = self.weights[(n + 1) % 4]
                self.prefetcher.fork([(following.data_ptr(), following.nbytes)], **how)
            window = AccessPolicyWindow(weight.data_ptr(), weight.nbytes, 0.75) if windows else None
            with api.stream_window(torch.cuda.current_stream(), window) if windows else contextlib.nullcontext():
                y = torch.nn.functional.linear(y, weight).relu()
            if how is not None and n % 2:  # one join for two forks
                self.prefetcher.join()
        return y


@pytest.mark.parametrize("how", [{}, {"keep": False, "rate_gb_s": 500.0}, {"implementation": "lines"}], ids=str)
def test_a_thousand_replays_give_the_same_bits(device: torch.device, how: dict[str, Any]) -> None:
    replay_a_thousand_times(device, how, windows=False)


@pytest.mark.parametrize("how", [None, {}], ids=["windows", "windows and prefetches"])
def test_a_thousand_replays_under_windows_give_the_same_bits(
    windows: api.L2Limits, device: torch.device, how: dict[str, Any] | None
) -> None:
    with api.set_aside(windows.persisting_max_bytes):
        replay_a_thousand_times(device, how, windows=True)
        torch.cuda.synchronize()


def replay_a_thousand_times(device: torch.device, how: dict[str, Any] | None, *, windows: bool) -> None:
    """Each replay's output is poisoned before it and compared bit by bit behind it, on the GPU."""
    layers = Layers(device)
    weights = layers.weights.clone()
    assert torch.equal(layers(how, windows=windows), layers(None)), "eagerly"
    off, graph = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(off):
        want = layers(None)
    with torch.cuda.graph(graph):
        got = layers(how, windows=windows)
    off.replay()
    wrong = torch.zeros((), dtype=torch.int64, device=device)
    for _ in range(1000):
        got.fill_(float("nan"))
        graph.replay()
        wrong += (got.view(torch.int16) != want.view(torch.int16)).sum()
    assert wrong.item() == 0
    assert torch.equal(layers.weights, weights)


def test_a_fork_runs_behind_what_was_given_and_a_join_ahead_of_what_comes(device: torch.device) -> None:
    """Eagerly: the side stream is not done before the main stream's spin, and the main stream waits for it."""
    memory, _ = guarded(device, MB)
    prefetcher = Prefetcher(device)
    prefetch([(memory.data_ptr(), MB)], device=device)
    torch.cuda.synchronize()
    torch.cuda._sleep(200_000_000)
    assert prefetcher.fork([(memory.data_ptr(), MB)]) == MB
    side = prefetcher._stream
    assert side is not None and not side.query(), "it waits for the main stream, and the host for neither"
    prefetcher.join()
    assert not torch.cuda.current_stream().query()
    torch.cuda.synchronize()
    assert side.query()


_NO_JOIN = """
import torch
from sglang_sm120.kernels.memory.l2_prefetch.api import Prefetcher
memory = torch.zeros(1 << 20, dtype=torch.uint8, device="cuda")
prefetcher = Prefetcher(torch.device("cuda", 0))
try:
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        prefetcher.fork([(memory.data_ptr(), memory.nbytes)])
except RuntimeError as error:
    print(error)
"""


def test_a_capture_without_a_join_is_an_error_of_cuda(device: torch.device) -> None:
    """In a process of its own: torch's allocator and generators do not get over a capture that failed."""
    run, environment = [sys.executable, "-c", _NO_JOIN], {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(run, capture_output=True, text=True, timeout=120, env=environment)
    assert "unjoined" in done.stdout.lower(), done.stdout + done.stderr


def test_set_aside_is_granted_and_put_back(windows: api.L2Limits) -> None:
    before = api.get_set_aside()
    with pytest.raises(ValueError, match="theirs"), api.set_aside(windows.persisting_max_bytes) as granted:
        assert 0 < granted <= windows.l2_bytes and granted == api.get_set_aside()
        with api.set_aside(windows.persisting_max_bytes // 2) as half:
            assert 0 < half < granted
        assert api.get_set_aside() == granted
        raise ValueError("theirs")
    assert api.get_set_aside() == before
    with pytest.raises(ContractError, match="L2 to set aside"):
        api.set_aside(windows.persisting_max_bytes + 1).__enter__()
    api.reset_persisting()


def close(found: AccessPolicyWindow | None, window: AccessPolicyWindow) -> bool:
    """The driver may align what it was given."""
    return found is not None and (found.pointer, found.num_bytes) == (window.pointer, window.num_bytes)


@pytest.mark.parametrize("default", [True, False])
def test_a_stream_has_a_window_and_gets_its_old_one_back(windows: api.L2Limits, default: bool) -> None:
    memory = torch.zeros(4 * MB, dtype=torch.uint8, device="cuda")
    stream = torch.cuda.current_stream() if default else torch.cuda.Stream()
    one, two = (AccessPolicyWindow(memory.data_ptr(), size, 0.5) for size in (4 * MB, 2 * MB))
    assert api.get_stream_window(stream) is None
    with pytest.raises(ValueError, match="theirs"), api.stream_window(stream, one):
        with api.stream_window(stream.cuda_stream, two):
            assert close(api.get_stream_window(stream), two)
        assert close(api.get_stream_window(stream), one)
        raise ValueError("theirs")
    assert api.get_stream_window(stream) is None
    with pytest.raises(ContractError, match="bytes at most"):
        api.set_stream_window(stream, AccessPolicyWindow(memory.data_ptr(), windows.window_max_bytes + 1))


def test_captured_kernels_keep_the_window_that_the_stream_had(windows: api.L2Limits) -> None:
    """Set and taken away in the middle of the capture; the same bits with and without; nodes changed afterwards."""
    x = torch.linspace(-3.0, 3.0, MB).cuda()
    want = (x + 1) * 2 - 3
    window = AccessPolicyWindow(x.data_ptr(), x.nbytes, 0.5)
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        y = x + 1
        with api.stream_window(torch.cuda.current_stream(), window):
            z = y * 2
        out = z - 3
    nodes = api.kernel_nodes(graph)
    assert len(nodes) == 3
    having = [node for node in nodes if api.get_node_window(node) is not None]
    assert len(having) == 1 and close(api.get_node_window(having[0]), window)
    api.set_node_window(having[0], None)
    assert [api.get_node_window(node) for node in nodes] == [None] * 3
    assert api.set_graph_window(graph.raw_cuda_graph(), window, lambda node: int(node) != int(having[0])) == 2
    with api.set_aside(windows.persisting_max_bytes // 2):
        graph.instantiate()
        for _ in range(10):
            out.fill_(float("nan"))
            graph.replay()
            assert torch.equal(out, want)


def test_a_window_of_one_launch_is_not_the_streams(windows: api.L2Limits, device: torch.device) -> None:
    memory, kept = guarded(device, MB)
    window = AccessPolicyWindow(memory.data_ptr(), MB)
    args = kernel._Args(num_ranges=1, chunk_bytes=4096)
    args.ranges[0].first, args.ranges[0].bytes = memory.data_ptr(), MB
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    kernel.module(device)
    with torch.cuda.graph(graph):
        for programmatic in (False, True):
            kernel.module(device).launch("l2_prefetch_lines", 4, 32, args, window=window, programmatic=programmatic)
        kernel.module(device).launch("l2_prefetch_lines", 4, 32, args)
        assert api.get_stream_window(torch.cuda.current_stream()) is None
    found = [api.get_node_window(node) for node in api.kernel_nodes(graph)]
    assert sum(close(one, window) for one in found) == 2 and found.count(None) == 1
    graph.instantiate()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(memory.cpu(), kept)
