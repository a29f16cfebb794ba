"""A plan as plain values: what `--json` prints, and what the tables and the picture are made from."""

from __future__ import annotations

from typing import Any

from sglang_sm120.plan.choose import Pick, Plan, Verdict
from sglang_sm120.plan.fits import Fit
from sglang_sm120.plan.launch import launch
from sglang_sm120.plan.reasons import token_facts

FORMAT = "sglang-sm120 plan 1"


def record(plan: Plan, model: str) -> dict[str, Any]:
    """Everything, as JSON has it.

    Args:
        plan: what was chosen.
        model: what `sglang serve` is to be given.

    Returns:
        Numbers, texts, lists and objects; bytes and tokens are whole numbers. docs/plan.md has the names.
    """
    shape, request = plan.shape, plan.request
    return {
        "format": FORMAT,
        "model": {
            "name": shape.name,
            "architecture": shape.architecture,
            "num_layers": shape.num_layers,
            "hidden_size": shape.hidden_size,
            "max_context": shape.max_context,
            "mtp_layers": shape.mtp_layers,
            "not_counted": list(shape.unknown),
        },
        "gpu": {
            "name": request.gpu.name,
            "title": request.gpu.title,
            "shown_bytes": request.gpu.shown_bytes,
            "cuda_bytes": request.gpu.cuda_bytes,
            "l2_bytes": request.gpu.l2_bytes,
            "persisting_l2_bytes": request.gpu.persisting_l2_bytes,
            "p2p": request.gpu.p2p,
            "is_sm120": request.gpu.is_sm120,
            "source": request.gpu.source,
            "note": request.gpu.note,
        },
        "gpus": plan.gpus,
        "nodes": plan.nodes,
        "context": request.context,
        "concurrency": list(request.concurrency),
        "kv_dtype": request.kv_dtype,
        "mtp": request.mtp,
        "splits": [_split(verdict) for verdict in plan.verdicts],
        "latency": _pick(plan, plan.latency, model),
        "throughput": _pick(plan, plan.throughput, model),
        "larger": None
        if plan.larger is None
        else {"gpus": plan.larger.gpus, "nodes": plan.larger.nodes, "split": plan.larger.candidate.label},
        "smaller_context": plan.smaller_context,
    }


def _split(verdict: Verdict) -> dict[str, Any]:
    split = verdict.candidate.split
    return {
        "label": verdict.candidate.label,
        "tp": split.tp,
        "ep": split.ep,
        "dp_attention": split.dp_attention,
        "pp": split.pp,
        "nodes": split.nodes,
        "replicas": verdict.candidate.replicas,
        "gpus": verdict.candidate.gpus,
        "holds_one": verdict.holds_one,
        "obstacles": list(verdict.obstacles),
        "concurrency": [_fit(one) for one in verdict.fits],
    }


def _fit(fit: Fit) -> dict[str, Any]:
    return {
        "requests": fit.concurrency,
        "fits": fit.fits,
        "why": fit.why,
        "components": [
            {"name": part.name, "kind": part.kind, "bytes": part.bytes, "detail": part.detail}
            for part in fit.components
        ],
        "weight_bytes": fit.weight_bytes,
        "fixed_bytes": fit.fixed_bytes,
        "gpu_bytes": fit.gpu_bytes,
        "kv_bytes_per_token": fit.kv_bytes_per_token,
        "needed_tokens": fit.needed_tokens,
        "kv_tokens": fit.kv_tokens,
        "all_kv_tokens": fit.all_kv_tokens,
        "most_requests": fit.most_requests,
        "tokens_each": fit.tokens_each,
        "mem_fraction": fit.mem_fraction,
        "default_mem_fraction": fit.default_fraction,
        "default_kv_tokens": fit.default_kv_tokens,
        "chunked_prefill": fit.serving.chunked_prefill,
    }


def _pick(plan: Plan, pick: Pick | None, model: str) -> dict[str, Any] | None:
    if pick is None:
        return None
    started = launch(model, plan.shape, pick.candidate, pick.fit, plan.request.gpu)
    facts = token_facts(plan.shape, pick.candidate, pick.fit)
    return {
        "split": pick.candidate.label,
        "gpus": pick.candidate.gpus,
        "requests": pick.fit.concurrency,
        "reasons": list(pick.reasons),
        "environment": [{"name": one.name, "value": one.value, "reason": one.reason} for one in started.environment],
        "flags": [{"name": one.name, "value": one.value, "reason": one.reason} for one in started.settings()],
        "argv": [started.argv(rank) for rank in range(started.nodes)],
        "commands": [started.command(rank) for rank in range(started.nodes)],
        "ray": started.ray(),
        "notes": list(started.notes),
        "a_token": {
            "weight_bytes_read": facts.read_bytes,
            "sums": facts.sums,
            "sum_ranks": facts.sum_ranks,
            "sum_bytes": facts.sum_bytes,
        },
    }


def shown_requests(record_: dict[str, Any]) -> int:
    """The number of requests that tables and pictures show splits at: what the throughput pick is for, or the most."""
    pick = record_["throughput"]
    return int(max(record_["concurrency"]) if pick is None else pick["requests"])


def at(split: dict[str, Any], requests: int) -> dict[str, Any]:
    """A split at this number of requests."""
    return next(one for one in split["concurrency"] if one["requests"] == requests)


def named(record_: dict[str, Any], label: str) -> dict[str, Any]:
    """The split of this label."""
    return next(split for split in record_["splits"] if split["label"] == label)
