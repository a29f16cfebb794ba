"""What a prefetch asks for, in plain Python."""

from __future__ import annotations

from collections.abc import Iterable


def prefetch(ranges: Iterable[tuple[int, int]], max_bytes: int) -> list[tuple[int, int]]:
    """The parts that are asked for: whole vectors of 16 bytes inside each range, in order, `max_bytes` at most."""
    parts, left = [], max_bytes // 16 * 16
    for address, num_bytes in ranges:
        first = -(-address // 16) * 16
        size = min((address + num_bytes) // 16 * 16 - first, left)
        if size > 0:
            parts.append((first, size))
            left -= size
    return parts
