"""The all-reduce kernels on the CPU, ranks as threads: right, equal on all ranks, and call after call."""

from __future__ import annotations

import ctypes
import random
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from sglang_sm120.errors import ContractError, UnsupportedError
from sglang_sm120.kernels.communication.all_reduce_rmsnorm import api, config, kernel, reference
from sglang_sm120.kernels.communication.all_reduce_rmsnorm.api import ALGORITHMS, Communicator, PeerLostError, Range
from sglang_sm120.kernels.communication.all_reduce_rmsnorm.config import Space
from sglang_sm120.kernels.communication.window import host_windows

DTYPES = [torch.bfloat16, torch.float16]
EPS = 1e-5
RANGES = (Range(1 << 20, "one-shot-push"),)


SPACE = Space(1 << 21, 1 << 20, 1 << 20)


def group(world_size: int, space: Space = SPACE) -> list[Communicator]:
    """Communicators of one group, with NaN where a kernel has to write before it reads."""
    windows = host_windows(world_size, config.window_bytes(space))
    signalled = space.inbox + space.gather
    for window in windows:
        for parity in range(2):
            start = window.addresses[window.rank] + config.DATA_AT + parity * (signalled + space.lamport)
            ctypes.memset(start, 0xFF, signalled)
    return [Communicator(window, space, RANGES, limit_s=60) for window in windows]


