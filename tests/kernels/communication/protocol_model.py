"""An explicit-state model of the all-reduce's protocol: every interleaving of a few calls, and what each read sees.

A test on GPUs sees the interleavings that the machine happens to make, and the faulty ones may need a rank that is slow
by a whole call. Here all are visited. A datum carries (source rank, call): what call k reads of rank p must be (p, k).
And until every rank has ended every call, there must be a next step.

Memory. A write, to a peer's window or to the writer's own, is first in flight and is delivered by a step of its own: at
any later time, after the end of its kernel too, and in any order. There are three exceptions. A store-release comes
after what its CTA wrote in this call before (all its threads: a CTA barrier is between). Writes of a rank to one place
keep the order of their calls, where calls are ordered. And where lamport has taken a word, EMPTY is delivered before
the next call of this rank starts: a kernel's writes to its own GPU's memory are there when it has ended.
Flags of one phase have no order: different threads store them. Nor have words of lamport, nor has a rank's EMPTY any
with a peer's next word. A CTA sees its own writes at once and others' when they are delivered, so the load-acquire of a
wait needs no more.
Not modelled: caches that an acquire leaves stale, a word that is torn, an epoch that wraps around.

Execution. A rank's calls run in stream order: the CTAs of a call start when all CTAs of the call before have ended, and
interleave freely. A rank that is slow, or stands still while others go as far as they can, is an interleaving like any
other. Windows start with what an earlier life of two calls left: data, and flags that equal the first two epochs.

Reduction. Steps only go forward (the graph of states has no cycle in which one could be put off for ever), and so this
loses neither a wrong datum nor a deadlock; `reduce=False` does without, for comparison.
- A write is issued as soon as its CTA gets there, which only adds to what is in flight. Others see its delivery, a step
  of its own, never skipped: what can happen before a CTA issues can as well happen before anything is delivered.
- Reads, and what follows them up to the next wait or the CTA's end, are one step. A read changes nothing and no later
  step depends on what it saw, so it may be put off until then: what is read wrongly in some state is read wrongly by
  the joint step in that state. A word of lamport is taken by a step of its own, since a write comes of it.
- A CTA ticks in the step in which it has written. In stream order only CTAs of the same call that have not started can
  tell, and that they start before is another interleaving. Where calls of a rank overlap, ticking is a step of its own.
- A call of one CTA starts, and reads the epoch, as soon as the call before has ended, since nobody could change it.
  With more CTAs, or calls that overlap, that is a step: that all have read it before it changes is to be shown.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

from communication.protocol_program import EMPTY, FLAGS, REGIONS, Op, Protocol, Scenario, program

WRONG_DATUM, DEADLOCK = "wrong datum", "deadlock"
Value = int | str | tuple[int, int]  # a flag; 0 = EMPTY where zeroed; data of an earlier life; a datum's (source, call)


class Write(NamedTuple):  # in flight
    rank: int
    call: int
    cta: int
    region: int
    place: int
    value: Value


class Cta(NamedTuple):
    pc: int = 0
    epoch: int = -1
    passed: int = 0  # what the wait at pc is for and has seen, as bits


class Rank(NamedTuple):
    ready: bool  # its window needs no more zeroing
    epoch: int
    arrived: int = 0
    next_call: int = 0
    running: tuple[tuple[int, tuple[Cta, ...]], ...] = ()  # (call, its CTAs)


class State(NamedTuple):
    memory: tuple[Value, ...]
    flight: frozenset[Write]
    ranks: tuple[Rank, ...]

    def with_rank(self, r: int, rank: Rank) -> State:
        return State(self.memory, self.flight, (*self.ranks[:r], rank, *self.ranks[r + 1 :]))

    def with_cta(self, r: int, call: int, c: int, cta: Cta) -> State:
        changed = [(k, (*ctas[:c], cta, *ctas[c + 1 :]) if k == call else ctas) for k, ctas in self.ranks[r].running]
        return self.with_rank(r, self.ranks[r]._replace(running=tuple(changed)))


ENDED = Cta(pc=-1)
Event = tuple[int, int, int, str, int, Value]  # what a trace tells in one line: rank, call, CTA, what, place, value
Steps = Iterator[tuple[State, bool, list[Event]]]  # state after it, whether a wrong datum was read, what happened


class Model:
    """The states of one scenario under one protocol, and the steps between them."""

    def __init__(self, scenario: Scenario, protocol: Protocol, reduce: bool) -> None:
        self.protocol, (self.ranks, self.graph, replays, _) = protocol, scenario
        self.calls, ranks = self.graph * replays, range(self.ranks)
        self.depth = 1 if protocol.stream_order else 2  # how many calls of one rank may run together
        kinds = {"write", "read", "end"} | ({"tick"} if protocol.stream_order else set())
        self.reduce, self.joined = reduce, kinds if reduce else set()  # operations done in one step with the one before
        self.rows = scenario.rows
        rows = range(self.rows)
        self.programs = {
            (k, r, c): program(algorithm, self.ranks, r, c, rows[c::grid], protocol.lamport_region)
            for k, (algorithm, grid, _) in enumerate(self.calls)
            for r, c in itertools.product(ranks, range(grid))
        }
        used = sorted({op.region for ops in self.programs.values() for op in ops if op.region >= 0})
        self.places = list(itertools.product(ranks, used, range(2), ranks, rows))
        index = {place: i for i, place in enumerate(self.places)}  # (holder, region, buffer, slot, row)
        self.where = {  # for each parity of the epoch: the places of each operation
            (key, parity): tuple(self._places_of(op, key[0], parity, index) for op in ops)
            for (key, ops), parity in itertools.product(self.programs.items(), (0, 1))
        }
        self.reads = 0  # data that were read and compared

    def initial(self) -> State:
        first, buffers = self.protocol.first_epoch, self.protocol.flag_buffers
        left = {epoch % buffers: epoch for epoch in (first, first + 1)}  # flags of the earlier life
        memory = tuple(left.get(place[2], 0) if place[1] in FLAGS else "old" for place in self.places)
        ranks = (Rank(not self.protocol.zeroed, first),) * self.ranks
        return self._started(State(memory, frozenset(), ranks), [])

    def steps(self, state: State) -> Steps:
        for w in (w for w in state.flight if not self._held_back(w, state.flight)):
            memory = (*state.memory[: w.place], w.value, *state.memory[w.place + 1 :])
            event = (w.rank, w.call, w.cta, "delivered:", w.place, w.value)
            events, after = [event], State(memory, state.flight - {w}, state.ranks)
            yield self._started(after, events) if self._is_reset(w) else after, False, events  # a call may have ended
        for r, rank in enumerate(state.ranks):
            if not rank.ready:
                events = [(r, -1, -1, "zeroes its window", -1, rank.epoch)]
                memory = tuple(0 if p[0] == r else v for p, v in zip(self.places, state.memory, strict=True))
                zeroed = state._replace(memory=memory).with_rank(r, rank._replace(ready=True))
                yield self._started(zeroed, events), False, events
            for call, ctas in rank.running:
                for c, cta in enumerate(ctas):
                    if cta != ENDED and self.programs[call, r, c][cta.pc].kind == "wait":
                        yield from self._wait(state, r, call, c, cta)
                    elif cta != ENDED:
                        events = []
                        after, wrong = self._run(state, r, call, c, events)
                        yield self._started(after, events), wrong, events

    def _wait(self, state: State, r: int, call: int, c: int, cta: Cta) -> Steps:
        """A load that sees what is awaited in one place; after the last such place the CTA goes on.

        A flag has to be the epoch. A word of lamport has to be anything but EMPTY: what was loaded is what the call
        reads, and EMPTY is written in the same step.
        """
        op = self.programs[call, r, c][cta.pc]
        for i, place in enumerate(self.where[(call, r, c), cta.epoch & 1][cta.pc]):
            value = state.memory[place]
            if cta.passed >> i & 1 or (value != cta.epoch if op.region in FLAGS else value == EMPTY):
                continue
            passed = cta.passed | 1 << i
            through = passed.bit_count() == len(op.awaited)
            after = state.with_cta(r, call, c, Cta(cta.pc + 1, cta.epoch) if through else cta._replace(passed=passed))
            if op.region in FLAGS:
                yield after, False, [(r, call, c, "sees", place, value)]
                continue
            self.reads += 1
            if self.protocol.resets:
                after = after._replace(flight=after.flight | {Write(r, call, c, op.region, place, EMPTY)})
            events = [(r, call, c, "read", place, value)]
            if through and "end" in self.joined:
                after, _ = self._run(after, r, call, c, events)
            yield self._started(after, events), value != (op.awaited[i][0], call + 1), events

    def _held_back(self, w: Write, flight: frozenset[Write]) -> bool:
        """Whether another write has to be delivered before this one."""
        released = self.protocol.release and w.region in FLAGS
        return any(
            (released and other[:3] == w[:3] and other.region < w.region)
            or (other.rank == w.rank and other.place == w.place and other.call <= w.call - self.depth)
            for other in flight
        )

    @staticmethod
    def _is_reset(w: Write) -> bool:
        """Whether it is the EMPTY of a word that was taken; a flag may be 0 as well."""
        return w.value == EMPTY and w.region not in FLAGS

    def _run(self, state: State, r: int, call: int, c: int, events: list[Event]) -> tuple[State, bool]:
        """Runs a CTA through the operation that it is at and those that are joined with it."""
        flight, rank, wrong, first = state.flight, state.ranks[r], False, True
        ops, cta = self.programs[call, r, c], dict(rank.running)[call][c]
        while cta != ENDED and (first or ops[cta.pc].kind in self.joined):
            op, first = ops[cta.pc], False
            place = self.where[(call, r, c), cta.epoch & 1][cta.pc][0] if op.holder >= 0 else -1
            if op.kind == "start":
                captured = self.protocol.first_epoch + call % len(self.graph)
                value = rank.epoch if self.protocol.epoch_in_memory else captured
                cta = cta._replace(epoch=value)
            elif op.kind == "end":
                value = cta.epoch
            elif op.kind == "tick":
                last = rank.arrived + 1 == self.calls[call].grid
                value = cta.epoch + 1 if (last if self.protocol.last_counts else c == 0) else rank.epoch
                rank = rank._replace(arrived=0 if last else rank.arrived + 1, epoch=value)
            elif op.kind == "write":
                value = cta.epoch if op.region in FLAGS else (r, call + 1)
                flight |= {Write(r, call, c, op.region, place, value)}
            else:  # a read sees what was delivered, or the CTA's own write
                own = [w.value for w in flight if w[:3] == (r, call, c) and w.place == place]
                value = own[0] if own else state.memory[place]
                wrong = wrong or value != (op.slot, call + 1)
                self.reads += 1
            events.append((r, call, c, op.kind, place, value))
            cta = ENDED if op.kind == "end" else cta._replace(pc=cta.pc + 1)
        return State(state.memory, flight, state.ranks).with_rank(r, rank).with_cta(r, call, c, cta), wrong

    def _started(self, state: State, events: list[Event]) -> State:
        """Without calls that have ended, and with those that may start."""
        if self.protocol.host_barrier and not all(rank.ready for rank in state.ranks):
            return state
        resetting = {w[:2] for w in state.flight if self._is_reset(w)} if self.protocol.reset_by_end else set()
        for r, rank in enumerate(state.ranks):
            running = [(k, ctas) for k, ctas in rank.running if set(ctas) != {ENDED} or (r, k) in resetting]
            n = rank.next_call
            while rank.ready and n < len(self.calls) and all(k > n - self.depth for k, _ in running):
                running.append((n, (Cta(),) * self.calls[n].grid))
                n += 1
            if tuple(running) == rank.running:
                continue
            state = state.with_rank(r, rank._replace(next_call=n, running=tuple(running)))
            if self.reduce and self.depth == 1 and n > rank.next_call and self.calls[rank.next_call].grid == 1:
                state, _ = self._run(state, r, rank.next_call, 0, events)
        return state

    def _places_of(self, op: Op, call: int, epoch: int, index: dict[tuple[int, ...], int]) -> tuple[int, ...]:
        """Indices of all that an operation touches, none for one that touches no window."""
        flags, places = op.region in FLAGS, []
        for slot, row in op.awaited or ((op.slot, op.row),) * (op.holder >= 0):
            at = slot * self.rows + row + (0 if flags else self.calls[call].shift)
            buffer = epoch % (self.protocol.flag_buffers if flags else self.protocol.data_buffers)
            places.append(index[op.holder, op.region, buffer, *divmod(at % (self.ranks * self.rows), self.rows)])
        return tuple(places)

    def line(self, event: Event) -> str:
        rank, call, cta, what, place, value = event
        line = f"rank {rank}" + f" call {call + 1} CTA {cta}" * (call >= 0) + f": {what}"
        if place < 0:
            return f"{line}, epoch {value}"
        holder, region, buffer, slot, row = self.places[place]
        return f"{line} rank {holder}'s {REGIONS[region]}[{buffer}][{slot}][{row}] = {value}"


class Result(NamedTuple):
    states: int
    reads: int  # data that were read and compared
    finished: int  # states in which all is done and delivered
    faults: dict[str, list[str]]  # kind -> a shortest trace to it


def explore(scenario: Scenario, protocol: Protocol | None = None, *, reduce: bool = True, kinds: int = 1) -> Result:
    """Visits every state that can be reached, breadth first; stops when so many kinds of fault are found."""
    model = Model(scenario, protocol or Protocol(), reduce)
    states, finished, faults = [model.initial()], 0, {}
    before: dict[State, State | None] = {states[0]: None}

    def trace(state: State, last: list[Event]) -> list[str]:
        """The way to a state, and what happened in it last."""
        way = last
        while (earlier := before[state]) is not None:
            way = next(events for after, _, events in model.steps(earlier) if after == state) + way
            state = earlier
        return [model.line(event) for event in way]

    for state in states:  # which grows meanwhile
        steps = list(model.steps(state))
        for after, wrong, events in steps:
            if after not in before:
                before[after] = state
                states.append(after)
            if wrong and WRONG_DATUM not in faults:
                faults[WRONG_DATUM] = trace(state, events)
        if all(rank.next_call == len(model.calls) and not rank.running for rank in state.ranks):
            finished += not state.flight
        elif not steps and DEADLOCK not in faults:
            faults[DEADLOCK] = trace(state, [])
        if len(faults) >= kinds:
            break
    return Result(len(states), model.reads, finished, faults)
