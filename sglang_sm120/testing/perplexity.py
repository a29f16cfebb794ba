"""Perplexity of a causal language model on parts of the Python standard library kept out of the demo's training."""

from __future__ import annotations

import math
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sglang_sm120.errors import ConfigError, ContractError

HELD_OUT_MODULES = (
    "bisect",
    "csv",
    "dataclasses",
    "difflib",
    "graphlib",
    "heapq",
    "shlex",
    "statistics",
    "textwrap",
    "zipapp",
)
"""Modules that the demo model never saw, neither themselves nor their tests."""


@dataclass(frozen=True)
class Perplexity:
    """Result of `held_out_perplexity`."""

    perplexity: float
    """exp of the mean negative log-probability of a token."""
    bits_per_byte: float
    """The same sum, in bits, over the bytes of the text: comparable between tokenizers."""
    num_tokens: int
    num_bytes: int


def is_held_out(path: Path) -> bool:
    """Say whether a path below the library's root belongs to a held-out module: `csv.py`, `test/test_csv.py`, ..."""
    return any(Path(part).stem.removeprefix("test_").removeprefix("_") in HELD_OUT_MODULES for part in path.parts)


def collect_held_out_text(text_root: Path | None = None) -> str:
    """Return the sources of the held-out modules (without their tests), joined by a blank line.

    Args:
        text_root: directory with the library's .py files; default: this interpreter's standard library.

    Raises:
        ConfigError: a module is missing there.
    """
    root = Path(text_root or sysconfig.get_path("stdlib"))
    missing = [name for name in HELD_OUT_MODULES if not (root / f"{name}.py").is_file()]
    if missing:
        raise ConfigError(
            f"{root} has no {missing[0]}.py", "the standard library's sources", "name its directory as text_root"
        )
    return "\n".join((root / f"{name}.py").read_text(encoding="utf-8") for name in HELD_OUT_MODULES)


@torch.inference_mode()
def held_out_perplexity(
    model: Any,
    tokenizer: Any,
    text: str,
    *,
    max_bytes: int = 200_000,
    window: int = 512,
    stride: int = 256,
    batch_size: int = 8,
) -> Perplexity:
    """Measure perplexity with overlapping windows: each token is scored once, after at least `window - stride` others.

    Args:
        model: causal language model of transformers (`model(input_ids).logits`, `model.device`).
        tokenizer: of transformers; its end-of-text token starts the text, so that every token of it is scored.
        text: any text; only the first `max_bytes` UTF-8 bytes are used.
        max_bytes, window, stride, batch_size: stride <= window; the window counts tokens.

    Returns:
        A `Perplexity`.
    """
    if not 0 < stride <= window:
        raise ContractError(f"stride={stride}, window={window}", "0 < stride <= window", "use a smaller stride")
    text = text.encode()[:max_bytes].decode(errors="ignore")
    ids = tokenizer(text, add_special_tokens=False, split_special_tokens=True).input_ids
    if not ids:
        raise ContractError("the text has no tokens", "some text", "pass a longer text")
    tokens = torch.tensor([tokenizer.eos_token_id, *ids], device=model.device)
    negative_log_likelihood = 0.0
    for inputs, targets in _batches(tokens, window, stride, batch_size):
        logits = model(input_ids=inputs, use_cache=False).logits.float()
        loss = torch.nn.functional.cross_entropy(logits.transpose(1, 2), targets, ignore_index=-100, reduction="sum")
        negative_log_likelihood += loss.item()
    num_bytes = len(text.encode())
    return Perplexity(
        perplexity=math.exp(negative_log_likelihood / len(ids)),
        bits_per_byte=negative_log_likelihood / math.log(2) / num_bytes,
        num_tokens=len(ids),
        num_bytes=num_bytes,
    )


def _batches(
    tokens: torch.Tensor, window: int, stride: int, batch_size: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield (inputs, targets) int64 [batch, window]; targets that an earlier window scored, and padding, are -100."""
    rows, scored, last = [], 0, len(tokens) - 1  # positions 0 .. last - 1 predict tokens 1 .. last
    start = 0
    while scored < last:
        end = min(start + window, last)
        inputs = tokens.new_zeros(window)
        targets = tokens.new_full((window,), -100)
        inputs[: end - start] = tokens[start:end]
        targets[scored - start : end - start] = tokens[scored + 1 : end + 1]
        rows.append((inputs, targets))
        scored, start = end, start + stride
    for i in range(0, len(rows), batch_size):
        inputs_rows, targets_rows = zip(*rows[i : i + batch_size], strict=True)
        yield torch.stack(inputs_rows), torch.stack(targets_rows)
