"""What each rank measures, on the CPU: candidates and a clock are replaced, what decides about them is not."""

from __future__ import annotations

import contextlib
import pickle
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from sglang_sm120.bench import all_reduce
from sglang_sm120.bench.all_reduce import Work, calls_a_graph, combined, measure, medians
from sglang_sm120.bench.all_reduce_cases import Candidate, Case
from sglang_sm120.kernels.communication.all_reduce_rmsnorm.api import ALGORITHMS, Communicator, reference

WORK = Work(hidden_size=64, rows=(1, 3), dtype="bfloat16", samples=7)


class OneRank:
    """A group of one: its sum is its input."""

    rank, world_size, device = 0, 1, torch.device("cpu")

    def __init__(self, other: Callable[[bytes], bytes] | None = None) -> None:
        """other: what a second rank would say to what this one says."""
        self._other = other
        self.reported: list[Any] = []

    def exchange(self, mine: bytes) -> list[bytes]:
        return [mine] if self._other is None else [mine, self._other(mine)]

    def barrier(self) -> None: ...

    def progress(self, what: Any) -> None:
        self.reported.append(what)


class Sums:
    """In the place of a communicator: right, but for what `spoil` does to a result, by the algorithm's name."""

    name, covers, capture = "base", staticmethod(lambda x: True), staticmethod(contextlib.nullcontext)

    def __init__(self, spoil: Callable[[str, Tensor], None] = lambda name, out: None) -> None:
        self.spoil, self.closed = spoil, False

    def window_holds(self, name: str, shape: Any) -> bool:
        return not (name == ALGORITHMS[2] and shape.rows == 3)

    def all_reduce(self, x: Tensor, *, out: Tensor | None = None, algorithm: str = "base") -> Tensor:
        out = torch.empty_like(x) if out is None else out
        out.copy_(x)
        self.spoil(algorithm, out)
        return out

    def all_reduce_rmsnorm(
        self, x: Tensor, residual: Tensor, gamma: Tensor, eps: float, *, algorithm: str = "base", **outputs: Tensor
    ) -> tuple[Tensor, Tensor]:
        out, hidden = reference.all_reduce_rmsnorm([x], residual, gamma, eps)
        residual.copy_(hidden)
        self.spoil(algorithm, out)
        return out, residual

    def close(self) -> None:
        self.closed = True


class Graph:
    """What a graph does, without one."""

    def __init__(self, candidate: Candidate, calls: int) -> None:
        self.candidate, self.calls = candidate, calls
        with candidate.capture():
            self.replay()

    def replay(self) -> None:
        for _ in range(self.calls):
            self.candidate.last = self.candidate.call()


@pytest.fixture
def ours(monkeypatch: pytest.MonkeyPatch) -> Sums:
    """All candidates take 1 us, 2 us, ... in the order in which they are asked."""
    sums, clock = Sums(), iter(range(1, 100_000))
    monkeypatch.setattr(Communicator, "connect", lambda *args, **more: sums)
    monkeypatch.setattr(all_reduce, "_graph", Graph)
    monkeypatch.setattr(all_reduce, "_sample", lambda rank, graph, calls: float(next(clock)))
    monkeypatch.setitem(sys.modules, "some_baseline", SimpleNamespace(prepare=lambda device: ([Sums()], ["v2: no"])))
    return sums


def test_every_candidate_is_timed_at_every_point(ours: Sums) -> None:
    rank = OneRank()
    found = measure(rank, Work(**{**vars(WORK), "baseline": "some_baseline:prepare"}))
    assert found["missing"] == ["v2: no"]
    assert [(p["fused"], p["rows"], p["bytes"]) for p in found["points"]] == [
        (True, 1, 128), (True, 3, 384), (False, 1, 128), (False, 3, 384),
    ]  # fmt: skip
    assert list(found["points"][0]["candidates"]) == [*ALGORITHMS, "base"]
    assert ALGORITHMS[2] not in found["points"][1]["candidates"], "what does not fit is left out"
    for point in found["points"]:
        assert all(len(how["samples_us"]) == 7 for how in point["candidates"].values())
    first = found["points"][0]["candidates"][ALGORITHMS[0]]["samples_us"]
    assert first[:2] == [12.0, 17.0], "the first round is dropped, and each begins with another one"
    assert rank.reported == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert ours.closed


def test_what_is_wrong_is_named_and_not_timed(ours: Sums) -> None:
    ours.spoil = lambda name, out: out.mul_(1.05) if name == ALGORITHMS[1] else None
    for point in measure(OneRank(), WORK)["points"]:
        wrong = point["candidates"][ALGORITHMS[1]]["wrong"]
        assert wrong.startswith("rank 0: relative error 0.0")
        assert ALGORITHMS[1] not in medians(point)
        assert ALGORITHMS[0] in medians(point)


def test_not_a_number_is_wrong(ours: Sums) -> None:
    ours.spoil = lambda name, out: out.fill_(float("nan"))
    for point in measure(OneRank(), WORK)["points"]:
        assert all(how["wrong"] == "rank 0: relative error nan" for how in point["candidates"].values())


