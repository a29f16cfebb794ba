"""--sm120-l2 on a model of SGLang's shape: which tensors are found, when they are fetched, which windows are set."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sglang_sm120.integration import l2, l2_weights
from sglang_sm120.plan import l2 as planning

HIDDEN = 32
CPU = torch.device("cpu")


class Core(nn.Module):
    """Stands for RadixAttention; k_scale, as there, is not read from memory."""

    def __init__(self) -> None:
        super().__init__()
        self.k_scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return x * 2


class Experts(nn.Module):
    """Stands for FusedMoE."""

    def __init__(self) -> None:
        super().__init__()
        self.w13_weight = nn.Parameter(torch.ones(4, HIDDEN, HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.w13_weight[0, 0]


class Quantised(nn.Module):
    """A projection with a packed weight, as NVFP4's are."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(HIDDEN, HIDDEN, dtype=torch.uint8), requires_grad=False)
        self.weight_scale = nn.Parameter(torch.ones(HIDDEN, 2))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.weight[0, 0]


class Attention(nn.Module):
    def __init__(self, mla: bool) -> None:
        super().__init__()
        self.qkv_proj = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.kv_b_proj = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.rotary_emb = nn.Embedding(512, HIDDEN)
        self.attn = Core()
        self.o_proj = Quantised()
        if mla:
            self.w_kc, self.w_vc = torch.ones(2, 8, 8), torch.ones(2, 8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.o_proj(self.attn(self.qkv_proj(x)))


class Ffn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(HIDDEN, 4, bias=False)
        self.experts = Experts()
        self.shared_experts = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return self.experts(x) + self.shared_experts(x)


class Decoder(nn.Module):
    def __init__(self, mla: bool) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(HIDDEN)
        self.self_attn = Attention(mla)
        self.post_attention_layernorm = nn.RMSNorm(HIDDEN)
        self.mlp = Ffn()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.post_attention_layernorm(x + self.self_attn(self.input_layernorm(x))))


class Backbone(nn.Module):
    def __init__(self, layers: int, mla: bool) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(100, HIDDEN)
        self.layers = nn.ModuleList([*(Decoder(mla) for _ in range(layers)), nn.Identity()])  # as PPMissingLayer

    def forward(self, input_ids: Tensor, forward_batch: Any) -> Tensor:
        x = self.embed_tokens(input_ids)
        for layer in self.layers:
            x = layer(x)
        return x


class Model(nn.Module):
    def __init__(self, layers: int = 2, mla: bool = False) -> None:
        super().__init__()
        self.visual = nn.Module()
        self.visual.layers = nn.ModuleList([nn.Linear(2, 2)])
        self.model = Backbone(layers, mla)
        self.lm_head = nn.Linear(HIDDEN, 100)

    def forward(self, tokens: int, *, graph: bool) -> Tensor:
        ids = torch.zeros(tokens, dtype=torch.int64)
        mode = SimpleNamespace(is_cuda_graph=lambda: graph)
        return self.lm_head(self.model(ids, forward_batch=SimpleNamespace(input_ids=ids, forward_mode=mode)))


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
def warmed() -> Iterator[tuple[Model, Recorder, l2.Warmer]]:
    model = Model()
    live = l2_weights.read_model(model)
    assert live is not None
    plans = planning.prefetches([layer.weights for layer in live.layers], (1 << 20,) * 3)
    warmer = l2.Warmer(live, plans, [], CPU)
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


def test_each_phase_is_fetched_at_its_moment(warmed: tuple[Model, Recorder, l2.Warmer]) -> None:
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
    warmed: tuple[Model, Recorder, l2.Warmer], tokens: int, graph: bool
) -> None:
    model, recorder, warmer = warmed
    model(tokens, graph=graph)
    assert recorder.events == []
    assert warmer.bytes_of(tokens) == 0
    model(1, graph=True)
    model(tokens, graph=graph)
    assert recorder.events.count("join") == 1, "a decode step leaves nothing on for the next pass"


def test_a_pass_that_fails_leaves_nothing_for_the_next(warmed: tuple[Model, Recorder, l2.Warmer]) -> None:
    model, recorder, _ = warmed
    handle = model.model.layers[1].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(1, graph=True)
    handle.remove()
    recorder.events.clear()
    model(5, graph=False)
    assert recorder.events == []


def test_windows_are_set_around_their_call_and_taken_away(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model()
    live = l2_weights.read_model(model)
    assert live is not None
    pins = planning.pinned(
        [layer.weights for layer in live.layers], 6000, lambda w: w.module is not None and w.tensor.dim() > 1
    )
    assert names(tuple(pins)) == [
        "model.layers.0.self_attn.qkv_proj.weight", "model.layers.0.self_attn.o_proj.weight",
        "model.layers.0.mlp.gate.weight",
    ]  # fmt: skip
    set_windows: list[Any] = []
    monkeypatch.setattr(l2.l2_window, "set_stream_window", lambda _stream, window: set_windows.append(window))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=7))
    l2.Warmer(live, [], pins, CPU).install()
    model(2, graph=True)
    model.model.layers[0].mlp.gate(torch.zeros(1, HIDDEN))  # outside of a pass
    assert [None if w is None else (w.pointer, w.num_bytes, w.hit_ratio) for w in set_windows] == [
        (pins[0].pointer, 4096, 1.0), None, (pins[1].pointer, 1024, 1.0), None,
    ]  # fmt: skip
    model(2, graph=False)
    assert len(set_windows) == 4


def test_the_host_build_is_asked_for_the_ranges_as_they_lie() -> None:
    """Prefetcher itself, on the CPU: whole vectors of 16 bytes of every planned part."""
    model = Model()
    live = l2_weights.read_model(model)
    assert live is not None
    plans = planning.prefetches([layer.weights for layer in live.layers], (100, 200, 300))
    warmer = l2.Warmer(live, plans, [], CPU)
    warmer.install()
    model(1, graph=True)
    assert warmer.bytes_of(1) == sum(
        part.num_bytes // 16 * 16 for plan in plans for parts in plan.values() for part in parts
    )
