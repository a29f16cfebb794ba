"""How much is sent and how often, where it lies in memory, and from which numbers on something is said about it."""

from __future__ import annotations

from dataclasses import dataclass

from sglang_sm120.errors import ContractError

VECTOR_BYTES = 16
MAX_PEERS = 8  # of a copy or a meeting, as kernel.cu has it

# ---- a GPU's memory that its peers map; bytes from its start ----
FLAG_STRIDE = 128  # flag 0: of ping-pong; flag 1 + i: written by the GPU at place i of a meeting
INBOX_MESSAGE = 4096
MAX_MESSAGE_BYTES = 60 << 10
CHAIN = 64 << 10
CHAIN_WORDS, CHAIN_STRIDE, CHAIN_STEP = 4096, 128, 2531
SOURCE = 1 << 20  # then the inbox, of the same size

# ---- launches ----
COPY_BLOCKS, COPY_THREADS = 64, 512
FILL_BLOCKS, FILL_THREADS = 256, 256
CHECK_THREADS = 1024
MESSAGE_THREADS = 256

# ---- limits ----
START_LIMIT_S = 180.0  # importing torch, starting a GPU and, without a prebuilt cubin, compiling
DEFAULT_TIME_LIMIT_S = 20.0
SPIN_LIMIT_SHARE = 0.25  # of the time limit: for one wait in a kernel

# ---- findings ----
COLLAPSE = 0.25  # push over pull of a pair, and push of all at once over push of pairs
UPLINK = 0.5  # pull of all at once over pull of pairs: below it, what they share is the limit
SLOW_READ = 4.0  # latency of a read over that of a write
THROUGH_HOST_LINK = 0.5  # best bandwidth of all pairs over the link's rate ...
THROUGH_HOST_US = 3.0  # ... and the shortest write takes longer: not from GPU to GPU
ASYMMETRIC = 1.5  # one direction of a pair over the other
NVLINK = 1.25  # bandwidth over the rate of the PCIe link
PCIE_LIMIT_GB_S = 70.0  # where that rate is not known: more than generation 5 with 16 lanes can


@dataclass(frozen=True)
class Sizes:
    """How much a probe does; the defaults take about a second a pair.

    Attributes:
        data_bytes: of one bandwidth sample, and of the memory that is checked; a multiple of 1 KiB.
        message_bytes: sent before a flag; a multiple of 16, up to 60 KiB.
        rounds: of flags, and of messages, there and back.
        hops: reads that wait for each other.
        samples: of bandwidth; the median counts.
        warmup: rounds, hops and samples before those that are timed.
        warmup_s: of copies before the first sample: an idle GPU has slowed its clocks and its link down.
    """

    data_bytes: int = 16 << 20
    message_bytes: int = 4096
    rounds: int = 1000
    hops: int = 2000
    samples: int = 9
    warmup: int = 2
    warmup_s: float = 0.2

    def __post_init__(self) -> None:
        right = (
            self.data_bytes > 0
            and self.data_bytes % (8 * MAX_PEERS * VECTOR_BYTES) == 0
            and 0 < self.message_bytes <= MAX_MESSAGE_BYTES
            and self.message_bytes % VECTOR_BYTES == 0
            and min(self.rounds, self.hops, self.samples) >= 1
            and min(self.warmup, self.warmup_s) >= 0
        )
        if not right:
            raise ContractError(
                f"{self}",
                f"data_bytes a multiple of 1024, message_bytes one of 16 up to {MAX_MESSAGE_BYTES}, counts above 0",
                "leave them at their defaults",
            )

    @property
    def window_bytes(self) -> int:
        """Of the memory that each GPU's peers map."""
        return SOURCE + 2 * self.data_bytes

    @property
    def inbox(self) -> int:
        """Where in it peers write."""
        return SOURCE + self.data_bytes


def flag_offset(number: int) -> int:
    """Where in a GPU's memory a flag lies; each in a cache line of its own."""
    return number * FLAG_STRIDE


def last_of_chain(hops: int) -> int:
    """Offset of the word that the last of so many reads returns."""
    return hops * CHAIN_STEP % CHAIN_WORDS * CHAIN_STRIDE


def part_vectors(data_bytes: int, num_devices: int) -> int:
    """16-byte vectors that one GPU sends to each other one when all send at once."""
    return data_bytes // VECTOR_BYTES // num_devices
