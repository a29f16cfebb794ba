"""Sizes, grids and the choice of an algorithm."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

WORLD_SIZES = (2, 4, 8)
MAX_WORLD, MAX_CTAS = 8, 128  # as in kernel.cu
DATA_AT = 8 * 2 * 2 * MAX_CTAS * MAX_WORLD + 1024  # bytes of a window before its data, as in kernel.cu

LAMPORT, ONE_SHOT_PUSH, ONE_SHOT_PULL, TWO_SHOT_PUSH, TWO_SHOT_PULL = ALGORITHMS = (
    "one-shot-lamport",
    "one-shot-push",
    "one-shot-pull",
    "two-shot-push",
    "two-shot-pull",
)

STOCK = "stock"
"""In a range: left to what is there without these kernels."""

VECTOR = 8
"""Elements of 16 bits that a thread loads at once."""
MAX_THREADS = 768  # as in kernel.cu
MAX_HIDDEN = 2 * VECTOR * MAX_THREADS
PLAIN_WIDTHS = (512, 1024, 2048)
"""Elements of a piece of a flat tensor: the narrowest of which MAX_CTAS blocks hold it all, so that little goes through
each multiprocessor's port."""


@dataclass(frozen=True)
class Space:
    """Bytes of a window's three parts, for one parity."""

    inbox: int = 0
    gather: int = 0
    lamport: int = 0

    def holds(self, other: Space) -> bool:
        return self.inbox >= other.inbox and self.gather >= other.gather and self.lamport >= other.lamport

    def __or__(self, other: Space) -> Space:
        """The least that holds both."""
        return Space(max(self.inbox, other.inbox), max(self.gather, other.gather), max(self.lamport, other.lamport))


@dataclass(frozen=True)
class Shape:
    """A call's work: `rows` of `width` elements, the last one shorter where `elements` is less than both say."""

    rows: int
    width: int
    elements: int


def flat(elements: int) -> Shape:
    """A tensor without rows of its own."""
    width = next((width for width in PLAIN_WIDTHS if elements <= width * MAX_CTAS), PLAIN_WIDTHS[-1])
    return Shape(-(-elements // width), width, elements)


def vectors_per_thread(width: int) -> int:
    return 1 if width <= VECTOR * MAX_THREADS else 2


def threads(width: int) -> int:
    """Whole warps, two at least: the second counts the call while the first waits for peers."""
    needed = -(-width // (VECTOR * vectors_per_thread(width)))
    return max(64, -(-needed // 32) * 32)


def grid(rows: int) -> int:
    return min(rows, MAX_CTAS)


def space_of(algorithm: str, shape: Shape, world_size: int) -> Space:
    """What a call needs of each window."""
    message = shape.elements * 2
    if algorithm == LAMPORT:
        return Space(lamport=message * world_size)
    if algorithm == ONE_SHOT_PUSH:
        return Space(inbox=message * world_size)
    if algorithm == ONE_SHOT_PULL:
        return Space(inbox=message)
    piece = -(-(shape.width // VECTOR) // world_size) * VECTOR * 2
    return Space(shape.rows * piece * world_size if algorithm == TWO_SHOT_PUSH else message, message)


def window_bytes(space: Space) -> int:
    """Of one window: signals, and data twice, for calls with an even and with an odd number."""
    return DATA_AT + 2 * (space.inbox + space.gather + space.lamport)


@dataclass(frozen=True)
class Range:
    """Messages of up to `max_bytes`, and above the range before, go by `algorithm`: one of ALGORITHMS, or STOCK."""

    max_bytes: int
    algorithm: str


DEFAULT_RANGES: dict[int, tuple[Range, ...]] = {
    # 8 GPUs lose to NCCL from about 48 KB by one-shot, 4 from 120 KB (published for RTX PRO 6000). Above, two-shot may
    # win or not: a host's own profile says so, and replaces all of it.
    2: (Range(256 << 10, LAMPORT),),
    4: (Range(96 << 10, LAMPORT),),
    8: (Range(32 << 10, LAMPORT),),
}
"""World size -> what serves a message where no profile says it; larger ones are left to others. Guess."""


def choose(ranges: Sequence[Range], message_bytes: int) -> str | None:
    """The algorithm for a message, or None: it is left to others, or larger than any range."""
    chosen = next((entry.algorithm for entry in ranges if message_bytes <= entry.max_bytes), STOCK)
    return None if chosen == STOCK else chosen


def space_for(ranges: Sequence[Range], world_size: int, width: int) -> Space:
    """What serves every message of the ranges, in rows of `width` or flat."""
    space = Space()
    for entry in ranges:
        if entry.algorithm == STOCK:
            continue
        elements = entry.max_bytes // 2
        for shape in (flat(elements), Shape(max(1, elements // width), width, max(1, elements // width) * width)):
            space |= space_of(entry.algorithm, shape, world_size)
    return Space(*(-(-size // 256) * 256 for size in (space.inbox, space.gather, space.lamport)))
