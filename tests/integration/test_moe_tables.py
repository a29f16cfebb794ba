"""Where a layer's table comes from: a name, this machine's profile, or the shipped default; what is struck at once."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path

import pytest
import torch

from sglang_sm120.bench.moe_cases import random_weights
from sglang_sm120.bench.options import ModelShape
from sglang_sm120.errors import ConfigError
from sglang_sm120.integration.moe_tables import Tables
from sglang_sm120.kernels.moe.layer import MoeActivation
from sglang_sm120.options import Sm120Options
from sglang_sm120.runners import profile as profiles
from sglang_sm120.runners.base import Choice, LayerSpec

WEIGHTS = random_weights(ModelShape("test", 4, 2, 256, 128), torch.device("cpu"), torch.Generator().manual_seed(0))
SPEC = LayerSpec(MoeActivation("silu"), torch.float16, top_k=2)
ON = Sm120Options(enable_sm120_opts=True)
NATIVE, STOCK = Choice("native", "w4a16"), Choice("flashinfer_cutlass", "w4a4")


@pytest.fixture(autouse=True)
def no_profile_of_this_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    path = tmp_path / "default.json"
    monkeypatch.setattr(profiles, "default_path", lambda: path)
    return path


def table_of(options: Sm120Options, weights=WEIGHTS, spec=SPEC):
    return Tables(options, max_tokens=2048).of("layer", weights, spec)


def write(path: Path, *times: tuple[int, str, str, float], machine: dict | None = None, hidden: int = 256) -> None:
    here = profiles.current_machine()
    values = {name: getattr(here, name) for name in here.__struct_fields__} | (machine or {})
    points: dict[int, list[profiles.Candidate]] = {}
    for tokens, runner, numerics, us in times:
        points.setdefault(tokens, []).append(profiles.Candidate(runner=runner, numerics=numerics, samples_us=[us]))
    shape = dataclasses_replace(profiles.shape_of(WEIGHTS, SPEC), hidden_size=hidden)
    layer = profiles.Layer(shape=shape, points=[profiles.Point(tokens=n, candidates=c) for n, c in points.items()])
    profiles.write(
        profiles.Profile(
            format=profiles.FORMAT, created="now", command="", machine=profiles.Machine(**values), layers=[layer]
        ),
        path,
    )


def dataclasses_replace(shape: profiles.Shape, **changes) -> profiles.Shape:
    return profiles.Shape(**({name: getattr(shape, name) for name in shape.__struct_fields__} | changes))


def test_by_name() -> None:
    for name, numerics, want in (
        ("native", "auto", "w4a16"),
        ("native", "w4a4", "w4a4"),
        ("reference", "auto", "w4a4"),
        ("reference", "w4a16", "w4a16"),
        ("flashinfer_cutlass", "auto", "w4a4"),
    ):
        options = dataclasses.replace(ON, sm120_moe_backend=name, sm120_moe_numerics=numerics)
        assert table_of(options).choices() == (Choice(name, want),)
    unscaled = dataclasses.replace(WEIGHTS, w13_input_scale=torch.tensor(0.0))
    assert table_of(dataclasses.replace(ON, sm120_moe_backend="reference"), unscaled).choices()[0].numerics == "w4a16"
    with pytest.raises(ConfigError, match="activation scale of w13 is 0"):
        table_of(dataclasses.replace(ON, sm120_moe_numerics="w4a4"), unscaled)


def test_the_profile_that_is_there_decides(no_profile_of_this_machine: Path) -> None:
    write(no_profile_of_this_machine, (1, "native", "w4a16", 1.0), (1, "flashinfer_cutlass", "w4a4", 2.0),
          (100, "native", "w4a16", 3.0), (100, "flashinfer_cutlass", "w4a4", 2.0))  # fmt: skip
    table = table_of(ON)
    assert table.ranking(10) == (NATIVE, STOCK) and table.ranking(11) == (STOCK, NATIVE)
    assert str(no_profile_of_this_machine) in table.source
    only_w4a16 = table_of(dataclasses.replace(ON, sm120_moe_numerics="w4a16"))
    assert only_w4a16.ranking(5000) == (NATIVE,)
    by_name = table_of(dataclasses.replace(ON, sm120_moe_backend="reference"))
    assert by_name.choices()[0].runner == "reference", "a name is stronger"


@pytest.mark.parametrize(
    ("machine", "hidden", "says"),
    [
        ({"gpu": "another"}, 256, "was measured elsewhere: gpu another"),
        ({"torch": "1.0"}, 256, "torch 1.0"),
        ({}, 512, "has no layer of this shape"),
    ],
)
def test_a_profile_that_does_not_fit(machine, hidden, says, tmp_path, no_profile_of_this_machine, caplog) -> None:
    """By name it stops the server; the one that lies there is left alone, with a line."""
    write(no_profile_of_this_machine, (1, "reference", "w4a4", 1.0), machine=machine, hidden=hidden)
    with pytest.raises(ConfigError, match=says):
        table_of(dataclasses.replace(ON, sm120_moe_profile=str(no_profile_of_this_machine)))
    with caplog.at_level(logging.INFO):
        table = table_of(ON)
    assert says in caplog.text and "shipped default" in table.source


def test_a_damaged_or_missing_file_that_was_named(tmp_path: Path) -> None:
    damaged = tmp_path / "damaged.json"
    damaged.write_text('{"format": 3')
    for path, says in ((damaged, "damaged.json"), (tmp_path / "none.json", "No such file")):
        with pytest.raises(ConfigError, match=says):
            table_of(dataclasses.replace(ON, sm120_moe_profile=str(path)))


def test_what_cannot_serve_is_struck_with_its_reason(no_profile_of_this_machine: Path) -> None:
    """A runner that does not exist, one in numerics that it has not, one that does not cover the layer."""
    write(no_profile_of_this_machine, (1, "marlin", "w4a16", 1.0), (1, "flashinfer_cutlass", "w4a16", 1.5),
          (1, "native", "w4a16", 2.0), (1, "flashinfer_cutlass", "w4a4", 3.0))  # fmt: skip
    relu2 = dataclasses.replace(SPEC, activation=MoeActivation("silu", limit=7.0, alpha=1.7))
    table = table_of(ON)
    assert table.ranking(1) == (NATIVE, STOCK)
    assert table.struck[Choice("marlin", "w4a16")] == "there is no such runner"
    strided = dataclasses.replace(WEIGHTS, w2_weight=WEIGHTS.w2_weight.mT.contiguous().mT)
    table = table_of(ON, strided)
    assert table.ranking(1) == (STOCK,) and "strides" in table.struck[NATIVE]
    assert table_of(ON, WEIGHTS, relu2).ranking(1) == (NATIVE, STOCK)


def test_under_emulation_the_stock_path_is_struck(no_profile_of_this_machine: Path) -> None:
    write(no_profile_of_this_machine, (1, "flashinfer_cutlass", "w4a4", 1.0), (1, "native", "w4a16", 2.0))
    table = table_of(dataclasses.replace(ON, sm120_emulate=True))
    assert table.ranking(1) == (NATIVE,) and "cannot be emulated" in table.struck[STOCK]
    write(no_profile_of_this_machine, (1, "flashinfer_cutlass", "w4a4", 1.0))
    assert "cannot be emulated" in table_of(dataclasses.replace(ON, sm120_emulate=True))
