"""The sum of every token's slots: plain torch and the kernel, built for the host, against a loop in numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from slots_oracle import bits

from sglang_sm120.errors import ContractError, UnsupportedError
from sglang_sm120.kernels.cuda.module import load
from sglang_sm120.kernels.moe.sum_slots import kernel
from sglang_sm120.kernels.moe.sum_slots.api import sum_slots, unsupported_reason

NAN = float("nan")
IMPLEMENTATIONS = ["reference", "kernel"]
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

pytestmark = pytest.mark.usefixtures("poisoned_memory")


def oracle(slots: torch.Tensor, ids: torch.Tensor, experts: int, offset: int = 0) -> torch.Tensor:
    """np.float32, one slot after the other, rounded once."""
    values, out = slots.float().cpu().numpy(), np.zeros((ids.shape[0], slots.shape[1]), np.float32)
    for token, row in enumerate(ids.tolist()):
        for choice, expert in enumerate(row):
            if offset <= expert < offset + experts:
                out[token] += values[token * len(row) + choice]
    return torch.from_numpy(out).to(slots.dtype)


def problem(tokens: int, top_k: int, hidden: int, dtype: torch.dtype, *, experts: int = 16, offset: int = 0):
    """Slots and ids, of which a third is another rank's or skipped; their slots are NaN."""
    generator = torch.Generator().manual_seed(tokens * 100 + top_k)
    slots = torch.randn(tokens * top_k, hidden, generator=generator)
    slots *= 4.0 ** torch.randint(-6, 7, (tokens * top_k, 1), generator=generator)  # so that the order shows
    ids = torch.randint(offset - experts // 4, offset + experts * 5 // 4, (tokens, top_k), generator=generator)
    ids[(ids < 0) | (torch.rand(ids.shape, generator=generator) < 0.1)] = -1
    skipped = ((ids < offset) | (ids >= offset + experts)).reshape(-1)
    slots[skipped] = NAN
    return slots.to(dtype), ids


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("top_k", [1, 4, 8, 10, 17])
@pytest.mark.parametrize("tokens", [0, 1, 7, 65])
def test_matches_the_oracle(tokens, top_k, dtype, implementation):
    for hidden, offset in ((8, 0), (160, 0), (1600, 48)):
        slots, ids = problem(tokens, top_k, hidden, dtype, offset=offset)
        for wide in (ids.int(), ids.long()):
            got = sum_slots(slots, wide, num_experts=16, expert_offset=offset, implementation=implementation)
            assert got.shape == (tokens, hidden) and got.dtype == dtype
            assert torch.equal(got, oracle(slots, ids, 16, offset))


def test_order_matters_in_these_problems():
    slots, ids = problem(65, 10, 160, torch.bfloat16)
    turned = slots.unflatten(0, (65, 10)).flip(1).flatten(0, 1).contiguous()
    assert not torch.equal(oracle(slots, ids, 16), oracle(turned, ids.flip(1), 16))


@pytest.mark.parametrize("tokens", [1, 65])
def test_the_reference_covers_what_the_kernel_does_not(tokens):
    for dtype, hidden in ((torch.float32, 160), (torch.bfloat16, 20)):
        slots, ids = problem(tokens, 4, hidden, dtype)
        assert torch.equal(sum_slots(slots, ids, num_experts=16), oracle(slots, ids, 16))
        assert unsupported_reason(hidden_size=hidden, dtype=dtype)
        with pytest.raises(UnsupportedError):
            sum_slots(slots, ids, num_experts=16, implementation="kernel")
    assert unsupported_reason(hidden_size=160, dtype=torch.float16) is None


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_skipped_tokens_are_zero(implementation):
    slots = torch.full((12, 64), NAN, dtype=torch.bfloat16)
    got = sum_slots(slots, torch.full((3, 4), -1), num_experts=8, implementation=implementation)
    assert torch.equal(bits(got), torch.zeros(3, 64, dtype=torch.int16))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_ids_at_the_edge_of_int64_are_skipped(implementation):
    """2**32 + 3 must not be taken for 3."""
    ids = torch.tensor([[2**63 - 1, -(2**63), 2**32 + 3, -(2**32) + 3, 8, 3, -1, 2**31, -(2**31), 0]])
    slots = torch.arange(10).repeat_interleave(8).reshape(10, 8).to(torch.float16) + 1
    assert (sum_slots(slots, ids, num_experts=8, implementation=implementation) == 6 + 10).all()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_nan_and_infinity_stay_in_their_element(implementation):
    slots, ids = torch.ones(6, 64, dtype=torch.bfloat16), torch.zeros(3, 2, dtype=torch.int32)
    slots[2, 5], slots[3, 6], slots[2, 7], slots[3, 7] = NAN, float("inf"), float("inf"), -float("inf")
    want = torch.full((3, 64), 2.0, dtype=torch.bfloat16)
    want[1, 5:8] = torch.tensor([NAN, float("inf"), NAN])
    got = sum_slots(slots, ids, num_experts=1, implementation=implementation)
    assert torch.equal(got.nan_to_num(nan=-1), want.nan_to_num(nan=-1))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_ids_of_any_strides(implementation):
    slots, ids = problem(7, 4, 64, torch.bfloat16)
    wide = torch.full((7, 9), 3)
    wide[:, 1::2] = ids
    for view in (wide[:, 1::2], ids.T.contiguous().T):
        got = sum_slots(slots, view, num_experts=16, implementation=implementation)
        assert torch.equal(got, oracle(slots, ids, 16))


def test_threads_in_descending_order_give_the_same(monkeypatch):
    slots, ids = problem(65, 10, 160, torch.bfloat16)
    monkeypatch.setattr(kernel, "load", lambda source, device: load(source, device, ("SM120_HOST_REVERSE",)))
    assert torch.equal(sum_slots(slots, ids, num_experts=16, implementation="kernel"), oracle(slots, ids, 16))


def test_unless_asked_the_cpu_uses_the_reference(monkeypatch):
    monkeypatch.setattr(kernel, "load", None)
    slots, ids = problem(7, 4, 64, torch.bfloat16)
    sum_slots(slots, ids, num_experts=16)
    with pytest.raises(TypeError):
        sum_slots(slots, ids, num_experts=16, implementation="kernel")


@pytest.mark.parametrize(
    ("slots", "ids"),
    [
        (torch.zeros(7, 64), torch.zeros(4, 2)),
        (torch.zeros(8, 2, 64), torch.zeros(4, 2)),
        (torch.zeros(8, 64), torch.zeros(8)),
        (torch.zeros(64, 8).T, torch.zeros(4, 2)),
    ],
)
def test_a_broken_contract_raises(slots, ids):
    with pytest.raises(ContractError) as error:
        sum_slots(slots.bfloat16(), ids.int(), num_experts=8)
    assert all((error.value.found, error.value.needed, error.value.fix))


@needs_gpu
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("top_k", [1, 4, 8, 10])
def test_gpu(top_k, implementation):
    for tokens, hidden, dtype in ((1, 6144, torch.bfloat16), (65, 160, torch.float16), (2049, 1600, torch.bfloat16)):
        slots, ids = problem(tokens, top_k, hidden, dtype, offset=48)
        got = sum_slots(slots.cuda(), ids.cuda(), num_experts=16, expert_offset=48, implementation=implementation)
        assert torch.equal(got.cpu(), oracle(slots, ids, 16, 48))
