"""child.py on the CPU: kernel.cu as built for the host, and files in memory in place of CUDA IPC.

Run as a program it is the process of one "GPU"; the kernels of several of them run at the same time.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

from sglang_sm120.kernels.communication.ipc import HANDLE_BYTES
from sglang_sm120.kernels.communication.p2p_probe import child, kernel
from sglang_sm120.kernels.cuda import host_build


class HostMachine:
    """One "GPU". Its memory is a file that others map."""

    def __init__(self, device: int) -> None:
        self.device = device
        self._maps: dict[int, tuple[mmap.mmap, str]] = {}
        self.result = (ctypes.c_uint32 * kernel.RESULT_WORDS)()
        self.kernels = kernel.Kernels(host_build.load(kernel.SOURCE), ctypes.addressof(self.result))

    def facts(self) -> dict[str, Any]:
        return {"name": f"host {self.device}", "pci_bus_id": "", "capability": "0.0"}

    def allocate(self, num_bytes: int) -> int:
        descriptor, path = tempfile.mkstemp(prefix="p2p", dir=os.environ["P2P_TEST_FOLDER"])
        os.truncate(path, num_bytes)
        os.close(descriptor)
        return self._map(path)

    def export_handle(self, pointer: int) -> bytes:
        return self._maps[pointer][1].encode().ljust(HANDLE_BYTES, b"\0")

    def open_handle(self, handle: bytes) -> int:
        return self._map(handle.rstrip(b"\0").decode())

    def close_handle(self, pointer: int) -> None:
        del self._maps[pointer]

    def can_access_peer(self, peer: int) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def clear_result(self) -> None:
        self.result[:] = [0] * kernel.RESULT_WORDS

    def times_us(self, steps: Sequence[tuple[child.Launch | None, child.Launch]]) -> list[float]:
        times = []
        for before, timed in steps:
            if before is not None:
                before()
            start = time.perf_counter()
            timed()
            times.append((time.perf_counter() - start) * 1e6)
        return times

    def _map(self, path: str) -> int:
        with open(path, "r+b") as file:
            memory = mmap.mmap(file.fileno(), 0)
        pointer = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self._maps[pointer] = (memory, path)
        return pointer


if __name__ == "__main__":
    sys.exit(child.run(HostMachine, sys.argv[1:]))
