"""NVIDIA's driver, as far as L2 is concerned: found, initialised, called, and its errors explained."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any

from sglang_sm120.errors import ContractError, UnsupportedError

NO_PERSISTING = (
    "it takes compute capability 8.0 or later and a whole GPU: turn MIG off (nvidia-smi -mig 0); a driver under WSL or "
    "vGPU may not offer it either. Nothing else depends on it: leave it out"
)
MPS = (
    "under MPS only its server sets the size: start it with CUDA_DEVICE_DEFAULT_PERSISTING_L2_CACHE_PERCENTAGE_LIMIT, "
    "in percent; else leave it out"
)
# What an error of the driver comes from here, where its name does not say it.
_CAUSES = {
    "CUDA_ERROR_UNSUPPORTED_LIMIT": NO_PERSISTING,
    "CUDA_ERROR_NOT_SUPPORTED": NO_PERSISTING,
    "CUDA_ERROR_INVALID_VALUE": "a stream, node or graph has to be one that is still in use; a graph not yet "
    "instantiated, by CUDAGraph(keep_graph=True); memory has to be this device's",
    "CUDA_ERROR_INVALID_HANDLE": "a stream, node or graph has to be one that is still in use, of this process",
    "CUDA_ERROR_INVALID_CONTEXT": "torch.cuda.set_device(i) in this thread first",
    "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED": "do it before the capture; only a stream's window may change in one",
    "CUDA_ERROR_NO_DEVICE": "run it where there is an NVIDIA GPU, visible in CUDA_VISIBLE_DEVICES and to the container",
}
# Arguments that are wrong, rather than a machine that cannot.
_CONTRACT = {
    "CUDA_ERROR_INVALID_VALUE", "CUDA_ERROR_INVALID_HANDLE", "CUDA_ERROR_INVALID_CONTEXT",
    "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED",
}  # fmt: skip


def _bindings() -> Any:
    return importlib.import_module("cuda.bindings.driver")


def initialised() -> Any:
    """cuda.bindings' driver module, initialised."""
    try:
        driver = _bindings()
    except ImportError as error:
        raise UnsupportedError(
            f"L2 has to be controlled, and cuda.bindings cannot be imported ({error})",
            "cuda-bindings",
            "pip install cuda-bindings (it comes with a CUDA build of torch)",
        ) from error
    try:
        call(driver, "cuInit", 0)
    except (OSError, RuntimeError) as error:  # the library is looked for on the first call
        raise UnsupportedError(
            f"L2 has to be controlled, and NVIDIA's driver library cannot be loaded ({error})",
            "libcuda.so.1, which comes with the driver",
            "install the NVIDIA driver; in a container, start it with --gpus all",
        ) from error
    return driver


def with_context() -> Any:
    driver = initialised()
    if int(call(driver, "cuCtxGetCurrent")) == 0:
        raise ContractError(
            "no CUDA device is in use in this thread",
            "a current context, which says whose L2 it is",
            "call torch.cuda.set_device(i) in this thread first",
        )
    return driver


@contextlib.contextmanager
def in_context(driver: Any, context: Any) -> Iterator[None]:
    """Run a block in a context whatever the thread's is: its device may have changed, or it may be another thread."""
    if int(call(driver, "cuCtxGetCurrent")) == int(context):
        yield
        return
    call(driver, "cuCtxPushCurrent", context)
    try:
        yield
    finally:
        call(driver, "cuCtxPopCurrent")


def call(driver: Any, function: str, *arguments: Any) -> Any:
    error, *results = getattr(driver, function)(*arguments)
    if int(error):
        kind = ContractError if error.name in _CONTRACT else UnsupportedError
        raise kind(
            f"{function} failed: {error.name}",
            "a driver and a device that control L2",
            _CAUSES.get(error.name, "an error of an earlier kernel shows up here: CUDA_LAUNCH_BLOCKING=1 finds it"),
        )
    return results[0] if len(results) == 1 else results
