"""Fused all-reduce at layer boundaries: when ours is taken, and each reason for which SGLang's own path serves."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("sglang")

from sglang.srt.layers.layer_boundary.contracts import FfnInputFusion
from sglang.srt.layers.layer_boundary.fusions import allreduce
from sglang.srt.layers.layer_boundary.layout import Layout, SumGroup, TokenAxis
from sglang.srt.layers.layer_boundary.output import UnreducedOutput
from sglang.srt.layers.layernorm import Gemma3RMSNorm, GemmaRMSNorm, LayerNorm, RMSNorm

from sglang_sm120.integration import all_reduce, all_reduce_fusion
from sglang_sm120.integration.all_reduce_plane import Plane
from sglang_sm120.kernels.communication.all_reduce_rmsnorm.api import Range

HIDDEN, EPS = 64, 1e-5


class Recorder(Plane):
    """A plane that says what it was asked for."""

    dtypes, device_type = (torch.bfloat16, torch.float16), "cpu"

    def __init__(self, ranks: list[int]) -> None:
        super().__init__(SimpleNamespace(ranks=ranks, world_size=len(ranks), rank_in_group=0), [Range(1024, "a")])
        self.calls: list[tuple] = []

    def algorithm(self, shape, *, norm=False):
        return "a" if 0 < 2 * torch.Size(shape).numel() <= 1024 else None

    def describe(self) -> str:
        return "recorder"

    def check(self) -> None: ...

    def close(self) -> None: ...

    def _sum(self, x):
        raise AssertionError("only fused here")

    def _fused(self, x, residual, gamma, eps, gamma_offset):
        self.calls.append((x, residual, gamma, eps, gamma_offset))
        return torch.empty_like(x), torch.empty_like(residual)


class World:
    """A boundary with everything in order; a test changes one thing."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.group = SimpleNamespace(ranks=[0, 1])
        self.parallel = SimpleNamespace(attn_tp_group=self.group)
        self.exec = SimpleNamespace(comm=SimpleNamespace(enable_quant_communications=False))
        self.context = SimpleNamespace(input_scattered=False)
        self.rows = Layout(frozenset())
        self.plan = SimpleNamespace(norm=norm(RMSNorm(HIDDEN, EPS)), fused_input_rows=lambda batch: self.rows)
        self.batch = SimpleNamespace(can_run_tbo=False)
        self.x = torch.ones(4, HIDDEN, dtype=torch.bfloat16)
        self.residual = torch.ones(4, HIDDEN, dtype=torch.bfloat16)
        self.owed: dict[str, Any] = {"group": self.group}
        self.post: torch.Tensor | None = None
        self.plane: Recorder | None = Recorder([0, 1])
        self.patch = monkeypatch.setattr
        self.patch(all_reduce, "plane", lambda: self.plane)
        self.patch(all_reduce_fusion, "get_parallel", lambda: self.parallel)
        self.patch(all_reduce_fusion, "get_exec", lambda: self.exec)
        self.patch(all_reduce_fusion, "get_attn_tp_context", lambda: self.context)
        self.patch(all_reduce_fusion, "is_dp_attention_enabled", lambda: False)
        self.patch(all_reduce_fusion, "_said", set())

    def attn(self):
        owed = self.owed if not isinstance(self.owed, dict) else UnreducedOutput(self.x, **self.owed)
        return all_reduce_fusion.fuse_attn_input(self.plan, owed, self.residual, self.batch, self.post)

    def ffn(self):
        return all_reduce_fusion.fuse_ffn_input(self.plan, self.x, self.residual, self.batch)


def norm(module: Any) -> Any:
    return module.to(torch.bfloat16)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


def test_both_boundaries_are_fused(world: World) -> None:
    for run in (world.attn, world.ffn):
        out, residual = run()
        assert (out.shape, residual.shape) == (world.x.shape, world.residual.shape)
    assert world.plane is not None
    for x, residual, gamma, eps, offset in world.plane.calls:
        assert x is world.x
        assert residual is world.residual
        assert gamma is world.plan.norm.weight
        assert (eps, offset) == (EPS, 0.0)


def test_another_coordinator_of_the_same_ranks_is_the_same_group(world: World) -> None:
    world.owed["group"] = SimpleNamespace(ranks=[0, 1])
    assert world.attn() is not None


