"""A probe whose processes hang, crash, lie or do not start; and arguments that make no sense."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from communication.p2p_children import Act, fake_command, is_gone, numbers_of, until
from sglang_sm120.errors import ContractError, UnsupportedError
from sglang_sm120.kernels.communication.p2p_probe import workers
from sglang_sm120.kernels.communication.p2p_probe.api import ProbeReport, Sizes, failed, find, probe
from sglang_sm120.kernels.communication.p2p_probe.workers import Fault, Workers

SMALL = Sizes(data_bytes=64 << 10, message_bytes=2048, rounds=20, hops=50, samples=2, warmup=1, warmup_s=0.0)


@pytest.fixture
def fake(tmp_path: Path) -> Callable[..., ProbeReport]:
    """A probe of fake_child.py's with these faults."""

    def run(*faults: Act, devices: int = 3, time_limit_s: float = 20.0, **options: Any) -> ProbeReport:
        return probe(range(devices), command=fake_command(tmp_path, *faults), time_limit_s=time_limit_s, **options)

    return run


def statuses(of: ProbeReport) -> dict[tuple[int, int], str]:
    return {(pair.source, pair.target): pair.status for pair in of.pairs}


def only(of: ProbeReport, status: str, *bad: tuple[int, int]) -> bool:
    """Both directions of the bad pairs have this status, all others are right."""
    wrong = {direction for one, other in bad for direction in ((one, other), (other, one))}
    return all(found == (status if pair in wrong else "ok") for pair, found in statuses(of).items())


def test_what_a_healthy_machine_gives(fake: Callable[..., ProbeReport], tmp_path: Path) -> None:
    of = fake()
    assert of.usable
    assert only(of, "ok")
    assert len(of.pairs) == 6
    pair = of.pair(2, 0)
    assert (pair.push_gb_s, pair.pull_gb_s, pair.push_latency_us, pair.pull_latency_us) == (50.0, 45.0, 0.5, 1.25)
    assert of.all_to_all.push_gb_s == (40.0, 40.0, 40.0)
    assert (of.gpus[0].name, of.gpus[0].link_gb_s, of.gpus[0].link_lanes) == ("Fake GPU", 63.0, 16)
    assert len(numbers_of(tmp_path, "started")) == 3, "a process serves all pairs of its GPU"
    assert all(is_gone(number) for number in numbers_of(tmp_path, "started"))
    assert ProbeReport.from_dict(json.loads(json.dumps(of.to_dict()))) == of


@pytest.mark.parametrize("do", ["open", "ping_pong", "push", "check", "chase"])
def test_a_hung_child_is_killed_and_the_others_are_tested(
    fake: Callable[..., ProbeReport], tmp_path: Path, do: str
) -> None:
    """It ignores SIGTERM, sleeps, and has started a process of its own."""
    start = time.monotonic()
    which = {"device": 1, "peer": 0} if do != "check" else {"device": 1}
    bad = [(0, 1)] if do != "check" else [(0, 1), (1, 2)]
    of = fake({**which, "do": do, "act": "hang"}, time_limit_s=1.0)
    assert only(of, "hung", *bad)
    assert of.pair(0, 1).detail == f"GPU 1 gave no answer to '{do}' in time"
    assert of.all_to_all.status == "skipped"
    assert len(bad) <= time.monotonic() - start < 15
    for number in numbers_of(tmp_path, "started") + numbers_of(tmp_path, "hung"):
        assert until(lambda number=number: is_gone(number), 5), "killed, with what it had started"
    assert len(numbers_of(tmp_path, "hung")) == len(bad)
    assert failed(find(of))
    assert not of.usable


def test_numbers_from_before_a_hang_are_kept(fake: Callable[..., ProbeReport]) -> None:
    of = fake({"device": 0, "peer": 1, "do": "chase", "act": "hang"}, devices=2, time_limit_s=1.0)
    assert (of.pair(0, 1).push_gb_s, of.pair(0, 1).pull_latency_us, of.pair(1, 0).push_gb_s) == (50.0, None, None)


