"""What `bench.all_reduce` times: a message on every rank, the ways to reduce it, and the right answer."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from sglang_sm120.bench.ranks import Rank
from sglang_sm120.kernels.communication.all_reduce_rmsnorm import config
from sglang_sm120.kernels.communication.all_reduce_rmsnorm.api import ALGORITHMS, Communicator, reference

EPS = 1e-5
_OTHER_SEED = 1 << 30  # on the CPU 32 bits count
_BOUND, _REPLAY_BOUND = 0.01, 0.03  # relative errors; a graph's calls add to the residual, and so do their roundings


@dataclass
class Candidate:
    """One way to do a call, on this rank. residual: its own, which a fused call adds to. last: what a graph leaves."""

    name: str
    call: Callable[[], tuple[Tensor, ...]]
    residual: Tensor
    capture: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext
    last: tuple[Tensor, ...] = field(default=(), repr=False)


@dataclass
class Case:
    """A point's tensors on one rank. Made alike on all: each makes all ranks' inputs, and so knows the answer."""

    rank: Rank
    shape: tuple[int, int]
    dtype: torch.dtype
    fused: bool

    def __post_init__(self) -> None:
        self.x, self.total = self._summed(self.shape[0])
        generator = torch.Generator(self.rank.device).manual_seed(0)
        self.residual = self._random(self.shape, generator)
        self.gamma = self._random(self.shape[1:], generator)

    def change_inputs(self) -> None:
        """Other inputs, in place."""
        other, self.total = self._summed(_OTHER_SEED + self.shape[0])
        self.x.copy_(other)

    def wrong(self, candidate: Candidate, run: Callable[[], tuple[Tensor, ...]], calls: int = 1) -> str | None:
        """How far what the last of so many calls leaves is from the reference, where that is more than rounding."""
        candidate.residual.copy_(self.residual)
        got = run()
        synchronize(self.rank.device)
        for tensor, expected in zip(got, self._want(calls), strict=True):
            error = float((tensor.double() - expected.double()).norm() / expected.double().norm())
            if not error < (_BOUND if calls == 1 else _REPLAY_BOUND):
                return f"relative error {error:.3g}" + ("" if calls == 1 else " after the timed replays")
        return None

    def _want(self, calls: int) -> tuple[Tensor, ...]:
        if not self.fused:
            return (self.total,)
        hidden = self.residual
        for _ in range(calls):
            out, hidden = reference.all_reduce_rmsnorm([self.total], hidden, self.gamma, EPS)
        return out, hidden

    def _summed(self, seed: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator(self.rank.device).manual_seed(seed)
        inputs = [self._random(self.shape, generator) for _ in range(self.rank.world_size)]
        return inputs[self.rank.rank], reference.all_reduce(inputs)

    def _random(self, shape: Sequence[int], generator: torch.Generator) -> Tensor:
        return torch.randn(shape, device=self.rank.device, generator=generator).to(self.dtype)


def candidates(case: Case, ours: Communicator, baselines: Sequence[Any]) -> list[Candidate]:
    """All that serve this message on every rank."""
    rows, width = case.shape
    shape = config.Shape(rows, width, rows * width) if case.fused else config.flat(rows * width)
    found = [_ours(case, ours, name) for name in ALGORITHMS if ours.window_holds(name, shape)]
    found += [_baseline(case, baseline) for baseline in baselines if baseline.covers(case.x)]
    names = common(case.rank, [candidate.name for candidate in found])
    return [candidate for candidate in found if candidate.name in names]


def common(rank: Rank, names: Iterable[str]) -> set[str]:
    """Those that every rank has: a call on one is a call on all."""
    told = [set(message.decode().split("\n")) for message in rank.exchange("\n".join(names).encode())]
    return set.intersection(*told)


def synchronize(device: torch.device) -> None:
    """Wait for a GPU; an error of its kernels is raised here."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _ours(case: Case, c: Communicator, algorithm: str) -> Candidate:
    x, gamma, residual = case.x, case.gamma, case.residual.clone()
    out = torch.empty_like(x)

    def call() -> tuple[Tensor, ...]:
        if case.fused:
            return c.all_reduce_rmsnorm(x, residual, gamma, EPS, out=out, residual_out=residual, algorithm=algorithm)
        return (c.all_reduce(x, out=out, algorithm=algorithm),)

    return Candidate(algorithm, call, residual)


def _baseline(case: Case, baseline: Any) -> Candidate:
    residual = case.residual.clone()

    def call() -> tuple[Tensor, ...]:
        if case.fused:
            return baseline.all_reduce_rmsnorm(case.x, residual, case.gamma, EPS)
        return (baseline.all_reduce(case.x),)

    return Candidate(baseline.name, call, residual, baseline.capture)
