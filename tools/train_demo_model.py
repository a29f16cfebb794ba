#!/usr/bin/env python3
"""Train the demo model: a small Qwen3-MoE language model of Python code, stored with NVFP4 experts in under 8 MB.

    python tools/train_demo_model.py --out DIR              # one H200, about 5 minutes of training
    python tools/train_demo_model.py --out DIR --smoke      # the whole chain in miniature, CPU, under 2 minutes

It reads the standard library's sources on this machine, keeps `HELD_OUT_MODULES` out, trains a tokenizer and the
model, quantises to ModelOpt NVFP4, measures held-out perplexity in BF16, NVFP4 W4A16 and W4A4, and writes DIR:
checkpoint, tokenizer, README.md, metrics.json, loss.png. No network.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from demo_model_report import describe, describe_held_out, environment, text_version, write_report

from sglang_sm120.errors import ConfigError
from sglang_sm120.testing import checkpoints
from sglang_sm120.testing.checkpoint_models import SPECIAL_TOKENS, wrap_tokenizer
from sglang_sm120.testing.checkpoint_reference import expert_modules, load_fp32
from sglang_sm120.testing.perplexity import HELD_OUT_MODULES, collect_held_out_text, held_out_perplexity, is_held_out

VOCAB_SIZE = 2048
EOS = SPECIAL_TOKENS.index("</s>")
VALIDATION_EVERY = (
    40  # one document of so many steers the choice of the best step; it is neither trained on nor held out
)
SAMPLE_PROMPTS = ("def read_lines(path):\n", "class Stack:\n    def __init__(self):\n")


@dataclass
class Settings:
    """What a full run and a smoke run differ in."""

    steps: int
    seconds: float
    batch_size: int = 64
    seq_len: int = 512
    learning_rate: float = 2e-3
    warmup: int = 200
    max_text_bytes: int = 1 << 40
    eval_bytes: int = 200_000
    sample_tokens: int = 120


def main() -> None:
    args = parse_args()
    settings = Settings(args.steps, args.seconds)
    if args.smoke:
        settings = Settings(min(args.steps, 30), min(args.seconds, 40), 4, 128, 2e-3, 5, 1_500_000, 6_000, 24)
    if args.out.exists() and any(args.out.iterdir()):
        raise ConfigError(f"{args.out} is not empty", "a new directory", "name another")  # before training, not after
    device = args.device if args.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(args.seed)

    documents = collect_documents(args.text_root, settings.max_text_bytes)
    held_out = collect_held_out_text(args.text_root)
    validation = documents[VALIDATION_EVERY - 1 :: VALIDATION_EVERY]
    training = [document for i, document in enumerate(documents, 1) if i % VALIDATION_EVERY]
    tokenizer = train_tokenizer([text for _, text in training])
    train_tokens = encode(tokenizer, training, "encode training text")
    validation_tokens = encode(tokenizer, validation, "encode validation text")

    model = transformers.Qwen3MoeForCausalLM(model_config()).to(device)
    choose_experts_path(model, settings)
    run = train(model, train_tokens.to(device), validation_tokens.to(device), settings)

    with tempfile.TemporaryDirectory() as work:
        bf16 = args.bf16_out or Path(work) / "bf16"
        model.to(torch.bfloat16).save_pretrained(bf16)
        wrap_tokenizer(tokenizer).save_pretrained(bf16)
        rows = random_windows(train_tokens, 32, settings.seq_len)
        scales = checkpoints.calibrate_input_scales(bf16, tqdm(rows.split(4), desc="calibrate"), device=device)
        checkpoints.quantize_checkpoint(bf16, args.out, "modelopt", input_scales=scales)
        plain = checkpoints.dequantize_checkpoint(args.out, Path(work) / "plain")
        quality = evaluate(bf16, plain, held_out, settings, device)
        samples = [generate_sample(plain, prompt, settings.sample_tokens) for prompt in SAMPLE_PROMPTS]

    metrics = environment(device) | {
        "text_python": text_version(args.text_root),
        "seed": args.seed,
        "settings": asdict(settings),
        "training_text": describe(training) | {"tokens": len(train_tokens)},
        "validation_text": describe(validation) | {"tokens": len(validation_tokens)},
        "held_out_modules": list(HELD_OUT_MODULES),
        "held_out_text": describe_held_out(held_out, training),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        **run,
        "held_out_quality": quality,
        "samples": samples,
    }
    print(*(f"--- sample\n{sample}" for sample in samples), sep="\n")
    print(json.dumps({"out": str(args.out), "held_out_quality": quality, "bytes": write_report(args.out, metrics)}))


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="directory to create")
    parser.add_argument("--text-root", type=Path, default=Path(sysconfig.get_path("stdlib")), help="where the .py are")
    parser.add_argument("--steps", type=int, default=4000, help="optimiser steps of 64 x 512 tokens")
    parser.add_argument("--seconds", type=float, default=300, help="training time; the learning rate ends by then")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1, ...")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--smoke", action="store_true", help="a miniature run that checks the chain")
    parser.add_argument("--bf16-out", type=Path, help="keep the BF16 checkpoint here (17 MB)")
    return parser.parse_args()


def collect_documents(root: Path, max_bytes: int) -> list[tuple[str, str]]:
    """(path below root, text) of every UTF-8 .py file by path, without installed packages and held-out modules."""
    paths = sorted(path.relative_to(root) for path in root.rglob("*.py"))
    documents, total = [], 0
    for path in tqdm(paths, desc="read sources"):
        if {"site-packages", "dist-packages", "__pycache__"} & set(path.parts) or is_held_out(path):
            continue
        try:
            text = (root / path).read_bytes().decode("utf-8")
        except UnicodeDecodeError:
            continue  # a test of other encodings
        if text.strip() and total < max_bytes:
            documents.append((path.as_posix(), text))
            total += len(text)
    if len(documents) < VALIDATION_EVERY:
        raise ConfigError(f"{len(documents)} .py files under {root}", "the standard library", "name it as --text-root")
    return documents


def train_tokenizer(texts: list[str]) -> Tokenizer:
    """Byte-level BPE. Special tokens written out in a source file are ordinary text here."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(tqdm(texts, desc="train tokenizer"), trainer)
    tokenizer.encode_special_tokens = True
    return tokenizer


