"""What each rank of test_all_reduce_gpu.py does, in a process of its own."""

from __future__ import annotations

import time
from typing import Any

import torch

from sglang_sm120.bench.ranks import Rank
from sglang_sm120.kernels.communication.all_reduce_rmsnorm import reference
from sglang_sm120.kernels.communication.all_reduce_rmsnorm.api import (
    ALGORITHMS,
    Communicator,
    PeerLostError,
    Range,
)

HIDDEN, EPS = 6144, 1e-5
RANGES = [Range((4 if name.startswith("two") else 1) << 20, name) for name in ALGORITHMS]


def connect(rank: Rank, **more: Any) -> Communicator:
    arguments = {"hidden_size": HIDDEN, "device": rank.device, "ranges": RANGES, "limit_s": 20.0, **more}
    return Communicator.connect(rank.rank, rank.world_size, rank.exchange, **arguments)


def everyones(rank: Rank, shape: tuple[int, ...], dtype: torch.dtype, seed: int, count: int = 0) -> list[torch.Tensor]:
    """All ranks' inputs, the same on every rank; their sum depends on the order for three ranks and more."""
    generator = torch.Generator(rank.device).manual_seed(seed)
    made = [torch.randn(shape, device=rank.device, generator=generator) for _ in range(count or rank.world_size)]
    return [(tensor * 10.0 ** (i % 3)).to(dtype) for i, tensor in enumerate(made)]


def digest(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).cpu().numpy().tobytes()


def right(rank: Rank) -> int:
    """Every algorithm, dtype and odd size: the reference's bits, the same on all ranks, outputs poisoned before."""
    c, checked = connect(rank), 0
    for dtype in (torch.bfloat16, torch.float16):
        for algorithm in ALGORITHMS:
            for elements in (8, 2048, 2056, 6144, 49_152, 300_008):
                x = everyones(rank, (elements,), dtype, elements)
                out = torch.full_like(x[0], float("nan"))
                c.all_reduce(x[rank.rank], out=out, algorithm=algorithm)
                assert torch.equal(out, reference.all_reduce(x)), f"{algorithm} {dtype} {elements}"
                checked += 1
            for rows, hidden, offset in (
                (1, 6144, 0.0),
                (3, 6144, 1.0),
                (8, 7168, 0.0),
                (131, 200, 0.0),
                (2, 12_288, 0.0),
            ):
                x = everyones(rank, (rows, hidden), dtype, rows)
                residual, gamma = (
                    everyones(rank, (rows, hidden), dtype, 1, 1)[0],
                    everyones(rank, (hidden,), dtype, 2, 1)[0],
                )
                out, carried = torch.full_like(residual, float("nan")), torch.full_like(residual, float("nan"))
                c.all_reduce_rmsnorm(
                    x[rank.rank], residual, gamma, EPS, gamma_offset=offset, out=out, residual_out=carried,
                    algorithm=algorithm,
                )  # fmt: skip
                want, want_residual = reference.all_reduce_rmsnorm(x, residual, gamma, EPS, gamma_offset=offset)
                assert torch.equal(carried, want_residual), f"{algorithm} {dtype} {rows} x {hidden}"
                torch.testing.assert_close(out, want)
                exact = sum(t.double() for t in x).to(dtype).double() + residual.double()
                exact = exact / (exact.square().mean(-1, keepdim=True) + EPS).sqrt() * (gamma.double() + offset)
                step = 2.0**-8 if dtype == torch.bfloat16 else 2.0**-11
                assert ((out.double() - exact).abs() <= 1.01 * step * exact.abs() + 1e-6).all()
                told = rank.exchange(digest(out))
                assert all(message == told[0] for message in told), "all ranks have the same bits"
                checked += 1
    c.close()
    return checked


class Chain:
    """Calls whose inputs change with every step and whose results are checked on the GPU, so that none goes unseen."""

    def __init__(self, rank: Rank, c: Communicator) -> None:
        self.rank, self.c = rank, c
        self.step = torch.zeros((), dtype=torch.int64, device=rank.device)
        self.wrong = torch.zeros((), dtype=torch.int64, device=rank.device)
        self.calls = 0

    def call(self, elements: int, algorithm: str) -> None:
        places = torch.arange(elements, device=self.rank.device) * 7
        parts = [((places + 3 * r * r + self.step) % 61 - 30).float() for r in range(self.rank.world_size)]
        out = self.c.all_reduce(parts[self.rank.rank].bfloat16(), algorithm=algorithm)
        self.wrong += (out.float() != sum(parts)).any()  # small whole numbers: exact in bfloat16
        self.step += 1

    def some(self) -> None:
        """Ten calls of all algorithms, sizes that go up and down."""
        sizes = (6144, 8, 49_152, 2056, 12_288, 6144, 2048, 300_008, 6144, 64)
        for i, elements in enumerate(sizes):
            self.call(elements, ALGORITHMS[i * 3 % len(ALGORITHMS)])


def hundred_thousand(rank: Rank, replays: int) -> tuple[int, int]:
    """Graphs of ten calls replayed, with eager calls of other shapes between, and ranks that come late in turn."""
    c = connect(rank)
    chain = Chain(rank, c)
    chain.some()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        chain.some()
    made = 10
    for i in range(replays):
        if i % 100 == 0:
            if (i // 100) % rank.world_size == rank.rank:
                torch.cuda._sleep(4_000_000)  # a few milliseconds on the GPU
            chain.call(40_000, ALGORITHMS[i // 100 % len(ALGORITHMS)])
            made += 1
        if i % 1000 == 500 and (i // 1000) % rank.world_size == rank.rank:
            time.sleep(0.01)  # and on the host
        graph.replay()
        made += 10
    torch.cuda.synchronize()
    assert int(chain.step) == made
    c.close()
    return made, int(chain.wrong)


def two_and_again(rank: Rank) -> list[int]:
    """Two communicators alive at once, on interleaved calls; closed, and made again."""
    wrong = []
    for _ in range(3):
        chains = [Chain(rank, connect(rank)) for _ in range(2)]
        for _ in range(5):
            for chain in chains:
                chain.some()
        wrong += [int(chain.wrong) for chain in chains]
        for chain in chains:
            chain.c.close()
    return wrong


def a_rank_goes(rank: Rank) -> str:
    """Rank 1 leaves after a call; what the others get, and that they get it within the limit."""
    c = connect(rank, limit_s=1.0)
    x = torch.ones(6144, device=rank.device, dtype=torch.bfloat16)
    c.all_reduce(x)
    torch.cuda.synchronize()
    rank.barrier()
    if rank.rank == 1:
        return "gone"
    start = time.monotonic()
    try:
        c.all_reduce(x)
        torch.cuda.synchronize()
    except Exception as error:  # what torch raises has no type of its own in every version
        took_s = time.monotonic() - start
        try:
            c.check()
        except PeerLostError as lost:
            return f"{took_s:.3f} {type(error).__name__} {lost.found}"
    return "nothing raised"


def a_limit_set_later(rank: Rank) -> bool:
    """A graph captured under a short limit waits as long as the limit of its replay says."""
    c = connect(rank, limit_s=0.5)
    x = torch.ones(6144, device=rank.device, dtype=torch.bfloat16)
    c.all_reduce(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = c.all_reduce(x)
    rank.barrier()
    c.set_time_limit(20.0)
    if rank.rank == 0:
        time.sleep(1.5)
    graph.replay()
    torch.cuda.synchronize()
    c.check()
    c.close()
    return bool((out == rank.world_size).all())
