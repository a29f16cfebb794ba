"""The command line of `plan`: what is taken, and what is refused with one error."""

from __future__ import annotations

import argparse

import pytest

from sglang_sm120.errors import ConfigError
from sglang_sm120.plan.options import PlanOptions, add_plan_arguments, plan_options, tokens


def parsed(*words: str) -> PlanOptions:
    parser = argparse.ArgumentParser()
    add_plan_arguments(parser)
    return plan_options(parser.parse_args(words))


def test_defaults() -> None:
    options = parsed("glm-5-nvfp4")
    assert (options.gpus, options.nodes, options.gpu, options.context) == (8, 1, "rtx-pro-6000", None)
    assert (options.concurrency, options.kv_dtype, options.mtp) == ((1, 2, 10, 1000), "auto", False)


def test_with_detect_the_number_of_gpus_is_found_too() -> None:
    assert parsed("m", "--gpu", "detect").gpus is None
    assert parsed("m", "--gpu", "detect", "--gpus", "4").gpus == 4


@pytest.mark.parametrize(
    ("text", "value"), [("1", 1), ("131072", 131072), ("128k", 131072), ("128K", 131072), ("1m", 1024 * 1024)]
)
def test_tokens(text: str, value: int) -> None:
    assert tokens("--context", text) == value


def test_concurrencies_are_sorted_and_unique() -> None:
    assert parsed("m", "--concurrency", "10, 1,10,2").concurrency == (1, 2, 10)


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("m", "--gpus", "0"),
        ("m", "--gpus", "-1"),
        ("m", "--gpus", "1000000000"),
        ("m", "--gpus", "8.5"),
        ("m", "--gpus", "96GiB"),
        ("m", "--gpus", "9" * 5000),
        ("m", "--gpus", "\u0663"),
        ("m", "--nodes", "0"),
        ("m", "--nodes", "many"),
        ("m", "--context", "0"),
        ("m", "--context", "3x"),
        ("m", "--context", "-5"),
        ("m", "--context", "1000000000000"),
        ("m", "--context", ""),
        ("m", "--concurrency", ""),
        ("m", "--concurrency", "1,,2"),
        ("m", "--concurrency", "0"),
        ("m", "--concurrency", "1,1000000000"),
        ("m", "--concurrency", ",".join(map(str, range(1, 50)))),
        ("m", "--kv-dtype", "fp4"),
    ],
)
def test_absurd_values_are_one_clear_error(words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as error:
        parsed(*words)
    assert error.value.found
    assert error.value.needed
    assert error.value.fix
    assert len(str(error.value)) < 400


def test_mtp_and_no_mtp_exclude_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    assert parsed("m", "--mtp").mtp is True
    with pytest.raises(SystemExit) as stopped:
        parsed("m", "--mtp", "--no-mtp")
    assert stopped.value.code == 2
    assert "not allowed with" in capsys.readouterr().err