def on_all(ranks: list[Communicator], work: Callable[[Communicator], Any]) -> list[Any]:
    """What `work` gives on every rank, each in a thread of its own."""
    results: list[Any] = [None] * len(ranks)

    def run(i: int) -> None:
        try:
            results[i] = work(ranks[i])
        except BaseException as error:  # shown by the test
            results[i] = error

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(ranks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def inputs(world_size: int, shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> list[torch.Tensor]:
    """Values of which large ones cancel in some places, so that another order of the ranks gives other bits."""
    generator = torch.Generator().manual_seed(seed)
    x = [torch.randn(shape, generator=generator) for _ in range(world_size)]
    if world_size > 2:
        cancel = torch.rand(shape, generator=generator) < 0.2
        x[0] = torch.where(cancel, 2.0**14, x[0])
        x[2] = torch.where(cancel, -(2.0**14), x[2])
        x[1] = torch.where(cancel, x[1] / 1000, x[1])
    return [tensor.to(dtype) for tensor in x]


def nan_like(x: torch.Tensor) -> torch.Tensor:
    return torch.full_like(x, float("nan"))


def test_the_order_of_the_ranks_matters_for_these_values() -> None:
    """Otherwise equality below would prove little."""
    x = inputs(4, (4096,), torch.bfloat16)
    assert not torch.equal(reference.all_reduce(x), reference.all_reduce(x[::-1]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("world_size", config.WORLD_SIZES)
def test_sum_is_the_references_to_the_bit(world_size: int, algorithm: str, dtype: torch.dtype) -> None:
    ranks = group(world_size)
    for elements in (8, 2048, 2056, 6144, 40_000):
        x = inputs(world_size, (elements,), dtype, elements)
        got = on_all(ranks, lambda c, x=x: c.all_reduce(x[c.window.rank], out=nan_like(x[0]), algorithm=algorithm))
        want = reference.all_reduce(x)
        for out in got:
            assert torch.equal(out, want), f"{elements} elements"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize(
    ("world_size", "rows", "hidden"), [(2, 3, 512), (2, 1, 8), (4, 2, 200), (8, 1, 1032), (4, 131, 64)]
)
def test_norm(world_size: int, rows: int, hidden: int, algorithm: str, dtype: torch.dtype) -> None:
    ranks = group(world_size)
    x = inputs(world_size, (rows, hidden), dtype)
    residual, gamma = inputs(2, (rows, hidden), dtype, 1)[0], inputs(1, (hidden,), dtype, 2)[0]
    for offset in (0.0, 1.0):
        got = on_all(
            ranks,
            lambda c, offset=offset: c.all_reduce_rmsnorm(
                x[c.window.rank], residual, gamma, EPS, gamma_offset=offset, out=nan_like(residual),
                residual_out=nan_like(residual), algorithm=algorithm,
            ),
        )  # fmt: skip
        want, want_residual = reference.all_reduce_rmsnorm(x, residual, gamma, EPS, gamma_offset=offset)
        exact = sum(tensor.double() for tensor in x).to(dtype).double() + residual.double()
        exact = exact / (exact.square().mean(-1, keepdim=True) + EPS).sqrt() * (gamma.double() + offset)
        for out, residual_out in got:
            assert torch.equal(residual_out, want_residual)
            assert torch.equal(out, got[0][0]), "all ranks have the same bits"
            torch.testing.assert_close(out, want)
            torch.testing.assert_close(out.double(), exact, rtol=2e-2 if dtype == torch.bfloat16 else 3e-3, atol=2e-2)


def test_wide_rows_take_two_vectors_a_thread() -> None:
    ranks = group(2)
    x, gamma = inputs(2, (1, 6144 + 16), torch.bfloat16), inputs(1, (6144 + 16,), torch.bfloat16, 3)[0]
    assert config.vectors_per_thread(6144 + 16) == 2 and config.vectors_per_thread(6144) == 1
    for algorithm in ALGORITHMS:
        got = on_all(
            ranks, lambda c, a=algorithm: c.all_reduce_rmsnorm(x[c.window.rank], x[0], gamma, EPS, algorithm=a)
        )
        want, want_residual = reference.all_reduce_rmsnorm(x, x[0], gamma, EPS)
        for out, residual_out in got:
            assert torch.equal(residual_out, want_residual)
            torch.testing.assert_close(out, want)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_in_place(algorithm: str) -> None:
    ranks = group(4)
    x, residual, gamma = (inputs(4, (5, 256), torch.float16), *inputs(2, (5, 256), torch.float16, 1))
    want, want_residual = reference.all_reduce_rmsnorm(x, residual, gamma[0], EPS)

    def work(c: Communicator) -> tuple[torch.Tensor, torch.Tensor]:
        mine, carried = x[c.window.rank].clone(), residual.clone()
        c.all_reduce_rmsnorm(mine, carried, gamma[0], EPS, out=mine, residual_out=carried, algorithm=algorithm)
        return mine, carried

    for out, residual_out in on_all(ranks, work):
        assert torch.equal(residual_out, want_residual)
        torch.testing.assert_close(out, want)


@pytest.mark.parametrize("world_size", [2, 4])
def test_many_calls_of_other_sizes_and_algorithms_with_a_slow_rank(world_size: int) -> None:
    """Nothing waits between calls; one rank after another comes late, and what it finds is of this call."""
    ranks = group(world_size)
    plan = random.Random(7)
    calls = [
        (plan.choice(ALGORITHMS), plan.choice([8, 512, 5000, 16384]), plan.randrange(world_size)) for _ in range(60)
    ]
    x = {(i, elements): inputs(world_size, (elements,), torch.bfloat16, i) for i, (_, elements, _) in enumerate(calls)}

    def work(c: Communicator) -> list[torch.Tensor]:
        outs = []
        for i, (algorithm, elements, late) in enumerate(calls):
            if late == c.window.rank:
                time.sleep(0.002)
            outs.append(c.all_reduce(x[i, elements][c.window.rank], algorithm=algorithm))
        return outs

    for outs in on_all(ranks, work):
        for i, (_, elements, _) in enumerate(calls):
            assert torch.equal(outs[i], reference.all_reduce(x[i, elements])), f"call {i} of {calls[i]}"


@pytest.mark.parametrize("dtype", DTYPES)
def test_zeros_of_both_signs_arrive(dtype: torch.dtype) -> None:
    """Lamport sends no zero word: the sum is the same to the bit, and nobody waits for ever."""
    ranks = group(2)
    zeros = torch.tensor([0.0, 0.0, -0.0, -0.0, 0.0, -0.0, -0.0, 0.0] * 32, dtype=dtype)
    x = [zeros, torch.cat([-zeros[:128], torch.ones(128, dtype=dtype)])]
    for algorithm in ALGORITHMS:
        for out in on_all(ranks, lambda c, a=algorithm: c.all_reduce(x[c.window.rank], algorithm=a)):
            assert torch.equal(out.view(torch.int16), reference.all_reduce(x).view(torch.int16)), algorithm


def test_two_groups_at_once() -> None:
    first, second = group(2), group(2)
    x, y = inputs(2, (4096,), torch.float16, 1), inputs(2, (4096,), torch.float16, 2)

    def work(c: Communicator) -> list[torch.Tensor]:
        other = second[c.window.rank]
        return [t for _ in range(5) for t in (c.all_reduce(x[c.window.rank]), other.all_reduce(y[c.window.rank]))]

    for outs in on_all(first, work):
        for i, out in enumerate(outs):
            assert torch.equal(out, reference.all_reduce(y if i % 2 else x))


def test_a_peer_that_does_not_come_ends_in_a_message() -> None:
    ranks = group(2)
    ranks[1].set_time_limit(0.2)
    x = inputs(2, (64,), torch.float16)
    with pytest.raises(ContractError, match="no signal from rank 0"):
        ranks[1].all_reduce(x[1])
    with pytest.raises(
        PeerLostError, match=r"rank 1 waited 0\.2 s for a signal of rank 0 \(call 1, block 0, phase 0\)"
    ):
        ranks[1].check()
    with pytest.raises(PeerLostError, match="bench p2p"):
        ranks[1].all_reduce(x[1])
    ranks[0].check()


def test_what_is_not_covered_and_what_is_wrong() -> None:
    assert "3 ranks" in str(api.unsupported_reason(world_size=3, dtype=torch.bfloat16))
    assert "float32" in str(api.unsupported_reason(world_size=2, dtype=torch.float32))
    for hidden in (12, 12296, 0):
        assert "hidden size" in str(api.unsupported_reason(world_size=2, dtype=torch.bfloat16, hidden_size=hidden))
    assert api.unsupported_reason(world_size=8, dtype=torch.float16, hidden_size=6144) is None
    c = group(2, Space(4096))[0]
    x = torch.zeros(64, dtype=torch.float16)
    bad = [
        {"x": x.float()}, {"x": x[:63]}, {"x": x[1:57]}, {"x": torch.zeros(8, 16, dtype=x.dtype).T},
        {"x": x, "out": x[:8]}, {"x": x, "algorithm": "ring"},
    ]  # fmt: skip
    for arguments in bad:
        with pytest.raises(ContractError, match="needed"):
            c.all_reduce(**arguments)
    with pytest.raises(UnsupportedError, match="a message of 8192 bytes"):
        c.all_reduce(torch.zeros(4096, dtype=x.dtype))
    with pytest.raises(UnsupportedError, match="by two-shot-push"):
        c.all_reduce(x, algorithm="two-shot-push")
    with pytest.raises(ContractError, match="gamma"):
        c.all_reduce_rmsnorm(x.view(1, 64), x.view(1, 64), x[:32], EPS)
    assert c.algorithm((64,)) == "one-shot-push" and c.algorithm((4096,)) is None and c.algorithm((0, 64)) is None
    assert c.all_reduce(x[:0]).shape == (0,)


@pytest.mark.parametrize("world_size", config.WORLD_SIZES)
@pytest.mark.parametrize("hidden", [4096, 6144, 7168, 5120, 200])
def test_the_default_window_serves_every_size_of_its_ranges(world_size: int, hidden: int) -> None:
    ranges = config.DEFAULT_RANGES[world_size]
    space = config.space_for(ranges, world_size, hidden)
    window = host_windows(world_size, 4096)[0]
    c = Communicator.__new__(Communicator)
    c.window, c._space, c.ranges, c.norm_ranges = window, space, ranges, ranges
    rows = ranges[-1].max_bytes // (2 * hidden)
    assert rows >= 1
    for r in range(1, rows + 1):
        assert c.algorithm((r, hidden), norm=True) == config.choose(ranges, 2 * r * hidden)
        assert c.algorithm((r, hidden)) == config.choose(ranges, 2 * r * hidden)
    assert c.algorithm((rows + 1, hidden), norm=True) is None


def test_ranges_may_leave_sizes_to_others_and_differ_with_a_norm() -> None:
    ranges = (Range(1024, "one-shot-lamport"), Range(4096, config.STOCK), Range(8192, "two-shot-pull"))
    assert [config.choose(ranges, size) for size in (1024, 1040, 4096, 4112, 8192, 8208)] == [
        "one-shot-lamport", None, None, "two-shot-pull", "two-shot-pull", None,
    ]  # fmt: skip
    assert config.space_for((Range(1 << 30, config.STOCK),), 8, 6144) == Space()
    window = host_windows(2, 4096)[0]
    c = Communicator(window, Space(8192, 8192, 8192), ranges, norm_ranges=(Range(2048, "one-shot-pull"),))
    assert c.algorithm((4, 128)) == "one-shot-lamport" and c.algorithm((4, 128), norm=True) == "one-shot-pull"
    with pytest.raises(UnsupportedError, match="stock up to 4096"):
        c.all_reduce(torch.zeros(2048, dtype=torch.float16))


def test_the_ctypes_mirror_has_the_kernels_constants() -> None:
    text = kernel.SOURCE.read_text()
    assert f"MAX_WORLD = {config.MAX_WORLD}, MAX_CTAS = {config.MAX_CTAS}" in text
    assert "OWN_WORDS_AT = 8ll * 2 * 2 * MAX_CTAS * MAX_WORLD" in text and "DATA_AT = OWN_WORDS_AT + 1024" in text
    assert "enum StatusWord { FAULT, LIMIT_MS, PEER, BLOCK, PHASE, EPOCH };" in text
