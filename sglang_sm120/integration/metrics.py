"""What `/metrics` shows of our MoE runners, beside SGLang's own collectors. docs/metrics.md describes each series.

Python does not run while a CUDA graph is replayed, so nothing is counted inside a layer: `count_forward` counts once a
forward pass, from the batch's token count and the table's choice for the size that ran. Importing this needs neither
prometheus_client nor torch: SGLang sets PROMETHEUS_MULTIPROC_DIR first, and the command line reads the names.
"""

from __future__ import annotations

import bisect
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sglang_sm120.integration.expert_counts import ExpertCounts
    from sglang_sm120.runners.base import Choice

logger = logging.getLogger(__name__)

CALLS = "sglang:sm120_moe_calls_total"
TOKENS = "sglang:sm120_moe_tokens_total"
FALLBACKS = "sglang:sm120_moe_fallbacks_total"
SELFCHECK = "sglang:sm120_moe_selfcheck"
EXPERTS = "sglang:sm120_moe_distinct_experts_total"
L2_BYTES = "sglang:sm120_l2_prefetched_bytes_total"
EXPERT_BATCHES = "sglang:sm120_moe_distinct_experts_batches_total"

SERIES: dict[str, tuple[str, tuple[str, ...]]] = {
    CALLS: (
        "MoE layer calls of the target model by the runner that served them: forward passes times layers.",
        ("runner", "numerics", "phase"),
    ),
    TOKENS: (
        "Tokens of the target model by the runner that served their MoE layers; a token counts once, not once a layer.",
        ("runner", "numerics", "phase"),
    ),
    FALLBACKS: ("MoE layers left to SGLang's own path, and runners struck from the table, by reason.", ("reason",)),
    SELFCHECK: (
        "1 where a runner's self-check at start had this result, 0 where it had the other.",
        ("runner", "numerics", "result"),
    ),
    EXPERTS: ("Experts of this rank that a batch touched in one MoE layer, added up over batches.", ("rows_le",)),
    L2_BYTES: ("Bytes of dense weights that decode graphs asked L2 for ahead of their use.", ()),
    EXPERT_BATCHES: ("The batches that sm120_moe_distinct_experts_total is the sum over.", ("rows_le",)),
}
"""Name -> help text and labels; SGLang's own rank labels come before these."""

OWN_PATH = ("sglang", "own")
"""Runner and numerics of a batch for which the table has no choice left: SGLang's path serves it in its own way."""


Chooser = Callable[[int], "Choice | None"]
"""Rows of a batch -> what serves it, or None for SGLang's own path."""


