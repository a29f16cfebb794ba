"""The runners over our own kernels: right, honest about what they cover, and without a copy of the weights."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sglang_sm120.bench.moe_cases import random_weights
from sglang_sm120.bench.options import ModelShape
from sglang_sm120.errors import UnsupportedError
from sglang_sm120.kernels.moe.fused_moe import api
from sglang_sm120.kernels.moe.layer import MoeActivation
from sglang_sm120.runners.base import LayerSpec
from sglang_sm120.runners.registry import RUNNERS

CPU = torch.device("cpu")
SPEC = LayerSpec(MoeActivation("silu"), torch.bfloat16, top_k=2)


def weights_of(experts: int, hidden: int = 256, intermediate: int = 128):
    return random_weights(ModelShape("test", experts, 2, hidden, intermediate), CPU, torch.Generator().manual_seed(0))


def batch(tokens: int, experts: int, hidden: int = 256):
    generator = torch.Generator().manual_seed(tokens)
    ids = torch.stack([torch.randperm(experts, generator=generator)[:2] for _ in range(tokens)])
    return torch.randn(tokens, hidden, generator=generator).bfloat16(), torch.rand(tokens, 2, generator=generator), ids


@pytest.mark.parametrize("numerics", ["w4a16", "w4a4"])
@pytest.mark.parametrize("tokens", [1, 9, 40])
def test_native_equals_reference(numerics: str, tokens: int) -> None:
    weights = weights_of(4)
    x, router, ids = batch(tokens, 4)
    assert RUNNERS["native"].unsupported_reason(weights, SPEC, numerics, tokens) is None
    got, want = (
        RUNNERS[name].bind(weights, SPEC, numerics)(x, weights, router, ids).double()
        for name in ("native", "reference")
    )
    assert ((got - want).norm(dim=1) <= 2e-2 * want.norm(dim=1)).all() and want.norm() > 0


def test_weights_that_are_rebound_are_followed() -> None:
    weights = weights_of(4)
    bound = RUNNERS["native"].bind(weights, SPEC, "w4a16")
    x, router, ids = batch(3, 4)
    once = bound(x, weights, router, ids)
    twice = bound(x, dataclasses.replace(weights, w2_global_scale=weights.w2_global_scale * 2), router, ids)
    torch.testing.assert_close(twice, once * 2)


@pytest.mark.parametrize("numerics", ["w4a16", "w4a4"])
def test_a_large_batch_is_run_in_parts(numerics: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Below the limit, with the same result, in parts that differ by the last one at most."""
    weights, native = weights_of(4), RUNNERS["native"]
    x, router, ids = batch(41, 4)
    whole = native.bind(weights, SPEC, numerics)(x, weights, router, ids)
    limit = native.workspace_bytes(weights, SPEC, numerics, 41) // 3
    monkeypatch.setattr("sglang_sm120.runners.native.WORKSPACE_LIMIT_BYTES", limit)
    parts: list[int] = []
    fused_moe = api.fused_moe
    monkeypatch.setattr(api, "fused_moe", lambda x, *a, **k: (parts.append(len(x)), fused_moe(x, *a, **k))[1])
    got = native.bind(weights, SPEC, numerics)(x, weights, router, ids)
    assert len(parts) > 2 and sum(parts) == 41 and len(set(parts)) <= 2
    assert native.workspace_bytes(weights, SPEC, numerics, 41) <= limit
    assert ((got.double() - whole.double()).norm(dim=1) <= 4e-3 * whole.double().norm(dim=1)).all()


class Largest(TorchDispatchMode):
    """The bytes of the largest storage that an operation returns and that none of its arguments had."""

    bytes_ = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        old = {a.untyped_storage().data_ptr() for a in args if isinstance(a, torch.Tensor)}
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() not in old:
                self.bytes_ = max(self.bytes_, tensor.untyped_storage().nbytes())
        return out


@pytest.mark.parametrize(
    ("name", "numerics"), [("native", "w4a16"), ("native", "w4a4"), ("reference", "w4a16"), ("reference", "w4a4")]
)
def test_no_copy_of_the_weights(name: str, numerics: str) -> None:
    """Nothing that binding or calling allocates is as large as one of the weights, or as workspace_bytes."""
    experts = 64
    weights = weights_of(experts)
    x, router, ids = batch(2, experts)
    with Largest() as largest:
        RUNNERS[name].bind(weights, SPEC, numerics)(x, weights, router, ids)
    assert 0 < largest.bytes_ < weights.w2_weight.untyped_storage().nbytes() // 2
    if (name, numerics) == ("native", "w4a4"):
        return  # on the CPU plain torch stands in for that kernel, and decodes an expert at a time
    assert largest.bytes_ <= RUNNERS[name].workspace_bytes(weights, SPEC, numerics, 2) + 2 * x.numel()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("numerics", ["w4a16", "w4a4"])
def test_no_copy_of_the_weights_in_device_memory(numerics: str) -> None:
    """By the allocator's own count: at its peak far less than one weight more, and within the report."""
    device = torch.device("cuda")
    shape = ModelShape("test", 64, 2, 1024, 512)
    weights = random_weights(shape, device, torch.Generator(device).manual_seed(0))
    x, router, ids = (tensor.to(device) for tensor in batch(2, 64, 1024))
    native = RUNNERS["native"]
    native.bind(weights, SPEC, numerics)(x, weights, router, ids)  # what is loaded at a first call
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = native.bind(weights, SPEC, numerics)(x, weights, router, ids)
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    assert peak < weights.w2_weight.untyped_storage().nbytes() // 4
    assert peak <= native.workspace_bytes(weights, SPEC, numerics, 2) + 2 * out.numel() * 2 + (1 << 20)


def test_the_mode_sees_a_copy() -> None:
    weights = weights_of(64)
    with Largest() as largest:
        weights.w2_weight.clone()
    assert largest.bytes_ == weights.w2_weight.untyped_storage().nbytes()


def test_what_native_does_not_cover() -> None:
    """It says so before, and does not let the reference serve under its name."""
    weights = weights_of(4, hidden=272, intermediate=128)
    float32 = dataclasses.replace(SPEC, hidden_dtype=torch.float32)
    native = RUNNERS["native"]
    assert native.unsupported_reason(weights, SPEC, "w4a16", 4) is None, "by prefill, which needs multiples of 16 only"
    tanh = dataclasses.replace(SPEC, activation=MoeActivation("relu2"))
    assert "relu2" in native.unsupported_reason(weights, tanh, "w4a16", 4)
    no_scales = dataclasses.replace(weights, w13_input_scale=None)
    assert "input_scale" in native.unsupported_reason(no_scales, SPEC, "w4a4", 4)
    strided = dataclasses.replace(weights, w2_weight=weights.w2_weight.mT.contiguous().mT)
    assert "strides" in native.unsupported_reason(strided, SPEC, "w4a16", 4)
    x, router, ids = batch(4, 4, hidden=272)
    with pytest.raises(UnsupportedError, match="strides"):
        native.bind(strided, SPEC, "w4a16")(x, strided, router, ids)
    assert RUNNERS["reference"].unsupported_reason(weights, float32, "w4a16", 4) is None


def test_every_runner_states_its_rules() -> None:
    for name, runner in RUNNERS.items():
        assert runner.name == name and runner.graph_rule.endswith(".") and set(runner.numerics) <= {"w4a16", "w4a4"}
    assert RUNNERS["native"].unavailable_reason(CPU) is None
    assert RUNNERS["native"].unavailable_reason(torch.device("meta")) is not None
