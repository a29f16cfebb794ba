"""What /metrics shows of the MoE runners: the counting, the size that a graph replayed, and the real exposition."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.parser import text_string_to_metric_families

from sglang_sm120.integration import metrics
from sglang_sm120.integration.metrics import CALLS, FALLBACKS, SELFCHECK, TOKENS, MoeMetrics, rows_of_layers
from sglang_sm120.runners.base import Choice

forward_batch_info = pytest.importorskip("sglang.srt.model_executor.forward_batch_info")
Mode = forward_batch_info.ForwardMode

NATIVE, CUTLASS = Choice("native", "w4a16"), Choice("flashinfer_cutlass", "w4a4")


def up_to_64(rows: int) -> Choice:
    return NATIVE if rows <= 64 else CUTLASS


class FakeCollector:
    """Stands for a prometheus metric: remembers what was added to each child."""

    def __init__(self) -> None:
        self.amounts: dict[tuple[str, ...], list[float]] = {}

    def labels(self, **labels: str) -> SimpleNamespace:
        added = self.amounts.setdefault(tuple(labels.values()), [])
        return SimpleNamespace(inc=added.append, set=added.append)


@pytest.fixture
def counted(monkeypatch) -> MoeMetrics:
    """The process-wide metrics replaced by an installed one with fake collectors: 3 layers that choose by size."""
    fresh = MoeMetrics()
    fresh._collectors = {name: FakeCollector() for name in metrics.SERIES}
    fresh.layers_taken(3)
    fresh.chooser = up_to_64
    monkeypatch.setattr(metrics, "METRICS", fresh)
    return fresh


def runner(*, device: str = "cuda", draft: bool = False, bs: int = 8, width: int = 1, ragged: int | None = None):
    decode = SimpleNamespace(
        bs=bs,
        capture_bs=[1, 2, 4, 8],
        captured_req_width=width,
        ragged_verify_mode=ragged is not None,
        _replay_graph_key=SimpleNamespace(size=ragged or bs),
    )
    prefill = SimpleNamespace(capture_num_tokens=[16, 32, 128])
    return SimpleNamespace(
        device=device, is_draft_worker=draft, decode_cuda_graph_runner=decode, prefill_cuda_graph_runner=prefill
    )


def batch(mode, num_tokens: int, *, requests: int | None = None, gathered: int | None = None, groups=None):
    return SimpleNamespace(
        forward_mode=mode,
        input_ids=[0] * num_tokens,
        batch_size=num_tokens if requests is None else requests,
        global_num_token_non_padded_cpu=num_tokens,
        global_dp_buffer_len=gathered,
        global_num_tokens_cpu=groups,
    )


def output(*, replayed: bool = False, logits: object = "logits"):
    return SimpleNamespace(logits_output=logits, can_run_graph=replayed)


@pytest.mark.parametrize(
    ("model_runner", "forward_batch", "replayed", "rows"),
    [
        (runner(), batch(Mode.DECODE, 5), False, 5),
        (runner(bs=8), batch(Mode.DECODE, 5), True, 8),
        (runner(bs=2, width=4), batch(Mode.TARGET_VERIFY, 8, requests=2), True, 8),
        (runner(bs=4, width=4), batch(Mode.TARGET_VERIFY, 12, requests=3), True, 16),
        (runner(bs=4, width=4, ragged=10), batch(Mode.TARGET_VERIFY, 9, requests=4), True, 10),
        (runner(), batch(Mode.EXTEND, 33, requests=2), True, 128),
        (runner(), batch(Mode.EXTEND, 32, requests=2), True, 32),
        (runner(), batch(Mode.EXTEND, 33, requests=2), False, 33),
        (runner(device="cpu", bs=8), batch(Mode.DECODE, 3), True, 4),
        (runner(device="cpu", bs=8), batch(Mode.DECODE, 2), True, 2),
        (runner(bs=8), batch(Mode.DECODE, 5, groups=[5, 7]), True, 16),
        (runner(), batch(Mode.EXTEND, 20, gathered=60, groups=[20, 40]), False, 60),
        (runner(), batch(Mode.IDLE, 0, gathered=32, groups=[16, 16]), True, 32),
    ],
)
def test_rows_are_those_that_ran(model_runner, forward_batch, replayed: bool, rows: int) -> None:
    assert rows_of_layers(model_runner, forward_batch, replayed) == rows


@pytest.mark.parametrize(
    ("model_runner", "forward_batch", "replayed", "fetched"),
    [
        (runner(bs=8), batch(Mode.DECODE, 5, gathered=16, groups=[5, 7]), True, 8),
        (runner(bs=4, width=4), batch(Mode.TARGET_VERIFY, 12, requests=3, groups=[12, 4]), True, 16),
        (runner(bs=8), batch(Mode.DECODE, 5), False, None),
        (runner(), batch(Mode.EXTEND, 33, requests=2), True, None),
        (runner(device="cpu"), batch(Mode.DECODE, 3), False, 3),
    ],
)
def test_what_l2_fetches_is_by_this_ranks_own_graph(
    counted: MoeMetrics, model_runner, forward_batch, replayed: bool, fetched: int | None
) -> None:
    asked: list[int] = []
    counted.l2_bytes = lambda rows: asked.append(rows) or 1000 * rows
    metrics.observe_forward(model_runner, forward_batch, output(replayed=replayed))
    assert asked == ([] if fetched is None else [fetched])
    assert counted.values.get((metrics.L2_BYTES, ()), 0) == 1000 * (fetched or 0)


def test_a_replayed_batch_is_counted_by_its_padded_size(counted: MoeMetrics) -> None:
    """60 requests are padded to a graph of 80 rows, which was captured with the other runner."""
    for _ in range(2):
        metrics.count_forward(output(replayed=True), runner(bs=80), batch(Mode.DECODE, 60))
    metrics.count_forward(output(), runner(), forward_batch=batch(Mode.DECODE, 60))
    assert counted.values == {
        (CALLS, (*CUTLASS, "decode")): 6,
        (TOKENS, (*CUTLASS, "decode")): 120,
        (CALLS, (*NATIVE, "decode")): 3,
        (TOKENS, (*NATIVE, "decode")): 60,
    }
    assert counted._collectors[TOKENS].amounts == {(*CUTLASS, "decode"): [60, 60], (*NATIVE, "decode"): [60]}
    assert counted._collectors[CALLS].amounts == {(*CUTLASS, "decode"): [3, 3], (*NATIVE, "decode"): [3]}


def test_what_was_not_thought_of_ends_the_counting_and_not_the_server(counted: MoeMetrics, caplog) -> None:
    """Such as a runner without the attributes that are read: said once, and what was counted stays."""
    metrics.count_forward(output(), runner(), batch(Mode.DECODE, 4))
    before = dict(counted.values)
    unknown = SimpleNamespace(device="cuda", is_draft_worker=False, decode_cuda_graph_runner=object())
    for _ in range(2):
        metrics.count_forward(output(replayed=True), unknown, batch(Mode.DECODE, 4))
    metrics.count_forward(output(), runner(), batch(Mode.DECODE, 4))
    assert counted.values == before
    assert caplog.text.count("no longer counted for /metrics: AttributeError") == 1


@pytest.mark.parametrize(
    ("mode", "phase"),
    [
        (Mode.DECODE, "decode"),
        (Mode.EXTEND, "prefill"),
        (Mode.MIXED, "prefill"),
        (Mode.SPLIT_PREFILL, "prefill"),
        (Mode.TARGET_VERIFY, "verify"),
    ],
)
def test_phases(mode, phase: str, counted: MoeMetrics) -> None:
    metrics.count_forward(output(), runner(), batch(mode, 7))
    assert counted.values == {(CALLS, (*NATIVE, phase)): 3, (TOKENS, (*NATIVE, phase)): 7}


def test_what_is_not_counted(counted: MoeMetrics) -> None:
    metrics.count_forward(output(), runner(draft=True), batch(Mode.DECODE, 7))
    metrics.count_forward(output(logits=None), runner(), batch(Mode.SPLIT_PREFILL, 7))
    metrics.count_forward(output(), runner(), batch(Mode.IDLE, 0))
    assert counted.values == {}
    counted._collectors.clear()  # no --enable-metrics: the batch is not even looked at
    metrics.count_forward(object(), object(), object())


def test_without_a_choice_it_is_sglangs_own_path(counted: MoeMetrics) -> None:
    counted.chooser = lambda rows: None
    metrics.count_forward(output(), runner(), batch(Mode.DECODE, 2))
    assert counted.values[TOKENS, ("sglang", "own", "decode")] == 2


def test_layers_may_choose_for_themselves(counted: MoeMetrics) -> None:
    counted.layers_taken(1, lambda rows: CUTLASS)
    counted.layers_taken(2, lambda rows: CUTLASS)
    metrics.count_forward(output(), runner(), batch(Mode.DECODE, 2))
    assert counted.values[CALLS, (*NATIVE, "decode")] == 3
    assert counted.values[CALLS, (*CUTLASS, "decode")] == 3
    assert {counted.values[TOKENS, (*choice, "decode")] for choice in (NATIVE, CUTLASS)} == {2}, "once, not per layer"


def test_a_strike_is_seen_by_the_next_pass(counted: MoeMetrics) -> None:
    struck: set[Choice] = set()
    counted.chooser = lambda rows: CUTLASS if NATIVE in struck else NATIVE
    metrics.count_forward(output(), runner(), batch(Mode.DECODE, 2))
    struck.add(NATIVE)
    counted.fallback("native w4a16: failed its self-check")
    metrics.count_forward(output(), runner(), batch(Mode.DECODE, 2))
    assert counted.values[CALLS, (*NATIVE, "decode")] == counted.values[CALLS, (*CUTLASS, "decode")] == 3
    assert counted.values[FALLBACKS, ("native w4a16: failed its self-check",)] == 1


def test_a_later_self_check_replaces_the_result() -> None:
    fresh = MoeMetrics()
    fresh.selfcheck(NATIVE, True)
    fresh.selfcheck(NATIVE, False)
    assert fresh.values == {(SELFCHECK, (*NATIVE, "passed")): 0, (SELFCHECK, (*NATIVE, "failed")): 1}


def test_sglang_has_what_the_counting_reads(installed: Path) -> None:
    """The hook table compares ModelRunner.forward only; these are read beside it."""

    def assigned(file: str) -> set[str]:
        tree = ast.parse((installed / "srt/model_executor" / file).read_text())
        nodes = [n for n in ast.walk(tree) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)]
        return {node.attr for node in nodes}

    decode = {"bs", "captured_req_width", "ragged_verify_mode", "_replay_graph_key"}
    assert decode <= assigned("runner/decode_cuda_graph_runner.py")
    assert {"capture_bs", "captured_req_width"} <= assigned("cpu_graph_runner.py")
    assert "capture_num_tokens" in assigned("runner/prefill_cuda_graph_runner.py")
    fields = forward_batch_info.ForwardBatch.__dataclass_fields__
    assert {"global_dp_buffer_len", "global_num_tokens_cpu", "global_num_token_non_padded_cpu"} <= set(fields)


RANK = """
    import sys
    from types import SimpleNamespace
    from sglang_sm120.integration import metrics
    from sglang_sm120.integration.metrics import METRICS
    from sglang_sm120.runners.base import Choice
    assert "prometheus_client" not in sys.modules
    rank, enabled = sys.argv[1], sys.argv[2] == "on"
    metrics.sglang_labels = lambda: {"model_name": "m", "tp_rank": rank}
    native = Choice("native", "w4a16")
    METRICS.chooser = lambda rows: native
    METRICS.layers_taken(2)
    METRICS.fallback("its weights are prepared for another runner")
    METRICS.selfcheck(native, True)
    for _ in range(2):
        METRICS.install(SimpleNamespace(enable_metrics=enabled))
    METRICS.selfcheck(native, rank == "0")
    for tokens in (5, 1, 1):
        METRICS.forward(tokens, "prefill" if tokens > 1 else "decode", native)
    print("prometheus", "prometheus_client" in sys.modules)