class MoeMetrics:
    """The counts of this process, and their prometheus series once `install` made them.

    The methods may be called before `install`: what was counted by then is published with it.

    chooser: for the layers that were taken without one of their own. expert_counts: of one layer. l2_bytes: rows of a
    decode graph -> bytes that a replay prefetches.
    values: (name, label values) -> what is shown.
    """

    def __init__(self) -> None:
        self.chooser: Chooser | None = None
        self.expert_counts: ExpertCounts | None = None
        self.l2_bytes: Callable[[int], int] | None = None
        self.values: dict[tuple[str, tuple[str, ...]], float] = {}
        self._layers: list[tuple[int, Chooser | None]] = []
        self._served: dict[int, dict[Choice | None, int]] = {}  # rows -> choice -> layers
        self._collectors: dict[str, Any] = {}
        self._rank_labels: dict[str, str] = {}
        self._children: dict[tuple[str, tuple[str, ...]], Any] = {}

    @property
    def installed(self) -> bool:
        """Whether this process publishes what it counts."""
        return bool(self._collectors)

    @property
    def counts_forwards(self) -> bool:
        """Whether a forward pass is worth the look: somebody can read the count, and there is something to count."""
        return self.installed and bool(self._layers or self.l2_bytes)

    def layers_taken(self, count: int, chooser: Chooser | None = None) -> None:
        """This many more MoE layers of the target model choose a runner by `chooser` (None: by `self.chooser`)."""
        self._layers.append((count, chooser))
        self._served.clear()

    def layers_by_choice(self, rows: int) -> dict[Choice | None, int]:
        """What serves a batch of so many rows, and in how many layers. Kept until a layer or a fallback is reported."""
        served = self._served.get(rows)
        if served is None:
            served = self._served[rows] = {}
            for count, own in self._layers:
                chooser = own or self.chooser
                if chooser is not None:
                    choice = chooser(rows)
                    served[choice] = served.get(choice, 0) + count
        return served

    def fallback(self, reason: str) -> None:
        """A layer was left to SGLang's path, or a runner struck. The reason is a label: no layer's name, no number."""
        self._served.clear()
        self._add(FALLBACKS, (reason,), 1)

    def selfcheck(self, choice: Choice, passed: bool) -> None:
        """The result of a choice's self-check; a later one replaces it."""
        for result, holds in (("passed", passed), ("failed", not passed)):
            series = (SELFCHECK, (choice.runner, choice.numerics, result))
            self.values[series] = float(holds)
            if self._collectors:
                self._child(series).set(float(holds))

    def forward(self, num_tokens: int, phase: str, choice: Choice | None, layers: int | None = None) -> None:
        """One forward pass of the target model.

        num_tokens: without padding. phase: "decode", "verify" or "prefill". layers: that `choice` serves (None: all).
        """
        runner, numerics = OWN_PATH if choice is None else choice
        labels = (runner, numerics, phase)
        self._add(CALLS, labels, sum(count for count, _ in self._layers) if layers is None else layers)
        self._add(TOKENS, labels, num_tokens)

    def l2_prefetched(self, rows: int) -> None:
        """One decode graph of so many rows of this rank was replayed."""
        num_bytes = self.l2_bytes(rows) if self.l2_bytes is not None else 0
        if num_bytes:
            self._add(L2_BYTES, (), num_bytes)

    def distinct_experts(self, rows_le: int, experts: int, batches: int) -> None:
        """So many more batches of up to `rows_le` rows (a power of two), which touched so many experts in all."""
        self._add(EXPERTS, (str(rows_le),), experts)
        self._add(EXPERT_BATCHES, (str(rows_le),), batches)

    def install(self, server_args: Any) -> None:
        """Make the prometheus series, if this rank's SGLang reports metrics (--enable-metrics). Idempotent."""
        if self._collectors or not server_args.enable_metrics:
            return
        labels = sglang_labels()
        if labels is None:
            return
        from prometheus_client import Counter, Gauge

        self._rank_labels = labels
        for name, (documentation, own) in SERIES.items():
            names = [*labels, *own]
            if name == SELFCHECK:  # as SGLang's gauges: one value a series, not one a process
                self._collectors[name] = Gauge(name, documentation, names, multiprocess_mode="mostrecent")
            else:
                self._collectors[name] = Counter(name, documentation, names)
        for series, value in self.values.items():
            child = self._child(series)
            child.set(value) if series[0] == SELFCHECK else child.inc(value)

    def stop(self) -> None:
        """Count no more forward passes in this process; what was counted stays."""
        self._layers.clear()
        self.l2_bytes = None

    def _add(self, name: str, labels: tuple[str, ...], amount: float) -> None:
        # Straight into prometheus' memory-mapped file, about a microsecond: a scrape is answered by another process,
        # which cannot ask this one for what it holds back.
        series = (name, labels)
        self.values[series] = self.values.get(series, 0) + amount
        if self._collectors:
            self._child(series).inc(amount)

    def _child(self, series: tuple[str, tuple[str, ...]]) -> Any:
        if series not in self._children:
            name, labels = series
            own = dict(zip(SERIES[name][1], labels, strict=True))
            self._children[series] = self._collectors[name].labels(**self._rank_labels, **own)
        return self._children[series]


METRICS = MoeMetrics()
"""This process' one. `integration/moe.py` feeds it."""


def sglang_labels() -> dict[str, str] | None:
    """The labels of SGLang's scheduler collectors on this rank, or None where they do not report.

    As SchedulerMetricsCollector.init_new has them: without --enable-metrics-for-all-schedulers, the first rank of each
    attention group speaks for the others, which run the same batches.
    """
    from sglang.srt.disaggregation.utils import DisaggregationMode
    from sglang.srt.runtime_context import get_disagg, get_observability, get_parallel, get_serving

    parallel, observability, disagg = get_parallel(), get_observability(), get_disagg()
    first = parallel.attn_tp_rank == 0 and parallel.attn_cp_rank == 0
    if not first and not observability.enable_metrics_for_all_schedulers:
        return None
    mode = disagg.disaggregation_mode
    labels = {
        "model_name": get_serving().served_model_name,
        "engine_type": "dynamic" if disagg.enable_pd_role_switch else DisaggregationMode.to_engine_type(mode),
        "tp_rank": parallel.tp_rank,
        "pp_rank": parallel.pp_rank,
        "moe_ep_rank": parallel.moe_ep_rank,
    }
    if parallel.dp_rank is not None:
        labels["dp_rank"] = parallel.dp_rank
    labels.update(observability.extra_metric_labels or {})
    return {name: str(value) for name, value in labels.items()}


