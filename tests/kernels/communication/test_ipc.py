"""Shared memory: the calls against a driver made of lists, their signatures against cuda.bindings, and on a GPU."""

from __future__ import annotations

import ctypes
import importlib.util
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from communication.fake_driver import FakeDriver, Handle, Result
from sglang_sm120.errors import ContractError, Sm120Error, UnsupportedError
from sglang_sm120.kernels.communication import ipc

ROOT = Path(__file__).resolve().parents[3]
HAS_BINDINGS = importlib.util.find_spec("cuda") is not None and importlib.util.find_spec("cuda.bindings") is not None
needs_bindings = pytest.mark.skipif(not HAS_BINDINGS, reason="needs cuda.bindings")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    fake = FakeDriver()
    monkeypatch.setattr(ipc, "_bindings", lambda: fake)
    return fake


def test_memory_is_whole_blocks_and_zeroed(driver: FakeDriver) -> None:
    assert ipc.allocate(1) == 0x7000_0000
    assert driver.called("cuMemAlloc") == [(ipc.BLOCK_BYTES,)]
    assert driver.called("cuMemsetD8") == [(0x7000_0000, 0, ipc.BLOCK_BYTES)]
    assert driver.calls[-1] == ("cuCtxSynchronize",), "zeros are there before anyone is told"
    ipc.allocate(ipc.BLOCK_BYTES + 1)
    assert driver.called("cuMemAlloc")[1] == (2 * ipc.BLOCK_BYTES,)
    ipc.free(0x7000_0000)
    assert driver.called("cuMemFree") == [(0x7000_0000,)]


def test_memory_that_cannot_be_zeroed_is_given_back(driver: FakeDriver) -> None:
    driver.errors["cuCtxSynchronize"] = "CUDA_ERROR_ILLEGAL_ADDRESS"
    with pytest.raises(UnsupportedError, match="ILLEGAL_ADDRESS"):
        ipc.allocate(8)
    assert driver.called("cuMemFree") == [(0x7000_0000,)]