"""


def run_rank(folder: Path, rank: int, enabled: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(RANK), str(rank), enabled],
        capture_output=True, text=True, timeout=120, env={**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(folder)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def scrape(folder: Path) -> dict[tuple[str, ...], float]:
    """As SGLang's server answers /metrics: (name, label values without the model's) -> value."""
    registry = CollectorRegistry()
    MultiProcessCollector(registry, path=str(folder))
    found = {}
    for family in text_string_to_metric_families(generate_latest(registry).decode()):
        for sample in family.samples:
            assert sample.labels.pop("model_name") == "m"
            found[sample.name, *(sample.labels[name] for name in sorted(sample.labels))] = sample.value
    return found


def test_two_processes_in_one_exposition(tmp_path: Path) -> None:
    for rank in range(2):
        assert run_rank(tmp_path, rank, "on") == "prometheus True\n"
    expected = {}
    for rank in "01":
        for phase, calls, tokens in (("prefill", 2, 5), ("decode", 4, 2)):
            expected[CALLS, "w4a16", phase, "native", rank] = calls
            expected[TOKENS, "w4a16", phase, "native", rank] = tokens
        expected[FALLBACKS, "its weights are prepared for another runner", rank] = 1
        expected[SELFCHECK, "w4a16", "passed", "native", rank] = 1 if rank == "0" else 0
        expected[SELFCHECK, "w4a16", "failed", "native", rank] = 0 if rank == "0" else 1
    assert scrape(tmp_path) == expected


def test_without_enable_metrics_nothing_is_made(tmp_path: Path) -> None:
    assert run_rank(tmp_path, 0, "off") == "prometheus False\n"
    assert list(tmp_path.iterdir()) == []
