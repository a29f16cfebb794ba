"""Device memory that processes of one host share (CUDA IPC), and words of host memory that a GPU can write.

Through `cuda.bindings` and the driver alone; torch is not needed, and its allocator never used: what PyTorch's
allocator hands out is part of a larger block, and with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True it cannot be
exported at all. Memory from here is not touched by that setting.

`can_access_peer` and `pci_bus_id` apart, every function works on the calling thread's current CUDA context:
`torch.cuda.set_device(i)`, or `use_device(i)` without torch, makes one. None may be called while a graph is captured.
"""

from __future__ import annotations

import ctypes
import importlib
from typing import Any

from sglang_sm120.errors import ContractError, Sm120Error, UnsupportedError

HANDLE_BYTES = 64  # CU_IPC_HANDLE_SIZE
BLOCK_BYTES = 2 << 20  # what the driver maps at once: an export shares whole blocks, with all that lies in them

_NAMESPACES = (
    "processes that share a host have to share its IPC and PID namespaces too: run all ranks in one container, or "
    "each with --ipc=host --pid=host"
)
_PEER = (
    "without P2P these GPUs cannot share memory: `sglang-sm120 bench p2p` says what is missing; NCCL through the "
    "host works without"
)
# What an error of the driver comes from here, where its name does not say it.
_CAUSES = {
    "CUDA_ERROR_INVALID_CONTEXT": "torch.cuda.set_device(i) or ipc.use_device(i) in this thread first; a handle is "
    "opened in another process than the one that exported it",
    "CUDA_ERROR_INVALID_HANDLE": f"the exporting process has to be alive, its memory not freed; {_NAMESPACES}",
    "CUDA_ERROR_INVALID_VALUE": f"a handle or pointer has to be one that is still in use; {_NAMESPACES}",
    "CUDA_ERROR_INVALID_DEVICE": f"the exporter's GPU has to be visible here (CUDA_VISIBLE_DEVICES); {_NAMESPACES}",
    "CUDA_ERROR_MAP_FAILED": _NAMESPACES,
    "CUDA_ERROR_ALREADY_MAPPED": "open a handle once, and close it before it is opened again",
    "CUDA_ERROR_PEER_ACCESS_UNSUPPORTED": _PEER,
    "CUDA_ERROR_TOO_MANY_PEERS": "a GPU reaches eight others at most: name fewer in CUDA_VISIBLE_DEVICES",
    "CUDA_ERROR_OUT_OF_MEMORY": "free device memory, such as by a smaller --mem-fraction-static",
    "CUDA_ERROR_NOT_SUPPORTED": "CUDA IPC needs Linux, natively or in a container; vGPU, MIG and WSL 2 lack it",
    "CUDA_ERROR_NO_DEVICE": "run it where there is an NVIDIA GPU, visible in CUDA_VISIBLE_DEVICES and to the container",
    "CUDA_ERROR_DEVICE_UNAVAILABLE": "another process has the GPU for itself: nvidia-smi -c DEFAULT",
    "CUDA_ERROR_SYSTEM_NOT_READY": "start nvidia-fabricmanager, which NVSwitch machines need",
}
# Arguments that are wrong, rather than a machine that cannot.
_CONTRACT = {
    "CUDA_ERROR_INVALID_VALUE", "CUDA_ERROR_INVALID_HANDLE", "CUDA_ERROR_INVALID_CONTEXT", "CUDA_ERROR_ALREADY_MAPPED",
}  # fmt: skip


def use_device(device: int) -> None:
    """Make a device's primary context, the one that torch uses too, current in this thread; creates it if need be.

    Args:
        device: a CUDA index, as in torch.

    Raises:
        ContractError: no such device. UnsupportedError: no cuda.bindings or driver, or a device that does not start.
    """
    driver = _driver()
    _call(driver, "cuCtxSetCurrent", _call(driver, "cuDevicePrimaryCtxRetain", _device(driver, device)))


