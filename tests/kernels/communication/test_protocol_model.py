"""The all-reduce's protocol in every interleaving of a few calls, and that the model would see what could be wrong.

A planted bug is a protocol that somebody could take for good. It has to be found, with the kinds of fault it makes, in
the algorithms where it exists and in no other. Two-shot calls alone would do with one buffer and without parity: no
rank leaves a call before all have read their inbox, and none gathers before all have left the call before. Lamport has
no flags, and of the epoch it takes the parity only.
"""

from __future__ import annotations

import itertools
import re

import pytest

from communication.protocol_model import DEADLOCK, WRONG_DATUM, Result, explore
from communication.protocol_program import ALGORITHMS, GATHER, INBOX, SIGNALLED, Call, Protocol, Scenario

ONE_SHOT, TWO_SHOT = SIGNALLED[:2], SIGNALLED[2:]
PUSH, PULL = SIGNALLED[::2], SIGNALLED[1::2]
LAMPORT = ("lamport",)


def reads_of_one_run(scenario: Scenario) -> int:
    """How many data the ranks read if every call runs once; a row of one rank is a datum."""
    peers = scenario.ranks - 1
    each = dict(zip(ALGORITHMS, (peers, peers, 2 * peers + 1, 2 * peers, peers), strict=True))
    return scenario.replays * sum(scenario.ranks * scenario.rows * each[call.algorithm] for call in scenario.graph)


def assert_right(scenario: Scenario, result: Result, at_least: int) -> None:
    """No fault, and not for want of looking: states were visited, data read in several, and all calls ended."""
    assert not result.faults, "\n".join(itertools.chain.from_iterable(result.faults.values()))
    assert result.states >= at_least
    assert result.reads > reads_of_one_run(scenario)
    assert result.finished == 1  # what is in memory in the end does not depend on the interleaving


