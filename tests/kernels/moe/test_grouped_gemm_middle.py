"""The middle GEMMs' choice of kernels and grids, and that neither changes the result. What they compute: test_w4a16."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from moe_oracle import SILU, assert_close, inputs, layer
from slots_oracle import DTYPES, EXACT, TOLERANCE, bits, exact_inputs, exact_layer, routing, slots_oracle

from sglang_sm120.kernels.moe.expert_schedule import api as schedules
from sglang_sm120.kernels.moe.grouped_gemm_middle import config as configs
from sglang_sm120.kernels.moe.grouped_gemm_middle.api import choose, grouped_gemm_middle, workspace_bytes
from sglang_sm120.kernels.moe.grouped_gemm_middle.config import BLOCK_ROWS
from sglang_sm120.kernels.moe.w4a16 import LayerShape

GLM = LayerShape(256, 6144, 256, True)
QWEN = LayerShape(128, 4096, 384, True)
DEEPSEEK = LayerShape(256, 7168, 256, True)


# --- the choice -----------------------------------------------------------------------------------------------------

# tokens: rows of a block, and for 188 multiprocessors the grids
PINNED = {
    GLM: {
        1: (16, 16, 192), 2: (16, 32, 376), 4: (16, 64, 376), 10: (16, 160, 376), 16: (16, 256, 376),
        64: (16, 376, 376), 256: (16, 376, 376), 1000: (32, 376, 376), 4096: (32, 376, 376),
    },
    QWEN: {
        1: (16, 24, 128), 2: (16, 48, 256), 4: (16, 96, 376), 10: (16, 240, 376), 16: (16, 376, 376),
        64: (16, 376, 376), 256: (32, 376, 376), 1000: (32, 376, 376), 4096: (32, 376, 376),
    },
    DEEPSEEK: {
        1: (16, 16, 224), 2: (16, 32, 376), 4: (16, 64, 376), 10: (16, 160, 376), 16: (16, 256, 376),
        64: (16, 376, 376), 256: (16, 376, 376), 1000: (32, 376, 376), 4096: (32, 376, 376),
    },
}  # fmt: skip


@pytest.mark.parametrize("shape", PINNED, ids=["GLM-5 TP8", "Qwen3-235B TP4", "DeepSeek-V3 TP8"])
def test_chosen_kernels(shape):
    """Pinned, so that a change of the rules shows."""
    for tokens, (rows, grid1, grid2) in PINNED[shape].items():
        names = (f"gemm1_gated_{rows}_", f"gemm2_{rows}_")
        shared = configs.shared_bytes(rows)
        assert dataclasses.astuple(choose(shape, tokens * 8, 188)) == (rows, *names, grid1, grid2, shared)
        resident = 132 * (2 if rows <= 32 else 1)  # of an H200
        grids = (min(grid1, resident), min(grid2, resident))
        assert dataclasses.astuple(choose(shape, tokens * 8, 132)) == (rows, *names, *grids, shared)


@pytest.mark.parametrize(
    ("shape", "gemm1", "gemm2"),
    [
        (LayerShape(64, 2880, 2880, True), "gemm1_gated_general_32_", "gemm2_general_32_"),
        (LayerShape(64, 2560, 352, True), "gemm1_gated_general_32_", "gemm2_general_32_"),
        (LayerShape(64, 2688, 1920, True), "gemm1_gated_general_32_", "gemm2_general_32_"),  # 10.5 times 256
        (LayerShape(64, 2560, 1920, False), "gemm1_ungated_general_32_", "gemm2_general_32_"),
        (LayerShape(64, 2560, 1920, True), "gemm1_gated_32_", "gemm2_32_"),
    ],
)
def test_kernels_by_divisibility(shape, gemm1, gemm2):
    config = choose(shape, 1000, 188)
    assert (config.gemm1, config.gemm2, config.block_rows) == (gemm1, gemm2, 32)


def test_block_rows_follow_the_mean_rows_of_an_expert():
    shape = LayerShape(10, 256, 128, True)
    found = [configs.choose_block_rows(shape, slots) for slots in (1, 120, 121, 361, 10**6)]
    assert found == [16, 16, 32, 32, 32]


def test_shared_memory_and_grids_stay_within_bounds():
    kernels = set()
    for experts, hidden, intermediate, is_gated, slots, num_sms in itertools.product(
        (1, 8, 128, 256, 512), (32, 1024, 1600, 2880, 6144), (96, 128, 256, 352, 1856), (True, False),
        (1, 8, 80, 512, 5000, 65536), (3, 132, 188),
    ):  # fmt: skip
        shape = LayerShape(experts, hidden, intermediate, is_gated)
        config = choose(shape, slots, num_sms)
        kernels |= {config.gemm1, config.gemm2}
        rows = config.block_rows
        assert rows in BLOCK_ROWS
        # Three stages of 128 16-bit elements a row; then 132 floats a row, or 264 16-bit results.
        assert config.shared_bytes == rows * (3 * 128 * 2 + 528) <= configs.MAX_SHARED_BYTES == 101_376
        assert 1 <= config.grid1 <= 2 * num_sms and 1 <= config.grid2 <= 2 * num_sms
        assert configs.max_blocks(shape, slots, rows) == schedules.max_blocks(slots, experts, rows)
    names = [f"{gemm}_{rows}_" for gemm in ("gemm1_gated", "gemm2") for rows in (16, 32)]
    general = ["gemm1_gated_general_32_", "gemm1_ungated_general_32_", "gemm2_general_32_"]
    assert kernels == {*names, *general}


@pytest.mark.parametrize("rows", BLOCK_ROWS)
def test_shared_memory_of_the_sizes_that_are_only_asked_for(rows):
    config = choose(GLM, 8000, 188, rows)
    assert config.shared_bytes == rows * (3 * 128 * 2 + 528) <= 101_376
    assert (config.gemm1, config.gemm2) == (f"gemm1_gated_{rows}_", f"gemm2_{rows}_")


@pytest.mark.parametrize("rows", BLOCK_ROWS)
def test_resident_ctas_fit_a_multiprocessor(rows):
    for general in (True, False):
        ctas = configs.ctas_per_sm(rows, general=general)
        assert ctas >= 1 and ctas * (configs.shared_bytes(rows) + 1024) <= 102_400


# --- blocks and grids -----------------------------------------------------------------------------------------------

poisoned = pytest.mark.usefixtures("poisoned_memory")


@poisoned
@pytest.mark.parametrize("block_rows", BLOCK_ROWS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_block_rows(block_rows, dtype):
    """Blocks that are full, one row short and one row over; every count of eights in the last."""
    lay = exact_layer(4, 256, 256)
    shape = LayerShape(4, 256, 256, True)
    for tokens in (1, 15, 16, 17, 31, 33, 48, 49, 63, 64, 65, 129):
        x, topk_weights, _ = exact_inputs(tokens, 2, 4, 256, dtype)
        ids = torch.tensor([1, 3], dtype=torch.int32).repeat(tokens, 1)
        ids[tokens // 3 * 2 :, 0] = 2
        config = choose(shape, ids.numel(), 3, block_rows)
        assert config.block_rows == block_rows
        got = grouped_gemm_middle(x, lay.weights(), topk_weights, ids, activation=EXACT[True], config=config)
        assert torch.equal(got, slots_oracle(x, lay, topk_weights, ids, EXACT[True]).to(dtype)), tokens


@poisoned
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_block_rows_and_grids_give_the_same_bits(dtype):
    """A row's sum runs along K in one thread, whatever block the row is in and which CTA has the tile."""
    lay = layer(4, 512, 256)
    x, topk_weights, ids = inputs(65, 2, 4, 512, dtype)
    x /= 2
    want = None
    for rows in BLOCK_ROWS:
        config = choose(LayerShape(4, 512, 256, True), ids.numel(), 3, rows)
        for grid1, grid2 in ((1, 1), (3, 2), (64, 64)):
            for order in ("column_major", "row_major"):
                got = grouped_gemm_middle(
                    x, lay.weights(), topk_weights, ids, activation=SILU, order=order,
                    config=dataclasses.replace(config, grid1=grid1, grid2=grid2),
                )  # fmt: skip
                if want is None:
                    want = got
                    oracle = slots_oracle(x, lay, topk_weights, ids, SILU)
                    assert_close(got, oracle, TOLERANCE[dtype])
                assert torch.equal(bits(got), bits(want)), (rows, grid1, grid2, order)


