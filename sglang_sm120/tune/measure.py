"""One layer by every runner that covers it: checked against the reference, then timed in turn.

Right first: what is wrong has no time. `sglang_sm120.bench` has the clock, the weights and the routings.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import msgspec
import torch
from torch import Tensor

from sglang_sm120.bench.moe import Inputs, Layers, one_line
from sglang_sm120.bench.moe_cases import ACTIVATION, Call, relative_error
from sglang_sm120.bench.routing import CACHES, make_cycle
from sglang_sm120.bench.timing import Replay, Timer, interleaved_us
from sglang_sm120.errors import UnsupportedError
from sglang_sm120.kernels.moe.layer import Nvfp4MoeWeights
from sglang_sm120.runners.base import Choice, LayerSpec, MoeRunner
from sglang_sm120.runners.profile import Candidate, Point, Shape, shape_of
from sglang_sm120.runners.registry import RUNNERS
from sglang_sm120.runners.verify import THRESHOLDS
from sglang_sm120.tune.options import REFERENCE_TOKENS, LayerCase, TuneOptions

REFERENCE = "reference"


def choices(numerics: str, runners: tuple[str, ...] | None = None) -> list[Choice]:
    """Every runner, or those of these names, in all that it offers of these numerics ("auto": of both)."""
    return [
        Choice(name, offered)
        for name, runner in RUNNERS.items()
        for offered in runner.numerics
        if (runners is None or name in runners) and numerics in ("auto", offered)
    ]


def layer_spec(case: LayerCase) -> LayerSpec:
    """As a server states it of the first rank."""
    return LayerSpec(
        activation=ACTIVATION,
        hidden_dtype=torch.bfloat16,
        top_k=case.shape.top_k,
        num_global_experts=case.num_global_experts,
    )


def uncovered_reason(choice: Choice, weights: Nvfp4MoeWeights, spec: LayerSpec, num_tokens: int) -> str | None:
    """One sentence on why a batch cannot be served so on this machine, or None. Memory counts too."""
    runner = RUNNERS[choice.runner]
    device = weights.w13_weight.device
    reason = runner.unavailable_reason(device)
    if reason is None:
        reason = runner.unsupported_reason(weights, spec, choice.numerics, num_tokens)
    if reason is None and device.type == "cuda":
        needed = runner.workspace_bytes(weights, spec, choice.numerics, num_tokens)
        free, _ = torch.cuda.mem_get_info(device)
        if needed > free:
            reason = f"it needs up to {needed / 2**30:.1f} GiB beside the weights, {free / 2**30:.1f} GiB are free"
    return reason


class LayerBench:
    """A layer's weights, in as many copies as it takes that no cache helps, and its runners bound to each copy.

    Raises: UnsupportedError: the weights do not fit into the device's memory.
    """

    def __init__(self, case: LayerCase, options: TuneOptions, device: torch.device, l2_bytes: int) -> None:
        self.case, self.options = case, options
        try:
            self.layers = Layers(case.shape, device, l2_bytes, None, options.seed)
        except torch.OutOfMemoryError as error:
            raise UnsupportedError(
                f"the weights of {case.shape.name} do not fit: {one_line(error)}",
                "memory for one layer",
                "stop what else uses the GPU, or measure the part that a rank has (--tp-size, --ep-size)",
            ) from error
        self.spec = layer_spec(case)
        self.choices = choices(options.numerics, options.runners)
        self.warm_tokens: list[int] = []  # counts at which a cache may have helped, for want of memory
        self._bound: dict[Choice, list[Call]] = {}

    @property
    def shape(self) -> Shape:
        return shape_of(self.layers.weights[0], self.spec)

    def calls(self, choice: Choice) -> list[Call]:
        """The runner over each copy of the weights."""
        if choice not in self._bound:
            runner = RUNNERS[choice.runner]
            self._bound[choice] = [self._call(runner, weights, choice.numerics) for weights in self.layers.weights]
        return self._bound[choice]

    def _call(self, runner: MoeRunner, weights: Nvfp4MoeWeights, numerics: str) -> Call:
        bound = runner.bind(weights, self.spec, numerics)
        return lambda hidden, router, ids: bound(hidden, weights, router, ids)

    def inputs(self, num_tokens: int) -> Inputs:
        """Random tokens, and a cycle of uniform routings in which no weight is read again out of a cache."""
        generator = torch.Generator().manual_seed(self.options.seed + num_tokens)
        shape, l2_bytes = self.case.shape, self.layers.l2_bytes
        everyone = self.case.num_global_experts
        if everyone is not None:  # this rank reads its share only of what a cycle reads on all of them
            l2_bytes = l2_bytes * everyone // shape.num_experts
            shape = replace(shape, num_experts=everyone)
        copies = len(self.layers.weights)
        cycle = make_cycle(shape, "uniform", num_tokens, num_copies=copies, l2_bytes=l2_bytes, generator=generator)
        if cycle.reuse_bytes < CACHES * l2_bytes:
            self.warm_tokens.append(num_tokens)
        return Inputs(self.layers, cycle, generator, everyone)


@torch.no_grad()
def measure_point(
    bench: LayerBench, num_tokens: int, timer: Timer, doing: Callable[[str], None] | None = None
) -> Point:
    """Every candidate at one batch size, in the order of the registry. doing: told what happens now.

    Raises: UnsupportedError: a candidate left the GPU unusable for this process.
    """
    doing = doing or (lambda what: None)
    device = bench.layers.device
    inputs = bench.inputs(num_tokens)
    rows: dict[Choice, Candidate] = {}
    replays: dict[str, Replay] = {}
    calls_of: dict[str, int] = {}  # in a replay
    outputs: dict[Choice, list[Tensor]] = {}

    def judge(choice: Choice, results: dict[int, Tensor]) -> bool:
        """Hold the results of some calls against the reference, and note the error; whether all are right."""
        found = [
            compare(got, inputs.reference(call, choice.numerics), choice.numerics) for call, got in results.items()
        ]
        wrong = next((text for _, text in found if text), None)
        reason = "" if wrong is None else f"WRONG, not timed: {wrong}"
        error = max(*(error for error, _ in found), (choice in rows and rows[choice].relative_error) or 0.0)
        rows[choice] = _candidate(choice, reason, failed=wrong is not None, error=error)
        return wrong is None

    def prepare(choice: Choice) -> None:
        calls = bench.calls(choice)
        last = outputs.setdefault(choice, [])

        def one(call: int) -> Tensor:
            return calls[inputs.cycle.copies[call]](inputs.hidden, inputs.router, inputs.ids[call])

        def run_last() -> None:
            last[:] = [one(-1)]

        # The reference reads every expert in each call, in many kernels: one call is a cycle by itself.
        run_all = run_last if choice.runner == REFERENCE else inputs.calls(calls, last)
        calls_of[str(choice)] = 1 if choice.runner == REFERENCE else len(inputs.ids)
        run_all()  # whatever is loaded, compiled or chosen at a first call is not captured
        if judge(choice, {0: one(0), -1: last[0]}):
            replays[str(choice)] = timer.capture(run_all)

    # The reference last: whether it is timed depends on whether others are.
    for choice in sorted(bench.choices, key=lambda choice: choice.runner == REFERENCE):
        doing(f"checking {choice}")
        try:
            reason = uncovered_reason(choice, bench.layers.weights[0], bench.spec, num_tokens)
            if reason is None and choice.runner == REFERENCE and not bench.options.with_reference:
                reason = _reference_reason(num_tokens, others=bool(replays))
            if reason is None:
                prepare(choice)
            else:
                rows[choice] = _candidate(choice, reason)
        except UnsupportedError as error:
            rows[choice] = _candidate(choice, error.found)
        except Exception as error:  # one that breaks does not cost the others their times
            rows[choice] = _candidate(choice, f"failed: {one_line(error)}", failed=True)
            _require_working(device, choice, error)
    doing("timing")
    samples_us = interleaved_us(timer, replays, bench.options.repeat)
    for choice in list(rows):
        # What the timed replays left behind is looked at too.
        name = str(choice)
        if name in samples_us and judge(choice, {-1: outputs[choice][0]}):
            times = [time_us / calls_of[name] for time_us in samples_us[name]]
            rows[choice] = msgspec.structs.replace(rows[choice], samples_us=times)
    return Point(tokens=num_tokens, candidates=[rows[choice] for choice in bench.choices])


def compare(got: Tensor, want: Tensor, numerics: str) -> tuple[float, str]:
    """The largest relative error of a token, and what is wrong with the result in these numerics ("" if nothing).

    The bounds are those of a server's self-check: what it would strike is not timed. The whole batch has one too, since
    W4A4 may move a code, which is much of one token and little of all; a difference in size counts, unlike in a cosine.
    """
    most, cosine = THRESHOLDS[numerics]
    error = relative_error(got, want)
    if not error <= most:
        return error, f"relative error {error:.2e} of a token, bound {most:.2g}"
    difference, size = (tensor.to(torch.float64).norm().item() for tensor in (got.double() - want.double(), want))
    most = math.sqrt(2 * (1 - cosine))
    if difference > most * size:
        return error, f"relative error {difference / size:.2e} of the batch, bound {most:.2g}"
    return error, ""


def _candidate(choice: Choice, reason: str, *, failed: bool = False, error: float = math.inf) -> Candidate:
    return Candidate(
        runner=choice.runner,
        numerics=choice.numerics,
        relative_error=error if math.isfinite(error) else None,
        reason=reason,
        failed=failed,
    )


def _reference_reason(num_tokens: int, *, others: bool) -> str | None:
    if num_tokens <= REFERENCE_TOKENS or not others:
        return None
    return f"timed up to {REFERENCE_TOKENS} tokens only; --with-reference times it at every count"


def _require_working(device: torch.device, choice: Choice, error: Exception) -> None:
    """After an illegal access every later call fails too, whichever runner makes it."""
    if device.type != "cuda":
        return
    try:
        torch.cuda.synchronize(device)
    except Exception as broken:
        others = ",".join(name for name in RUNNERS if name != choice.runner)
        raise UnsupportedError(
            f"{choice} left the GPU unusable for this process: {one_line(error)}",
            "a runner that this GPU can run",
            f"measure the others: --runners {others}; the points so far are in the profile",
        ) from broken
