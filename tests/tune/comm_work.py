"""All-reduce profiles worked by hand, and what ranks do in place of measuring. Imported in each rank too."""

from __future__ import annotations

import os
import time
from typing import Any

import msgspec

from sglang_sm120.bench.all_reduce import Work
from sglang_sm120.bench.ranks import Rank
from sglang_sm120.errors import UnsupportedError
from sglang_sm120.runners.profile import Machine
from sglang_sm120.tune import comm_profile
from sglang_sm120.tune.comm_profile import CommCandidate, CommPoint, CommProfile

LAMPORT, PUSH, TWO_SHOT, NCCL = "one-shot-lamport", "one-shot-push", "two-shot-push", "nccl"
WRONG = "wrong: rank 1: relative error 0.5"
HIDDEN = 2048  # 4 KB a token
MACHINE = Machine(
    gpu="Test GPU", capability="12.0", multiprocessors=4, driver="1.2", torch="2.0", triton="3.0", flashinfer=None,
    sglang_sm120="0.1",
)  # fmt: skip


def candidate(name: str, how: float | list[float] | str) -> CommCandidate:
    """how: one time, samples, or the reason why there are none."""
    if isinstance(how, str):
        return CommCandidate(name=name, reason=how)
    return CommCandidate(name=name, samples_us=how if isinstance(how, list) else [how] * 7)


def point(rows: int, fused: bool = True, **hows: Any) -> CommPoint:
    """Candidates by name, with _ for -."""
    named = {name.replace("_", "-"): how for name, how in hows.items()}
    return CommPoint(
        rows=rows,
        bytes=2 * HIDDEN * rows,
        fused=fused,
        candidates=[candidate(name, how) for name, how in named.items()],
    )


def with_names(of: CommPoint, hows: dict[str, Any]) -> CommPoint:
    """The point with candidates of any names."""
    return msgspec.structs.replace(of, candidates=[candidate(name, how) for name, how in hows.items()])


def profile(*points: CommPoint, **changes: Any) -> CommProfile:
    values: dict[str, Any] = {
        "format": comm_profile.FORMAT, "created": "2026-01-01T00:00:00+00:00", "command": "sglang-sm120 tune --comm",
        "machine": MACHINE, "gpus": ["Test GPU"] * 2, "link": "PCIe", "world_size": 2, "hidden_size": HIDDEN,
        "dtype": "bfloat16", "baseline": "module:function", "missing": [], "points": list(points),
    }  # fmt: skip
    return CommProfile(**(values | changes))


def canned() -> CommProfile:
    """With a norm: Lamport to 8 tokens, then two-shot, then NCCL. Alone: Lamport at 1 token; at 8 too little; NCCL."""
    return profile(
        point(1, one_shot_lamport=4.0, one_shot_push=5.0, two_shot_push=8.0, nccl=12.0),
        point(8, one_shot_lamport=5.0, one_shot_push=5.0, two_shot_push=8.0, nccl=14.0),
        point(64, one_shot_lamport=30.0, one_shot_push=WRONG, two_shot_push=20.0, nccl=25.0),
        point(512, two_shot_push=200.0, nccl=150.0),
        point(1, False, one_shot_lamport=4.0, nccl=12.0),
        point(8, False, one_shot_lamport=[7.0, 7.0, 7.0, 7.0, 9.0, 9.0, 9.0], nccl=8.0),
        point(64, False, one_shot_lamport="failed: rank 0: RuntimeError: no", nccl=25.0),
    )


# ---- in place of `bench.all_reduce.measure` ----
def _found(rank: Rank, work: Work, hows: dict[str, Any]) -> dict[str, Any]:
    """Every candidate takes its time an element, 1 us more on each next rank."""
    points = []
    for fused, rows in work.points:
        candidates = {
            name: {"samples_us": [how * rows + rank.rank] * work.samples} if isinstance(how, float) else dict(how)
            for name, how in hows.items()
        }
        points.append({"rows": rows, "bytes": 2 * rows * work.hidden_size, "fused": fused, "candidates": candidates})
        rank.progress((len(points), len(work.points)))
    return {"points": points, "missing": [] if work.baseline is None else [f"other: not on rank {rank.rank}"]}


def measured(rank: Rank, work: Work) -> dict[str, Any]:
    """Lamport is faster than NCCL."""
    hows = {LAMPORT: 1.0} | ({} if work.baseline is None else {NCCL: 9.0})
    return _found(rank, work, hows)


def one_is_wrong(rank: Rank, work: Work) -> dict[str, Any]:
    return _found(rank, work, {LAMPORT: {"wrong": "rank 1: relative error 0.5"}, PUSH: 2.0, NCCL: 9.0})


def cannot_share(rank: Rank, work: Work) -> dict[str, Any]:
    raise UnsupportedError("the GPUs of this group cannot share memory: no", "CUDA IPC", "bench p2p")


def hangs(rank: Rank, work: Work) -> dict[str, Any]:
    rank.progress((1, len(work.points)))
    if rank.rank == 1:
        time.sleep(600)
    return {"points": [], "missing": []}


def interrupts(rank: Rank, work: Work) -> dict[str, Any]:
    """As Ctrl-C would, in the process that waits."""
    if rank.rank == 0:
        os.kill(os.getppid(), 2)
    time.sleep(600)
    return {}
