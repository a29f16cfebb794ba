"""The dense weights of a model from its config, layer by layer, for `plan MODEL --l2`: as `weights.py` counts them."""

from __future__ import annotations

from collections.abc import Iterable

from sglang_sm120.plan import weights
from sglang_sm120.plan.l2 import Layer, Weight
from sglang_sm120.plan.shapes_types import ModelShape

_ROUTED = (weights.EXPERTS, weights.SCALES)
_FFN = (weights.ROUTER, weights.SHARED, weights.DENSE)


def layers_of(shape: ModelShape, tp: int) -> list[Layer[Weight]]:
    """What each layer of one GPU of a tensor-parallel group reads at decode, without routed experts."""
    widths = weights.Widths(tp, tp, 1)
    return [_layer(shape, widths, number) for number in range(shape.num_layers)]


def _layer(shape: ModelShape, widths: weights.Widths, number: int) -> Layer[Weight]:
    name = f"layers.{number}"
    found = weights.layer_weights(shape, widths, number)
    behind = weights.output_projection_bytes(shape, widths, number)
    absorbed, attention = found.pop(weights.ABSORBED, 0), shape.attention
    heads = attention.qk_nope_head_dim + attention.v_head_dim
    value = absorbed * attention.v_head_dim // heads if absorbed else 0
    norm = found.pop(weights.NORMS) // 2
    ffn = [(kind, found.pop(kind)) for kind in _FFN if kind in found]
    before = sum(size for kind, size in found.items() if kind not in _ROUTED) - behind
    before += absorbed - value - (weights.kv_b_bytes(shape, widths) if absorbed else 0)
    return Layer(
        _present((Weight(f"{name} norm", norm), Weight(f"{name} attention's projections", before))),
        _present((Weight(f"{name} absorbed values", value), Weight(f"{name} output projection", behind))),
        _present((Weight(f"{name} norm", norm), *(Weight(f"{name} {kind}", size) for kind, size in ffn))),
    )


def _present(found: Iterable[Weight]) -> tuple[Weight, ...]:
    return tuple(weight for weight in found if weight.num_bytes > 0)
