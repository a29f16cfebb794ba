"""The choices of fused_moe, decode and middle against the times that they are based on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sglang_sm120.kernels.moe.fused_moe import api, config
from sglang_sm120.kernels.moe.grouped_gemm_middle.api import DEFAULT_ORDER
from sglang_sm120.kernels.moe.w4a16 import LayerShape

FILE = Path(api.__file__).with_name("measured_h200.json")
MEASURED = json.loads(FILE.read_text())
LAYER = MEASURED["layer"]
SHAPE = LayerShape(LAYER["num_experts"], LAYER["hidden_size"], LAYER["intermediate_size"], True)
TOKENS = sorted({row["tokens"] for row in MEASURED["times"]})


def times(tokens: int, **which: str) -> list[dict]:
    rows = [row for row in MEASURED["times"] if row["tokens"] == tokens and which.items() <= row.items()]
    assert all(0 < row["min_us"] <= row["median_us"] <= row["max_us"] for row in rows)
    return rows


def test_it_says_where_it_comes_from() -> None:
    assert len(MEASURED["times"]) > 30 and len(TOKENS) >= 7
    assert {"gpu", "driver", "torch", "triton"} <= MEASURED["machine"].keys()
    assert "bench moe --model" in MEASURED["evidence"]


@pytest.mark.parametrize("tokens", TOKENS)
def test_the_backend_is_the_fastest_measured_one(tokens: int) -> None:
    first = config.choose_backend(SHAPE, tokens * LAYER["top_k"], "w4a16")[0]
    fastest = min(times(tokens), key=lambda row: row["median_us"])
    chosen = min(times(tokens, backend=first), key=lambda row: row["median_us"])
    assert chosen["median_us"] == fastest["median_us"], (chosen, fastest)


@pytest.mark.parametrize("tokens", [count for count in TOKENS if count >= 256])
def test_the_order_of_middle_is_not_the_slower_one(tokens: int) -> None:
    (default,) = times(tokens, backend="middle", order=DEFAULT_ORDER)
    (other,) = (row for row in times(tokens, backend="middle") if row["order"] != DEFAULT_ORDER)
    assert default["median_us"] <= other["max_us"], "within the spread at least"