def observe_forward(model_runner: Any, forward_batch: Any, output: Any) -> None:
    """Count a forward pass of the target model. Reads shapes and host integers only: never waits for the GPU.

    A draft model is not counted: its own graphs run several steps without passing here. What cannot be counted, in a
    kind of server that was not thought of, ends the counting with a line, and never the server.
    """
    if not METRICS.counts_forwards or model_runner.is_draft_worker:
        return
    try:
        _observe(model_runner, forward_batch, output)
    except (AttributeError, IndexError, KeyError, TypeError) as error:
        METRICS.stop()
        logger.warning(
            "sglang-sm120: forward passes are no longer counted for /metrics: %s: %s", type(error).__name__, error
        )


def _observe(model_runner: Any, forward_batch: Any, output: Any) -> None:
    if output.logits_output is None:  # split prefill: only the last of its calls reaches the last layer
        return
    num_tokens = forward_batch.global_num_token_non_padded_cpu
    if num_tokens is None:
        num_tokens = len(forward_batch.input_ids)
    rows = rows_of_layers(model_runner, forward_batch, output.can_run_graph)
    if rows:
        phase = phase_of(forward_batch.forward_mode)
        for choice, layers in METRICS.layers_by_choice(rows).items():
            METRICS.forward(num_tokens, phase, choice, layers)
    if METRICS.l2_bytes is not None and forward_batch.forward_mode.is_cuda_graph():
        if output.can_run_graph:
            METRICS.l2_prefetched(rows_of_graph(model_runner, forward_batch))
        elif model_runner.device == "cpu":  # where a decode batch stands for a graph
            METRICS.l2_prefetched(len(forward_batch.input_ids))
    if METRICS.expert_counts is not None:
        METRICS.expert_counts.publish(METRICS.distinct_experts)


def count_forward(output: Any, model_runner: Any, forward_batch: Any, *_rest: Any, **_more: Any) -> None:
    """AFTER ModelRunner.forward."""
    observe_forward(model_runner, forward_batch, output)


def phase_of(mode: Any) -> str:
    """ "decode", "verify" (of speculated tokens) or "prefill", which a batch of both decode and prefill is too."""
    if mode.is_decode_or_idle():
        return "decode"
    return "verify" if mode.is_target_verify() else "prefill"


def rows_of_layers(model_runner: Any, forward_batch: Any, replayed: bool) -> int:
    """Rows that the MoE layers saw, with padding: what the table was asked for when this graph was captured.

    replayed: whether a graph ran. Under data-parallel attention the rows of all groups are gathered.
    """
    if forward_batch.global_dp_buffer_len is not None:  # gathered; for a prefill graph it is its padded size already
        return forward_batch.global_dp_buffer_len
    if not replayed:
        return len(forward_batch.input_ids)
    groups = len(forward_batch.global_num_tokens_cpu or (0,))
    if not forward_batch.forward_mode.is_cuda_graph():
        return groups * _bucket(model_runner.prefill_cuda_graph_runner.capture_num_tokens, len(forward_batch.input_ids))
    return groups * rows_of_graph(model_runner, forward_batch)


def rows_of_graph(model_runner: Any, forward_batch: Any) -> int:
    """Rows of the decode graph that was replayed, of this rank alone, with padding."""
    runner = model_runner.decode_cuda_graph_runner
    if model_runner.device == "cpu":  # its runner remembers the padded size of padded batches only
        return int(_bucket(runner.capture_bs, forward_batch.batch_size) * runner.captured_req_width)
    if runner.ragged_verify_mode:
        return int(runner._replay_graph_key.size)
    return int(runner.bs * runner.captured_req_width)


def _bucket(sizes: Any, size: int) -> int:
    return sizes[bisect.bisect_left(sizes, size)]
