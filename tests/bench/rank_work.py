"""What ranks do in tests of `bench.ranks`. Imported in each rank too."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from sglang_sm120.bench.ranks import Rank
from sglang_sm120.errors import ContractError


def told(rank: Rank, factor: int) -> dict[str, Any]:
    """Who this is, and what all said; the last rank is ready first."""
    time.sleep(0.2 * (rank.world_size - rank.rank))
    names = [message.decode() for message in rank.exchange(f"rank {rank.rank}".encode())]
    rank.barrier()
    return {"rank": rank.rank, "world": rank.world_size, "device": rank.device, "product": factor * rank.rank,
            "names": names, "pid": os.getpid()}  # fmt: skip


def reports(rank: Rank, count: int) -> str:
    for number in range(count):
        rank.progress((number, rank.rank))
    return "done"


def one_raises(rank: Rank, which: int) -> None:
    """The others wait for it."""
    if rank.rank == which:
        raise KeyError("no such thing")
    rank.barrier()


def one_refuses(rank: Rank) -> None:
    if rank.rank == 1:
        raise ContractError("what was found", "what is needed", "what to do")
    rank.barrier()


def one_ends(rank: Rank, folder: str) -> None:
    """Without a word, as after a segmentation fault. The others wait for it."""
    _leave_pid(rank, folder)
    rank.barrier()
    if rank.rank == 1:
        os._exit(7)
    time.sleep(600)


def one_hangs(rank: Rank, folder: str) -> str:
    _leave_pid(rank, folder)
    if rank.rank == 1:
        time.sleep(600)
    return "done"


def all_sleep(rank: Rank, folder: str) -> None:
    _leave_pid(rank, folder)
    rank.barrier()
    rank.progress("asleep")
    time.sleep(600)


def cannot_be_sent(rank: Rank) -> Any:
    return lambda: rank


def _leave_pid(rank: Rank, folder: str) -> None:
    (Path(folder) / str(rank.rank)).write_text(str(os.getpid()))
