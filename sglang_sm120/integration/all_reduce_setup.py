"""Sets our all-reduce up over a group of SGLang's, and tries it before anything relies on it."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sglang_sm120.errors import ConfigError, UnsupportedError
from sglang_sm120.integration.all_reduce_plane import GpuPlane, HostPlane, Plane
from sglang_sm120.kernels.communication import ipc
from sglang_sm120.kernels.communication.agreement import Exchange, agree
from sglang_sm120.kernels.communication.all_reduce_rmsnorm import config
from sglang_sm120.kernels.communication.all_reduce_rmsnorm.api import (
    SOURCE,
    Communicator,
    Range,
    reference,
    unsupported_reason,
    workspace_bytes,
)
from sglang_sm120.kernels.cuda.module import load
from sglang_sm120.tune import comm_profile
from sglang_sm120.tune.comm_profile import CommProfile

logger = logging.getLogger(__name__)

SERVING_LIMIT_S = 240.0
"""How long a kernel waits for a peer once the model is there: while graphs are captured, one may compile for minutes.
Less than the 300 s of SGLang's own watchdog, which could not say which rank is missing."""

WINDOW_LIMIT_BYTES = 128 << 20
"""Of a window, on each GPU. Guess: room for messages of 2 MB and more between 8 GPUs, which is what decode sends."""

NAMED_BYTES = 1 << 20
"""The largest message of a family by name: 85 tokens of hidden size 6144. Guess."""

_FAMILIES = {"one-shot": config.LAMPORT, "two-shot": config.TWO_SHOT_PUSH}


def connect(
    group: Any, choice: str, *, hidden_size: int, dtype: torch.dtype, device: torch.device, profile: str = ""
) -> Plane:
    """Set up our all-reduce over a group, and try it. A collective: every rank gets a plane, or all raise.

    choice: "auto", or a family that serves every size: "one-shot", "two-shot". dtype: the model's. profile: a file to
    choose by on "auto", which has to fit; "": what `tune --comm` has left for this host, if that fits.

    Raises: UnsupportedError, with the rank that could not and why. ConfigError: the profile. PeerLostError on a rank
    that waited in vain in the trial: its GPU cannot be used by this process any more.
    """
    world_size = group.world_size
    if device.type == "cpu":
        return HostPlane(group, ranges_for(choice, world_size)[0])
    reason = unsupported_reason(world_size=world_size, dtype=dtype, hidden_size=hidden_size)
    if reason is not None:
        raise UnsupportedError(reason, "what the kernels cover", "--sm120-all-reduce auto or off serves without")

    exchange = exchange_of(group)
    measured = _profile(profile, exchange, world_size, hidden_size, dtype) if choice == "auto" else None
    ranges, norm_ranges = ranges_for(choice, world_size, measured, hidden_size=hidden_size)
    agree(exchange, "its kernels cannot be loaded", lambda: load(SOURCE, device))
    communicator = Communicator.connect(
        group.rank_in_group, world_size, exchange, hidden_size=hidden_size, device=device, ranges=ranges,
        norm_ranges=norm_ranges,
    )  # fmt: skip
    try:
        _try_copies(communicator, exchange)
        agree(exchange, "its sums are wrong", lambda: _try_kernels(communicator, hidden_size, dtype))
    except UnsupportedError:
        communicator.check()
        communicator.close()
        raise
    communicator.set_time_limit(SERVING_LIMIT_S)
    return GpuPlane(group, communicator, measured)


def ranges_for(
    choice: str, world_size: int, measured: CommProfile | None = None, *, hidden_size: int = 0
) -> tuple[tuple[Range, ...], tuple[Range, ...]]:
    """Which algorithm serves which message: of a sum alone, and of one with a norm behind.

    measured: the host's profile. What it says of messages too large for WINDOW_LIMIT_BYTES is left to SGLang.
    """
    if choice != "auto":
        family = (Range(NAMED_BYTES, _FAMILIES[choice]),)
        return family, family
    if measured is None:
        return config.DEFAULT_RANGES[world_size], config.DEFAULT_RANGES[world_size]
    limit = max((entry.max_bytes for fused in (False, True) for entry in measured.ranges(fused=fused)), default=0)
    while True:
        plain, norm = (clipped(measured.ranges(fused=fused), limit) for fused in (False, True))
        if workspace_bytes((*plain, *norm), world_size=world_size, hidden_size=hidden_size) <= WINDOW_LIMIT_BYTES:
            return plain, norm
        limit //= 2


def clipped(ranges: Sequence[Range], limit: int) -> tuple[Range, ...]:
    """The ranges up to a message size."""
    kept, start = [], 0
    for entry in ranges:
        if start < limit:
            kept.append(Range(min(entry.max_bytes, limit), entry.algorithm))
        start = entry.max_bytes
    return tuple(kept)


