"""How a prefetch is issued. What was measured: docs/measurements.md#l2."""

from __future__ import annotations

MAX_RANGES = 32
"""Of one launch, in its parameters; a call with more is several launches."""

THREADS = 32
BLOCKS = 64
CHUNK_BYTES = 4096
"""One SM asks for some 130 GB/s, so few blocks take longer than the memory; from 32 to 132 made no difference."""

MAX_INTERVAL_NS = 2**31 - 1


def interval_ns(rate_gb_s: float, blocks: int = BLOCKS, chunk_bytes: int = CHUNK_BYTES) -> int:
    """Nanoseconds between two rounds of all blocks for so many GB/s (1e9 bytes); 0, unpaced, for a rate of 0."""
    return round(blocks * THREADS * chunk_bytes / rate_gb_s) if rate_gb_s else 0
