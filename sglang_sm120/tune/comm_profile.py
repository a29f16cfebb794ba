"""The profile that `sglang-sm120 tune --comm` writes: what each all-reduce took on a host, and the ranges made from it.

A server asks `for_server`, and gives `ranges(fused=True)` and `ranges(fused=False)` to its communicator.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import msgspec

from sglang_sm120.errors import ConfigError
from sglang_sm120.kernels.communication.all_reduce_rmsnorm import config
from sglang_sm120.kernels.communication.all_reduce_rmsnorm.config import ALGORITHMS, DEFAULT_RANGES, STOCK, Range
from sglang_sm120.runners import profile as moe_profile
from sglang_sm120.runners.profile import Machine, current_machine

FORMAT = "sglang-sm120 all-reduce profile 1"
MARGIN = 0.02
"""By how much ours must be faster than the baseline at least, since clocks and temperatures differ by that much."""

MSCCLPP_NAME = "mscclpp"
"""The candidate that ours is not compared with: a server that has MSCCL++ has not our kernels."""

_ALIGNMENT = 16  # bytes, of messages and so of the borders between ranges
_AGAIN = "run `sglang-sm120 tune --comm` on this machine again, or use no profile"


class CommCandidate(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One way to reduce at one size: its times of one call in microseconds, or why there are none.

    A sample is that of the slowest rank. reason: "wrong: ..." or "failed: ...".
    """

    name: str
    samples_us: list[float] = []
    reason: str = ""

    @property
    def is_ours(self) -> bool:
        return self.name in ALGORITHMS

    @property
    def median_us(self) -> float:
        """Infinite where nothing was timed."""
        return statistics.median(self.samples_us) if self.samples_us else math.inf

    @property
    def spread(self) -> float:
        """Between the first and the third quartile of the samples, over the median: one hiccup of many is none."""
        if len(self.samples_us) < 2:
            return 0.0
        first, _, third = statistics.quantiles(self.samples_us, n=4, method="inclusive")
        return (third - first) / self.median_us


