"""Tables of runners: which row a batch falls into, what striking does, and the shipped defaults, pinned."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_sm120.runners.base import Choice
from sglang_sm120.runners.table import NATIVE_TOKENS, Row, RunnerTable, only, shipped_default

NATIVE, STOCK, REFERENCE = Choice("native", "w4a16"), Choice("flashinfer_cutlass", "w4a4"), Choice("reference", "w4a4")


@given(bounds=st.lists(st.integers(1, 9000), unique=True, min_size=1, max_size=8), tokens=st.integers(0, 10_000))
def test_a_batch_falls_into_the_first_row_that_reaches_it(bounds: list[int], tokens: int) -> None:
    bounds = sorted(bounds)
    rows = tuple(Row(bound, (Choice(f"r{bound}", "w4a16"),)) for bound in bounds)
    table = RunnerTable((*rows, Row(None, (STOCK,))), "test")
    reached = [bound for bound in bounds if tokens <= bound]
    assert table.ranking(tokens) == ((Choice(f"r{reached[0]}", "w4a16") if reached else STOCK),)


@pytest.mark.parametrize(
    "rows",
    [
        (),
        (Row(4, (NATIVE,)),),
        (Row(None, (NATIVE,)), Row(None, (STOCK,))),
        (Row(8, (NATIVE,)), Row(4, (STOCK,)), Row(None, (STOCK,))),
        (Row(4, ()), Row(None, (STOCK,))),
    ],
)
def test_rows_that_make_no_table(rows) -> None:
    with pytest.raises(ValueError, match="rows of a table"):
        RunnerTable(rows, "test")


def test_striking() -> None:
    table = RunnerTable((Row(4, (NATIVE, STOCK)), Row(None, (STOCK, NATIVE))), "test")
    assert table.describe() == "native w4a16 up to 4 tokens, flashinfer_cutlass w4a4 above"
    table.strike(STOCK, "wrong")
    assert table.ranking(4) == table.ranking(5) == (NATIVE,)
    assert table.describe() == "native w4a16 for every batch"
    assert table.choices() == (NATIVE,)
    table.strike(NATIVE, "wrong as well")
    assert table.ranking(1) == table.choices() == ()
    assert table.struck == {STOCK: "wrong", NATIVE: "wrong as well"}


def test_the_shipped_defaults() -> None:
    def default(**values):
        table = shipped_default(**({"is_sm120": True, "numerics": "auto", "native": True} | values))
        assert "shipped default" in table.source
        return table.ranking(1), table.ranking(NATIVE_TOKENS), table.ranking(NATIVE_TOKENS + 1)

    few, many = (NATIVE, STOCK, REFERENCE), (STOCK, NATIVE, REFERENCE)
    assert default() == (few, few, many)
    assert default(native=False) == ((STOCK, REFERENCE),) * 3
    native4, reference16 = Choice("native", "w4a4"), Choice("reference", "w4a16")
    assert default(numerics="w4a4") == ((STOCK, native4, REFERENCE),) * 3
    assert default(numerics="w4a16") == ((NATIVE, reference16),) * 3
    assert default(numerics="w4a16", native=False) == ((reference16,),) * 3
    assert default(is_sm120=False) == ((NATIVE, REFERENCE),) * 3
    assert default(is_sm120=False, native=False) == ((REFERENCE,),) * 3
    assert "not measured on SM120" in shipped_default(is_sm120=True, numerics="auto", native=True).source


def test_only() -> None:
    table = only([STOCK, NATIVE], "by name")
    assert table.ranking(0) == table.ranking(10**6) == (STOCK, NATIVE)
