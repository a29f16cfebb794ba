"""What `bench l2` runs: a stack of decoder layers with SGLang's shapes, and the points at which weights are fetched.

Left out of a layer: q and k norms, rotary embedding, the write to the KV cache, GLM-5's sparse index.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from sglang_sm120.bench.l2_options import Mla, StackShape
from sglang_sm120.bench.moe_cases import ACTIVATION, random_weights
from sglang_sm120.bench.routing import random_routing
from sglang_sm120.kernels.memory.l2_window.config import hit_ratio
from sglang_sm120.kernels.moe.fused_moe.api import fused_moe
from sglang_sm120.plan import l2 as planning
from sglang_sm120.plan.l2 import ATTENTION, FFN, NEXT

KEPT, ALL = "kept", "all"


@dataclass(frozen=True)
class Candidate:
    """What a step does with L2.

    phases: of plan.l2.PHASES, at which something is fetched. set_aside: as much of L2 as the GPU allows, for what
    persists. window: KEPT: over the projections that `plan.l2.pinned` chooses, whole; ALL: over every projection of the
    stack, each with the hit ratio set-aside / size of all.
    """

    phases: tuple[str, ...] = ()
    set_aside: bool = False
    window: str | None = None


CANDIDATES: dict[str, Candidate] = {
    "off": Candidate(),
    "attention": Candidate((ATTENTION,)),
    "ffn": Candidate((FFN,)),
    "next": Candidate((NEXT,)),
    "prefetch": Candidate((FFN, NEXT)),
    "set-aside": Candidate(set_aside=True),
    "persist": Candidate(set_aside=True, window=KEPT),
    "window": Candidate(set_aside=True, window=ALL),
    "both": Candidate((FFN, NEXT), set_aside=True, window=KEPT),
}
"""By name. "prefetch": under both all-reduces; that, "persist" and "both" are those of --sm120-l2."""

_BEFORE = ("fused_qkv_a_proj", "q_b_proj", "qkv_proj", "w_kc")
_FFN = ("router", "shared_gate_up", "shared_down")

Ranges = list[tuple[int, int]]
Linear = Callable[[Tensor, Tensor], Tensor]


class Prefetches(Protocol):
    """What a step needs of `kernels.memory.l2_prefetch.api.Prefetcher`."""

    def fork(self, ranges: Iterable[tuple[int, int]], **how: object) -> int: ...
    def join(self) -> None: ...


@dataclass(frozen=True)
class Projection:
    """One of a layer, as `plan.l2` takes it."""

    name: str
    weight: Tensor

    @property
    def num_bytes(self) -> int:
        return self.weight.nbytes


class Layer:
    """The random weights of one layer: dense ones in bfloat16, experts in NVFP4."""

    def __init__(self, shape: StackShape, device: torch.device, generator: torch.Generator) -> None:
        def weight(*size: int, fan_in: int) -> Tensor:
            values = torch.randn(size, device=device, dtype=torch.bfloat16, generator=generator)
            return values.mul_(fan_in**-0.5)

        hidden = shape.experts.hidden_size
        self.dense = {name: weight(*size, fan_in=size[1]) for name, size in shape.projections().items()}
        for name, size in shape.attention.absorbed().items():
            self.dense[name] = weight(*size, fan_in=size[1])
        self.input_norm = torch.ones(hidden, device=device, dtype=torch.bfloat16)
        self.post_attention_norm = torch.ones_like(self.input_norm)
        self.experts = random_weights(shape.experts, device, generator)

    def ranges(self, phase: str) -> Ranges:
        """(address, bytes) of what a phase fetches of this layer, in the order of need."""
        names = {ATTENTION: ("o_proj",), FFN: _FFN, NEXT: _BEFORE}[phase]
        return [(self.dense[name].data_ptr(), self.dense[name].nbytes) for name in names if name in self.dense]

    def projections(self) -> planning.Layer[Projection]:
        """What windows can cover: weights that one linear layer reads."""

        def of(*names: str) -> tuple[Projection, ...]:
            found = (name for name in names if name in self.dense and self.dense[name].dim() == 2)
            return tuple(Projection(name, self.dense[name]) for name in found)

        return planning.Layer(of(*_BEFORE), of("o_proj"), of(*_FFN))


class Batch:
    """One step's tokens: hidden states, a KV cache and a fresh uniform routing for every layer."""

    def __init__(
        self, shape: StackShape, layers: int, num_tokens: int, context: int, device: torch.device, seed: int
    ) -> None:
        on_host = torch.Generator().manual_seed(seed + num_tokens)
        generator = torch.Generator(device).manual_seed(seed + num_tokens)

        def values(*size: int) -> Tensor:
            return torch.randn(size, device=device, dtype=torch.bfloat16, generator=generator)

        experts, attention = shape.experts, shape.attention
        self.hidden = values(num_tokens, experts.hidden_size)
        self.ids = [
            random_routing("uniform", num_tokens, experts.num_experts, experts.top_k, on_host).to(device)
            for _ in range(layers)
        ]
        cache_shape: tuple[int, ...]
        if isinstance(attention, Mla):
            cache_shape = (num_tokens, context, attention.cache_elements())
        else:  # keys, then values
            cache_shape = (2 * num_tokens, attention.num_kv_heads, context, attention.head_dim)
        self.caches = [values(*cache_shape) for _ in range(layers)]

    def active_experts(self) -> int:
        """Experts that are read in a step, over all layers."""
        return sum(len(ids.unique()) for ids in self.ids)


