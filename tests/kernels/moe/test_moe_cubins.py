"""What ptxas made of the shipped kernels of the MoE operations: no spills, registers, shared memory."""

from __future__ import annotations

import functools

import cubin_facts
import pytest

from sglang_sm120.kernels.cuda import build
from sglang_sm120.kernels.moe.expert_schedule import config as schedule_config
from sglang_sm120.kernels.moe.grouped_gemm_decode import config as decode_config
from sglang_sm120.kernels.moe.grouped_gemm_middle import config as middle_config
from sglang_sm120.kernels.moe.w4a16 import LayerShape

MAX_SHARED_BYTES = 101_376
REGISTERS = 65_536  # of a multiprocessor
DTYPES = ("bf16", "f16")
SHAPE = LayerShape(256, 6144, 256, True)

pytestmark = pytest.mark.skipif(not cubin_facts.available(), reason="Triton's cuobjdump is not installed")


def decode_kernels() -> dict[str, tuple[int, int]]:
    """By name less the dtype: threads of a block, dynamic shared memory in bytes."""
    shapes = [LayerShape(256, h, i, gated) for h, i in ((6144, 256), (2880, 352)) for gated in (True, False)]
    configs = [decode_config.choose(shape, slots, 132) for shape in shapes for slots in (16, 4096)]
    launches = [launch for config in configs for launch in (config.gemm1, config.gemm2)]
    return {launch.kernel: (launch.block, launch.shared_bytes) for launch in launches}


def middle_kernels() -> dict[str, tuple[int, int]]:
    configs = [middle_config.choose(SHAPE, 4096, 188, rows) for rows in middle_config.BLOCK_ROWS]
    configs += [middle_config.choose(LayerShape(64, 2880, 352, gated), 4096, 188) for gated in (True, False)]
    kernels = {name: (middle_config.THREADS, c.shared_bytes) for c in configs for name in (c.gemm1, c.gemm2)}
    return kernels


def expected(operation: str) -> dict[str, tuple[int, int]]:
    """Every kernel of an operation: its threads and its largest dynamic shared memory."""
    if operation == "expert_schedule":
        launches = [schedule_config.launch_shape(slots, experts) for slots in (8, 10**5) for experts in (8, 1024)]
        return {"expert_schedule": (schedule_config.MAX_THREADS, max(launch.shared_bytes for launch in launches))}
    if operation == "sum_slots":
        return {f"sum_slots_{dtype}": (128, 0) for dtype in DTYPES}
    kernels = decode_kernels() if operation == "grouped_gemm_decode" else middle_kernels()
    named = {name + dtype: launch for name, launch in kernels.items() for dtype in DTYPES}
    return named | ({"interleave_rows": (256, 0)} if operation == "grouped_gemm_middle" else {})


@functools.cache
def facts(operation: str, arch: str) -> dict[str, cubin_facts.Facts]:
    """Of the shipped cubin, stale or not: test_cuda_cubins says whether it is."""
    (source,) = (source for source in build.sources() if build.op_name(source) == f"moe.{operation}")
    return cubin_facts.facts(build.unpack_cubin((build.CUBINS / build.cubin_name(source, arch)).read_bytes()))


def test_these_are_the_kernels():
    assert len(expected("grouped_gemm_decode")) == 8 * 2
    assert len(expected("grouped_gemm_middle")) == (4 * 2 + 3) * 2 + 1


@pytest.mark.parametrize("arch", build.PREBUILT_ARCHS)
@pytest.mark.parametrize("operation", ["expert_schedule", "grouped_gemm_decode", "grouped_gemm_middle", "sum_slots"])
def test_resources(operation, arch):
    found, wanted = facts(operation, arch), expected(operation)
    assert found.keys() == wanted.keys()
    for name, (threads, dynamic) in wanted.items():
        fact = found[name]
        assert (fact.stack_bytes, fact.local_bytes) == (0, 0), f"{name} spills"
        assert fact.count("LDL") == fact.count("STL") == 0, name
        assert fact.shared_bytes + dynamic <= MAX_SHARED_BYTES, name
        assert -(-fact.registers // 8) * 8 * threads <= REGISTERS, f"{name}: {fact.registers} registers"


@pytest.mark.parametrize("arch", build.PREBUILT_ARCHS)
def test_registers_for_the_blocks_that_the_grids_count_on(arch):
    """decode: 16 warps a multiprocessor, 128 registers a thread, unless `general`. middle: ctas_per_sm."""
    for name, fact in facts("grouped_gemm_decode", arch).items():
        assert fact.registers <= (255 if "general" in name and "gemm1" in name else 128), name
    for name, fact in facts("grouped_gemm_middle", arch).items():
        if not name.startswith("gemm"):
            continue
        rows, general = int(name.split("_")[-2]), "general" in name
        ctas = middle_config.ctas_per_sm(rows, general=general)
        assert fact.registers * 256 * ctas <= REGISTERS, name


@pytest.mark.parametrize("arch", build.PREBUILT_ARCHS)
def test_instructions(arch):
    """What the kernels are built on: 16-byte loads, MMAs of the right dtype, asynchronous copies."""
    for operation in ("grouped_gemm_decode", "grouped_gemm_middle"):
        for name, fact in facts(operation, arch).items():
            if not name.startswith("gemm"):
                continue
            kind = "HMMA.16816.F32.BF16" if name.endswith("bf16") else "HMMA.16816.F32"
            assert fact.opcodes[kind] > 0 and fact.count("HMMA") == fact.opcodes[kind], name
            assert sum(n for opcode, n in fact.opcodes.items() if opcode.startswith("LDG.E") and "128" in opcode) > 0
            assert (fact.count("LDGSTS") > 0) == (operation == "grouped_gemm_middle"), name
