"""A model's sizes from its config.json, by the names of any of the families that SGLang serves with experts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sglang_sm120.errors import ConfigError
from sglang_sm120.plan.shapes_quantization import quantization_of, text_config
from sglang_sm120.plan.shapes_types import Attention, LinearAttention, ModelShape, Moe

_LARGEST = {
    "num_hidden_layers": 1000, "hidden_size": 1 << 17, "vocab_size": 1 << 24, "num_attention_heads": 4096,
    "num_key_value_heads": 4096, "head_dim": 4096, "intermediate_size": 1 << 20, "moe_intermediate_size": 1 << 18,
    "max_position_embeddings": 1 << 28, "q_lora_rank": 1 << 16, "kv_lora_rank": 1 << 16, "num_experts": 1 << 14,
    "num_experts_per_tok": 256,
}  # fmt: skip
_LARGEST_OTHER = 1 << 24
_EXPERTS = ("n_routed_experts", "num_experts", "num_local_experts")

UNSAID_CONTEXT = 32768
"""Taken where a config does not say how long a request may be."""

_FP32_ROUTERS = frozenset({"Glm4MoeForCausalLM", "MiniMaxM2ForCausalLM"})
"""Where SGLang keeps the router's weight in fp32."""

KNOWN = frozenset({
    "DeepseekV3ForCausalLM", "DeepseekV32ForCausalLM", "KimiK25ForConditionalGeneration", "GlmMoeDsaForCausalLM",
    "Glm4MoeForCausalLM", "Qwen3MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration", "Qwen3_5MoeForCausalLM",
    "MiniMaxM2ForCausalLM", "GptOssForCausalLM",
})  # fmt: skip
"""Architectures whose weights are counted tensor by tensor; a test builds SGLang's own model of each. Kimi-K2.5's is
DeepSeek-V3's inside."""


def shape_of(
    config: dict[str, Any], *, name: str, source: str, quant: dict[str, Any] | None = None, tensors: Sequence[str] = ()
) -> ModelShape:
    """The shape that a config has.

    Args:
        config: config.json.
        name: for people.
        source: what errors name.
        quant: hf_quant_config.json, if there is one.
        tensors: names of the checkpoint's tensors, if they are known; an MTP head without tensors does not count.

    Raises:
        ConfigError: a size is missing, or no model has it.
    """
    text = {**config, **text_config(config)}
    sizes = _Sizes(text, source)
    architecture = _architecture(config, source)
    layers = sizes.need("num_hidden_layers")
    moe, dense = _moe(sizes, architecture, layers)
    unknown = list(_unknown(architecture, config))
    mtp = sizes.have("num_nextn_predict_layers", "mtp_num_hidden_layers")
    mtp_named = any(f".layers.{layers}." in tensor or tensor.startswith("mtp.") for tensor in tensors)
    if mtp and tensors and not mtp_named:
        unknown.append("The config has an MTP head and the checkpoint has no tensors of it; it is taken to have none.")
        mtp = 0
    if architecture == "MiniMaxM2ForCausalLM" and text.get("use_mtp"):
        unknown.append("The MTP modules: SGLang 0.5.23 does not load MiniMax-M2's.")
    if not sizes.have("max_position_embeddings"):
        unknown.append(f"The longest context: the config has no max_position_embeddings, {UNSAID_CONTEXT:,} is taken.")
    quantization, notes = quantization_of(config, quant, layers=layers, has_moe=moe is not None)
    dtype = str(text.get("dtype") or text.get("torch_dtype") or "bfloat16").removeprefix("torch.")
    if dtype not in ("bfloat16", "float16"):
        unknown.append(
            f"The config's dtype is {dtype}: what is not quantised is counted in 2 bytes, as SGLang serves it."
        )
        dtype = "bfloat16"
    return ModelShape(
        name=name,
        architecture=architecture,
        num_layers=layers,
        hidden_size=sizes.need("hidden_size"),
        vocab_size=sizes.need("vocab_size"),
        attention=_attention(sizes, architecture, layers),
        moe=moe,
        dense_intermediate_size=dense,
        mtp_layers=mtp,
        tie_word_embeddings=bool(text.get("tie_word_embeddings", False)),
        max_context=sizes.have("max_position_embeddings") or UNSAID_CONTEXT,
        dtype=dtype,
        quantization=quantization,
        unknown=(*unknown, *notes),
    )


