"""Load a kernel.cu for a device and launch its kernels.

Convention: every kernel is `extern "C" __global__ void NAME(const __grid_constant__ ARGS p)`: one by-value struct,
which a ctypes.Structure mirrors. On a CUDA device a prebuilt cubin is used when it is for that architecture and for
these very sources, otherwise NVRTC compiles; on the CPU g++ builds the same source against host.h.
"""

from __future__ import annotations

import ctypes
import logging
import threading
from pathlib import Path
from typing import Any

import torch

from sglang_sm120.errors import ContractError, UnsupportedError
from sglang_sm120.kernels.cuda import build, host_build
from sglang_sm120.kernels.cuda.access_policy import AccessPolicyWindow, check_fits, to_driver
from sglang_sm120.kernels.cuda.host_build import HostModule, check_args_size, check_launch

__all__ = ["HostModule", "KernelModule", "load"]

logger = logging.getLogger(__name__)

_DEFAULT_SHARED_BYTES = 48 * 1024  # static and dynamic together; a kernel may have more only when told before
_loaded: dict[tuple[Path, torch.device, tuple[str, ...]], KernelModule | HostModule] = {}
_loading = threading.Lock()


def load(source: Path, device: torch.device, defines: tuple[str, ...] = ()) -> KernelModule | HostModule:
    """The kernels of a source on a device, cached by (source, device, defines).

    Args:
        source: a kernel.cu.
        device: a CUDA device, or the CPU.
        defines: macros, "NAME" or "NAME=VALUE"; a variant that has any is always compiled here.

    Raises:
        UnsupportedError: no prebuilt cubin fits and cuda.bindings or NVRTC is missing; on the CPU, no C++ compiler;
            a device of another kind.
        ConfigError: the source does not compile.

    Loading compiles, reads files and allocates on the GPU: do it before a CUDA graph capture.
    """
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    asked = (source, device, tuple(defines))
    if (module := _loaded.get(asked)) is not None:
        return module  # every launch comes here: resolving a path asks the file system
    key = (source.resolve(), *asked[1:])
    with _loading:
        if key not in _loaded:
            _loaded[key] = _load(*key)
        _loaded[asked] = _loaded[key]
        return _loaded[key]


def _load(source: Path, device: torch.device, defines: tuple[str, ...]) -> KernelModule | HostModule:
    if device.type == "cpu":
        return host_build.load(source, defines)
    if device.type != "cuda":
        raise UnsupportedError(f"CUDA kernels on device {device}", "a CUDA device or the CPU", "move the tensors")
    _cuda_driver()  # without it there is nothing to choose
    arch = build.arch_name(torch.cuda.get_device_capability(device))
    cubin, reason = (None, "a variant is never prebuilt") if defines else build.prebuilt_cubin(source, arch)
    if cubin is not None:
        try:
            module = KernelModule(cubin, device)
        except UnsupportedError as error:  # such as a driver that is older than the compiler
            reason = f"{reason} was refused ({error.found})"
        else:
            logger.info("kernels of %s on %s: %s", build.op_name(source), device, reason)
            return module
    logger.info("kernels of %s on %s: compiled by NVRTC for %s, since %s", build.op_name(source), device, arch, reason)
    return KernelModule(build.cached_cubin(source, arch, defines), device)


class _Kernel:
    """A kernel's handle and what is remembered about it."""

    def __init__(self, driver: Any, handle: Any) -> None:
        attribute = driver.CUfunction_attribute
        self.function = _call(driver, "cuKernelGetFunction", handle)
        _, self.args_bytes = _call(driver, "cuKernelGetParamInfo", handle, 0)
        self.static_shared = _call(
            driver, "cuFuncGetAttribute", attribute.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, self.function
        )
        self.dynamic_shared = max(0, _DEFAULT_SHARED_BYTES - self.static_shared)  # what a launch may ask for now
        self.configs: dict[tuple[Any, ...], Any] = {}  # of launches with attributes


