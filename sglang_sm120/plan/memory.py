"""What one GPU holds of a model, a split and a way of serving, by component, and what SGLang makes of the rest.

Everything is of the fullest GPU. Weights and KV cache are counted as SGLang 0.5.23 shards and lays them out; the rest
by the formulas of `workspaces`, where what is a guess says so.
"""

from __future__ import annotations

import math

from sglang_sm120.plan import kv, weights, workspaces
from sglang_sm120.plan.holdings import (
    Component,
    Serving,
    Split,
    before_weights,
    runtime_parts,
    stages,
    state_bytes,
    weight_parts,
    working_parts,
)
from sglang_sm120.plan.shapes_types import ModelShape

__all__ = [
    "Component",
    "Serving",
    "Split",
    "default_mem_fraction",
    "fixed",
    "kv_bytes_per_token",
    "kv_tokens",
    "load_peak_bytes",
    "problems",
    "stages",
    "suggested_mem_fraction",
]

MIB = 1024**2

FP8_BLOCK = 128
"""Rows and columns that share a scale in FP8 with block scales."""

SMALLEST_FRACTION = 0.05
"""Where nothing is left for the pool the suggestion is this; kv_tokens then says 0."""


def problems(shape: ModelShape, split: Split) -> list[str]:
    """Why a split cannot be served, whatever the memory; empty if it can.

    Args:
        shape: the model.
        split: how it is spread.
    """
    if min(split.tp, split.ep, split.dp_attention, split.pp, split.nodes) < 1:
        return ["a split has at least one GPU of each kind"]
    found = []
    if split.tp % split.ep:
        found.append(f"EP {split.ep} does not divide TP {split.tp}")
    if split.tp % split.dp_attention:
        found.append(f"attention DP {split.dp_attention} does not divide TP {split.tp}")
    if split.nodes > 1 and split.gpus % split.nodes:
        found.append(f"{split.gpus} GPUs do not spread evenly over {split.nodes} nodes")
    if split.pp > shape.num_layers:
        found.append(f"{shape.num_layers} layers do not fill {split.pp} stages")
    if found:
        return found
    return [*_attention_problems(shape, split), *_mlp_problems(shape, split)]


def fixed(shape: ModelShape, split: Split, serving: Serving) -> list[Component]:
    """Everything of the fullest GPU except the KV cache.

    Args:
        shape: the model.
        split: how it is spread; without problems.
        serving: how it is served.
    """
    found = [
        *weight_parts(shape, split, serving.mtp),
        *runtime_parts(shape, split, serving),
        *working_parts(shape, split, serving),
    ]
    held = sum(part.bytes for part in found if part.kind == "weights")
    margin = int(held * workspaces.MARGIN_SHARE) + workspaces.MARGIN_BYTES
    found.append(
        Component(
            "margin", margin, "allocator rounding and fragmentation: 1 % of the weights and 512 MiB; guess", "margin"
        )
    )
    return [part for part in found if part.bytes]


def kv_bytes_per_token(shape: ModelShape, split: Split, kv_dtype: str, *, mtp: bool = False) -> int:
    """KV cache of one token on the GPU that has most of it.

    Args:
        shape: the model.
        split: how it is spread.
        kv_dtype: "bfloat16" or "fp8_e4m3".
        mtp: with the MTP head's.
    """
    width = split.widths.attention
    return max(kv.cell_bytes(shape, width, kv_dtype, *stage, mtp=mtp) for stage in stages(shape.num_layers, split.pp))


def kv_tokens(
    shape: ModelShape, split: Split, serving: Serving, gpu_bytes: int, mem_fraction: float | None = None
) -> int:
    """Tokens of KV cache that SGLang allocates on each GPU of an attention group.

    SGLang takes what was free before it loaded weights, times the fraction, less what it loaded. The most weights and
    the most KV cache are put on one GPU, which under pipeline parallelism is a little too careful.

    Args:
        shape: the model.
        split: how it is spread.
        serving: how it is served.
        gpu_bytes: what CUDA has in all.
        mem_fraction: --mem-fraction-static, with the rest left to SGLang; None: `suggested_mem_fraction`, and the
            linear-attention state sized for the requests, as the command says both.

    Returns:
        Whole pages; 0 where the weights do not fit, or would not while they load, or where the rest has no room.
    """
    own_settings = mem_fraction is None
    if mem_fraction is None:
        mem_fraction = _room_fraction(shape, split, serving, gpu_bytes)
        if mem_fraction < SMALLEST_FRACTION:
            return 0
    before = gpu_bytes - before_weights(shape, split, serving)
    held = sum(part.bytes for part in weight_parts(shape, split, serving.mtp))
    if held + load_peak_bytes(shape, split) > before:
        return 0
    rest = int(before * mem_fraction) - held
    cell = kv_bytes_per_token(shape, split, serving.kv_dtype, mtp=serving.mtp)
    states = state_bytes(shape, split, serving)
    if states and own_settings:
        rest -= states
    elif states:  # by itself SGLang divides what is left in a fixed proportion; more requests than fit wait
        rest = min(rest - states, int(rest / (1 + kv.STATE_FULL_MEMORY_RATIO)))
    page = kv.page_size(shape)
    return max(rest, 0) // max(cell, 1) // page * page


