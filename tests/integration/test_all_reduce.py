"""--sm120-all-reduce in a scheduler: settled once, all or nothing, and a server that ends when a peer is lost."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("sglang")

from sglang.srt import runtime_context

from sglang_sm120.errors import ConfigError, UnsupportedError
from sglang_sm120.integration import all_reduce, lifecycle
from sglang_sm120.integration.all_reduce_plane import HostPlane
from sglang_sm120.integration.all_reduce_slot import Slot
from sglang_sm120.integration.hooks import Stage
from sglang_sm120.kernels.communication.all_reduce_rmsnorm.api import PeerLostError
from sglang_sm120.options import Sm120Options
from tests.integration.test_all_reduce_rules import view


def options(choice: str = "auto", **more: Any) -> Sm120Options:
    return Sm120Options(enable_sm120_opts=True, sm120_all_reduce=choice, **more)


class World:
    """A rank of a group of four, whose set-up a test decides."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.custom = SimpleNamespace(should_custom_ar=lambda x: True)
        self.theirs = SimpleNamespace(disabled=False)
        self.group = SimpleNamespace(world_size=4, rank_in_group=0, pcie_ipc_comm=self.theirs, ca_comm=self.custom)
        self.connected: list[dict] = []
        self.failure: Exception | None = None
        self.server_args = view()
        self.patch = monkeypatch.setattr
        self.patch(all_reduce, "_state", all_reduce._State())
        self.patch(all_reduce, "connect", self.connect)
        self.patch(runtime_context, "get_parallel", lambda: SimpleNamespace(tp_group=self.group))
        monkeypatch.delenv("NCCL_P2P_DISABLE", raising=False)
        for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
            monkeypatch.delenv(name, raising=False)

    def connect(self, group: Any, choice: str, **asked: Any) -> HostPlane:
        self.connected.append({"choice": choice, **asked})
        if self.failure is not None:
            raise self.failure
        from sglang_sm120.integration.all_reduce_setup import ranges_for

        return HostPlane(group, ranges_for(choice, group.world_size)[0])

    def prepare(self, given: Sm120Options | None = None, *, draft: bool = False, device: str = "cpu") -> None:
        runner = SimpleNamespace(
            server_args=self.server_args, is_draft_worker=draft, device=device, dtype=torch.bfloat16,
            model_config=SimpleNamespace(hidden_size=64),
        )  # fmt: skip
        all_reduce.prepare(runner, given or options())


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch):
    made = World(monkeypatch)
    yield made
    all_reduce.stop()


def test_set_up_once_for_the_target_and_its_draft(world: World, caplog) -> None:
    with caplog.at_level(logging.INFO):
        world.prepare(draft=True)
        assert not world.connected, "a draft model comes after the target"
        world.prepare()
        first = all_reduce.plane()
        world.prepare()
        world.prepare(draft=True)
    assert len(world.connected) == 1
    assert world.connected[0] == {
        "choice": "auto", "profile": "", "hidden_size": 64, "dtype": torch.bfloat16, "device": torch.device("cpu")
    }  # fmt: skip
    assert all_reduce.plane() is first
    assert isinstance(world.group.pcie_ipc_comm, Slot)
    assert world.custom.should_custom_ar(torch.zeros(8)), "on auto it stays before ours"
    (line,) = caplog.messages
    assert line.startswith("sglang-sm120: all-reduce over 4 ranks: one-shot-")
    assert line.endswith("; the rest is SGLang's")


@pytest.mark.parametrize("rank", [0, 3])
def test_a_failure_is_kept_and_said_once(rank: int, world: World, caplog) -> None:
    world.group.rank_in_group = rank
    world.failure = UnsupportedError("rank 2: no peer access", "peer access", "f")
    with caplog.at_level(logging.INFO):
        world.prepare()
        world.failure = None
        world.prepare()
    assert len(world.connected) == 1, "never a second time: the ranks would not meet"
    assert all_reduce.plane() is None
    assert world.group.pcie_ipc_comm is world.theirs
    says = "sglang-sm120: all-reduce left to SGLang: rank 2: no peer access; needed: peer access"
    assert caplog.messages == ([says] if rank == 0 else [])


