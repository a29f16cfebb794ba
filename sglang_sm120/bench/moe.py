"""`sglang-sm120 bench moe`: the fused MoE layer by each of our kernels, beside a baseline, in one run.

How: docs/benchmarking.md. A candidate is checked before it is timed, and one that is wrong has no time.
"""

from __future__ import annotations

import importlib
import math
import shlex
import sys
from collections.abc import Callable
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from torch import Tensor

from sglang_sm120.bench import plot, report
from sglang_sm120.bench.moe_cases import (
    Call,
    candidates,
    random_weights,
    reference_output,
    relative_error,
    served_by,
)
from sglang_sm120.bench.options import ModelShape, MoeBenchOptions
from sglang_sm120.bench.routing import Cycle, bytes_per_expert, make_cycle, weight_copies
from sglang_sm120.bench.timing import GraphTimer, Replay, Timer, copy_tb_s, interleaved_us, machine_facts, require_gpu
from sglang_sm120.errors import ConfigError, Sm120Error, UnsupportedError
from sglang_sm120.kernels.moe.layer import Nvfp4MoeWeights

Prepare = Callable[[Nvfp4MoeWeights], Call]

# The largest relative error of a token. All round to bfloat16 after each GEMM, to 2**-9 of a value; W4A4 can also round
# an element between the GEMMs to the neighbouring e2m1.
BOUNDS = {"w4a16": 0.01, "w4a4": 0.02, "baseline": 0.02}

_PIPE_COLUMNS = 140
_MEMORY_SHARE = 0.5  # of what is free, for weights; the rest is for activations and graphs


def run(options: MoeBenchOptions, console: Console | None = None) -> int:
    """Measure, or read a file, and report; 1 if a candidate was wrong or failed, else 0.

    Raises: Sm120Error, with what to do about it.
    """
    console = console or terminal()
    if options.plot is not None:
        plot.require_matplotlib()
    if options.from_json is not None:
        results = report.read(options.from_json)
    else:
        results = _measure_all(options, console)
    report.show(console, results)
    if options.markdown:
        console.out(report.markdown(results), highlight=False)
    if options.plot is not None:
        plot.draw(results, options.plot)
        console.print(f"wrote {options.plot}", markup=False)
    return 1 if report.failures(results) else 0


def terminal() -> Console:
    """The terminal; into a pipe or a file, wide enough that no row of the table is folded."""
    console = Console()
    return console if console.is_terminal else Console(width=_PIPE_COLUMNS)


def load_baseline(name: str) -> Prepare | None:
    """The function that "MODULE:FUNCTION" names; None for "none".

    Raises: ConfigError, with the reason, if it cannot be imported.
    """
    if name == "none":
        return None
    module, _, function = name.partition(":")
    try:
        return getattr(importlib.import_module(module), function)
    except Exception as error:  # a module may fail in any way while it is imported
        raise ConfigError(
            f"baseline {name} cannot be imported: {one_line(error)}",
            "an importable MODULE:FUNCTION whose own requirements are installed",
            "install what it needs, put it on PYTHONPATH, or pass --baseline none",
        ) from error


def _measure_all(options: MoeBenchOptions, console: Console) -> dict[str, Any]:
    device = require_gpu()
    prepare = load_baseline(options.baseline)
    machine = machine_facts()
    command = shlex.join(["sglang-sm120", *sys.argv[1:]])
    results: dict[str, Any] = {
        "format": report.FORMAT,
        "command": command,
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine,
        "baseline": options.baseline,
        "samples": options.repeat,
        "seed": options.seed,
        "copy_tb_s": [],
        "points": [],
    }
    report.write_json(options.json, results)  # a path that cannot be written is noticed now
    console.print(report.header(results), markup=False, highlight=False)
    total = len(options.models) * len(options.tokens) * len(options.routings)
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("", total=total)
        for shape in options.models:
            progress.update(task, description=f"{shape.name}: weights")
            results["copy_tb_s"] += copy_tb_s()
            layers = Layers(shape, device, machine["l2_bytes"], prepare, options.seed)
            for tokens in options.tokens:
                for routing in options.routings:
                    progress.update(task, description=f"{shape.name}: {tokens} tokens, {routing}")
                    point = measure_point(layers, tokens, routing, options, GraphTimer())
                    results["points"].append(point)
                    report.write_json(options.json, results)
                    progress.advance(task)
            del layers
            torch.cuda.empty_cache()
    return results


