"""The all-reduce profile: what is chosen at each size, the ranges made from it, its file, and whom it serves."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
from comm_work import HIDDEN, LAMPORT, MACHINE, NCCL, PUSH, TWO_SHOT, canned, point, profile
from hypothesis import given
from hypothesis import strategies as st

from sglang_sm120.errors import ConfigError
from sglang_sm120.kernels.communication.all_reduce_rmsnorm.config import (
    ALGORITHMS,
    DEFAULT_RANGES,
    STOCK,
    Range,
    choose,
    space_for,
)
from sglang_sm120.runners import profile as moe_profile
from sglang_sm120.tune import comm_profile
from sglang_sm120.tune.comm_profile import CommProfile

KB = 1024


def border(low: int, high: int) -> int:
    """Between two sizes in KB."""
    return int(math.sqrt(low * high) * KB) // 16 * 16


def choices(*points: Any, **changes: Any) -> list[str]:
    of = profile(*points, **changes)
    return [of.choice(one) for one in of.points]


# ---- one size ----
def test_one_sample_far_off_counts_for_nothing_and_a_quarter_of_them_for_much() -> None:
    steady, spiked = [4.0] * 7, [4.0, 4.0, 4.0, 124.0, 4.0, 4.0, 4.0]
    stalls = [4.0, 4.0, 4.0, 124.0, 124.0, 4.0, 4.0]
    (one,) = profile(point(1, one_shot_lamport=spiked, nccl=[9.0] * 7)).points
    lamport = one.candidates[0]
    assert (lamport.median_us, lamport.spread) == (4.0, 0.0)
    assert choices(point(1, one_shot_lamport=spiked, nccl=9.0)) == [LAMPORT]
    (one,) = profile(point(1, one_shot_lamport=stalls, nccl=[9.0] * 7)).points
    assert one.needed_margin == one.candidates[0].spread == 15.0
    assert choices(point(1, one_shot_lamport=stalls, nccl=9.0)) == [STOCK], "ours has stalled"
    assert choices(point(1, one_shot_lamport=steady, nccl=[9.0] * 5 + [300.0] * 2)) == [STOCK], "faster than what?"
    assert choices(point(1, one_shot_lamport=steady, nccl=9.0)) == [LAMPORT]
    assert choices(point(1, one_shot_lamport=stalls)) == [LAMPORT], "nothing to compare it with"


def test_ours_has_to_win_by_more_than_two_percent_and_than_the_spread() -> None:
    for baseline, won in ((10.1, False), (10.19, False), (10.21, True), (9.9, False)):
        assert choices(point(1, one_shot_push=10.0, nccl=baseline)) == [PUSH if won else STOCK]
    spread = [8.5, 8.5, 10.0, 10.0, 10.0, 11.5, 11.5]  # quartiles 9.25 and 10.75: 0.15 of the median
    for baseline, won in ((11.4, False), (11.6, True)):
        assert choices(point(1, one_shot_push=spread, nccl=baseline)) == [PUSH if won else STOCK]


def test_ties() -> None:
    assert choices(point(1, one_shot_push=10.0, nccl=10.0)) == [STOCK]
    assert choices(point(1, two_shot_push=5.0, one_shot_push=5.0, nccl=10.0)) == [TWO_SHOT], "any, but one"


def test_what_is_wrong_or_failed_is_never_chosen() -> None:
    wrong, failed = "wrong: rank 1: relative error 0.5", "failed: rank 0: RuntimeError"
    assert choices(point(1, one_shot_lamport=wrong, one_shot_push=7.0, nccl=9.0)) == [PUSH]
    assert choices(point(1, one_shot_lamport=failed, one_shot_push=wrong, nccl=9.0)) == [STOCK]
    assert choices(point(1, one_shot_push=9.0, nccl=failed, sglang=20.0)) == [PUSH]
    assert choices(point(1, one_shot_lamport=wrong)) == [STOCK]
    assert choices(point(1)) == [STOCK]


def test_the_fastest_baseline_is_the_one_to_win_against() -> None:
    assert choices(point(1, one_shot_push=7.0, nccl=12.0, sglang=6.0)) == [STOCK]


# ---- ranges ----
def test_ranges_worked_by_hand() -> None:
    of = canned()
    assert of.ranges(True) == (
        Range(border(32, 256), LAMPORT),
        Range(border(256, 2048), TWO_SHOT),
        Range(2048 * KB, STOCK),
    )
    assert of.ranges(False) == (Range(border(4, 32), LAMPORT), Range(256 * KB, STOCK))
    assert border(32, 256) == 92672
    assert choose(of.ranges(True), 92672) == LAMPORT
    assert choose(of.ranges(True), 92688) == TWO_SHOT
    assert choose(of.ranges(True), 2048 * KB + 16) is None


def test_one_size_and_none() -> None:
    of = profile(point(3, one_shot_push=1.0, nccl=2.0))
    assert of.ranges(True) == (Range(12 * KB, PUSH),)
    assert of.ranges(False) == ()


def test_ours_is_not_taken_beyond_the_largest_size() -> None:
    of = profile(point(1, one_shot_push=1.0, nccl=2.0), point(2, one_shot_push=1.0, nccl=2.0))
    assert of.ranges(True) == (Range(8 * KB, PUSH),)
    assert choose(of.ranges(True), 8 * KB + 16) is None


@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_without_a_baseline_ranges_end_where_the_shipped_default_ends(world_size: int) -> None:
    end = DEFAULT_RANGES[world_size][-1].max_bytes
    points = [point(4**n, one_shot_push=1.0) for n in range(8)]
    of = profile(*points, world_size=world_size)
    assert of.ranges(True) == (Range(end, PUSH),)
    assert not of.has_baseline(True)
    assert profile(*points[:2], world_size=world_size).ranges(True) == (Range(16 * KB, PUSH),)
    assert profile(*points[6:], world_size=world_size).ranges(True) == ()


def test_a_baseline_that_is_missing_at_one_size() -> None:
    of = profile(
        point(1, one_shot_push=1.0), point(16, one_shot_push=2.0, nccl=4.0), point(4096, one_shot_push=1.0)
    )  # fmt: skip
    assert [of.choice(one) for one in of.points] == [PUSH, PUSH, STOCK], "the last is far beyond the shipped default"
    assert of.ranges(True)[-1] == Range(16384 * KB, STOCK)


TIMES = st.one_of(st.none(), st.floats(1.0, 4.0))
SIZE = st.tuples(st.integers(1, 5000), TIMES, TIMES, TIMES)


@given(
    st.lists(st.tuples(st.integers(1, 5000), TIMES, TIMES, TIMES), min_size=1, max_size=12, unique_by=lambda p: p[0])
)
def test_ranges_of_any_times(measured: list[tuple[int, float | None, float | None, float | None]]) -> None:
    def of_point(rows: int, *times: float | None) -> Any:
        named = zip(("one_shot_lamport", "two_shot_push", "nccl"), times, strict=True)
        return point(rows, **{name: us for name, us in named if us is not None})

    of = profile(*(of_point(*one) for one in sorted(measured)))
    ranges = of.ranges(True)
    sizes = [entry.max_bytes for entry in ranges]
    assert sizes == sorted(set(sizes))
    assert all(size % 16 == 0 for size in sizes)
    assert all(entry.algorithm in (*ALGORITHMS, STOCK) for entry in ranges)
    assert all(a.algorithm != b.algorithm for a, b in pairwise(ranges))
    if of.has_baseline(True):
        assert sizes[-1] == of.points[-1].bytes
    else:
        assert not sizes or sizes[-1] == min(of.points[-1].bytes, of.default_end)
    for one in of.points:
        if sizes and one.bytes <= sizes[-1]:
            assert (choose(ranges, one.bytes) or STOCK) == of.choice(one), "each size gets what was best there"
    space_for(ranges, of.world_size, of.hidden_size)


# ---- the file ----
def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "profile.json"
    comm_profile.write(canned(), path)
    assert comm_profile.read(path) == canned()
    assert [file.name for file in path.parent.iterdir()] == ["profile.json"]


def test_a_path_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="file/profile"):
        comm_profile.write(canned(), tmp_path / "file" / "profile.json")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"format": "sglang-sm120 MoE profile 1"}, "is of format 'sglang-sm120 MoE profile 1'"),
        ({"format": 3}, "Expected `str`"),
        ({"more": 1}, "unknown field"),
        ({"points": []}, "no sizes"),
        ({"world_size": 3}, "world size 3"),
        ({"gpus": ["Test GPU"]}, "world size 2, 1 GPUs"),
        ({"hidden_size": 20}, "hidden size 20"),
        ({"hidden_size": 0}, "hidden size 0"),
        ({"hidden_size": 1024}, "1 tokens of 4096 bytes"),
    ],
)  # fmt: skip
def test_what_is_no_profile_is_refused(change: dict[str, Any], said: str, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    comm_profile.write(canned(), path)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ConfigError) as error:
        comm_profile.read(path)
    assert said in error.value.found
    assert "tune --comm" in error.value.fix


@pytest.mark.parametrize(
    ("points", "said"),
    [
        ([point(2), point(1)], "do not ascend"),
        ([point(2), point(2)], "do not ascend"),
        ([point(0)], "do not ascend"),
        ([point(1, nccl=[0.0])], "not above 0"),
        ([point(1, nccl=[-1.0])], "not above 0"),
    ],
)
def test_points_that_no_measurement_gives(points: list[Any], said: str, tmp_path: Path) -> None:
    comm_profile.write(profile(*points), tmp_path / "profile.json")
    with pytest.raises(ConfigError, match=said):
        comm_profile.read(tmp_path / "profile.json")


def test_candidates_that_no_measurement_gives(tmp_path: Path) -> None:
    (one,) = profile(point(1, nccl=1.0)).points
    (nccl,) = one.candidates
    for candidates, said in (
        ([nccl, nccl], "by nccl, nccl"),
        ([msgspec.structs.replace(nccl, reason="wrong: x")], "of what was wrong"),
    ):
        path = tmp_path / "profile.json"
        comm_profile.write(profile(msgspec.structs.replace(one, candidates=candidates)), path)
        with pytest.raises(ConfigError, match=said):
            comm_profile.read(path)


def test_a_file_that_is_not_there_or_damaged(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        comm_profile.read(tmp_path / "absent.json")
    (tmp_path / "profile.json").write_text("{")
    with pytest.raises(ConfigError, match="truncated"):
        comm_profile.read(tmp_path / "profile.json")


def test_the_default_path_is_beside_that_of_moe_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = comm_profile.default_path(4, "NVIDIA RTX PRO 6000 Blackwell")
    assert path == tmp_path / "sglang-sm120" / "comm-profile-nvidia-rtx-pro-6000-blackwell-x4.json"
    assert path.parent == moe_profile.default_path("NVIDIA RTX PRO 6000 Blackwell").parent


# ---- for a server ----
def test_for_a_server_of_this_machine(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    comm_profile.write(canned(), path)
    assert comm_profile.for_server(path, 2, HIDDEN, machine=MACHINE) == canned()
    for asked in ((4, HIDDEN, "bfloat16"), (2, HIDDEN * 2, "bfloat16"), (2, HIDDEN, "float16")):
        assert comm_profile.for_server(path, *asked, machine=MACHINE) is None, "no entry, which is no fault"
    assert canned().uncovered_reason(4, HIDDEN, "bfloat16") == "it is of world size 2, not 4"
    driver = msgspec.structs.replace(MACHINE, driver="another")
    assert comm_profile.for_server(path, 2, HIDDEN, machine=driver) == canned()


def test_a_profile_that_was_named_has_to_be_of_the_server(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    comm_profile.write(canned(), path)
    assert comm_profile.for_server_named(path, 2, HIDDEN, machine=MACHINE) == canned()
    for asked, says in (
        ((4, HIDDEN, "bfloat16"), "it is of world size 2, not 4"),
        ((2, HIDDEN * 2, "bfloat16"), f"it is of hidden size {HIDDEN}, not {HIDDEN * 2}"),
        ((2, HIDDEN, "float16"), "it is of dtype bfloat16, not float16"),
    ):
        with pytest.raises(ConfigError) as error:
            comm_profile.for_server_named(path, *asked, machine=MACHINE)
        assert error.value.found == f"all-reduce profile {path} is not of this server: {says}"
        assert f"{asked[0]} GPUs, hidden size {asked[1]}, {asked[2]}" in error.value.needed
    with pytest.raises(ConfigError, match="measured elsewhere: gpu Test GPU"):
        comm_profile.for_server_named(path, 2, HIDDEN, machine=msgspec.structs.replace(MACHINE, gpu="Other GPU"))
    with pytest.raises(ConfigError, match="No such file"):
        comm_profile.for_server_named(tmp_path / "absent.json", 2, HIDDEN, machine=MACHINE)


@pytest.mark.parametrize("change", [{"gpu": "Other GPU"}, {"torch": "2.1"}, {"sglang_sm120": "0.2"}])
def test_another_machine_or_other_versions_are_refused_with_the_reason(change: dict[str, str], tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    comm_profile.write(canned(), path)
    (name,) = change
    with pytest.raises(ConfigError, match=f"measured elsewhere: {name} .*, here {change[name]}") as error:
        comm_profile.for_server(path, 2, HIDDEN, machine=msgspec.structs.replace(MACHINE, **change))
    assert "tune --comm" in error.value.fix


def test_without_a_name_a_profile_may_be_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert comm_profile.for_server(None, 2, HIDDEN) is None
    here = moe_profile.current_machine()
    of: CommProfile = msgspec.structs.replace(canned(), machine=here)
    comm_profile.write(of, comm_profile.default_path(2))
    assert comm_profile.for_server(None, 2, HIDDEN) == of
    assert comm_profile.for_server(None, 4, HIDDEN) is None
    with pytest.raises(ConfigError, match="No such file"):
        comm_profile.for_server(tmp_path / "named.json", 2, HIDDEN)
    assert of.points[0].best(ours=False).name == NCCL
