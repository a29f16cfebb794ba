"""The components of one GPU's memory, each with how it was counted."""

from __future__ import annotations

from dataclasses import dataclass

from sglang_sm120.plan import kv, weights, workspaces
from sglang_sm120.plan.shapes_types import ModelShape

KINDS = ("weights", "kv", "graphs", "workspace", "communication", "activations", "runtime", "margin")


@dataclass(frozen=True)
class Split:
    """How a model is spread, in SGLang's words. tp, ep, dp_attention, pp: GPUs. nodes: machines."""

    tp: int
    ep: int = 1
    dp_attention: int = 1
    pp: int = 1
    nodes: int = 1

    @property
    def gpus(self) -> int:
        """Over all nodes."""
        return self.tp * self.pp

    @property
    def widths(self) -> weights.Widths:
        """Over how many GPUs each kind of tensor is sharded."""
        return weights.Widths(self.tp, self.tp // self.dp_attention, self.ep)


@dataclass(frozen=True)
class Serving:
    """A way of serving.

    context: tokens of a request. concurrency: requests at once of one attention group, each with a KV cache there.
    chunked_prefill: tokens of a prefill step of one attention group. kv_dtype: "bfloat16" or "fp8_e4m3". mtp: whether
    the MTP head drafts. graph_batch_sizes: captured decode batches, () for none. our_runners, all_reduce: whether this
    package serves the experts, and sums.
    """

    context: int
    concurrency: int
    chunked_prefill: int
    kv_dtype: str
    mtp: bool
    graph_batch_sizes: tuple[int, ...]
    our_runners: bool
    all_reduce: bool


@dataclass(frozen=True)
class Component:
    """One thing that a GPU holds. detail: how it was counted, in words. kind: one of KINDS."""

    name: str
    bytes: int
    detail: str
    kind: str


def stages(layers: int, pp: int) -> list[tuple[int, int]]:
    """First layer and end of each pipeline stage: the last ones have one layer more where they do not divide."""
    base, more = divmod(layers, pp)
    sizes = [base + (rank >= pp - more) for rank in range(pp)]
    return [(sum(sizes[:rank]), sum(sizes[: rank + 1])) for rank in range(pp)]


def weight_parts(shape: ModelShape, split: Split, mtp: bool) -> list[Component]:
    by_stage = [weights.stage_weights(shape, split.widths, *stage) for stage in stages(shape.num_layers, split.pp)]
    parts = max(by_stage, key=lambda one: sum(one.values()))
    found = [Component(name, size, _weight_detail(shape, split, name), "weights") for name, size in parts.items()]
    if mtp:
        size = weights.mtp_bytes(shape, split.widths)
        kind = weights.KIND_TITLES[shape.quantization.mtp]
        found.append(
            Component("MTP head", size, f"a layer with its own experts in {kind}, projection, norms", "weights")
        )
    return found


def _weight_detail(shape: ModelShape, split: Split, name: str) -> str:
    quantization, widths = shape.quantization, split.widths
    tp, over = f"over TP {split.tp}", f"over attention TP {widths.attention}"
    whole = "whole on every GPU"
    each = weights.embedding_width(shape, widths)
    embedding = tp if each == widths.tp else f"over attention TP {each}" if each > 1 else whole
    texts = {
        weights.EMBEDDING: (f"{shape.vocab_size} x {shape.hidden_size}, padded, {embedding}", "bf16"),
        weights.LM_HEAD: (f"output head, {tp}", quantization.lm_head),
        weights.ATTENTION: (f"projections {over}; MLA's down projections {whole}" if shape.attention.latent
            else f"projections {over}, KV heads copied where there are fewer", quantization.attention),
        weights.ABSORBED: ("SGLang's transposed copy of kv_b for the absorbed form", "bf16"),
        weights.INDEXER: (f"sparse attention's indexer, {whole}", quantization.attention),
        weights.LINEAR: (f"gated delta net, {over}", quantization.attention),
        weights.NORMS: (whole, "bf16"),
        weights.ROUTER: (f"gate and its bias, {whole}", "bf16"),
        weights.SHARED: (tp, quantization.shared_expert),
        weights.DENSE: (f"layers without experts, {tp}", quantization.dense_mlp),
        weights.EXPERTS: (_experts_text(shape, split), quantization.experts),
        weights.SCALES: ("of experts: blocks padded to 128 x 4 tiles, global scales", quantization.experts),
    }  # fmt: skip
    text, kind = texts[name]
    return f"{text}; {weights.KIND_TITLES[kind]}"


def _experts_text(shape: ModelShape, split: Split) -> str:
    if shape.moe is None:
        return ""
    here, inner = shape.moe.num_experts // split.ep, shape.moe.moe_intermediate_size // split.widths.expert
    return f"{here} of {shape.moe.num_experts} experts, {inner} of {shape.moe.moe_intermediate_size} of each"


def before_weights(shape: ModelShape, split: Split, serving: Serving) -> int:
    """Gone before SGLang looks at how much is free."""
    return sum(part.bytes for part in runtime_parts(shape, split, serving) if part.name in ("CUDA context", "NCCL"))


def runtime_parts(shape: ModelShape, split: Split, serving: Serving) -> list[Component]:
    peers = split.tp - 1 + (2 if split.pp > 1 else 0)
    window = workspaces.window_bytes(split.tp) if serving.all_reduce else 0
    rope = shape.attention.qk_rope_head_dim or shape.attention.head_dim
    positions = f"cosines and sines of {shape.max_context} positions in fp32"
    guess = "guess from a public figure"
    window_text = "this package's, shared with the other GPUs by CUDA IPC"
    return [
        Component("CUDA context", workspaces.CONTEXT_BYTES, f"context, libraries, handles; {guess}", "runtime"),
        Component("NCCL", peers * workspaces.NCCL_PEER_BYTES, f"buffers for {peers} peers; {guess}", "communication"),
        Component("all-reduce window", window, window_text, "communication"),
        Component("rope tables", 4 * shape.max_context * rope, positions, "runtime"),
    ]  # fmt: skip


def state_bytes(shape: ModelShape, split: Split, serving: Serving) -> int:
    """Linear-attention state of all requests; SGLang takes it from its pool, with a slot to spare.

    Where an MTP head drafts, each request has a state for every token that is checked, too.
    """
    slots = kv.STATE_SLOTS_A_REQUEST * serving.concurrency + 1
    slots += workspaces.DRAFT_TOKENS * (serving.concurrency + 1) if serving.mtp else 0
    width = split.widths.attention
    return slots * max(kv.state_bytes(shape, width, *stage) for stage in stages(shape.num_layers, split.pp))


def working_parts(shape: ModelShape, split: Split, serving: Serving) -> list[Component]:
    """What serving needs beside weights and cache."""
    width = split.widths.attention
    rows = max(serving.graph_batch_sizes, default=0)
    groups = split.dp_attention
    moe_tokens = serving.chunked_prefill * groups
    inner = shape.dense_intermediate_size // split.tp
    inner = max(inner, shape.moe.shared_intermediate_size // split.tp if shape.moe else 0)
    attention, mlp = workspaces.activation_bytes(
        shape, attention_tp=width, inner=inner, tokens=serving.chunked_prefill, moe_tokens=moe_tokens
    )
    experts = _expert_workspace(shape, split, moe_tokens)
    # SGLang computes logits for every token of a step that it samples or checks.
    scored = serving.concurrency * (workspaces.DRAFT_TOKENS if serving.mtp else 1)
    logits = workspaces.logits_bytes(weights.padded_vocab(shape, split.tp), scored, split.tp)
    peak = max(attention, mlp + experts)
    moe = shape.moe
    ours = 0
    if serving.our_runners and moe is not None:
        ours = workspaces.native_bytes(
            moe.num_experts // split.ep, shape.hidden_size, moe.moe_intermediate_size // split.widths.expert,
            workspaces.NATIVE_TOKENS, moe.top_k,
        )  # fmt: skip
    graphs = workspaces.graph_bytes(
        shape, rows=rows, groups=groups, chunk=serving.chunked_prefill * groups, pipelined=split.pp > 1
    )
    buffers = workspaces.decode_buffer_bytes(
        shape, attention_tp=width, rows=rows, context=serving.context, mtp=serving.mtp
    )
    states = state_bytes(shape, split, serving)
    table = 4 * (serving.concurrency + 1) * (serving.context + 4)
    flashinfer = workspaces.attention_workspace_bytes(shape)
    chunk = f"{serving.chunked_prefill} tokens at their peak, with the experts' own workspace, a guess for FlashInfer"
    captured = f"SGLang's own reserve: decode batches up to {rows}, prefill graphs"
    indices = f"of attention, for {rows} captured rows of full context" + (", and for drafting" if serving.mtp else "")
    scores = f"{scored} rows in 16 bits, fp32 and as probabilities"
    slots = f"{kv.STATE_SLOTS_A_REQUEST} slots a request; out of SGLang's pool"
    return [
        Component("linear attention state", states, slots, "kv"),
        Component("request table", table, "an index for every token of a request", "workspace"),
        Component("CUDA graphs", graphs, captured, "graphs"),
        Component("decode buffers", buffers, indices, "workspace"),
        Component("FlashInfer attention", flashinfer, "SGLANG_FLASHINFER_WORKSPACE_SIZE", "workspace"),
        Component("MoE kernels", ours, f"this package's, up to {workspaces.NATIVE_TOKENS} tokens", "workspace"),
        Component("prefill chunk", peak, chunk, "activations"),
        Component("logits", logits, scores, "activations"),
    ]  # fmt: skip


def _expert_workspace(shape: ModelShape, split: Split, tokens: int) -> int:
    if shape.moe is None:
        return 0
    inner, slots = shape.moe.moe_intermediate_size // split.widths.expert, tokens * shape.moe.top_k
    count = (
        workspaces.cutlass_moe_bytes if shape.quantization.experts in ("nvfp4", "mxfp4") else workspaces.plain_moe_bytes
    )
    return count(shape.hidden_size, inner, slots)
