"""Bytes of what is neither weights nor KV cache, on one GPU.

This package's own are their kernels' formulas (tests compare with `workspace_bytes` of each); SGLang's and FlashInfer's
are sizes that their sources fix; what no source fixes is marked as a guess.
"""

from __future__ import annotations

import math

from sglang_sm120.plan.shapes_types import ModelShape

MIB = 1024**2

FLASHINFER_WORKSPACE_BYTES = 384 * MIB
"""SGLang 0.5.23's SGLANG_FLASHINFER_WORKSPACE_SIZE."""

CONTEXT_BYTES = 616 * MIB
"""CUDA context, libraries and their handles. A guess from public figures: of 94.97 GiB on an RTX PRO 6000 a server of
TP8 had 93.89 before it loaded weights (GLM-5 with --mem-fraction-static 0.92: 57.06 + 29.32 GiB), NCCL's included."""

NCCL_PEER_BYTES = 70 * MIB
"""NCCL's buffers for one peer. A guess: the same figures less the context, over seven peers."""

GRAPH_ROW_BYTES, GRAPH_DP_ROW_BYTES = 2 * MIB, 3 * MIB
"""What SGLang reserves for each row of the largest captured decode batch, and again for each attention DP group
(its arg_groups/memory_hook.py)."""

PREFILL_GRAPHS_MLA_BYTES, PREFILL_GRAPH_BYTES = 1536 * MIB, 8 * MIB
"""What SGLang reserves for prefill graphs: in all with MLA, else for each captured size (same place)."""

NATIVE_TOKENS = 64
"""Up to this many tokens this package's kernels serve experts without a profile (runners/table.py)."""

NUM_SMS = 188
"""Of an RTX PRO 6000, the most that compute capability 12.x has."""

TRITON_KV_SPLITS = 8
"""SGLang's --triton-attention-num-kv-splits."""

DRAFT_TOKENS = 4
"""Tokens of a request that the model checks in one step when an MTP head drafts: SGLang's own choice where the command
says none, three drafted and one behind them (its arg_groups/speculative_hook.py; a test compares)."""

DRAFT_INDEX_ROWS = 12
"""Rows of index buffers for one captured request then: four for the check, as much as one for its mask, three for the
drafting steps, four for the head's own cache behind them (SGLang's layers/attention and speculative)."""

MARGIN_SHARE, MARGIN_BYTES = 0.01, 512 * MIB
"""Fragmentation and what torch's allocator rounds up. A guess: one percent of the weights is what a public figure of
loaded weights (57.06 GiB) is above the sum of their tensors, and half a GiB for what serving allocates."""

_TINY_SLOTS, _DECODE_ROWS = 32, 8


