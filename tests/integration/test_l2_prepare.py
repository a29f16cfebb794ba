"""--sm120-l2 from the options to the driver: what is set aside, planned, hooked and said, on a driver that records.

The fake driver's calls are checked against the real module's signatures in tests/kernels/memory.
"""

from __future__ import annotations

import atexit
import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from sglang_sm120.errors import UnsupportedError
from sglang_sm120.integration import l2, l2_rules, l2_warmer, l2_weights
from sglang_sm120.kernels.memory.l2_window import driver as binding
from sglang_sm120.options import Sm120Options
from tests.integration.l2_model import HIDDEN, Core, Experts, Model
from tests.kernels.memory.l2_driver import MB, L2Driver

pytest.importorskip("sglang")

STREAM = 7


class Side:
    """Stands for Prefetcher on a GPU."""

    made: ClassVar[list[Side]] = []

    def __init__(self, device: torch.device) -> None:
        self.device, self.forks, self.joins = device, 0, 0
        self.made.append(self)

    def fork(self, ranges: list[tuple[int, int]]) -> int:
        self.forks += 1
        return sum(size for _, size in ranges)

    def join(self) -> None:
        self.joins += 1


@pytest.fixture
def ends() -> list[Callable[[], None]]:
    return []


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch, ends: list[Callable[[], None]]) -> L2Driver:
    """A GPU with 128 MB of L2 that captures, as far as these modules can tell."""
    from sglang.srt import runtime_context

    fake = L2Driver()
    monkeypatch.setattr(binding, "_bindings", lambda: fake)
    monkeypatch.setattr(l2_rules, "require_decode_graphs", lambda _options: None)
    monkeypatch.setattr(runtime_context, "get_parallel", lambda: SimpleNamespace(tp_rank=0))
    monkeypatch.setattr(l2_weights, "_is_core", lambda module: isinstance(module, Core))
    monkeypatch.setattr(l2_weights, "_is_routed", lambda module: isinstance(module, Experts))
    monkeypatch.setattr(l2_warmer, "Prefetcher", Side)
    monkeypatch.setattr(Side, "made", [])
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=STREAM))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(atexit, "register", lambda call, *arguments: ends.append(lambda: call(*arguments)))
    return fake


def options(mode: str, **more: str) -> Sm120Options:
    return Sm120Options(enable_sm120_opts=True, sm120_l2=mode, **more)


def prepared(chosen: Sm120Options, model: nn.Module | None = None, **more: Any) -> nn.Module:
    model = Model() if model is None else model
    l2.prepare(SimpleNamespace(model=model, device="cuda", is_draft_worker=False, **more), chosen)
    return model