def suggested_mem_fraction(shape: ModelShape, split: Split, serving: Serving, gpu_bytes: int) -> float:
    """The --mem-fraction-static that leaves exactly what is not in SGLang's pool, rounded down to three digits.

    Args:
        shape: the model.
        split: how it is spread.
        serving: how it is served.
        gpu_bytes: what CUDA has in all.
    """
    return max(_room_fraction(shape, split, serving, gpu_bytes), SMALLEST_FRACTION)


def _room_fraction(shape: ModelShape, split: Split, serving: Serving, gpu_bytes: int) -> float:
    """The share of what is free before the weights that all else leaves; below zero where all else has no room."""
    before = gpu_bytes - before_weights(shape, split, serving)
    if before <= 0:
        return 0.0
    parts = fixed(shape, split, serving)
    states = state_bytes(shape, split, serving)
    outside = sum(part.bytes for part in parts if part.kind != "weights") - states
    outside -= before_weights(shape, split, serving)
    return math.floor((before - outside) / before * 1000) / 1000


def default_mem_fraction(shape: ModelShape, split: Split, serving: Serving, shown_bytes: int) -> float:
    """What SGLang 0.5.23 sets --mem-fraction-static to by itself (its arg_groups/memory_hook.py; a test compares).

    Args:
        shape: the model.
        split: how it is spread.
        serving: chunk and graphs of one attention group; SGLang's flags count those of all.
        shown_bytes: what nvidia-smi shows in all.
    """
    shown, chunk = shown_bytes / MIB, serving.chunked_prefill * split.dp_attention
    rows = max(serving.graph_batch_sizes, default=0)
    reserved = 512 + 1.5 * max(chunk, 2048) + split.gpus / 8 * 1024
    reserved += workspaces.graph_bytes(
        shape, rows=rows, groups=split.dp_attention, chunk=chunk, pipelined=split.pp > 1
    ) / MIB  # fmt: skip
    if shown > 60 * 1024:
        reserved = max(reserved, 10 * 1024)
    return round((shown - reserved) / shown, 3)


def load_peak_bytes(shape: ModelShape, split: Split) -> int:
    """What loading takes for a while beside the weights: the scales of NVFP4 experts, twice until swizzled."""
    if shape.quantization.experts != "nvfp4":
        return 0
    return max(
        weights.stage_weights(shape, split.widths, *stage)[weights.SCALES]
        for stage in stages(shape.num_layers, split.pp)
    )


def _attention_problems(shape: ModelShape, split: Split) -> list[str]:
    attention, width = shape.attention, split.widths.attention
    found = []
    if attention.heads % width:
        found.append(f"{attention.heads} attention heads do not divide by {width}")
    kv_heads = attention.kv_heads
    if not attention.latent and kv_heads % width and width % kv_heads:
        found.append(f"{kv_heads} KV heads neither divide by {width} nor are copied evenly")
    if not found and shape.quantization.attention == "fp8_block":
        found += _block_problems(shape, width)
    linear = attention.linear
    if linear is not None and (linear.key_heads % width or linear.value_heads % width):
        found.append(f"{linear.key_heads} and {linear.value_heads} heads of linear attention do not divide by {width}")
    return found


def _block_problems(shape: ModelShape, width: int) -> list[str]:
    """Parts of projections that are no whole blocks of scales; SGLang refuses them (its layers/quantization/fp8.py)."""
    attention = shape.attention
    heads = attention.heads // width
    if attention.latent:
        if width == 1:
            return []  # nothing is cut
        parts = {"q_b_proj": attention.head_dim, "kv_b_proj": attention.qk_nope_head_dim + attention.v_head_dim}
        sizes = {name: heads * size for name, size in parts.items()}
    else:
        kv_heads = max(1, attention.kv_heads // width)
        sizes = {"q_proj": heads * attention.head_dim, "k_proj and v_proj": kv_heads * attention.head_dim}
    sizes["o_proj"] = heads * attention.v_head_dim
    return [
        f"{name} has {size} of its size on a GPU, not a multiple of {FP8_BLOCK} (fp8_block)"
        for name, size in sizes.items()
        if size % FP8_BLOCK
    ]


def _mlp_problems(shape: ModelShape, split: Split) -> list[str]:
    found = []
    moe, quantization = shape.moe, shape.quantization
    sizes = [("a dense layer", shape.dense_intermediate_size, split.tp, quantization.dense_mlp)]
    if moe is None:
        if split.ep > 1:
            found.append("there are no experts to spread by EP")
    else:
        if moe.num_experts % split.ep:
            found.append(f"{moe.num_experts} experts do not divide by EP {split.ep}")
        if split.tp > moe.num_experts and shape.architecture != "GptOssForCausalLM":
            found.append(f"SGLang refuses TP {split.tp} for {moe.num_experts} experts: no more ranks than experts")
        sizes.append(("the shared expert", moe.shared_intermediate_size, split.tp, quantization.shared_expert))
        sizes.append(("an expert", moe.moe_intermediate_size, split.widths.expert, quantization.experts))
    for what, size, width, kind in sizes:
        step = {"nvfp4": 16, "mxfp4": 1, "fp8_block": FP8_BLOCK}.get(kind, 1)
        if size % width:
            found.append(f"the intermediate size of {what}, {size}, does not divide by {width}")
        elif size and size // width % step:
            found.append(
                f"{what} has {size // width} of its intermediate size on a GPU, not a multiple of {step} ({kind})"
            )
    return found