def _profile(
    named: str, exchange: Exchange, world_size: int, hidden_size: int, dtype: torch.dtype
) -> CommProfile | None:
    """The profile that was named, which has to fit; else what `tune --comm` measured here, which is used if it does.

    A collective: all ranks choose by the same, or they would wait for each other in different kernels.
    """
    server = (world_size, hidden_size, str(dtype).removeprefix("torch."))
    found, fault = None, None
    try:
        found = comm_profile.for_server_named(named, *server) if named else comm_profile.for_server(None, *server)
    except ConfigError as error:
        fault = [error.found, error.needed, error.fix]
    content = hashlib.sha256(repr(found).encode()).hexdigest()
    told = [json.loads(message) for message in exchange(json.dumps([fault, content]).encode())]
    faults = [of_rank for of_rank, _ in told if of_rank is not None]
    if not faults and any(of_rank != told[0][1] for _, of_rank in told):
        path = named or comm_profile.default_path(world_size)
        faults = [[f"all-reduce profile {path}: ranks have read different ones", "one file", "start the server again"]]
    if not faults:
        return found
    if named:
        raise ConfigError(*faults[0])
    logger.info("sglang-sm120: all-reduce by the shipped default: %s", faults[0][0])
    return None


def exchange_of(group: Any) -> Exchange:
    """A collective over bytes, by the group's CPU side."""

    def exchange(message: bytes) -> Sequence[bytes]:
        told = [b""] * group.world_size
        torch.distributed.all_gather_object(told, message, group=group.cpu_group)
        return told

    return exchange


def _try_copies(communicator: Communicator, exchange: Exchange) -> None:
    """Copies by the driver to and from every peer, before any kernel waits for what may never come.

    Where peer-to-peer memory does not work (IOMMU, ACS) they go astray; a kernel would wait for its time limit, and the
    process could not use its GPU after that.
    """
    window, words = communicator.window, 16
    rank, device = window.rank, window.device
    at = [address + config.DATA_AT for address in window.addresses]

    def pattern(source: int) -> Tensor:
        return torch.arange(words, dtype=torch.int32) * 1_000_003 + source + 1

    def write() -> None:
        mine = pattern(rank).to(device)
        _synchronize(device)
        for peer in range(window.world_size):
            ipc.copy(at[peer] + 4 * words * rank, mine.data_ptr(), 4 * words)

    def read() -> None:
        found = torch.empty(words, dtype=torch.int32, device=device)
        _synchronize(device)
        for source in range(window.world_size):
            for owner, what in ((rank, "writes here do not arrive"), (source, "memory, read from here, is another")):
                ipc.copy(found.data_ptr(), at[owner] + 4 * words * source, 4 * words)
                if not torch.equal(found.cpu(), pattern(source)):
                    raise RuntimeError(f"rank {source}'s {what}")

    def clear() -> None:  # a new window is zero, which the kernels rely on
        zeros = torch.zeros(words * window.world_size, dtype=torch.int32, device=device)
        _synchronize(device)
        ipc.copy(at[rank], zeros.data_ptr(), 4 * zeros.numel())

    for step in (write, read, clear):
        agree(exchange, "peer-to-peer memory does not work", step)


def _try_kernels(communicator: Communicator, hidden_size: int, dtype: torch.dtype) -> None:
    """A small and the largest message of each range, twice, with sums that are exact in any order."""
    window, counts = communicator.window, set()
    for ranges in (communicator.ranges, communicator.norm_ranges):
        smallest = 1
        for entry in ranges:
            largest = entry.max_bytes // (2 * hidden_size)
            counts |= {smallest, max(1, largest)}
            smallest = largest + 1
    wrong = ""  # said at the end: a rank that stopped early would leave the others waiting
    for rows in sorted(counts):
        # Some sizes are left to others, or lie in a range that is narrower than a row.
        plain, fused = (communicator.algorithm((rows, hidden_size), norm=norm) for norm in (False, True))
        steps = torch.arange(rows * hidden_size, device=window.device).view(rows, hidden_size) % 7 - 3
        x, residual = (steps + window.rank).to(dtype), steps.to(dtype)
        total = (steps * window.world_size + sum(range(window.world_size))).to(dtype)
        gamma, eps = torch.ones(hidden_size, dtype=dtype, device=window.device), 1e-5
        wanted, _ = reference.all_reduce_rmsnorm([total], residual, gamma, eps)
        for _ in range(2):
            if plain is not None and not torch.equal(communicator.all_reduce(x), total):
                wrong = wrong or f"{rows} x {hidden_size} by {plain}"
            if fused is None:
                continue
            normed, kept = communicator.all_reduce_rmsnorm(x, residual, gamma, eps)
            close = torch.allclose(normed.float(), wanted.float(), rtol=2**-6, atol=2**-6)
            if not close or not torch.equal(kept, total + residual):
                wrong = wrong or f"{rows} x {hidden_size} with a norm by {fused}"
    communicator.check()
    if wrong:
        raise RuntimeError(f"{wrong} is not what plain torch gives")


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
