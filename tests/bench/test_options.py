"""The command line of `sglang-sm120 bench moe`."""

from __future__ import annotations

import argparse

import pytest

from sglang_sm120.bench import moe
from sglang_sm120.bench.options import MODELS, TOKENS, ModelShape, MoeBenchOptions, model_shape
from sglang_sm120.cli import main


def parse(*arguments: str) -> MoeBenchOptions:
    """What the command line comes to, without running it."""
    seen: list[MoeBenchOptions] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(moe, "run", lambda options: seen.append(options) or 0)
        assert main(["bench", "moe", *arguments]) == 0
    return seen[0]


def test_defaults() -> None:
    options = parse()
    assert options == MoeBenchOptions(models=tuple(MODELS.values()))
    assert options.tokens == TOKENS
    assert options.baseline == "none"


def test_all_options() -> None:
    options = parse(
        "--model", "glm5-tp8", "16,4,1024,256", "--tokens", "1,256", "--routing", "zipf,uniform", "--numerics", "w4a4",
        "--backends", "auto,prefill", "--order", "row_major", "--baseline", "marlin", "--repeat", "11", "--json", "j",
        "--plot", "p.png", "--markdown", "--seed", "3",
    )  # fmt: skip
    assert options.models == (MODELS["glm5-tp8"], ModelShape("16,4,1024,256", 16, 4, 1024, 256))
    assert (options.tokens, options.routings, options.numerics) == ((1, 256), ("zipf", "uniform"), ("w4a4",))
    assert (options.backends, options.orders, options.repeat) == (("auto", "prefill"), ("row_major",), 11)
    assert options.baseline == "sglang_sm120.integration.marlin_baseline:prepare"
    assert (options.json, options.plot, options.markdown, options.seed) == ("j", "p.png", True, 3)


@pytest.mark.parametrize(
    "arguments",
    [
        ("--model", "glm6"), ("--model", "8,2,256"), ("--model", "2,8,256,128"), ("--tokens", "0"), ("--tokens", "a"),
        ("--routing", "even"), ("--numerics", "w8a8"), ("--backends", "auto,fast"), ("--order", "diagonal"),
        ("--repeat", "6"), ("--baseline", "unknown"), ("--baseline", "module:not a name"),
    ],
)  # fmt: skip
def test_a_wrong_option_is_refused_and_named(arguments: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(*arguments)
    assert arguments[0] in capsys.readouterr().err


def test_model_shape_says_what_it_takes() -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="E,k,H,I"):
        model_shape("1,2")
