"""--sm120-l2 on a model of SGLang's shape: which tensors are found, when they are fetched, which windows are set."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from sglang_sm120.errors import UnsupportedError
from sglang_sm120.integration import l2_warmer, l2_weights
from sglang_sm120.integration.l2_warmer import Warmer
from sglang_sm120.plan import l2 as planning
from tests.integration.l2_model import HIDDEN, Core, Experts, Model

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(l2_weights, "_is_core", lambda module: isinstance(module, Core))
    monkeypatch.setattr(l2_weights, "_is_routed", lambda module: isinstance(module, Experts))


class Recorder:
    """Stands for Prefetcher; `names` tells whose memory was asked for."""

    def __init__(self, model: nn.Module) -> None:
        self.names = {tensor.data_ptr(): name for name, tensor in model.named_parameters()}
        self.events: list[Any] = []

    def fork(self, ranges: list[tuple[int, int]]) -> int:
        self.events.append([(self.names[pointer], size) for pointer, size in ranges])
        return sum(size for _, size in ranges)

    def join(self) -> None:
        self.events.append("join")


@pytest.fixture
def warmed() -> Iterator[tuple[Model, Recorder, Warmer]]:
    model = Model()
    live = l2_weights.read_model(model)
    assert live is not None
    plans = planning.prefetches([layer.weights for layer in live.layers], (1 << 20,) * 3)
    warmer = Warmer(live, plans, [], CPU)
    recorder = Recorder(model)
    warmer._prefetcher = recorder  # type: ignore[assignment]
    warmer.install()
    yield model, recorder, warmer


def names(weights: tuple[l2_weights.LiveWeight, ...]) -> list[str]:
    return [weight.name for weight in weights]


def test_the_dense_weights_are_found_in_the_order_of_use() -> None:
    live = l2_weights.read_model(Model(layers=3))
    assert live is not None and len(live.layers) == 3, "a layer of another rank has no parts"
    weights = live.layers[1].weights
    prefix = "model.layers.1"
    assert names(weights.before_attention) == [
        f"{prefix}.input_layernorm.weight",
        f"{prefix}.self_attn.qkv_proj.weight",
        f"{prefix}.self_attn.kv_b_proj.weight",
    ]
    assert names(weights.behind_attention) == [
        f"{prefix}.self_attn.o_proj.weight",
        f"{prefix}.self_attn.o_proj.weight_scale",
    ]
    assert names(weights.ffn) == [
        f"{prefix}.post_attention_layernorm.weight",
        f"{prefix}.mlp.gate.weight",
        f"{prefix}.mlp.shared_experts.weight",
        f"{prefix}.mlp.shared_experts.bias",
    ]
    packed, scale = weights.behind_attention
    assert packed.num_bytes == HIDDEN * HIDDEN and scale.num_bytes == HIDDEN * 2 * 4
    assert packed.range(100) == (live.layers[1].output.weight.data_ptr(), 100)
    assert packed.range(1 << 30) == (live.layers[1].output.weight.data_ptr(), HIDDEN * HIDDEN)
    assert packed.module is live.layers[1].output and scale.module is None, "one window a call: the larger"


def test_absorbed_weights_take_the_place_of_kv_b_proj() -> None:
    live = l2_weights.read_model(Model(layers=1, mla=True))
    assert live is not None
    weights = live.layers[0].weights
    assert names(weights.before_attention)[-1] == "model.layers.0.self_attn.w_kc"
    assert not any("kv_b_proj" in name for name in names(weights.before_attention))
    assert names(weights.behind_attention)[0] == "model.layers.0.self_attn.w_vc"


def test_a_model_of_other_parts_is_not_guessed_at() -> None:
    assert l2_weights.read_model(nn.Sequential(nn.Linear(2, 2))) is None
    other = nn.Module()
    other.layers = nn.ModuleList([nn.Linear(2, 2)])
    assert l2_weights.read_model(other) is None


def test_each_phase_is_fetched_at_its_moment(warmed: tuple[Model, Recorder, Warmer]) -> None:
    model, recorder, warmer = warmed
    model(3, graph=True)
    own = "model.layers.{}.self_attn.{}"
    firsts = [event if event == "join" else event[0][0] for event in recorder.events]
    assert firsts == [
        own.format(0, "o_proj.weight"),
        "model.layers.0.post_attention_layernorm.weight",
        "model.layers.1.input_layernorm.weight",
        own.format(1, "o_proj.weight"),
        "model.layers.1.post_attention_layernorm.weight",
        "join",
    ]
    asked = sum(size for event in recorder.events if event != "join" for _, size in event)
    assert warmer.bytes_of(3) == asked > 0
    assert warmer.bytes_of(4) == 0, "no graph of four tokens"


@pytest.mark.parametrize(("tokens", "graph"), [(3, False), (planning.MAX_TOKENS + 1, True), (0, True)])
def test_nothing_outside_decode_or_above_the_bound(
    warmed: tuple[Model, Recorder, Warmer], tokens: int, graph: bool
) -> None:
    model, recorder, warmer = warmed
    model(tokens, graph=graph)
    assert recorder.events == []
    assert warmer.bytes_of(tokens) == 0
    model(1, graph=True)
    model(tokens, graph=graph)
    assert recorder.events.count("join") == 1, "a decode step leaves nothing on for the next pass"


def test_a_pass_that_fails_leaves_nothing_for_the_next(warmed: tuple[Model, Recorder, Warmer]) -> None:
    model, recorder, _ = warmed
    handle = model.model.layers[1].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(1, graph=True)
    handle.remove()
    recorder.events.clear()
    model(5, graph=False)
    assert recorder.events == []


def test_what_is_fetched_is_what_lies_there_when_the_graph_is_captured(
    warmed: tuple[Model, Recorder, Warmer],
) -> None:
    model, recorder, _ = warmed
    projection = model.model.layers[0].self_attn.o_proj
    old = projection.weight
    projection.weight = nn.Parameter(old.clone(), requires_grad=False)
    recorder.names[projection.weight.data_ptr()] = "the new one"
    model(1, graph=True)
    assert recorder.events[0][0] == ("the new one", HIDDEN * HIDDEN), old.data_ptr()


def test_a_phase_that_never_begins_stops_the_server(warmed: tuple[Model, Recorder, Warmer]) -> None:
    """Here attention's core is called past its module, so that nothing hangs on it."""
    model, recorder, _ = warmed
    for layer in model.model.layers[:-1]:
        core = layer.self_attn._modules.pop("attn")
        layer.self_attn.__dict__["attn"] = core.forward  # type: ignore[union-attr]
    with pytest.raises(UnsupportedError, match="Backbone never came by what is fetched under attention"):
        model(1, graph=True)
    assert recorder.events[-1] == "join"
    model(1, graph=False)


