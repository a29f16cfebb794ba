"""The self-check at start: each runner that may serve a layer, held against the reference on the layer's own weights.

What to do about a finding is the caller's. Runs on the current stream, outside of CUDA graphs, and reads values back.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sglang_sm120.errors import ConfigError, ContractError, Sm120Error
from sglang_sm120.kernels.moe.layer import W13_ORDERS, Nvfp4MoeWeights
from sglang_sm120.kernels.quantization.nvfp4.api import swizzle_blockscale, unswizzle_blockscale
from sglang_sm120.runners.base import Bound, Choice, LayerSpec
from sglang_sm120.runners.native import ReferenceRunner

# (largest relative error of a row, least mean cosine of the rows), against the reference in the same numerics. The
# error catches one wrong token or expert; the cosine catches what is small in each row but everywhere. See _bounds.
THRESHOLDS: dict[str, tuple[float, float]] = {
    # Slots are rounded to 16 bits and, by some runners, the results of both GEMMs: up to 0.008 of a row was seen, and a
    # cosine of 0.99998. A wrong scale, order or expert is off by 0.1 and more.
    "w4a16": (0.02, 0.9995),
    # A rounding before the activations are quantised moves a code, or the scale of 16, by a step. That is rare but can
    # be much of one row: up to 0.15 with a 16-bit rounding between the GEMMs of small layers, at a cosine of 0.9995. A
    # wrong expert in one of 8 equal slots is 0.33. An expert that adds less than a fifth to each row can be missed.
    "w4a4": (0.2, 0.998),
}
MOST_TOKENS = 256


@dataclass(frozen=True)
class Finding:
    """One candidate on one layer at one batch size.

    relative_error: of the WORST row, |got - reference| / |reference| (Euclidean). inf without a comparable result.
    cosine: of a row and the reference's, the mean over rows. 0 without a comparable result.
    detail: the failure's text, or a guess at its cause; "" when passed.
    """

    layer: str
    choice: Choice
    num_tokens: int
    relative_error: float
    cosine: float
    passed: bool
    detail: str


class _Case(NamedTuple):
    weights: Nvfp4MoeWeights
    spec: LayerSpec
    numerics: str
    hidden_states: Tensor
    topk_weights: Tensor
    topk_ids: Tensor

    def run(self, bound: Bound, num_tokens: int) -> Tensor:
        """The first rows, copied: a runner may write to what it is given."""
        x, topk_weights, topk_ids = (tensor[:num_tokens].clone() for tensor in self[3:])
        return bound(x, self.weights, topk_weights, topk_ids)

    def reference(self) -> Tensor:
        """Raises: what the reference raises, and ConfigError for a result that nothing can be compared with."""
        result = self.run(ReferenceRunner().bind(self.weights, self.spec, self.numerics), len(self.hidden_states))
        fault = "all zero" if not bool(result.any()) else "not finite"
        if fault == "all zero" or not bool(result.isfinite().all()):
            raise ConfigError(f"the reference is {fault}: scales unset?", "usable weights", "load or export them again")
        return result


def default_token_counts(captured: Sequence[int], prefill: int) -> tuple[int, ...]:
    """At most five batch sizes to check, ascending, of the captured ones (may be none) and a prefill's tokens.

    Runners choose kernels by the rows of an expert, so: the smallest, the largest up to 64, two between, and one like a
    prefill, capped since the reference runs every expert on every token; at 256 each of 256 experts leads a row.
    """
    small = sorted({count for count in captured if 1 <= count <= 64}) or [min(min(captured, default=1), MOST_TOKENS)]
    return tuple(sorted({*(small[(len(small) - 1) * i // 3] for i in range(4)), min(max(prefill, 1), MOST_TOKENS)}))


@torch.no_grad()
def check_layer(
    name: str,
    weights: Nvfp4MoeWeights,
    spec: LayerSpec,
    candidates: Mapping[Choice, Bound],
    token_counts: Sequence[int],
    *,
    seed: int = 0,
    skips: bool = True,
) -> list[Finding]:
    """Hold each candidate, at each batch size, against the reference in its numerics.

    Args:
        candidates: what `MoeRunner.bind` gave, by choice. An exception in one is a finding.
        token_counts: each 1 or more. The reference runs once, for the largest: rows do not depend on other rows.
        seed: of the inputs, the same on every device and rank.
        skips: whether some slots have the id -1. Ids of other ranks come with spec.num_global_experts anyway.

    Returns:
        A finding for each candidate and size. Where the reference raises, is all zero or is not finite, ONE failed
        finding with the choice `reference` stands for all candidates in these numerics: the layer itself is broken.

    Raises: ContractError without a batch size, or with one below 1.
    Memory: the reference's workspace, and a few [T * k, H]; after a failure also copies of the layer's block scales.
    """
    counts = sorted(set(token_counts))
    if not counts or counts[0] < 1:
        raise ContractError(f"batch sizes {counts}", "one or more, each above 0", "use default_token_counts()")
    inputs = _make_inputs(weights, spec, counts[-1], seed, skips)
    findings = []
    for numerics in dict.fromkeys(choice.numerics for choice in candidates):
        case = _Case(weights, spec, numerics, *inputs)
        try:
            want = case.reference()
        except Exception as error:
            choice = Choice("reference", numerics)
            findings.append(Finding(name, choice, counts[-1], math.inf, 0.0, False, _text(error)))
            continue
        explain = functools.partial(_cause, case, want, [])
        for choice, bound in candidates.items():
            for count in counts if choice.numerics == numerics else ():
                findings.append(Finding(name, choice, count, *_try(case, bound, want[:count], explain)))
    return findings


def describe(findings: Sequence[Finding]) -> list[str]:
    """Short lines for the log: one for each layer and choice that failed, then one for each choice that passed."""
    groups: dict[tuple[bool, Choice, str], list[Finding]] = {}
    for finding in findings:
        groups.setdefault((finding.passed, finding.choice, finding.layer * (not finding.passed)), []).append(finding)
    lines = []
    for (passed, choice, layer), group in sorted(groups.items(), key=lambda item: item[0][0]):
        worst = max(group, key=lambda finding: finding.relative_error)
        if passed:
            line = f"{choice} agrees with the reference on {len({f.layer for f in group})} layer(s) at {_tokens(group)}"
            line += f": relative error up to {worst.relative_error:.2g}, cosine from {min(f.cosine for f in group):.6f}"
            lines.append(line)
            continue
        line = f"{choice} failed on {layer} at {_tokens([worst])}"
        if math.isfinite(worst.relative_error):
            most, least = _bounds(choice.numerics, worst.num_tokens)
            line = f"{choice} differs from the reference on {layer}: relative error {worst.relative_error:.3g} at "
            line += f"{_tokens([worst])} (bound {most}), cosine {worst.cosine:.3g} (bound {least:.4f})"
        also = f"; also at {_tokens([f for f in group if f is not worst])}" if len(group) > 1 else ""
        lines.append(f"{line}: {worst.detail}{also}")
    return lines


def _tokens(findings: Sequence[Finding]) -> str:
    counts = sorted({finding.num_tokens for finding in findings})
    return f"{', '.join(map(str, counts))} token{'' if counts == [1] else 's'}"


def _try(case: _Case, bound: Bound, want: Tensor, explain: Callable[[Tensor], str]) -> tuple[float, float, bool, str]:
    """A Finding's figures, whether it passed, and its detail."""
    try:
        # NaN where the allocator will put slots and results: an older right result there would hide a row not written.
        with contextlib.suppress(torch.OutOfMemoryError):
            [want.new_full((len(want) * rows, want.shape[1]), math.nan) for rows in (case.spec.top_k, 1, 1)]
        got = case.run(bound, len(want))
        if _kind(got) != _kind(want):
            raise TypeError(f"the result is {_kind(got)}, not {_kind(want)}")
        error, cosine, passed = _compare(got, want, case.numerics)  # waits: what a kernel did wrong is raised here
        return error, cosine, passed, "" if passed else explain(got)
    except Exception as raised:  # not KeyboardInterrupt
        return math.inf, 0.0, False, _text(raised)


