"""Held-out perplexity: every token scored once, and the figure against a direct computation."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from sglang_sm120.errors import ConfigError, ContractError
from sglang_sm120.testing.checkpoint_models import VOCAB_SIZE, byte_tokenizer, write_random_model
from sglang_sm120.testing.checkpoint_reference import load_fp32
from sglang_sm120.testing.perplexity import (
    HELD_OUT_MODULES,
    collect_held_out_text,
    held_out_perplexity,
    is_held_out,
)

TEXT = "def f(x):\n    return x  # <s> é\n" * 9


class Recorder:
    """A model whose next-token distribution depends on the current token alone."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.table = torch.randn(VOCAB_SIZE, VOCAB_SIZE, generator=torch.Generator().manual_seed(0))

    def __call__(self, input_ids, use_cache):
        return SimpleNamespace(logits=self.table[input_ids])


@pytest.mark.parametrize(("window", "stride"), [(512, 256), (64, 64), (64, 7), (50, 49), (1, 1)])
def test_each_token_counts_once_whatever_the_windows(window, stride):
    model, tokenizer = Recorder(), byte_tokenizer()
    ids = [2, *tokenizer(TEXT, add_special_tokens=False, split_special_tokens=True).input_ids]
    assert len(ids) == 1 + len(TEXT.encode())  # the "<s>" in the text is three characters, not a special token
    logprobs = model.table.log_softmax(-1)
    total = -sum(float(logprobs[a, b]) for a, b in pairwise(ids))
    found = held_out_perplexity(model, tokenizer, TEXT, window=window, stride=stride, batch_size=3)
    assert (found.num_tokens, found.num_bytes) == (len(ids) - 1, len(TEXT.encode()))
    assert found.perplexity == pytest.approx(math.exp(total / (len(ids) - 1)), rel=1e-4)
    assert found.bits_per_byte == pytest.approx(total / math.log(2) / len(TEXT.encode()), rel=1e-4)


def test_context_is_what_the_window_allows(tmp_path):
    model, tokenizer = load_fp32(write_random_model(tmp_path / "model", "qwen3_moe")), byte_tokenizer()
    ids = [2, *tokenizer(TEXT[:100], add_special_tokens=False, split_special_tokens=True).input_ids]
    with torch.inference_mode():
        logprobs = model(input_ids=torch.tensor([ids[:-1]])).logits[0].log_softmax(-1)
    total = -float(logprobs.gather(1, torch.tensor(ids[1:])[:, None]).sum())
    whole = held_out_perplexity(model, tokenizer, TEXT[:100], window=512, stride=512)
    assert whole.perplexity == pytest.approx(math.exp(total / (len(ids) - 1)), rel=1e-4)
    assert held_out_perplexity(model, tokenizer, TEXT[:100], window=8, stride=8) != whole


def test_only_the_first_bytes_and_no_broken_character():
    text = "é" * 50
    found = held_out_perplexity(Recorder(), byte_tokenizer(), text, max_bytes=21)
    assert found.num_bytes == 20


def test_wrong_arguments():
    with pytest.raises(ContractError, match="stride=600"):
        held_out_perplexity(Recorder(), byte_tokenizer(), TEXT, stride=600)
    with pytest.raises(ContractError, match="no tokens"):
        held_out_perplexity(Recorder(), byte_tokenizer(), "")


def test_held_out_modules_are_found_and_recognised(tmp_path):
    text = collect_held_out_text()
    assert "def heappush" in text and "class TopologicalSorter" in text and len(text) > 200_000
    for path in ("heapq.py", "test/test_csv.py", "test/test_dataclasses/__init__.py", "lib/_csv.py"):
        assert is_held_out(Path(path)), path
    for path in ("heap.py", "test/test_csvs.py", "json/decoder.py", "csv2/x.py"):
        assert not is_held_out(Path(path)), path
    (tmp_path / f"{HELD_OUT_MODULES[0]}.py").write_text("x = 1\n")
    with pytest.raises(ConfigError, match=r"csv\.py"):
        collect_held_out_text(tmp_path)
