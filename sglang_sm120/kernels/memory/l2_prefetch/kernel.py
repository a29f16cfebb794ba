"""Launches kernel.cu, on a GPU or as built for the host. No checks here."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path

import torch

from sglang_sm120.kernels.cuda.module import HostModule, KernelModule, load
from sglang_sm120.kernels.memory.l2_prefetch import config

SOURCE = Path(__file__).with_name("kernel.cu")


class _Range(ctypes.Structure):
    """L2PrefetchRange in kernel.cu."""

    _fields_ = (("first", ctypes.c_uint64), ("bytes", ctypes.c_int64))


class _Args(ctypes.Structure):
    """L2PrefetchArgs in kernel.cu."""

    _fields_ = (
        ("ranges", _Range * config.MAX_RANGES),
        ("num_ranges", ctypes.c_int),
        ("chunk_bytes", ctypes.c_int),
        ("interval_ns", ctypes.c_int),
        ("keep", ctypes.c_int),
    )


def module(device: torch.device) -> KernelModule | HostModule:
    """The kernels on a device."""
    return load(SOURCE, device)


def prefetch(
    device: torch.device,
    ranges: Sequence[tuple[int, int]],
    *,
    keep: bool,
    rate_gb_s: float,
    blocks: int,
    chunk_bytes: int,
    lines: bool,
) -> None:
    """On torch's current stream. ranges: (address, bytes), multiples of 16; any number of them."""
    name = "l2_prefetch_lines" if lines else "l2_prefetch_bulk"
    for first in range(0, len(ranges), config.MAX_RANGES):
        some = ranges[first : first + config.MAX_RANGES]
        args = _Args(
            ranges=(_Range * config.MAX_RANGES)(*(_Range(*one) for one in some)),
            num_ranges=len(some),
            chunk_bytes=chunk_bytes,
            interval_ns=config.interval_ns(rate_gb_s, blocks, chunk_bytes),
            keep=keep,
        )
        chunks = sum(-(-num_bytes // chunk_bytes) for _, num_bytes in some)
        module(device).launch(name, min(blocks, chunks), config.THREADS, args)
