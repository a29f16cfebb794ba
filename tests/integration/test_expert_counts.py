"""The experts that batches touch: against plain sets, at every size, with ids that are not held here."""

from __future__ import annotations

from collections import defaultdict

import pytest
import torch

from sglang_sm120.integration import expert_counts
from sglang_sm120.integration.expert_counts import MAX_LOG2_ROWS, ExpertCounts

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def read(counts: ExpertCounts) -> dict[int, tuple[int, int]]:
    """What is reported when everything has come."""
    found: dict[int, tuple[int, int]] = {}
    for _ in range(2):
        counts.publish(lambda rows_le, experts, batches: found.__setitem__(rows_le, (experts, batches)))
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    return found


@pytest.fixture(autouse=True)
def without_pause(monkeypatch) -> None:
    monkeypatch.setattr(expert_counts, "READ_EVERY_S", 0.0)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("offset", [0, 5])
def test_sums_are_those_of_plain_sets(device: str, dtype: torch.dtype, offset: int) -> None:
    counts = ExpertCounts(7, offset, torch.device(device))
    counts.publish(lambda *_: pytest.fail("nothing ran"))
    generator = torch.Generator().manual_seed(0)
    want: dict[int, list[int]] = defaultdict(lambda: [0, 0])
    for rows in (1, 1, 2, 3, 4, 5, 8, 9, 64, 65, 0):
        ids = torch.randint(-1, 14, (rows, 3), generator=generator, dtype=dtype)
        counts.add(ids.to(device))
        if rows:
            bucket = next(2**i for i in range(20) if rows <= 2**i)
            want[bucket][0] += len({i for i in ids.flatten().tolist() if offset <= i < offset + 7})
            want[bucket][1] += 1
    assert read(counts) == {bucket: tuple(sums) for bucket, sums in want.items()}
    assert read(counts) == {}, "what was reported is not reported again"


def test_warm_up_is_not_reported_and_later_batches_are() -> None:
    counts = ExpertCounts(4, 0, torch.device("cpu"))
    counts.add(torch.tensor([[0, 1]]))
    counts.publish(lambda *_: pytest.fail("warm-up"))
    for _ in range(3):
        counts.add(torch.tensor([[3, 3]]))
        assert read(counts) == {1: (1, 1)}


def test_a_pass_within_the_pause_asks_for_nothing(monkeypatch) -> None:
    counts = ExpertCounts(4, 0, torch.device("cpu"))
    counts.publish(lambda *_: None)
    monkeypatch.setattr(expert_counts, "READ_EVERY_S", 1e9)
    counts.add(torch.tensor([[0, 1]]))
    assert read(counts) == {1: (2, 1)}
    counts.add(torch.tensor([[0, 1]]))
    assert read(counts) == {}


def test_huge_batches_share_the_last_bucket() -> None:
    counts = ExpertCounts(2, 0, torch.device("cpu"))
    counts.publish(lambda *_: None)
    counts.add(torch.zeros(2**MAX_LOG2_ROWS + 1, 1, dtype=torch.int32))
    assert read(counts) == {2**MAX_LOG2_ROWS: (1, 1)}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_graph_replays_are_counted() -> None:
    """Python runs once, at capture; every replay counts, with the ids of its time."""
    counts = ExpertCounts(8, 0, torch.device("cuda"))
    ids = torch.zeros(4, 2, dtype=torch.int32, device="cuda")
    counts.add(ids)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        counts.add(ids)
    counts.publish(lambda *_: None)
    for touched in (1, 2, 8):
        ids.copy_(torch.arange(8, device="cuda").remainder(touched).view(4, 2))
        graph.replay()
    assert read(counts) == {4: (1 + 2 + 8, 3)}