def test_settings_that_are_not_covered_leave_it_to_sglang(world: World, caplog) -> None:
    world.server_args = view(enable_pdmux=True)
    with caplog.at_level(logging.INFO):
        world.prepare()
    assert not world.connected
    (line,) = caplog.messages
    assert line.startswith("sglang-sm120: all-reduce left to SGLang: --enable-pdmux; needed: ")


def test_settings_are_read_as_sglang_resolved_them(world: World) -> None:
    """`--dp-size 2 --enable-dp-attention` becomes attn_dp_size, and the record keeps what was typed."""
    world.server_args._resolved_overrides = [("a step", {"attn_dp_size": 2})]
    world.prepare()
    assert not world.connected


def test_a_choice_by_name_goes_first_or_stops(world: World) -> None:
    world.failure = UnsupportedError("rank 2: no peer access", "n", "f")
    with pytest.raises(UnsupportedError, match="no peer access"):
        world.prepare(options("one-shot"))
    all_reduce._state.settled, world.failure = False, None
    world.server_args = view(enable_pdmux=True)
    with pytest.raises(UnsupportedError, match="--sm120-all-reduce one-shot: --enable-pdmux"):
        world.prepare(options("one-shot"))
    all_reduce._state.settled = False
    world.server_args = view()
    world.prepare(options("two-shot"))
    assert world.connected[-1]["choice"] == "two-shot"
    ours = all_reduce.plane()
    assert ours is not None
    x = torch.zeros(8, 8)
    assert ours.takes(x)
    assert not world.custom.should_custom_ar(x)
    assert world.custom.should_custom_ar(torch.zeros(2, 3))


def test_a_profile_that_was_named_stops_what_auto_would_leave_to_sglang(world: World) -> None:
    given = options(sm120_all_reduce_profile="p")
    for failure in (UnsupportedError("rank 2: no peer access", "n", "f"), ConfigError("profile p: no", "n", "f")):
        all_reduce._state.settled, world.failure = False, failure
        with pytest.raises(type(failure)) as caught:
            world.prepare(given)
        assert caught.value is failure
    all_reduce._state.settled, world.failure = False, None
    world.server_args = view(enable_pdmux=True)
    with pytest.raises(UnsupportedError, match="--sm120-all-reduce-profile p: --enable-pdmux"):
        world.prepare(given)
    all_reduce._state.settled, world.server_args = False, view()
    world.prepare(given)
    assert (world.connected[-1]["choice"], world.connected[-1]["profile"]) == ("auto", "p")
    assert world.custom.should_custom_ar(torch.zeros(8)), "a profile does not go before what SGLang asks first"


def test_a_lost_peer_in_the_trial_stops_even_on_auto(world: World) -> None:
    world.failure = PeerLostError("rank 0 waited 10 s", "n", "f")
    with pytest.raises(PeerLostError):
        world.prepare()


@pytest.mark.parametrize("choice", ["off", "stock"])
def test_nothing_of_ours_with(choice: str, world: World) -> None:
    world.prepare(options(choice))
    assert not world.connected
    assert all_reduce.plane() is None
    assert world.group.pcie_ipc_comm is world.theirs


def test_stock_without_its_communicator_stops(world: World) -> None:
    world.group.pcie_ipc_comm = None
    with pytest.raises(UnsupportedError, match="could not set up FlashInfer's pcie_ipc"):
        world.prepare(options("stock"))


@pytest.mark.parametrize(
    ("capability", "emulated", "serves"), [((12, 0), False, True), ((9, 0), False, False), ((9, 0), True, True)]
)
def test_only_for_sm120_unless_emulated(capability, emulated: bool, serves: bool, world: World, caplog) -> None:
    world.patch(torch.cuda, "current_device", lambda: 1)
    world.patch(torch.cuda, "get_device_capability", lambda device: capability)
    with caplog.at_level(logging.INFO):
        world.prepare(options(sm120_emulate=emulated), device="cuda")
    assert bool(world.connected) is serves
    if serves:
        assert world.connected[0]["device"] == torch.device("cuda", 1)
    else:
        assert not caplog.messages


