"""Our communicator in the place of SGLang's for PCIe: SGLang's own dispatch, with it and with others around."""

from __future__ import annotations

import ast
import inspect
import textwrap
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("sglang")

from sglang.srt.distributed.device_communicators.pcie_ipc_ar import PcieIpcCommunicator
from sglang.srt.distributed.parallel_state import GroupCoordinator

from sglang_sm120.integration.all_reduce_slot import Slot, go_first

OURS, THEIRS, NOBODYS = torch.zeros(8), torch.zeros(16), torch.zeros(24)


class FakePlane:
    """Takes tensors of eight elements."""

    def __init__(self, error: Exception | None = None) -> None:
        self.calls: list[str] = []
        self.error = error

    def takes(self, x: torch.Tensor, *, norm: bool = False) -> bool:
        return x.numel() == 8

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.append("reduce")
        return x + 1

    def close(self) -> None:
        self.calls.append("close")
        if self.error is not None:
            raise self.error


class FakePcieIpc:
    """What SGLang may have put there: takes tensors of sixteen elements."""

    disabled = False

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def should_pcie_ipc_ar(self, inp: torch.Tensor) -> bool:
        return inp.numel() == 16

    def pcie_ipc_all_reduce(self, inp: torch.Tensor) -> torch.Tensor:
        return inp + 2

    def prepare(self, *, hidden: int, max_rows: int | None = None) -> None:
        self.calls.append((hidden, max_rows))

    def destroy(self) -> None:
        self.calls.append("destroy")


def coordinator(slot: Slot, ca_comm: Any = None) -> Any:
    """As much of a GroupCoordinator as its dispatch looks at."""
    nothing = dict.fromkeys(("qr_comm", "pymscclpp_comm", "torch_symm_mem_comm"))
    return SimpleNamespace(pcie_ipc_comm=slot, ca_comm=ca_comm, pynccl_comm=object(), **nothing)


def method(group: Any, x: torch.Tensor) -> str | None:
    return GroupCoordinator._resolve_outplace_all_reduce_method(group, x)


def reduced(group: Any, x: torch.Tensor) -> torch.Tensor:
    return GroupCoordinator._all_reduce_out_place(group, x, method(group, x))


def test_sglang_asks_ours_and_then_its_own() -> None:
    plane, inner = FakePlane(), FakePcieIpc()
    group = coordinator(Slot(plane, inner))
    assert torch.equal(reduced(group, OURS), OURS + 1)
    assert torch.equal(reduced(group, THEIRS), THEIRS + 2)
    assert method(group, NOBODYS) is None
    inner.disabled = True
    assert method(group, THEIRS) is None
    assert method(coordinator(Slot(plane, None)), THEIRS) is None


def test_an_enabled_custom_all_reduce_stays_first_unless_ours_was_asked_for() -> None:
    plane = FakePlane()
    custom = SimpleNamespace(disabled=False, should_custom_ar=lambda inp: inp.numel() in (8, 24))
    group = coordinator(Slot(plane, None), custom)
    assert [method(group, x) for x in (OURS, NOBODYS)] == ["ca", "ca"]
    go_first(plane.takes, custom)
    assert [method(group, x) for x in (OURS, NOBODYS)] == ["pcie_ipc", "ca"]


def test_sglang_prepares_and_destroys_what_was_there_before_too() -> None:
    plane, inner, order = FakePlane(), FakePcieIpc(), []
    slot = Slot(plane, inner, before_close=lambda: order.append(list(plane.calls)))
    slot.prepare(hidden=64, max_rows=8)
    slot.destroy()
    slot.destroy()
    assert inner.calls == [(64, 8), "destroy", "destroy"]
    assert plane.calls == ["close"]
    assert order == [[]], "what uses it stops before"
    assert slot.disabled
    Slot(plane, None).prepare(hidden=64)


def test_a_peer_that_died_does_not_keep_a_process_from_ending(caplog) -> None:
    Slot(FakePlane(RuntimeError("Connection closed by peer")), None).destroy()
    assert "could not be taken down in order: Connection closed by peer" in caplog.text


def test_the_slot_has_all_that_sglang_uses_of_its_communicator() -> None:
    uses = set()
    from sglang.srt.model_executor.runner.base_runner import BaseRunner

    for function in (
        GroupCoordinator._resolve_outplace_all_reduce_method,
        GroupCoordinator._all_reduce_out_place,
        GroupCoordinator.destroy,
        BaseRunner._pre_initialize_pcie_ipc_workspace,
    ):
        for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(function)))):
            if isinstance(node, ast.Attribute) and ast.unparse(node.value).endswith("pcie_ipc_comm"):
                uses.add(node.attr)
    assert uses == {"disabled", "should_pcie_ipc_ar", "pcie_ipc_all_reduce", "prepare", "destroy"}
    for name in uses - {"disabled"}:
        ours, theirs = (inspect.signature(getattr(cls, name)) for cls in (Slot, PcieIpcCommunicator))
        assert list(ours.parameters) == list(theirs.parameters)


@pytest.mark.parametrize("name", ["pcie_ipc_comm", "ca_comm", "ranks", "rank_in_group", "cpu_group", "device_group"])
def test_a_group_has_what_we_read_of_it(name: str) -> None:
    tree = ast.parse(textwrap.dedent(inspect.getsource(GroupCoordinator.__init__)))
    targets = [t for node in ast.walk(tree) if isinstance(node, ast.Assign | ast.AnnAssign)
               for t in (node.targets if isinstance(node, ast.Assign) else [node.target])]  # fmt: skip
    assert f"self.{name}" in {ast.unparse(target) for target in targets}
