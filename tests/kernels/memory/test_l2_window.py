"""Windows and set-asides: what reaches a driver that only records, and that everything is put back."""

from __future__ import annotations

import inspect
import logging
import sys
from types import SimpleNamespace

import l2_driver
import pytest
import torch
from l2_driver import MB, CUaccessProperty, L2Driver

from sglang_sm120.errors import ContractError, Sm120Error, UnsupportedError
from sglang_sm120.kernels.memory.l2_window import api, config
from sglang_sm120.kernels.memory.l2_window import driver as binding
from sglang_sm120.kernels.memory.l2_window.api import AccessPolicyWindow

ADDRESS = 0x7F00_0000_0000
WINDOW = AccessPolicyWindow(ADDRESS, 8 * MB, 0.5)
OTHER = AccessPolicyWindow(ADDRESS + 64 * MB, MB, 1.0, "normal", "normal")
BINDINGS = binding._bindings


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> L2Driver:
    fake = L2Driver()
    monkeypatch.setattr(binding, "_bindings", lambda: fake)
    return fake


def parts(error: pytest.ExceptionInfo[Sm120Error]) -> bool:
    return all((error.value.found, error.value.needed, error.value.fix))


def test_limits(driver: L2Driver) -> None:
    assert api.limits(torch.device("cuda", 0)) == api.L2Limits(128 * MB, 84 * MB, 96 * MB)
    assert api.limits(torch.device("cuda", 1)) == api.L2Limits(64 * MB, 42 * MB, 48 * MB)
    assert not driver.called("cuCtxGetCurrent"), "a device with an index needs no context"
    driver.contexts.append(78)
    assert api.limits(torch.device("cuda")).l2_bytes == 64 * MB, "the current device"
    with pytest.raises(ContractError, match=r"(?s)CUDA device 2.*0 to 1: 2 are visible"):
        api.limits(torch.device("cuda", 2))
    for device in ("cpu", "meta"):
        with pytest.raises(UnsupportedError, match=f"the L2 of device {device}"):
            api.limits(torch.device(device))


@pytest.mark.parametrize(
    ("working_set", "aside", "ratio"), [(100, 25, 0.25), (100, 100, 1.0), (100, 101, 1.0), (1, 0, 0.0), (3, 2, 2 / 3)]
)
def test_hit_ratio(working_set: int, aside: int, ratio: float) -> None:
    assert api.hit_ratio(working_set, aside) == config.hit_ratio(working_set, aside) == ratio


@pytest.mark.parametrize(("working_set", "aside"), [(0, 1), (-1, 1), (1, -1)])
def test_hit_ratio_of_nothing(working_set: int, aside: int) -> None:
    with pytest.raises(
        ContractError, match=f"a working set of {working_set} bytes and a set-aside of {aside}"
    ) as error:
        api.hit_ratio(working_set, aside)
    assert parts(error)


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        ((0, 5), "5 bytes at address 0"),
        ((-16, 5), "address -16"),
        ((ADDRESS, 0), "0 bytes"),
        ((ADDRESS, -1), "-1 bytes"),
        ((ADDRESS, 5, 1.01), "hit_ratio 1.01"),
        ((ADDRESS, 5, -0.01), "hit_ratio -0.01"),
        ((ADDRESS, 5, float("nan")), "hit_ratio nan"),
        ((ADDRESS, 5, 1.0, "pinned"), "hit 'pinned'"),
        ((ADDRESS, 5, 1.0, "normal", "evict"), "miss 'evict'"),
        ((ADDRESS, 5, 1.0, "persisting", "persisting"), "miss 'persisting'"),
    ],
)
def test_a_window_that_makes_no_sense(arguments, found: str) -> None:
    with pytest.raises(ContractError, match=found) as error:
        AccessPolicyWindow(*arguments)
    assert parts(error)


