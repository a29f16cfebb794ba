"""Random routings, and cycles of them in which no weight is read again while a cache can still hold it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sglang_sm120.bench.options import ModelShape

CACHES = 3
"""Bytes between two reads of a weight, in sizes of the L2 cache; more than 1, since no cache is a perfect LRU."""

_MIN_CALLS, _MAX_CALLS = 4, 96


def random_routing(kind: str, num_tokens: int, num_experts: int, top_k: int, generator: torch.Generator) -> Tensor:
    """int64 [T, k] on the CPU, k distinct experts a token.

    "uniform": all sets of k are equally likely. "zipf": experts are drawn one after another without replacement, with
    probability ~ 1 / rank (Gumbel top-k of -log(rank)), the ranks being a random permutation of the experts.
    """
    scores = torch.rand(num_tokens, num_experts, generator=generator, dtype=torch.float64)
    scores = -(-scores.clamp_min(1e-300).log()).log()
    if kind == "zipf":
        ranks = torch.randperm(num_experts, generator=generator) + 1
        scores -= ranks.to(torch.float64).log()
    return scores.topk(top_k, dim=1).indices


def bytes_per_expert(shape: ModelShape) -> int:
    """Packed e2m1 and block scales of one gated expert, without padding: 9 bytes for 16 elements."""
    return (2 + 1) * shape.intermediate_size * shape.hidden_size * 9 // 16


def weight_copies(shape: ModelShape, l2_bytes: int) -> int:
    """How many layers' worth of distinct weights a cycle needs: half of them are CACHES times the L2 cache."""
    return -(-2 * CACHES * l2_bytes // (shape.num_experts * bytes_per_expert(shape)))


@dataclass(frozen=True)
class Cycle:
    """Calls that are made one after another and then again.

    topk_ids: for each call int32 [T, k] on the CPU.
    copies: for each call which copy of the weights it reads.
    active: for each call how many experts have a row.
    reuse_bytes: the fewest bytes of weights that are read between two reads of the same expert.
    """

    topk_ids: list[Tensor]
    copies: list[int]
    active: list[int]
    reuse_bytes: int


def make_cycle(
    shape: ModelShape, kind: str, num_tokens: int, *, num_copies: int, l2_bytes: int, generator: torch.Generator
) -> Cycle:
    """Different routings in one cycle that reads CACHES times the L2 cache or more.

    A layer of a real model finds none of its weights in the cache: all other layers came in between. Here there are few
    layers, so each routing's experts are renamed to those whose last use is longest ago. That keeps what a routing is
    (rows of each expert, experts of each token) and, unlike drawing experts again, popular ones do not stay cached.
    """
    needed = CACHES * l2_bytes
    one = bytes_per_expert(shape)
    names = [torch.randperm(shape.num_experts, generator=generator) for _ in range(num_copies)]
    first = [0] * num_copies
    calls: list[Tensor] = []
    used: list[Tensor] = []
    best = (-1, 0)
    while best[0] < needed and len(calls) < _MAX_CALLS:
        for copy in range(num_copies):
            routing = random_routing(kind, num_tokens, shape.num_experts, shape.top_k, generator)
            active, place = routing.unique(return_inverse=True)
            chosen = names[copy][(first[copy] + torch.arange(active.numel())) % shape.num_experts]
            first[copy] += active.numel()
            calls.append(chosen[place].to(torch.int32))
            used.append(chosen.sort().values + copy * shape.num_experts)
        enough = one * sum(map(len, used)) >= needed or len(calls) >= _MAX_CALLS
        if len(calls) >= _MIN_CALLS and enough:
            best = max(best, (reuse_distance(used) * one, -len(calls)))
    count = -best[1]
    copies = [call % num_copies for call in range(count)]
    return Cycle(calls[:count], copies, [len(experts) for experts in used[:count]], best[0])


def reuse_distance(used: list[Tensor]) -> int:
    """Of a cycle, each call reading its experts in this order: the fewest reads from one to the next of the same."""
    reads = torch.cat([*used, *used])
    order = torch.argsort(reads, stable=True)
    same = reads[order[1:]] == reads[order[:-1]]
    return int((order[1:] - order[:-1])[same].min())
