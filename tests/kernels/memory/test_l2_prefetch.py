"""What a prefetch asks for: the kernel, built for the host, against bytes counted one vector after another."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_sm120.errors import ContractError, UnsupportedError
from sglang_sm120.kernels.cuda.module import load
from sglang_sm120.kernels.memory.l2_prefetch import api, config, kernel, reference
from sglang_sm120.kernels.memory.l2_prefetch.api import Prefetcher, prefetch, unsupported_reason

CPU = torch.device("cpu")
ADDRESS = 0x7F12_3456_0000
IMPLEMENTATIONS = ("bulk", "lines")


def asked(defines: tuple[str, ...] = ()) -> list[tuple[int, int]]:
    """(address, bytes) of every instruction since the last call."""
    next_one = load(kernel.SOURCE, CPU, defines)._library["l2_prefetch_asked"]  # type: ignore[union-attr]
    address, num_bytes, found = ctypes.c_uint64(), ctypes.c_uint64(), []
    while next_one(len(found), ctypes.byref(address), ctypes.byref(num_bytes)):
        found.append((address.value, num_bytes.value))
    return found


def vectors(ranges: list[tuple[int, int]], max_bytes: int | None = None) -> list[int]:
    """Addresses of the whole vectors of 16 bytes inside the ranges, in order, each looked at alone."""
    inside = []
    for address, num_bytes in ranges:
        at = address + -address % 16
        while at + 16 <= address + num_bytes:
            inside.append(at)
            at += 16
    return inside if max_bytes is None else inside[: max_bytes // 16]


def covered(trace: list[tuple[int, int]]) -> list[int]:
    assert all(address % 16 == 0 and num_bytes % 16 == 0 and num_bytes > 0 for address, num_bytes in trace)
    return [address + at for address, num_bytes in trace for at in range(0, num_bytes, 16)]


def order(ranges: list[tuple[int, int]], blocks: int, chunk_bytes: int) -> list[tuple[int, int]]:
    """Chunks as the host runs them: block after block, in it thread after thread, each through all its rounds.

    Chunk number n, counted through all ranges, belongs to round n // (32 * blocks); there to block n % blocks.
    """
    chunks = []
    for address, num_bytes in ranges:
        at = 0
        while at < num_bytes:
            chunks.append((address + at, min(chunk_bytes, num_bytes - at)))
            at += chunk_bytes
    blocks = min(blocks, len(chunks))
    of_a_round = [(n % (32 * blocks), n // (32 * blocks), chunk) for n, chunk in enumerate(chunks)]
    return [chunk for place, turn, chunk in sorted(of_a_round, key=lambda c: (c[0] % blocks, c[0] // blocks, c[1]))]


some_ranges = st.lists(
    st.tuples(st.integers(0, 5000), st.one_of(st.integers(0, 80), st.integers(0, 9000))), min_size=0, max_size=40
)


@settings(max_examples=150, deadline=None)
@given(
    gaps=some_ranges,
    max_bytes=st.one_of(st.none(), st.integers(0, 60_000)),
    blocks=st.sampled_from([1, 2, 3, 4, 7, 64, 1024]),
    chunk_bytes=st.sampled_from([16, 48, 256, 4096, 1 << 20]),
    implementation=st.sampled_from(["auto", *IMPLEMENTATIONS]),
)
def test_every_byte_once_and_none_outside(gaps, max_bytes, blocks, chunk_bytes, implementation) -> None:
    ranges, at = [], ADDRESS
    for gap, num_bytes in gaps:  # odd addresses, and no two that overlap
        ranges.append((at + gap, num_bytes))
        at += gap + num_bytes
    wanted = vectors(ranges, max_bytes)
    asked()
    how: dict[str, Any] = {"blocks": blocks, "chunk_bytes": chunk_bytes, "implementation": implementation}
    got = prefetch(iter(ranges), device=CPU, max_bytes=max_bytes, **how)
    trace = asked()
    assert got == 16 * len(wanted)
    assert sorted(covered(trace)) == wanted, "these vectors, each once"
    assert all(num_bytes <= chunk_bytes for _, num_bytes in trace)
    some = reference.prefetch(ranges, 1 << 62 if max_bytes is None else max_bytes)
    assert covered(some) == wanted, "the reference says the same, in order"
    assert api.parts is reference.prefetch


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(("blocks", "chunk_bytes"), [(1, 16), (1, 4096), (3, 64), (4, 4096), (64, 256)])
def test_what_is_listed_first_is_asked_for_first(blocks: int, chunk_bytes: int, implementation: str) -> None:
    """Addresses that fall, so that no other order would do."""
    ranges = [(ADDRESS + 1_000_000, 70_000), (ADDRESS + 500_000, 16), (ADDRESS, 100_000), (ADDRESS + 300_000, 4080)]
    asked()
    prefetch(ranges, device=CPU, blocks=blocks, chunk_bytes=chunk_bytes, implementation=implementation)
    assert asked() == order(ranges, blocks, chunk_bytes)


def test_one_range_by_hand() -> None:
    """Bytes 5 to 104: vectors at 16, 32, 48, 64, 80; chunks of two vectors; three blocks, a chunk each."""
    asked()
    assert prefetch([(ADDRESS + 5, 100)], device=CPU, blocks=3, chunk_bytes=32) == 80
    assert asked() == [(ADDRESS + 16, 32), (ADDRESS + 48, 32), (ADDRESS + 80, 16)]
    assert prefetch([(ADDRESS + 5, 100), (ADDRESS + 960, 64)], device=CPU, max_bytes=111, chunk_bytes=32) == 96
    assert covered(asked())[-1] == ADDRESS + 960, "80 bytes of the first, 16 of the second, 15 are no vector"


@pytest.mark.parametrize(
    ("ranges", "max_bytes"),
    [([], None), ([(ADDRESS, 0)], None), ([(ADDRESS + 1, 30)], None), ([(0, 0)], None), ([(ADDRESS, 99)], 15),
     ([(ADDRESS, 99)], 0)],
)  # fmt: skip
def test_nothing_to_ask_for_launches_nothing(ranges, max_bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "module", None)
    assert prefetch(ranges, device=CPU, max_bytes=max_bytes) == 0
    with pytest.raises(TypeError):
        prefetch([(ADDRESS, 16)], device=CPU)


@pytest.mark.parametrize("count", [31, 32, 33, 64, 65])
def test_more_ranges_than_a_launch_takes(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    ranges = [(ADDRESS + 1024 * n, 512) for n in reversed(range(count))]
    launches: list[int] = []
    host = kernel.module(CPU)

    class Counting:
        def launch(self, name: str, grid: int, block: int, args: Any) -> None:
            launches.append(args.num_ranges)
            host.launch(name, grid, block, args)

    asked()
    monkeypatch.setattr(kernel, "module", lambda device: Counting())
    assert prefetch(ranges, device=CPU, blocks=1, chunk_bytes=512) == 512 * count
    assert launches == [32] * (count // 32) + [count % 32] * (count % 32 > 0)
    assert asked() == ranges, "in the order of the list, over all launches"


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_threads_in_descending_order_ask_for_the_same(implementation, monkeypatch: pytest.MonkeyPatch) -> None:
    ranges = [(ADDRESS + 7, 100_003), (ADDRESS + 200_000, 4097)]
    reverse = ("SM120_HOST_REVERSE",)
    monkeypatch.setattr(kernel, "load", lambda source, device: load(source, device, reverse))
    prefetch(ranges, device=CPU, chunk_bytes=512, implementation=implementation)
    trace = asked(reverse)
    assert sorted(covered(trace)) == vectors(ranges) and trace != order(ranges, config.BLOCKS, 512)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_paced_prefetch_asks_for_the_same(implementation: str) -> None:
    """52 rounds of 2 KiB, 2 us apart. How long it takes is not looked at here."""
    ranges = [(ADDRESS + 3, 100_000), (ADDRESS + 200_000, 5000)]
    asked()
    how: dict[str, Any] = {"blocks": 1, "chunk_bytes": 64, "rate_gb_s": 1.0, "implementation": implementation}
    assert prefetch(ranges, device=CPU, **how) == 16 * len(vectors(ranges))
    assert sorted(covered(asked())) == vectors(ranges)


def test_memory_is_not_written() -> None:
    """Of the ranges, and of what lies around them; on a GPU: test_l2_gpu and the SASS."""
    memory = np.random.default_rng(5).integers(0, 256, 1 << 20, dtype=np.uint8)
    before, address = memory.tobytes(), memory.ctypes.data
    for keep in (True, False):
        prefetch([(address + 4099, 500_001), (address + 700_000, 64)], device=CPU, keep=keep)
    assert memory.tobytes() == before
    assert min(asked())[0] >= address + 4099


def test_intervals() -> None:
    assert config.interval_ns(0.0) == 0
    assert config.interval_ns(100.0, blocks=4) == 5243, "4 x 32 threads x 4096 bytes = 524,288 bytes at 100 bytes a ns"
    assert config.interval_ns(1.0, blocks=1, chunk_bytes=64) == 2048
    assert config.interval_ns(0.5, blocks=2, chunk_bytes=16) == 2048


def test_what_reaches_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    launches: list[tuple[Any, ...]] = []

    class Recording:
        def launch(self, name: str, grid: int, block: int, args: Any) -> None:
            launches.append((name, grid, block, args.keep, args.interval_ns, args.chunk_bytes))

    monkeypatch.setattr(kernel, "module", lambda device: Recording())
    prefetch([(ADDRESS, 1 << 20)], device=CPU)
    prefetch([(ADDRESS, 1 << 20)], device=CPU, keep=False, rate_gb_s=50, blocks=64, implementation="lines")
    prefetch([(ADDRESS, 48)], device=CPU, chunk_bytes=16)
    assert launches == [
        ("l2_prefetch_bulk", 64, 32, 1, 0, 4096),
        ("l2_prefetch_lines", 64, 32, 0, 167772, 4096),
        ("l2_prefetch_bulk", 3, 32, 1, 0, 16),
    ]


@pytest.mark.parametrize(
    ("ranges", "how", "found"),
    [
        ([(-16, 64)], {}, r"ranges \[\(-16, 64\), "),
        ([(ADDRESS, 64), (ADDRESS, -1)], {}, "ranges"),
        ([], {"rate_gb_s": -1.0}, "rate_gb_s -1.0"),
        ([], {"rate_gb_s": float("nan")}, "rate_gb_s nan"),
        ([], {"rate_gb_s": float("inf")}, "rate_gb_s inf"),
        ([], {"blocks": 0}, "blocks 0"),
        ([], {"blocks": 1025}, "blocks 1025"),
        ([], {"chunk_bytes": 0}, "chunk_bytes 0"),
        ([], {"chunk_bytes": 24}, "chunk_bytes 24"),
        ([], {"chunk_bytes": (1 << 20) + 16}, "chunk_bytes 1048592"),
        ([], {"max_bytes": -1}, "max_bytes -1"),
        ([], {"implementation": "vectors"}, "implementation 'vectors'"),
    ],
)
def test_a_broken_contract_raises(ranges, how: dict[str, Any], found: str) -> None:
    asked()
    with pytest.raises(ContractError, match=found) as error:
        prefetch([*ranges, (ADDRESS, 64)], device=CPU, **how)
    assert all((error.value.found, error.value.needed, error.value.fix))
    assert asked() == []


def test_which_devices_and_which_instruction(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, lines = torch.device("cuda", 0), []
    monkeypatch.setattr(kernel, "prefetch", lambda *_, **how: lines.append(how["lines"]))
    for capability, choice in (((8, 0), True), ((8, 9), True), ((9, 0), False), ((12, 0), False), ((12, 1), False)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, is_=capability: is_)
        assert unsupported_reason(gpu) is None
        prefetch([(ADDRESS, 64)], device=gpu)
        assert lines.pop() is choice, capability
        prefetch([(ADDRESS, 64)], device=gpu, implementation="lines")
        assert lines.pop() is True
        if choice:
            with pytest.raises(UnsupportedError, match=r"bulk prefetches are from compute capability 9\.0"):
                prefetch([(ADDRESS, 64)], device=gpu, implementation="bulk")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    for device, reason in ((gpu, r"compute capability 7\.5"), (torch.device("meta"), "device meta")):
        with pytest.raises(UnsupportedError, match=reason):
            prefetch([(ADDRESS, 64)], device=device)
        with pytest.raises(UnsupportedError, match=reason):
            Prefetcher(device)
    assert lines == []


def test_a_prefetcher_on_the_cpu_asks_at_once() -> None:
    prefetcher = Prefetcher(CPU)
    asked()
    assert prefetcher.fork([]) == 0
    prefetcher.join()
    assert asked() == []
    assert prefetcher.fork(((ADDRESS, 64), (ADDRESS + 128, 64)), max_bytes=80, blocks=1, chunk_bytes=64) == 80
    assert asked() == [(ADDRESS, 64), (ADDRESS + 128, 16)]
    prefetcher.join()
    prefetcher.join()
    with pytest.raises(ContractError, match="max_bytes -1"):
        prefetcher.fork([(ADDRESS, 64)], max_bytes=-1)


def test_a_rate_too_low_for_the_clock_is_refused() -> None:
    for how in ({"rate_gb_s": 1.0, "blocks": 1024, "chunk_bytes": 1 << 20}, {"rate_gb_s": 1e-9}):
        with pytest.raises(ContractError, match="between two rounds"):
            api.prefetch([(16, 16)], device=torch.device("cpu"), **how)