class _Sizes:
    """The whole numbers of a config, each within what a model can have."""

    def __init__(self, config: dict[str, Any], source: str) -> None:
        self.config, self.source = config, source

    def need(self, *keys: str) -> int:
        """The first of these keys that is there; it has to be above zero."""
        value = self.have(*keys)
        if value == 0:
            raise ConfigError(
                f"{self.source} has no {' or '.join(keys)}" if not any(k in self.config for k in keys)
                else f"{self.source} has {keys[0]} = {self.config.get(keys[0])!r}",
                "a language model's sizes in config.json", "name the folder of a Hugging Face checkpoint",
            )  # fmt: skip
        return value

    def have(self, *keys: str) -> int:
        """The first of these keys that is there, 0 if none is."""
        for key in keys:
            value = self.config.get(key)
            if value is None:
                continue
            largest = _LARGEST.get("num_experts" if key in _EXPERTS else key, _LARGEST_OTHER)
            if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= largest:
                raise ConfigError(
                    f"{self.source} has {key} = {value!r}", f"a whole number up to {largest:,}",
                    "download config.json again; no model has this size",
                )  # fmt: skip
            return value
        return 0

    def refuse(self, found: str, needed: str) -> ConfigError:
        """An error about sizes that do not go together."""
        return ConfigError(f"{self.source}: {found}", needed, "download config.json again")


def _architecture(config: dict[str, Any], source: str) -> str:
    named = config.get("architectures")
    if isinstance(named, list) and named and isinstance(named[0], str):
        return named[0]
    if isinstance(config.get("model_type"), str):
        return str(config["model_type"])
    raise ConfigError(
        f"{source} names neither architectures nor model_type",
        "a model's config.json",
        "name the checkpoint's own file",
    )


def _attention(sizes: _Sizes, architecture: str, layers: int) -> Attention:
    config = sizes.config
    heads = sizes.need("num_attention_heads")
    if sizes.have("kv_lora_rank"):
        nope, rope = sizes.need("qk_nope_head_dim"), sizes.need("qk_rope_head_dim")
        indexed = sizes.have("index_topk") > 0 and architecture not in ("DeepseekV3ForCausalLM",)
        return Attention(
            kind="dsa" if indexed else "mla", heads=heads, kv_heads=heads, head_dim=nope + rope,
            v_head_dim=sizes.need("v_head_dim"), q_lora_rank=sizes.have("q_lora_rank"),
            kv_lora_rank=sizes.need("kv_lora_rank"), qk_nope_head_dim=nope, qk_rope_head_dim=rope,
            index_heads=sizes.need("index_n_heads") if indexed else 0,
            index_head_dim=sizes.need("index_head_dim") if indexed else 0,
            index_topk=sizes.have("index_topk") if indexed else 0,
            index_layers=_index_layers(sizes, layers) if indexed else (),
        )  # fmt: skip
    kv_heads = sizes.have("num_key_value_heads") or heads
    if heads % kv_heads:
        raise sizes.refuse(f"{heads} heads and {kv_heads} KV heads", "heads that KV heads divide")
    head_dim = sizes.have("head_dim")
    if not head_dim:
        if sizes.need("hidden_size") % heads:
            raise sizes.refuse(
                f"hidden_size {sizes.need('hidden_size')} and {heads} heads", "a head_dim, or one that divides"
            )
        head_dim = sizes.need("hidden_size") // heads
    linear = _linear(sizes, layers)
    sliding = _of_type(config, "sliding_attention") if architecture == "GptOssForCausalLM" else 0
    norm = {"Qwen3MoeForCausalLM": "head", "MiniMaxM2ForCausalLM": "full"}.get(architecture, "")
    norm = "head" if architecture.startswith("Qwen3_5Moe") else norm
    norm = "head" if architecture == "Glm4MoeForCausalLM" and config.get("use_qk_norm") else norm
    return Attention(
        kind="linear-hybrid" if linear else "mha" if kv_heads == heads else "gqa", heads=heads, kv_heads=kv_heads,
        head_dim=head_dim, v_head_dim=head_dim,
        gated=bool(linear) and config.get("attn_output_gate", True) is not False,
        bias=bool(config.get("attention_bias", False)),
        out_bias=bool(config.get("attention_bias", False)) and architecture == "GptOssForCausalLM",
        qk_norm=norm, sinks=architecture == "GptOssForCausalLM", sliding_layers=sliding,
        sliding_window=sizes.have("sliding_window") if sliding else 0, linear=linear,
    )  # fmt: skip


