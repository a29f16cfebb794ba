"""What a model is, as far as memory is concerned."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LinearAttention:
    """The layers that keep a state of fixed size instead of a KV cache (gated delta net). layers: how many."""

    layers: int
    key_heads: int
    value_heads: int
    key_head_dim: int
    value_head_dim: int
    conv_kernel: int


@dataclass(frozen=True)
class Attention:
    """The attention of a model's layers.

    kind: "mha", "gqa", "mla", "dsa" (MLA with an indexer that picks what is attended to) or "linear-hybrid".
    heads, kv_heads, head_dim: for MLA kv_heads is heads and head_dim what a head's query has, qk_nope + qk_rope.
    v_head_dim: of a head's value. q_lora_rank: 0 where queries are not compressed. index_*: 0 without an indexer.
    gated: the query projection has a gate as wide as the queries beside them. bias: q, k, v projections have one.
    out_bias: the output projection has one. qk_norm: "", "head" (a norm of head_dim) or "full" (over all heads).
    sinks: one learned number a head. sliding_layers: layers that attend to the last sliding_window tokens only.
    linear: layers without a KV cache.
    """

    kind: str
    heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    q_lora_rank: int = 0
    kv_lora_rank: int = 0
    qk_nope_head_dim: int = 0
    qk_rope_head_dim: int = 0
    index_heads: int = 0
    index_head_dim: int = 0
    index_topk: int = 0
    index_layers: tuple[int, ...] = ()
    gated: bool = False
    bias: bool = False
    out_bias: bool = False
    qk_norm: str = ""
    sinks: bool = False
    sliding_layers: int = 0
    sliding_window: int = 0
    linear: LinearAttention | None = None

    @property
    def latent(self) -> bool:
        """Whether the KV cache is MLA's: one latent for all heads, whatever TP."""
        return self.kv_lora_rank > 0


@dataclass(frozen=True)
class Moe:
    """The mixture-of-experts layers.

    moe_intermediate_size: of one expert and one half of its gated pair. shared_intermediate_size: of all shared
    experts together, 0 without. first_dense_layers: layers before the first that has experts.
    router_bias: "" or the dtype of a number an expert that is added to the router's scores (bfloat16, float32).
    router_dtype: of the router's weight. shared_gate: a gate in front of the shared expert (one row). expert_bias: both
    GEMMs of an expert have a bias.
    """

    num_experts: int
    top_k: int
    moe_intermediate_size: int
    shared_intermediate_size: int = 0
    first_dense_layers: int = 0
    router_bias: str = ""
    router_dtype: str = "bfloat16"
    shared_gate: bool = False
    expert_bias: bool = False


@dataclass(frozen=True)
class Quantization:
    """How each class of tensors is stored: "bf16", "nvfp4", "mxfp4", "fp8" (a scale a tensor), "fp8_block" (128 x 128).

    method: SGLang's --quantization ("modelopt_fp4", "compressed-tensors", "fp8", "mxfp4"), or "" for none.
    """

    method: str = ""
    experts: str = "bf16"
    shared_expert: str = "bf16"
    dense_mlp: str = "bf16"
    attention: str = "bf16"
    attention_out: str = "bf16"
    lm_head: str = "bf16"
    mtp: str = "bf16"


@dataclass(frozen=True)
class ModelShape:
    """One model, as its config has it.

    architecture: its HF class. num_layers: without the MTP head. dense_intermediate_size: of layers without experts,
    0 if there are none. mtp_layers: of the MTP head, 0 without. dtype: of what is not quantised. unknown: sentences
    on what could not be told from the config and so is not counted.
    """

    name: str
    architecture: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    attention: Attention
    moe: Moe | None
    dense_intermediate_size: int
    mtp_layers: int
    tie_word_embeddings: bool
    max_context: int
    dtype: str
    quantization: Quantization
    unknown: tuple[str, ...] = ()
