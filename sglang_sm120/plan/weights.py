"""Bytes of weights on one GPU, by class of tensors, as SGLang 0.5.23 shards and keeps them.

Sharded over all of TP: output head, dense MLPs, shared experts. Over attention TP, which is TP / attention DP:
attention, the embedding. Whole on every GPU: MLA's down projections, the indexer, routers, norms. Routed experts: E
/ EP of them, each with I * EP / TP of its intermediate size. A test builds SGLang's own models and compares tensors.
"""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import dataclass

from sglang_sm120.plan.shapes_types import Attention, ModelShape, Moe

BF16_BYTES = 2
FP32_BYTES = 4
_DTYPE_BYTES = {"": 0, "bfloat16": BF16_BYTES, "float32": FP32_BYTES}
VOCAB_PADDING = 64
"""SGLang pads the vocabulary to a multiple of this, and so that TP divides it."""

EMBEDDING, LM_HEAD = "embedding", "lm_head"
ATTENTION, ABSORBED, INDEXER, LINEAR = "attention", "attention, absorbed kv_b", "indexer", "linear attention"
NORMS, ROUTER, SHARED, DENSE = "norms", "router", "shared expert", "dense MLP"
EXPERTS, SCALES = "routed experts", "routed experts, scales"

KIND_TITLES = {
    "bf16": "BF16", "nvfp4": "NVFP4", "mxfp4": "MXFP4", "fp8": "FP8", "fp8_block": "FP8 with 128 x 128 scales",
}  # fmt: skip


@dataclass(frozen=True)
class Widths:
    """Over how many GPUs what is sharded. tp: all. attention: tp over attention DP. ep, expert: E and I of experts."""

    tp: int
    attention: int
    ep: int

    @property
    def expert(self) -> int:
        """Parts that one expert's intermediate size is cut into."""
        return self.tp // self.ep


