"""What ptxas made of the all-reduce kernels that are shipped: registers, spills, and what the protocol needs."""

from __future__ import annotations

import cubin_facts
import pytest

from sglang_sm120.kernels.communication.all_reduce_rmsnorm import config
from sglang_sm120.kernels.communication.all_reduce_rmsnorm.api import ALGORITHMS, SOURCE
from sglang_sm120.kernels.cuda import build

pytestmark = pytest.mark.skipif(not cubin_facts.available(), reason="Triton's cuobjdump is not installed")

SM120_SHARED_BYTES = 101_376
KERNELS = {
    f"{algorithm.replace('-', '_')}_{dtype}_w{world_size}_v{vectors}"
    for algorithm in ALGORITHMS
    for dtype in ("bf16", "f16")
    for world_size in config.WORLD_SIZES
    for vectors in (1, 2)
}


@pytest.fixture(scope="module", params=build.PREBUILT_ARCHS)
def facts(request: pytest.FixtureRequest) -> dict[str, cubin_facts.Facts]:
    """Of every kernel of the prebuilt cubin. A cuobjdump that is older than the architecture cannot say."""
    cubin = build.unpack_cubin((build.CUBINS / build.cubin_name(SOURCE, request.param)).read_bytes())
    try:
        return cubin_facts.facts(cubin)
    except RuntimeError as error:
        pytest.skip(str(error))


def test_every_variant_is_there_without_spills_and_fits(facts) -> None:
    assert facts.keys() == KERNELS
    for name, fact in facts.items():
        assert (fact.stack_bytes, fact.local_bytes) == (0, 0), f"{name} spills"
        assert fact.registers * config.MAX_THREADS <= 65_536, f"{name}: {config.MAX_THREADS} threads do not fit"
        assert fact.shared_bytes <= SM120_SHARED_BYTES


def test_signals_are_released_and_acquired_for_the_system_and_no_peer_sees_an_atomic(facts) -> None:
    for name, fact in facts.items():
        atomics = {opcode: n for opcode, n in fact.opcodes.items() if opcode.startswith(("ATOM", "RED"))}
        assert list(atomics.values()) == [1], f"{name}: only the block counter in the own window: {atomics}"
        if name.startswith("one_shot_lamport"):
            world_size = int(name.split("_w")[1].split("_")[0])
            # The loop over peers may be whole or unrolled.
            assert 1 <= fact.opcodes["STG.E.128.STRONG.SYS"] <= 2 * world_size, f"{name}: words are sent whole"
            assert fact.opcodes["LDG.E.128.STRONG.SYS"] >= 1
            assert fact.opcodes["MEMBAR.ALL.SYS"] == 0, f"{name}: does not wait for what it sent"
        else:
            phases = 2 if name.startswith("two_shot") else 1
            assert fact.opcodes["MEMBAR.ALL.SYS"] >= phases, f"{name}: data before the signal"
            assert fact.opcodes["STG.E.64.STRONG.SYS"] >= phases
            assert fact.opcodes["LDG.E.64.STRONG.SYS"] >= phases