def encode(tokenizer: Tokenizer, documents: list[tuple[str, str]], label: str) -> torch.Tensor:
    """int32 [tokens]: each document after an end-of-text token."""
    ids: list[int] = []
    for start in tqdm(range(0, len(documents), 64), desc=label):
        for encoding in tokenizer.encode_batch([text for _, text in documents[start : start + 64]]):
            ids += [EOS, *encoding.ids]
    return torch.tensor(ids, dtype=torch.int32)


def model_config() -> transformers.Qwen3MoeConfig:
    """8.1 million parameters, 6.3 of them in experts: 3.5 MB of NVFP4 and 3.7 MB of BF16, embeddings not tied."""
    return transformers.Qwen3MoeConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=256,
        intermediate_size=512,
        moe_intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        num_experts=16,
        num_experts_per_tok=4,
        norm_topk_prob=True,
        router_aux_loss_coef=0.01,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        pad_token_id=SPECIAL_TOKENS.index("<pad>"),
        bos_token_id=SPECIAL_TOKENS.index("<s>"),
        eos_token_id=EOS,
    )


class Bf16Experts:
    """A view of an experts module with bf16 weights: torch's grouped GEMM does not follow autocast."""

    def __init__(self, experts: Any) -> None:
        self.experts = experts
        self.gate_up_proj, self.down_proj = experts.gate_up_proj.bfloat16(), experts.down_proj.bfloat16()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.experts, name)


def grouped_experts(experts: Any, hidden_states: Any, top_k_index: Any, top_k_weights: Any) -> torch.Tensor:
    """transformers' own grouped GEMM, in bf16."""
    from transformers.integrations.moe import grouped_mm_experts_forward

    return grouped_mm_experts_forward(Bf16Experts(experts), hidden_states.bfloat16(), top_k_index, top_k_weights)


def dense_experts(experts: Any, hidden_states: Any, top_k_index: Any, top_k_weights: Any) -> torch.Tensor:
    """All experts for all tokens, in two large GEMMs: four times the arithmetic, no sorting and no gathering."""
    tokens, num_experts = hidden_states.shape[0], experts.num_experts
    gates = top_k_weights.new_zeros(tokens, num_experts).scatter(1, top_k_index, top_k_weights)
    gate, up = (hidden_states @ experts.gate_up_proj.flatten(0, 1).T).view(tokens, num_experts, -1).chunk(2, -1)
    hidden = experts.act_fn(gate) * up * gates[..., None]
    return hidden.flatten(1) @ experts.down_proj.transpose(1, 2).flatten(0, 1)


def choose_experts_path(model: Any, settings: Settings) -> None:
    """On a GPU time both ways to run the experts, forward and backward, and keep the faster that works."""
    if model.device.type != "cuda":
        for _, experts in expert_modules(model):
            experts.forward = partial(dense_experts, experts)
        return
    tokens = torch.randint(3, VOCAB_SIZE, (settings.batch_size, settings.seq_len), device=model.device)
    found: dict[Callable[..., torch.Tensor], float] = {}
    for path in (grouped_experts, dense_experts):
        for _, experts in expert_modules(model):
            experts.forward = partial(path, experts)
        try:
            for repeat in range(6):
                if repeat == 2:
                    torch.cuda.synchronize()
                    start = time.perf_counter()
                loss_of(model, tokens).backward()
            torch.cuda.synchronize()
            found[path] = time.perf_counter() - start
        except (RuntimeError, ImportError, AttributeError, TypeError) as error:  # this torch or GPU lacks it
            print(f"{path.__name__} does not run here: {error}")
    model.zero_grad(set_to_none=True)
    if not found:
        raise ConfigError("neither way to run the experts works", "a GPU with bf16", "use --device cpu")
    best = min(found, key=found.__getitem__)
    print({path.__name__: f"{seconds / 4 * 1e3:.1f} ms a step" for path, seconds in found.items()}, best.__name__)
    for _, experts in expert_modules(model):
        experts.forward = partial(best, experts)


