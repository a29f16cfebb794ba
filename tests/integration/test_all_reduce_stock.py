"""SGLang's own ways by the profile: pcie_ipc in its ranges, through SGLang's dispatch; a line for what cannot be."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("sglang")

from sglang.srt.distributed.device_communicators import pcie_ipc_ar
from sglang.srt.distributed.parallel_state import GroupCoordinator

from sglang_sm120.errors import ConfigError
from sglang_sm120.integration import all_reduce, all_reduce_setup, all_reduce_stock
from sglang_sm120.integration.all_reduce_plane import HostPlane
from sglang_sm120.integration.all_reduce_stock import PCIE_IPC_BYTES, PcieIpc, follow
from sglang_sm120.kernels.communication.all_reduce_rmsnorm.config import LAMPORT, Range
from sglang_sm120.runners.profile import Machine
from sglang_sm120.tune import comm_profile, comm_stock
from sglang_sm120.tune.comm_stock import PCIE_IPC

HIDDEN = 512  # 1 KB a row
SIGNATURE = inspect.signature(pcie_ipc_ar.PcieIpcCommunicator.__init__)
MACHINE = Machine(
    gpu="Any", capability="12.0", multiprocessors=1, driver="", torch="2", triton=None, flashinfer=None,
    sglang_sm120="0",
)  # fmt: skip


class FakePcieIpc:
    """In the place of SGLang's: takes what its workspace holds."""

    turned_off = False

    def __init__(self, *given: Any, **named: Any) -> None:
        self.given = SIGNATURE.bind(self, *given, **named).arguments
        self.disabled, self.max_numel, self.calls = self.turned_off, 0, []

    def prepare(self, *, hidden: int, max_rows: int | None = None) -> None:
        self.max_numel = hidden * (max_rows or 64)

    def should_pcie_ipc_ar(self, inp: torch.Tensor) -> bool:
        return inp.dtype is torch.bfloat16 and inp.numel() <= self.max_numel

    def pcie_ipc_all_reduce(self, inp: torch.Tensor) -> torch.Tensor:
        return inp + 2

    def destroy(self) -> None:
        self.calls.append("destroy")


def profile(*sizes: tuple[int, dict[str, float]]) -> comm_profile.CommProfile:
    """(rows, times by name), of sums without a norm."""
    points = [
        comm_profile.CommPoint(
            rows=rows, bytes=2 * HIDDEN * rows, fused=False,
            candidates=[comm_profile.CommCandidate(name=name, samples_us=[us]) for name, us in hows.items()],
        )
        for rows, hows in sizes
    ]  # fmt: skip
    return comm_profile.CommProfile(
        format=comm_profile.FORMAT, created="now", command="", machine=MACHINE, gpus=["a", "b"], link="PCIe",
        world_size=2, hidden_size=HIDDEN, dtype="bfloat16", baseline="x", missing=[], points=points,
    )  # fmt: skip


# Borders at 2, 8 and 32 KB: ours, pcie_ipc, pcie_ipc, NCCL.
MIXED = profile(
    (1, {LAMPORT: 1.0, "nccl": 9.0, comm_stock.PCIE_IPC_NAME: 5.0}),
    (4, {LAMPORT: 9.0, "nccl": 9.0, comm_stock.PCIE_IPC_NAME: 5.0}),
    (16, {LAMPORT: 9.0, "nccl": 9.0, comm_stock.PCIE_IPC_NAME: 5.0}),
    (64, {LAMPORT: 9.0, "nccl": 4.0, comm_stock.PCIE_IPC_NAME: 5.0}),
)


def custom(*, disabled: bool = False) -> Any:
    return SimpleNamespace(disabled=disabled, should_custom_ar=lambda inp: True)