class CommPoint(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One size. fused: with residual add and RMSNorm behind the sum."""

    rows: int
    bytes: int
    fused: bool
    candidates: list[CommCandidate]

    def best(self, *, ours: bool) -> CommCandidate | None:
        """The fastest by its median, of our algorithms or of the baselines without MSCCL++."""
        timed = [c for c in self.candidates if c.samples_us and c.is_ours == ours and c.name != MSCCLPP_NAME]
        return min(timed, key=lambda c: c.median_us, default=None)

    @property
    def needed_margin(self) -> float:
        """What ours has to win by: the spread of the two that are compared, where that is more than MARGIN."""
        compared = (self.best(ours=True), self.best(ours=False))
        return max(MARGIN, *(candidate.spread for candidate in compared if candidate is not None), 0.0)

    @property
    def winner(self) -> CommCandidate | None:
        """Ours that is to serve this size, by what was measured at it alone; None: leave it to what there was."""
        ours, baseline = self.best(ours=True), self.best(ours=False)
        if ours is not None and baseline is not None:
            return ours if ours.median_us * (1 + self.needed_margin) < baseline.median_us else None
        return ours


class CommProfile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One host's all-reduces between `world_size` GPUs, in rows of `hidden_size`.

    gpus: their names, by rank. link: NVLINK, PCIE or another text of `tune.comm_host`. baseline: what was imported, or
    "none". missing: baselines that are not there, and why. points: sizes ascend in each kind.
    """

    format: str
    created: str  # ISO 8601, UTC
    command: str
    machine: Machine
    gpus: list[str]
    link: str
    world_size: int
    hidden_size: int
    dtype: str
    baseline: str
    missing: list[str]
    points: list[CommPoint]

    def of(self, fused: bool) -> list[CommPoint]:
        """The points of one kind."""
        return [point for point in self.points if point.fused == fused]

    def has_baseline(self, fused: bool) -> bool:
        """Whether any baseline was timed."""
        return any(point.best(ours=False) is not None for point in self.of(fused))

    @property
    def default_end(self) -> int:
        """Up to which message ours is taken where nothing is known of what it is to be faster than."""
        return DEFAULT_RANGES[self.world_size][-1].max_bytes

    def choice(self, point: CommPoint) -> str:
        """One of ALGORITHMS, or STOCK."""
        winner = point.winner
        blind = point.best(ours=False) is None and point.bytes > self.default_end
        return STOCK if winner is None or blind else winner.name

    def ranges(self, fused: bool, choice: Callable[[CommPoint], str] | None = None) -> tuple[Range, ...]:
        """What serves which message, as `Communicator.connect` takes it; empty: nothing is known.

        The border between two sizes is their geometric mean. Nothing is said beyond the largest size; nor, without a
        baseline, beyond `default_end`. choice: what serves a point; None: `self.choice`.
        """
        choice = self.choice if choice is None else choice
        points = self.of(fused)
        end = points[-1].bytes if points else 0
        if not self.has_baseline(fused):
            points, end = [p for p in points if p.bytes <= self.default_end], min(end, self.default_end)
        borders = [math.isqrt(a.bytes * b.bytes) // _ALIGNMENT * _ALIGNMENT for a, b in pairwise(points)]
        found: list[Range] = []
        for point, border in zip(points, [*borders, end], strict=False):
            chosen = choice(point)
            if found and found[-1].algorithm == chosen:
                found.pop()
            found.append(Range(border, chosen))
        return tuple(found)

    def uncovered_reason(self, world_size: int, hidden_size: int, dtype: str) -> str | None:
        """One sentence on why this profile says nothing about such messages, or None."""
        for what, mine, theirs in (
            ("world size", self.world_size, world_size),
            ("hidden size", self.hidden_size, hidden_size),
            ("dtype", self.dtype, dtype),
        ):
            if mine != theirs:
                return f"it is of {what} {mine}, not {theirs}"
        return None


def default_path(world_size: int, gpu: str | None = None) -> Path:
    """Where the profile of so many GPUs of this name (None: this machine's) lies: beside that of MoE layers."""
    beside = moe_profile.default_path(gpu)
    return beside.with_name(f"comm{beside.stem.removeprefix('moe')}-x{world_size}.json")


def for_server(
    path: Path | str | None,
    world_size: int,
    hidden_size: int,
    dtype: str = "bfloat16",
    machine: Machine | None = None,
) -> CommProfile | None:
    """The profile by which a server of this machine chooses, or None where there is none for it.

    Args:
        path: a file that was named and has to be there; None: where `tune --comm` writes it, if it did.
        world_size, hidden_size, dtype: the server's. A profile of others is no entry: None, as if it were not there.
        machine: what this machine is; None: it is asked.

    Raises: ConfigError: the file cannot be read or is damaged, or was measured on another machine or with other
        versions. With `path` None a server does well to log it and go on without.
    """
    machine = current_machine() if machine is None else machine
    if path is None:
        path = default_path(world_size, machine.gpu)
        if not path.exists():
            return None
    profile = _of_machine(path, machine)
    return profile if profile.uncovered_reason(world_size, hidden_size, dtype) is None else None


def for_server_named(
    path: Path | str, world_size: int, hidden_size: int, dtype: str = "bfloat16", machine: Machine | None = None
) -> CommProfile:
    """As `for_server`, of a file that the user named: one that says nothing about this server is an error too.

    Raises: ConfigError.
    """
    profile = _of_machine(path, current_machine() if machine is None else machine)
    require_covers(profile, path, world_size, hidden_size, dtype)
    return profile


def require_covers(profile: CommProfile, path: Path | str, world_size: int, hidden_size: int, dtype: str) -> None:
    """Raises ConfigError for a profile that says nothing about such messages. path: where it was read from."""
    reason = profile.uncovered_reason(world_size, hidden_size, dtype)
    if reason is not None:
        raise ConfigError(
            f"all-reduce profile {path} is not of this server: {reason}",
            f"a profile of {world_size} GPUs, hidden size {hidden_size}, {dtype}",
            "run `sglang-sm120 tune --comm` for this model and number of GPUs, or use no profile",
        )


def _of_machine(path: Path | str, machine: Machine) -> CommProfile:
    profile = read(path)
    mismatch = profile.machine.mismatch(machine)
    if mismatch is not None:
        raise ConfigError(
            f"all-reduce profile {path} was measured elsewhere: {mismatch}",
            "a profile of this machine and these versions",
            _AGAIN,
        )
    return profile


class _Head(msgspec.Struct):
    format: str = ""


def read(path: Path | str) -> CommProfile:
    """Read and check a profile.

    Raises: ConfigError: it cannot be read, is not such a profile, or holds what no measurement gives.
    """
    path = Path(path).expanduser()
    try:
        content = path.read_bytes()
        head = msgspec.json.decode(content, type=_Head)
        profile = msgspec.json.decode(content, type=CommProfile) if head.format == FORMAT else None
    except OSError as error:
        raise ConfigError(
            f"all-reduce profile {path}: {error.strerror or error}", "a file that can be read", _AGAIN
        ) from error
    except msgspec.DecodeError as error:
        raise ConfigError(
            f"all-reduce profile {path}: {error}", "what `sglang-sm120 tune --comm` writes", _AGAIN
        ) from error
    if profile is None:
        raise ConfigError(f"all-reduce profile {path} is of format {head.format!r}", repr(FORMAT), _AGAIN)
    fault = _fault(profile)
    if fault is not None:
        raise ConfigError(f"all-reduce profile {path}: {fault}", "what a measurement gives", _AGAIN)
    return profile


def write(profile: CommProfile, path: Path | str) -> None:
    """Write it, whole or not at all.

    Raises: ConfigError: the file cannot be written.
    """
    moe_profile.write(profile, path)


def _fault(profile: CommProfile) -> str | None:
    """What no measurement gives: ranges made from it could not be served."""
    if profile.world_size not in config.WORLD_SIZES or len(profile.gpus) != profile.world_size:
        return f"world size {profile.world_size}, {len(profile.gpus)} GPUs"
    if profile.hidden_size % config.VECTOR or not 0 < profile.hidden_size <= config.MAX_HIDDEN:
        return f"hidden size {profile.hidden_size}"
    if not profile.points:
        return "no sizes"
    for fused in (True, False):
        rows = [point.rows for point in profile.of(fused)]
        if rows != sorted(set(rows)) or min(rows, default=1) < 1:
            return f"token counts {rows}, which do not ascend from 1 on"
    for point in profile.points:
        names = [candidate.name for candidate in point.candidates]
        if point.bytes != 2 * point.rows * profile.hidden_size or len(set(names)) != len(names):
            return f"{point.rows} tokens of {point.bytes} bytes, by {', '.join(names)}"
        if not all(0 < us < math.inf for candidate in point.candidates for us in candidate.samples_us):
            return f"times at {point.rows} tokens that are not above 0"
        if any(candidate.samples_us and candidate.reason for candidate in point.candidates):
            return f"times at {point.rows} tokens of what was wrong or failed"
    return None
