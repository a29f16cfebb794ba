"""Bytes of the KV cache, as SGLang 0.5.23 lays it out (its model_executor/pool_configurator.py; tests compare)."""

from __future__ import annotations

from sglang_sm120.plan.shapes_types import ModelShape

DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "fp8_e4m3": 1}
INDEX_BLOCK = 128
"""Elements of an index key, or of a latent in FP8, that share one fp32 scale."""

SWA_FULL_TOKENS_RATIO = 0.8
"""SGLang's --swa-full-tokens-ratio: tokens of a sliding layer for one token of a full layer."""

STATE_SLOTS_A_REQUEST = 5
"""Slots of linear-attention state that SGLang keeps for a request: three with its prefix cache on, and two to track a
running request with overlapped scheduling."""

STATE_FULL_MEMORY_RATIO = 0.9
"""SGLang's --mamba-full-memory-ratio: linear-attention state over KV cache, when neither is given a size."""

_SCALED_LATENT = frozenset({"GlmMoeDsaForCausalLM"})
"""Whose sparse attention SGLang serves on compute capability 12.x with FlashInfer's kernels, which read latents with
scales in FP8; DeepSeek-V3.2 gets the raw layout."""

PAGE_SIZES = {"dsa": 64}
"""Tokens of a page where it is not 1. SGLang sets it for sparse attention."""


def page_size(shape: ModelShape) -> int:
    """Tokens of a page of the KV cache; the number of tokens is a multiple of it."""
    return PAGE_SIZES.get(shape.attention.kind, 1)


def layer_counts(shape: ModelShape, first: int, end: int) -> tuple[int, int]:
    """Layers of a pipeline stage with a full KV cache, and with a sliding window."""
    attention = shape.attention
    count = end - first
    if attention.linear is not None:
        group = shape.num_layers // max(shape.num_layers - attention.linear.layers, 1)
        return sum(1 for layer in range(first, end) if (layer + 1) % group == 0), 0
    if attention.sliding_layers:
        sliding = sum(1 for layer in range(first, end) if layer % 2 == 0)  # gpt-oss: every other layer, from the first
        return count - sliding, sliding
    return count, 0


def cell_bytes(shape: ModelShape, attention_tp: int, kv_dtype: str, first: int, end: int, *, mtp: bool = False) -> int:
    """Bytes that one token takes on one GPU of a pipeline stage.

    Args:
        shape: the model.
        attention_tp: GPUs that attention is sharded over.
        kv_dtype: "bfloat16" or "fp8_e4m3".
        first: first layer of the stage.
        end: behind its last.
        mtp: with the MTP head's own cache, which SGLang sizes together with the model's.
    """
    attention = shape.attention
    size = DTYPE_BYTES[kv_dtype]
    full, sliding = layer_counts(shape, first, end)
    drafts = shape.mtp_layers if mtp else 0
    if attention.latent:
        width = attention.kv_lora_rank + attention.qk_rope_head_dim
        if (
            shape.architecture in _SCALED_LATENT and kv_dtype == "fp8_e4m3"
        ):  # rope stays bfloat16, the latent has scales
            latent = attention.kv_lora_rank
            width = latent + latent // INDEX_BLOCK * 4 + 2 * attention.qk_rope_head_dim
        indexed = sum(1 for layer in attention.index_layers if first <= layer < end)
        index = attention.index_head_dim + attention.index_head_dim // INDEX_BLOCK * 4
        return width * size * (full + drafts) + index * (indexed + (drafts if attention.index_heads else 0))
    a_layer = max(1, attention.kv_heads // attention_tp) * (attention.head_dim + attention.v_head_dim) * size
    if sliding:
        return int(a_layer * (full + drafts) + SWA_FULL_TOKENS_RATIO * a_layer * sliding)
    return a_layer * (full + drafts)


def state_bytes(shape: ModelShape, attention_tp: int, first: int, end: int) -> int:
    """Linear-attention state of a slot on one GPU of a stage: the convolution's last inputs, an fp32 matrix a head."""
    linear = shape.attention.linear
    if linear is None:
        return 0
    channels = 2 * linear.key_heads * linear.key_head_dim + linear.value_heads * linear.value_head_dim
    convolution = 2 * (channels // attention_tp) * (linear.conv_kernel - 1)
    matrices = 4 * (linear.value_heads // attention_tp) * linear.value_head_dim * linear.key_head_dim
    full, _ = layer_counts(shape, first, end)
    return (convolution + matrices) * (end - first - full)
