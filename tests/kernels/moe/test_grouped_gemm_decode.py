"""The decode GEMMs' choice of kernels and grids, and that no grid changes the result. What they compute: test_w4a16."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from moe_oracle import SILU, assert_close, inputs, layer
from slots_oracle import DTYPES, EXACT, TOLERANCE, bits, exact_inputs, exact_layer, routing, slots_oracle

from sglang_sm120.kernels.moe.expert_schedule import api as schedules
from sglang_sm120.kernels.moe.grouped_gemm_decode import config as configs
from sglang_sm120.kernels.moe.grouped_gemm_decode.api import choose, grouped_gemm_decode, workspace_bytes
from sglang_sm120.kernels.moe.grouped_gemm_decode.config import BLOCK_ROWS, DecodeConfig
from sglang_sm120.kernels.moe.w4a16 import LayerShape

MAX_SHARED_BYTES = 101_376  # a block's most on compute capability 12.x
GLM = (LayerShape(256, 6144, 256, True), 8)
QWEN = (LayerShape(128, 4096, 384, True), 8)
DEEPSEEK = (LayerShape(256, 7168, 256, True), 8)


# --- the choice -----------------------------------------------------------------------------------------------------


def chosen(model: tuple[LayerShape, int], tokens: int, num_sms: int) -> tuple:
    shape, top_k = model
    config = choose(shape, tokens * top_k, num_sms)
    return config.gemm1.kernel, config.gemm1.grid, config.gemm2.kernel, config.gemm2.grid, config.tiny


@pytest.mark.parametrize("tokens", [1, 2, 4, 10, 16, 64, 256, 1000, 4096])
@pytest.mark.parametrize("model", [GLM, QWEN, DEEPSEEK], ids=["GLM-5 TP8", "Qwen3-235B TP4", "DeepSeek-V3 TP8"])
def test_chosen_kernels(model, tokens):
    """Pinned, so that a change of the rules shows. 188 multiprocessors: RTX PRO 6000; 132: H200."""
    assert chosen(model, tokens, 188) == ("gemm1_gated_", 376, "gemm2_", 752, False)
    columns1, slots = 4 * model[0].intermediate_size // 128, tokens * model[1]
    if tokens in ((4,) if model is QWEN else (2, 4)):  # 192, 128 or 256 tiles for 132: nearly even
        assert chosen(model, tokens, 132) == ("gemm1_gated_tiny_", min(132, slots * columns1), "gemm2_tiny_", 528, True)
    else:
        assert chosen(model, tokens, 132) == ("gemm1_gated_", 264, "gemm2_", 528, False)


@pytest.mark.parametrize(
    ("shape", "gemm1", "gemm2"),
    [
        (LayerShape(64, 2880, 2880, True), "gemm1_gated_general_", "gemm2_general_"),
        (LayerShape(64, 2560, 352, True), "gemm1_gated_general_", "gemm2_general_"),
        (LayerShape(64, 1600, 512, True), "gemm1_gated_general_", "gemm2_general_"),
        (LayerShape(64, 2688, 1856, False), "gemm1_ungated_general_", "gemm2_general_"),
        (LayerShape(64, 2688, 1920, False), "gemm1_ungated_general_", "gemm2_"),  # 21 chunks for 8 warps
        (LayerShape(64, 2688, 1920, True), "gemm1_gated_general_", "gemm2_"),
        (LayerShape(64, 2048, 1920, False), "gemm1_ungated_", "gemm2_"),
        (LayerShape(64, 2560, 1920, True), "gemm1_gated_", "gemm2_"),
        (LayerShape(64, 2560, 1920, False), "gemm1_ungated_general_", "gemm2_"),
    ],
)
def test_kernels_by_divisibility(shape, gemm1, gemm2):
    config = choose(shape, 1000, 188)
    assert (config.gemm1.kernel, config.gemm2.kernel) == (gemm1, gemm2)


def every_choice() -> list[tuple[LayerShape, int, int, DecodeConfig]]:
    shapes = [
        LayerShape(experts, hidden, intermediate, is_gated)
        for experts, hidden, intermediate, is_gated in itertools.product(
            (1, 8, 128, 256, 512),
            (32, 1024, 1600, 2560, 2880, 4096, 6144, 7168),
            (96, 128, 256, 352, 1856),
            (True, False),
        )
    ]
    return [
        (shape, slots, num_sms, choose(shape, slots, num_sms))
        for shape, slots, num_sms in itertools.product(
            shapes, (1, 8, 10, 16, 32, 33, 80, 512, 65536), (3, 84, 132, 188)
        )
    ]


def test_shared_memory_and_grids_stay_within_bounds():
    kernels = set()
    for shape, slots, num_sms, config in every_choice():
        kernels |= {config.gemm1.kernel, config.gemm2.kernel}
        warps = config.gemm1.block // 32
        # The exchange of GEMM1: 8 rows of 36 floats a warp. GEMM2 has none.
        assert config.gemm1.shared_bytes == warps * BLOCK_ROWS * 36 * 4 <= MAX_SHARED_BYTES
        assert (config.gemm2.block, config.gemm2.shared_bytes) == (128, 0)
        assert 1 <= config.gemm1.grid <= 2 * num_sms and 1 <= config.gemm2.grid <= 4 * num_sms
        assert config.gemm1.block == (512 if config.tiny else 256)
        assert config.tiny == ("tiny" in config.gemm1.kernel) == ("tiny" in config.gemm2.kernel)
        assert not config.tiny or slots <= configs.TINY_SLOTS == 32
        assert configs.max_blocks(shape, slots) == schedules.max_blocks(slots, shape.num_experts, BLOCK_ROWS)
    names = ["gemm1_gated_", "gemm1_gated_general_", "gemm1_gated_tiny_", "gemm1_ungated_", "gemm1_ungated_general_"]
    assert kernels == {*names, "gemm2_", "gemm2_general_", "gemm2_tiny_"}


# --- grids ----------------------------------------------------------------------------------------------------------


def with_grids(config: DecodeConfig, grid1: int, grid2: int) -> DecodeConfig:
    return DecodeConfig(
        dataclasses.replace(config.gemm1, grid=grid1), dataclasses.replace(config.gemm2, grid=grid2), config.tiny
    )


# Long enough along K that GEMM1 deals out several steps a tile: tiles are shared by up to a step each.
LONG = [(2048, 128, True), (2048, 128, False), (1568, 96, True), (2080, 96, False)]


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize(("hidden", "intermediate", "is_gated"), LONG)
def test_no_grid_changes_a_result_without_rounding(hidden, intermediate, is_gated):
    lay = exact_layer(3, hidden, intermediate, is_gated)
    x, topk_weights, topk_ids = exact_inputs(11, 2, 3, hidden, torch.bfloat16)
    want = slots_oracle(x, lay, topk_weights, topk_ids, EXACT[is_gated]).to(x.dtype)
    config = choose(LayerShape(3, hidden, intermediate, is_gated), 22, 132)
    assert not config.tiny
    for grid1, grid2 in [(1, 1), (3, 3), (7, 2), (16, 5), (61, 61), (264, 528)]:
        for order in ("column_major", "row_major"):
            got = grouped_gemm_decode(
                x, lay.weights(), topk_weights, topk_ids, activation=EXACT[is_gated],
                config=with_grids(config, grid1, grid2), order=order,
            )  # fmt: skip
            assert torch.equal(got, want), (grid1, grid2, order)


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_grids_change_no_more_than_the_rounding_of_sums(dtype):
    lay = layer(3, 2048, 128)
    x, topk_weights, topk_ids = inputs(11, 2, 3, 2048, dtype)
    x /= 8
    config = choose(LayerShape(3, 2048, 128, True), 22, 132)
    want = slots_oracle(x, lay, topk_weights, topk_ids, SILU)
    found = []
    for grid1, grid2, order in [
        (1, 1, "column_major"), (1, 7, "row_major"), (3, 3, "column_major"), (61, 61, "row_major"),
    ]:  # fmt: skip
        found.append(
            grouped_gemm_decode(
                x, lay.weights(), topk_weights, topk_ids, activation=SILU, order=order,
                config=with_grids(config, grid1, grid2),
            )
        )  # fmt: skip
        assert_close(found[-1], want, TOLERANCE[dtype])
        assert (found[-1] == found[0]).double().mean() > 0.97
    assert torch.equal(bits(found[0]), bits(found[1]))  # no tile is shared, and GEMM2's never are


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("experts", [3, 8])
def test_grids_without_work_for_all(experts):
    """Fewer steps than CTAs, so that some have none; and no step at all."""
    lay = exact_layer(experts, 1024, 128)
    config = choose(LayerShape(experts, 1024, 128, True), 40, 132)
    for kind in ("all skipped but one", "all skipped", "all on one expert"):
        for tokens in (1, 9):
            x, topk_weights, _ = exact_inputs(tokens, 2, experts, 1024, torch.bfloat16)
            ids = routing(kind, tokens, 2, experts)
            got = grouped_gemm_decode(
                x, lay.weights(), topk_weights, ids, activation=EXACT[True], config=with_grids(config, 264, 528)
            )
            want = slots_oracle(x, lay, topk_weights, ids, EXACT[True]).to(x.dtype)
            mine = ids.reshape(-1) >= 0
            assert torch.equal(got[mine], want[mine]) and (bits(got)[~mine] == -1).all()


# --- tiny -----------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(
    "kind", ["random", "all on one expert", "duplicates", "two experts only", "some skipped", "all skipped"]
)
@pytest.mark.parametrize(("tokens", "top_k"), [(1, 1), (1, 8), (4, 8), (3, 10), (32, 1), (16, 2)])
def test_tiny_gives_what_the_schedule_gives(tokens, top_k, kind, ids_dtype):
    """The kernels make the schedule of up to 32 slots themselves. Up to four blocks an expert."""
    lay = exact_layer(12, 1024, 128)
    shape = LayerShape(12, 1024, 128, True)
    x, topk_weights, ids = exact_inputs(tokens, top_k, 12, 1024, torch.bfloat16)
    if kind != "random":
        ids = routing(kind, tokens, top_k, 12)
    ids = ids.to(ids_dtype)
    tiny, scheduled = choose(shape, ids.numel(), 1), choose(shape, 33, 3)
    assert tiny.tiny and not scheduled.tiny
    more = {"activation": EXACT[True], "expert_offset": 2, "num_global_experts": 16}
    ids = torch.where(ids >= 0, ids + 2, ids)
    ids[0, 0] = 15 if kind == "random" else ids[0, 0]  # another rank's
    want = grouped_gemm_decode(x, lay.weights(), topk_weights, ids, config=scheduled, **more)
    for grids in ((1, 1), (3, 2), (48, 60)):
        for order in ("column_major", "row_major"):
            config = with_grids(tiny, *grids)
            got = grouped_gemm_decode(x, lay.weights(), topk_weights, ids, config=config, order=order, **more)
            assert torch.equal(bits(got), bits(want))


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tiny_matches_the_oracle(dtype):
    lay = layer(8, 2048, 128)
    x, topk_weights, ids = inputs(4, 8, 8, 2048, dtype)
    x /= 8
    config = choose(LayerShape(8, 2048, 128, True), 32, 32)
    assert config.tiny and config.gemm1.grid == 32
    got = grouped_gemm_decode(x, lay.weights(), topk_weights, ids, activation=SILU, config=config)
    want = slots_oracle(x, lay, topk_weights, ids, SILU)
    assert_close(got, want, TOLERANCE[dtype])
    assert (got == want.to(dtype)).double().mean() > 0.95


# --- memory ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("tokens", "hidden", "intermediate"), [(4, 1024, 128), (9, 160, 96), (65, 512, 256)])
def test_workspace_bytes_is_what_is_allocated(tokens, hidden, intermediate, peak_bytes):
    x, topk_weights, ids = inputs(tokens, 4, 8, hidden, torch.bfloat16)
    weights = layer(8, hidden, intermediate).weights()
    with peak_bytes:
        out = grouped_gemm_decode(x, weights, topk_weights, ids, activation=SILU)
    bound = workspace_bytes(LayerShape(8, hidden, intermediate, True), ids.numel(), num_sms=3)
    assert peak_bytes.peak - out.numel() * out.element_size() == bound
