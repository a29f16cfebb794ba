"""How much of a range an access policy window keeps. What was measured: docs/kernels/memory-l2.md."""

from __future__ import annotations

from sglang_sm120.errors import ContractError


def hit_ratio(working_set_bytes: int, set_aside_bytes: int) -> float:
    """The part of a working set that its set-aside holds, so that its lines do not push each other out.

    Args:
        working_set_bytes: of all that is read between two reads of the same line under persisting windows; 1 or more.
        set_aside_bytes: of L2.

    Returns:
        min(1, set_aside_bytes / working_set_bytes).

    Raises:
        ContractError: a working set below 1 byte, a negative set-aside.
    """
    if working_set_bytes < 1 or set_aside_bytes < 0:
        raise ContractError(
            f"a working set of {working_set_bytes} bytes and a set-aside of {set_aside_bytes}",
            "1 byte or more, and 0 or more",
            "pass the bytes that the windows cover together, and what set_aside granted",
        )
    return min(1.0, set_aside_bytes / working_set_bytes)
