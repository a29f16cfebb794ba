"""What a MoE runner is: one implementation of a routed NVFP4 MoE layer over the one copy of the weights.

A runner states what it covers before it is called, so that a choice can be made, and checked, before graphs are
captured. None of this package's code needs SGLang; `flashinfer_cutlass` in a server is SGLang's own path.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from sglang_sm120.kernels.moe.layer import MoeActivation, Nvfp4MoeWeights

Bound = Callable[[Tensor, Nvfp4MoeWeights, Tensor, Tensor], Tensor]
"""(hidden_states [T, H], weights, topk_weights [T, k], topk_ids [T, k]) -> [T, H]. The weights are handed over at each
call, since a server may rebind them."""


STOCK = "flashinfer_cutlass"
"""The runner that SGLang has without this package on an SM120 GPU; in a server it is SGLang's own path."""


class Choice(NamedTuple):
    """A runner by name, and what it does with activations: "w4a16" or "w4a4"."""

    runner: str
    numerics: str

    def __str__(self) -> str:
        return f"{self.runner} {self.numerics}"


@dataclass(frozen=True)
class LayerSpec:
    """What a runner has to know of a layer beside its weights, as `fused_moe` takes it.

    expert_offset, num_global_experts: given when topk_ids are global ids under expert parallelism.
    """

    activation: MoeActivation
    hidden_dtype: torch.dtype
    top_k: int
    apply_router_weight_on_input: bool = False
    expert_offset: int = 0
    num_global_experts: int | None = None


class MoeRunner(ABC):
    """One way to run a layer. Stateless; what is prepared for one layer is in what `bind` returns."""

    name: ClassVar[str]
    numerics: ClassVar[tuple[str, ...]]
    """What it offers, the preferred one first."""
    graph_rule: ClassVar[str]
    """One sentence: what has to happen before a CUDA graph with it is captured, and what may change between replays."""

    @abstractmethod
    def unavailable_reason(self, device: torch.device) -> str | None:
        """One sentence on why this machine cannot use it at all (a package, the GPU), or None. Looks at no layer."""

    @abstractmethod
    def unsupported_reason(
        self, weights: Nvfp4MoeWeights, spec: LayerSpec, numerics: str, num_tokens: int
    ) -> str | None:
        """One sentence on why it does not cover this layer at this batch size, or None. Reads no value of a tensor."""

    @abstractmethod
    def workspace_bytes(self, weights: Nvfp4MoeWeights, spec: LayerSpec, numerics: str, num_tokens: int) -> int:
        """Upper bound on what one call holds at once beside its arguments and its result, in bytes."""

    @abstractmethod
    def bind(self, weights: Nvfp4MoeWeights, spec: LayerSpec, numerics: str) -> Bound:
        """The layer as a function. May allocate and compile; must not copy the weights.

        Raises: UnsupportedError, where unavailable_reason or unsupported_reason has something to say.
        """