@pytest.mark.parametrize(
    ("act", "said"),
    [
        ("crash", "the process of GPU 2 ended with signal 11 at 'push': something broke"),
        ("exit", "the process of GPU 2 ended with exit status 3 at 'push'"),
        ("garbage", "GPU 2 answered b'no json' to 'push'"),
    ],
)
def test_a_child_that_crashes(fake: Callable[..., ProbeReport], tmp_path: Path, act: str, said: str) -> None:
    of = fake({"device": 2, "peer": 0, "do": "push", "act": act})
    assert only(of, "crashed", (0, 2))
    assert of.pair(2, 0).detail == said
    assert len(numbers_of(tmp_path, "started")) == 4, "GPU 2's is started again; GPU 0's is not needed any more"
    assert said in next(finding for finding in find(of) if finding.level == "fail").found


def test_wrong_data_is_of_one_direction(fake: Callable[..., ProbeReport]) -> None:
    """What GPU 0 writes to GPU 1 arrives wrong; the other way, and reads, are right."""
    first_seed = 1 + SMALL.rounds + SMALL.warmup
    fault = {"device": 1, "do": "check", "seed": first_seed, "act": "answer", "numbers": {"wrong": 12}}
    of = fake(fault, sizes=SMALL)
    there, back = of.pair(0, 1), of.pair(1, 0)
    assert (there.status, there.push_right, there.pull_right) == ("wrong", False, True)
    assert there.detail == "12 wrong words written by GPU 0 to GPU 1"
    assert (back.status, back.push_right, back.detail) == ("ok", True, "")
    assert of.all_to_all.status == "skipped"
    assert [finding.what for finding in find(of) if finding.level == "fail"] == ["wrong data"]


def test_flags_before_their_message_are_wrong_data(fake: Callable[..., ProbeReport]) -> None:
    bad = {"device": 1, "do": "ping_pong", "message_bytes": 4096, "act": "answer", "numbers": {"wrong": 3}}
    of = fake(bad, devices=2)
    assert (of.pair(0, 1).status, of.pair(0, 1).messages_right) == ("wrong", False)
    assert of.pair(0, 1).detail == "3 wrong words in messages that had been announced to GPU 1"
    assert (of.pair(1, 0).status, of.pair(1, 0).messages_right) == ("ok", True)


def test_reads_that_give_something_else(fake: Callable[..., ProbeReport]) -> None:
    of = fake({"device": 1, "do": "chase", "act": "answer", "numbers": {"wrong": 1}}, devices=2)
    assert statuses(of) == {(0, 1): "ok", (1, 0): "wrong"}
    assert of.pair(1, 0).pull_right is False


@pytest.mark.parametrize("do", ["ping_pong", "chase"])
def test_a_kernel_that_gave_up_waiting(fake: Callable[..., ProbeReport], do: str) -> None:
    of = fake({"device": 0, "peer": 1, "do": do, "act": "answer", "numbers": {"status": 2}})
    assert only(of, "hung", (0, 1))
    assert of.pair(0, 1).push_latency_us is None


def test_no_peer_access(fake: Callable[..., ProbeReport], tmp_path: Path) -> None:
    of = fake({"device": 0, "peer": 2, "do": "can_access", "act": "answer", "numbers": {"can_access": False}})
    assert only(of, "denied", (0, 2))
    assert (of.pair(0, 2).can_access, of.pair(2, 0).can_access, of.pair(0, 2).opened) == (False, True, None)
    assert len(numbers_of(tmp_path, "started")) == 3, "nothing is broken: the processes go on"


def test_memory_that_does_not_open(fake: Callable[..., ProbeReport], tmp_path: Path) -> None:
    of = fake({"device": 1, "peer": 2, "do": "open", "act": "error"})
    assert only(of, "failed", (1, 2))
    assert of.pair(1, 2).detail == "GPU 1, open: cuIpcOpenMemHandle failed; share namespaces"
    assert (of.pair(1, 2).opened, of.pair(2, 1).opened) == (False, None)
    assert len(numbers_of(tmp_path, "started")) == 3


