"""Tiny random MoE checkpoints in BF16, as Hugging Face writes them: one for each model style that the tests serve."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from sglang_sm120.errors import UnsupportedError
from sglang_sm120.testing.checkpoint_files import new_directory, update_json

MODEL_STYLES = ("qwen3_moe", "glm4_moe", "deepseek_v3")
SPECIAL_TOKENS = ("<pad>", "<s>", "</s>")  # ids 0, 1, 2
VOCAB_SIZE = 320  # 3 special tokens and 256 bytes, padded to a multiple of 64
ROUTED_SCALING_FACTOR = 1.7  # not 1, so that a path which forgets it, or applies it twice, gives other tokens

_YARN = {  # SGLang 0.5.23 reads DeepSeek's attention scale from a yarn entry
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 128,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "rope_theta": 10000.0,
}


def write_random_model(
    out: Path,
    style: str,
    *,
    seed: int = 0,
    num_experts: int = 8,
    num_experts_per_tok: int = 2,
    hidden_size: int = 128,
    moe_intermediate_size: int = 128,
    gpu_attention: bool = False,
) -> Path:
    """Write a random BF16 MoE checkpoint: config, byte-level tokenizer, one safetensors file.

    qwen3_moe has 2 MoE layers, softmax routing, normalised weights. glm4_moe and deepseek_v3 have 1 dense and 2 MoE
    layers, sigmoid routing with a random fp32 e_score_correction_bias, a shared expert and a routed scaling factor
    that is not 1; deepseek_v3 also picks one of two expert groups. Every layer splits over two tensor-parallel ranks
    into shapes that NVFP4 kernels take.

    Args:
        out: directory to create; it must be missing or empty.
        style: one of `MODEL_STYLES`.
        seed: of the random weights.
        num_experts: routed experts; even for deepseek_v3.
        num_experts_per_tok: experts that a token visits.
        hidden_size: multiple of 64.
        moe_intermediate_size: rows of an expert's gate projection; multiple of 128.
        gpu_attention: give deepseek_v3 the MLA widths of the real model (512, 64, 128, 128), the only ones that GPU
            attention kernels take. The other styles always have head_dim 64.

    Returns:
        `out`.

    Raises:
        UnsupportedError: an unknown style, or a size that breaks the rules above.
        ConfigError: `out` exists and is not empty.
    """
    _check_sizes(style, num_experts, num_experts_per_tok, hidden_size, moe_intermediate_size)
    sizes = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": hidden_size,
        "intermediate_size": 2 * hidden_size,
        "moe_intermediate_size": moe_intermediate_size,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_experts_per_tok": num_experts_per_tok,
        "max_position_embeddings": 512,
        "norm_topk_prob": True,
        "tie_word_embeddings": False,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    config = _model_config(style, sizes, num_experts, gpu_attention)
    model = transformers.AutoModelForCausalLM.from_config(config)
    _randomise(model, seed)
    with new_directory(Path(out)) as directory:
        model.save_pretrained(directory)
        byte_tokenizer().save_pretrained(directory)
        if style == "deepseek_v3":  # keys of the original config that transformers drops and SGLang reads
            update_json(directory / "config.json", moe_layer_freq=1, scoring_func="sigmoid", topk_method="noaux_tc")
    return Path(out)


def byte_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """Return a tokenizer with one token for every byte and the three `SPECIAL_TOKENS`."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*SPECIAL_TOKENS, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return wrap_tokenizer(tokenizer)


def wrap_tokenizer(tokenizer: Tokenizer) -> transformers.PreTrainedTokenizerFast:
    """Wrap a `tokenizers` tokenizer that knows the three `SPECIAL_TOKENS` for transformers and SGLang."""
    pad, bos, eos = SPECIAL_TOKENS
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=pad, bos_token=bos, eos_token=eos, clean_up_tokenization_spaces=False
    )


def _check_sizes(style: str, num_experts: int, top_k: int, hidden_size: int, moe_intermediate_size: int) -> None:
    if style not in MODEL_STYLES:
        raise UnsupportedError(f"model style {style!r}", f"one of {', '.join(MODEL_STYLES)}", "name one of them")
    if hidden_size % 64 or hidden_size < 64:
        raise UnsupportedError(f"hidden_size={hidden_size}", "a multiple of 64", "use 128 or 256")
    if moe_intermediate_size % 128 or moe_intermediate_size < 128:
        raise UnsupportedError(
            f"moe_intermediate_size={moe_intermediate_size}",
            "a multiple of 128 (64 rows on each of 2 ranks)",
            "use 128",
        )
    groups = 2 if style == "deepseek_v3" else 1
    if num_experts % groups or num_experts // groups < max(2, top_k) or top_k < 1:
        raise UnsupportedError(
            f"num_experts={num_experts}, num_experts_per_tok={top_k} for {style}",
            f"at least {max(2, top_k)} experts in each of {groups} equal groups",
            "use more experts or a smaller top-k",
        )


def _model_config(style: str, sizes: dict[str, Any], num_experts: int, gpu_attention: bool) -> Any:
    if style == "qwen3_moe":
        return transformers.Qwen3MoeConfig(
            **sizes, num_hidden_layers=2, head_dim=64, num_experts=num_experts, decoder_sparse_step=1
        )
    shared = {
        "num_hidden_layers": 3,
        "first_k_dense_replace": 1,
        "n_routed_experts": num_experts,
        "n_shared_experts": 1,
        "topk_group": 1,
        "routed_scaling_factor": ROUTED_SCALING_FACTOR,
    }
    if style == "glm4_moe":
        return transformers.Glm4MoeConfig(**sizes, **shared, head_dim=64, n_group=1)
    mla = {"kv_lora_rank": 64, "q_lora_rank": 64, "qk_rope_head_dim": 32, "qk_nope_head_dim": 32, "v_head_dim": 32}
    if gpu_attention:
        mla = {
            "kv_lora_rank": 512,
            "q_lora_rank": 256,
            "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 128,
            "v_head_dim": 128,
        }
    heads = {"num_attention_heads": 16, "num_key_value_heads": 16} if gpu_attention else {"num_key_value_heads": 4}
    return transformers.DeepseekV3Config(**(sizes | shared | mla | heads), n_group=2, rope_parameters=dict(_YARN))


@torch.no_grad()
def _randomise(model: torch.nn.Module, seed: int) -> None:
    """Fill a model with weights that keep activations near 1, logits a few units wide and the routing undecided."""
    generator = torch.Generator().manual_seed(seed)

    def normal(like: torch.Tensor, std: float) -> torch.Tensor:
        return torch.randn(like.shape, generator=generator) * std

    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:  # norm weights
            parameter.copy_(1 + normal(parameter, 0.1))
        elif name.endswith("embed_tokens.weight"):
            parameter.copy_(normal(parameter, 1.0))
        else:
            gain = 2.0 if name.endswith("lm_head.weight") else 1.0
            parameter.copy_(normal(parameter, gain * parameter.shape[-1] ** -0.5))
    model.to(torch.bfloat16)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):  # fp32 in real checkpoints, beside sigmoid scores in [0, 1]
            buffer.data = normal(buffer, 0.1)
