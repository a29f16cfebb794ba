"""The trained model that comes with the package: its size, its quality, and the demonstration that serves it."""

from __future__ import annotations

import json
from pathlib import Path

import psutil
import pytest

from sglang_sm120 import demo
from sglang_sm120.testing.checkpoints import ReferenceModel, dequantize_checkpoint
from sglang_sm120.testing.perplexity import collect_held_out_text, held_out_perplexity
from tests.e2e.conftest import ON_GPU

METRICS = json.loads((demo.MODEL / "metrics.json").read_text())


def test_it_is_small() -> None:
    files = [file for file in demo.MODEL.rglob("*") if file.is_file()]
    assert len(files) > 5
    assert sum(file.stat().st_size for file in files) <= 8_000_000


@pytest.mark.parametrize("numerics", ["w4a16", "w4a4"])
def test_its_perplexity_is_the_one_on_its_card(numerics: str, tmp_path: Path) -> None:
    """The held-out modules of this machine's Python, of which the card's are some version."""
    import hashlib

    from transformers import AutoTokenizer

    plain = dequantize_checkpoint(demo.MODEL, tmp_path / "plain")
    reference = ReferenceModel(plain, w4a4=numerics == "w4a4")
    text = collect_held_out_text()
    found = held_out_perplexity(reference.model, AutoTokenizer.from_pretrained(demo.MODEL), text, max_bytes=20_000)
    card = METRICS["held_out_quality"][f"nvfp4_{numerics}"]["bits_per_byte"]
    same_text = hashlib.sha256(text.encode()).hexdigest() == METRICS["held_out_text"]["sha256"]
    # A tenth of the card's text, and on another Python another text: its own spread, far from a broken model's 3 bits.
    assert abs(found.bits_per_byte - card) < (0.15 if same_text else 0.3), (found, card, same_text)


@pytest.mark.e2e
def test_the_demonstration(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    assert demo.run(new_tokens=12, log=str(log)) == 0
    out = capfd.readouterr().out
    assert f"MoE runners of 4 of 4 layers of the model: {'native' if ON_GPU else 'reference'} w4a16" in out
    assert "every token is right" in out
    assert "def binary_search(items, target):" in out
    assert "MoE runners of 4 of 4" in log.read_text()
    leftovers = [p.name() for p in psutil.Process().children(recursive=True) if "sglang" in " ".join(p.cmdline())]
    assert not leftovers


def test_a_wrong_token_is_counted_as_wrong() -> None:
    class Score:
        def __init__(self, argmax: int, gap: float) -> None:
            self.argmax, self.argmax_logprob, self.logprob = argmax, -0.1, -0.1 - gap

    class Reference:
        def score(self, prompt: list[int], tokens: list[int]) -> list[Score]:
            return [Score(1, 0.0), Score(7, demo.NEAR_TIE_NATS / 2), Score(7, demo.NEAR_TIE_NATS * 2)]

    one = demo.Round([[5]], [{"output_ids": [1, 2, 3]}], 1.0)
    assert demo.check_round(one, Reference()) == demo.Check(equal=1, near_ties=1, wrong=1)
