"""The dense weights of a model from its config, layer by layer, for `plan MODEL --l2`: as `weights.py` counts them.

Names are those of SGLang's modules. What is not a projection (norms, biases, the indexer's parts) is one entry a class.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from sglang_sm120.plan import weights
from sglang_sm120.plan.l2 import Layer, Weight
from sglang_sm120.plan.shapes_types import ModelShape

NOT_A_PROJECTION = "*"
"""Ends the name of what is several tensors, none of which a window could keep."""

_NEVER_PINNED = (NOT_A_PROJECTION, "layernorm", ".w_kc", ".w_vc")
_READ_BY_SMALL_GEMM = (".fused_qkv_a_proj_with_mqa", ".q_b_proj")


def layers_of(shape: ModelShape, tp: int) -> list[Layer[Weight]]:
    """What each layer of one GPU of a tensor-parallel group reads at decode, without routed experts."""
    widths = weights.Widths(tp, tp, 1)
    return [_layer(shape, widths, number) for number in range(shape.num_layers)]


def _layer(shape: ModelShape, widths: weights.Widths, number: int) -> Layer[Weight]:
    name = f"layers.{number}"
    found = weights.layer_weights(shape, widths, number)
    behind = weights.output_projection_bytes(shape, widths, number)
    absorbed, attention = found.pop(weights.ABSORBED, 0), shape.attention
    linear = weights.LINEAR in found
    own = f"{name}.linear_attn" if linear else f"{name}.self_attn"
    heads = attention.qk_nope_head_dim + attention.v_head_dim
    value = absorbed * attention.v_head_dim // heads if absorbed else 0
    indexer = found.pop(weights.INDEXER, 0)
    inputs = found.pop(weights.LINEAR if linear else weights.ATTENTION) - behind
    inputs -= weights.kv_b_bytes(shape, widths) if absorbed else 0
    norm = found.pop(weights.NORMS) // 2
    return Layer(
        _present(
            (
                Weight(f"{name}.input_layernorm", norm),
                *_with_rest(f"{own}.{NOT_A_PROJECTION}", inputs, _inputs(shape, widths, own, linear)),
                Weight(f"{own}.indexer.{NOT_A_PROJECTION}", indexer),
                Weight(f"{own}.w_kc", absorbed - value),
            )
        ),
        _present((Weight(f"{own}.w_vc", value), Weight(f"{own}.{'out_proj' if linear else 'o_proj'}", behind))),
        _present((Weight(f"{name}.post_attention_layernorm", norm), *_ffn(shape, widths, f"{name}.mlp", found))),
    )


def can_pin(shape: ModelShape, weight: Weight) -> bool:
    """Whether a window can keep it: a projection that SGLang calls as a module (integration/l2_weights.py)."""
    small_gemm = shape.attention.latent and shape.quantization.attention == "bf16"
    skipped = (*_NEVER_PINNED, *(_READ_BY_SMALL_GEMM if small_gemm else ()))
    return not weight.name.endswith(skipped)


def _inputs(shape: ModelShape, widths: weights.Widths, own: str, linear: bool) -> Iterator[Weight]:
    """The projections in front of attention's core."""
    attention, hidden, kind = shape.attention, shape.hidden_size, shape.quantization.attention
    heads = attention.heads // widths.attention
    if linear:
        of = attention.linear
        assert of is not None
        rows = 2 * (of.key_heads * of.key_head_dim + of.value_heads * of.value_head_dim) // widths.attention
        yield Weight(f"{own}.in_proj_qkvz", weights.linear_bytes(rows, hidden, kind))
    elif attention.latent:
        latent = attention.kv_lora_rank + attention.qk_rope_head_dim
        up = heads * attention.head_dim
        if attention.q_lora_rank:
            down = attention.q_lora_rank + latent
            yield Weight(f"{own}.fused_qkv_a_proj_with_mqa", weights.linear_bytes(down, hidden, kind))
            yield Weight(f"{own}.q_b_proj", weights.linear_bytes(up, attention.q_lora_rank, kind))
        else:
            yield Weight(f"{own}.q_proj", weights.linear_bytes(up, hidden, kind))
            yield Weight(f"{own}.kv_a_proj_with_mqa", weights.linear_bytes(latent, hidden, kind))
    else:
        kv_heads = max(1, attention.kv_heads // widths.attention)
        rows = heads * attention.head_dim * (2 if attention.gated else 1)
        rows += kv_heads * (attention.head_dim + attention.v_head_dim)
        yield Weight(f"{own}.qkv_proj", weights.linear_bytes(rows, hidden, kind))


def _ffn(shape: ModelShape, widths: weights.Widths, own: str, found: dict[str, int]) -> Iterator[Weight]:
    hidden, moe = shape.hidden_size, shape.moe
    if weights.ROUTER in found:
        yield Weight(f"{own}.gate", found[weights.ROUTER])
    if weights.SHARED in found and moe is not None:
        inner, kind = moe.shared_intermediate_size // widths.tp, shape.quantization.shared_expert
        yield from _gated(f"{own}.shared_experts", inner, hidden, kind, found[weights.SHARED])
    if weights.DENSE in found:
        inner = shape.dense_intermediate_size // widths.tp
        yield from _gated(own, inner, hidden, shape.quantization.dense_mlp, found[weights.DENSE])


def _gated(own: str, inner: int, hidden: int, kind: str, num_bytes: int) -> Iterator[Weight]:
    both = weights.linear_bytes(2 * inner, hidden, kind)
    yield Weight(f"{own}.gate_up_proj", both)
    yield Weight(f"{own}.down_proj", num_bytes - both)


def _with_rest(name: str, num_bytes: int, projections: Iterable[Weight]) -> tuple[Weight, ...]:
    """The projections, and what is left of their class."""
    named = tuple(projections)
    return (*named, Weight(name, num_bytes - sum(weight.num_bytes for weight in named)))


def _present(found: Iterable[Weight]) -> tuple[Weight, ...]:
    return tuple(weight for weight in found if weight.num_bytes > 0)