def loss_of(model: Any, tokens: torch.Tensor, *, balance: bool = True) -> torch.Tensor:
    """Next-token loss of int64 [batch, length], with the router's balancing loss if `balance`."""
    with torch.autocast("cuda", torch.bfloat16, enabled=tokens.is_cuda):
        return model(input_ids=tokens, labels=tokens, output_router_logits=balance, use_cache=False).loss


def random_windows(tokens: torch.Tensor, rows: int, length: int) -> torch.Tensor:
    """int64 [rows, length], on the device of `tokens`."""
    starts = torch.randint(len(tokens) - length, (rows, 1), device=tokens.device)
    return tokens[starts + torch.arange(length, device=tokens.device)].long()


def train(model: Any, tokens: torch.Tensor, validation: torch.Tensor, settings: Settings) -> dict[str, Any]:
    """AdamW, warm-up and cosine by steps or seconds, whichever ends first; leaves the best validated weights behind."""
    decayed = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
    others = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=settings.learning_rate, betas=(0.9, 0.95), fused=tokens.is_cuda)
    length = min(settings.seq_len, len(validation))
    fixed = validation[: len(validation) // length * length].view(-1, length)[:64].long().split(settings.batch_size)
    curve: list[dict[str, float]] = []
    best: tuple[float, int, dict[str, torch.Tensor]] = (math.inf, 0, {})
    start, step, progress, next_check, loss_value = time.perf_counter(), 0, 0.0, 0.05, math.nan
    bar = tqdm(total=settings.steps, desc="train")
    while progress < 1:
        rate = settings.learning_rate * min(1.0, (step + 1) / settings.warmup)
        for group in optimizer.param_groups:
            group["lr"] = rate * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * progress)))
        loss = loss_of(model, random_windows(tokens, settings.batch_size, settings.seq_len))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1
        bar.update()
        if step % 10 == 0:  # waits for the GPU, so the clock below is honest
            loss_value = loss.item()
            bar.set_postfix(loss=f"{loss_value:.3f}", validation=f"{best[0]:.3f}")
        progress = max(step / settings.steps, (time.perf_counter() - start) / settings.seconds)
        if progress >= min(next_check, 1.0):
            model.eval()
            with torch.no_grad():
                checked = sum(loss_of(model, rows, balance=False).item() * len(rows) for rows in fixed)
            model.train()
            checked /= sum(map(len, fixed))
            curve.append({"step": step, "loss": round(loss.item(), 4), "validation": round(checked, 4)})
            if checked < best[0]:
                best = checked, step, {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
            next_check = progress + 0.05
    bar.close()
    if not best[2]:
        raise ConfigError("the validation loss was never finite", "a training run that converges", "lower the rate")
    model.load_state_dict(best[2])
    model.eval()
    return {
        "steps": step,
        "tokens_seen": step * settings.batch_size * settings.seq_len,
        "seconds": round(time.perf_counter() - start, 1),
        "best": {"step": best[1], "validation_loss": best[0]},
        "curve": curve,
    }


def evaluate(bf16: Path, plain: Path, text: str, settings: Settings, device: str) -> dict[str, Any]:
    """Held-out perplexity under three numerics; all arithmetic around the rounding in question is fp32."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(plain, local_files_only=True)
    cases = {
        "bf16": lambda: load_fp32(bf16, device),
        "nvfp4_w4a16": lambda: load_fp32(plain, device),
        "nvfp4_w4a4": lambda: checkpoints.ReferenceModel(plain, w4a4=True, device=device).model,
    }
    found = {}
    for name, load in tqdm(cases.items(), desc="held-out perplexity"):
        found[name] = asdict(held_out_perplexity(load(), tokenizer, text, max_bytes=settings.eval_bytes))
    return found


def generate_sample(plain: Path, prompt: str, max_new_tokens: int) -> str:
    """Greedy continuation by transformers, fp32, weights dequantised."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(plain, local_files_only=True)
    tokens = tokenizer(prompt, return_tensors="pt", add_special_tokens=False).input_ids
    output = load_fp32(plain).generate(tokens, do_sample=False, max_new_tokens=max_new_tokens)
    return tokenizer.decode(output[0], skip_special_tokens=True)


if __name__ == "__main__":
    main()