def _kind(result: object) -> str:
    return f"{list(result.shape)} {result.dtype} on {result.device}" if isinstance(result, Tensor) else repr(result)


def _text(error: Exception) -> str:
    return error.found if isinstance(error, Sm120Error) else " ".join(f"{type(error).__name__}: {error}".split())[:300]


def _bounds(numerics: str, num_rows: int) -> tuple[float, float]:
    """THRESHOLDS, with a cosine that lets ONE row be off by what a row may be: of few rows, that is all of them."""
    most, least = THRESHOLDS[numerics]
    return most, least - most**2 / 2 / num_rows


def _row_errors(got: Tensor, want: Tensor) -> Tensor:
    """float64 [T]: |got - want| / |want|, inf where got is not finite. A row of zeros has to be met exactly."""
    size = want.double().norm(dim=1).clamp(min=torch.finfo(torch.float32).tiny)
    return ((got.double() - want.double()).norm(dim=1) / size).nan_to_num(nan=math.inf, posinf=math.inf)


def _compare(got: Tensor, want: Tensor, numerics: str) -> tuple[float, float, bool]:
    """The worst row's error, the mean cosine, and whether both are within their bounds."""
    errors, (most, least) = _row_errors(got, want), _bounds(numerics, len(want))
    cosines = torch.cosine_similarity(got.double(), want.double(), dim=1, eps=1e-60)
    error, cosine = torch.stack((errors.max(), cosines.where(errors > 0, 1.0).mean())).tolist()  # of zero rows too
    return (error, cosine, error <= most and cosine >= least) if math.isfinite(error) else (math.inf, 0.0, False)


