"""cuda.bindings' driver module without a driver, as far as ipc.py uses it."""

from __future__ import annotations

import ctypes
from typing import Any

from sglang_sm120.kernels.communication import ipc


class Result(int):
    name = ""

    def __new__(cls, name: str) -> Result:
        result = super().__new__(cls, name != "CUDA_SUCCESS")
        result.name = name
        return result


class Handle:
    """As CUipcMemHandle: no field that has a name."""

    def __init__(self) -> None:
        self.content = (ctypes.c_char * ipc.HANDLE_BYTES)()

    def getPtr(self) -> int:
        return ctypes.addressof(self.content)


class Flags:
    CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS = 1


class FakeDriver:
    """Two devices; remembers every call. `errors`: function -> name of its error."""

    CUipcMemHandle = Handle
    CUipcMem_flags = Flags
    CU_MEMHOSTALLOC_PORTABLE, CU_MEMHOSTALLOC_DEVICEMAP = 1, 2

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.errors: dict[str, str] = {}
        self.context = 77
        self.host = (ctypes.c_uint32 * 64)(*[9] * 64)

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cu"):
            raise AttributeError(name)

        def call(*arguments: Any) -> tuple[Any, ...]:
            self.calls.append((name, *arguments))
            if name in self.errors:
                return (Result(self.errors[name]), None)
            results = {
                "cuCtxGetCurrent": self.context,
                "cuDeviceGetCount": 2,
                "cuDeviceGet": arguments[0] if arguments else None,
                "cuDevicePrimaryCtxRetain": 78,
                "cuDeviceCanAccessPeer": 1,
                "cuDeviceGetPCIBusId": b"0000:1B:00.0\0" + b" " * 19,
                "cuMemAlloc": 0x7000_0000,
                "cuIpcGetMemHandle": Handle(),
                "cuIpcOpenMemHandle": 0x8000_0000,
                "cuMemHostAlloc": ctypes.addressof(self.host),
                "cuMemHostGetDevicePointer": 0x9000_0000,
            }
            return (Result("CUDA_SUCCESS"), *([results[name]] if name in results else []))

        return call

    def called(self, name: str) -> list[tuple[Any, ...]]:
        return [call[1:] for call in self.calls if call[0] == name]
