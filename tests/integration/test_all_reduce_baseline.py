"""SGLang's own all-reduces as baselines: which are there, why others are not, and how each is called."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("sglang")

from sglang.srt.distributed.device_communicators import pcie_ipc_ar, pymscclpp

from sglang_sm120.errors import UnsupportedError
from sglang_sm120.integration import all_reduce_baseline as baseline
from sglang_sm120.integration.all_reduce_stock import PCIE_IPC_BYTES
from sglang_sm120.tune import comm_stock

GPU = torch.device("cuda", 0)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The packages that are found."""
    names = {"flashinfer", "mscclpp"}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if name in names else None)
    monkeypatch.setattr(dist, "get_world_size", lambda group: 2)
    monkeypatch.setattr(dist, "new_group", lambda backend: backend)
    return names


def test_every_maker_has_a_name_that_a_profile_knows() -> None:
    assert {*baseline._MAKERS, "nccl"} == set(comm_stock._WAYS)


def test_why_pcie_ipc_is_not_there(installed: set[str], monkeypatch) -> None:
    monkeypatch.setattr(pcie_ipc_ar, "PcieIpcCommunicator", lambda **_: SimpleNamespace(disabled=True))
    with pytest.raises(UnsupportedError, match="this FlashInfer does not have it"):
        baseline._pcie_ipc("x", "gloo", GPU)
    installed.clear()
    with pytest.raises(UnsupportedError, match="FlashInfer is not installed"):
        baseline._pcie_ipc("x", "gloo", GPU)
    monkeypatch.setattr(dist, "get_world_size", lambda group: 3)
    with pytest.raises(UnsupportedError, match="TP 2, 4 or 8 and bfloat16 only"):
        baseline._pcie_ipc("x", "gloo", GPU)


def test_pcie_ipc_is_made_for_the_first_message_and_has_a_limit(installed, monkeypatch) -> None:
    class Fake:
        disabled = False

        def __init__(self, **given: Any) -> None:
            self.given = inspect.signature(REAL).bind(self, **given).arguments
            self.prepared: list[tuple[int, int]] = []

        def prepare(self, *, hidden: int, max_rows: int) -> None:
            self.prepared.append((hidden, max_rows))

        def should_pcie_ipc_ar(self, x: torch.Tensor) -> bool:
            return bool(self.prepared) and x.numel() <= self.prepared[0][0] * self.prepared[0][1]

        def pcie_ipc_all_reduce(self, x: torch.Tensor) -> torch.Tensor:
            return x + 1

    REAL = pcie_ipc_ar.PcieIpcCommunicator.__init__
    made: list[Fake] = []
    monkeypatch.setattr(pcie_ipc_ar, "PcieIpcCommunicator", lambda **given: made.append(Fake(**given)) or made[0])
    of = baseline._pcie_ipc("flashinfer pcie_ipc", "gloo", GPU)
    assert (made[0].given["group"], made[0].given["cpu_group"]) == ("nccl", "gloo")
    rows = PCIE_IPC_BYTES // (2 * 1024)
    assert not of.covers(torch.zeros(1, 1024, dtype=torch.float16))
    assert not of.covers(torch.zeros(rows + 1, 1024, dtype=torch.bfloat16))
    assert not made[0].prepared
    assert of.covers(torch.zeros(1, 1024, dtype=torch.bfloat16))
    assert of.covers(torch.zeros(rows, 1024, dtype=torch.bfloat16))
    assert made[0].prepared[0] == (1024, rows)
    assert torch.equal(of.all_reduce(torch.zeros(2)), torch.ones(2))


def test_why_mscclpp_is_not_there(installed: set[str], monkeypatch) -> None:
    monkeypatch.setattr(pymscclpp, "PyMscclppCommunicator", lambda **_: SimpleNamespace(available=False))
    with pytest.raises(UnsupportedError, match="SGLang turns it off on this machine"):
        baseline._mscclpp("mscclpp", "gloo", GPU)
    installed.clear()
    with pytest.raises(UnsupportedError) as caught:
        baseline._mscclpp("mscclpp", "gloo", GPU)
    assert caught.value.found == "not installed"


def test_mscclpp_sums_a_copy_and_is_on_only_where_it_is_asked(installed, monkeypatch) -> None:
    real = pymscclpp.PyMscclppCommunicator

    class Fake:
        change_state = real.change_state
        available, disabled = True, True

        def __init__(self, **given: Any) -> None:
            inspect.signature(real.__init__).bind(self, **given)

        def should_mscclpp_allreduce(self, x: torch.Tensor) -> bool:
            return not self.disabled and x.numel() <= 4

        def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
            return x.add_(1)

    made: list[Fake] = []
    monkeypatch.setattr(pymscclpp, "PyMscclppCommunicator", lambda **given: made.append(Fake(**given)) or made[0])
    of = baseline._mscclpp("mscclpp", "gloo", GPU)
    assert of.covers(torch.zeros(4))
    assert not of.covers(torch.zeros(5))
    assert made[0].disabled
    with of.capture():
        assert not made[0].disabled
    x = torch.zeros(4)
    assert torch.equal(of.all_reduce(x), torch.ones(4))
    assert torch.equal(x, torch.zeros(4)), "the next call adds the same again"


def test_all_that_are_missing_are_said_once_each(monkeypatch) -> None:
    """On this machine, in one process, with NCCL replaced: each of the others says why it is not there."""
    from sglang.srt import runtime_context
    from sglang.srt.distributed.device_communicators import pynccl

    monkeypatch.setattr(dist, "get_rank", lambda *group: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda *group: 2)
    monkeypatch.setattr(pynccl, "PyNcclCommunicator", lambda **_: SimpleNamespace())
    monkeypatch.setattr(runtime_context, "get_parallel", lambda: SimpleNamespace(override_permanently=lambda **_: None))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for name in ("sglang custom v2", "sglang custom"):
        monkeypatch.setitem(baseline._MAKERS, name, lambda *_: 1 / 0)
    found, missing = baseline.prepare(torch.device("cpu"))
    assert [one.name for one in found] == ["nccl"]
    assert missing == [
        "sglang custom v2: ZeroDivisionError: division by zero",
        "sglang custom: ZeroDivisionError: division by zero",
        "flashinfer pcie_ipc: FlashInfer is not installed",
        "mscclpp: not installed",
    ]
    assert "mscclpp" not in sys.modules