def decode_bytes(experts: int, hidden: int, inner: int, slots: int, num_sms: int = NUM_SMS) -> int:
    """Of kernels/moe/grouped_gemm_decode, gated: the schedule, what is between the GEMMs, partial sums."""
    between = 2 * _max_blocks(slots, experts, _DECODE_ROWS) * _DECODE_ROWS * inner
    aligned = hidden % 128 == 0 and inner % 128 == 0
    columns, chunks = 4 * -(-inner // 128), hidden // 128
    tiles = min(slots, experts) * columns
    if aligned and slots <= _TINY_SLOTS and chunks % 8 == 0 and tiles / num_sms >= 0.9 * -(-tiles // num_sms):
        return between
    per_sm = 2 if aligned and chunks % 4 == 0 else 1
    steps = math.ceil(math.ceil(hidden / 128) / 4)
    grid = min(per_sm * num_sms, _max_blocks(slots, experts, _DECODE_ROWS) * columns * steps)
    return between + schedule_bytes(slots, experts, _DECODE_ROWS) + 4 * grid * 2 * 32 * _DECODE_ROWS + 4 * grid


def middle_bytes(experts: int, hidden: int, inner: int, slots: int, tokens: int) -> int:
    """Of kernels/moe/grouped_gemm_middle, gated."""
    aligned = inner % 128 == 0 and hidden % 256 == 0
    rows = (16 if slots / experts <= 12 else 32) if aligned else 32
    between = 2 * _max_blocks(slots, experts, rows) * rows * inner
    return between + schedule_bytes(slots, experts, rows) + 2 * tokens * hidden


def prefill_bytes(experts: int, hidden: int, inner: int, slots: int) -> int:
    """Of kernels/moe/grouped_gemm_prefill with its quantised activations."""
    rows = next((rows for rows in (16, 32, 64, 128) if slots / max(experts, 1) <= rows), 128)
    between = 4 * slots * inner + slots * (3 * hidden + inner)
    return schedule_bytes(slots, experts, rows) + between + 64 * experts


def schedule_bytes(slots: int, experts: int, rows: int) -> int:
    """Of kernels/moe/expert_schedule."""
    blocks = _max_blocks(slots, experts, rows)
    return 4 * (4 * blocks + blocks * rows + blocks + 2 * experts + 1)


def fused_moe_bytes(backend: str, experts: int, hidden: int, inner: int, tokens: int, top_k: int) -> int:
    """Of kernels/moe/fused_moe: what a gated layer's call holds beside its arguments and its result.

    Args:
        backend: "decode", "middle" or "prefill".
        experts: on this GPU.
        hidden: H.
        inner: I on this GPU.
        tokens: T.
        top_k: k.
    """
    slots = tokens * top_k
    own = {
        "decode": lambda: decode_bytes(experts, hidden, inner, slots),
        "middle": lambda: middle_bytes(experts, hidden, inner, slots, tokens),
        "prefill": lambda: prefill_bytes(experts, hidden, inner, slots),
    }[backend]()
    return 2 * slots * hidden + 2 * tokens * hidden + 64 * slots + 4096 + own


def native_bytes(experts: int, hidden: int, inner: int, tokens: int, top_k: int) -> int:
    """The most that this package's kernels take of a layer, whichever of decode and middle serves.

    Args:
        experts: on this GPU.
        hidden: H.
        inner: I on this GPU.
        tokens: most of a batch.
        top_k: k.
    """
    served = min(tokens, NATIVE_TOKENS)
    return max(fused_moe_bytes(backend, experts, hidden, inner, served, top_k) for backend in ("decode", "middle"))


def cutlass_moe_bytes(hidden: int, inner: int, slots: int) -> int:
    """Of FlashInfer's CUTLASS MoE in NVFP4, for the slots of a prefill chunk.

    A guess from its steps, FlashInfer is not asked: each slot's input in NVFP4, both halves of the first GEMM in 16
    bits, their product in NVFP4, the second GEMM in 16 bits.
    """
    return slots * (hidden * 9 // 16 + 4 * inner + inner * 9 // 16 + 2 * hidden)


def plain_moe_bytes(hidden: int, inner: int, slots: int) -> int:
    """Of SGLang's Triton experts in 16 or 8 bits: both halves, their product, every slot's result."""
    return slots * (4 * inner + 2 * inner + 2 * hidden)


WINDOW_MESSAGE_BYTES = {2: 256 << 10, 4: 96 << 10, 8: 32 << 10}
"""The largest message of this package's all-reduce without a profile, by ranks (its config.DEFAULT_RANGES)."""


def window_bytes(ranks: int) -> int:
    """Of kernels/communication/all_reduce_rmsnorm: a rank's window for messages without a profile."""
    if ranks not in WINDOW_MESSAGE_BYTES:
        return 0
    signals = 8 * 2 * 2 * 128 * 8 + 1024
    return signals + 2 * WINDOW_MESSAGE_BYTES[ranks] * ranks


def activation_bytes(
    shape: ModelShape, *, attention_tp: int, inner: int, tokens: int, moe_tokens: int
) -> tuple[int, int]:
    """The tensors that live at the peak of a prefill chunk, without the experts' workspace.

    Args:
        shape: the model.
        attention_tp: GPUs that attention is sharded over.
        inner: the widest intermediate size on this GPU that every token passes (dense layers, shared expert).
        tokens: of the chunk on this attention group.
        moe_tokens: of all attention groups together, which the experts see.

    Returns:
        In attention, and in the MLP.
    """
    attention, hidden = shape.attention, shape.hidden_size
    heads = attention.heads // attention_tp
    stream = 2 * 2 * tokens * hidden  # hidden states and residual
    if attention.latent:
        latent = attention.kv_lora_rank + attention.qk_rope_head_dim
        down = attention.q_lora_rank + latent
        # queries, absorbed queries, their results in the latent space and out of it
        a_token = down + heads * (attention.head_dim + 2 * latent + attention.v_head_dim)
        a_token += attention.index_heads * attention.index_head_dim
    else:
        kv_heads = max(1, attention.kv_heads // attention_tp)
        a_token = 2 * (heads * (2 if attention.gated else 1) + 2 * kv_heads) * attention.head_dim
        if attention.linear is not None:
            linear = attention.linear
            channels = 2 * linear.key_heads * linear.key_head_dim + 3 * linear.value_heads * linear.value_head_dim
            a_token = max(a_token, 2 * channels // attention_tp)
    in_attention = stream + 2 * tokens * a_token + 2 * tokens * hidden
    experts = shape.moe.num_experts if shape.moe else 0
    # the experts' input (gathered under attention DP), routed and shared results, router scores in fp32 twice
    in_mlp = stream + 2 * moe_tokens * (2 * hidden + 3 * inner) + 2 * 4 * moe_tokens * experts
    in_mlp += 2 * moe_tokens * hidden if moe_tokens > tokens else 0
    return in_attention, in_mlp


def logits_bytes(vocab: int, rows: int, tp: int) -> int:
    """Of a step's last rows: this GPU's part and all of them in 16 bits, in fp32, and as probabilities."""
    return rows * (2 * (vocab // tp) + (2 + 4 + 4) * vocab)


def decode_buffer_bytes(shape: ModelShape, *, attention_tp: int, rows: int, context: int, mtp: bool = False) -> int:
    """What attention keeps for captured decode batches: an index a token of each row, and Triton's partial sums.

    Args:
        shape: the model.
        attention_tp: GPUs that attention is sharded over.
        rows: requests of the largest captured batch.
        context: tokens of a request.
        mtp: whether an MTP head drafts, which checks several tokens of a request at once.
    """
    triton = _is_triton(shape)
    indices = (8 if triton else 4) * rows * context * (DRAFT_INDEX_ROWS if mtp else 1)
    if triton:
        attention, tokens = shape.attention, rows * (DRAFT_TOKENS if mtp else 1)
        width = attention.kv_lora_rank or attention.v_head_dim
        indices += 4 * tokens * (attention.heads // attention_tp) * TRITON_KV_SPLITS * (width + 1)
    return indices


def attention_workspace_bytes(shape: ModelShape) -> int:
    """FlashInfer's, where SGLang takes it on compute capability 12.x: not for MLA nor sinks, which Triton serves."""
    return 0 if _is_triton(shape) else FLASHINFER_WORKSPACE_BYTES


def _is_triton(shape: ModelShape) -> bool:
    return shape.attention.kind == "mla" or shape.attention.sinks


def graph_bytes(shape: ModelShape, *, rows: int, groups: int, chunk: int, pipelined: bool) -> int:
    """CUDA graphs, by SGLang's own reserve.

    Args:
        shape: the model.
        rows: largest captured decode batch, 0 if none is.
        groups: attention DP groups.
        chunk: tokens of a prefill chunk, up to which prefill graphs are captured.
        pipelined: SGLang captures no prefill graphs then.
    """
    decode = rows * (GRAPH_ROW_BYTES + (GRAPH_DP_ROW_BYTES * groups if groups > 1 else 0))
    if groups > 1 and rows > 300:
        decode += rows * groups * GRAPH_DP_ROW_BYTES // 2
    if pipelined:
        return decode
    return decode + (PREFILL_GRAPHS_MLA_BYTES if shape.attention.latent else PREFILL_GRAPH_BYTES * prefill_sizes(chunk))


def prefill_sizes(chunk: int) -> int:
    """How many token counts SGLang captures prefill graphs for (its arg_groups/cuda_graph_hook.py)."""
    steps = [
        *range(4, 33, 4), *range(48, 257, 16), *range(288, 513, 32), *range(576, 1025, 64), *range(1280, 4097, 256),
        *range(4608, chunk + 1, 512),
    ]  # fmt: skip
    return sum(1 for size in steps if size <= chunk)


def _max_blocks(slots: int, experts: int, rows: int) -> int:
    opened = min(slots, experts)
    return opened + (slots - opened) // rows