def test_a_handle_goes_there_and_back(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    exported = bytes(range(200, 200 + 56)) + b"\0\xff\0ABCDE"
    opened: list[bytes] = []

    def get(pointer: int) -> tuple[Result, Handle]:
        handle = Handle()
        handle.content[:] = exported
        return Result("CUDA_SUCCESS"), handle

    def open_(handle: Handle, flags: int) -> tuple[Result, int]:
        opened.append(ctypes.string_at(handle.getPtr(), ipc.HANDLE_BYTES))
        assert flags == 1
        return Result("CUDA_SUCCESS"), 0x8000_0000

    driver.cuIpcGetMemHandle, driver.cuIpcOpenMemHandle = get, open_
    assert ipc.export_handle(0x7000_0000) == exported
    assert len(exported) == 64
    assert ipc.open_handle(exported) == 0x8000_0000
    assert opened == [exported]
    ipc.close_handle(0x8000_0000)
    assert driver.called("cuIpcCloseMemHandle") == [(0x8000_0000,)]
    for wrong in (b"", exported[:-1], exported + b"\0"):
        with pytest.raises(ContractError, match="a handle of"):
            ipc.open_handle(wrong)


def test_peers(driver: FakeDriver) -> None:
    assert ipc.can_access_peer(0, 1) is True
    assert driver.called("cuDeviceCanAccessPeer") == [(0, 1)]
    assert ipc.can_access_peer(1, 1) is True
    with pytest.raises(ContractError, match="CUDA device 2"):
        ipc.can_access_peer(0, 2)
    with pytest.raises(ContractError, match="CUDA device -1"):
        ipc.use_device(-1)
    assert ipc.pci_bus_id(1) == "0000:1b:00.0"
    assert driver.called("cuDeviceGetPCIBusId") == [(32, 1)]
    ipc.use_device(1)
    assert driver.called("cuCtxSetCurrent") == [(78,)]


def test_words_of_the_host(driver: FakeDriver) -> None:
    words = ipc.HostWords(5)
    assert driver.called("cuMemHostAlloc") == [(20, 3)]
    assert words.device_pointer == 0x9000_0000
    assert list(words.words) == [0] * 5
    assert driver.host[5] == 9, "and nothing behind them"
    words.words[3] = 0xFFFFFFFF
    assert driver.host[3] == 0xFFFFFFFF
    words.free()
    words.free()
    assert len(driver.called("cuMemFreeHost")) == 1
    assert (len(words.words), words.device_pointer) == (0, 0)
    driver.errors["cuMemHostGetDevicePointer"] = "CUDA_ERROR_NOT_SUPPORTED"
    with pytest.raises(UnsupportedError):
        ipc.HostWords(1)
    assert len(driver.called("cuMemFreeHost")) == 2


@pytest.mark.parametrize("call", [lambda: ipc.allocate(0), lambda: ipc.HostWords(0)])
def test_nothing_is_refused(driver: FakeDriver, call: Any) -> None:
    with pytest.raises(ContractError, match="1 or more"):
        call()
    assert driver.calls == []


@pytest.mark.parametrize(
    "call",
    [
        lambda: ipc.allocate(1), lambda: ipc.free(1), lambda: ipc.export_handle(1), lambda: ipc.open_handle(bytes(64)),
        lambda: ipc.close_handle(1), lambda: ipc.HostWords(1),
    ],
)  # fmt: skip
def test_without_a_context_it_is_said_how_to_get_one(driver: FakeDriver, call: Any) -> None:
    driver.context = 0
    with pytest.raises(ContractError) as error:
        call()
    assert "set_device" in error.value.fix
    assert [name for name, *_ in driver.calls] == ["cuInit", "cuCtxGetCurrent"]


@pytest.mark.parametrize(
    ("name", "kind", "fix"),
    [
        ("CUDA_ERROR_MAP_FAILED", UnsupportedError, "--ipc=host --pid=host"),
        ("CUDA_ERROR_INVALID_VALUE", ContractError, "--ipc=host --pid=host"),
        ("CUDA_ERROR_INVALID_HANDLE", ContractError, "not freed"),
        ("CUDA_ERROR_INVALID_CONTEXT", ContractError, "another process than the one that exported"),
        ("CUDA_ERROR_PEER_ACCESS_UNSUPPORTED", UnsupportedError, "bench p2p"),
        ("CUDA_ERROR_LAUNCH_FAILED", UnsupportedError, "CUDA_LAUNCH_BLOCKING=1"),
    ],
)
def test_errors_of_the_driver(driver: FakeDriver, name: str, kind: type[Sm120Error], fix: str) -> None:
    driver.errors["cuIpcOpenMemHandle"] = name
    with pytest.raises(kind) as error:
        ipc.open_handle(bytes(64))
    assert error.value.found == f"cuIpcOpenMemHandle failed: {name}"
    assert fix in error.value.fix


def test_a_driver_library_that_is_not_there(driver: FakeDriver) -> None:
    def missing(flags: int) -> None:
        raise RuntimeError("Failed to dlopen libcuda.so.1")

    driver.cuInit = missing
    with pytest.raises(UnsupportedError, match=r"libcuda\.so\.1"):
        ipc.can_access_peer(0, 1)


def test_without_cuda_bindings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", None)
    with pytest.raises(UnsupportedError, match=r"cuda\.bindings cannot be imported"):
        ipc.allocate(1)


def test_importing_it_imports_neither_torch_nor_cuda() -> None:
    code = "import sys; sys.path.insert(0, sys.argv[1]); import sglang_sm120.kernels.communication.ipc; "
    code += "print({'torch', 'numpy', 'cuda'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code, str(ROOT)], capture_output=True, text=True)
    assert done.stdout == "set()\n", done.stderr


@needs_bindings
def test_cuda_bindings_has_these_functions_with_these_arguments(driver: FakeDriver) -> None:
    """Every call that ipc made above is one that the real module takes."""
    handle = bytes(64)
    ipc.use_device(0)
    pointer = ipc.allocate(1)
    ipc.export_handle(pointer)
    ipc.close_handle(ipc.open_handle(handle))
    ipc.free(pointer)
    ipc.can_access_peer(0, 1)
    ipc.pci_bus_id(0)
    ipc.HostWords(1).free()
    from cuda.bindings import driver as real

    assert {name for name, *_ in driver.calls} >= {"cuIpcOpenMemHandle", "cuMemHostAlloc", "cuDevicePrimaryCtxRetain"}
    for name, *arguments in driver.calls:
        inspect.signature(getattr(real, name)).bind(*arguments)
    assert int(real.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS) == 1
    assert int(real.CU_MEMHOSTALLOC_PORTABLE) | int(real.CU_MEMHOSTALLOC_DEVICEMAP) == 3
    assert int(getattr(real, "CU_IPC_HANDLE_SIZE", ipc.HANDLE_BYTES)) == ipc.HANDLE_BYTES
    held = real.CUipcMemHandle()
    ctypes.memmove(held.getPtr(), bytes(range(64)), 64)
    assert ctypes.string_at(held.getPtr(), 64) == bytes(range(64))
    names = {result.name for result in real.CUresult}
    assert names >= ipc._CAUSES.keys() | ipc._CONTRACT


_OTHER_PROCESS = """
import ctypes, sys
from sglang_sm120.kernels.communication import ipc
from cuda.bindings import driver
ipc.use_device(0)
pointer = ipc.open_handle(bytes.fromhex(sys.argv[1]))
got = (ctypes.c_uint32 * 4)()
assert int(driver.cuMemcpyDtoH(ctypes.addressof(got), pointer, 16)[0]) == 0
assert int(driver.cuMemsetD8(pointer, 0xab, 8)[0]) == 0
assert int(driver.cuCtxSynchronize()[0]) == 0
ipc.close_handle(pointer)
print(list(got))
"""


@needs_gpu
@needs_bindings
def test_two_processes_share_memory_of_a_gpu() -> None:
    from cuda.bindings import driver as real

    torch.cuda.set_device(0)
    torch.cuda.synchronize()
    pointer = ipc.allocate(16)
    handle = ipc.export_handle(pointer)
    assert len(handle) == 64
    with pytest.raises(Sm120Error):
        ipc.open_handle(handle)  # in the process that exported it
    run = [sys.executable, "-c", _OTHER_PROCESS, handle.hex()]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(run, capture_output=True, text=True, timeout=120, env=environment)
    assert done.stdout == "[0, 0, 0, 0]\n", done.stderr
    got = (ctypes.c_uint32 * 4)()
    assert int(real.cuMemcpyDtoH(ctypes.addressof(got), pointer, 16)[0]) == 0
    assert list(got) == [0xABABABAB, 0xABABABAB, 0, 0]
    ipc.free(pointer)
    assert ipc.can_access_peer(0, 0)
    assert re.fullmatch(r"[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.0", ipc.pci_bus_id(0))
    with pytest.raises(ContractError):
        ipc.free(pointer + 1)


@needs_gpu
@needs_bindings
def test_a_gpu_writes_words_of_the_host() -> None:
    from cuda.bindings import driver as real

    torch.cuda.set_device(0)
    torch.cuda.synchronize()
    words = ipc.HostWords(3)
    assert int(real.cuMemsetD32(words.device_pointer, 0xC0FFEE, 2)[0]) == 0
    torch.cuda.synchronize()
    assert list(words.words) == [0xC0FFEE, 0xC0FFEE, 0]
    words.free()
