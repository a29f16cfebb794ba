"""More context, requests or chunk never need less memory; more memory never holds fewer tokens; sums add up."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_sm120.plan import catalogue
from sglang_sm120.plan.memory import (
    Serving,
    Split,
    fixed,
    kv_bytes_per_token,
    kv_tokens,
    problems,
    suggested_mem_fraction,
)
from sglang_sm120.plan.shapes import read_shape

GIB = 1024**3
PRO_6000 = int(94.97 * GIB)
SERVING = Serving(131072, 2, 8192, "bfloat16", False, (1, 2), True, True)

SPLITS = [Split(8), Split(8, ep=8), Split(8, dp_attention=8), Split(8, ep=8, dp_attention=2), Split(4, pp=2), Split(1)]


@settings(max_examples=150, deadline=None)
@given(
    name=st.sampled_from(catalogue.names()), index=st.integers(0, len(SPLITS) - 1), context=st.integers(1, 200_000),
    more_context=st.integers(0, 200_000), requests=st.integers(1, 100_000), more=st.integers(0, 2000),
    chunk=st.sampled_from([2048, 4096, 8192]), kv_dtype=st.sampled_from(["bfloat16", "fp8_e4m3"]), mtp=st.booleans(),
)  # fmt: skip
def test_more_never_needs_less(
    name: str,
    index: int,
    context: int,
    more_context: int,
    requests: int,
    more: int,
    chunk: int,
    kv_dtype: str,
    mtp: bool,
) -> None:
    shape, split = read_shape(name), SPLITS[index]
    if problems(shape, split):
        return

    def parts(context: int, requests: int, chunk: int = chunk) -> int:
        rows = tuple(range(1, min(requests, 256) + 1))
        serving = Serving(context, requests, chunk, kv_dtype, mtp, rows, True, True)
        found = fixed(shape, split, serving)
        assert all(isinstance(part.bytes, int) and part.bytes > 0 and part.detail for part in found)
        assert len({part.name for part in found}) == len(found)
        held = sum(part.bytes for part in found)
        if kv_tokens(shape, split, serving, PRO_6000):
            taken = kv_tokens(shape, split, serving, PRO_6000) * kv_bytes_per_token(shape, split, kv_dtype, mtp=mtp)
            assert held + taken <= PRO_6000
        return held + context * requests * kv_bytes_per_token(shape, split, kv_dtype)

    least = parts(context, requests)
    assert least <= parts(context + more_context, requests)
    assert least <= parts(context, requests + more)
    assert least <= parts(context, requests, 2 * chunk)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(catalogue.names()), st.integers(1, 200), st.floats(0.05, 0.99), st.floats(0, 0.5))
def test_more_memory_or_a_larger_fraction_never_holds_fewer_tokens(
    name: str, size_gib: int, fraction: float, more: float
) -> None:
    shape = read_shape(name)
    if problems(shape, Split(4)):
        return
    tokens = kv_tokens(shape, Split(4), SERVING, size_gib * GIB, fraction)
    assert tokens >= 0
    assert kv_tokens(shape, Split(4), SERVING, (size_gib + 3) * GIB, fraction) >= tokens
    assert kv_tokens(shape, Split(4), SERVING, size_gib * GIB, min(fraction + more, 1)) >= tokens
    assert 0 < suggested_mem_fraction(shape, Split(4), SERVING, size_gib * GIB) < 1
