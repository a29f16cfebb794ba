"""How the schedule kernel is launched: one block, its threads by the number of slots and experts."""

from __future__ import annotations

from typing import NamedTuple

WARP = 32
MIN_THREADS = 256
MAX_THREADS = 1024
MAX_EXPERTS = MAX_THREADS  # one thread an expert
MAX_SHARED_BYTES = 101_376  # a block's most on compute capability 12.x
MIN_CAPABILITY = (8, 0)
MAX_ROWS = 2**30  # positions are int32; a loop's end plus its step has to fit too


class LaunchShape(NamedTuple):
    """threads: of the one block; counting_warps: those that own a segment of the slots; shared_bytes: dynamic."""

    threads: int
    counting_warps: int
    shared_bytes: int


def launch_shape(num_slots: int, num_experts: int) -> LaunchShape:
    """A thread a slot while that is possible: then each warp does one step. It keeps up to 8 in registers.

    A decode step of a few tokens gets the smallest block, whose barriers are short, and ONE row of counters.
    """
    threads = -(-max(num_slots, num_experts, MIN_THREADS) // WARP) * WARP
    threads = min(threads, MAX_THREADS)
    fixed = 4 * (2 * num_experts + WARP + 1)  # the experts' first blocks and rows, the warps' sums of blocks, a flag
    fitting = (MAX_SHARED_BYTES - fixed) // (4 * num_experts)
    counting_warps = min(threads // WARP, -(-num_slots // WARP), fitting)
    return LaunchShape(threads, counting_warps, fixed + 4 * num_experts * counting_warps)
