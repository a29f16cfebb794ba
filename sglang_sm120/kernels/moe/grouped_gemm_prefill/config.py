"""Which tile of the grouped GEMM for which problem: a list of candidates, a bound on their memory, and a pure choice.

Everything marked `guess` was never timed on SM120. The bounds were held against compiled kernels, and tests hold them.
"""

from __future__ import annotations

from dataclasses import dataclass

from sglang_sm120.errors import UnsupportedError

BLOCK_ROWS = (16, 32, 64, 128)

# Shared memory that one block can be given, in bytes, and what an SM has (each block also costs it 1 KiB), by major.
_BLOCK_LIMIT = {12: 101_376, 9: 232_448}
_SM_MEMORY = {12: 102_400, 9: 233_472}
_RESERVED = 1024
_SLACK = 1024  # scratch of scalar atomics and of small layout changes


@dataclass(frozen=True)
class GemmConfig:
    """A tile of block_rows x block_n x block_k, by num_warps warps; block_n counts rows of the weight, so a gated tile
    writes block_n / 2 columns. num_stages is Triton's: on 12.x one buffer fewer."""

    block_rows: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


def _configs(*rows: tuple[int, int, int, int, int]) -> tuple[GemmConfig, ...]:
    return tuple(GemmConfig(*row) for row in rows)


# In order of preference among those that fit and suit, see choose_for_block_rows. Their order is a guess. What was
# looked at in compiled kernels: no spills on 12.x (block_k = 256 spills where K is not a multiple of 64, and is not
# chosen there); few instructions an MMA in the innermost loop; its loads asynchronous, for which a thread has to copy 4
# bytes (two warps for few rows, or a long step along K); and eight warps an SM.
CANDIDATES: dict[str, tuple[GemmConfig, ...]] = {
    "w4a4": _configs(
        (16, 64, 256, 2, 3),
        (16, 128, 128, 4, 4),
        (16, 64, 128, 4, 4),
        (32, 128, 256, 4, 3),
        (32, 128, 128, 2, 4),
        (32, 64, 128, 2, 4),
        (64, 128, 128, 4, 4),
        (64, 128, 256, 8, 3),
        (64, 64, 128, 4, 4),
        (128, 128, 256, 8, 3),
        (128, 128, 128, 8, 4),
        (128, 64, 128, 4, 4),
    ),
    "w4a16": _configs(
        (16, 128, 64, 4, 4),
        (16, 64, 64, 4, 4),
        (32, 128, 64, 4, 4),
        (32, 64, 128, 4, 3),
        (64, 128, 64, 4, 3),
        (64, 64, 64, 4, 3),
        (128, 128, 64, 8, 3),
        (128, 64, 64, 4, 3),
    ),
}


def shared_memory_bound(config: GemmConfig, *, numerics: str, capability: tuple[int, int]) -> int:
    """An upper bound, in bytes, on the shared memory that the compiled kernel takes.

    Buffers of the loop, plus the decoded weight, which the compiler may put there too; or, when those are free again,
    the epilogue's change of layout.
    """
    c = config
    weight = c.block_n * (c.block_k // 2 + c.block_k // 16)
    a = c.block_rows * (c.block_k // 2 + c.block_k // 16) if numerics == "w4a4" else c.block_rows * c.block_k * 2
    # On 12.x mma.sync has the tile in registers while the next ones are copied; wgmma reads it from its buffer.
    buffers = max(c.num_stages - 1, 1) if capability[0] == 12 else c.num_stages
    native = numerics == "w4a4" and capability[0] == 12
    decoded = 0 if native else c.block_n * c.block_k * 2
    loop = buffers * (a + weight) + decoded
    epilogue = c.block_rows * c.block_n * 4 * 9 // 8
    return max(loop, epilogue) + _SLACK


def fits(config: GemmConfig, *, numerics: str, capability: tuple[int, int]) -> bool:
    """Whether the bound is within what a block can have on this GPU. An unknown GPU is treated as the smallest."""
    bound = shared_memory_bound(config, numerics=numerics, capability=capability)
    return bound <= _BLOCK_LIMIT.get(capability[0], min(_BLOCK_LIMIT.values()))


def choose_block_rows(num_tokens: int, top_k: int, num_experts: int) -> int:
    """Rows of a block, for one schedule that both GEMMs of a layer use: it depends on neither N nor K.

    The next power of two from the mean rows an expert, between 16 and 128 (guess). More experts on this rank than
    slots leave blocks that are mostly empty; fewer rows than 16 the MMA cannot take.
    """
    mean = num_tokens * top_k / max(num_experts, 1)
    return next((rows for rows in BLOCK_ROWS if mean <= rows), BLOCK_ROWS[-1])


def choose_for_block_rows(block_rows: int, n: int, k: int, *, numerics: str, capability: tuple[int, int]) -> GemmConfig:
    """The first candidate of this block_rows that fits the GPU, and suits the problem where one does.

    block_k = 256 only for K >= 1024 that it divides, with native FP4: the loop has fewer instructions an MMA, but a
    short K needs several steps to overlap loading with multiplying (guess), and decoded operands would spill. A tile
    no wider than N, unless it is the narrowest.
    """
    fitting = [
        config
        for config in CANDIDATES[numerics]
        if config.block_rows == block_rows and fits(config, numerics=numerics, capability=capability)
    ]
    if not fitting:
        raise UnsupportedError(
            f"no tile of {block_rows} rows for {numerics} on compute capability {capability[0]}.{capability[1]}",
            f"block_rows of {', '.join(map(str, BLOCK_ROWS))}",
            "build the schedule with choose_block_rows()",
        )
    good = [config for config in fitting if _suits(config, n, k, capability)]
    return (good or fitting)[0]


def _suits(config: GemmConfig, n: int, k: int, capability: tuple[int, int]) -> bool:
    if config.block_k == 256 and (k % 256 or k < 1024 or capability[0] != 12):
        return False
    return n >= config.block_n or config.block_n == 64


def choose(
    num_tokens: int,
    top_k: int,
    num_experts: int,
    n: int,
    k: int,
    *,
    numerics: str,
    capability: tuple[int, int],
) -> GemmConfig:
    """choose_block_rows, then choose_for_block_rows."""
    block_rows = choose_block_rows(num_tokens, top_k, num_experts)
    return choose_for_block_rows(block_rows, n, k, numerics=numerics, capability=capability)


def programs_per_sm(config: GemmConfig, *, numerics: str, capability: tuple[int, int]) -> int:
    """How many programs of this tile an SM holds at once, so that the persistent grid is no larger.

    By registers (65,536, at most 255 a thread) and by shared memory.
    """
    by_registers = 65_536 // (256 * 32 * config.num_warps)
    bound = shared_memory_bound(config, numerics=numerics, capability=capability)
    by_memory = _SM_MEMORY.get(capability[0], min(_SM_MEMORY.values())) // (bound + _RESERVED)
    return max(1, min(by_registers, by_memory))