def test_the_slot_stops_what_uses_the_memory_before_it_is_given_back(world: World) -> None:
    world.prepare()
    watchdog = all_reduce._state.watchdog
    assert watchdog is not None
    assert watchdog.is_alive()
    world.group.pcie_ipc_comm._inner = None
    world.group.pcie_ipc_comm.destroy()
    assert all_reduce.plane() is None
    assert not watchdog.is_alive()


def lost() -> None:
    raise PeerLostError("rank 1 waited 60 s for a signal of rank 0", "a rank that is alive", "look at its log")


def test_the_watchdog_says_why_and_ends_the_server(monkeypatch, caplog) -> None:
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr(all_reduce.os, "kill", lambda pid, number: sent.append((pid, number)))
    looks = iter((lambda: None, lambda: None, lost))
    watchdog = all_reduce.Watchdog(lambda: next(looks)(), interval_s=0.01)
    watchdog.start()
    watchdog.join(timeout=10)
    assert not watchdog.is_alive(), "once is enough"
    assert sent == [(os.getppid(), signal.SIGQUIT)]
    assert "rank 1 waited 60 s for a signal of rank 0" in caplog.text


def test_the_watchdog_of_an_orphan_signals_nobody(monkeypatch) -> None:
    monkeypatch.setattr(all_reduce.os, "kill", lambda *arguments: pytest.fail(f"signalled {arguments}"))
    watchdog = all_reduce.Watchdog(lost, interval_s=0.01)
    monkeypatch.setattr(all_reduce.os, "getppid", lambda: 1)
    watchdog.start()
    watchdog.join(timeout=10)
    assert not watchdog.is_alive()


def test_the_watchdog_stops_when_told() -> None:
    seen = threading.Event()
    watchdog = all_reduce.Watchdog(seen.set, interval_s=0.01)
    watchdog.start()
    assert seen.wait(10)
    watchdog.stop()
    assert not watchdog.is_alive()
    assert watchdog.daemon, "it does not keep a process from ending"


_LAUNCHER = """
import multiprocessing, signal, sys, time

def rank():
    from sglang_sm120.errors import Sm120Error
    from sglang_sm120.integration import all_reduce
    def check():
        raise Sm120Error("waited in vain", "a peer", "look")
    all_reduce.Watchdog(check).start()
    time.sleep(60)

if __name__ == "__main__":
    signal.signal(signal.SIGQUIT, lambda *_: sys.exit(7))
    child = multiprocessing.get_context("spawn").Process(target=rank, daemon=True)
    child.start()
    time.sleep(60)
"""


def test_a_real_launcher_gets_the_signal(tmp_path) -> None:
    program = tmp_path / "launcher.py"
    program.write_text(textwrap.dedent(_LAUNCHER))
    begun = time.monotonic()
    done = subprocess.run([sys.executable, "-W", "ignore", str(program)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 7, done.stderr
    assert "waited in vain" in done.stderr
    assert time.monotonic() - begun < 50


def test_sglangs_own_watchdog_ends_a_server_the_same_way() -> None:
    import inspect

    from sglang.srt.managers import scheduler
    from sglang.srt.utils import watchdog

    assert "self.parent_process.send_signal(signal.SIGQUIT)" in inspect.getsource(watchdog)
    assert "parent_process.send_signal(signal.SIGQUIT)" in inspect.getsource(scheduler.run_scheduler_process)


@pytest.mark.parametrize(
    ("choice", "tp_size", "installed"),
    [("auto", 2, True), ("two-shot", 2, True), ("auto", 1, False), ("off", 2, False), ("stock", 2, False)],
)
def test_the_stage_of_our_hooks(choice: str, tp_size: int, installed: bool) -> None:
    assert (Stage.ALL_REDUCE in lifecycle.scheduler_stages(options(choice), view(tp_size=tp_size))) is installed


def test_model_runner_has_what_we_read_of_it() -> None:
    import inspect

    from sglang.srt.model_executor.model_runner import ModelRunner

    source = inspect.getsource(ModelRunner)
    for name in ("server_args", "is_draft_worker", "device", "dtype", "model_config"):
        assert f"self.{name} = " in source or f"self.{name}: " in source, name