def test_set_aside_says_what_was_granted_and_puts_the_old_size_back(driver: L2Driver) -> None:
    driver.limits[77] = 6 * MB
    with api.set_aside(10 * MB) as granted:
        assert granted == 12 * MB == api.get_set_aside(), "this driver rounds to 3 MB"
        assert driver.resets[77] == 0
    assert (driver.limits[77], driver.resets[77]) == (6 * MB, 1)
    names = [name for name, *_ in driver.calls]
    assert names.index("cuCtxResetPersistingL2Cache") < len(names) - 1 - names[::-1].index("cuCtxSetLimit")
    with api.set_aside(0) as granted:
        assert granted == 0
    assert driver.limits == {77: 6 * MB, 78: 0}


@pytest.mark.parametrize("fault", [ValueError("theirs"), KeyboardInterrupt(), GeneratorExit()])
def test_set_aside_is_put_back_after_an_exception(driver: L2Driver, fault: BaseException) -> None:
    with pytest.raises(type(fault)) as raised, api.set_aside(3 * MB), api.set_aside(9 * MB):
        assert driver.limits[77] == 9 * MB
        raise fault
    assert raised.value is fault
    assert (driver.limits[77], driver.resets[77]) == (0, 2)


def test_nested_set_asides_are_put_back_in_turn(driver: L2Driver) -> None:
    with api.set_aside(3 * MB):
        with api.set_aside(84 * MB) as granted:
            assert granted == 84 * MB
        assert driver.limits[77] == 3 * MB
    assert driver.limits[77] == 0


def test_a_set_aside_is_put_back_where_it_was_made(driver: L2Driver) -> None:
    """The block changed the device, or another thread leaves it."""
    driver.limits[78] = 3 * MB
    with api.set_aside(6 * MB):
        driver.contexts = [78]
    assert (driver.limits, driver.resets) == ({77: 0, 78: 3 * MB}, {77: 1, 78: 0})
    assert driver.contexts == [78], "and the thread is left on its device"


