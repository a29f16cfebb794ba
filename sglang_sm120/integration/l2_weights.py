"""The dense weights of a loaded model, layer by layer in the order of use, as `plan/l2.py` takes them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor, nn

from sglang_sm120.plan.l2 import Layer

_ATTENTION = ("self_attn", "linear_attn", "attention", "attn")
_FFN = ("mlp", "block_sparse_moe", "feed_forward")
_OUTPUT_PROJECTIONS = ("o_proj", "out_proj", "dense")
_ABSORBED = ("w_kc", "w_vc")  # MLA: what decode reads in place of kv_b_proj
_MOST_OF_A_TABLE = "rotary_emb"  # a row a token is read of it
_SCALE, _SCALE_THAT_IS_READ = "weight_scale", "weight_scale_interleaved"  # ModelOpt NVFP4 layers keep both
_SMALL_GEMM = ("fused_qkv_a_proj_with_mqa", "q_b_proj")
"""MLA projections whose weight SGLang passes to a GEMM for few tokens, without calling the module."""


@dataclass(frozen=True)
class LiveWeight:
    """A weight by its place: what is read ahead, or kept, is what the owner has under that name at that moment.

    owner, attribute: where it is. module: whose call reads it, if it is the largest that this call reads; else None.
    num_bytes: when the model was read.
    """

    name: str
    owner: nn.Module
    attribute: str
    num_bytes: int
    module: nn.Module | None = None

    @property
    def tensor(self) -> Tensor:
        return cast(Tensor, getattr(self.owner, self.attribute))

    def range(self, num_bytes: int) -> tuple[int, int]:
        """(address, bytes) of the first `num_bytes`, or of as many as there are by now."""
        tensor = self.tensor
        return tensor.data_ptr(), min(num_bytes, tensor.nbytes)


@dataclass(frozen=True)
class LiveLayer:
    """A layer's weights, and the modules at whose calls its phases begin.

    core: attention's kernel, before whose call "attention" begins; output: the projection behind which "ffn" begins;
    ffn: the module behind which "next" begins.
    """

    weights: Layer[LiveWeight]
    core: tuple[nn.Module, ...]
    output: nn.Module
    ffn: nn.Module


@dataclass(frozen=True)
class LiveModel:
    """backbone: the module that calls the layers, once a forward pass."""

    backbone: nn.Module
    layers: tuple[LiveLayer, ...]


def read_model(model: nn.Module) -> LiveModel | None:
    """The decoder layers of a model; None where their parts do not have the names that SGLang's models give them."""
    best: LiveModel | None = None
    for name, module in model.named_modules():
        listed = getattr(module, "layers", None)
        if not isinstance(listed, nn.ModuleList):
            continue
        prefix = f"{name}." if name else ""
        layers = [_layer(f"{prefix}layers.{number}", layer) for number, layer in enumerate(listed)]
        known = tuple(layer for layer in layers if layer is not None)
        if known and (best is None or len(known) > len(best.layers)):
            best = LiveModel(module, known)
    return best


def _layer(name: str, layer: nn.Module) -> LiveLayer | None:
    attention_name, attention = _child(layer, _ATTENTION)
    ffn_name, ffn = _child(layer, _FFN)
    if attention is None or ffn is None:
        return None
    output_name, output = _child(attention, _OUTPUT_PROJECTIONS)
    core = tuple(module for module in attention.modules() if _is_core(module))
    if output is None:
        return None
    prefix = f"{name}.{attention_name}"
    behind = list(_weights(f"{prefix}.{output_name}", output))
    absorbed = list(_absorbed(prefix, attention))
    before = [
        weight
        for weight in _weights(prefix, attention)
        if not weight.name.startswith(f"{prefix}.{output_name}.")
        and not (absorbed and weight.name.startswith(f"{prefix}.kv_b_proj."))
    ]
    norms = {child: list(_weights(f"{name}.{child}", module)) for child, module in _norms(layer)}
    second = "post_attention_layernorm"
    return LiveLayer(
        Layer(
            (
                *(weight for child, found in norms.items() if child != second for weight in found),
                *before,
                *(weight for weight in absorbed if weight.name.endswith("w_kc")),
            ),
            (*(weight for weight in absorbed if weight.name.endswith("w_vc")), *behind),
            (*norms.get(second, ()), *_weights(f"{name}.{ffn_name}", ffn)),
        ),
        core,
        output,
        ffn,
    )


def _child(module: nn.Module, names: tuple[str, ...]) -> tuple[str, nn.Module | None]:
    for name in names:
        child = getattr(module, name, None)
        if isinstance(child, nn.Module):
            return name, child
    return "", None


def _is_core(module: nn.Module) -> bool:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.layers.radix_linear_attention import RadixLinearAttention

    return isinstance(module, RadixAttention | RadixLinearAttention)


def _bypasses_its_call(name: str, module: nn.Module) -> bool:
    """Whether SGLang may read this projection's weight without calling it, so that no window can be set around that."""
    if name.rpartition(".")[2] not in _SMALL_GEMM or not isinstance(getattr(module, "weight", None), Tensor):
        return False
    from sglang.kernels.ops.gemm.fused_a_gemm import fused_a_gemm_weight_eligible

    return bool(fused_a_gemm_weight_eligible(module))


def _is_routed(module: nn.Module) -> bool:
    from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE

    return isinstance(module, FusedMoE)


def _norms(layer: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, child in layer.named_children():
        if name.endswith(("layernorm", "norm")):
            yield name, child


def _weights(name: str, module: nn.Module) -> Iterator[LiveWeight]:
    """Of a module and what is in it, without routed experts, attention's core (KV scales) and tables; each once."""
    if _is_routed(module) or _is_core(module) or name.endswith(_MOST_OF_A_TABLE):
        return
    parameters = {own: it.nbytes for own, it in module.named_parameters(recurse=False) if it.numel()}
    if _SCALE_THAT_IS_READ in parameters:
        parameters.pop(_SCALE, None)
    largest = max(parameters, key=parameters.__getitem__, default=None)
    reader = None if _bypasses_its_call(name, module) else module
    for own, num_bytes in parameters.items():
        yield LiveWeight(f"{name}.{own}", module, own, num_bytes, reader if own == largest else None)
    for own, child in module.named_children():
        yield from _weights(f"{name}.{own}", child)


def _absorbed(name: str, attention: Any) -> Iterator[LiveWeight]:
    for own in _ABSORBED:
        tensor = getattr(attention, own, None)
        if isinstance(tensor, Tensor) and tensor.numel():
            yield LiveWeight(f"{name}.{own}", attention, own, tensor.nbytes)
