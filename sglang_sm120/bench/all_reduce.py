"""All-reduce with residual add and RMSNorm behind it, timed on the GPUs of this host, beside SGLang's own."""

from __future__ import annotations

import importlib
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sglang_sm120.bench.all_reduce_cases import Candidate, Case, candidates, common, synchronize
from sglang_sm120.bench.ranks import Rank
from sglang_sm120.kernels.communication.all_reduce_rmsnorm.api import ALGORITHMS, Communicator, Range

CALLS_A_GRAPH = 20
"""Calls in one graph: a launch is then as cheap as in a decode step."""
WRONG, FAILED = "wrong", "failed"

_GRAPH_BYTES = 32 << 20  # messages in one graph: beside large ones a launch is nothing, and they take long
_REPLAYS = 5  # in a sample


@dataclass(frozen=True)
class Work:
    """What to measure. rows: token counts; fused: with residual add and norm, else the sum alone."""

    hidden_size: int
    rows: tuple[int, ...]
    dtype: str
    samples: int
    fused: tuple[bool, ...] = (True, False)
    baseline: str | None = None  # "module:function"
    max_two_shot_bytes: int = 64 << 20
    max_one_shot_bytes: int = 4 << 20

    @property
    def points(self) -> list[tuple[bool, int]]:
        """(fused, rows) in the order in which they are measured."""
        return [(fused, rows) for fused in self.fused for rows in self.rows]


def measure(rank: Rank, work: Work) -> dict[str, Any]:
    """On every rank: time each candidate at each size, in turn, from graphs. Wrong ones are named and not timed.

    Args:
        rank: of `bench.ranks.run_ranks`, on a GPU.
        work: the same on every rank.

    Returns: {"points": [{rows, bytes, fused, candidates: {name: how}}], "missing": [why a baseline is not there]},
        how: {"samples_us": [...]}, {"wrong": why} or {"failed": why}.

    Raises: UnsupportedError: the GPUs cannot share memory. RuntimeError: a candidate left this GPU unusable.
    """
    dtype = getattr(torch, work.dtype)
    largest = 2 * work.hidden_size * max(work.rows)
    one_shot, two_shot = min(largest, work.max_one_shot_bytes), min(largest, work.max_two_shot_bytes)
    ranges = [Range(two_shot if name.startswith("two") else one_shot, name) for name in ALGORITHMS]
    ours = Communicator.connect(
        rank.rank, rank.world_size, rank.exchange, hidden_size=work.hidden_size, device=rank.device, ranges=ranges
    )
    baselines, missing = _baselines(rank, work.baseline)
    points = []
    for fused, rows in work.points:
        case = Case(rank, (rows, work.hidden_size), dtype, fused)
        points.append(_point(case, candidates(case, ours, baselines), work.samples))
        rank.progress((len(points), len(work.points)))
    rank.barrier()
    ours.close()
    return {"points": points, "missing": missing}


def combined(results: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """All ranks' points as one: a sample is that of the slowest rank, for which the others have to wait."""
    points = []
    for of_ranks in zip(*(result["points"] for result in results), strict=True):
        found: dict[str, Any] = {}
        for name in of_ranks[0]["candidates"]:
            hows = [point["candidates"][name] for point in of_ranks]
            bad = next((how for how in hows if "samples_us" not in how), None)
            samples = zip(*(how["samples_us"] for how in hows), strict=True) if bad is None else ()
            found[name] = bad or {"samples_us": [max(of_sample) for of_sample in samples]}
        points.append({**of_ranks[0], "candidates": found})
    return points


def medians(point: dict[str, Any]) -> dict[str, float]:
    """Name -> median microseconds of the candidates that were right."""
    return {
        name: statistics.median(found["samples_us"])
        for name, found in point["candidates"].items()
        if found.get("samples_us")
    }


def calls_a_graph(message_bytes: int) -> int:
    """How many calls a graph has: by the size alone, and so the same on every rank."""
    return max(2, min(CALLS_A_GRAPH, _GRAPH_BYTES // message_bytes))


def _baselines(rank: Rank, name: str | None) -> tuple[list[Any], list[str]]:
    """Those that every rank has, and why others are not there."""
    found: list[Any] = []
    missing: list[str] = []
    if name is not None:
        module, function = name.split(":")
        try:
            found, missing = getattr(importlib.import_module(module), function)(rank.device)
        except Exception as error:  # ours can be timed without
            missing = [f"{name}: {type(error).__name__}: {str(error)[:300]}"]
    names = common(rank, [baseline.name for baseline in found])
    return [baseline for baseline in found if baseline.name in names], missing


def _point(case: Case, tried: Sequence[Candidate], samples: int) -> dict[str, Any]:
    message_bytes = 2 * case.x.numel()
    calls = calls_a_graph(message_bytes)
    result: dict[str, Any] = {}
    graphs: dict[str, Any] = {}

    def check(candidate: Candidate) -> str | None:
        return case.wrong(candidate, candidate.call)

    def capture(candidate: Candidate) -> None:
        graphs[candidate.name] = _graph(candidate, calls)

    def check_replay(candidate: Candidate) -> str | None:
        def replay() -> tuple[Tensor, ...]:
            graphs[candidate.name].replay()
            return candidate.last

        return case.wrong(candidate, replay, calls)

    for candidate in tried:
        bad = _fault(case.rank, candidate, check) or _fault(case.rank, candidate, capture)
        result[candidate.name] = bad or {"samples_us": []}
    right = [candidate for candidate in tried if "samples_us" in result[candidate.name]]
    for number in range(samples + 1):
        shift = number % max(1, len(right))
        for candidate in right[shift:] + right[:shift]:
            elapsed_us = _sample(case.rank, graphs[candidate.name], calls)
            if number:
                result[candidate.name]["samples_us"].append(elapsed_us)
    case.change_inputs()  # what a replay gives is then not what an earlier one was given
    for candidate in right:
        result[candidate.name] = _fault(case.rank, candidate, check_replay) or result[candidate.name]
    return {"rows": case.shape[0], "bytes": message_bytes, "fused": case.fused, "candidates": result}


def _fault(rank: Rank, candidate: Candidate, step: Callable[[Candidate], str | None]) -> dict[str, str] | None:
    """What is wrong with a candidate on any rank, the same on all: none may call what another leaves out."""
    told = ""
    try:
        reason = step(candidate)
        if reason is not None:
            told = f"{WRONG}\n{reason}"
    except Exception as error:  # one that breaks does not cost the others their times
        told = f"{FAILED}\n{type(error).__name__}: {str(error)[:300]}"
        try:
            synchronize(rank.device)
        except Exception as broken:  # after an illegal access every later call fails too
            raise RuntimeError(f"{candidate.name} left the GPU unusable: {error}") from broken
    for i, message in enumerate(rank.exchange(told.encode())):
        if message:
            kind, reason = message.decode().split("\n", 1)
            return {kind: f"rank {i}: {reason}"}
    return None


def _graph(candidate: Candidate, calls: int) -> torch.cuda.CUDAGraph:
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with candidate.capture(), torch.cuda.graph(graph):
        for _ in range(calls):
            candidate.last = candidate.call()
    return graph


def _sample(rank: Rank, graph: torch.cuda.CUDAGraph, calls: int) -> float:
    """Microseconds a call; as many replays on every rank."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    graph.replay()
    torch.cuda.synchronize()
    rank.barrier()
    graph.replay()
    start.record()
    for _ in range(_REPLAYS):
        graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3 / (_REPLAYS * calls)
