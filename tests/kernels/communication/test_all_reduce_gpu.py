"""The all-reduce kernels on real GPUs, a process for each rank.

With fewer GPUs than ranks some share one, by turns: the same kernels, signals and mapped memory, no bus between them,
and every wait takes a turn of milliseconds.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from sglang_sm120.bench.ranks import run_ranks
from tests.kernels.communication import all_reduce_work

GPUS = torch.cuda.device_count()
pytestmark = pytest.mark.skipif(GPUS < 1, reason="needs a GPU")
WORLDS = (2, 4, 8)


def on_gpus(world_size: int, work: Callable[..., Any], *args: Any, time_limit_s: float) -> list[Any]:
    devices = [rank % GPUS for rank in range(world_size)]
    return run_ranks(world_size, work, *args, time_limit_s=time_limit_s, devices=devices)


@pytest.mark.parametrize("world_size", WORLDS)
def test_right_on_every_rank(world_size: int) -> None:
    assert on_gpus(world_size, all_reduce_work.right, time_limit_s=180) == [2 * 5 * (6 + 5)] * world_size


@pytest.mark.parametrize("world_size", WORLDS)
def test_a_hundred_thousand_calls(world_size: int) -> None:
    replays = 10_000 if world_size <= GPUS else 20
    for made, wrong in on_gpus(world_size, all_reduce_work.hundred_thousand, replays, time_limit_s=300):
        assert made > 10 * replays and wrong == 0


@pytest.mark.parametrize("world_size", WORLDS)
def test_two_at_once_closed_and_made_again(world_size: int) -> None:
    assert on_gpus(world_size, all_reduce_work.two_and_again, time_limit_s=180) == [[0] * 6] * world_size


def test_a_rank_that_goes_ends_in_an_error_within_the_limit() -> None:
    first, second = on_gpus(2, all_reduce_work.a_rank_goes, time_limit_s=120)
    assert second == "gone"
    took_s, _, found = first.split(" ", 2)
    assert 0.9 < float(took_s) < 5.0
    assert re.match(r"rank 0 waited 1 s for a signal of rank 1 \(call 2, block \d+, phase 0\)", found)


def test_the_limit_of_a_captured_graph_can_be_changed() -> None:
    assert on_gpus(2, all_reduce_work.a_limit_set_later, time_limit_s=120) == [True, True]
