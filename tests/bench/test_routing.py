"""Random routings, and cycles that a cache does not help."""

from __future__ import annotations

import pytest
import torch

from sglang_sm120.bench.moe_cases import random_weights
from sglang_sm120.bench.options import MODELS, ROUTINGS, ModelShape
from sglang_sm120.bench.routing import (
    CACHES,
    bytes_per_expert,
    make_cycle,
    random_routing,
    reuse_distance,
    weight_copies,
)

SMALL = ModelShape("small", 8, 2, 256, 128)


@pytest.mark.parametrize("kind", ROUTINGS)
def test_a_token_has_distinct_experts_and_the_seed_decides(kind: str) -> None:
    first, again = (random_routing(kind, 300, 64, 8, torch.Generator().manual_seed(1)) for _ in range(2))
    assert torch.equal(first, again)
    assert first.shape == (300, 8)
    assert first.min() >= 0
    assert first.max() < 64
    assert all(len(set(row)) == 8 for row in first.tolist())
    assert not torch.equal(first, random_routing(kind, 300, 64, 8, torch.Generator().manual_seed(2)))


def test_uniform_is_even_and_zipf_is_one_over_rank() -> None:
    generator = torch.Generator().manual_seed(0)
    tokens, experts = 40_000, 32
    uniform = random_routing("uniform", tokens, experts, 1, generator).flatten().bincount(minlength=experts) / tokens
    assert (uniform - 1 / experts).abs().max() < 0.004
    zipf = random_routing("zipf", tokens, experts, 1, generator).flatten().bincount(minlength=experts) / tokens
    expected = 1 / torch.arange(1, experts + 1)
    assert (zipf.sort(descending=True).values - expected / expected.sum()).abs().max() < 0.01
    assert zipf.argmax() != 0 or zipf.argmin() != experts - 1, "the popular experts are not the first ones"


@pytest.mark.parametrize("l2_mib", [50, 128])
@pytest.mark.parametrize("model", MODELS)
def test_no_weight_is_read_again_before_three_caches_of_others(model: str, l2_mib: int) -> None:
    shape, l2_bytes = MODELS[model], l2_mib << 20
    copies = weight_copies(shape, l2_bytes)
    assert copies <= 3
    for tokens in (1, 2, 4, 10, 16, 64, 256):
        for kind in ROUTINGS:
            generator = torch.Generator().manual_seed(tokens)
            cycle = make_cycle(shape, kind, tokens, num_copies=copies, l2_bytes=l2_bytes, generator=generator)
            assert cycle.reuse_bytes >= CACHES * l2_bytes, (tokens, kind)
            assert sum(cycle.active) * bytes_per_expert(shape) >= CACHES * l2_bytes
            assert cycle.active == [ids.unique().numel() for ids in cycle.topk_ids]
            assert set(cycle.copies) == set(range(copies))
            assert all(len(set(row)) == shape.top_k for ids in cycle.topk_ids for row in ids.tolist())


def test_renaming_experts_keeps_the_rows_of_each() -> None:
    shape = MODELS["glm5-tp8"]
    routing = random_routing("zipf", 64, 256, 8, torch.Generator().manual_seed(5))
    generator = torch.Generator().manual_seed(5)
    torch.randperm(256, generator=generator)  # the names, drawn first
    want = random_routing("zipf", 64, 256, 8, generator).flatten().bincount(minlength=256).sort().values
    cycle = make_cycle(shape, "zipf", 64, num_copies=1, l2_bytes=50 << 20, generator=torch.Generator().manual_seed(5))
    assert torch.equal(cycle.topk_ids[0].flatten().bincount(minlength=256).sort().values, want)
    assert routing.shape == cycle.topk_ids[0].shape


def test_reuse_distance_by_hand() -> None:
    assert reuse_distance([torch.tensor([0, 1, 2]), torch.tensor([3, 4])]) == 5
    assert reuse_distance([torch.tensor([0, 1, 2]), torch.tensor([2, 3])]) == 1, "2, then 2 again"
    assert reuse_distance([torch.tensor([0, 1]), torch.tensor([1, 2, 3])]) == 1


def test_bytes_by_hand() -> None:
    """w13: 512 rows of 256 bytes and 32 scales; w2: 512 rows of 128 bytes and 16 scales."""
    assert bytes_per_expert(ModelShape("", 4, 2, 512, 256)) == 512 * (256 + 32) + 512 * (128 + 16)
    weights = random_weights(SMALL, torch.device("cpu"), torch.Generator())
    held = weights.w13_weight, weights.w13_blockscale, weights.w2_weight, weights.w2_blockscale
    assert bytes_per_expert(SMALL) * SMALL.num_experts == sum(tensor.nbytes for tensor in held)