class KernelModule:
    """The kernels of one cubin on one CUDA device."""

    def __init__(self, cubin: bytes, device: torch.device) -> None:
        """Loads the cubin and every kernel in it, so that launches only look names up.

        Raises:
            UnsupportedError: no cuda.bindings, or the driver refuses the cubin.
        """
        self.device = device
        self._driver = driver = _cuda_driver()
        self._cubin = cubin  # the driver keeps no copy of its own while it loads lazily
        with torch.cuda.device(device):
            _need_context(driver, device)
            self._library = _call(driver, "cuLibraryLoadData", cubin, [], [], 0, [], [], 0)
            count = _call(driver, "cuLibraryGetKernelCount", self._library)
            handles = _call(driver, "cuLibraryEnumerateKernels", count, self._library)
            self._kernels = {
                _call(driver, "cuKernelGetName", handle).decode(): _Kernel(driver, handle) for handle in handles
            }

    def launch(
        self,
        name: str,
        grid: int,
        block: int,
        args: ctypes.Structure,
        *,
        shared_bytes: int = 0,
        stream: int | None = None,
        programmatic: bool = False,
        window: AccessPolicyWindow | None = None,
    ) -> None:
        """Put a kernel on a stream; does not wait for it.

        The module's device must be the current one, and in a new thread torch must have used it before.

        Args:
            name: of an `extern "C"` kernel.
            grid: blocks, 1 or more. block: threads, 1 to 1024.
            args: mirrors the kernel's struct; read before this returns. What it points to is the caller's to keep.
            shared_bytes: of dynamic shared memory.
            stream: a raw handle; None is torch's current stream on the module's device.
            programmatic: the kernel may start before the one ahead of it in the stream has finished; it must call
                grid_dependency_wait() before it touches what that one reads or writes.
            window: what L2 does with a range that this kernel reads; None leaves it the stream's.

        Raises:
            ContractError: no such kernel, args of another size, sizes out of range, more shared memory than there is,
                a window that is longer than the device's longest.
            UnsupportedError: the driver refuses the launch; a device without windows.

        Capturable in a CUDA graph. The first launch with over 48 KiB of shared memory sets a function attribute, which
        capture permits.
        """
        kernel = self._kernels.get(name)
        if kernel is None:
            raise ContractError(f"no kernel {name}", f"one of {', '.join(sorted(self._kernels))}", "correct the name")
        check_launch(name, grid, block, shared_bytes)
        check_args_size(name, args, kernel.args_bytes)
        if shared_bytes > kernel.dynamic_shared:
            self._allow_shared(name, kernel, shared_bytes)
        if stream is None:
            stream = torch.cuda.current_stream(self.device).cuda_stream
        driver = self._driver
        parameters = (ctypes.c_void_p * 1)(ctypes.addressof(args))
        pointer = ctypes.addressof(parameters)
        if programmatic or window is not None:
            config = self._config(kernel, (grid, block, shared_bytes, stream, programmatic, window))
            (error,) = driver.cuLaunchKernelEx(config, kernel.function, pointer, 0)
        else:
            (error,) = driver.cuLaunchKernel(kernel.function, grid, 1, 1, block, 1, 1, shared_bytes, stream, pointer, 0)
        if int(error):
            raise UnsupportedError(
                f"launching {name} (grid {grid}, block {block}, {shared_bytes} B of shared memory): {error.name}",
                "a launch that the device accepts",
                "an illegal address or launch failure comes from an earlier kernel: CUDA_LAUNCH_BLOCKING=1 finds it",
            )

    def _allow_shared(self, name: str, kernel: _Kernel, shared_bytes: int) -> None:
        attribute = self._driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        (error,) = self._driver.cuFuncSetAttribute(kernel.function, attribute, shared_bytes)
        if int(error):
            raise ContractError(
                f"{name} asks for {shared_bytes} B of dynamic and {kernel.static_shared} B of static shared memory",
                "what a block may have on this GPU (99 KiB in all on SM120)",
                "choose a smaller tile or fewer stages",
            )
        kernel.dynamic_shared = shared_bytes

    def _config(
        self, kernel: _Kernel, key: tuple[int, int, int, int, bool, AccessPolicyWindow | None]
    ) -> Any:  # CUlaunchConfig
        """Kept and never changed: building one costs more than a launch."""
        config = kernel.configs.get(key)
        if config is None:
            driver = self._driver
            grid, block, shared_bytes, stream, programmatic, window = key
            config = driver.CUlaunchConfig()
            config.gridDimX, config.gridDimY, config.gridDimZ = grid, 1, 1
            config.blockDimX, config.blockDimY, config.blockDimZ = block, 1, 1
            config.sharedMemBytes = shared_bytes
            config.hStream = stream
            attributes = self._attributes(programmatic, window)
            config.attrs, config.numAttrs = attributes, len(attributes)
            if len(kernel.configs) >= 1024:  # grids that vary with every batch
                kernel.configs.clear()
            kernel.configs[key] = config
        return config

    def _attributes(self, programmatic: bool, window: AccessPolicyWindow | None) -> list[Any]:
        driver = self._driver
        names, attributes = driver.CUlaunchAttributeID, []
        if programmatic:
            attribute = driver.CUlaunchAttribute()
            attribute.id = names.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            attribute.value.programmaticStreamSerializationAllowed = 1
            attributes.append(attribute)
        if window is not None:
            longest = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MAX_ACCESS_POLICY_WINDOW_SIZE
            check_fits(window, _call(driver, "cuDeviceGetAttribute", longest, _call(driver, "cuCtxGetDevice")))
            attribute = driver.CUlaunchAttribute()
            attribute.id = names.CU_LAUNCH_ATTRIBUTE_ACCESS_POLICY_WINDOW
            attribute.value.accessPolicyWindow = to_driver(driver, window)
            attributes.append(attribute)
        return attributes


def _cuda_driver() -> Any:
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise UnsupportedError(
            f"a kernel has to be loaded, and cuda.bindings cannot be imported ({error})",
            "cuda-bindings",
            "pip install cuda-bindings (it comes with a CUDA build of torch)",
        ) from error
    return driver


def _need_context(driver: Any, device: torch.device) -> None:
    """The driver needs a current context; torch makes one only when it first launches or allocates."""
    if int(_call(driver, "cuCtxGetCurrent")) == 0:
        handle = _call(driver, "cuDeviceGet", device.index)
        _call(driver, "cuCtxSetCurrent", _call(driver, "cuDevicePrimaryCtxRetain", handle))


def _call(driver: Any, function: str, *arguments: Any) -> Any:
    error, *results = getattr(driver, function)(*arguments)
    if int(error):
        raise UnsupportedError(
            f"{function} failed: {error.name}",
            "a driver that loads this cubin",
            "update the NVIDIA driver, or remove the prebuilt cubins so that NVRTC compiles",
        )
    return results[0] if len(results) == 1 else results
