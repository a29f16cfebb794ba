"""The two moments of a process that matter to us: its configuration is published, and its model is built."""

from __future__ import annotations

import logging
from typing import Any

from sglang_sm120.integration import all_reduce_rules, apply
from sglang_sm120.integration.hooks import Stage
from sglang_sm120.options import Sm120Options, options_of

logger = logging.getLogger(__name__)


def on_process_ready(server_args: Any, role: str) -> None:
    """Check the light hooks; in a scheduler, install the heavy ones. Does nothing while the package is off."""
    options = options_of(server_args)
    if not options.enable_sm120_opts:
        return
    apply.verify({Stage.PROCESS})
    if role == "scheduler":
        all_reduce_rules.turn_stock_on(options)
        stages = scheduler_stages(options, server_args)
        for stage in stages:
            apply.install(stage)
        apply.verify(stages)


def on_model_ready(model_runner: Any) -> None:
    """Verify every hook, set up the all-reduce, take the MoE layers, plan what goes into L2 and check the runners.

    Does nothing while the package is off.
    """
    server_args = model_runner.server_args
    options = options_of(server_args)
    if not options.enable_sm120_opts:
        return
    from sglang_sm120.integration import all_reduce, l2, moe, resolution, self_check
    from sglang_sm120.integration.metrics import METRICS

    apply.verify({Stage.PROCESS, *scheduler_stages(options, server_args)})
    apply.report_doors()
    all_reduce.prepare(model_runner, options)
    if model_runner.startup_weight_load is not None:  # our runners refuse that mode before; the stock path may use it
        logger.warning("sglang-sm120: weights load while graphs are captured, so their scales are not checked")
        return
    problem = None if options.needs_own_runner else resolution.uncovered(server_args)
    prefill = largest_batch(server_args)
    taken = moe.take_layers(
        model_runner.model,
        options,
        is_draft=model_runner.is_draft_worker,
        max_tokens=prefill,
        server_reason=None if problem is None else problem.found,
    )
    if not model_runner.is_draft_worker:
        METRICS.install(server_args)
        for layer in taken:
            METRICS.layers_taken(1, layer.choice)
        if METRICS.installed and taken:
            METRICS.expert_counts = taken[len(taken) // 2].count_experts()
    l2.prepare(model_runner, options)
    self_check.run(taken, options, captured_batches(server_args), prefill)


def largest_batch(server_args: Any) -> int:
    """Tokens of the largest batch that a MoE layer sees: a prefill, of every rank under DP attention."""
    chunk = server_args.chunked_prefill_size
    tokens = chunk if chunk is not None and chunk > 0 else server_args.max_prefill_tokens
    return tokens * (server_args.dp_size if server_args.enable_dp_attention else 1)


def captured_batches(server_args: Any) -> list[int]:
    """Token counts of the decode graphs, or some where none are captured."""
    from sglang.srt.arg_groups.overrides import resolving_view

    graphs = resolving_view(server_args).cuda_graph_config
    sizes = graphs.decode.bs if graphs is not None else None
    return list(sizes) if sizes else [1, 2, 8, 64]


def scheduler_stages(options: Sm120Options, server_args: Any) -> set[Stage]:
    """The stages that a scheduler process of this server needs beyond Stage.PROCESS."""
    from sglang.srt.arg_groups.overrides import resolving_view

    stages = {Stage.SCHEDULER}
    if all_reduce_rules.wanted(options, resolving_view(server_args)):
        stages.add(Stage.ALL_REDUCE)
    if options.sm120_emulate:
        from sglang_sm120.testing.cpu_platform import is_active

        stages.add(Stage.EMULATION)
        if is_active():
            stages.add(Stage.CPU)
    return stages


def process_ready(_result: Any, server_args: Any, *, role: str, **_rest: Any) -> None:
    """AFTER runtime_context.publish."""
    on_process_ready(server_args, role)


def model_ready(_result: Any, model_runner: Any) -> None:
    """AFTER ModelRunner.load_model."""
    on_model_ready(model_runner)
