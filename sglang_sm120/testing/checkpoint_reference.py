"""Greedy tokens, log-probabilities and activation ranges of a plain checkpoint, computed by transformers in fp32."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from torch import nn

from sglang_sm120.errors import ConfigError, ContractError
from sglang_sm120.kernels.quantization.nvfp4.api import amax_global_scale, dequantize_nvfp4, quantize_nvfp4
from sglang_sm120.testing.checkpoint_files import INPUT_SCALES_FILE

# (which input: "w13" or "w2", expert, input fp32 [tokens, K]) -> the input that the GEMM gets
InputTransform = Callable[[str, int, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class ReferenceOutput:
    """Greedy continuation of one prompt; the lists have one entry for each new token."""

    tokens: list[int]
    logprobs: list[float]
    """Natural log of the probability of each token."""
    top2_gap: list[float]
    """Best minus second-best logit: below the serving path's error, another token may rightly be chosen."""


@dataclass(frozen=True)
class StepScore:
    """What the reference thinks of one given token, the given tokens before it being fixed."""

    argmax: int
    argmax_logprob: float
    logprob: float
    """Of the given token."""


class ReferenceModel:
    """A plain checkpoint in fp32 with transformers, optionally with the experts' inputs rounded to NVFP4.

    Args:
        model_dir: from `write_random_model` or `dequantize_checkpoint`.
        w4a4: round the input of gate/up and of down to NVFP4 and back, under the scales that the dequantised
            checkpoint kept in `INPUT_SCALES_FILE`.
        device: torch device.

    Raises:
        ConfigError: `w4a4` without input scales in `model_dir`.
    """

    def __init__(self, model_dir: Path, *, w4a4: bool = False, device: str | torch.device = "cpu") -> None:
        self.model = load_fp32(model_dir, device)
        if w4a4:
            quantize_expert_inputs(self.model, _read_input_scales(Path(model_dir)))

    @torch.inference_mode()
    def greedy(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> list[ReferenceOutput]:
        """Continue every prompt greedily, one at a time, with a KV cache; an end-of-text token does not stop it."""
        return [self._greedy(list(prompt), max_new_tokens) for prompt in prompts]

    def _greedy(self, prompt: list[int], max_new_tokens: int) -> ReferenceOutput:
        _check_tokens("prompt", prompt)
        output = ReferenceOutput([], [], [])
        tokens, cache = prompt, None
        for _ in range(max_new_tokens):
            input_ids = torch.tensor([tokens], device=self.model.device)
            step = self.model(input_ids=input_ids, past_key_values=cache, use_cache=True)
            cache, logits = step.past_key_values, step.logits[0, -1].float()
            best = logits.topk(2)
            tokens = [int(best.indices[0])]
            output.tokens.extend(tokens)
            output.logprobs.append(float(best.values[0] - logits.logsumexp(-1)))
            output.top2_gap.append(float(best.values[0] - best.values[1]))
        return output

    @torch.inference_mode()
    def score(self, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> list[StepScore]:
        """Score given output tokens by teacher forcing, in one forward pass."""
        _check_tokens("prompt_ids", prompt_ids)
        _check_tokens("output_ids", output_ids)
        tokens = torch.tensor([[*prompt_ids, *output_ids]], device=self.model.device)
        logits = self.model(input_ids=tokens[:, :-1], use_cache=False).logits[0, len(prompt_ids) - 1 :]
        logprobs = logits.float().log_softmax(-1)
        best = logprobs.max(-1)
        given = logprobs.gather(1, tokens[0, len(prompt_ids) :, None])[:, 0]
        rows = zip(best.indices.tolist(), best.values.tolist(), given.tolist(), strict=True)
        return [StepScore(*row) for row in rows]


def reference_greedy(
    model_dir: Path, prompts: Sequence[Sequence[int]], max_new_tokens: int, *, w4a4: bool = False
) -> list[ReferenceOutput]:
    """Continue prompts greedily with `ReferenceModel` (see there); for several calls keep one of those instead.

    Args:
        model_dir: a dequantised (or never quantised) checkpoint.
        prompts: token ids, one list for each prompt, none empty.
        max_new_tokens: tokens to add to each.
        w4a4: round the experts' inputs to NVFP4.

    Returns:
        One `ReferenceOutput` for each prompt.
    """
    return ReferenceModel(model_dir, w4a4=w4a4).greedy(prompts, max_new_tokens)


def score_tokens(
    model_dir: Path, prompt_ids: Sequence[int], output_ids: Sequence[int], *, w4a4: bool = False
) -> list[StepScore]:
    """Score the tokens that a server returned with `ReferenceModel` (see there).

    Args:
        model_dir: a dequantised (or never quantised) checkpoint.
        prompt_ids, output_ids: token ids, neither empty.
        w4a4: round the experts' inputs to NVFP4.

    Returns:
        One `StepScore` for each of `output_ids`.
    """
    return ReferenceModel(model_dir, w4a4=w4a4).score(prompt_ids, output_ids)


@torch.inference_mode()
def calibrate_input_scales(
    model_dir: Path,
    token_batches: Iterable[torch.Tensor],
    *,
    per_expert: bool = False,
    device: str | torch.device = "cpu",
) -> dict[str, float]:
    """Measure the input range of every routed expert's linears: scale = amax / (6 * 448), in fp32.

    Args:
        model_dir: a plain checkpoint.
        token_batches: int64 [batch, length] each.
        per_expert: keep each expert's own range (an expert that no token visited gets its layer's). By default all
            experts of a layer share one scale for gate/up and one for down, which is what serving reduces them to.
        device: torch device.

    Returns:
        {module name such as "model.layers.0.mlp.experts.3.gate_proj": scale}; gate and up of an expert are equal.
    """
    model = load_fp32(model_dir, device)
    experts = expert_modules(model)
    amax = {name: {"w13": [0.0] * module.num_experts, "w2": [0.0] * module.num_experts} for name, module in experts}
    for name, module in experts:

        def observe(
            which: str, expert: int, x: torch.Tensor, seen: dict[str, list[float]] = amax[name]
        ) -> torch.Tensor:
            seen[which][expert] = max(seen[which][expert], float(x.abs().max()))
            return x

        module.forward = functools.partial(_experts_forward, module, observe)
    for tokens in token_batches:
        model(input_ids=tokens.to(model.device), use_cache=False)
    scales = {}
    for name, seen in amax.items():
        for which, projections in (("w13", ("gate_proj", "up_proj")), ("w2", ("down_proj",))):
            layer_amax = max(seen[which])
            for expert, own in enumerate(seen[which]):
                scale = float(amax_global_scale(torch.tensor([own if per_expert and own else layer_amax])))
                scales.update({f"{name}.{expert}.{projection}": scale for projection in projections})
    return scales


def random_token_batches(vocab_size: int, *, seed: int = 0, batches: int = 4, length: int = 64) -> list[torch.Tensor]:
    """Return `batches` int64 [4, length] tensors of random token ids, special tokens left out."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, vocab_size, (4, length), generator=generator) for _ in range(batches)]


def load_fp32(model_dir: Path, device: str | torch.device = "cpu") -> transformers.PreTrainedModel:
    """Load a plain checkpoint with transformers in fp32, in evaluation mode."""
    if "quantization_config" in json.loads((Path(model_dir) / "config.json").read_text()):
        raise ConfigError(f"{model_dir} is quantised", "a plain checkpoint", "run dequantize_checkpoint on it first")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        model_dir, dtype=torch.float32, experts_implementation="eager", local_files_only=True
    )
    return model.to(device).eval()


def expert_modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return (name, module) of every fused experts module (parameters gate_up_proj and down_proj, 3-D)."""
    found = [(name, m) for name, m in model.named_modules() if name.endswith(".experts") and hasattr(m, "gate_up_proj")]
    if not found:
        raise ContractError(
            f"{type(model).__name__} has no fused experts module",
            "a MoE model of transformers 5",
            "use one of MODEL_STYLES",
        )
    return found


def quantize_expert_inputs(model: nn.Module, scales: Mapping[str, Mapping[str, Sequence[float]]]) -> None:
    """Make a transformers model round its experts' inputs to NVFP4 and back, in place.

    Args:
        model: any that `expert_modules` finds experts in.
        scales: {experts module: {"w13": scale of each expert, "w2": ...}}; fp32 multipliers.
    """
    for name, module in expert_modules(model):
        tensors = {which: torch.tensor(list(scales[name][which]), dtype=torch.float32) for which in ("w13", "w2")}

        def fake_quantize(which: str, expert: int, x: torch.Tensor, tensors: dict = tensors) -> torch.Tensor:
            scale = tensors[which][expert].to(x.device)
            return dequantize_nvfp4(*quantize_nvfp4(x, scale), scale, dtype=x.dtype)

        module.forward = functools.partial(_experts_forward, module, fake_quantize)


def _experts_forward(
    experts: nn.Module,
    transform: InputTransform,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor:
    """The fused experts of transformers 5, expert by expert, with `transform` before both GEMMs."""
    output = torch.zeros_like(hidden_states)
    for expert in range(experts.num_experts):
        token, slot = torch.where(top_k_index == expert)
        if token.numel() == 0:
            continue
        x = transform("w13", expert, hidden_states[token])
        gate, up = nn.functional.linear(x, experts.gate_up_proj[expert]).chunk(2, dim=-1)
        x = transform("w2", expert, experts.act_fn(gate) * up)
        down = nn.functional.linear(x, experts.down_proj[expert])
        output.index_add_(0, token, (down * top_k_weights[token, slot, None]).to(output.dtype))
    return output


def _read_input_scales(model_dir: Path) -> dict[str, dict[str, list[float]]]:
    path = model_dir / INPUT_SCALES_FILE
    if not path.exists():
        raise ConfigError(
            f"{model_dir} has no {INPUT_SCALES_FILE}",
            "the input scales of an NVFP4 W4A4 checkpoint",
            "dequantise one that was not written with w4a16_only",
        )
    return json.loads(path.read_text())


def _check_tokens(name: str, tokens: Sequence[int]) -> None:
    if not tokens:
        raise ContractError(f"{name} is empty", "at least one token", "pass token ids")
