"""How ranks come to their windows: all of them, or none with the reason, and nothing is left. Ranks are threads."""

from __future__ import annotations

import ctypes
import threading
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_sm120.errors import ContractError, UnsupportedError
from sglang_sm120.kernels.communication import window
from sglang_sm120.kernels.communication.agreement import agree

CPU = torch.device("cpu")


class Host:
    """Stands for CUDA IPC: addresses are numbers, a handle is the owner's. `fails`: (function, rank) that raise."""

    def __init__(self, world_size: int, fails: set[tuple[str, int]] = frozenset()) -> None:  # type: ignore[assignment]
        self.world_size, self.fails = world_size, fails
        self.barrier = threading.Barrier(world_size, timeout=20)
        self.told: list[Any] = [None] * world_size
        self.local = threading.local()
        self.owned: set[int] = set()
        self.mapped: Counter[int] = Counter()
        self.words = 0
        self.lock = threading.Lock()
        self.HANDLE_BYTES = 64

    def _may(self, function: str) -> None:
        if (function, self.local.rank) in self.fails:
            raise UnsupportedError(f"{function} failed: CUDA_ERROR", "memory", "mend it")

    def allocate(self, num_bytes: int) -> int:
        self._may("allocate")
        with self.lock:
            self.owned.add(1000 + self.local.rank)
        return 1000 + self.local.rank

    def export_handle(self, pointer: int) -> bytes:
        self._may("export_handle")
        return pointer.to_bytes(64, "little")

    def open_handle(self, handle: bytes) -> int:
        self._may("open_handle")
        owner = int.from_bytes(handle, "little")
        with self.lock:
            assert owner in self.owned
            self.mapped[owner] += 1
        return owner + 1_000_000 * (1 + self.local.rank)

    def close_handle(self, pointer: int) -> None:
        with self.lock:
            self.mapped[pointer % 1_000_000] -= 1

    def free(self, pointer: int) -> None:
        with self.lock:
            assert self.mapped[pointer] == 0, "freed while a peer still maps it"
            self.owned.remove(pointer)

    def HostWords(self, count: int) -> Any:
        self._may("HostWords")
        with self.lock:
            self.words += 1

        def free() -> None:
            with self.lock:
                self.words -= 1

        return SimpleNamespace(words=(ctypes.c_uint32 * count)(), device_pointer=77, free=free)

    def exchange(self, message: bytes) -> list[bytes]:
        self.told[self.local.rank] = message
        self.barrier.wait()
        told = list(self.told)
        self.barrier.wait()
        return told

    def on_all(self, work: Any) -> list[Any]:
        results: list[Any] = [None] * self.world_size

        def run(rank: int) -> None:
            self.local.rank = rank
            try:
                results[rank] = work(rank)
            except BaseException as error:  # shown by the test
                results[rank] = error

        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(self.world_size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return results

    @property
    def is_empty(self) -> bool:
        return not self.owned and not any(self.mapped.values()) and self.words == 0


@pytest.fixture
def connect(monkeypatch: pytest.MonkeyPatch):
    def on_all(host: Host, sizes: list[int] | None = None) -> list[Any]:
        monkeypatch.setattr(window, "ipc", host)
        sizes = sizes or [4096] * host.world_size
        return host.on_all(lambda rank: window.connect(rank, host.exchange, sizes[rank], CPU))

    return on_all


@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_every_rank_maps_every_window(world_size: int, connect, monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host(world_size)
    windows = connect(host)
    for rank, one in enumerate(windows):
        assert one.rank == rank and one.world_size == world_size and one.status_address == 77
        assert [address % 1_000_000 for address in one.addresses] == [1000 + owner for owner in range(world_size)]
        assert one.addresses[rank] == 1000 + rank
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    for _ in range(2):
        host.on_all(lambda rank: windows[rank].close())
    assert host.is_empty


@pytest.mark.parametrize("function", ["HostWords", "allocate", "export_handle", "open_handle"])
@pytest.mark.parametrize("rank", [0, 2])
def test_where_one_cannot_all_say_which_and_why(function: str, rank: int, connect) -> None:
    host = Host(4, {(function, rank)})
    for result in connect(host):
        assert isinstance(result, UnsupportedError)
        assert result.found.startswith(f"rank {rank}: ")
        assert f"{function} failed: CUDA_ERROR (mend it)" in result.found
        assert "bench p2p" in result.fix
    assert host.is_empty


def test_all_go_on_or_all_raise_with_the_rank_that_could_not() -> None:
    host = Host(4)

    def step(rank: int, error: Exception | None) -> Any:
        if rank == 2 and error is not None:
            raise error
        return rank if rank % 2 else bytes([rank])

    def agreed(rank: int, error: Exception | None) -> list[bytes]:
        return agree(host.exchange, "its kernels cannot be loaded", lambda: step(rank, error))

    assert host.on_all(lambda rank: agreed(rank, None)) == [[b"\0", b"", b"\2", b""]] * 4
    for error, text in (
        (RuntimeError("no\nmemory"), "RuntimeError: no\nmemory"),
        (ContractError("a found fault", "n", "mend it"), "a found fault (mend it)"),
    ):
        results = host.on_all(lambda rank, error=error: agreed(rank, error))
        assert {type(result) for result in results} == {UnsupportedError}
        assert {result.found for result in results} == {f"rank 2: its kernels cannot be loaded: {text}"}


def test_ranks_on_several_hosts(connect, monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host(2)
    monkeypatch.setattr(window, "_host", lambda: b"host %d" % host.local.rank)
    for result in connect(host):
        assert isinstance(result, UnsupportedError) and "on several hosts" in result.found
    assert host.is_empty


def test_windows_of_different_sizes(connect) -> None:
    host = Host(2)
    for result in connect(host, [4096, 8192]):
        assert isinstance(result, UnsupportedError) and "different sizes" in result.found
    assert host.is_empty


def test_the_host_is_told_by_its_boot(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert window._host() == window._host() != b""

    def unreadable(self: Any) -> bytes:
        raise PermissionError

    monkeypatch.setattr(window.Path, "read_bytes", unreadable)
    assert window._host() != b""