def test_a_failing_restore_does_not_hide_what_happened(driver: L2Driver, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(RuntimeError, match="an illegal access"), api.set_aside(3 * MB):
        driver.errors = {"cuCtxResetPersistingL2Cache": "CUDA_ERROR_ILLEGAL_ADDRESS"}
        raise RuntimeError("an illegal access")
    (record,) = caplog.records
    assert (record.levelno, record.name) == (logging.WARNING, api.__name__)
    assert "L2 that was set aside could not be put back" in record.getMessage()
    assert driver.limits[77] == 0, "the size is put back though the lines could not be"
    with pytest.raises(UnsupportedError, match="cuCtxResetPersistingL2Cache failed"), api.set_aside(3 * MB):
        pass


@pytest.mark.parametrize("num_bytes", [-1, 84 * MB + 1])
def test_set_aside_out_of_range(driver: L2Driver, num_bytes: int) -> None:
    with pytest.raises(ContractError, match=rf"(?s){num_bytes} bytes of L2.*0 to {84 * MB} on this GPU") as error:
        api.set_aside(num_bytes).__enter__()
    assert parts(error) and not driver.called("cuCtxSetLimit")


def test_where_nothing_can_be_set_aside(driver: L2Driver) -> None:
    driver.grants = False
    with pytest.raises(UnsupportedError, match=r"(?s)none of the 3145728 bytes.*MPS.*CUDA_DEVICE_DEFAULT_PERSISTING"):
        api.set_aside(3 * MB).__enter__()
    assert driver.called("cuCtxSetLimit")[-1][1] == 0, "put back"
    driver.most = 0
    other = L2Driver()  # what a device has is asked once, so another one is needed
    other.most, other.longest = 0, 0
    binding._bindings = lambda: other  # the fixture puts it back
    with pytest.raises(UnsupportedError, match=r"(?s)lets no L2 be set aside.*8\.0 or later.*MIG.*WSL"):
        api.set_aside(1).__enter__()
    with api.set_aside(0) as granted:
        assert granted == 0
    with pytest.raises(UnsupportedError, match=r"(?s)takes no access policy window.*MIG"):
        api.set_stream_window(9, WINDOW)
    api.set_stream_window(9, None)
    other.errors["cuCtxGetLimit"] = "CUDA_ERROR_UNSUPPORTED_LIMIT"
    with pytest.raises(UnsupportedError, match=r"(?s)UNSUPPORTED_LIMIT.*compute capability 8\.0"):
        api.get_set_aside()


def test_reset(driver: L2Driver) -> None:
    driver.contexts.append(78)
    api.reset_persisting()
    assert driver.resets == {77: 0, 78: 1}


@pytest.mark.parametrize("stream", [9, SimpleNamespace(cuda_stream=9)], ids=["raw", "torch"])
def test_a_stream_has_a_window_and_then_none(driver: L2Driver, stream) -> None:
    assert api.get_stream_window(stream) is None
    api.set_stream_window(stream, WINDOW)
    held = driver.streams[9]
    assert (held.base_ptr, held.num_bytes, held.hitRatio) == (ADDRESS, 8 * MB, 0.5)
    assert held.hitProp is CUaccessProperty.CU_ACCESS_PROPERTY_PERSISTING
    assert held.missProp is CUaccessProperty.CU_ACCESS_PROPERTY_STREAMING
    assert api.get_stream_window(stream) == WINDOW
    api.set_stream_window(stream, None)
    assert api.get_stream_window(stream) is None
    assert driver.streams[9] == l2_driver.CUaccessPolicyWindow(), "nothing is left on the stream"


@pytest.mark.parametrize("before", [None, OTHER])
def test_a_stream_gets_back_what_it_had(driver: L2Driver, before: AccessPolicyWindow | None) -> None:
    api.set_stream_window(9, before)
    with pytest.raises(ValueError, match="theirs"), api.stream_window(9, WINDOW):
        with api.stream_window(9, OTHER):
            assert api.get_stream_window(9) == OTHER
        assert api.get_stream_window(9) == WINDOW
        with api.stream_window(9, None):
            assert api.get_stream_window(9) is None
        assert api.get_stream_window(9) == WINDOW
        raise ValueError("theirs")
    assert api.get_stream_window(9) == before
    assert list(driver.streams) == [9]


def test_a_ratio_that_float32_rounds_is_put_back_as_it_was(driver: L2Driver) -> None:
    api.set_stream_window(9, AccessPolicyWindow(ADDRESS, 5, 0.1))
    was = driver.streams[9]
    with api.stream_window(9, None):
        assert driver.streams[9] != was
    assert driver.streams[9] == was and was.hitRatio == pytest.approx(0.1, rel=1e-7) and was.hitRatio != 0.1


def test_a_window_longer_than_the_longest(driver: L2Driver) -> None:
    api.set_stream_window(9, AccessPolicyWindow(ADDRESS, 96 * MB))
    for change in (api.set_stream_window, api.set_node_window):
        with pytest.raises(ContractError, match=rf"(?s)window of {96 * MB + 1} bytes.*{96 * MB} bytes at most"):
            change(9, AccessPolicyWindow(ADDRESS, 96 * MB + 1))
    with pytest.raises(ContractError), api.stream_window(9, AccessPolicyWindow(ADDRESS, 97 * MB)):
        pass
    assert api.get_stream_window(9) == AccessPolicyWindow(ADDRESS, 96 * MB)
    driver.contexts.append(78)
    with pytest.raises(ContractError, match=f"{48 * MB} bytes at most"):
        api.set_stream_window(9, AccessPolicyWindow(ADDRESS, 96 * MB))


def test_nodes_of_a_graph(driver: L2Driver) -> None:
    kernel, copy = l2_driver.CUgraphNodeType
    driver.nodes = {5: [("a", kernel), ("b", copy), ("c", kernel), ("d", kernel)], 6: []}
    graph = SimpleNamespace(raw_cuda_graph=lambda: 5)
    assert api.kernel_nodes(5) == api.kernel_nodes(graph) == ["a", "c", "d"]
    assert api.kernel_nodes(6) == []
    assert api.set_graph_window(graph, WINDOW) == 3
    assert api.set_graph_window(graph, OTHER, lambda node: node == "c") == 1
    assert [api.get_node_window(node) for node in "acd"] == [WINDOW, OTHER, WINDOW]
    api.set_node_window("a", None)
    assert api.get_node_window("a") is None
    assert sorted(driver.node_windows) == ["a", "c", "d"], "a copy has no window"
    assert api.set_graph_window(6, WINDOW) == 0


@pytest.mark.parametrize(
    ("name", "kind", "fix"),
    [
        ("CUDA_ERROR_INVALID_HANDLE", ContractError, "still in use"),
        ("CUDA_ERROR_INVALID_VALUE", ContractError, "not yet instantiated"),
        ("CUDA_ERROR_NOT_SUPPORTED", UnsupportedError, "MIG"),
        ("CUDA_ERROR_ILLEGAL_ADDRESS", UnsupportedError, "CUDA_LAUNCH_BLOCKING"),
        ("CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", ContractError, "before the capture"),
    ],
)
def test_an_error_of_the_driver_is_explained(driver: L2Driver, name: str, kind: type[Sm120Error], fix: str) -> None:
    driver.errors["cuStreamSetAttribute"] = name
    with pytest.raises(kind, match=rf"(?s)cuStreamSetAttribute failed: {name}.*fix:.*{fix}") as error:
        api.set_stream_window(9, WINDOW)
    assert type(error.value) is kind and parts(error)


def test_without_a_context_a_driver_or_the_bindings(driver: L2Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    driver.contexts = [0]
    for call in (
        api.get_set_aside,
        api.reset_persisting,
        lambda: api.get_stream_window(9),
        lambda: api.kernel_nodes(5),
    ):
        with pytest.raises(ContractError, match=r"(?s)no CUDA device is in use.*set_device"):
            call()

    def no_library(flags: int) -> None:
        raise RuntimeError("libcuda.so.1 not found")

    driver.cuInit = no_library
    with pytest.raises(UnsupportedError, match=r"(?s)driver library cannot be loaded \(libcuda.*--gpus all"):
        api.limits(torch.device("cuda", 0))
    monkeypatch.setattr(binding, "_bindings", BINDINGS)
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", None)
    with pytest.raises(UnsupportedError, match=r"(?s)cuda\.bindings cannot be imported.*pip install cuda-bindings"):
        api.get_set_aside()


def test_the_real_module_takes_these_calls() -> None:
    """The table that every call above was held against, the numbers, and the fields."""
    real = pytest.importorskip("cuda.bindings.driver")
    for name, (least, most) in l2_driver.SIGNATURES.items():
        parameters = inspect.signature(getattr(real, name)).parameters.values()
        assert (sum(one.default is one.empty for one in parameters), len(parameters)) == (least, most), name
    for kind in l2_driver.ENUMS:
        for member in kind:
            assert int(getattr(getattr(real, kind.__name__), member.name)) == member
    assert {result.name for result in real.CUresult} >= binding._CAUSES.keys() | binding._CONTRACT
    for window in (WINDOW, OTHER, None):
        made = api.to_driver(real, window)
        for kind in (real.CUstreamAttrValue, real.CUkernelNodeAttrValue):
            value = kind()
            value.accessPolicyWindow = made
            assert api.from_driver(value.accessPolicyWindow) == window
        attribute = real.CUlaunchAttribute()
        attribute.value.accessPolicyWindow = made
        assert api.from_driver(attribute.value.accessPolicyWindow) == window
