"""What ptxas made of the prefetch kernels: the instructions that prefetch, and none that could change memory."""

from __future__ import annotations

import cubin_facts
import pytest

from sglang_sm120.errors import UnsupportedError
from sglang_sm120.kernels.cuda import build
from sglang_sm120.kernels.memory.l2_prefetch import config
from sglang_sm120.kernels.memory.l2_prefetch.api import SOURCE

pytestmark = pytest.mark.skipif(not cubin_facts.available(), reason="Triton's cuobjdump is not installed")

# Starts of what touches memory: loads and stores of every space, atomics, bulk and tensor copies, surfaces, caches.
# LDC, LDCU and ULDC read the kernel's parameters.
MEMORY = ("LD", "ULD", "ST", "UST", "ATOM", "RED", "SUST", "SURED", "SUATOM", "UBLK", "UTMA", "CCTL", "UCCTL")
PARAMETERS = ("LDC", "LDCU", "ULDC")


@pytest.fixture(scope="module", params=build.PREBUILT_ARCHS)
def facts(request: pytest.FixtureRequest) -> dict[str, cubin_facts.Facts]:
    """Of the cubin that is shipped for these sources; of one compiled here, until there is one."""
    cubin, _ = build.prebuilt_cubin(SOURCE, request.param)
    try:
        return cubin_facts.facts(build.compile_cubin(SOURCE, request.param) if cubin is None else cubin)
    except (UnsupportedError, RuntimeError) as error:
        pytest.skip(str(error))


def memory(fact: cubin_facts.Facts) -> dict[str, int]:
    """Instructions that touch memory, less those that read the parameters."""
    return {
        opcode: count
        for opcode, count in fact.opcodes.items()
        if opcode.startswith(MEMORY) and opcode.split(".")[0] not in PARAMETERS
    }


def test_they_prefetch_and_touch_memory_in_no_other_way(facts) -> None:
    assert facts.keys() == {"l2_prefetch_bulk", "l2_prefetch_lines"}
    assert memory(facts["l2_prefetch_bulk"]) == {"UBLKPF.L2": 1}, "one bulk prefetch in the loop, nothing else"
    lines = memory(facts["l2_prefetch_lines"])
    assert lines.keys() == {"CCTL.E.PF2", "CCTL.E.PML2"}, "without and with evict_last"
    assert lines["CCTL.E.PF2"] == lines["CCTL.E.PML2"] >= 1


def test_no_store_by_name(facts) -> None:
    for name, fact in facts.items():
        for opcode in ("ST", "STG", "STS", "STL", "ATOM", "ATOMG", "ATOMS", "RED", "REDG", "UBLKCP", "UBLKRED"):
            assert fact.count(opcode) == 0, f"{name}: {opcode}"
        assert fact.count("LDG") == fact.count("LD") == 0, f"{name} reads"


def test_resources(facts) -> None:
    for name, fact in facts.items():
        assert (fact.stack_bytes, fact.local_bytes, fact.shared_bytes) == (0, 0, 0), f"{name} spills"
        assert 1 <= fact.registers * config.THREADS <= 65_536
        assert fact.count("NANOSLEEP") == 1, f"{name}: paced, and polite while it waits"


def test_a_store_would_be_seen() -> None:
    """The same sieve on shipped kernels that do write."""
    (source,) = (source for source in build.sources() if build.op_name(source) == "moe.sum_slots")
    cubin = build.unpack_cubin((build.CUBINS / build.cubin_name(source, "sm_120a")).read_bytes())
    for fact in cubin_facts.facts(cubin).values():
        found = memory(fact)
        assert any(opcode.startswith("STG") for opcode in found) and any(opcode.startswith("LDG") for opcode in found)
