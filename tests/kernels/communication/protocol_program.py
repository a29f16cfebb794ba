"""The all-reduce's protocol: the choices of its design, and what one CTA does in one call of each algorithm.

A row is what one CTA handles as a whole; its datum from one source is a word. Words of a row arrive on their own too,
and which of them a CTA waits for together does not matter to the model: further rows stand for them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

SIGNALLED = ("one_shot_push", "one_shot_pull", "two_shot_push", "two_shot_pull")
ALGORITHMS = (*SIGNALLED, "lamport")
REGIONS = ("inbox", "flags 0", "gather", "flags 1", "lamport")  # those with flags in the order in which a call writes
INBOX, GATHER, LAMPORT, FLAGS = 0, 2, 4, (1, 3)  # indices of REGIONS
EMPTY = 0  # what zeroed memory holds, and what no word of lamport equals


@dataclasses.dataclass(frozen=True)
class Protocol:
    """The choices of the design. The defaults are the real protocol; a planted bug alters one of them."""

    data_buffers: int = 2  # of inbox, gather and lamport; which one: epoch % data_buffers
    flag_buffers: int = 2
    release: bool = True  # a flag is a store-release; otherwise a plain store
    epoch_in_memory: bool = True  # otherwise a constant of each captured call, the same in every replay
    zeroed: bool = True  # every rank zeroes its window before its first call
    host_barrier: bool = True  # no rank starts its first call before all have zeroed
    stream_order: bool = True  # otherwise two streams: a call waits for the end of the last but one only
    last_counts: bool = True  # of a call's CTAs, the last to have read the epoch counts it on; otherwise CTA 0
    first_epoch: int = 1  # not 0, which is what zeroed flags hold
    resets: bool = True  # a word of lamport that was taken is EMPTY again
    reset_by_end: bool = True  # and that is so before the next call of its rank starts
    lamport_region: int = LAMPORT  # used by nothing else


class Call(NamedTuple):
    algorithm: str
    grid: int = 1  # CTAs, on every rank; with fewer of them, each takes more of the rows
    shift: int = 0  # a message of another size has its words elsewhere in inbox, gather and lamport: so many further


class Scenario(NamedTuple):
    """Every rank runs the calls of `graph`, `replays` times."""

    ranks: int
    graph: tuple[Call, ...]
    replays: int = 1
    least_rows: int = 1

    @property
    def rows(self) -> int:
        return max(self.least_rows, *(call.grid for call in self.graph))


class Op(NamedTuple):
    """One operation of a CTA. `slot` is the rank that a datum or flag is of; `row` is the CTA where it is a flag."""

    kind: str  # "start" (and read the epoch), "write", "tick" (the last one counts the epoch on), "wait", "read", "end"
    holder: int = -1  # whose window
    region: int = -1
    slot: int = -1
    row: int = -1
    awaited: tuple[tuple[int, int], ...] = ()  # slots and rows, in any order


def program(algorithm: str, ranks: int, rank: int, cta: int, rows: range, lamport: int = LAMPORT) -> tuple[Op, ...]:
    """What one CTA does in one call, in order. In the region `lamport` a wait takes what it waits for."""
    peers = [p for p in range(ranks) if p != rank]
    push = algorithm.endswith("push")

    def write(region: int, holders: list[int]) -> Iterator[Op]:
        yield from (Op("write", holder, region, rank, row) for holder in holders for row in rows)

    def signal(region: int) -> Iterator[Op]:
        yield from (Op("write", peer, region, rank, cta) for peer in peers)
        if region == FLAGS[0]:
            yield Op("tick")
        yield Op("wait", rank, region, awaited=tuple((peer, cta) for peer in peers))

    def read(region: int, sources: list[int]) -> Iterator[Op]:
        yield from (Op("read", rank if push else p, region, p, row) for p in sources for row in rows)

    if algorithm == "lamport":
        words = tuple((peer, row) for peer in peers for row in rows)
        return (Op("start"), *write(lamport, peers), Op("tick"), Op("wait", rank, lamport, awaited=words), Op("end"))
    ops = [Op("start"), *write(INBOX, peers if push else [rank]), *signal(FLAGS[0]), *read(INBOX, peers)]
    if algorithm.startswith("two_shot"):  # of the gathered shards, only push reads its own from memory
        ops += [*write(GATHER, [*peers, rank] if push else [rank]), *signal(FLAGS[1])]
        ops += read(GATHER, [*peers, rank] if push else peers)
    return (*ops, Op("end"))
