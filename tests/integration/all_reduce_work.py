"""What each rank of test_all_reduce_setup.py does, in a process of its own."""

from __future__ import annotations

from types import SimpleNamespace

import torch
import torch.distributed as dist

from sglang_sm120.bench.ranks import Rank
from sglang_sm120.integration import all_reduce_setup as setup


def sums_on_the_cpu(rank: Rank) -> dict[str, list[int]]:
    """Every dtype's sum, norm and residual, held to float64 and to float32; their bits."""
    group = SimpleNamespace(
        world_size=rank.world_size, rank_in_group=rank.rank, ranks=list(range(rank.world_size)),
        cpu_group=dist.group.WORLD, device_group=dist.group.WORLD,
    )  # fmt: skip
    plane = setup.connect(group, "auto", hidden_size=64, dtype=torch.float32, device=torch.device("cpu"))
    assert setup.exchange_of(group)(bytes([rank.rank])) == [bytes([r]) for r in range(rank.world_size)]
    found = {}
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        generator = torch.Generator().manual_seed(7)
        x = [torch.randn(5, 64, generator=generator).to(dtype) for _ in range(rank.world_size)]
        residual, gamma = (torch.randn(shape, generator=generator).to(dtype) for shape in ((5, 64), (64,)))
        mine = x[rank.rank].clone()
        total = plane.all_reduce(x[rank.rank])
        out, kept = plane.all_reduce_rmsnorm(x[rank.rank], residual, gamma, 1e-5, gamma_offset=1.0)
        exact = sum(part.double() for part in x)
        assert torch.allclose(total.double(), exact, rtol=1e-2, atol=1e-2)
        hidden = total.float() + residual.float()
        normed = hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + 1e-5) * (gamma.float() + 1)
        assert torch.equal(kept, hidden.to(dtype))
        assert torch.allclose(out.float(), normed, rtol=1e-2, atol=1e-2)
        assert torch.equal(mine, x[rank.rank]), "its input is left as it was"
        found[str(dtype)] = torch.cat([total, out, kept]).view(torch.uint8).flatten().tolist()
    plane.check()
    plane.close()
    return found
