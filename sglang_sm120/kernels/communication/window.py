"""A window: memory of one rank that every rank of a group has mapped. What the communication kernels work on.

On GPUs it is device memory shared by CUDA IPC, one process a rank, all on one host. On the CPU it is memory of this
process, each rank a thread: for tests of the same kernels.
"""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from sglang_sm120.errors import Sm120Error, UnsupportedError
from sglang_sm120.kernels.communication import ipc

Exchange = Callable[[bytes], Sequence[bytes]]
"""A collective of the group: what each rank passed, in the ranks' order. Returns when every rank has called."""

STATUS_WORDS = 8


@dataclass
class Window:
    """One rank's view of all windows of its group.

    addresses: of every rank's window, here, in the ranks' order; the own one is `addresses[rank]`.
    num_bytes: of each. status: words that a kernel writes when it gives up. status_address: where it writes them.
    """

    rank: int
    addresses: tuple[int, ...]
    num_bytes: int
    device: torch.device
    status: ctypes.Array[ctypes.c_uint32]
    status_address: int
    _close: Callable[[], None] = field(repr=False)

    @property
    def world_size(self) -> int:
        return len(self.addresses)

    def close(self) -> None:
        """Unmap and free, kernels having ended. On GPUs a collective: no peer may map what is freed. Twice is once."""
        close, self._close = self._close, lambda: None
        close()


def connect(rank: int, exchange: Exchange, num_bytes: int, device: torch.device) -> Window:
    """Make this rank's window, zeroed, and map those of its peers. A collective: all ranks get theirs, or all raise.

    Args:
        rank: of this process in the group.
        exchange: the group's, over anything but the windows (gloo, say).
        num_bytes: of a window, equal on every rank.
        device: this rank's CUDA device; it is the current one.

    Raises:
        UnsupportedError: ranks on several hosts, no CUDA IPC or no peer access between two of them; the message names
            the rank that could not.

    Allocates `num_bytes` outside torch's allocator. Never inside a capture.
    """
    own, words, offer, failure = 0, None, b"", None
    try:
        words = ipc.HostWords(STATUS_WORDS)
        own = ipc.allocate(num_bytes)
        offer = ipc.export_handle(own)
    except Sm120Error as error:
        failure = error
    told = exchange(_pack(failure, _host(), num_bytes.to_bytes(8, "little"), offer))
    opened: list[int] = []

    def give_back() -> None:
        for address in opened:
            ipc.close_handle(address)
        exchange(b"")  # nobody frees what another still maps
        if own:
            ipc.free(own)
        if words is not None:
            words.free()

    offers = [_unpack(message) for message in told]
    problem = _first_failure(offers)
    if problem is None and len({(parts[0], parts[1]) for _, parts in offers}) > 1:
        problem = "its ranks are on several hosts, or ask for windows of different sizes"
    addresses = [own] * len(offers)
    if problem is None:
        failure = None
        try:
            for peer, (_, parts) in enumerate(offers):
                if peer != rank:
                    addresses[peer] = ipc.open_handle(parts[2])
                    opened.append(addresses[peer])
        except Sm120Error as error:
            failure = error
        problem = _first_failure([_unpack(message) for message in exchange(_pack(failure))])
    if problem is not None or words is None:
        give_back()
        raise UnsupportedError(
            f"the GPUs of this group cannot share memory: {problem}",
            "ranks on one host, with CUDA IPC and peer access between all their GPUs",
            "`sglang-sm120 bench p2p` finds what is wrong; --sm120-all-reduce off serves without",
        )

    def close() -> None:
        torch.cuda.synchronize(device)
        give_back()

    return Window(rank, tuple(addresses), num_bytes, device, words.words, words.device_pointer, close)


def _host() -> bytes:
    """What tells this host from others, the same in all its containers where the kernel lets them read it."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_bytes().strip()
    except OSError:
        return platform.node().encode()


def host_windows(world_size: int, num_bytes: int) -> list[Window]:
    """The windows of a group whose ranks are threads of this process, zeroed: one for each rank."""
    memory = [torch.zeros(num_bytes + 256, dtype=torch.uint8) for _ in range(world_size)]
    addresses = tuple(-(-tensor.data_ptr() // 256) * 256 for tensor in memory)
    windows = []
    for rank in range(world_size):
        status = (ctypes.c_uint32 * STATUS_WORDS)()
        close = memory.clear  # the tensors live as long as any window does
        windows.append(Window(rank, addresses, num_bytes, torch.device("cpu"), status, ctypes.addressof(status), close))
    return windows


def _pack(failure: Sm120Error | None, *parts: bytes) -> bytes:
    """A rank's message: how it failed, or its parts."""
    if failure is not None:
        return b"!" + f"{failure.found} ({failure.fix})".encode()
    return b"." + b"".join(len(part).to_bytes(4, "little") + part for part in parts)


def _unpack(message: bytes) -> tuple[str | None, list[bytes]]:
    if message[:1] == b"!":
        return message[1:].decode(), []
    parts, at = [], 1
    while at < len(message):
        size = int.from_bytes(message[at : at + 4], "little")
        parts.append(message[at + 4 : at + 4 + size])
        at += 4 + size
    return None, parts


def _first_failure(messages: Sequence[tuple[str | None, list[bytes]]]) -> str | None:
    return next((f"rank {rank}: {failure}" for rank, (failure, _) in enumerate(messages) if failure is not None), None)
