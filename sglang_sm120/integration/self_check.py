"""Before a server is ready: every MoE runner that it may use, on real weights, against the reference.

"Fast but garbage" is the commonest complaint about these machines. What is wrong is not used, and is named.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

import torch

from sglang_sm120.errors import UnsupportedError
from sglang_sm120.integration.metrics import METRICS
from sglang_sm120.integration.moe import MoeLayer
from sglang_sm120.options import Sm120Options
from sglang_sm120.runners.base import STOCK, Choice
from sglang_sm120.runners.registry import RUNNERS
from sglang_sm120.runners.verify import Finding, check_layer, default_token_counts, describe

logger = logging.getLogger(__name__)


def run(taken: Sequence[MoeLayer], options: Sm120Options, captured: Sequence[int], prefill: int) -> list[Finding]:
    """Check the first, a middle and the last layer; strike what fails from the table of every layer.

    captured: token counts of the decode graphs. prefill: the largest batch.

    Raises: UnsupportedError: with `strict`, or for a runner that was asked for by name, if one is wrong; always, if
    then no runner is left.
    """
    if options.sm120_verify == "off" or not taken:
        return []
    begun = time.perf_counter()
    counts = default_token_counts(captured, prefill)
    findings: list[Finding] = []
    layers = [taken[i] for i in sorted({0, len(taken) // 2, len(taken) - 1})]
    stock_reason = _stock_reason(layers[0])
    if stock_reason is not None:
        logger.warning("sglang-sm120: self-check: SGLang's own path is used unchecked: %s", stock_reason)
        if options.sm120_verify == "strict":
            raise UnsupportedError(
                f"SGLang's own MoE path cannot be called by the self-check: {stock_reason}",
                "every runner that may serve checked, for --sm120-verify strict",
                "use --sm120-verify auto, or --sm120-moe-backend native",
            )
    for ours in layers:
        for (served, skips), choices in _by_inputs(ours, counts, stock=stock_reason is None).items():
            candidates = {choice: ours.bound(choice) for choice in choices}
            findings += check_layer(ours.name, ours.weights("w4a4"), ours.spec, candidates, served, skips=skips)
    failed = [finding for finding in findings if not finding.passed]
    for line in describe(failed):
        logger.warning("sglang-sm120: self-check: %s", line)
    broken = [finding for finding in failed if finding.choice.runner == "reference"]
    if broken:  # there is nothing to compare with: the layer's weights are damaged
        raise UnsupportedError(
            describe(broken)[0],
            "weights and scales that give finite outputs other than zero",
            "export the checkpoint again; --sm120-verify off serves it as it is",
        )
    why = "--sm120-verify strict" if options.sm120_verify == "strict" else ""
    if options.sm120_moe_backend != "auto":
        why = f"--sm120-moe-backend {options.sm120_moe_backend}"
    if failed and why:
        raise UnsupportedError(
            f"the self-check failed: {describe(failed)[0]}",
            f"every runner right within its bounds, for {why}",
            "use --sm120-moe-backend auto, which leaves out what is wrong, and report this",
        )
    wrong = {finding.choice: finding for finding in failed}
    for ours in taken:
        for choice, finding in wrong.items():
            if choice in ours.table.choices():
                figures = f"by {finding.relative_error:.2g} at {finding.num_tokens} tokens"
                ours.strike(choice, f"wrong in the self-check, {figures}")
                METRICS.fallback(f"{choice}: failed the self-check")
        for row in ours.table.rows:
            ours.choice(row.up_to or prefill)  # raises where nothing is left
    checked = dict.fromkeys(finding.choice for finding in findings)
    for choice in checked:
        METRICS.selfcheck(choice, choice not in wrong)
    logger.info(
        "sglang-sm120: self-check of %d MoE layers at %s tokens in %.1f s: %s", len(layers),
        ", ".join(map(str, counts)), time.perf_counter() - begun,
        ", ".join(_verdict(choice, findings) for choice in checked) or "only the reference serves",
    )  # fmt: skip
    return findings


def _by_inputs(
    ours: MoeLayer, counts: Sequence[int], *, stock: bool
) -> dict[tuple[tuple[int, ...], bool], list[Choice]]:
    """The layer's choices by what they are checked with: the token counts that they cover, and whether ids are -1.

    Without the reference, to which they are held. SGLang's own path is not shown ids that it would not meet: the check
    must not break what would have served.
    """
    found: dict[tuple[tuple[int, ...], bool], list[Choice]] = {}
    weights = ours.weights("w4a4")
    for choice in ours.table.choices():
        if choice.runner == "reference" or (choice.runner == STOCK and not stock):
            continue
        covered = tuple(counts)
        if choice.runner != STOCK:
            runner = RUNNERS[choice.runner]
            covered = tuple(
                n for n in counts if runner.unsupported_reason(weights, ours.spec, choice.numerics, n) is None
            )
        if covered:
            found.setdefault((covered, choice.runner != STOCK), []).append(choice)
    return found


def _stock_reason(ours: MoeLayer) -> str | None:
    """Why SGLang's own path, where the table names it, cannot be called outside a forward pass; None: it can.

    It may lean on something that only a forward pass sets up. That says nothing about its results, so it is not struck
    for it: a server that SGLang serves by itself has to serve with us.
    """
    stock = [choice for choice in ours.table.choices() if choice.runner == STOCK]
    if not stock:
        return None
    weights, spec = ours.weights("w4a4"), ours.spec
    device = weights.w13_weight.device
    ids = torch.arange(spec.top_k, dtype=torch.int32, device=device)[None] % weights.num_experts + spec.expert_offset
    x = torch.ones(1, weights.hidden_size, dtype=spec.hidden_dtype, device=device)
    try:
        ours.bound(stock[0])(x, weights, torch.full(ids.shape, 1 / spec.top_k, device=device), ids)
    except Exception as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    return None


def _verdict(choice: Choice, findings: Sequence[Finding]) -> str:
    mine = [finding for finding in findings if finding.choice == choice]
    if not all(finding.passed for finding in mine):
        return f"{choice} WRONG, not used"
    return f"{choice} right (relative error up to {max(finding.relative_error for finding in mine):.1e})"
