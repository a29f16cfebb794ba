"""A window: memory of one rank that every rank of a group has mapped. What the communication kernels work on.

On GPUs it is device memory shared by CUDA IPC, one process a rank, all on one host. On the CPU it is memory of this
process, each rank a thread: for tests of the same kernels.
"""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from sglang_sm120.errors import UnsupportedError
from sglang_sm120.kernels.communication import ipc
from sglang_sm120.kernels.communication.agreement import FIX, NEEDED, Exchange, agree

STATUS_WORDS = 8

_SHARE = "its GPU cannot share memory with the group's"


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
    own, words = 0, None
    opened: list[int] = []

    def offer() -> bytes:
        nonlocal own, words
        words = ipc.HostWords(STATUS_WORDS)
        own = ipc.allocate(num_bytes)
        return _pack(_host(), num_bytes.to_bytes(8, "little"), ipc.export_handle(own))

    def map_peers() -> None:
        for peer, (_, _, handle) in enumerate(offers):
            if peer != rank:
                addresses[peer] = ipc.open_handle(handle)
                opened.append(addresses[peer])

    def give_back() -> None:
        for address in opened:
            ipc.close_handle(address)
        exchange(b"")  # nobody frees what another still maps
        if own:
            ipc.free(own)
        if words is not None:
            words.free()

    try:
        offers = [_unpack(told) for told in agree(exchange, _SHARE, offer)]
        if len({(host, size) for host, size, _ in offers}) > 1:
            found = "the ranks of this group are on several hosts, or ask for windows of different sizes"
            raise UnsupportedError(found, NEEDED, FIX)
        addresses = [own] * len(offers)
        agree(exchange, _SHARE, map_peers)
    except UnsupportedError:
        give_back()
        raise
    assert words is not None, "offered, or an error"

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


def _pack(*parts: bytes) -> bytes:
    return b"".join(len(part).to_bytes(4, "little") + part for part in parts)


def _unpack(message: bytes) -> list[bytes]:
    parts, at = [], 0
    while at < len(message):
        size = int.from_bytes(message[at : at + 4], "little")
        parts.append(message[at + 4 : at + 4 + size])
        at += 4 + size
    return parts