def _make_inputs(weights: Nvfp4MoeWeights, spec: LayerSpec, num_tokens: int, seed: int, skips: bool) -> list[Tensor]:
    """Hidden states, router weights (of sum 1, but for k = 1, where all would be 1) and ids, drawn on the CPU."""
    generator, device = torch.Generator("cpu").manual_seed(seed), weights.w13_weight.device
    x = torch.randn(num_tokens, weights.hidden_size, generator=generator, device="cpu", dtype=torch.float32)
    x[:, ::257] *= 20  # channels of outliers, as models have
    ids = _route(num_tokens, weights.num_experts, spec, generator, skips)
    drawn, order = torch.rand(2, *ids.shape, generator=generator, device="cpu", dtype=torch.float32)
    router = 0.25 + 0.75 * drawn if spec.top_k == 1 else 0.9 + 0.2 * drawn
    if spec.top_k > 1:  # one leads, so that its scale shows; no slot is so light that a wrong expert in it would not
        router[:, 0] *= 3
        router /= router.sum(1, keepdim=True)
    router, ids = (tensor.gather(1, order.argsort(1)).to(device) for tensor in (router, ids))
    return [x.to(device, spec.hidden_dtype), router, ids]


def _route(num_tokens: int, num_experts: int, spec: LayerSpec, generator: torch.Generator, skips: bool) -> Tensor:
    """int32 [T, k], distinct in a row, the leading expert first. Experts lead in turn, the last one first; other slots
    go to experts not hit yet, then to any. Two of five rows have a slot of -1 or, with global ids, of another rank.
    """
    first = spec.expert_offset if spec.num_global_experts is not None else 0
    foreign = [*{*range(spec.num_global_experts or 0)} - {*range(first, first + num_experts)}]
    foreign.sort(key=lambda expert: abs(2 * (expert - first) - num_experts + 1))
    hit, led = torch.zeros(2, num_experts, device="cpu")
    rank = (torch.arange(num_experts, device="cpu") + 1) % num_experts / num_experts  # of experts that led alike
    ids = torch.full((num_tokens, spec.top_k), -1, dtype=torch.int32, device="cpu")
    for token in range(num_tokens):
        abroad = token % 5 == 2 and len(foreign) > 0
        held = min(spec.top_k - (abroad or (skips and token % 5 == 3)), num_experts)
        if held:
            lead = (3 * led + hit + rank).argmin()
            led[lead] += 1
            order = torch.rand(num_experts, generator=generator, device="cpu") + hit
            order[0] -= int(token == 0)  # the first expert beside the last
            order[lead] = -2
            chosen = order.argsort()[:held]
            hit[chosen] = 1
            ids[token, :held] = chosen.int() + first
        if abroad:
            ids[token, held] = foreign[token // 5 % len(foreign)]
    return ids


def _cause(case: _Case, reference: Tensor, mistaken: list[tuple[str, Tensor]], got: Tensor) -> str:
    """A guess at why a result is wrong. mistaken: filled by the first failure, used by the later ones."""
    want, numerics = reference[: len(got)], case.numerics
    if not bool(got.any()):
        return "the result is all zero"
    if bool(got.isfinite().all()):
        with contextlib.suppress(Exception):  # a guess that cannot be made must not hide the failure
            for text, changed in _mistakes(case) if not mistaken else ():
                with contextlib.suppress(Exception):
                    mistaken.append((text, changed.reference()))
        for text, result in mistaken:
            if _compare(got, result[: len(got)], numerics)[2] and not _compare(result, reference, numerics)[2]:
                return f"looks like {text}"
        factor = (got.double() * want.double()).sum() / want.double().square().sum()
        if abs(float(factor) - 1) > THRESHOLDS[numerics][0] and _compare(got / factor, want, numerics)[2]:
            return f"looks like every value multiplied by {factor.item():.3g}"
    wrong = (_row_errors(got, want) > THRESHOLDS[numerics][0]).nonzero().flatten().tolist()
    if not wrong:
        return "each row is within its bound, the cosine is not"
    text = f"{len(wrong)} of {len(got)} rows differ or are not finite, the first is row {wrong[0]}"
    for row in range(len(got) if bool(got[wrong[0]].any()) else 0):
        if _compare(got[wrong[:1]], want[row : row + 1], numerics)[2]:
            return f"{text}, which holds the result of row {row}"
    shared = set.intersection(*({*case.topk_ids[row].tolist()} for row in wrong)) - {-1}
    return text + (f"; each of them has expert {shared.pop()}" if len(wrong) > 1 and len(shared) == 1 else "")


def _mistakes(case: _Case) -> Iterator[tuple[str, _Case]]:
    """What a runner may get wrong, as inputs that give the reference the same result."""
    weights = case.weights

    def with_scales(kind: str, of: Callable[[Tensor], Tensor], names: Sequence[str] = ("w13", "w2")) -> _Case:
        changed: dict[str, Any] = {f"{name}_{kind}": of(getattr(weights, f"{name}_{kind}")) for name in names}
        return case._replace(weights=replace(weights, **changed))

    def one_for_32(raw: Tensor) -> Tensor:
        plain = unswizzle_blockscale(raw, *raw.shape[-2:]).view(torch.uint8)
        return swizzle_blockscale(plain[..., ::2].repeat_interleave(2, -1).view(raw.dtype))

    yield "router weights left out", case._replace(topk_weights=torch.ones_like(case.topk_weights))
    if weights.is_gated:
        scale = weights.w13_global_scale
        flipped = scale.reshape(len(scale), -1).flip(1).reshape(scale.shape)
        for order, columns in itertools.product(W13_ORDERS, (scale, flipped)):
            what = "the global scales of gate and up" if order == weights.w13_order else "gate and up"
            yield f"{what} swapped", case._replace(weights=replace(weights, w13_order=order, w13_global_scale=columns))
    yield "block scales read as if not swizzled", with_scales("blockscale", swizzle_blockscale)
    # With e4m3 scales. e8m0 codes cannot be put into these weights; read so, they give about zero.
    yield "MXFP4: one block scale for 32 elements", with_scales("blockscale", one_for_32)
    kinds = {"global_scale": "global"} | ({"input_scale": "activation"} if case.numerics == "w4a4" else {})
    for names, (kind, what) in itertools.product((("w13", "w2"), ("w13",), ("w2",)), kinds.items()):
        which = f"{what} scales of {' and '.join(names)}"
        yield f"{which} left out", with_scales(kind, torch.ones_like, names)
        yield f"{which} inverted", with_scales(kind, torch.reciprocal, names)