def test_gemmas_norm_adds_the_one_unrounded(world: World) -> None:
    world.plan.norm = norm(GemmaRMSNorm(HIDDEN, EPS))
    assert world.ffn() is not None
    assert world.plane is not None
    (_, _, gamma, _, offset) = world.plane.calls[0]
    assert gamma.data_ptr() == world.plan.norm.weight.data_ptr()
    assert offset == 1.0


BOTH: dict[str, tuple[Callable[[World], Any], str]] = {
    "dp attention": (
        lambda w: w.patch(all_reduce_fusion, "is_dp_attention_enabled", lambda: True), "attention data parallelism"
    ),
    "two-batch overlap": (lambda w: setattr(w.batch, "can_run_tbo", True), "two-batch overlap"),
    "breakable graph": (
        lambda w: w.patch(all_reduce_fusion, "is_in_breakable_cuda_graph", lambda: True), "a breakable CUDA graph"
    ),
    "batch-invariant": (
        lambda w: w.patch(all_reduce_fusion, "is_batch_invariant_mode_enabled", lambda: True), "batch-invariant mode"
    ),
    "quantised": (lambda w: setattr(w.exec.comm, "enable_quant_communications", True), "quantised communication"),
    "scattered": (lambda w: setattr(w.context, "input_scattered", True), "rows that are scattered over the ranks"),
    "sliced rows": (
        lambda w: setattr(w, "rows", Layout(frozenset({TokenAxis.ATTN_TP}))), "rows that are scattered over the ranks"
    ),
    "residual's shape": (lambda w: setattr(w, "residual", w.residual[:2]), "a residual of another shape"),
    "residual's dtype": (lambda w: setattr(w, "residual", w.residual.float()), "a residual of another shape"),
    "residual's layout": (
        lambda w: setattr(w, "residual", torch.ones(HIDDEN, 4, dtype=torch.bfloat16).T), "a residual of another shape"
    ),
    "no residual": (lambda w: setattr(w, "residual", None), "a residual of another shape"),
    "layer norm": (lambda w: setattr(w.plan, "norm", norm(LayerNorm(HIDDEN))), "norm LayerNorm"),
    "gemma 3": (lambda w: setattr(w.plan, "norm", norm(Gemma3RMSNorm(HIDDEN))), "norm Gemma3RMSNorm"),
    "subclass": (lambda w: setattr(w.plan, "norm", norm(type("Mine", (RMSNorm,), {})(HIDDEN))), "norm Mine"),
    "no weight": (lambda w: setattr(w.plan, "norm", RMSNorm(HIDDEN, has_weight=False)), "RMSNorm without a weight"),
    "variance": (
        lambda w: setattr(w.plan, "norm", norm(RMSNorm(HIDDEN, var_hidden_size=32))), "with variance_size_override"
    ),
    "cast": (
        lambda w: setattr(w.plan, "norm", norm(RMSNorm(HIDDEN, cast_x_before_out_mul=True))),
        "with cast_x_before_out_mul",
    ),
    "fp32 residual": (
        lambda w: setattr(w.plan, "norm", norm(RMSNorm(HIDDEN, fp32_residual=True))), "with fp32_residual"
    ),
    "output dtype": (
        lambda w: setattr(w.plan, "norm", norm(RMSNorm(HIDDEN, override_orig_dtype=torch.float32))),
        "with override_orig_dtype",
    ),
    "padded": (lambda w: setattr(w.plan.norm, "x_pad_to_multiple", 256), "with x_pad_to_multiple"),
    "fp8 input": (
        lambda w: w.patch("sglang.srt.layers.layernorm._fp8_static_input_scale", lambda linear: torch.ones(1)),
        "quantises for the layer behind it",
    ),
    "weight's dtype": (lambda w: setattr(w.plan, "norm", RMSNorm(HIDDEN).float()), "norm weight [64] of torch.float32"),
    "weight's size": (lambda w: setattr(w.plan, "norm", norm(RMSNorm(32))), "norm weight [32]"),
}  # fmt: skip
ATTENTION = {
    "dp redistribution": (
        lambda w: w.owed.update(group=None, reduce_to_dp_local=lambda x: x), "a sum with a way of its own"
    ),
    "custom sum": (lambda w: w.owed.update(complete_sum=lambda x: x), "a sum with a way of its own"),
    "other group": (lambda w: w.owed.update(group=SimpleNamespace(ranks=[0, 1, 2, 3])), "a sum over another group"),
    "no group": (lambda w: w.owed.update(group=None), "a sum over another group"),
    "post addition": (lambda w: setattr(w, "post", torch.ones(1)), "an addition to the residual after the sum"),
}  # fmt: skip
FFN = {
    "attention group": (
        lambda w: setattr(w.parallel, "attn_tp_group", SimpleNamespace(ranks=[0])), "a sum over another group"
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("where", "case"),
    [*((where, case) for case in BOTH for where in ("attn", "ffn")), *(("attn", case) for case in ATTENTION),
     *(("ffn", case) for case in FFN)],
)  # fmt: skip
def test_each_reason_to_leave_it_is_said_once(where: str, case: str, world: World, caplog) -> None:
    change, says = (BOTH | (ATTENTION if where == "attn" else FFN))[case]
    change(world)
    with caplog.at_level(logging.INFO):
        assert getattr(world, where)() is None
        assert getattr(world, where)() is None
    assert world.plane is not None
    assert not world.plane.calls, "declined before anything was touched"
    (line,) = caplog.messages
    assert line.startswith("sglang-sm120: not fused, left to SGLang's all-reduce and norm: ")
    assert says in line


QUIET = {
    "too large": lambda w: setattr(w, "x", torch.ones(64, HIDDEN, dtype=torch.bfloat16)),
    "empty": lambda w: setattr(w, "x", torch.ones(0, HIDDEN, dtype=torch.bfloat16)),
    "float32": lambda w: setattr(w, "x", w.x.float()),
    "not contiguous": lambda w: setattr(w, "x", torch.ones(HIDDEN, 4, dtype=torch.bfloat16).T),
    "three dimensions": lambda w: setattr(w, "x", w.x.view(2, 2, HIDDEN)),
    "no plane": lambda w: setattr(w, "plane", None),
    "a finalize": lambda w: setattr(w, "owed", object()),
}


@pytest.mark.parametrize("case", QUIET)
def test_what_is_simply_not_ours_is_left_without_a_word(case: str, world: World, caplog) -> None:
    QUIET[case](world)
    with caplog.at_level(logging.INFO):
        assert world.attn() is None
        assert case == "a finalize" or world.ffn() is None
    assert not caplog.messages


def test_the_norms_flags_are_all_of_them() -> None:
    """A new argument of RMSNorm is one that the kernel does not know."""
    known = {"self", "hidden_size", "eps", "var_hidden_size", "has_weight", "weight_dtype", "force_native"}
    new = set(inspect.signature(RMSNorm.__init__).parameters) - known - set(all_reduce_fusion._SPECIAL)
    assert not new
    assert set(inspect.signature(GemmaRMSNorm.__init__).parameters) == {"self", "hidden_size", "eps"}


def test_a_traced_graph_keeps_sglangs_operators(world: World) -> None:
    @torch.compile(backend="eager", fullgraph=True)
    def step(x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        fused = all_reduce_fusion.fuse_ffn_input(world.plan, x, residual, world.batch)
        return x + residual if fused is None else fused[0]

    assert torch.equal(step(world.x, world.residual), world.x + world.residual)
    assert world.plane is not None
    assert not world.plane.calls


def test_ours_come_first_and_the_others_stay(world: World) -> None:
    plan = SimpleNamespace(norm=object(), fusions=None)
    ours = all_reduce_fusion.attn_input_fusions(lambda plan, read="default": (plan, read), plan, "read")
    assert ours[0].func is all_reduce_fusion.fuse_attn_input
    assert ours[1:] == (plan, "read")
    (first, *others) = all_reduce_fusion.ffn_input_fusions(allreduce.ffn_input_fusions, plan)
    assert isinstance(first, FfnInputFusion)
    assert first.completes is SumGroup.ATTN_TP
    assert first.preserves_residual is None
    assert not others


def test_sglangs_own_provider_has_the_interface_that_ours_has() -> None:
    from sglang.srt.layers.layer_boundary.fusions import cutedsl

    for name in ("attn_input_fusions", "ffn_input_fusions"):
        theirs = inspect.signature(getattr(cutedsl.CuteDSLFusion, name))
        assert list(theirs.parameters) == list(inspect.signature(getattr(all_reduce_fusion.Fusions, name)).parameters)
    owed = set(UnreducedOutput.__struct_fields__)
    assert owed == {"partial", "group", "reduce_to_dp_local", "complete_sum"}, "a new field is a new way to owe"
