"""Which splits fit, which one to take for latency and which for throughput, and what would fit where none does.

The choice is by rules and arithmetic; nothing here is a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from sglang_sm120.plan.fits import Fit, Request, fit
from sglang_sm120.plan.memory import Split
from sglang_sm120.plan.reasons import latency_reasons, throughput_reasons
from sglang_sm120.plan.shapes import ModelShape
from sglang_sm120.plan.splits import Candidate, candidates, obstacles

LATENCY_REQUESTS = 2
"""Up to this many requests at once count as latency: each decode step reads the weights for one or two tokens."""

CLOSE = 0.9
"""For throughput, splits with at least this share of the most KV tokens count as equal, and the fewest ranks a sum win.
A guess: what a tenth more KV cache is worth against a sum over more ranks has not been measured."""

LARGER_NODES = (1, 2, 3, 4, 6, 8, 16)
"""Numbers of nodes that are looked at where nothing fits."""

LEAST_CONTEXT = 1024


@dataclass(frozen=True)
class Verdict:
    """One split. obstacles: why it cannot be served at all. fits: one a concurrency, none where there are obstacles."""

    candidate: Candidate
    obstacles: tuple[str, ...]
    fits: tuple[Fit, ...]

    @property
    def holds_one(self) -> bool:
        """Whether one request at full context can be served."""
        return any(one.holds_one for one in self.fits)


@dataclass(frozen=True)
class Pick:
    """A split that was chosen. goal: "latency" or "throughput". fit: at the concurrency that it is launched for."""

    goal: str
    candidate: Candidate
    fit: Fit
    reasons: tuple[str, ...]


@dataclass(frozen=True)
class Larger:
    """The first larger machine that holds one request at full context."""

    gpus: int
    nodes: int
    candidate: Candidate


@dataclass(frozen=True)
class Plan:
    """Everything for one model and one kind of GPU. latency, throughput: None where nothing fits.

    verdicts: of all GPUs, and behind them of a part where no split of all serves. larger, smaller_context: what would
    fit; only where nothing does.
    """

    shape: ModelShape
    request: Request
    gpus: int
    nodes: int
    verdicts: tuple[Verdict, ...]
    latency: Pick | None
    throughput: Pick | None
    larger: Larger | None = None
    smaller_context: int | None = None


def plan(shape: ModelShape, request: Request, gpus: int, nodes: int = 1) -> Plan:
    """Judge every split of the GPUs and choose.

    Args:
        shape: the model.
        request: what is to be served.
        gpus: of one node.
        nodes: machines.
    """
    verdicts = _judge_all(shape, request, candidates(gpus, nodes))
    verdicts += _parts(shape, request, gpus, nodes, verdicts)
    latency, throughput = _latency(shape, request, verdicts), _throughput(shape, request, verdicts)
    planned = Plan(shape, request, gpus, nodes, tuple(verdicts), latency, throughput)
    if latency is not None:
        return planned
    return replace(
        planned, larger=_larger(shape, request, gpus, nodes),
        smaller_context=_smaller_context(shape, request, [verdict.candidate for verdict in verdicts]),
    )  # fmt: skip


def judge(shape: ModelShape, request: Request, candidate: Candidate) -> Verdict:
    """One split at every concurrency."""
    why = obstacles(shape, candidate, request.mtp)
    fits = () if why else tuple(fit(shape, candidate, request, number) for number in request.concurrency)
    return Verdict(candidate, tuple(why), fits)


def _judge_all(shape: ModelShape, request: Request, which: Sequence[Candidate]) -> list[Verdict]:
    return [judge(shape, request, candidate) for candidate in which]


def _parts(shape: ModelShape, request: Request, gpus: int, nodes: int, verdicts: Sequence[Verdict]) -> list[Verdict]:
    """Splits of the largest part of the machine that serves, where all of it does not.

    SGLang has no plain TP of 7 GPUs for most models, but one of 4, which is what one request at a time wants.
    """
    if not any(verdict.holds_one for verdict in verdicts):
        parts = [(gpus, machines) for machines in range(nodes - 1, 0, -1)]
        parts += [(count, 1) for count in range(gpus - 1, 0, -1)]
        for count, machines in parts:
            found = _judge_all(shape, request, candidates(count, machines))
            if any(verdict.holds_one for verdict in found):
                return found
    elif nodes == 1 and obstacles(shape, Candidate(Split(tp=gpus)), request.mtp):
        for count in range(gpus - 1, 0, -1):
            plain = judge(shape, request, Candidate(Split(tp=count)))
            if plain.holds_one:
                return [plain]
    return []


def _latency(shape: ModelShape, request: Request, verdicts: Sequence[Verdict]) -> Pick | None:
    """The largest tensor-parallel group: each GPU then reads the least for a token."""
    few = [number for number in request.concurrency if number <= LATENCY_REQUESTS] or [request.concurrency[0]]
    able = [one for one in _at(verdicts, few[-1]) if one[1].holds_one]
    if not able:
        return None

    def rank(one: tuple[Candidate, Fit]) -> tuple[bool, int, int, int, int, int]:
        split = one[0].split
        return one[0].sums_cross_nodes, split.pp, split.dp_attention, -split.tp, split.ep, one[0].replicas

    best = min(able, key=rank)
    return Pick("latency", *best, tuple(latency_reasons(shape, request, best, list(_larger_groups(verdicts, best[0])))))


def _throughput(shape: ModelShape, request: Request, verdicts: Sequence[Verdict]) -> Pick | None:
    """The most KV tokens, up to what is asked for; of those that are close, the fewest ranks a sum."""
    able: list[tuple[Candidate, Fit]] = []
    flat: list[tuple[Candidate, Fit]] = []
    # Graphs, logits and states of many requests take memory too: where nothing is left for a cache, fewer at once.
    for number in reversed(request.concurrency):
        able = able or _able(_at(verdicts, number))
        flat = _able([one for one in _at(verdicts, number) if _is_flat(one[0])])
        if flat:
            break
    if not able:
        return None
    piped = bool(flat) and any(not _is_flat(one[0]) for one in able)
    flat = flat or able
    asked = flat[0][1].concurrency * request.context
    most = max(min(one[1].all_kv_tokens, asked) for one in flat)
    close = [one for one in flat if min(one[1].all_kv_tokens, asked) >= CLOSE * most]

    def rank(one: tuple[Candidate, Fit]) -> tuple[bool, int, int, int, int, int]:
        split = one[0].split
        return one[0].sums_cross_nodes, split.tp, split.pp, split.dp_attention, split.ep, -one[1].all_kv_tokens

    best = min(close, key=rank)
    others = sorted((one for one in flat if one[0] != best[0]), key=lambda one: -one[1].all_kv_tokens)
    reasons = throughput_reasons(shape, request, best, others, piped=piped)
    return Pick("throughput", *best, tuple(reasons))


def _larger_groups(verdicts: Sequence[Verdict], pick: Candidate) -> Iterator[str]:
    """Plain splits with more tensor parallelism than the one picked, and why not."""
    for verdict in verdicts:
        split = verdict.candidate.split
        plain = split.ep == split.dp_attention == verdict.candidate.replicas == 1
        if plain and split.tp > pick.split.tp and not verdict.holds_one:
            why = "; ".join(verdict.obstacles) if verdict.obstacles else verdict.fits[0].why
            yield f"Not {verdict.candidate.label}: {why}."
        elif plain and split.tp > pick.split.tp and verdict.candidate.sums_cross_nodes:
            yield f"Not {verdict.candidate.label}: every layer would sum over the network between nodes, twice."


def _is_flat(candidate: Candidate) -> bool:
    """No stages but those that lie along the nodes."""
    return not candidate.sums_cross_nodes and candidate.split.pp == candidate.split.nodes


def _at(verdicts: Sequence[Verdict], concurrency: int) -> list[tuple[Candidate, Fit]]:
    return [(verdict.candidate, one) for verdict in verdicts for one in verdict.fits if one.concurrency == concurrency]


def _able(at: Sequence[tuple[Candidate, Fit]]) -> list[tuple[Candidate, Fit]]:
    """Those that hold all requests at full context; where none does, those that hold one."""
    return [one for one in at if one[1].fits] or [one for one in at if one[1].holds_one]


def _larger(shape: ModelShape, request: Request, gpus: int, nodes: int) -> Larger | None:
    """More GPUs in one machine up to eight, then more machines."""
    machines = [(count, 1) for count in (2, 4, 8) if nodes == 1 and count > gpus]
    machines += [(max(gpus, 8) if nodes == 1 else gpus, count) for count in LARGER_NODES if count > nodes]
    for count, number in machines:
        found = [verdict for verdict in _judge_all(shape, request, candidates(count, number)) if verdict.holds_one]
        if found:
            return Larger(count, number, found[0].candidate)
    return None


def _smaller_context(shape: ModelShape, request: Request, which: Sequence[Candidate]) -> int | None:
    """The longest of context / 2, / 4, ... that one request can have."""
    context = request.context // 2
    while context >= LEAST_CONTEXT:
        less = replace(request, context=context, concurrency=request.concurrency[:1])
        if any(judge(shape, less, candidate).holds_one for candidate in which):
            return context
        context //= 2
    return None
