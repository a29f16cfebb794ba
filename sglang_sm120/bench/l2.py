"""`sglang-sm120 bench l2`: what prefetches into L2, and access policy windows, gain on this GPU.

How: docs/benchmarking.md. The all-reduces are waits of a given length that move nothing.
"""

from __future__ import annotations

import shlex
import sys
from datetime import UTC, datetime
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress, TaskID

from sglang_sm120.bench import l2_plot, l2_report, plot, report
from sglang_sm120.bench.l2_cases import CANDIDATES, Batch, Stack
from sglang_sm120.bench.l2_device import CudaL2Device, L2Device
from sglang_sm120.bench.l2_measure import measure_step, one_line
from sglang_sm120.bench.l2_options import BUDGET_SHARE, CACHES, MIN_LAYERS, L2BenchOptions, StackShape
from sglang_sm120.bench.l2_projections import measure_projection, stream_buffer
from sglang_sm120.bench.moe import terminal
from sglang_sm120.bench.timing import machine_facts, require_gpu
from sglang_sm120.errors import ConfigError

_MEMORY_SHARE = 0.8  # of what is free, for weights and KV cache; the rest is for graphs and activations


def run(options: L2BenchOptions, console: Console | None = None) -> int:
    """Measure, or read a file, and report; 1 if a candidate was wrong or failed, else 0.

    Raises: Sm120Error, with what to do about it.
    """
    console = console or terminal()
    if options.plot is not None:
        plot.require_matplotlib()
    if options.from_json is not None:
        results = l2_report.read(options.from_json)
    else:
        device = require_gpu()
        machine = machine_facts()
        check_layers(options, machine["l2_bytes"])  # before anything takes time
        results = measure_all(options, console, machine, CudaL2Device(device, machine["l2_bytes"]))
    l2_report.show(console, results)
    if options.markdown is not None:
        report.write("--markdown", options.markdown, l2_report.markdown(results) + "\n")
        console.print(f"wrote {options.markdown}", markup=False)
    if options.plot is not None:
        try:
            l2_plot.draw(results, options.plot)
        except (OSError, ValueError) as error:  # ValueError: a format that matplotlib does not know
            raise ConfigError(f"--plot {options.plot}: {error}", "a file like l2.png", "name another") from error
        console.print(f"wrote {options.plot}", markup=False)
    return 1 if l2_report.failures(results) else 0


def check_layers(options: L2BenchOptions, l2_bytes: int) -> dict[str, int]:
    """How many layers each model's stack has.

    Raises: ConfigError if --layers are too few for this L2.
    """
    layers = {}
    for shape in options.models:
        needed = shape.layers_needed(l2_bytes)
        layers[shape.name] = max(MIN_LAYERS, needed) if options.layers is None else options.layers
        if layers[shape.name] < needed:
            raise ConfigError(
                f"--layers {options.layers}: of {shape.name} they read "
                f"{shape.step_bytes(options.layers or 0) >> 20} MB a step, and L2 has {l2_bytes >> 20} MB",
                f"{needed} layers or more, so that {CACHES} times L2 are read between two uses of a weight",
                f"--layers {needed}, or leave it out",
            )
    return layers


def measure_all(options: L2BenchOptions, console: Console, machine: dict[str, Any], on: L2Device) -> dict[str, Any]:
    """Everything that was asked for, as the report reads it; the file of --json is written after every point."""
    layers = check_layers(options, on.l2_bytes)
    budget = on.l2_bytes // BUDGET_SHARE if options.budget_bytes is None else options.budget_bytes
    how: dict[str, object] = {} if options.blocks is None else {"blocks": options.blocks}
    results: dict[str, Any] = {
        "format": l2_report.FORMAT,
        "command": shlex.join(["sglang-sm120", *sys.argv[1:]]),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine,
        "context": options.context,
        "budget_bytes": budget,
        "blocks": options.blocks,
        "captures": options.captures,
        "samples": options.repeat,
        "seed": options.seed,
        "set_aside_bytes": on.max_set_aside_bytes,
        "windows_reason": on.windows_reason,
        "steps": [],
        "projections": [],
    }
    report.write_json(options.json, results)  # a path that cannot be written is noticed now
    console.print(l2_report.header(results), markup=False, highlight=False)
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("", total=len(options.models) * (len(options.tokens) * len(options.wait_us) + 1))
        for shape in options.models:
            progress.update(task, description=f"{shape.name}: weights")
            _check_memory(shape, layers[shape.name], options, on.device)
            stack = Stack(shape, layers[shape.name], on.device, options.seed)
            _measure_steps(stack, {**how, "max_bytes": budget}, options, on, results, progress, task)
            progress.update(task, description=f"{shape.name}: projections")
            _measure_projections(stack, how, options, on, results)
            progress.advance(task)
            report.write_json(options.json, results)
            del stack
            _release(on.device)
    return results


def _measure_steps(
    stack: Stack,
    how: dict[str, object],
    options: L2BenchOptions,
    on: L2Device,
    results: dict[str, Any],
    progress: Progress,
    task: TaskID,
) -> None:
    for tokens in options.tokens:
        try:
            batch = Batch(stack.shape, len(stack.layers), tokens, options.context, on.device, options.seed)
        except torch.OutOfMemoryError as error:
            results["steps"] += [_no_step(stack, tokens, wait_us, error) for wait_us in options.wait_us]
            continue
        for wait_us in options.wait_us:
            progress.update(task, description=f"{stack.shape.name}: {tokens} tokens, wait {wait_us:g} us")
            results["steps"].append(measure_step(stack, batch, wait_us, how, options, on))
            report.write_json(options.json, results)
            progress.advance(task)
        del batch
        _release(on.device)


def _no_step(stack: Stack, tokens: int, wait_us: float, error: BaseException) -> dict[str, Any]:
    failure = f"failed: {one_line(error)}"
    return {
        "model": stack.shape.name,
        "tokens": tokens,
        "wait_us": wait_us,
        "layers": len(stack.layers),
        "reuse_bytes": 0,
        "rows": [{"candidate": name, "captures": [], "failure": failure} for name in CANDIDATES],
    }


@torch.no_grad()
def _measure_projections(
    stack: Stack, how: dict[str, object], options: L2BenchOptions, on: L2Device, results: dict[str, Any]
) -> None:
    generator = torch.Generator(on.device).manual_seed(options.seed)
    streamed = stream_buffer(on.l2_bytes, on.device)
    working_set = stack.projection_bytes()
    for name, (_, columns) in stack.shape.projections().items():
        for tokens in options.tokens:
            hidden = torch.randn(tokens, columns, device=on.device, dtype=torch.bfloat16, generator=generator)
            measured = measure_projection(name, stack.layers[0].dense[name], hidden, how, streamed, working_set, on)
            results["projections"].append({"model": stack.shape.name, **measured})


def _check_memory(shape: StackShape, layers: int, options: L2BenchOptions, device: torch.device) -> None:
    if device.type != "cuda":
        return
    experts = shape.experts
    weights = shape.dense_bytes() + experts.num_experts * shape.expert_bytes()
    cache = 2 * max(options.tokens) * options.context * shape.attention.cache_elements()
    needed, (free, _) = layers * (weights + cache), torch.cuda.mem_get_info(device)
    if needed > free * _MEMORY_SHARE:
        raise ConfigError(
            f"{layers} layers of {shape.name} with {max(options.tokens)} tokens of context {options.context} are "
            f"{needed / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free",
            f"{needed / _MEMORY_SHARE / 1e9:.1f} GB",
            "leave the model out by --model, take fewer --tokens or less --context, or end what else uses the GPU",
        )


def _release(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.empty_cache()