class Stack:
    """Layers with different weights. It is a ring: the last layer fetches for the first one of the next step."""

    def __init__(self, shape: StackShape, layers: int, device: torch.device, seed: int) -> None:
        generator = torch.Generator(device).manual_seed(seed)
        self.shape, self.device = shape, device
        self.layers = [Layer(shape, device, generator) for _ in range(layers)]

    def reuse_bytes(self, batch: Batch) -> int:
        """Bytes that are read between two uses of a layer's weights: all layers but one of a step."""
        shape = self.shape
        caches = sum(cache.nbytes for cache in batch.caches)
        total = len(self.layers) * shape.dense_bytes() + batch.active_experts() * shape.expert_bytes() + caches
        return total - total // len(self.layers)

    def projection_bytes(self) -> int:
        """Of all projections, which a step reads once."""
        return sum(projection.num_bytes for layer in self.layers for projection in layer.projections().all())

    def windows(self, which: str | None, set_aside_bytes: int) -> dict[int, float]:
        """Address -> hit ratio of the weights that a window covers; which: of a Candidate."""
        layers = [layer.projections() for layer in self.layers]
        if which == KEPT:
            return {kept.weight.data_ptr(): 1.0 for kept in planning.pinned(layers, set_aside_bytes)}
        if which == ALL:
            every = [projection for layer in layers for projection in layer.all()]
            share = hit_ratio(self.projection_bytes(), set_aside_bytes)
            return {projection.weight.data_ptr(): share for projection in every}
        return {}

    @torch.no_grad()
    def step(
        self,
        batch: Batch,
        wait: Callable[[], None],
        prefetcher: Prefetches | None = None,
        phases: tuple[str, ...] = (),
        how: dict[str, object] | None = None,
        linear: Linear = F.linear,
        without: Collection[int] = (),
    ) -> tuple[Tensor, int]:
        """All layers.

        Args:
            batch: the tokens.
            wait: what stands for an all-reduce.
            prefetcher: of the side stream; None: nothing is fetched.
            phases: when something is fetched; of plan.l2.PHASES.
            how: of `prefetch`.
            linear: calls F.linear(x, weight) with a projection's weight.
            without: addresses of weights that are not fetched.

        Returns:
            Hidden states [T, H], and the bytes that were asked for.
        """
        asked = 0

        def fork(phase: str, number: int) -> None:
            nonlocal asked
            if prefetcher is not None and phase in phases:
                ranges = self.layers[number % len(self.layers)].ranges(phase)
                wanted = [(address, num_bytes) for address, num_bytes in ranges if address not in without]
                asked += prefetcher.fork(wanted, **(how or {})) if wanted else 0

        x, residual = batch.hidden, torch.zeros_like(batch.hidden)
        for number, layer in enumerate(self.layers):
            residual = residual + x
            hidden = F.rms_norm(residual, residual.shape[-1:], layer.input_norm)
            x = self._attention(layer, hidden, batch.caches[number], partial(fork, ATTENTION, number), linear)
            fork(FFN, number)
            wait()
            residual = residual + x
            hidden = F.rms_norm(residual, residual.shape[-1:], layer.post_attention_norm)
            x = _ffn(layer, hidden, batch.ids[number], linear)
            fork(NEXT, number + 1)
            wait()
        if prefetcher is not None:
            prefetcher.join()  # once, as in a server
        return residual + x, asked

    def _attention(
        self, layer: Layer, hidden: Tensor, cache: Tensor, before_core: Callable[[], None], linear: Linear = F.linear
    ) -> Tensor:
        attention, dense, tokens = self.shape.attention, layer.dense, len(hidden)
        if isinstance(attention, Mla):
            rank, nope = attention.kv_lora_rank, attention.qk_nope_head_dim
            latent = linear(hidden, dense["fused_qkv_a_proj"])[:, : attention.q_lora_rank]
            q = linear(latent, dense["q_b_proj"]).view(tokens, attention.num_heads, -1)
            absorbed = torch.einsum("thd,hdc->thc", q[..., :nope], dense["w_kc"])
            before_core()
            scale = (nope + attention.qk_rope_head_dim) ** -0.5
            scores = torch.bmm(torch.cat([absorbed, q[..., nope:]], -1) * scale, cache.transpose(1, 2))
            mixed = torch.bmm(scores.softmax(-1), cache[..., :rank])
            heads = torch.einsum("thc,hcd->thd", mixed, dense["w_vc"])
        else:
            kv_heads, head_dim = attention.num_kv_heads, attention.head_dim
            q = linear(hidden, dense["qkv_proj"])[:, : attention.num_heads * head_dim]
            before_core()
            keys, values = cache[:tokens], cache[tokens:]
            q = q.reshape(tokens, kv_heads, -1, head_dim) / math.sqrt(head_dim)
            heads = torch.matmul(torch.matmul(q, keys.transpose(2, 3)).softmax(-1), values)
        return linear(heads.reshape(tokens, -1), dense["o_proj"])


def _ffn(layer: Layer, hidden: Tensor, ids: Tensor, linear: Linear) -> Tensor:
    """Router, shared expert, routed experts. Which experts is given; the router's values are their weights."""
    dense = layer.dense
    weights = linear(hidden, dense["router"]).sigmoid().gather(1, ids).float()
    y = fused_moe(hidden, layer.experts, weights, ids, activation=ACTIVATION, numerics="w4a16", backend="auto")
    if "shared_gate_up" not in dense:
        return y
    gate, up = linear(hidden, dense["shared_gate_up"]).chunk(2, dim=-1)
    return y + linear(F.silu(gate) * up, dense["shared_down"])
