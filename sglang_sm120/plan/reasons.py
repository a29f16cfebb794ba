"""Why a split was picked, in sentences: rules and arithmetic, never a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from sglang_sm120.plan import weights
from sglang_sm120.plan.fits import Fit, Request
from sglang_sm120.plan.gpus import GIB
from sglang_sm120.plan.shapes import ModelShape
from sglang_sm120.plan.splits import Candidate, all_reduce_obstacle

SUM_ELEMENT_BYTES = 2
"""Hidden states are summed in bfloat16 or float16."""


@dataclass(frozen=True)
class TokenFacts:
    """What decoding one token costs on one GPU, by arithmetic.

    read_bytes: weights that it reads, routed experts by how many a token has on average; not the embedding, nor MLA's
    kv_b, whose absorbed form is read instead. The whole step of one request, as every weight is read once.
    sums: all-reduces over sum_ranks GPUs, of sum_bytes each.
    """

    read_bytes: int
    sums: int
    sum_ranks: int
    sum_bytes: int


def token_facts(shape: ModelShape, candidate: Candidate, fit: Fit) -> TokenFacts:
    """The arithmetic of one decoded token.

    Args:
        shape: the model.
        candidate: the split.
        fit: its accounting, of the fullest GPU.
    """
    held_of = {part.name: part.bytes for part in fit.components if part.kind == "weights"}
    layers = -(-shape.num_layers // candidate.split.pp)
    read = sum(held_of.values()) - layers * weights.kv_b_bytes(shape, candidate.split.widths)
    for name, held in held_of.items():
        if name == "embedding" or name.startswith("MTP"):
            read -= held
        elif name.startswith("routed experts") and shape.moe is not None:
            read -= held - held * shape.moe.top_k // shape.moe.num_experts
    sums = 2 * layers if candidate.split.tp > 1 else 0
    return TokenFacts(read, sums, candidate.split.tp, shape.hidden_size * SUM_ELEMENT_BYTES)


def latency_reasons(
    shape: ModelShape, request: Request, pick: tuple[Candidate, Fit], larger_tp: Sequence[str]
) -> Iterator[str]:
    """Why this split for one or two requests.

    Args:
        shape: the model.
        request: what is served.
        pick: what was taken.
        larger_tp: labels of splits with a larger tensor-parallel group that were not to be had, with why.
    """
    candidate, fit = pick
    split = candidate.split
    facts = token_facts(shape, candidate, fit)
    if split.pp > 1:
        where = " and keeps sums inside a node" if split.nodes > 1 else ""
        yield f"Rule: few stages, large TP. Nothing with fewer than {split.pp} pipeline stages fits{where}."
    else:
        yield f"Rule: with few requests a step mostly reads weights; TP{split.tp} is the largest group that fits."
    yield from larger_tp
    read = f"{facts.read_bytes / GIB:.2f} GiB of {'its stage' if split.pp > 1 else 'weights'}"
    yield f"Arithmetic: a GPU reads about {read} for a token{_average(shape, split.ep)}."
    yield from _sums(candidate, facts, request)
    if split.ep == 1 and shape.moe is not None and split.tp > 1:
        yield (
            f"EP would read whole experts: of the {shape.moe.top_k} of a token several may lie on one GPU, for which "
            "the others wait; TP reads a part of each everywhere."
        )


def throughput_reasons(
    shape: ModelShape,
    request: Request,
    pick: tuple[Candidate, Fit],
    others: Sequence[tuple[Candidate, Fit]],
    piped: bool,
) -> Iterator[str]:
    """Why this split for many requests.

    Args:
        shape: the model.
        request: what is served.
        pick: what was taken.
        others: what else could have been, the most KV tokens first.
        piped: whether pipelines were left aside.
    """
    candidate, fit = pick
    groups = f" in {candidate.groups} caches" if candidate.groups > 1 else ""
    if fit.fits:
        asked = f"{fit.concurrency:,} request{'' if fit.concurrency == 1 else 's'} of {request.context:,} tokens"
        yield f"Rule: of the splits that hold {asked}, the fewest GPUs a sum: {fit.all_kv_tokens:,} tokens{groups}."
    else:
        yield f"Rule: the KV cache decides how many requests run at once: {fit.all_kv_tokens:,} tokens{groups}."
    if fit.concurrency < request.concurrency[-1]:
        most = f"{request.concurrency[-1]:,} at once"
        yield f"Planned for {fit.concurrency:,}: what {most} need beside the cache leaves none for one whole request."
    if others and not fit.fits:
        best = others[0]
        if best[1].all_kv_tokens > fit.all_kv_tokens:
            yield (
                f"{best[0].label} has more, {best[1].all_kv_tokens:,}; but of those within a tenth of the most, the "
                "one with the fewest GPUs a sum is taken. That tenth is a guess."
            )
        else:
            yield f"The next, {best[0].label}, has {best[1].all_kv_tokens:,}."
    if shape.attention.latent and candidate.groups > 1:
        yield "MLA keeps one latent for all heads, which TP cannot divide: every GPU of a TP group holds all of it."
    elif candidate.replicas > 1:
        yield "Replicas hold the weights once each and share no sums."
    if piped:
        yield "Pipelines were left aside: SGLang 0.5.23 runs them without overlapped scheduling."
    yield from _sums(candidate, token_facts(shape, candidate, fit), request)


def _average(shape: ModelShape, ep: int) -> str:
    if shape.moe is None:
        return ""
    return f", of routed experts {shape.moe.top_k} of {shape.moe.num_experts}" + (" on average" if ep > 1 else "")


def _sums(candidate: Candidate, facts: TokenFacts, request: Request) -> Iterator[str]:
    if not facts.sums:
        yield "One GPU a copy: nothing is summed between GPUs."
        return
    stage = " in each stage" if candidate.split.pp > 1 else ""
    size = f"{facts.sum_bytes / 1024:g} KiB a token"
    kind = "gathers and sums" if candidate.split.dp_attention > 1 else "sums"
    yield f"Arithmetic: 2 {kind} a layer over {facts.sum_ranks} GPUs, {facts.sums} a step{stage}, {size}."
    obstacle = all_reduce_obstacle(candidate, request.gpu)
    if obstacle is None:
        yield f"This package's all-reduce serves {facts.sum_ranks} ranks of one host."