def _index_layers(sizes: _Sizes, layers: int) -> tuple[int, ...]:
    """Layers that pick for themselves; the others take over the previous pick and keep no index keys."""
    config = sizes.config
    types, pattern = config.get("indexer_types"), config.get("index_topk_pattern")
    if isinstance(types, list):
        return tuple(i for i in range(layers) if not (i < len(types) and types[i] == "shared"))
    if isinstance(pattern, str):
        return tuple(i for i in range(layers) if not (i < len(pattern) and pattern[i] == "S"))
    freq = sizes.have("index_topk_freq") or 1
    offset = sizes.config.get("index_skip_topk_offset")
    offset = 2 if not isinstance(offset, int) else offset
    return tuple(i for i in range(layers) if max(i - offset + 1, 0) % freq == 0)


def _linear(sizes: _Sizes, layers: int) -> LinearAttention | None:
    if not sizes.have("linear_num_value_heads"):
        return None
    count = _of_type(sizes.config, "linear_attention")
    if not count:
        interval = sizes.have("full_attention_interval") or 4
        count = layers - layers // interval
    return LinearAttention(
        layers=count,
        key_heads=sizes.need("linear_num_key_heads"),
        value_heads=sizes.need("linear_num_value_heads"),
        key_head_dim=sizes.need("linear_key_head_dim"),
        value_head_dim=sizes.need("linear_value_head_dim"),
        conv_kernel=sizes.need("linear_conv_kernel_dim"),
    )


def _of_type(config: dict[str, Any], kind: str) -> int:
    types = config.get("layer_types")
    return sum(1 for one in types if one == kind) if isinstance(types, list) else 0


def _moe(sizes: _Sizes, architecture: str, layers: int) -> tuple[Moe | None, int]:
    """The experts, and the intermediate size of layers without."""
    experts = sizes.have(*_EXPERTS)
    if not experts:
        return None, sizes.need("intermediate_size")
    # Where experts have no size of their own (MiniMax, gpt-oss), intermediate_size is theirs.
    inner = sizes.have("moe_intermediate_size") or sizes.need("intermediate_size")
    top_k = sizes.need("num_experts_per_tok", "num_experts_per_token", "moe_topk")
    if top_k > experts:
        raise sizes.refuse(f"{top_k} experts a token of {experts}", "no more experts a token than there are")
    dense = min(sizes.have("first_k_dense_replace"), layers)
    dense = max(dense, _of_mlp_type(sizes.config, "dense"))
    dense = max(dense, _layers_between(sizes, layers))
    shared = sizes.have("shared_expert_intermediate_size", "shared_intermediate_size")
    shared = shared or sizes.have("n_shared_experts") * inner
    bias = {
        "DeepseekV3ForCausalLM": "float32", "DeepseekV32ForCausalLM": "float32", "GlmMoeDsaForCausalLM": "float32",
        "KimiK25ForConditionalGeneration": "float32", "Glm4MoeForCausalLM": "float32",
        "MiniMaxM2ForCausalLM": "float32", "GptOssForCausalLM": "bfloat16",
    }.get(architecture, "")  # fmt: skip
    moe = Moe(
        num_experts=experts, top_k=top_k, moe_intermediate_size=inner, shared_intermediate_size=shared,
        first_dense_layers=dense, router_bias=bias,
        router_dtype="float32" if architecture in _FP32_ROUTERS else "bfloat16",
        shared_gate=architecture.startswith("Qwen3_5Moe") and shared > 0,
        expert_bias=architecture == "GptOssForCausalLM",
    )  # fmt: skip
    return moe, sizes.need("intermediate_size") if dense else 0


def _layers_between(sizes: _Sizes, layers: int) -> int:
    """Layers without experts, wherever they lie; counted as if they came first, which only pipeline stages can tell."""
    each = sizes.config.get("moe_layer_freq")
    if isinstance(each, list):  # one entry a layer, 0 without experts
        return sum(1 for one in each[:layers] if one == 0)
    first = sizes.have("first_k_dense_replace")
    frequency, step = sizes.have("moe_layer_freq") or 1, sizes.have("decoder_sparse_step") or 1
    only = sizes.config.get("mlp_only_layers")
    listed = {one for one in only if isinstance(one, int)} if isinstance(only, list) else set()
    return sum(
        1 for layer in range(layers) if layer < first or layer % frequency or (layer + 1) % step or layer in listed
    )


def _of_mlp_type(config: dict[str, Any], kind: str) -> int:
    types = config.get("mlp_layer_types")
    return sum(1 for one in types if one == kind) if isinstance(types, list) else 0


def _unknown(architecture: str, config: dict[str, Any]) -> list[str]:
    found = []
    if architecture not in KNOWN:
        found.append(
            f"{architecture} is not known here: only what its config says under the usual names is counted, as a "
            "decoder with attention, a gated MLP or experts, two norms a layer, an embedding and an output head."
        )
    if isinstance(config.get("vision_config"), dict):
        found.append("The vision tower and what it needs at run time.")
    return found