def test_looking_at_nothing_is_not_right():
    scenario = Scenario(2, (Call("one_shot_push"),))
    assert_right(scenario, explore(scenario), 20)
    for unseen in (Result(1, 0, 0, {}), explore(scenario)._replace(reads=reads_of_one_run(scenario) // 2)):
        with pytest.raises(AssertionError):
            assert_right(scenario, unseen, 20)


# --- the real protocol ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("algorithm", "at_least"), zip(ALGORITHMS, (140, 140, 450, 280, 80), strict=True), ids=ALGORITHMS
)
def test_two_ranks(algorithm, at_least):
    scenario = Scenario(2, (Call(algorithm),), replays=4)
    assert_right(scenario, explore(scenario), at_least)
    assert_right(scenario, explore(scenario, reduce=False), 2 * at_least)


@pytest.mark.parametrize(
    ("algorithm", "at_least"), zip(ALGORITHMS, (14_000, 8_000, 45_000, 16_000, 22_000), strict=True), ids=ALGORITHMS
)
def test_three_ranks(algorithm, at_least):
    scenario = Scenario(3, (Call(algorithm),), replays=3)
    assert_right(scenario, explore(scenario), at_least)


@pytest.mark.parametrize("grids", [(2, 1, 2, 1), (1, 2, 1, 2)], ids=str)
@pytest.mark.parametrize(
    ("algorithm", "at_least"), zip(ALGORITHMS, (2_500, 2_500, 24_000, 9_500, 1_800), strict=True), ids=ALGORITHMS
)
def test_grids_that_differ_between_calls(algorithm, at_least, grids):
    """Then rows change their CTAs, the last to arrive is another, and a CTA's flag may be of a call long ago."""
    scenario = Scenario(2, tuple(Call(algorithm, grid) for grid in grids))
    assert_right(scenario, explore(scenario), at_least)


@pytest.mark.parametrize("shifts", [(0, 0, 0, 0), (0, 0, 1, 1)], ids=str)
def test_every_sequence_of_four_calls(shifts):
    """The algorithms share flags, inbox and gather, and messages of other sizes use the same memory otherwise."""
    for algorithms in itertools.product(ALGORITHMS, repeat=4):
        scenario = Scenario(2, tuple(map(Call, algorithms, (1, 1, 1, 1), shifts)))
        assert_right(scenario, explore(scenario), 80 if "lamport" in algorithms else 140)


def test_lamport_with_two_words():
    """They come one by one, also where one CTA takes both."""
    scenario = Scenario(2, (Call("lamport"),), replays=4, least_rows=2)
    assert_right(scenario, explore(scenario), 1_250)
    assert_right(scenario, explore(scenario, reduce=False), 4_000)


@pytest.mark.parametrize("shifts", [(0, 0, 0), (0, 1, 3)], ids=str)
def test_lamport_with_two_words_in_every_sequence_of_three_calls(shifts):
    for algorithms in (names for names in itertools.product(ALGORITHMS, repeat=3) if "lamport" in names):
        scenario = Scenario(2, tuple(map(Call, algorithms, (1, 1, 1), shifts)), least_rows=2)
        assert_right(scenario, explore(scenario), 430)


@pytest.mark.parametrize(("grids", "at_least"), [((2, 1, 2), 1_100), ((1, 2, 1), 1_250), ((2, 2, 2), 1_800)], ids=str)
@pytest.mark.parametrize("between", ALGORITHMS)
def test_lamport_around_another_call_with_other_grids(between, grids, at_least):
    """That all its words are EMPTY again has to be known of a peer by what one CTA has seen of the call between."""
    scenario = Scenario(2, tuple(map(Call, ("lamport", between, "lamport"), grids, (0, 1, 3))))
    assert_right(scenario, explore(scenario), at_least)


MIXED = {
    "all with signals, replayed": (Scenario(2, tuple(map(Call, SIGNALLED)), 2), 500),
    "a graph of odd length: parities change": (Scenario(2, tuple(map(Call, SIGNALLED[1:])), 3), 500),
    "grids 2 1 2 1": (Scenario(2, tuple(map(Call, SIGNALLED, (2, 1, 2, 1)))), 12_000),
    "grids 1 2 2 1": (Scenario(2, tuple(map(Call, SIGNALLED[::-1], (1, 2, 2, 1), (0, 2, 2, 0)))), 12_000),
    "three ranks": (Scenario(3, tuple(map(Call, SIGNALLED[1:], (1, 1, 1), (0, 1, 2)))), 20_000),
    "three ranks, replayed": (Scenario(3, (Call("two_shot_pull"), Call("one_shot_push", 1, 2)), 2), 20_000),
    "all five, replayed: parities change": (Scenario(2, tuple(map(Call, ALGORITHMS)), 2), 500),
    "lamport, grids 2 1 2 1": (Scenario(2, tuple(map(Call, LAMPORT * 4, (2, 1, 2, 1), (0, 0, 1, 3)))), 1_800),
    "lamport and two-shot, grids 1 2 1 2": (Scenario(2, (Call("lamport"), Call("two_shot_push", 2, 3)), 2), 24_000),
    "three ranks, two-shot amid lamport": (
        Scenario(3, tuple(map(Call, ("lamport", "two_shot_push", "lamport"), (1, 1, 1), (0, 1, 2)))),
        31_000,
    ),
}


@pytest.mark.parametrize(("scenario", "at_least"), MIXED.values(), ids=MIXED)
def test_mixed_sequences_and_replays(scenario, at_least):
    assert_right(scenario, explore(scenario), at_least)


# --- planted bugs ---------------------------------------------------------------------------------------------------

BUGS = {
    "one buffer": Protocol(data_buffers=1),  # and no barrier at the end
    "flags without parity": Protocol(flag_buffers=1),
    "no release": Protocol(release=False),
    "epoch baked in at capture": Protocol(epoch_in_memory=False),
    "earlier life not zeroed": Protocol(zeroed=False),
    "no host barrier": Protocol(host_barrier=False),
    "calls overlap": Protocol(stream_order=False),
    "first epoch zero": Protocol(first_epoch=0),
    "CTA 0 counts the epoch on": Protocol(last_counts=False),
}
LAMPORT_BUGS = {
    "words not reset": Protocol(resets=False),
    "reset after the end": Protocol(reset_by_end=False),
}
# bug, algorithms, calls, all kinds of fault that there are
FOUND = [
    ("one buffer", ONE_SHOT, 4, {WRONG_DATUM}),
    ("one buffer", TWO_SHOT, 4, set()),
    ("flags without parity", ONE_SHOT, 4, {DEADLOCK}),
    ("flags without parity", TWO_SHOT, 4, set()),
    ("no release", ONE_SHOT, 3, {WRONG_DATUM}),
    ("no release", TWO_SHOT, 1, {WRONG_DATUM}),
    ("epoch baked in at capture", SIGNALLED, 2, {WRONG_DATUM}),
    ("earlier life not zeroed", SIGNALLED, 1, {WRONG_DATUM}),
    ("no host barrier", PUSH, 2, {WRONG_DATUM, DEADLOCK}),  # zeroing wipes a peer's data, or its flag
    ("no host barrier", PULL, 2, {DEADLOCK}),  # data is written at home, after zeroing
    ("calls overlap", ONE_SHOT, 2, {WRONG_DATUM, DEADLOCK}),
    ("first epoch zero", SIGNALLED, 1, {WRONG_DATUM}),
    (
        "one buffer",
        LAMPORT,
        2,
        {WRONG_DATUM, DEADLOCK},
    ),  # the next word over one not yet read, EMPTY over the next word
    ("flags without parity", LAMPORT, 4, set()),
    ("no release", LAMPORT, 4, set()),
    ("epoch baked in at capture", LAMPORT, 2, {WRONG_DATUM, DEADLOCK}),  # of one call, and so always the same buffer
    ("earlier life not zeroed", LAMPORT, 3, {WRONG_DATUM, DEADLOCK}),
    ("no host barrier", LAMPORT, 2, {DEADLOCK}),  # zeroing wipes a peer's word
    ("calls overlap", LAMPORT, 2, {WRONG_DATUM, DEADLOCK}),
    ("first epoch zero", LAMPORT, 4, set()),
    ("words not reset", LAMPORT, 2, set()),
    ("words not reset", LAMPORT, 3, {WRONG_DATUM}),
    ("reset after the end", LAMPORT, 2, set()),
    ("reset after the end", LAMPORT, 3, {WRONG_DATUM, DEADLOCK}),
]
CASES = [(bug, algorithm, calls, kinds) for bug, algorithms, calls, kinds in FOUND for algorithm in algorithms]


def read_in_another_call(trace: list[str]) -> list[str]:
    """The reads of a trace that saw something else than a datum of their own call, told from its lines alone."""
    read = re.compile(r"rank \d+ call (\d+) CTA \d+: read .* = (?:\(\d+, (\d+)\)|.*)")
    return [line for line in trace if (match := read.fullmatch(line)) and match[1] != match[2]]


@pytest.mark.parametrize("reduce", [True, False], ids=["reduced", "every operation a step"])
@pytest.mark.parametrize(("bug", "algorithm", "calls", "kinds"), CASES)
def test_a_planted_bug_is_found(bug, algorithm, calls, kinds, reduce):
    scenario = Scenario(2, (Call(algorithm),), calls)
    result = explore(scenario, (BUGS | LAMPORT_BUGS)[bug], reduce=reduce, kinds=2)
    assert set(result.faults) == kinds
    if not kinds:
        assert_right(scenario, result, 250 if algorithm in SIGNALLED else 12 * calls)
    if WRONG_DATUM in kinds:
        trace = result.faults[WRONG_DATUM]
        assert read_in_another_call(trace) if reduce else read_in_another_call(trace) == trace[-1:]
    if DEADLOCK in kinds:
        assert sum(": end" in line for line in result.faults[DEADLOCK]) < scenario.ranks * calls


@pytest.mark.parametrize(
    ("bug", "algorithm"), [*itertools.product(BUGS, ALGORITHMS), *itertools.product(LAMPORT_BUGS, LAMPORT)]
)
def test_a_planted_bug_is_found_with_two_ctas(bug, algorithm):
    """A graph of two calls, replayed. Of the faults that there are, the one that takes fewest steps."""
    scenario = Scenario(2, (Call(algorithm, 2), Call(algorithm, 1)), 2)
    both = bug == "CTA 0 counts the epoch on" and algorithm not in TWO_SHOT  # then all that there are
    result = explore(scenario, (BUGS | LAMPORT_BUGS)[bug], kinds=1 + both)
    hangs = bug in ("flags without parity", "CTA 0 counts the epoch on") or (
        bug == "no host barrier" and algorithm not in PUSH
    )
    two_numbers = bug == "epoch baked in at capture" and algorithm in LAMPORT  # which alternate, and that is enough
    if (bug, algorithm, 4, set()) in CASES or two_numbers:
        assert_right(scenario, result, 9_500 if algorithm in SIGNALLED else 1_800)
    elif both:
        assert set(result.faults) == {WRONG_DATUM, DEADLOCK}
    elif hangs:
        assert set(result.faults) == {DEADLOCK}
    else:
        assert set(result.faults) == {WRONG_DATUM}


@pytest.mark.parametrize("bug", ["one buffer", "flags without parity"])
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize(("one_shot", "two_shot"), zip(ONE_SHOT, TWO_SHOT, strict=True))
def test_two_shot_needs_two_buffers_behind_one_shot(one_shot, two_shot, ranks, bug):
    """A one-shot call is what may still be under way on a peer, and so it matters what comes after it."""
    assert explore(Scenario(ranks, (Call(one_shot), Call(two_shot))), BUGS[bug]).faults
    scenario = Scenario(ranks, (Call(two_shot), Call(one_shot)))
    assert_right(scenario, explore(scenario, BUGS[bug]), 90)


@pytest.mark.parametrize("bug", LAMPORT_BUGS)
@pytest.mark.parametrize("between", ALGORITHMS)
def test_a_call_between_does_not_hide_what_lamport_leaves(between, bug):
    scenario = Scenario(2, (Call("lamport"), Call(between), Call("lamport")))
    kinds = {WRONG_DATUM} if bug == "words not reset" else {WRONG_DATUM, DEADLOCK}
    assert set(explore(scenario, LAMPORT_BUGS[bug], kinds=2).faults) == kinds


@pytest.mark.parametrize("shifts", [(0, 0, 0), (0, 1, 1)], ids=str)
@pytest.mark.parametrize(("region", "used_by"), [(INBOX, SIGNALLED), (GATHER, TWO_SHOT)], ids=["inbox", "gather"])
def test_lamport_needs_a_region_of_its_own(region, used_by, shifts):
    """What a call left two calls ago is taken for words, wherever it lies in a peer's place.

    At first that is where push wrote; pull wrote in the rank's own place, which is a peer's in a message of another
    size. All of a push's gathered shards are in each window.
    """
    for before, between in itertools.product(ALGORITHMS, repeat=2):
        scenario = Scenario(2, tuple(map(Call, (before, between, "lamport"), (1, 1, 1), shifts)))
        result = explore(scenario, Protocol(lamport_region=region), kinds=2)
        in_the_way = before in PULL if any(shifts) else before in PUSH
        if before in used_by and (in_the_way or (region == GATHER and before in PUSH)):
            assert set(result.faults) == {WRONG_DATUM}
        else:
            assert_right(scenario, result, 60)
