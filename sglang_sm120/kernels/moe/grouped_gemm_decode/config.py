"""Which of the decode kernels for which problem, and their grids: a pure function of shapes."""

from __future__ import annotations

import math
from dataclasses import dataclass

from sglang_sm120.kernels.moe.expert_schedule import api as schedules
from sglang_sm120.kernels.moe.w4a16 import LayerShape

BLOCK_ROWS = 8
DEFAULT_ORDER = "column_major"  # docs/measurements.md#moe-bytes: fewer bytes where an expert has several blocks
TINY_SLOTS = 32  # TINY_SLOTS in kernel.cu

_COLUMNS = 32  # weight rows of a tile, and so columns of the result
_PADDED = 36  # PADDED in kernel.cu
_GEMM1_CTAS_PER_SM, _GEMM2_CTAS_PER_SM = 2, 4  # what 128 registers a thread allow
_GEMM2_THREADS = 128
_FULL_WAVES = 0.9  # guess; docs/measurements.md#moe has 0.97 (won) and 0.48, 0.73 (lost) on an H200


@dataclass(frozen=True)
class Launch:
    """kernel: its name less the dtype; grid in CTAs, block in threads, shared_bytes dynamic."""

    kernel: str
    grid: int
    block: int
    shared_bytes: int


@dataclass(frozen=True)
class DecodeConfig:
    """The two launches. tiny: the kernels make the schedule themselves, and gemm1 deals out whole tiles."""

    gemm1: Launch
    gemm2: Launch
    tiny: bool


def choose(shape: LayerShape, num_slots: int, num_sms: int) -> DecodeConfig:
    """Persistent grids, no larger than the work.

    tiny, when the tiles of so few slots fill the multiprocessors nearly evenly: one launch less, but a tile is never
    shared among CTAs. Otherwise gemm1 deals out steps along K, which is always even, for an exchange through memory.
    """
    aligned = shape.hidden_size % 128 == 0 and shape.intermediate_size % 128 == 0
    columns1 = 4 * math.ceil(shape.intermediate_size / 128)  # 4 tiles a 128-row block of scales
    columns2 = 4 * math.ceil(shape.hidden_size / 128)
    tiles = min(num_slots, shape.num_experts) * columns1
    waves = tiles / num_sms
    chunks = shape.hidden_size // 128
    tiny = (
        aligned
        and shape.is_gated
        and num_slots <= TINY_SLOTS
        and chunks % 8 == 0
        and waves >= _FULL_WAVES * -(-tiles // num_sms)
    )
    general2 = "" if aligned else "general_"
    grid2 = min(_GEMM2_CTAS_PER_SM * num_sms, max_blocks(shape, num_slots) * columns2)
    gemm2 = Launch(f"gemm2_{'tiny_' if tiny else general2}", grid2, _GEMM2_THREADS, 0)
    if tiny:
        return DecodeConfig(Launch("gemm1_gated_tiny_", min(num_sms, tiles), 512, _exchange_bytes(16)), gemm2, True)
    warps_along_k = 4 if shape.is_gated else 8
    general1 = "" if aligned and chunks % warps_along_k == 0 else "general_"
    kind = "gated" if shape.is_gated else "ungated"
    steps = math.ceil(math.ceil(shape.hidden_size / 128) / warps_along_k)
    per_sm = 1 if general1 else _GEMM1_CTAS_PER_SM
    grid1 = min(per_sm * num_sms, max_blocks(shape, num_slots) * columns1 * steps)
    return DecodeConfig(Launch(f"gemm1_{kind}_{general1}", grid1, 256, _exchange_bytes(8)), gemm2, False)


def max_blocks(shape: LayerShape, num_slots: int) -> int:
    """The schedule's bound, for BLOCK_ROWS."""
    return schedules.max_blocks(num_slots, shape.num_experts, BLOCK_ROWS)


def partial_floats(shape: LayerShape, launch: Launch) -> int:
    """Of the buffer through which the CTAs of gemm1 add up a tile."""
    return launch.grid * (2 if shape.is_gated else 1) * _COLUMNS * BLOCK_ROWS


def _exchange_bytes(warps: int) -> int:
    return warps * BLOCK_ROWS * _PADDED * 4