def pinned(model: Model, set_aside_bytes: int) -> list[l2_weights.LiveWeight]:
    live = l2_weights.read_model(model)
    assert live is not None
    pins = planning.pinned(
        [layer.weights for layer in live.layers], set_aside_bytes, lambda w: w.module is not None and w.tensor.dim() > 1
    )
    Warmer(live, [], pins, CPU).install()
    return pins


@pytest.fixture
def set_windows(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    found: list[Any] = []
    monkeypatch.setattr(l2_warmer.l2_window, "set_stream_window", lambda _stream, window: found.append(window))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=7))
    return found


def test_weights_that_no_call_reads_stop_the_server(set_windows: list[Any]) -> None:
    model = Model()
    (pin,) = pinned(model, 4096)
    model.model.layers[0].self_attn.qkv_proj = nn.Identity()
    with pytest.raises(UnsupportedError, match=rf"none of the 1 weights .* {pin.name} for one"):
        model(1, graph=True)
    assert set_windows == []


def test_one_weight_that_no_call_reads_is_said_once(set_windows: list[Any], caplog: pytest.LogCaptureFixture) -> None:
    model = Model()
    qkv, out, gate = pinned(model, 6000)
    model.model.layers[0].self_attn.qkv_proj = nn.Identity()
    model(1, graph=True)
    model(2, graph=True)
    assert [record.getMessage() for record in caplog.records] == [
        f"sglang-sm120: L2: {weight.name} is not kept: it is read without a call of its module"
        for weight in (qkv, gate)  # this model's FFN never calls its gate
    ]
    assert [window.pointer for window in set_windows if window is not None] == [out.range(1)[0]] * 2


def test_a_call_that_fails_leaves_no_window(set_windows: list[Any]) -> None:
    model = Model()
    pinned(model, 4096)
    model.model.layers[0].self_attn.qkv_proj.forward = lambda _x: 1 / 0  # type: ignore[method-assign]
    with pytest.raises(ZeroDivisionError):
        model(1, graph=True)
    assert set_windows[-1] is None and len(set_windows) == 2


def test_windows_are_set_around_their_call_and_taken_away(set_windows: list[Any]) -> None:
    model = Model()
    pins = pinned(model, 6000)
    assert names(tuple(pins)) == [
        "model.layers.0.self_attn.qkv_proj.weight", "model.layers.0.self_attn.o_proj.weight",
        "model.layers.0.mlp.gate.weight",
    ]  # fmt: skip
    addresses = [pin.range(pin.num_bytes) for pin in pins]
    model(2, graph=True)
    model.model.layers[0].mlp.gate(torch.zeros(1, HIDDEN))  # outside of a pass
    assert [None if w is None else (w.pointer, w.num_bytes, w.hit_ratio) for w in set_windows] == [
        (*addresses[0], 1.0), None, (*addresses[1], 1.0), None,
    ]  # fmt: skip
    model(2, graph=False)
    assert len(set_windows) == 4


def test_the_host_build_is_asked_for_the_ranges_as_they_lie() -> None:
    """Prefetcher itself, on the CPU: whole vectors of 16 bytes of every planned part."""
    model = Model()
    live = l2_weights.read_model(model)
    assert live is not None
    plans = planning.prefetches([layer.weights for layer in live.layers], (100, 200, 300))
    warmer = Warmer(live, plans, [], CPU)
    warmer.install()
    model(1, graph=True)
    assert warmer.bytes_of(1) == sum(
        part.num_bytes // 16 * 16 for plan in plans for parts in plan.values() for part in parts
    )