class World:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.group = SimpleNamespace(
            world_size=2, rank_in_group=0, ranks=[0, 1], device_group="nccl", cpu_group="gloo", device="cuda:0",
            ca_comm=None, pcie_ipc_comm=None, pynccl_comm=object(), qr_comm=None, pymscclpp_comm=None,
            torch_symm_mem_comm=None,
        )  # fmt: skip
        self.others: list[bytes] = [b""]
        self.patch = monkeypatch.setattr
        self.patch(all_reduce_stock, "exchange_of", lambda group: lambda mine: [mine, *self.others])
        self.patch(pcie_ipc_ar, "PcieIpcCommunicator", FakePcieIpc)
        self.patch(all_reduce, "_state", all_reduce._State())

    def serve(self, of: comm_profile.CommProfile) -> HostPlane:
        plane = HostPlane(self.group, of.ranges(False))
        plane.dtypes, plane.profile = (torch.bfloat16,), of
        all_reduce._serve(plane, self.group, first=False)
        return plane

    def method(self, rows: int, dtype: torch.dtype = torch.bfloat16) -> str | None:
        """Which of its communicators SGLang takes."""
        x = torch.zeros(rows, HIDDEN, dtype=dtype)
        return GroupCoordinator._resolve_outplace_all_reduce_method(self.group, x)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch):
    yield World(monkeypatch)
    all_reduce.stop()


def test_pcie_ipc_serves_the_sizes_that_the_profile_gives_to_it(world: World, caplog) -> None:
    with caplog.at_level("INFO"):
        plane = world.serve(MIXED)
    assert "all-reduce: FlashInfer's pcie_ipc serves 2 to 32 KiB, as the profile says" in caplog.text
    slot = world.group.pcie_ipc_comm
    made = slot._inner._communicator
    assert {name: made.given[name] for name in ("group", "device", "cpu_group")} == {
        "group": "nccl", "device": "cuda:0", "cpu_group": "gloo"
    }  # fmt: skip
    slot.prepare(hidden=HIDDEN, max_rows=3)
    assert made.max_numel == 32 * HIDDEN, "as much as the profile gives it, not as decode's widest batch"
    assert [world.method(rows) for rows in (1, 2, 3, 32, 33, 64)] == [
        "pcie_ipc", "pcie_ipc", "pcie_ipc", "pcie_ipc", None, None
    ]  # fmt: skip
    assert [plane.takes(torch.zeros(rows, HIDDEN, dtype=torch.bfloat16)) for rows in (2, 3)] == [True, False]
    x = torch.zeros(8, HIDDEN, dtype=torch.bfloat16)
    assert torch.equal(slot.pcie_ipc_all_reduce(x), x + 2)
    assert world.method(8, torch.float16) is None
    made.disabled = True
    assert world.method(8) is None, "its workspace could not be made"
    slot.destroy()
    assert made.calls == ["destroy"]


def test_an_enabled_custom_all_reduce_leaves_those_sizes_to_it(world: World, caplog) -> None:
    world.group.ca_comm = custom()
    with caplog.at_level("INFO"):
        world.serve(MIXED)
    world.group.pcie_ipc_comm.prepare(hidden=HIDDEN)
    assert [world.method(rows) for rows in (1, 3, 32, 33)] == ["ca", "pcie_ipc", "pcie_ipc", "ca"]
    assert "has NCCL as the fastest for 32 to 64 KiB, but SGLang asks its custom all-reduce first" in caplog.text


def test_one_that_sglang_was_told_to_make_stays_as_it_is(world: World, caplog) -> None:
    theirs = FakePcieIpc("nccl", "cuda:0")
    theirs.prepare(hidden=HIDDEN)
    world.group.pcie_ipc_comm = theirs
    with caplog.at_level("INFO"):
        world.serve(MIXED)
    assert world.group.pcie_ipc_comm._inner is theirs
    assert world.method(64) == "pcie_ipc"
    assert "as the profile says" not in caplog.text


@pytest.mark.parametrize("fault", ["turned off", "raises", "another rank"])
def test_where_it_cannot_be_made_on_all_ranks_none_has_it(fault: str, world: World, monkeypatch, caplog) -> None:
    says = "rank 0: it cannot be made: RuntimeError: SGLang turns it off here"
    if fault == "turned off":
        monkeypatch.setattr(FakePcieIpc, "turned_off", True)
    elif fault == "raises":
        world.patch(pcie_ipc_ar, "PcieIpcCommunicator", lambda **_: 1 / 0)
        says = "rank 0: it cannot be made: ZeroDivisionError"
    else:
        world.others, says = [b"!ImportError: no"], "rank 1: it cannot be made: ImportError: no"
    with caplog.at_level("INFO"):
        world.serve(MIXED)
    assert f"the profile has pcie_ipc as the fastest for 2 to 32 KiB, but {says}" in caplog.text
    assert [world.method(rows) for rows in (2, 3, 32)] == ["pcie_ipc", None, None], "ours, and SGLang's NCCL"


