"""Which of SGLang's own ways to sum a profile has as the fastest, at the sizes that ours is not chosen for."""

from __future__ import annotations

from collections.abc import Iterable

from sglang_sm120.kernels.communication.all_reduce_rmsnorm.config import STOCK, Range
from sglang_sm120.tune.comm_profile import MARGIN, MSCCLPP_NAME, CommCandidate, CommPoint, CommProfile

NCCL, CUSTOM, PCIE_IPC, MSCCLPP = (f"{STOCK}:{way}" for way in ("nccl", "custom", "pcie_ipc", "mscclpp"))

PCIE_IPC_NAME = "flashinfer pcie_ipc"
_WAYS = {
    "nccl": NCCL,
    "sglang custom": CUSTOM,
    "sglang custom v2": CUSTOM,
    PCIE_IPC_NAME: PCIE_IPC,
    MSCCLPP_NAME: MSCCLPP,
}
_LEFT_OFF = (PCIE_IPC_NAME, MSCCLPP_NAME)  # by SGLang, unless it is told


def winner(point: CommPoint, *, with_mscclpp: bool = True) -> CommCandidate | None:
    """The fastest that is not ours; None: nothing was timed.

    What SGLang leaves off has to win over the others by MARGIN and by the samples' spread, as ours has to.
    """
    timed = [c for c in point.candidates if c.samples_us and not c.is_ours and (with_mscclpp or c.name != MSCCLPP_NAME)]
    best, usual = _fastest(timed), _fastest(c for c in timed if c.name not in _LEFT_OFF)
    if best is None or usual is None:
        return best
    margin = max(MARGIN, best.spread, usual.spread)
    return best if best.median_us * (1 + margin) < usual.median_us else usual


def choice(profile: CommProfile, point: CommPoint, *, with_mscclpp: bool = True) -> str:
    """One of ALGORITHMS; or NCCL, CUSTOM, PCIE_IPC, MSCCLPP; or STOCK, where what won has no name in SGLang."""
    chosen, best = profile.choice(point), winner(point, with_mscclpp=with_mscclpp)
    return chosen if chosen != STOCK or best is None else _WAYS.get(best.name, STOCK)


def ranges(profile: CommProfile, fused: bool, *, with_mscclpp: bool = True) -> tuple[Range, ...]:
    """As `CommProfile.ranges`, with the name of what won in the place of STOCK."""
    return profile.ranges(fused, lambda point: choice(profile, point, with_mscclpp=with_mscclpp))


def spans(of: Iterable[Range], name: str) -> list[tuple[int, int]]:
    """(above, up to) in bytes, of each range that goes by this name."""
    found, start = [], 0
    for entry in of:
        if entry.algorithm == name:
            found.append((start, entry.max_bytes))
        start = entry.max_bytes
    return found


def _fastest(candidates: Iterable[CommCandidate]) -> CommCandidate | None:
    return min(candidates, key=lambda c: c.median_us, default=None)