def linear_bytes(rows: int, columns: int, kind: str) -> int:
    """A weight [rows, columns] of one GPU with its scales.

    Args:
        rows: outputs.
        columns: inputs; a multiple of 16 for NVFP4.
        kind: see shapes.Quantization.
    """
    elements = rows * columns
    if kind == "bf16":
        return BF16_BYTES * elements
    if kind == "nvfp4":  # with global scale, activation scale and their product
        return elements // 2 + nvfp4_scale_bytes(rows, columns) + 3 * FP32_BYTES
    if kind == "mxfp4":
        return elements // 2 + elements // 32
    if kind == "fp8":
        return elements + 2 * FP32_BYTES
    if kind == "fp8_block":
        return elements + FP32_BYTES * -(-rows // 128) * -(-columns // 128)
    raise ValueError(f"unknown kind {kind!r}")


def nvfp4_scale_bytes(rows: int, columns: int) -> int:
    """Scales of an NVFP4 weight as the kernels read them: 128 x 4 tiles, so rows and groups of 16 are padded."""
    return _round_up(rows, 128) * _round_up(columns // 16, 4)


def padded_vocab(shape: ModelShape, tp: int) -> int:
    """Rows of the embedding over all GPUs."""
    return _round_up(_round_up(shape.vocab_size, VOCAB_PADDING), tp)


def embedding_width(shape: ModelShape, widths: Widths) -> int:
    """Over how many GPUs the embedding is sharded: each attention group has its own, and Qwen3.5 then one a GPU."""
    if widths.attention < widths.tp and shape.architecture.startswith("Qwen3_5"):
        return 1
    return widths.attention


def stage_weights(shape: ModelShape, widths: Widths, first: int, end: int) -> Counter[str]:
    """Bytes of one GPU of the pipeline stage that has layers first <= layer < end.

    Returns:
        By class of tensors, for those that there are.
    """
    return Counter(_stage_weights(shape, widths, first, end))


@functools.lru_cache(maxsize=4096)  # a plan asks for the same stage at every number of requests, chunk and context
def _stage_weights(shape: ModelShape, widths: Widths, first: int, end: int) -> Counter[str]:
    found: Counter[str] = Counter()
    rows = padded_vocab(shape, widths.tp) // widths.tp
    last = end == shape.num_layers
    if first == 0:
        width = embedding_width(shape, widths)
        found[EMBEDDING] += BF16_BYTES * padded_vocab(shape, width) // width * shape.hidden_size
    if last and not (shape.tie_word_embeddings and first == 0):
        found[LM_HEAD] += linear_bytes(rows, shape.hidden_size, shape.quantization.lm_head)
    if last:
        found[NORMS] += BF16_BYTES * shape.hidden_size
    for layer in range(first, end):
        found.update(layer_weights(shape, widths, layer))
    return +found


def layer_weights(shape: ModelShape, widths: Widths, layer: int) -> Counter[str]:
    """Bytes of one layer on one GPU, by class of tensors."""
    dense = min(shape.moe.first_dense_layers, shape.num_layers) if shape.moe else shape.num_layers
    found = Counter(_layer_attention(shape, widths, layer, layer in _linear_layers(shape)))
    found.update(_dense_mlp(shape, widths) if layer < dense else _moe_layer(shape, widths, shape.quantization.experts))
    found[NORMS] += 2 * BF16_BYTES * shape.hidden_size
    return found


def output_projection_bytes(shape: ModelShape, widths: Widths, layer: int) -> int:
    """Of a layer's attention, what comes behind its core: in the classes ATTENTION or LINEAR."""
    attention, linear = shape.attention, shape.attention.linear
    if linear is not None and layer in _linear_layers(shape):
        columns = linear.value_heads * linear.value_head_dim // widths.attention
        return linear_bytes(shape.hidden_size, columns, shape.quantization.attention)
    columns = attention.heads // widths.attention * attention.v_head_dim
    bias = BF16_BYTES * shape.hidden_size * attention.out_bias
    return linear_bytes(shape.hidden_size, columns, shape.quantization.attention_out) + bias


def kv_b_bytes(shape: ModelShape, widths: Widths) -> int:
    """MLA's up projection of keys and values, in the class ATTENTION: decode reads its absorbed form instead."""
    attention = shape.attention
    if not attention.latent:
        return 0
    rows = attention.heads // widths.attention * (attention.qk_nope_head_dim + attention.v_head_dim)
    return linear_bytes(rows, attention.kv_lora_rank, shape.quantization.attention)


def mtp_bytes(shape: ModelShape, widths: Widths) -> int:
    """The MTP head: its layers, the projection before them and their norms; embedding and output head are shared."""
    if not shape.mtp_layers:
        return 0
    hidden = shape.hidden_size
    one = Counter(_layer_attention(shape, widths, 0, False, mtp=True))
    one.update(_moe_layer(shape, widths, shape.quantization.mtp) if shape.moe else _dense_mlp(shape, widths))
    one[NORMS] += 5 * BF16_BYTES * hidden
    return shape.mtp_layers * (sum(one.values()) + BF16_BYTES * 2 * hidden * hidden)


def _linear_layers(shape: ModelShape) -> frozenset[int]:
    """Layers with linear attention; full attention comes last in each group of layers (Qwen3.5)."""
    linear = shape.attention.linear
    if linear is None:
        return frozenset()
    group = shape.num_layers // max(shape.num_layers - linear.layers, 1)
    return frozenset(layer for layer in range(shape.num_layers) if (layer + 1) % group)


def _layer_attention(
    shape: ModelShape, widths: Widths, layer: int, is_linear: bool, *, mtp: bool = False
) -> dict[str, int]:
    attention, hidden = shape.attention, shape.hidden_size
    kind = "bf16" if mtp and shape.quantization.mtp == "bf16" else shape.quantization.attention
    out_kind = "bf16" if mtp and shape.quantization.mtp == "bf16" else shape.quantization.attention_out
    if is_linear:
        return {LINEAR: _linear_attention(shape, widths.attention, kind)}
    heads = attention.heads // widths.attention
    if attention.latent:
        found = _latent_attention(attention, hidden, heads, kind, out_kind)
        if attention.index_heads and (mtp or layer in attention.index_layers):
            found[INDEXER] = _indexer(attention, hidden, kind)
        return found
    kv_heads = max(1, attention.kv_heads // widths.attention)
    q_rows = heads * attention.head_dim * (2 if attention.gated else 1)
    rows = q_rows + kv_heads * (attention.head_dim + attention.v_head_dim)
    bytes_ = linear_bytes(rows, hidden, kind) + linear_bytes(hidden, heads * attention.v_head_dim, out_kind)
    bytes_ += BF16_BYTES * (rows * attention.bias + hidden * attention.out_bias + heads * attention.sinks)
    if attention.qk_norm == "head":
        bytes_ += 2 * BF16_BYTES * attention.head_dim
    elif attention.qk_norm == "full":
        bytes_ += BF16_BYTES * (heads + kv_heads) * attention.head_dim
    return {ATTENTION: bytes_}


def _latent_attention(attention: Attention, hidden: int, heads: int, kind: str, out_kind: str) -> dict[str, int]:
    latent, rope = attention.kv_lora_rank, attention.qk_rope_head_dim
    down = attention.q_lora_rank + latent + rope
    up = attention.q_lora_rank or hidden
    kv_rows = heads * (attention.qk_nope_head_dim + attention.v_head_dim)
    # kv_b is read again in two transposed halves by the absorbed form, which SGLang copies and keeps beside it.
    absorbed = (1 if kind.startswith("fp8") else BF16_BYTES) * kv_rows * latent
    bytes_ = linear_bytes(down, hidden, kind) + linear_bytes(heads * attention.head_dim, up, kind)
    bytes_ += linear_bytes(kv_rows, latent, kind) + linear_bytes(hidden, heads * attention.v_head_dim, out_kind)
    bytes_ += BF16_BYTES * (attention.q_lora_rank + latent)
    return {ATTENTION: bytes_, ABSORBED: absorbed}


def _indexer(attention: Attention, hidden: int, kind: str) -> int:
    size = attention.index_head_dim
    queries = linear_bytes(attention.index_heads * size, attention.q_lora_rank or hidden, kind)
    keys = linear_bytes(size, hidden, kind)
    return queries + keys + BF16_BYTES * attention.index_heads * hidden + 2 * FP32_BYTES * size


def _linear_attention(shape: ModelShape, width: int, kind: str) -> int:
    linear = shape.attention.linear
    assert linear is not None
    key, value = linear.key_heads * linear.key_head_dim // width, linear.value_heads * linear.value_head_dim // width
    heads = linear.value_heads // width
    projections = linear_bytes(2 * key + 2 * value, shape.hidden_size, kind) + linear_bytes(
        shape.hidden_size, value, kind
    )
    gates = BF16_BYTES * 2 * heads * shape.hidden_size
    return (
        projections + gates + BF16_BYTES * ((2 * key + value) * linear.conv_kernel + linear.value_head_dim) + 8 * heads
    )


def _dense_mlp(shape: ModelShape, widths: Widths) -> dict[str, int]:
    inner = shape.dense_intermediate_size // widths.tp
    kind = shape.quantization.dense_mlp
    return {DENSE: _gated_mlp(shape.hidden_size, inner, kind)}


def _gated_mlp(hidden: int, inner: int, kind: str) -> int:
    return linear_bytes(2 * inner, hidden, kind) + linear_bytes(hidden, inner, kind)


def _moe_layer(shape: ModelShape, widths: Widths, kind: str) -> dict[str, int]:
    moe, hidden = shape.moe, shape.hidden_size
    assert moe is not None
    router = moe.num_experts * (_DTYPE_BYTES[moe.router_dtype] * hidden + _DTYPE_BYTES[moe.router_bias])
    found = dict(zip((EXPERTS, SCALES), _experts(moe, hidden, widths, kind), strict=True))
    found[ROUTER] = router + (BF16_BYTES * hidden if moe.shared_gate else 0)
    if moe.shared_intermediate_size:
        shared_kind = shape.quantization.shared_expert if kind == shape.quantization.experts else kind
        found[SHARED] = _gated_mlp(hidden, moe.shared_intermediate_size // widths.tp, shared_kind)
    return found


def _experts(moe: Moe, hidden: int, widths: Widths, kind: str) -> tuple[int, int]:
    """Weights, and their scales."""
    here, inner = moe.num_experts // widths.ep, moe.moe_intermediate_size // widths.expert
    if (
        kind == "mxfp4"
    ):  # FlashInfer's MXFP4 kernels want both sizes in steps of 128 (SGLang's layers/quantization/mxfp4.py)
        inner, hidden = _round_up(inner, 128), _round_up(hidden, 128)
    elements = here * 3 * inner * hidden
    biases = BF16_BYTES * here * (2 * inner + hidden) if moe.expert_bias else 0
    if kind == "bf16":
        return BF16_BYTES * elements + biases, 0
    if kind == "nvfp4":
        block = nvfp4_scale_bytes(2 * inner, hidden) + nvfp4_scale_bytes(hidden, inner)
        # An expert's global scales: two and one for its weights, the products with the activations' in two and one; the
        # activations' own, two and one, are kept for all experts on every GPU.
        return elements // 2 + biases, here * (block + 6 * FP32_BYTES) + 3 * FP32_BYTES * moe.num_experts
    if kind == "mxfp4":
        return elements // 2 + biases, elements // 32
    if kind == "fp8":
        return elements + biases, here * 5 * FP32_BYTES
    blocks = -(-2 * inner // 128) * -(-hidden // 128) + -(-hidden // 128) * -(-inner // 128)
    return elements + biases, FP32_BYTES * here * blocks


def _round_up(value: int, step: int) -> int:
    return -(-value // step) * step
