"""Which of SGLang's own ways a profile names, by values worked by hand; in profiles of before, too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from comm_work import LAMPORT, canned, point, profile, with_names

from sglang_sm120.kernels.communication.all_reduce_rmsnorm.config import STOCK, Range, choose
from sglang_sm120.tune import comm_profile, comm_stock
from sglang_sm120.tune.comm_stock import CUSTOM, MSCCLPP, NCCL, PCIE_IPC, ranges, spans

PCIE = "flashinfer pcie_ipc"


def named(hows: dict[str, Any], **more: bool) -> str:
    of = profile(with_names(point(1), hows))
    return comm_stock.choice(of, of.points[0], **more)


def test_the_names_that_a_profile_gives() -> None:
    assert (NCCL, CUSTOM, PCIE_IPC, MSCCLPP) == ("stock:nccl", "stock:custom", "stock:pcie_ipc", "stock:mscclpp")
    for candidate, name in (
        ("nccl", NCCL), ("sglang custom", CUSTOM), ("sglang custom v2", CUSTOM), (PCIE, PCIE_IPC), ("mscclpp", MSCCLPP)
    ):  # fmt: skip
        assert named({candidate: 1.0}) == name
    assert named({"of another module": 1.0, "nccl": 2.0}) == STOCK
    assert named({}) == STOCK


def test_ours_where_it_is_chosen() -> None:
    assert named({LAMPORT: 4.0, "nccl": 9.0, PCIE: 5.0}) == LAMPORT
    assert named({LAMPORT: 4.95, "nccl": 9.0, PCIE: 5.0}) == PCIE_IPC, "1 % is not enough against the fastest"
    assert named({LAMPORT: 4.0, "nccl": 9.0, "mscclpp": 1.0}) == LAMPORT, "a server with ours has not MSCCL++"


def test_what_sglang_leaves_off_has_to_win_by_the_margin() -> None:
    for us, name in ((9.0, PCIE_IPC), (9.79, PCIE_IPC), (9.85, NCCL), (10.0, NCCL), (11.0, NCCL)):
        assert named({"nccl": 10.0, PCIE: us}) == name
    spread = [8.5, 8.5, 10.0, 10.0, 10.0, 11.5, 11.5]  # quartiles 9.25 and 10.75: 0.15 of the median
    assert named({"nccl": spread, PCIE: 9.0}) == NCCL
    assert named({"nccl": spread, PCIE: 8.5}) == PCIE_IPC
    assert named({"nccl": 10.0, "sglang custom": 9.99}) == CUSTOM, "SGLang has both as they are"
    assert named({"nccl": 10.0, "sglang custom": 10.0}) == NCCL, "a tie: the first"


def test_what_is_wrong_or_missing_has_no_name() -> None:
    assert named({"nccl": 10.0, PCIE: "wrong: rank 1: relative error 0.5"}) == NCCL
    assert named({"nccl": "failed: rank 0: no", PCIE: 3.0}) == PCIE_IPC
    assert named({"nccl": "failed: rank 0: no"}) == STOCK


def test_what_a_server_can_follow_leaves_mscclpp_out() -> None:
    hows = {"nccl": 10.0, PCIE: 5.0, "mscclpp": 2.0}
    assert named(hows) == MSCCLPP
    assert named(hows, with_mscclpp=False) == PCIE_IPC
    assert named({"mscclpp": 2.0}, with_mscclpp=False) == STOCK


def test_ranges_with_several_baselines() -> None:
    of = profile(
        with_names(point(1), {LAMPORT: 1.0, "nccl": 9.0, PCIE: 4.0}),
        with_names(point(4), {LAMPORT: 9.0, "nccl": 9.0, PCIE: 4.0}),
        with_names(point(16), {LAMPORT: 9.0, "nccl": 9.0, PCIE: 4.0, "mscclpp": 1.0}),
        with_names(point(64), {LAMPORT: 99.0, "nccl": 30.0, PCIE: 60.0}),
    )  # 4, 16, 64 and 256 KB: borders at 8, 32 and 128 KB
    kb = 1024
    assert ranges(of, True) == (
        Range(8 * kb, LAMPORT), Range(32 * kb, PCIE_IPC), Range(128 * kb, MSCCLPP), Range(256 * kb, NCCL)
    )  # fmt: skip
    served = ranges(of, True, with_mscclpp=False)
    assert served == (Range(8 * kb, LAMPORT), Range(128 * kb, PCIE_IPC), Range(256 * kb, NCCL))
    assert spans(served, PCIE_IPC) == [(8 * kb, 128 * kb)]
    assert spans(ranges(of, True), LAMPORT) == [(0, 8 * kb)]
    assert spans(served, MSCCLPP) == []
    assert of.ranges(True) == (Range(8 * kb, LAMPORT), Range(256 * kb, STOCK)), "what our communicator is given"
    assert [choose(served, size * kb) for size in (8, 9, 128, 129, 257)] == [LAMPORT, PCIE_IPC, PCIE_IPC, NCCL, None]
    assert ranges(of, False) == ()


@pytest.mark.parametrize("fused", [True, False])
def test_a_profile_of_before_is_read_as_it_was(fused: bool, tmp_path: Path) -> None:
    """Its format is the same: names are made from its times."""
    comm_profile.write(canned(), tmp_path / "old.json")
    old = comm_profile.read(tmp_path / "old.json")
    was, now = old.ranges(fused), ranges(old, fused)
    assert [entry.max_bytes for entry in now] == [entry.max_bytes for entry in was]
    assert [entry.algorithm for entry in now] == [
        NCCL if entry.algorithm == STOCK else entry.algorithm for entry in was
    ]  # fmt: skip
    other = profile(with_names(point(1), {LAMPORT: 9.0, "module:function's own": 1.0}))
    assert ranges(other, True) == other.ranges(True) == (Range(4096, STOCK),)
