"""Weights brought into L2 while the bus has nothing else to do."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from sglang_sm120.errors import ContractError, UnsupportedError
from sglang_sm120.kernels.memory.l2_prefetch import config, kernel, reference

__all__ = ["SOURCE", "Prefetcher", "parts", "prefetch", "unsupported_reason"]

SOURCE = kernel.SOURCE
parts = reference.prefetch

_BULK_CAPABILITY = (9, 0)
_FIRST_CAPABILITY = (8, 0)


def unsupported_reason(device: torch.device) -> str | None:
    """One sentence on why memory of this device cannot be prefetched, or None."""
    if device.type == "cpu":
        return None  # the host build, for tests
    if device.type != "cuda":
        return f"device {device} is not covered: CUDA GPUs are"
    capability = torch.cuda.get_device_capability(device)
    if capability < _FIRST_CAPABILITY:
        return f"compute capability {capability[0]}.{capability[1]} is not covered: prefetching is, from 8.0 on"
    return None


def prefetch(
    ranges: Iterable[tuple[int, int]],
    *,
    device: torch.device,
    max_bytes: int | None = None,
    keep: bool = True,
    rate_gb_s: float = 0.0,
    blocks: int = config.BLOCKS,
    chunk_bytes: int = config.CHUNK_BYTES,
    implementation: str = "auto",
) -> int:
    """Ask L2 for address ranges of global memory, on torch's current stream. Nothing is written or returned.

    Args:
        ranges: (address, bytes) of memory on the device, in the order of need. Only whole vectors of 16 bytes inside a
            range are asked for. The memory must stay mapped until the kernel has run, in a graph for every replay.
        device: whose current stream is taken.
        max_bytes: of all ranges together; the rest is left out. None: no bound.
        keep: with an evict_last policy, so that a stream of other data does not push the lines out; else as any load.
        rate_gb_s: GB/s (1e9 bytes) at most; 0 is as fast as it can be asked for.
        blocks: of one warp each. chunk_bytes: a thread asks for at once, a multiple of 16.
        implementation: "bulk" (one instruction a chunk, sm_90 and later), "lines" (one for 32 bytes), "auto".

    Returns:
        Bytes asked for, an int.

    Raises:
        ContractError: a negative address or size; a rate, blocks or chunk_bytes out of range.
        UnsupportedError: a device or an implementation that is not covered.

    Numerics: none: no result can change.

    Source: kernel.cu. Captured in a CUDA graph: yes, once loaded; nothing waits, and a kernel that ends has asked for
    everything, not received it.
    """
    ranges = list(ranges)
    if any(address < 0 or num_bytes < 0 for address, num_bytes in ranges):
        raise ContractError(f"ranges {ranges}", "addresses and sizes of 0 or more", "pass (tensor.data_ptr(), bytes)")
    if not (0 <= rate_gb_s < float("inf") and 1 <= blocks <= 1024 and 16 <= chunk_bytes <= 1 << 20) or chunk_bytes % 16:
        raise ContractError(
            f"rate_gb_s {rate_gb_s}, blocks {blocks}, chunk_bytes {chunk_bytes}",
            "a rate of 0 or more, 1 to 1024 blocks, chunks of 16 bytes to 1 MiB that are multiples of 16",
            "leave them out for what was measured",
        )
    if config.interval_ns(rate_gb_s, blocks, chunk_bytes) > config.MAX_INTERVAL_NS:
        raise ContractError(
            f"{rate_gb_s} GB/s by {blocks} blocks that ask for {chunk_bytes} bytes a thread",
            f"at most {config.MAX_INTERVAL_NS} ns between two rounds",
            "ask for fewer or smaller chunks at so low a rate",
        )
    if max_bytes is not None and max_bytes < 0:
        raise ContractError(f"max_bytes {max_bytes}", "0 or more, or None", "0 asks for nothing")
    if implementation not in ("auto", "bulk", "lines"):
        raise ContractError(f"implementation {implementation!r}", "auto, bulk or lines", "leave it out")
    reason = unsupported_reason(device)
    old = device.type == "cuda" and torch.cuda.get_device_capability(device) < _BULK_CAPABILITY
    if reason is None and old and implementation == "bulk":
        reason = "bulk prefetches are from compute capability 9.0"
    if reason is not None:
        raise UnsupportedError(reason, "a GPU that can", "leave the prefetch out")
    some = parts(ranges, 1 << 62 if max_bytes is None else max_bytes)
    if some:
        kernel.prefetch(
            device,
            some,
            keep=keep,
            rate_gb_s=rate_gb_s,
            blocks=blocks,
            chunk_bytes=chunk_bytes,
            lines=old or implementation == "lines",
        )
    return sum(num_bytes for _, num_bytes in some)


class Prefetcher:
    """A side stream that prefetches while the main stream computes.

    `fork` puts a prefetch behind what the current stream has been given so far, `join` lets the current stream wait for
    the last fork. Both work in and outside a capture; a capture needs a `join` after its last `fork`. Nothing waits on
    the host. The kernels are loaded when this is made, so that the first fork may be captured.

    Args:
        device: a CUDA device, or the CPU, where a fork runs at once, by the host build.

    Raises:
        UnsupportedError: as `prefetch`.
    """

    def __init__(self, device: torch.device) -> None:
        reason = unsupported_reason(device)
        if reason is not None:
            raise UnsupportedError(reason, "a GPU that can", "leave the prefetch out")
        self.device = device
        kernel.module(device)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._forked = False

    def fork(self, ranges: Iterable[tuple[int, int]], **how: object) -> int:
        """Prefetch beside what comes next. how: of `prefetch`. Returns the bytes asked for; 0 forks nothing."""
        ranges = parts(ranges, 1 << 62)
        if not ranges:
            return 0
        if self._stream is None:
            return prefetch(ranges, device=self.device, **how)  # type: ignore[arg-type]
        current = torch.cuda.current_stream(self.device)
        while self._stream == current:  # torch deals streams out of a small pool, to captures too
            self._stream = torch.cuda.Stream(self.device)
        self._stream.wait_stream(current)
        self._forked = True
        with torch.cuda.stream(self._stream):
            return prefetch(ranges, device=self.device, **how)  # type: ignore[arg-type]

    def join(self) -> None:
        """The current stream waits for the last fork to have asked, not for its lines to have come."""
        if self._forked and self._stream is not None:
            torch.cuda.current_stream(self.device).wait_stream(self._stream)
            self._forked = False