@pytest.mark.parametrize("act", ["error", "exit", "hang"])
def test_a_gpu_that_does_not_start(
    fake: Callable[..., ProbeReport], tmp_path: Path, act: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers.config, "START_LIMIT_S", 1.5)
    of = fake({"device": 1, "do": "start", "act": act})
    assert only(of, "failed", (0, 1), (1, 2))
    assert "(the process did not start)" in of.pair(0, 1).detail
    assert of.gpus[1].name == ""
    assert len(numbers_of(tmp_path, "started")) == 3, "it is not tried again"
    for number in numbers_of(tmp_path, "started") + numbers_of(tmp_path, "hung"):
        assert until(lambda number=number: is_gone(number), 5)


@pytest.mark.parametrize(
    ("fault", "status", "said"),
    [
        ({"act": "hang"}, "hung", "GPU 1 gave no answer to 'all_to_all' in time"),
        ({"act": "answer", "numbers": {"status": 2}}, "hung", "when all GPUs push at once, flags do not arrive"),
        ({"act": "crash"}, "crashed", "the process of GPU 1 ended with signal 11 at 'all_to_all': something broke"),
    ],
)
def test_all_at_once_can_fail_alone(fake: Callable[..., ProbeReport], fault: Act, status: str, said: str) -> None:
    of = fake({"device": 1, "do": "all_to_all", **fault}, time_limit_s=1.5)
    assert only(of, "ok")
    assert (of.all_to_all.status, of.all_to_all.detail) == (status, said)
    assert not of.usable
    assert failed(find(of))


def test_wrong_data_when_all_do_at_once(fake: Callable[..., ProbeReport]) -> None:
    vectors = SMALL.data_bytes // 16 // 3
    fault = {"device": 2, "do": "check", "at": vectors, "act": "answer", "numbers": {"wrong": 8}}
    of = fake(fault, sizes=SMALL)
    assert only(of, "ok")
    assert of.all_to_all.status == "wrong"
    assert of.all_to_all.detail == "8 wrong words in what was pushed to GPU 2 by GPU 1 when all did at once"


def test_more_gpus_than_can_meet(fake: Callable[..., ProbeReport]) -> None:
    of = fake(devices=10)
    assert only(of, "ok")
    assert (of.all_to_all.status, of.all_to_all.detail) == ("skipped", "more than 9 GPUs")
    assert not failed(find(of))


def test_an_interrupt_leaves_no_process(fake: Callable[..., ProbeReport], tmp_path: Path) -> None:
    def interrupt(what: str, number: int, total: int) -> None:
        if number == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fake(progress=interrupt)
    assert len(numbers_of(tmp_path, "started")) == 3
    assert all(is_gone(number) for number in numbers_of(tmp_path, "started"))


def test_a_process_that_does_not_die_is_said_and_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a call to the driver that never returns."""
    with Workers(SMALL, fake_command(tmp_path)) as pool:
        (worker,) = pool.get([0])
        monkeypatch.setattr(worker, "kill", lambda: False)
        pool.kill([0])
        with pytest.raises(Fault, match="does not die") as fault:
            pool.get([0])
        assert (fault.value.status, fault.value.alive) == ("hung", True)
        monkeypatch.undo()
        assert worker.kill()


@pytest.mark.parametrize("devices", [[], [0], [0, 0], [0, -1]])
def test_devices_that_make_no_sense(devices: list[int], tmp_path: Path) -> None:
    with pytest.raises(ContractError, match="devices"):
        probe(devices, command=fake_command(tmp_path))
    assert not numbers_of(tmp_path, "started")


@pytest.mark.parametrize("limit", [0.0, -1.0, float("nan")])
def test_a_time_limit_that_makes_no_sense(limit: float, tmp_path: Path) -> None:
    with pytest.raises(ContractError, match="time limit"):
        probe([0, 1], command=fake_command(tmp_path), time_limit_s=limit)


@pytest.mark.parametrize(("count", "found"), [(0, "no CUDA GPU"), (1, "one CUDA GPU")])
def test_fewer_than_two_gpus(count: int, found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    with pytest.raises(UnsupportedError) as error:
        probe()
    assert error.value.found == f"{found} is visible"
    assert error.value.needed
    assert error.value.fix


def test_devices_that_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ContractError, match="of 0 to 1"):
        probe([0, 2])