def allocate(num_bytes: int) -> int:
    """New device memory on the current device, zeroed, which `export_handle` may export.

    Args:
        num_bytes: 1 or more; rounded up to whole blocks of 2 MiB, so that an export shares nothing else.

    Returns:
        Its address, aligned to 2 MiB or the driver's coarsest; for `free`. The zeros are there when this returns.

    Raises:
        ContractError: num_bytes below 1; no context. UnsupportedError: no memory left, no cuda.bindings or driver.
    """
    if num_bytes < 1:
        raise ContractError(f"{num_bytes} bytes to allocate", "1 or more", "allocate nothing when there is nothing")
    driver = _driver_with_context()
    rounded = -(-num_bytes // BLOCK_BYTES) * BLOCK_BYTES
    pointer = int(_call(driver, "cuMemAlloc", rounded))
    try:
        _call(driver, "cuMemsetD8", pointer, 0, rounded)
        _call(driver, "cuCtxSynchronize")  # a memset does not wait for the device
    except Sm120Error:
        driver.cuMemFree(pointer)
        raise
    return pointer


def free(pointer: int) -> None:
    """Give back what `allocate` returned; waits for the device. Every process that opened it closes it before.

    Raises:
        ContractError: not such a pointer, or freed already.
    """
    _call(_driver_with_context(), "cuMemFree", pointer)


def export_handle(pointer: int) -> bytes:
    """What another process needs to open this memory.

    Args:
        pointer: from `allocate`, not into the middle of it.

    Returns:
        64 bytes; any number of processes may open them while this one is alive.

    Raises:
        ContractError: not such a pointer. UnsupportedError: this machine has no CUDA IPC.
    """
    driver = _driver_with_context()
    handle = _call(driver, "cuIpcGetMemHandle", pointer)
    return ctypes.string_at(
        handle.getPtr(), HANDLE_BYTES
    )  # its field has a name in some versions of cuda.bindings only


def open_handle(handle: bytes) -> int:
    """Map another process's memory for the current device; enables peer access when it lies on another one.

    Args:
        handle: from `export_handle` in another process of this host.

    Returns:
        The address here, of the same byte as the exporter's; for `close_handle`.

    Raises:
        ContractError: not 64 bytes, a handle of this process, or one whose memory is gone.
        UnsupportedError: no peer access between the two devices; namespaces that keep the processes apart.
    """
    if len(handle) != HANDLE_BYTES:
        raise ContractError(
            f"a handle of {len(handle)} bytes", f"{HANDLE_BYTES}", "pass on what export_handle returned"
        )
    driver = _driver_with_context()
    opened = driver.CUipcMemHandle()
    ctypes.memmove(opened.getPtr(), bytes(handle), HANDLE_BYTES)
    flags = int(driver.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS)
    return int(_call(driver, "cuIpcOpenMemHandle", opened, flags))


def close_handle(pointer: int) -> None:
    """Unmap what `open_handle` returned; kernels that use it must have ended.

    Raises:
        ContractError: not such a pointer, or closed already.
    """
    _call(_driver_with_context(), "cuIpcCloseMemHandle", pointer)


def copy(destination: int, source: int, num_bytes: int) -> None:
    """Copy device memory by the driver, no kernel; either side may be a peer's that was opened. Done on return.

    Raises:
        ContractError: not such pointers.
    """
    driver = _driver_with_context()
    _call(driver, "cuMemcpyDtoD", destination, source, num_bytes)
    _call(driver, "cuCtxSynchronize")  # a copy between devices may return before it is done


def can_access_peer(device: int, peer: int) -> bool:
    """Whether the driver would let `device` read and write memory of `peer`; needs no context.

    True is a promise of the driver, not a test: IOMMU and ACS break it without its knowledge (see p2p_probe).

    Args:
        device, peer: CUDA indices, as in torch; equal ones give True.

    Raises:
        ContractError: no such device. UnsupportedError: no cuda.bindings or driver.
    """
    driver = _driver()
    one, other = _device(driver, device), _device(driver, peer)
    return device == peer or bool(_call(driver, "cuDeviceCanAccessPeer", one, other))


def pci_bus_id(device: int) -> str:
    """Where a device is on the bus, as Linux writes it: "0000:1b:00.0"; needs no context.

    Raises:
        ContractError: no such device. UnsupportedError: no cuda.bindings or driver.
    """
    driver = _driver()
    text = _call(driver, "cuDeviceGetPCIBusId", 32, _device(driver, device))
    domain, _, rest = bytes(text).partition(b"\0")[0].decode().strip().lower().partition(":")
    return f"{domain[-4:]}:{rest}"


class HostWords:
    """Pinned words of host memory that every GPU of this process can read and write, such as a kernel's status.

    Attributes:
        words: the words here, as a ctypes array of uint32; zero at first. What a kernel wrote is there once it has
            ended, and may be before. Empty after `free`.
        device_pointer: their address on the device; 0 after `free`.
    """

    words: ctypes.Array[ctypes.c_uint32]
    device_pointer: int

    def __init__(self, count: int) -> None:
        """Raises: ContractError for a count below 1 or no context; UnsupportedError where it cannot be had."""
        if count < 1:
            raise ContractError(
                f"{count} words of host memory", "1 or more", "ask for as many words as a kernel writes"
            )
        self._driver = driver = _driver_with_context()
        flags = int(driver.CU_MEMHOSTALLOC_PORTABLE) | int(driver.CU_MEMHOSTALLOC_DEVICEMAP)
        self._pointer = int(_call(driver, "cuMemHostAlloc", 4 * count, flags))
        try:
            self.device_pointer = int(_call(driver, "cuMemHostGetDevicePointer", self._pointer, 0))
        except Sm120Error:
            driver.cuMemFreeHost(self._pointer)
            raise
        self.words = (ctypes.c_uint32 * count).from_address(self._pointer)
        ctypes.memset(self._pointer, 0, 4 * count)

    def free(self) -> None:
        """Give the memory back; no kernel may use it any more, and no view of `words` be kept. Twice is once."""
        pointer, self._pointer = self._pointer, 0
        self.words, self.device_pointer = (ctypes.c_uint32 * 0)(), 0
        if pointer:
            _call(self._driver, "cuMemFreeHost", pointer)


def _bindings() -> Any:
    return importlib.import_module("cuda.bindings.driver")


def _driver() -> Any:
    """cuda.bindings' driver module, initialised."""
    try:
        driver = _bindings()
    except ImportError as error:
        raise UnsupportedError(
            f"memory has to be shared between GPUs, and cuda.bindings cannot be imported ({error})",
            "cuda-bindings",
            "pip install cuda-bindings (it comes with a CUDA build of torch)",
        ) from error
    try:
        _call(driver, "cuInit", 0)
    except (OSError, RuntimeError) as error:  # the library is looked for on the first call
        raise UnsupportedError(
            f"memory has to be shared between GPUs, and NVIDIA's driver library cannot be loaded ({error})",
            "libcuda.so.1, which comes with the driver",
            "install the NVIDIA driver; in a container, start it with --gpus all",
        ) from error
    return driver


def _driver_with_context() -> Any:
    driver = _driver()
    if int(_call(driver, "cuCtxGetCurrent")) == 0:
        raise ContractError(
            "no CUDA device is in use in this thread",
            "a current context, which says where memory is to be",
            "call torch.cuda.set_device(i), or ipc.use_device(i), in this thread first",
        )
    return driver


def _device(driver: Any, index: int) -> Any:
    count = int(_call(driver, "cuDeviceGetCount"))
    if not 0 <= index < count:
        raise ContractError(
            f"CUDA device {index}", f"0 to {count - 1}: {count} are visible", "see CUDA_VISIBLE_DEVICES"
        )
    return _call(driver, "cuDeviceGet", index)


def _call(driver: Any, function: str, *arguments: Any) -> Any:
    error, *results = getattr(driver, function)(*arguments)
    if int(error):
        kind = ContractError if error.name in _CONTRACT else UnsupportedError
        raise kind(
            f"{function} failed: {error.name}",
            "memory that GPUs of this host can share",
            _CAUSES.get(error.name, "an error of an earlier kernel shows up here: CUDA_LAUNCH_BLOCKING=1 finds it"),
        )
    return results[0] if len(results) == 1 else results
