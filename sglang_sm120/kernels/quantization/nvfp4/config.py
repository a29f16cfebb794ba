"""The format's sizes, and how the kernels are launched: a thread is one group of 16, a block some rows of groups."""

from __future__ import annotations

from typing import NamedTuple

GROUP_SIZE = 16  # elements along K that share one block scale
SWIZZLE_ROWS = 128
SWIZZLE_COLS = 4

THREADS = 256
SWIZZLE_THREADS = 128  # the words of one 128x4 tile
SWIZZLE_BLOCK_COLUMNS = 32  # eight tiles, see kernel.cu
MIN_CAPABILITY = (8, 9)
MAX_SIDE = 2**30  # rows and columns are int32 in the kernels, and a block's end has to fit too


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is not below `value`."""
    return (value + multiple - 1) // multiple * multiple


class Blocks(NamedTuple):
    """How a grid covers [rows, columns]: 2**log2_threads_along threads of a block lie along a row, the others down."""

    log2_threads_along: int
    along: int
    down: int


def blocks(rows: int, columns: int) -> Blocks:
    """The fewest threads beyond a short row; then as many rows as make the block full."""
    log2 = min(max(columns - 1, 0).bit_length(), THREADS.bit_length() - 1)
    return Blocks(log2, -(-columns >> log2), -(-rows // (THREADS >> log2)))