def test_a_replay_that_gives_what_an_earlier_one_was_given_is_wrong(ours: Sums) -> None:
    kept: dict[Any, Tensor] = {}

    def stale(name: str, out: Tensor) -> None:
        if name == ALGORITHMS[0]:
            out.copy_(kept.setdefault(out.shape, out.clone()))

    ours.spoil = stale
    points = measure(OneRank(), Work(**{**vars(WORK), "fused": (False,)}))["points"]
    for point in points:
        wrong = point["candidates"][ALGORITHMS[0]]["wrong"]
        assert "after the timed replays" in wrong
        assert len(point["candidates"][ALGORITHMS[1]]["samples_us"]) == 7


def test_what_raises_is_noted_and_the_others_go_on(ours: Sums) -> None:
    def breaks(name: str, out: Tensor) -> None:
        if name == ALGORITHMS[0]:
            raise RuntimeError("no such\ninstruction")

    ours.spoil = breaks
    for point in measure(OneRank(), WORK)["points"]:
        assert point["candidates"][ALGORITHMS[0]] == {"failed": "rank 0: RuntimeError: no such\ninstruction"}
        assert medians(point)[ALGORITHMS[1]]


def test_what_another_rank_finds_wrong_is_wrong_here(ours: Sums) -> None:
    """And is not called again: the other rank would not come."""
    case = Case(OneRank(lambda mine: b"wrong\nrelative error 0.5"), (2, 64), torch.bfloat16, True)
    called: list[str] = []

    def call() -> tuple[Tensor, ...]:
        called.append("called")
        return ours.all_reduce_rmsnorm(case.x, case.residual.clone(), case.gamma, 1e-5)

    point = all_reduce._point(case, [Candidate("one", call, case.residual.clone())], 7)
    assert point["candidates"] == {"one": {"wrong": "rank 1: relative error 0.5"}}
    assert called == ["called"]


def test_a_gpu_that_is_unusable_ends_the_rank(ours: Sums, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(device: torch.device) -> None:
        raise RuntimeError("illegal access")

    def breaks(name: str, out: Tensor) -> None:
        monkeypatch.setattr(all_reduce, "synchronize", broken)
        raise RuntimeError("first")

    ours.spoil = breaks
    with pytest.raises(RuntimeError, match="one-shot-lamport left the GPU unusable: first"):
        measure(OneRank(), WORK)


def test_a_baseline_that_cannot_be_imported_is_missing(ours: Sums) -> None:
    found = measure(OneRank(), Work(**{**vars(WORK), "baseline": "no_such_module:prepare"}))
    assert found["missing"] == ["no_such_module:prepare: ModuleNotFoundError: No module named 'no_such_module'"]
    assert list(found["points"][0]["candidates"]) == list(ALGORITHMS)


def test_only_what_every_rank_has_is_called(ours: Sums) -> None:
    rank = OneRank(lambda mine: mine.replace(b"base", b"").replace(ALGORITHMS[1].encode(), b"other"))
    found = measure(rank, Work(**{**vars(WORK), "baseline": "some_baseline:prepare"}))
    assert list(found["points"][0]["candidates"]) == [name for name in ALGORITHMS if name != ALGORITHMS[1]]


def test_inputs_are_alike_on_all_ranks_and_change() -> None:
    cases = [
        Case(SimpleNamespace(rank=n, world_size=2, device=torch.device("cpu")), (3, 8), torch.float16, False)
        for n in range(2)
    ]  # fmt: skip
    assert torch.equal(cases[0].total, reference.all_reduce([cases[0].x, cases[1].x]))
    assert torch.equal(cases[0].total, cases[1].total)
    assert torch.equal(cases[0].residual, cases[1].residual)
    before = [case.x.clone() for case in cases]
    for case in cases:
        case.change_inputs()
    assert not any(torch.equal(case.x, old) for case, old in zip(cases, before, strict=True))
    assert torch.equal(cases[1].total, reference.all_reduce([cases[0].x, cases[1].x]))


def test_all_ranks_together_are_as_slow_as_the_slowest() -> None:
    def of(*hows: Any) -> list[dict[str, Any]]:
        return [{"points": [{"rows": 1, "bytes": 8, "fused": True, "candidates": {"a": how}}]} for how in hows]

    (point,) = combined(of({"samples_us": [1.0, 5.0]}, {"samples_us": [2.0, 3.0]}))
    assert point == {"rows": 1, "bytes": 8, "fused": True, "candidates": {"a": {"samples_us": [2.0, 5.0]}}}
    (point,) = combined(of({"samples_us": [1.0]}, {"wrong": "x"}))
    assert point["candidates"] == {"a": {"wrong": "x"}}
    assert medians(point) == {}


def test_how_many_calls_a_graph_has() -> None:
    assert [calls_a_graph(size) for size in (128, 1 << 20, 4 << 20, 32 << 20, 1 << 30)] == [20, 20, 8, 2, 2]


def test_ranks_can_be_told_what_to_do() -> None:
    assert pickle.loads(pickle.dumps((measure, WORK))) == (measure, WORK)
