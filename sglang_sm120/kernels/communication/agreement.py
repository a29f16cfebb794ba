"""All ranks of a group, or none: each does its part, and all hear of the first that could not."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sglang_sm120.errors import Sm120Error, UnsupportedError

Exchange = Callable[[bytes], Sequence[bytes]]
"""A collective of the group: what each rank passed, in the ranks' order. Returns when every rank has called."""

NEEDED = "ranks on one host, with CUDA IPC and peer access between all their GPUs"
FIX = "`sglang-sm120 bench p2p` finds what is wrong; --sm120-all-reduce off serves without"
_DONE, _FAILED = b".", b"!"


def agree(exchange: Exchange, what: str, step: Callable[[], object]) -> list[bytes]:
    """Do something on every rank that may fail on some: all go on, or all raise. A collective.

    Args:
        exchange: the group's.
        what: what a failure means, such as "its kernels cannot be loaded".
        step: this rank's part; bytes that it returns are for the others.

    Returns:
        What each rank's step returned, in the ranks' order; b"" for what is not bytes.

    Raises:
        UnsupportedError: with the first rank that could not, and why.
    """
    try:
        result = step()
        message = _DONE + (result if isinstance(result, bytes) else b"")
    except Exception as error:  # whatever it is: the others wait to be told
        why = f"{error.found} ({error.fix})" if isinstance(error, Sm120Error) else f"{type(error).__name__}: {error}"
        message = _FAILED + why.encode()
    told = exchange(message)
    for rank, heard in enumerate(told):
        if heard[:1] == _FAILED:
            raise UnsupportedError(f"rank {rank}: {what}: {heard[1:].decode()}", NEEDED, FIX)
    return [heard[1:] for heard in told]