def test_both_from_the_options_to_the_driver(
    driver: L2Driver, ends: list[Callable[[], None]], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    driver.limits[77] = 6 * MB  # somebody else's
    model = prepared(options("both"))
    assert driver.limits[77] == 84 * MB, "all that this GPU allows"
    model(2, graph=True)
    own = model.model.layers[0].self_attn  # type: ignore[union-attr]
    windows = [value.accessPolicyWindow for _, _, value in driver.called("cuStreamSetAttribute")]
    opened = [(window.base_ptr, window.num_bytes) for window in windows if window.num_bytes]
    assert opened[:2] == [
        (own.qkv_proj.weight.data_ptr(), HIDDEN * HIDDEN * 4), (own.o_proj.weight.data_ptr(), HIDDEN * HIDDEN)
    ]  # fmt: skip
    assert [bool(window.num_bytes) for window in windows] == [True, False] * (len(windows) // 2)
    assert {stream for stream, _, _ in driver.called("cuStreamSetAttribute")} == {STREAM}
    (side,) = Side.made
    assert side.device == torch.device("cuda", 0) and side.joins == 1
    assert side.forks == 3, "norms alone: behind attention twice, and once for the next layer"
    said = [record.getMessage() for record in caplog.records if record.levelno == logging.INFO]
    assert all(line.startswith("sglang-sm120: L2 in decode graphs of up to 64 tokens: ") for line in said)
    assert "kept from step to step, 0.0 MB: model.layers.0.self_attn.qkv_proj.weight" in said[-1]
    (end,) = ends
    end()
    assert driver.limits[77] == 6 * MB and driver.resets[77] == 1


def test_off_and_draft_models_do_nothing(driver: L2Driver, ends: list[Callable[[], None]]) -> None:
    prepared(options("off"))
    l2.prepare(SimpleNamespace(model=Model(), device="cuda", is_draft_worker=True), options("both"))
    assert driver.calls == [] and ends == [] and Side.made == []


def test_only_one_rank_says_what_is_planned(
    driver: L2Driver, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from sglang.srt import runtime_context

    caplog.set_level(logging.INFO)
    monkeypatch.setattr(runtime_context, "get_parallel", lambda: SimpleNamespace(tp_rank=1))
    prepared(options("prefetch"))
    assert caplog.records == [] and len(Side.made) == 1


@pytest.mark.parametrize("mode", ["persist", "both"])
def test_more_than_the_gpu_allows_stops_the_server(driver: L2Driver, mode: str) -> None:
    with pytest.raises(UnsupportedError, match=r"(?s)--sm120-l2-persist-mb 85.*at most 84"):
        prepared(options(mode, sm120_l2_persist_mb="85"))
    assert driver.limits[77] == 0


@pytest.mark.parametrize("mode", ["persist", "both"])
def test_a_gpu_that_allows_nothing_stops_the_server(driver: L2Driver, mode: str) -> None:
    driver.most = 0  # as under MIG
    with pytest.raises(UnsupportedError, match=r"(?s)no L2 be set aside.*nvidia-smi -mig 0"):
        prepared(options(mode))
    with pytest.raises(UnsupportedError, match="no L2 be set aside"):
        prepared(options(mode, sm120_l2_persist_mb="8"))
    assert driver.limits[77] == 0


def test_nothing_stays_set_aside_where_no_projection_fits(driver: L2Driver) -> None:
    driver.longest = 100  # a window's
    with pytest.raises(UnsupportedError, match="no projection fits into the"):
        prepared(options("persist"))
    assert driver.limits[77] == 0


def test_phases_in_which_there_is_nothing_to_fetch_stop_the_server(driver: L2Driver) -> None:
    model = Model(layers=1)  # no next one
    with pytest.raises(UnsupportedError, match="nothing to fetch in the phases"):
        prepared(options("prefetch", sm120_l2_prefetch_mb="0,0,8"), model)
    prepared(options("prefetch", sm120_l2_prefetch_mb="0,8,0"), model)


def test_a_model_of_unknown_parts_stops_the_server(driver: L2Driver) -> None:
    with pytest.raises(UnsupportedError, match="Sequential has no decoder layers of known parts"):
        prepared(options("prefetch"), nn.Sequential(nn.Linear(2, 2)))


def test_scales_that_decode_reads_and_weights_that_a_window_cannot_keep(monkeypatch: pytest.MonkeyPatch) -> None:
    import sglang.kernels.ops.gemm.fused_a_gemm as fused

    attention = nn.Module()
    attention.q_b_proj = nn.Linear(HIDDEN, HIDDEN, bias=False)
    attention.other = nn.Linear(HIDDEN, HIDDEN, bias=False)
    attention.other.weight_scale = nn.Parameter(torch.ones(3, 3))
    attention.other.weight_scale_interleaved = nn.Parameter(torch.ones(4, 4))
    for eligible in (True, False):
        monkeypatch.setattr(fused, "fused_a_gemm_weight_eligible", lambda _layer, eligible=eligible: eligible)
        found = {weight.name: weight for weight in l2_weights._weights("attn", attention)}
        assert set(found) == {"attn.q_b_proj.weight", "attn.other.weight", "attn.other.weight_scale_interleaved"}
        assert (found["attn.q_b_proj.weight"].module is None) == eligible
        assert found["attn.other.weight"].module is attention.other


def test_what_attention_runs_through() -> None:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.layers.radix_linear_attention import RadixLinearAttention

    for core in (RadixAttention, RadixLinearAttention):
        assert l2_weights._is_core(core.__new__(core))
    assert not l2_weights._is_core(nn.Identity())
