"""fused_moe as one torch operator: its rules, and torch.compile around it."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from moe_oracle import SILU, inputs, layer
from nvfp4_oracle import bytes_of

from sglang_sm120.kernels.moe.fused_moe.api import MoeActivation, fused_moe


def operator_arguments(x, weights, topk_weights, ids, backend, numerics="w4a16", activation=SILU):
    return (
        x, weights.w13_weight, weights.w13_blockscale, weights.w13_global_scale, weights.w2_weight,
        weights.w2_blockscale, weights.w2_global_scale, weights.w13_input_scale, weights.w2_input_scale,
        weights.w13_order, weights.is_gated, topk_weights, ids, activation.name, activation.alpha, activation.beta,
        activation.limit, numerics, False, 0, None, backend, "",
    )  # fmt: skip


def check_operator(arguments: tuple) -> None:
    """Its schema, its fake, autograd and tracing with symbolic sizes; it writes to no input and returns none of them.

    torch's own check of the last two cannot compare float8.
    """
    checks = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    operator = torch.ops.sglang_sm120.fused_moe.default
    assert set(torch.library.opcheck(operator, arguments, test_utils=checks).values()) == {"SUCCESS"}
    tensors = [argument for argument in arguments if isinstance(argument, torch.Tensor)]
    before = [bytes_of(tensor).clone() for tensor in tensors]
    out = operator(*arguments)
    assert all(torch.equal(bytes_of(tensor), old) for tensor, old in zip(tensors, before, strict=True))
    storages = {tensor.untyped_storage().data_ptr() for tensor in tensors}
    assert out.untyped_storage().data_ptr() not in storages and out.is_contiguous()
    assert not operator._schema.is_mutable


@pytest.mark.parametrize("backend", ["auto", "decode", "middle", "prefill"])
@pytest.mark.parametrize("input_scales", [True, False])
def test_the_operator_keeps_torchs_rules(backend, input_scales):
    weights = layer(4, 160, 96).weights()
    if not input_scales:
        weights = dataclasses.replace(weights, w13_input_scale=None, w2_input_scale=None)
    x, topk_weights, ids = inputs(3, 2, 4, 160, torch.bfloat16)
    activation = MoeActivation("silu", 1.5, None, 2.0)
    check_operator(operator_arguments(x, weights, topk_weights, ids, backend, activation=activation))


def test_the_operator_with_strided_hidden_states_and_w4a4():
    weights = layer(4, 160, 96).weights()
    x, topk_weights, ids = inputs(3, 2, 4, 160, torch.bfloat16)
    wide = torch.zeros(3, 320, dtype=x.dtype)
    wide[:, :160] = x
    check_operator(operator_arguments(wide[:, :160], weights, topk_weights, ids.long(), "prefill", "w4a4"))


@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
@pytest.mark.parametrize("backend", ["auto", "decode", "middle", "prefill"])
def test_torch_compile_sees_one_operator(backend, compiler):
    lay = layer(4, 160, 96)
    weights = lay.weights()
    graphs = []

    def body(x, topk_weights, ids):
        y = fused_moe(x * 2, weights, topk_weights, ids, activation=SILU, numerics="w4a16", backend=backend)
        return y + 1

    def watching(graph, example_inputs):
        graphs.append(graph)
        return torch._dynamo.lookup_backend(compiler)(graph, example_inputs)

    torch._dynamo.reset()
    compiled = torch.compile(body, fullgraph=True, backend=watching, dynamic=True)
    for tokens in (5, 9, 17):
        x, topk_weights, ids = inputs(tokens, 2, 4, 160, torch.bfloat16)
        assert torch.equal(compiled(x, topk_weights, ids), body(x, topk_weights, ids))
    targets = [str(node.target) for graph in graphs for node in graph.graph.nodes if node.op == "call_function"]
    assert len(graphs) == 1 and sum("sglang_sm120.fused_moe" in target for target in targets) == 1, targets
