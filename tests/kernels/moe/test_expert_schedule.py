"""The expert schedule: plain torch and the kernel, built for the host, against a loop over slots in numpy."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_sm120.errors import ContractError, UnsupportedError
from sglang_sm120.kernels.cuda.module import load
from sglang_sm120.kernels.moe.expert_schedule import config, kernel
from sglang_sm120.kernels.moe.expert_schedule.api import (
    ExpertSchedule,
    empty_schedule,
    expert_schedule,
    max_blocks,
    unsupported_reason,
    workspace_bytes,
)

POISON = -12345
FIELDS = ("sorted_slots", "block_expert", "expert_first_block", "expert_rows", "num_blocks", "block_info")
IMPLEMENTATIONS = ["reference", "kernel"]
TOKENS = [0, 1, 2, 7, 8, 9, 63, 64, 65, 127, 128, 129, 2049]
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


# --- the oracle -----------------------------------------------------------------------------------------------------


def oracle(topk_ids: torch.Tensor, experts: int, block_rows: int, offset: int = 0) -> dict[str, list]:
    """What is written, by appending slot after slot to its expert's list."""
    rows: list[list[int]] = [[] for _ in range(experts)]
    for slot, expert_id in enumerate(topk_ids.cpu().numpy().reshape(-1)):
        if 0 <= int(expert_id) - offset < experts:
            rows[int(expert_id) - offset].append(slot)
    sorted_slots: list[int] = []
    block_expert: list[int] = []
    block_info: list[tuple[int, int, int, int]] = []
    first_block = []
    for expert, slots in enumerate(rows):
        first_block.append(len(block_expert))
        for start in range(0, len(slots), block_rows):
            piece = slots[start : start + block_rows]
            sorted_slots += piece + [-1] * (block_rows - len(piece))
            block_expert.append(expert)
        blocks = len(block_expert) - first_block[-1]
        block_info += [(expert, first_block[-1], blocks, len(slots))] * blocks
    return {
        "sorted_slots": sorted_slots,
        "block_expert": block_expert,
        "expert_first_block": first_block,
        "expert_rows": [len(slots) for slots in rows],
        "num_blocks": [len(block_expert)],
        "block_info": block_info,
    }


def poisoned(num_slots: int, experts: int, block_rows: int, device: str = "cpu") -> ExpertSchedule:
    out = empty_schedule(num_slots, num_experts=experts, block_rows=block_rows, device=device)
    for name in FIELDS:
        getattr(out, name).fill_(POISON)
    return out


def assert_is(out: ExpertSchedule, want: dict[str, list]) -> None:
    """The written part as wanted; behind it -1 in sorted_slots, in the other tensors still the poison."""
    for name in FIELDS:
        got = getattr(out, name).cpu().numpy()
        expected = np.array(want[name], dtype=np.int32).reshape(-1, *got.shape[1:])
        assert np.array_equal(got[: len(expected)], expected), name
        behind = -1 if name == "sorted_slots" else POISON
        assert (got[len(expected) :] == behind).all(), f"{name} behind its end"


def check(topk_ids: torch.Tensor, experts: int, block_rows: int, implementation: str, offset: int = 0, total=None):
    out = poisoned(topk_ids.numel(), experts, block_rows, str(topk_ids.device))
    before = topk_ids.clone()
    flags = torch.full((topk_ids.numel() % 1000 + 2,), POISON, dtype=torch.int32, device=topk_ids.device)
    got = expert_schedule(
        topk_ids,
        num_experts=experts,
        block_rows=block_rows,
        expert_offset=offset,
        num_global_experts=total,
        out=out,
        cleared=flags[1:-1],
        implementation=implementation,
    )
    assert flags[0] == flags[-1] == POISON and not flags[1:-1].any()
    assert got is out and torch.equal(topk_ids, before)
    assert_is(out, oracle(topk_ids, experts, block_rows, offset))
    return out


