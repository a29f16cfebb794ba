"""Runners over this package's own `fused_moe`: its kernels (`native`) and its plain torch (`reference`)."""

from __future__ import annotations

import functools
from typing import cast

import torch
from torch import Tensor

from sglang_sm120.errors import UnsupportedError
from sglang_sm120.kernels.moe.fused_moe import api
from sglang_sm120.kernels.moe.layer import Nvfp4MoeWeights
from sglang_sm120.kernels.moe.w4a16 import num_sms
from sglang_sm120.runners.base import Bound, LayerSpec, MoeRunner

WORKSPACE_LIMIT_BYTES = 512 * 2**20
"""Of one call of our kernels. A batch that needs more is run in parts: the slots of 8192 tokens alone, top 8 and 6144
wide, are 0.8 GB. A part of that size still reads each weight for dozens of rows, so it costs little: a guess."""


class NativeRunner(MoeRunner):
    """Our kernels: decode or middle in W4A16 by the mean rows of an expert, the Triton kernel in W4A4 and elsewhere.

    Batches that need more than WORKSPACE_LIMIT_BYTES are split evenly.
    """

    name = "native"
    numerics = ("w4a16", "w4a4")
    graph_rule = "One call of that batch size outside a capture loads the kernels; nothing is fixed but the addresses."

    def unavailable_reason(self, device: torch.device) -> str | None:
        return _kernels_reason(device)

    def unsupported_reason(
        self, weights: Nvfp4MoeWeights, spec: LayerSpec, numerics: str, num_tokens: int
    ) -> str | None:
        reason = _layer_reason(weights, spec, numerics)
        if reason is not None:
            return reason
        found = self._backend(weights, spec, numerics, self._part(weights, spec, numerics, num_tokens))
        return found if found not in api.NATIVE_BACKENDS else None

    def workspace_bytes(self, weights: Nvfp4MoeWeights, spec: LayerSpec, numerics: str, num_tokens: int) -> int:
        return self._bytes(weights, spec, numerics, self._part(weights, spec, numerics, num_tokens))

    def bind(self, weights: Nvfp4MoeWeights, spec: LayerSpec, numerics: str) -> Bound:
        plans: dict[int, tuple[int, str]] = {}  # by batch size: tokens of a part, and the kernel for it

        def run(hidden_states: Tensor, weights: Nvfp4MoeWeights, topk_weights: Tensor, topk_ids: Tensor) -> Tensor:
            num_tokens = hidden_states.shape[0]
            if num_tokens not in plans:
                part = self._part(weights, spec, numerics, num_tokens)
                backend = self._backend(weights, spec, numerics, part)
                if backend not in api.NATIVE_BACKENDS:
                    raise UnsupportedError(
                        f"native in {numerics}: {backend}", "a layer it covers", "use another runner"
                    )
                plans[num_tokens] = part, backend
            part, backend = plans[num_tokens]
            if part >= num_tokens:
                return _call(hidden_states, weights, topk_weights, topk_ids, spec, numerics, backend)
            out = torch.empty(hidden_states.shape, dtype=hidden_states.dtype, device=hidden_states.device)
            for begin in range(0, num_tokens, part):
                rows = slice(begin, begin + part)
                out[rows] = _call(
                    hidden_states[rows], weights, topk_weights[rows], topk_ids[rows], spec, numerics, backend
                )
            return out

        return run

    def _part(self, weights: Nvfp4MoeWeights, spec: LayerSpec, numerics: str, num_tokens: int) -> int:
        """Tokens that are run at once: all, or as even parts as stay below the limit."""
        parts = 1
        while parts < num_tokens:
            if self._bytes(weights, spec, numerics, -(-num_tokens // parts)) <= WORKSPACE_LIMIT_BYTES:
                break
            parts += 1
        return max(1, -(-num_tokens // parts))

    def _bytes(self, weights: Nvfp4MoeWeights, spec: LayerSpec, numerics: str, num_tokens: int) -> int:
        return _workspace_bytes(weights, spec, num_tokens, self._backend(weights, spec, numerics, num_tokens))

    @staticmethod
    def _backend(weights: Nvfp4MoeWeights, spec: LayerSpec, numerics: str, num_tokens: int) -> str:
        """The kernel that serves a batch of this size, or one sentence on why none does."""
        return api.native_backend(
            weights,
            max(num_tokens, 1) * spec.top_k,
            activation=spec.activation,
            numerics=numerics,
            hidden_dtype=spec.hidden_dtype,
            device=weights.w13_weight.device,
        )


class ReferenceRunner(MoeRunner):
    """Plain torch with exact NVFP4 semantics: what the others are compared with. Slow."""

    name = "reference"
    numerics = ("w4a4", "w4a16")
    graph_rule = "Nothing: no shape and no branch depends on data."

    def unavailable_reason(self, device: torch.device) -> str | None:
        return None

    def unsupported_reason(
        self, weights: Nvfp4MoeWeights, spec: LayerSpec, numerics: str, num_tokens: int
    ) -> str | None:
        return _layer_reason(weights, spec, numerics)

    def workspace_bytes(self, weights: Nvfp4MoeWeights, spec: LayerSpec, numerics: str, num_tokens: int) -> int:
        return _workspace_bytes(weights, spec, num_tokens, "reference")

    def bind(self, weights: Nvfp4MoeWeights, spec: LayerSpec, numerics: str) -> Bound:
        return lambda hidden_states, weights, topk_weights, topk_ids: _call(
            hidden_states, weights, topk_weights, topk_ids, spec, numerics, "reference"
        )


def _call(
    hidden_states: Tensor,
    weights: Nvfp4MoeWeights,
    topk_weights: Tensor,
    topk_ids: Tensor,
    spec: LayerSpec,
    numerics: str,
    backend: str,
) -> Tensor:
    return api.fused_moe(
        hidden_states,
        weights,
        topk_weights,
        topk_ids,
        activation=spec.activation,
        numerics=cast("api.Numerics", numerics),
        apply_router_weight_on_input=spec.apply_router_weight_on_input,
        expert_offset=spec.expert_offset,
        num_global_experts=spec.num_global_experts,
        backend=cast("api.Backend", backend),
    )


def _layer_reason(weights: Nvfp4MoeWeights, spec: LayerSpec, numerics: str) -> str | None:
    return api.unsupported_reason(
        weights, activation=spec.activation, numerics=numerics, hidden_dtype=spec.hidden_dtype
    )


def _workspace_bytes(weights: Nvfp4MoeWeights, spec: LayerSpec, num_tokens: int, backend: str) -> int:
    if backend not in (*api.NATIVE_BACKENDS, "reference"):  # a sentence on why there is none
        return 0
    return api.workspace_bytes(
        num_tokens=num_tokens,
        top_k=spec.top_k,
        hidden_size=weights.hidden_size,
        intermediate_size=weights.intermediate_size,
        is_gated=weights.is_gated,
        backend=backend,
        num_experts=weights.num_experts,
        num_sms=num_sms(weights.w13_weight.device),
    )


@functools.cache
def _kernels_reason(device: torch.device) -> str | None:
    """Whether our kernels can be loaded there; loads them, which on a GPU without a prebuilt cubin compiles them."""
    return api.kernels_unavailable_reason(device)