@poisoned
@pytest.mark.parametrize(
    ("hidden", "intermediate", "is_gated"), [(160, 352, True), (352, 160, False), (1568, 96, True)]
)
def test_grids_of_the_general_kernels_give_the_same_bits(hidden, intermediate, is_gated):
    lay = exact_layer(4, hidden, intermediate, is_gated)
    x, topk_weights, ids = exact_inputs(40, 2, 4, hidden, torch.bfloat16)
    config = choose(LayerShape(4, hidden, intermediate, is_gated), ids.numel(), 3)
    want = slots_oracle(x, lay, topk_weights, ids, EXACT[is_gated]).to(x.dtype)
    for grid1, grid2 in ((1, 1), (3, 2), (64, 64)):
        for order in ("column_major", "row_major"):
            got = grouped_gemm_middle(
                x, lay.weights(), topk_weights, ids, activation=EXACT[is_gated], order=order,
                config=dataclasses.replace(config, grid1=grid1, grid2=grid2),
            )  # fmt: skip
            assert torch.equal(got, want)


@poisoned
def test_grids_without_work():
    lay = exact_layer(4, 256, 128)
    x, topk_weights, _ = exact_inputs(9, 2, 4, 256, torch.bfloat16)
    config = dataclasses.replace(choose(LayerShape(4, 256, 128, True), 18, 3), grid1=40, grid2=40)
    for kind in ("all skipped", "all skipped but one"):
        ids = routing(kind, 9, 2, 4)
        got = grouped_gemm_middle(x, lay.weights(), topk_weights, ids, activation=EXACT[True], config=config)
        mine = ids.reshape(-1) >= 0
        want = slots_oracle(x, lay, topk_weights, ids, EXACT[True]).to(x.dtype)
        assert torch.equal(got[mine], want[mine]) and (bits(got)[~mine] == -1).all()


# --- memory ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("tokens", "hidden", "intermediate"), [(9, 160, 96), (65, 512, 256)])
def test_workspace_bytes_is_what_is_allocated(tokens, hidden, intermediate, peak_bytes):
    x, topk_weights, ids = inputs(tokens, 4, 8, hidden, torch.bfloat16)
    weights = layer(8, hidden, intermediate).weights()
    with peak_bytes:
        out = grouped_gemm_middle(x, weights, topk_weights, ids, activation=SILU)
    bound = workspace_bytes(LayerShape(8, hidden, intermediate, True), ids.numel(), tokens, num_sms=3)
    assert peak_bytes.peak - out.numel() * out.element_size() == bound