def routing(tokens: int, top_k: int, experts: int, seed: int = 0, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    """Distinct experts in a row where there are as many, some of them more popular."""
    rng = np.random.default_rng([seed, tokens, top_k, experts])
    scores = rng.random((tokens, experts)) ** rng.uniform(0.2, 2, experts)
    return torch.from_numpy(np.argsort(-scores, axis=1)[:, :top_k].copy()).to(dtype)


def test_the_oracle_on_a_routing_written_out_by_hand():
    ids = torch.tensor([[2, 0], [2, -1], [0, 2]])
    assert oracle(ids, 3, 2) == {
        "sorted_slots": [1, 4, 0, 2, 5, -1],
        "block_expert": [0, 2, 2],
        "expert_first_block": [0, 1, 1],
        "expert_rows": [2, 0, 3],
        "num_blocks": [3],
        "block_info": [(0, 0, 1, 2), (2, 1, 2, 3), (2, 1, 2, 3)],
    }


# --- sizes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(("experts", "top_k"), [(8, 1), (128, 8), (256, 8), (384, 4), (512, 10), (1024, 8), (1, 1)])
@pytest.mark.parametrize("tokens", TOKENS)
def test_sizes(tokens, experts, top_k, implementation):
    dtype = torch.int64 if tokens % 2 else torch.int32
    check(routing(tokens, top_k, experts, dtype=dtype), experts, 16, implementation)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("block_rows", [1, 3, 8, 16, 64, 128])
def test_block_sizes(block_rows, implementation):
    check(routing(129, 8, 128), 128, block_rows, implementation)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("share", [0.0, 0.3, 0.97, 1.0])
@pytest.mark.parametrize("tokens", [1, 8, 65, 500])
def test_skipped_slots(tokens, share, implementation):
    ids = routing(tokens, 8, 128)
    skip = torch.rand(ids.shape, generator=torch.Generator().manual_seed(tokens)) < share
    check(torch.where(skip, -1 - ids, ids), 128, 16, implementation)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("tokens", [1, 8, 64, 400])
@pytest.mark.parametrize("expert", [0, 31, 200, 255])
def test_every_slot_on_one_expert(tokens, expert, implementation):
    """Duplicates in each row, and experts without a row around it."""
    check(torch.full((tokens, 8), expert, dtype=torch.int32), 256, 16, implementation)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("experts", [1, 5, 32, 33, 1024])
@pytest.mark.parametrize("rows", [8, 9, 40])
def test_an_expert_of_many_blocks_among_others(rows, experts, implementation):
    """Every third expert is without a row; the first, the last or one in the middle has most."""
    for popular in {0, experts // 2, experts - 1}:
        others = torch.arange(0, experts, 3, dtype=torch.int32)
        check(torch.cat((others, others.new_full((rows,), popular), others))[:, None], experts, 1, implementation)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("tokens", [7, 128])
def test_duplicates_count_twice(tokens, implementation):
    ids = torch.randint(0, 3, (tokens, 4), generator=torch.Generator().manual_seed(1), dtype=torch.int32)
    out = check(ids, 8, 8, implementation)
    assert out.expert_rows.sum() == ids.numel()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_strides(dtype, implementation):
    wide = routing(65, 10, 128, dtype=dtype)
    for ids in (wide[:, 1:9], wide[::3], wide[:, ::2], wide.T.contiguous().T, wide[:1].expand(9, 10), wide.T):
        check(ids, 128, 16, implementation)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("top_k", [1, 3, 8, 31, 32, 33, 70])
@pytest.mark.parametrize("num_slots", [2500, 13_000])
def test_strides_over_several_steps_of_a_warp(num_slots, top_k, dtype):
    """Up to 8 steps a warp keeps the experts, beyond that it loads the ids again."""
    wide = torch.randint(-5, 128, (num_slots // top_k, top_k + 2), generator=torch.Generator().manual_seed(top_k))
    wide = wide.to(dtype)
    for ids in (wide[:, 1:-1], wide[:, :top_k].contiguous()):
        check(ids, 128, 16, "kernel")


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_global_ids(dtype, implementation):
    """Every rank takes its own; together they hold each slot once."""
    ids = routing(129, 8, 384, dtype=dtype)
    slots = []
    for offset in (0, 192):
        out = check(ids, 192, 16, implementation, offset, 384)
        written = out.sorted_slots[: int(out.num_blocks) * 16]
        slots += written[written >= 0].tolist()
    assert sorted(slots) == list(range(ids.numel()))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("local", [False, True])
def test_ids_at_the_edge_of_int64_are_skipped(local, implementation):
    """2**32 + 3 must not be taken for 3."""
    edge = [2**63 - 1, -(2**63), 2**32 + 3, -(2**32) + 3, 8, 7, 3, -1, 2**31, -(2**31)]
    ids = torch.tensor([edge], dtype=torch.int64)
    check(ids, 8, 4, implementation) if local else check(ids, 5, 4, implementation, 3, 8)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_smaller_batch_in_the_memory_of_a_larger_one(implementation):
    out = empty_schedule(129 * 8, num_experts=128, block_rows=16)
    odd = dataclasses.replace(out, sorted_slots=out.sorted_slots[1:-2])  # not at a multiple of 16 bytes
    for tokens, memory in itertools.product((120, 9, 0, 1), (out, odd)):
        for name in FIELDS:
            getattr(out, name).fill_(POISON)
        ids = routing(tokens, 8, 128)
        expert_schedule(ids, num_experts=128, block_rows=16, out=memory, implementation=implementation)
        assert_is(memory, oracle(ids, 128, 16))
        ends = out.sorted_slots[[0, -2, -1]]
        assert memory is out or (ends == POISON).all()


@pytest.mark.parametrize("tokens", [1, 8, 65, 700])
def test_no_barrier_is_missing(tokens, monkeypatch):
    """The host runs threads in ascending order; here in descending order."""
    cpu = torch.device("cpu")
    monkeypatch.setitem(kernel._modules, cpu, load(kernel.SOURCE, cpu, ("SM120_HOST_REVERSE",)))
    for experts, block_rows in itertools.product((8, 256, 1024), (1, 16)):
        check(routing(tokens, 8, experts), experts, block_rows, "kernel")


@settings(deadline=None, max_examples=60)
@given(data=st.data(), experts=st.integers(1, 40), block_rows=st.integers(1, 40), wide=st.booleans())
def test_any_routing(data, experts, block_rows, wide):
    offset = data.draw(st.integers(0, 10))
    top_k = data.draw(st.integers(1, 6))
    tokens = data.draw(st.integers(0, 60))
    seed, span = data.draw(st.integers(0, 2**31)), data.draw(st.integers(1, 60))
    ids = np.random.default_rng(seed).integers(-3, span, (tokens, top_k), dtype=np.int64 if wide else np.int32)
    for implementation in IMPLEMENTATIONS:
        check(torch.from_numpy(ids), experts, block_rows, implementation, offset, experts + 10)


# --- bounds ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block_rows", [1, 2, 3, 5])
@pytest.mark.parametrize("experts", [1, 2, 3])
@pytest.mark.parametrize("num_slots", range(8))
def test_max_blocks_is_the_worst_case(num_slots, experts, block_rows):
    def worst(left: int, remaining: int) -> int:
        if remaining == 1:
            return -(-left // block_rows)
        return max(-(-rows // block_rows) + worst(left - rows, remaining - 1) for rows in range(left + 1))

    assert max_blocks(num_slots, experts, block_rows) == worst(num_slots, experts)


def test_the_worst_case_fits_exactly():
    ids = torch.cat((torch.arange(8), torch.zeros(56, dtype=torch.int64)))[:, None]
    for implementation in IMPLEMENTATIONS:
        out = check(ids, 8, 4, implementation)
        assert int(out.num_blocks) == out.block_expert.numel() == max_blocks(ids.numel(), 8, 4)


def test_workspace_bytes_is_what_is_allocated(peak_bytes):
    with peak_bytes:
        empty_schedule(1000, num_experts=256, block_rows=64)
    assert peak_bytes.peak == workspace_bytes(num_slots=1000, num_experts=256, block_rows=64)


@pytest.mark.parametrize("experts", [1, 8, 128, 256, 384, 512, 1024])
def test_the_launch_stays_within_a_block(experts):
    for num_slots in (0, 1, 8, 33, 1000, 20_000, 131_072):
        shape = config.launch_shape(num_slots, experts)
        assert shape.shared_bytes <= config.MAX_SHARED_BYTES == 101_376
        assert experts <= shape.threads <= 1024 and shape.threads % 32 == 0
        assert (shape.counting_warps >= 1) == (num_slots > 0) and shape.counting_warps * 32 <= shape.threads
    assert config.launch_shape(8, experts).counting_warps == 1


# --- contracts ------------------------------------------------------------------------------------------------------

IDS = torch.zeros(4, 2, dtype=torch.int32)


def call(ids=IDS, num_experts=8, block_rows=16, **more):
    return expert_schedule(ids, num_experts=num_experts, block_rows=block_rows, **more)


@pytest.mark.parametrize(
    "broken",
    [
        lambda: call(IDS.float()),
        lambda: call(IDS.to(torch.int16)),
        lambda: call(IDS[0]),
        lambda: call(num_experts=0),
        lambda: call(block_rows=0),
        lambda: call(order="diagonal"),
        lambda: call(implementation="fast"),
        lambda: call(expert_offset=4),
        lambda: call(expert_offset=4, num_global_experts=8),
        lambda: call(expert_offset=-1, num_global_experts=16),
        lambda: call(out=empty_schedule(8, num_experts=8, block_rows=8)),
        lambda: call(out=empty_schedule(8, num_experts=8, block_rows=16, order="row_major")),
        lambda: call(out=empty_schedule(7, num_experts=8, block_rows=16)),
        lambda: call(out=empty_schedule(8, num_experts=9, block_rows=16)),
        lambda: call(out=empty_schedule(8, num_experts=8, block_rows=16, device="meta")),
        lambda: call(out=dataclasses.replace(call(), num_blocks=torch.zeros(1))),
        lambda: call(out=dataclasses.replace(call(), expert_rows=torch.zeros(16, dtype=torch.int32)[::2])),
        lambda: call(out=dataclasses.replace(call(), block_info=torch.zeros(8, 3, dtype=torch.int32))),
        lambda: call(out=dataclasses.replace(call(), block_info=torch.zeros(7, 4, dtype=torch.int32))),
        lambda: call(cleared=torch.zeros(8)),
        lambda: call(cleared=torch.zeros(8, 1, dtype=torch.int32)),
        lambda: call(cleared=torch.zeros((), dtype=torch.int32)),
        lambda: call(cleared=torch.zeros(16, dtype=torch.int32)[::2]),
        lambda: call(cleared=torch.zeros(8, dtype=torch.int32, device="meta")),
        lambda: empty_schedule(-1, num_experts=8, block_rows=16),
    ],
)
def test_a_broken_contract_raises(broken):
    with pytest.raises(ContractError) as error:
        broken()
    assert all((error.value.found, error.value.needed, error.value.fix))


def test_more_experts_than_threads_have_a_reason_and_the_reference():
    assert unsupported_reason(8, 1024, 16) is None
    assert "1024" in unsupported_reason(8, 1025, 16)
    assert "rows" in unsupported_reason(2**30, 8, 16)
    assert "rows" in unsupported_reason(0, 8, 2**32)
    with pytest.raises(UnsupportedError, match="shared memory"):
        call(num_experts=1025, implementation="kernel")
    assert_is(call(num_experts=1025, out=poisoned(8, 1025, 16)), oracle(IDS, 1025, 16))


def test_longer_tensors_than_the_kernel_indexes_are_refused():
    ids, far = IDS.to("meta"), torch.empty(2**30 + 1, dtype=torch.int32, device="meta")
    out = empty_schedule(8, num_experts=8, block_rows=16, device="meta")
    for more in ({"cleared": far}, {"out": dataclasses.replace(out, sorted_slots=far)}):
        assert call(ids, **more)
        with pytest.raises(UnsupportedError, match="1073741825"):
            call(ids, implementation="kernel", **more)


def test_block_info_that_is_not_aligned_is_refused_where_it_matters():
    out, buffer = call(), torch.full((33,), POISON, dtype=torch.int32)
    assert out.block_info.data_ptr() % 16 == buffer.data_ptr() % 16 == 0
    out = dataclasses.replace(out, block_info=buffer[1:].view(8, 4))
    assert call(out=out) is out
    with pytest.raises(ContractError, match="multiple of 16 bytes"):
        call(out=out, implementation="kernel")


@pytest.mark.parametrize("num_slots", [0, 1, 7, 1001])
@pytest.mark.parametrize("block_rows", [1, 3, 16])
def test_one_allocation_with_block_info_aligned(num_slots, block_rows):
    out = empty_schedule(num_slots, num_experts=13, block_rows=block_rows)
    assert len({getattr(out, name).untyped_storage().data_ptr() for name in FIELDS}) == 1
    assert out.block_info.storage_offset() == 0 and out.block_info.shape[1] == 4


def test_unless_asked_the_cpu_uses_the_reference(monkeypatch):
    monkeypatch.setattr(kernel._modules, "on", None)
    call()
    with pytest.raises(TypeError):
        call(implementation="kernel")


def test_the_order_is_kept():
    assert call().order == "column_major" and call(order="row_major").order == "row_major"


def test_meta_tensors_pass_so_nothing_reads_a_value():
    out = call(torch.empty(65, 8, dtype=torch.int32, device="meta"), num_experts=128)
    assert out.sorted_slots.shape == (max_blocks(520, 128, 16) * 16,)


# --- GPU ------------------------------------------------------------------------------------------------------------


@needs_gpu
@pytest.mark.parametrize(("experts", "top_k"), [(8, 1), (128, 8), (256, 8), (512, 10), (1024, 8)])
@pytest.mark.parametrize("tokens", [*TOKENS, 13107])
def test_gpu_sizes(tokens, experts, top_k):
    ids = routing(tokens, top_k, experts).cuda()
    out = check(ids, experts, 16, "kernel")
    check(ids.long(), experts, 16, "kernel")
    check(ids, experts, 16, "reference")
    again = check(ids, experts, 16, "kernel")
    assert all(torch.equal(getattr(out, name), getattr(again, name)) for name in FIELDS)


@needs_gpu
@pytest.mark.parametrize(
    "ids", [torch.zeros(16384, 8), torch.full((16384, 8), -1), torch.arange(131072)[:, None] % 256]
)
def test_gpu_extremes_of_131072_slots(ids):
    check(ids.int().cuda(), 256, 64, "kernel")


@needs_gpu
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("tokens", [1, 64, 2049])
def test_gpu_replay_with_other_ids(tokens, implementation):
    """The routing changes between replays; what is unwritten stays as it was poisoned."""
    ids = routing(tokens, 8, 256).cuda()
    out = poisoned(ids.numel(), 256, 16, "cuda")
    arguments = {"num_experts": 256, "block_rows": 16, "out": out, "implementation": implementation}
    expert_schedule(ids, **arguments)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        expert_schedule(ids, **arguments)
    for seed in range(1, 6):
        ids.copy_(routing(tokens, 8, 256, seed) if seed % 2 else torch.full_like(ids, seed))
        for name in FIELDS:
            getattr(out, name).fill_(POISON)
        graph.replay()
        assert_is(out, oracle(ids, 256, 16))


@needs_gpu
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_gpu_never_waits_for_the_stream(implementation):
    ids = routing(64, 8, 256).cuda()
    call(ids, num_experts=256, implementation=implementation)
    torch.cuda.set_sync_debug_mode("error")
    try:
        out = call(ids, num_experts=256, implementation=implementation)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert int(out.num_blocks) == oracle(ids, 256, 16)["num_blocks"][0]
