"""The tests of a pair of GPUs, and of all at once, as commands to their processes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from sglang_sm120.kernels.communication.p2p_probe import config, kernel, report
from sglang_sm120.kernels.communication.p2p_probe.report import AllToAll, Pair
from sglang_sm120.kernels.communication.p2p_probe.workers import Fault, Worker, Workers

_JUNK_SEED = 0xFFFFFFFF  # of what lies in an inbox before
_MEETINGS_SHARE = 0.1  # of the time limit: for one meeting

Numbers = dict[str, Any]


def one_pair(workers: Workers, one: int, other: int, time_limit_s: float) -> tuple[Pair, Pair]:
    """Both directions of a pair; what was measured before a fault is kept. Raises nothing about the machine."""
    there: Numbers = {}
    back: Numbers = {}
    status, detail = report.OK, ""
    try:
        pair = workers.get((one, other))
        _measure_pair(workers, pair, (there, back), time.monotonic() + time_limit_s, time_limit_s)
    except Fault as fault:
        status, detail = fault.status, fault.detail
        if not fault.alive:
            workers.kill((one, other))
    return (
        _pair(one, other, there, status, detail),
        _pair(other, one, back, status, detail),
    )


def _pair(source: int, target: int, numbers: Numbers, status: str, detail: str) -> Pair:
    wrong = [what for what in ("push_right", "pull_right", "messages_right") if numbers.get(what) is False]
    if status == report.OK and wrong:
        status = report.WRONG
        detail = numbers.pop("detail", "")
    numbers.pop("detail", None)
    return Pair(source=source, target=target, status=status, detail=detail, **numbers)


def _measure_pair(
    workers: Workers, pair: Sequence[Worker], numbers: tuple[Numbers, Numbers], deadline: float, time_limit_s: float
) -> None:
    limit_ns = int(time_limit_s * config.SPIN_LIMIT_SHARE * 1e9)
    (one, other), (there, back) = pair, numbers
    both: tuple[tuple[Worker, Worker, Numbers], ...] = ((one, other, there), (other, one, back))
    for source, target, of in both:
        of["can_access"] = source.ask(deadline, "can_access", peer=target.device)["can_access"]
    if not all(of["can_access"] for of in numbers):
        raise Fault(report.DENIED, "the driver gives no peer access", alive=True)
    for source, target, of in both:
        of["opened"] = False
        _open(source, target, deadline)
        of["opened"] = True
    _ping_pong(workers, pair, 0, deadline, limit_ns)  # do flags arrive at all: not measured, since the link may be idle
    for source, target, of in both:
        _push(workers, source, target, of, deadline)
        _pull(workers, source, target, of, deadline)
        answer = source.ask(deadline, "chase", peer=target.device, limit_ns=limit_ns)
        _check_status(answer, f"reads of GPU {source.device} from GPU {target.device} take too long")
        of["pull_latency_us"] = answer["latency_us"]
        if answer["wrong"]:
            of["pull_right"] = False
            _say_wrong(of, 1, f"read by GPU {source.device}, one at a time")
    latency, _ = _ping_pong(workers, pair, 0, deadline, limit_ns)
    for of in numbers:
        of["push_latency_us"] = latency
    latency, wrong = _ping_pong(workers, pair, workers.sizes.message_bytes, deadline, limit_ns)
    for (_, target, of), words in zip(both, reversed(wrong), strict=True):
        of["message_latency_us"], of["messages_right"] = latency, words == 0
        _say_wrong(of, words, f"in messages that had been announced to GPU {target.device}")
    for source, target, _ in both:
        source.ask(deadline, "close", peer=target.device)


def _open(source: Worker, target: Worker, deadline: float) -> None:
    try:
        source.ask(deadline, "open", peer=target.device, handle=target.facts["handle"])
    except Fault as fault:
        fault.alive = fault.status == report.FAILED  # an error that leaves the process as it was
        raise


def _ping_pong(
    workers: Workers, pair: Sequence[Worker], message_bytes: int, deadline: float, limit_ns: int
) -> tuple[float, list[int]]:
    """One way in us, and the wrong words that each of the two received."""
    first_flag = workers.flags(workers.sizes.rounds + workers.sizes.warmup)
    one, other = pair
    for worker, peer in ((one, other), (other, one)):
        worker.send(
            "ping_pong",
            peer=peer.device,
            starts=worker is one,
            first_flag=first_flag,
            message_bytes=message_bytes,
            limit_ns=limit_ns,
        )
    answers = [worker.receive(deadline) for worker in pair]
    for answer in answers:
        _check_status(answer, f"flags that GPUs {one.device} and {other.device} write to each other do not arrive")
    return answers[0]["latency_us"], [answer["wrong"] for answer in answers]


def _push(workers: Workers, source: Worker, target: Worker, of: Numbers, deadline: float) -> None:
    seed = workers.flags(1)
    source.ask(deadline, "fill", source_seed=seed, inbox_seed=_JUNK_SEED)
    target.ask(deadline, "fill", source_seed=_JUNK_SEED, inbox_seed=_JUNK_SEED)
    answer = source.ask(deadline, "push", peer=target.device)
    workers.facts.setdefault(source.device, {}).update(answer["link"])
    words = target.ask(deadline, "check", seed=seed)["wrong"]
    of["push_gb_s"], of["push_right"] = answer["gb_s"], words == 0
    _say_wrong(of, words, f"written by GPU {source.device} to GPU {target.device}")


def _pull(workers: Workers, source: Worker, target: Worker, of: Numbers, deadline: float) -> None:
    seed = workers.flags(1)
    target.ask(deadline, "fill", source_seed=seed, inbox_seed=_JUNK_SEED)
    source.ask(deadline, "fill", source_seed=_JUNK_SEED, inbox_seed=_JUNK_SEED)
    answer = source.ask(deadline, "pull", peer=target.device)
    words = source.ask(deadline, "check", seed=seed)["wrong"]
    of["pull_gb_s"], of["pull_right"] = answer["gb_s"], words == 0
    _say_wrong(of, words, f"read by GPU {source.device} from GPU {target.device}")


def _say_wrong(of: Numbers, words: int, where: str) -> None:
    if words:
        of.setdefault("detail", f"{words} wrong words {where}")


def _check_status(answer: dict[str, Any], what: str) -> None:
    if answer["status"] != kernel.DONE:
        raise Fault(report.HUNG, what)


def all_at_once(workers: Workers, devices: Sequence[int], time_limit_s: float) -> AllToAll:
    """Every GPU with every other one at the same time. Raises nothing about the machine."""
    push: tuple[float, ...] = ()
    pull: tuple[float, ...] = ()
    try:
        group = workers.get(devices)
        deadline = time.monotonic() + time_limit_s
        for worker in group:
            for peer in group:
                if peer is not worker:
                    _open(worker, peer, deadline)
        push = _exchange(workers, group, False, deadline, time_limit_s)
        pull = _exchange(workers, group, True, deadline, time_limit_s)
    except Fault as fault:
        if not fault.alive:
            workers.kill(devices)
        return AllToAll(fault.status, fault.detail, push, pull)
    return AllToAll(report.OK, "", push, pull)


def _exchange(
    workers: Workers, group: Sequence[Worker], pull: bool, deadline: float, time_limit_s: float
) -> tuple[float, ...]:
    sizes, count = workers.sizes, len(group)
    order = [worker.device for worker in group]
    seeds = [workers.flags(1) for _ in group]
    for worker, seed in zip(group, seeds, strict=True):
        worker.ask(deadline, "fill", source_seed=seed, inbox_seed=_JUNK_SEED)
    first_flag = workers.flags(sizes.warmup + sizes.samples)
    limit_ns = int(time_limit_s * _MEETINGS_SHARE * 1e9)
    for place, worker in enumerate(group):
        worker.send("all_to_all", order=order, place=place, pull=pull, first_flag=first_flag, limit_ns=limit_ns)
    answers = [worker.receive(deadline) for worker in group]
    for answer in answers:
        _check_status(answer, f"when all GPUs {'pull' if pull else 'push'} at once, flags do not arrive")
    vectors = config.part_vectors(sizes.data_bytes, count)
    for j, worker in enumerate(group):
        for i, seed in enumerate(seeds):
            if i == j:
                continue
            answer = worker.ask(deadline, "check", seed=seed, at=i * vectors, first=j * vectors, vectors=vectors)
            if answer["wrong"]:
                how = f"GPU {order[j]} pulled from" if pull else f"was pushed to GPU {order[j]} by"
                detail = f"{answer['wrong']} wrong words in what {how} GPU {order[i]} when all did at once"
                raise Fault(report.WRONG, detail, alive=True)
    return tuple(answer["gb_s"] for answer in answers)