class Layers:
    """Copies of one model's layer with different weights, and the baseline over each of them."""

    def __init__(
        self, shape: ModelShape, device: torch.device, l2_bytes: int, prepare: Prepare | None, seed: int
    ) -> None:
        self.shape, self.device, self.l2_bytes = shape, device, l2_bytes
        generator = torch.Generator(device).manual_seed(seed)
        count = weight_copies(shape, l2_bytes)
        if device.type == "cuda":
            one_bytes = shape.num_experts * bytes_per_expert(shape) * (1 if prepare is None else 2)
            free_bytes, _ = torch.cuda.mem_get_info(device)
            count = max(1, min(count, int(free_bytes * _MEMORY_SHARE) // one_bytes))
        self.weights = [random_weights(shape, device, generator) for _ in range(count)]
        self.baseline: list[Call] | None = None
        self.baseline_failure: str | None = None
        if prepare is not None:
            try:
                self.baseline = [prepare(weights) for weights in self.weights]
            except Exception as error:  # anything: it is reported, and ours are measured
                self.baseline_failure = f"cannot be prepared: {one_line(error)}"


class Inputs:
    """One batch of tokens and the cycle of its routings, on the device. num_global_experts: ids are of all ranks."""

    def __init__(
        self, layers: Layers, cycle: Cycle, generator: torch.Generator, num_global_experts: int | None = None
    ) -> None:
        num_tokens, top_k = cycle.topk_ids[0].shape
        hidden = torch.randn(num_tokens, layers.shape.hidden_size, generator=generator)
        router = torch.rand(num_tokens, top_k, generator=generator) + 0.1
        self.layers, self.cycle, self.num_global_experts = layers, cycle, num_global_experts
        self.hidden = hidden.to(layers.device, torch.bfloat16)
        self.router = (router / router.sum(1, keepdim=True)).to(layers.device)
        self.ids = [ids.to(layers.device) for ids in cycle.topk_ids]
        self._references: dict[tuple[int, str], Tensor] = {}

    def calls(self, bound: list[Call], last: list[Tensor]) -> Callable[[], None]:
        """All calls of the cycle, of a layer that is bound to each copy of the weights; the last output is kept."""

        def run_all() -> None:
            for copy, ids in zip(self.cycle.copies, self.ids, strict=True):
                last[:] = [bound[copy](self.hidden, self.router, ids)]

        return run_all

    def error(self, bound: list[Call], numerics: str) -> float:
        """The largest relative error of a token, in the cycle's first and last call."""
        first = bound[self.cycle.copies[0]](self.hidden, self.router, self.ids[0])
        last = bound[self.cycle.copies[-1]](self.hidden, self.router, self.ids[-1])
        return max(self.error_of(first, 0, numerics), self.error_of(last, -1, numerics))

    def error_of(self, got: Tensor, call: int, numerics: str) -> float:
        """The largest relative error of a token in the output of one call."""
        return relative_error(got, self.reference(call, numerics))

    def reference(self, call: int, numerics: str) -> Tensor:
        """What is right for one call; computed once."""
        if (call, numerics) not in self._references:
            weights = self.layers.weights[self.cycle.copies[call]]
            self._references[call, numerics] = reference_output(
                weights, numerics, self.hidden, self.router, self.ids[call], self.num_global_experts
            )
        return self._references[call, numerics]


@torch.no_grad()
def measure_point(
    layers: Layers, num_tokens: int, routing: str, options: MoeBenchOptions, timer: Timer
) -> dict[str, Any]:
    """One model, number of tokens and kind of routing: each candidate and the baseline, as the report reads them."""
    shape = layers.shape
    generator = torch.Generator().manual_seed(options.seed + num_tokens)
    cycle = make_cycle(
        shape, routing, num_tokens, num_copies=len(layers.weights), l2_bytes=layers.l2_bytes, generator=generator
    )
    inputs = Inputs(layers, cycle, generator)
    rows: list[dict[str, Any]] = []
    replays: dict[str, Replay] = {}
    outputs: dict[str, list[Tensor]] = {}

    def is_right(row: dict[str, Any], error: float) -> bool:
        row["relative_error"] = error if math.isfinite(error) else None
        if error > row["bound"]:
            row["failure"] = f"WRONG, not timed: relative error {error:.2e}, bound {row['bound']:.0e}"
        return error <= row["bound"]

    def add(row: dict[str, Any], calls: list[Call], bound_name: str) -> None:
        rows.append(row)
        try:
            row["bound"] = BOUNDS[bound_name]
            if is_right(row, inputs.error(calls, row["numerics"])):
                replays[row["label"]] = timer.capture(inputs.calls(calls, outputs.setdefault(row["label"], [])))
        except UnsupportedError as reason:
            row["not_covered"] = reason.found
        except Exception as reason:  # one candidate that breaks does not cost the others their times
            row["failure"] = f"failed: {one_line(reason)}"

    for candidate in candidates(options.backends, options.orders, options.numerics, options.gemms):
        row: dict[str, Any] = {**asdict(candidate), "label": candidate.label}
        try:
            reason = candidate.unsupported_reason(layers.weights[0], inputs.ids[0].numel(), inputs.hidden)
            if candidate.backend == "auto":
                row["served_by"] = served_by(candidate, layers.weights[0], inputs.hidden, inputs.router, inputs.ids[0])
                reason = "the reference serves it here, which is not timed" if row["served_by"] == "reference" else None
        except Exception as error:
            rows.append({**row, "failure": f"failed: {one_line(error)}"})
            continue
        if reason is not None:
            rows.append({**row, "not_covered": reason})
            continue
        add(row, [candidate.bind(weights) for weights in layers.weights], candidate.numerics)
    baseline = {"label": "baseline", "backend": options.baseline, "order": "", "numerics": "w4a16"}
    if layers.baseline is not None:
        add(baseline, layers.baseline, "baseline")
    elif layers.baseline_failure is not None:
        rows.append({**baseline, "failure": layers.baseline_failure})

    samples_us = interleaved_us(timer, replays, options.repeat)
    for row in rows:
        # What the timed replays left behind is looked at too.
        if row["label"] in samples_us and is_right(row, inputs.error_of(outputs[row["label"]][0], -1, row["numerics"])):
            row["samples_us"] = [time_us / len(inputs.ids) for time_us in samples_us[row["label"]]]
    active = sum(cycle.active) / len(cycle.active)
    return {
        "model": asdict(shape),
        "tokens": num_tokens,
        "routing": routing,
        "calls": len(inputs.ids),
        "weight_copies": len(layers.weights),
        "active_experts": active,
        "weight_bytes": active * bytes_per_expert(shape),
        "reuse_bytes": cycle.reuse_bytes,
        "rows": rows,
    }


def one_line(error: BaseException) -> str:
    """One line."""
    text = error.found if isinstance(error, Sm120Error) else str(error)
    return " ".join(f"{type(error).__name__}: {text}".split())[:300]
