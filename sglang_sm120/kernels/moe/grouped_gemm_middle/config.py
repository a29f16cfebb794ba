"""Rows of a block and grids of the middle kernels: a pure function of shapes."""

from __future__ import annotations

from dataclasses import dataclass

from sglang_sm120.kernels.moe.expert_schedule import api as schedules
from sglang_sm120.kernels.moe.w4a16 import LayerShape

BLOCK_ROWS = (16, 32, 48, 64)
DEFAULT_ORDER = "row_major"  # docs/measurements.md#moe-bytes: fewer bytes than column_major on an H200
GENERAL_BLOCK_ROWS = 32
THREADS = 256
MAX_SHARED_BYTES = 101_376  # a block's most on compute capability 12.x
_SM_SHARED_BYTES = 102_400  # a multiprocessor's, there; each CTA costs 1 KiB more than it asks for
_RESERVED_BYTES = 1024

_STAGES, _CHUNK = 3, 128  # STAGES in kernel.cu; elements along K of a stage
_EXCHANGE_ROW_BYTES = 528  # of a row of x: 132 floats (gemm1) or 264 16-bit results (gemm2)

# 16 rows up to this mean of rows an expert, else 32. docs/measurements.md#moe: on an H200 16 rows win at a mean of 8,
# and 32 at 31 and 128, where 48 and 64 read fewer bytes but take 5 to 10 % longer; where between 8 and 31 is a guess.
# 48 and 64 are for a GPU with less bandwidth for its arithmetic: not measured.
_FEW_ROWS = 12


@dataclass(frozen=True)
class MiddleConfig:
    """block_rows of the schedule; names of kernels less the dtype; grids in CTAs; dynamic shared memory in bytes."""

    block_rows: int
    gemm1: str
    gemm2: str
    grid1: int
    grid2: int
    shared_bytes: int


def is_aligned(shape: LayerShape) -> bool:
    """Whether the faster kernels cover the layer: whole tiles and chunks everywhere. They are for gated layers only."""
    return shape.is_gated and shape.intermediate_size % 128 == 0 and shape.hidden_size % 256 == 0


def choose_block_rows(shape: LayerShape, num_slots: int) -> int:
    """By the mean rows of an expert that has any. Too few rows a block read weights twice, too many waste registers."""
    if not is_aligned(shape):
        return GENERAL_BLOCK_ROWS
    mean = num_slots / shape.num_experts
    return 16 if mean <= _FEW_ROWS else 32


def shared_bytes(block_rows: int) -> int:
    """Dynamic shared memory of a CTA: STAGES chunks of x, and the exchange of the epilogue. Exact."""
    return block_rows * (_STAGES * _CHUNK * 2 + _EXCHANGE_ROW_BYTES)


def ctas_per_sm(block_rows: int, *, general: bool) -> int:
    """By registers (128 a thread up to 32 rows, else one CTA) and by shared memory on compute capability 12.x."""
    by_registers = 2 if block_rows <= 32 and not general else 1
    return min(by_registers, _SM_SHARED_BYTES // (shared_bytes(block_rows) + _RESERVED_BYTES))


def choose(shape: LayerShape, num_slots: int, num_sms: int, block_rows: int | None = None) -> MiddleConfig:
    """Persistent grids, no larger than the work."""
    aligned = is_aligned(shape)
    rows = choose_block_rows(shape, num_slots) if block_rows is None else block_rows
    general = "" if aligned else "general_"
    kind = "gated" if shape.is_gated else "ungated"
    resident = ctas_per_sm(rows, general=not aligned) * num_sms
    blocks = max_blocks(shape, num_slots, rows)
    columns1 = -(-shape.intermediate_size // (128 if shape.is_gated else 256))
    columns2 = -(-shape.hidden_size // 256)
    return MiddleConfig(
        block_rows=rows,
        gemm1=f"gemm1_{kind}_{general}{rows}_",
        gemm2=f"gemm2_{general}{rows}_",
        grid1=min(resident, blocks * columns1),
        grid2=min(resident, blocks * columns2),
        shared_bytes=shared_bytes(rows),
    )


def max_blocks(shape: LayerShape, num_slots: int, block_rows: int) -> int:
    """The schedule's bound, for this layer."""
    return schedules.max_blocks(num_slots, shape.num_experts, block_rows)
