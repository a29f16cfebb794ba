"""Processes, one a GPU or on the CPU: their results, their failures, and that nothing of them is left."""

from __future__ import annotations

import multiprocessing
import os
import time
from pathlib import Path
from typing import Any

import pytest
import rank_work
import torch

from sglang_sm120.bench.ranks import RankFailedError, run_ranks
from sglang_sm120.errors import UnsupportedError

LIMIT_S = 120.0


@pytest.fixture(autouse=True)
def without_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU also where there are some, but fewer than a test has ranks."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)


def require_gone(folder: Path, count: int = 2) -> None:
    """No process that left its number there is alive."""
    pids = [int(path.read_text()) for path in folder.iterdir()]
    assert len(pids) == count
    for pid in pids:
        assert not Path(f"/proc/{pid}").exists(), "killed, and waited for"
    assert not multiprocessing.active_children()


def test_results_come_in_the_ranks_order() -> None:
    found = run_ranks(3, rank_work.told, 10, time_limit_s=LIMIT_S)
    assert [one["rank"] for one in found] == [0, 1, 2]
    assert [one["product"] for one in found] == [0, 10, 20]
    for one in found:
        assert one["world"] == 3
        assert one["names"] == ["rank 0", "rank 1", "rank 2"]
    assert len({os.getpid(), *(one["pid"] for one in found)}) == 4, "each in a process of its own"
    assert not multiprocessing.active_children()


def test_without_gpus_ranks_are_on_the_cpu() -> None:
    assert {one["device"] for one in run_ranks(2, rank_work.told, 1, time_limit_s=LIMIT_S)} == {torch.device("cpu")}


def test_progress_is_that_of_the_first_rank() -> None:
    seen: list[Any] = []
    assert run_ranks(2, rank_work.reports, 3, time_limit_s=LIMIT_S, on_progress=seen.append) == ["done"] * 2
    assert seen == [(0, 0), (1, 0), (2, 0)]
    assert run_ranks(2, rank_work.reports, 3, time_limit_s=LIMIT_S) == ["done"] * 2, "nobody has to listen"


@pytest.mark.parametrize("which", [0, 1])
def test_a_rank_that_raises(which: int) -> None:
    start = time.monotonic()
    with pytest.raises(RankFailedError) as error:
        run_ranks(2, rank_work.one_raises, which, time_limit_s=LIMIT_S)
    assert f"rank {which}: Traceback" in error.value.found
    assert "KeyError: 'no such thing'" in error.value.found
    assert "one_raises" in error.value.found
    assert time.monotonic() - start < LIMIT_S / 2, "the others are not waited for"
    assert not multiprocessing.active_children()


def test_an_error_of_ours_is_told_without_a_traceback() -> None:
    with pytest.raises(RankFailedError) as error:
        run_ranks(2, rank_work.one_refuses, time_limit_s=LIMIT_S)
    assert "rank 1: sglang-sm120: what was found\n  needed: what is needed\n  fix:    what to do" in error.value.found


def test_a_rank_that_ends_without_a_word(tmp_path: Path) -> None:
    with pytest.raises(RankFailedError) as error:
        run_ranks(2, rank_work.one_ends, str(tmp_path), time_limit_s=LIMIT_S)
    assert "rank 1: the process ended without an answer (exit code 7)" in error.value.found
    require_gone(tmp_path)


def test_a_rank_that_hangs_is_killed(tmp_path: Path) -> None:
    start = time.monotonic()
    with pytest.raises(RankFailedError) as error:
        run_ranks(2, rank_work.one_hangs, str(tmp_path), time_limit_s=20.0)
    assert error.value.found == "ranks [1] gave no answer within 20 s"
    assert "bench p2p" in error.value.fix
    assert time.monotonic() - start < 60
    require_gone(tmp_path)


def test_nothing_is_left_when_the_parent_is_interrupted(tmp_path: Path) -> None:
    def stop(what: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_ranks(2, rank_work.all_sleep, str(tmp_path), time_limit_s=LIMIT_S, on_progress=stop)
    require_gone(tmp_path)


def test_a_result_that_cannot_be_sent() -> None:
    with pytest.raises(RankFailedError, match="pickle"):
        run_ranks(2, rank_work.cannot_be_sent, time_limit_s=LIMIT_S)


@pytest.mark.parametrize(
    ("world_size", "devices"), [(4, None), (2, (0,)), (2, (0, 1, 0)), (2, (0, 2)), (2, (-1, 0))]
)  # fmt: skip
def test_fewer_gpus_than_ranks(
    world_size: int, devices: tuple[int, ...] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(UnsupportedError, match=f"{world_size} ranks on devices .*, of 2 GPUs"):
        run_ranks(world_size, rank_work.told, 1, time_limit_s=LIMIT_S, devices=devices)