@pytest.mark.parametrize(
    ("hows", "ca_comm", "says"),
    [
        ({"nccl": 2.0}, None, None),
        ({"nccl": 2.0}, custom(disabled=True), None),
        ({"nccl": 2.0}, custom(), "NCCL as the fastest for 0 to 4 KiB, but SGLang asks its custom all-reduce first"),
        ({"nccl": 9.0, "sglang custom": 2.0}, custom(), None),
        ({"nccl": 9.0, "sglang custom": 2.0}, None, "SGLang's custom all-reduce as the fastest for 0 to 4 KiB, but"),
        ({"nccl": 9.0, "sglang custom v2": 2.0}, custom(disabled=True), "but SGLang leaves it off"),
        ({"nccl": 9.0, "mscclpp": 2.0}, None, "MSCCL++ as the fastest for 0 to 4 KiB, but it goes with"),
        ({"of another": 2.0}, None, None),
    ],
)
def test_a_line_for_what_cannot_be_followed(hows: dict, ca_comm: Any, says: str | None, world: World, caplog) -> None:
    world.group.ca_comm = ca_comm
    for rank in (0, 1):
        world.group.rank_in_group = rank
        with caplog.at_level("INFO"):
            assert follow(profile((4, hows)), world.group) is None
    assert len(caplog.messages) == (says is not None), "by one rank"
    assert says is None or says in caplog.text


def test_ranks_whose_profiles_differ_in_nothing_but_this_do_not_choose_by_them(monkeypatch) -> None:
    """Else one would sum by NCCL and wait for another that has pcie_ipc."""
    one, other = (profile((4, {"nccl": 9.0, comm_stock.PCIE_IPC_NAME: us})) for us in (2.0, 20.0))
    assert one.ranges(False) == other.ranges(False)
    heard: list[bytes] = []
    for of in (other, one):
        monkeypatch.setattr(comm_profile, "for_server_named", lambda *_, of=of: of)

        def exchange(mine: bytes) -> list[bytes]:
            heard.append(mine)
            return list(heard)

        if of is other:
            assert all_reduce_setup._profile("p", exchange, 2, HIDDEN, torch.bfloat16) is other
        else:
            with pytest.raises(ConfigError, match="ranks have read different ones"):
                all_reduce_setup._profile("p", exchange, 2, HIDDEN, torch.bfloat16)


def test_without_a_profile_nothing_is_made(world: World, caplog) -> None:
    world.patch(pcie_ipc_ar, "PcieIpcCommunicator", lambda **_: pytest.fail("made"))
    assert follow(None, world.group) is None
    assert follow(profile((4, {LAMPORT: 1.0, "nccl": 9.0})), world.group) is None
    assert not caplog.messages


def test_its_workspace_has_a_limit(world: World, caplog) -> None:
    rows = 2 * PCIE_IPC_BYTES // (2 * HIDDEN)
    with caplog.at_level("INFO"):
        ours = follow(profile((rows, {"nccl": 9.0, comm_stock.PCIE_IPC_NAME: 2.0})), world.group)
    assert ours is not None
    assert "pcie_ipc serves 0 to 2048 KiB" in caplog.text
    ours.prepare(hidden=HIDDEN, max_rows=10_000)
    assert ours._communicator.max_numel == PCIE_IPC_BYTES // 2
    at_most = torch.zeros(rows // 2, HIDDEN, dtype=torch.bfloat16)
    assert ours.should_pcie_ipc_ar(at_most)
    assert not ours.should_pcie_ipc_ar(torch.zeros(rows // 2 + 1, HIDDEN, dtype=torch.bfloat16))


def test_a_row_wider_than_the_range_still_makes_a_workspace() -> None:
    ours = PcieIpc(FakePcieIpc("nccl", "cuda:0"), (Range(16, PCIE_IPC),))
    ours.prepare(hidden=HIDDEN)
    assert ours._communicator.max_numel == HIDDEN


def test_sglangs_communicator_has_what_we_use_of_it() -> None:
    for name in ("prepare", "should_pcie_ipc_ar", "pcie_ipc_all_reduce", "destroy"):
        ours, theirs = (inspect.signature(getattr(cls, name)) for cls in (PcieIpc, pcie_ipc_ar.PcieIpcCommunicator))
        assert list(ours.parameters) == list(theirs.parameters)
    assert "self.device = " in inspect.getsource(GroupCoordinator.__init__)
