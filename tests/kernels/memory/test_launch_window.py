"""An access policy window given to a launch of our own kernels."""

from __future__ import annotations

import contextlib
import ctypes
from typing import Any

import pytest
import torch
from l2_driver import MB, CUlaunchAttributeID, L2Driver

from sglang_sm120.errors import ContractError, UnsupportedError
from sglang_sm120.kernels.cuda import module
from sglang_sm120.kernels.cuda.access_policy import AccessPolicyWindow, from_driver
from sglang_sm120.kernels.memory.l2_prefetch import kernel as prefetch_kernel

WINDOW = AccessPolicyWindow(0x7F00_0000_0000, MB, 0.75)
PDL = CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
POLICY = CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_ACCESS_POLICY_WINDOW


class Args(ctypes.Structure):
    _fields_ = (("x", ctypes.c_void_p), ("n", ctypes.c_int))


class Kernel:
    function, args_bytes, static_shared, dynamic_shared = "function", 16, 0, 48 * 1024

    def __init__(self) -> None:
        self.configs: dict[Any, Any] = {}


@pytest.fixture
def driver() -> L2Driver:
    return L2Driver()


@pytest.fixture
def loaded(driver: L2Driver, monkeypatch: pytest.MonkeyPatch) -> module.KernelModule:
    """A module of one kernel, as if loaded."""
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    made = module.KernelModule.__new__(module.KernelModule)
    made.device, made._driver, made._kernels = torch.device("cuda", 0), driver, {"scale": Kernel()}  # type: ignore[dict-item]
    return made


def attributes(driver: L2Driver, launch: int = -1) -> list[Any]:
    config, function, _, extra = driver.called("cuLaunchKernelEx")[launch]
    assert (function, extra) == ("function", 0) and config.numAttrs == len(config.attrs)
    assert (config.gridDimX, config.gridDimY, config.gridDimZ) == (3, 1, 1)
    assert (config.blockDimX, config.blockDimY, config.blockDimZ) == (64, 1, 1)
    assert config.hStream == 9
    return list(config.attrs)


def test_without_a_window_a_launch_is_what_it_was(loaded: module.KernelModule, driver: L2Driver) -> None:
    loaded.launch("scale", 3, 64, Args(5, 6), stream=9)
    assert [name for name, *_ in driver.calls] == ["cuLaunchKernel"], "one call of the driver"
    loaded.launch("scale", 3, 64, Args(5, 6), stream=9, programmatic=True)
    assert [attribute.id for attribute in attributes(driver)] == [PDL]


def test_a_window_goes_with_the_launch(loaded: module.KernelModule, driver: L2Driver) -> None:
    loaded.launch("scale", 3, 64, Args(5, 6), stream=9, window=WINDOW)
    (attribute,) = attributes(driver)
    assert attribute.id is POLICY and from_driver(attribute.value.accessPolicyWindow) == WINDOW
    loaded.launch("scale", 3, 64, Args(5, 6), stream=9, window=WINDOW, programmatic=True)
    first, second = attributes(driver)
    assert (first.id, first.value.programmaticStreamSerializationAllowed) == (PDL, 1)
    assert second.id is POLICY and from_driver(second.value.accessPolicyWindow) == WINDOW
    assert not driver.streams, "the stream's own window is not touched"


def test_configurations_are_kept_by_window(loaded: module.KernelModule, driver: L2Driver) -> None:
    same, other = AccessPolicyWindow(WINDOW.pointer, MB, 0.75), AccessPolicyWindow(WINDOW.pointer, MB, 0.5)
    for window in (WINDOW, other, same, None):
        loaded.launch("scale", 3, 64, Args(5, 6), stream=9, window=window, programmatic=window is None)
    loaded.launch("scale", 3, 64, Args(5, 6), stream=9, window=WINDOW, programmatic=True)
    configs = [call[0] for call in driver.called("cuLaunchKernelEx")]
    assert configs[0] is configs[2] and len({id(config) for config in configs}) == 4
    assert [attribute.id for attribute in attributes(driver, 3)] == [PDL]


def test_a_window_that_the_device_does_not_take(loaded: module.KernelModule, driver: L2Driver) -> None:
    driver.longest = MB - 1
    with pytest.raises(ContractError, match=f"{MB - 1} bytes at most"):
        loaded.launch("scale", 3, 64, Args(5, 6), stream=9, window=WINDOW)
    driver.longest = 0
    with pytest.raises(UnsupportedError, match="takes no access policy window"):
        loaded.launch("scale", 3, 64, Args(5, 6), stream=9, window=WINDOW)
    assert not driver.called("cuLaunchKernelEx") and not loaded._kernels["scale"].configs
    driver.longest = MB
    driver.errors["cuLaunchKernelEx"] = "CUDA_ERROR_INVALID_VALUE"
    with pytest.raises(UnsupportedError, match=r"launching scale \(grid 3"):
        loaded.launch("scale", 3, 64, Args(5, 6), stream=9, window=WINDOW)


def test_on_the_cpu_a_window_changes_nothing() -> None:
    host = prefetch_kernel.module(torch.device("cpu"))
    args = prefetch_kernel._Args(num_ranges=0, chunk_bytes=16)
    host.launch("l2_prefetch_bulk", 1, 32, args, window=WINDOW)
    address, num_bytes = ctypes.c_uint64(), ctypes.c_uint64()
    asked = host._library["l2_prefetch_asked"]  # type: ignore[union-attr]
    assert asked(0, ctypes.byref(address), ctypes.byref(num_bytes)) == 0
