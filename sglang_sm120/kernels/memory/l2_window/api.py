"""L2 that is set aside for what persists, and windows over the memory that is to persist in it.

Through `cuda.bindings` and the driver alone; torch is not needed. `limits` apart, every function works on the calling
thread's current CUDA context: `torch.cuda.set_device(i)` makes one. None changes what a kernel computes.

While a graph is captured, a stream's window may be read and set: the kernels captured then keep it. The set-aside is no
part of a graph: set it before.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sglang_sm120.errors import ContractError, Sm120Error, UnsupportedError
from sglang_sm120.kernels.cuda.access_policy import AccessPolicyWindow, check_fits, from_driver, to_driver
from sglang_sm120.kernels.memory.l2_window import driver as binding
from sglang_sm120.kernels.memory.l2_window.config import hit_ratio
from sglang_sm120.kernels.memory.l2_window.driver import call

if TYPE_CHECKING:
    import torch

__all__ = [
    "AccessPolicyWindow", "L2Limits", "get_node_window", "get_set_aside", "get_stream_window", "hit_ratio",
    "kernel_nodes", "limits", "reset_persisting", "set_aside", "set_graph_window", "set_node_window",
    "set_stream_window", "stream_window",
]  # fmt: skip

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class L2Limits:
    """What a device has.

    Attributes:
        l2_bytes: of L2 in all.
        persisting_max_bytes: of it that may be set aside; 0 where nothing may.
        window_max_bytes: of one access policy window; 0 where there are none.
    """

    l2_bytes: int
    persisting_max_bytes: int
    window_max_bytes: int

    def require_persisting(self) -> int:
        """persisting_max_bytes. Raises: UnsupportedError if nothing may be set aside, as under MIG."""
        if self.persisting_max_bytes == 0:
            raise UnsupportedError("this GPU lets no L2 be set aside (0 bytes at most)", "some", binding.NO_PERSISTING)
        return self.persisting_max_bytes


def limits(device: torch.device) -> L2Limits:
    """What L2 a CUDA device has; needs no context, unless the device has no index.

    Raises:
        ContractError: no such device, or no context for a device without an index.
        UnsupportedError: not a CUDA device; no cuda.bindings or driver.
    """
    if device.type != "cuda":
        raise UnsupportedError(f"the L2 of device {device}", "a CUDA device", "leave L2 options out on other devices")
    if device.index is None:
        return _current_limits(binding.with_context())
    driver = binding.initialised()
    count = int(call(driver, "cuDeviceGetCount"))
    if device.index >= count:
        raise ContractError(
            f"CUDA device {device.index}", f"0 to {count - 1}: {count} are visible", "see CUDA_VISIBLE_DEVICES"
        )
    return _limits(driver, int(call(driver, "cuDeviceGet", device.index)))


def get_set_aside() -> int:
    """Bytes of L2 that are set aside for persisting accesses in the current context.

    Raises:
        ContractError: no context. UnsupportedError: a device without, no cuda.bindings or driver.
    """
    return _get_set_aside(binding.with_context())


@contextlib.contextmanager
def set_aside(num_bytes: int) -> Iterator[int]:
    """Set L2 aside for persisting accesses in the current context; behind it, what was set aside before.

    The end waits for nothing: synchronise first if kernels are to have it to their end. It makes every persisting
    line normal again, those of an enclosing set_aside too. If it fails after an exception in the block, the
    exception stays what it was and the failure is logged.

    Args:
        num_bytes: 0 to the device's `persisting_max_bytes`. The driver rounds.

    Yields:
        Bytes that the driver granted.

    Raises:
        ContractError: a size out of range, no context.
        UnsupportedError: a device or a setting (MIG, MPS) that grants nothing; no cuda.bindings or driver.
    """
    driver = binding.with_context()
    context, found = call(driver, "cuCtxGetCurrent"), _current_limits(driver)
    most = found.require_persisting() if num_bytes > 0 else found.persisting_max_bytes
    if not 0 <= num_bytes <= most:
        raise ContractError(
            f"{num_bytes} bytes of L2 to set aside", f"0 to {most} on this GPU", "limits(device) says the most"
        )
    before = _get_set_aside(driver)

    def restore() -> None:
        with binding.in_context(driver, context):
            try:
                call(driver, "cuCtxResetPersistingL2Cache")
            finally:
                _set_set_aside(driver, before)

    with _undone(restore, "L2 that was set aside"):
        _set_set_aside(driver, num_bytes)
        granted = _get_set_aside(driver)
        if num_bytes > 0 and granted == 0:
            raise UnsupportedError(
                f"none of the {num_bytes} bytes of L2 were set aside", "a driver that grants", binding.MPS
            )
        yield granted


def reset_persisting() -> None:
    """Make every persisting line of L2 a normal one, of this device; what is set aside stays so.

    Raises:
        ContractError: no context. UnsupportedError: a device without, no cuda.bindings or driver.
    """
    call(binding.with_context(), "cuCtxResetPersistingL2Cache")


def get_stream_window(stream: int | torch.cuda.Stream) -> AccessPolicyWindow | None:
    """The window that kernels get which this stream is given next, or None.

    Args:
        stream: torch's, or a raw handle.

    Raises:
        ContractError: not a stream, no context. UnsupportedError: no cuda.bindings or driver.
    """
    driver = binding.with_context()
    attribute = driver.CUstreamAttrID.CU_LAUNCH_ATTRIBUTE_ACCESS_POLICY_WINDOW
    return from_driver(call(driver, "cuStreamGetAttribute", _raw(stream), attribute).accessPolicyWindow)


def set_stream_window(stream: int | torch.cuda.Stream, window: AccessPolicyWindow | None) -> None:
    """Give a stream a window, for the kernels that it is given from now on; None takes it away.

    Kernels captured from the stream keep the window that it had then. Lines that are persisting stay so until
    `reset_persisting`.

    Args:
        stream: torch's, or a raw handle, of the current device.

    Raises:
        ContractError: not a stream, no context, a window that is longer than the device's longest.
        UnsupportedError: a device without windows; no cuda.bindings or driver.
    """
    driver = binding.with_context()
    attribute = driver.CUstreamAttrID.CU_LAUNCH_ATTRIBUTE_ACCESS_POLICY_WINDOW
    call(driver, "cuStreamSetAttribute", _raw(stream), attribute, _value(driver, "CUstreamAttrValue", window))


@contextlib.contextmanager
def stream_window(stream: int | torch.cuda.Stream, window: AccessPolicyWindow | None) -> Iterator[None]:
    """A stream with a window; behind it, the window that it had before, or none. As `set_stream_window`."""
    before = get_stream_window(stream)
    with _undone(lambda: set_stream_window(stream, before), "a stream's access policy window"):
        set_stream_window(stream, window)
        yield


def kernel_nodes(graph: int | torch.cuda.CUDAGraph) -> list[Any]:
    """The kernel nodes of a captured graph, in the driver's order; those inside child graphs are not among them.

    Args:
        graph: torch.cuda.CUDAGraph(keep_graph=True), or its raw_cuda_graph().

    Raises:
        ContractError: not a graph, no context. UnsupportedError: no cuda.bindings or driver.
    """
    driver = binding.with_context()
    handle = graph.raw_cuda_graph() if hasattr(graph, "raw_cuda_graph") else graph
    _, count = call(driver, "cuGraphGetNodes", handle, 0)
    nodes = call(driver, "cuGraphGetNodes", handle, count)[0] if count else []
    kernel = driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_KERNEL
    return [node for node in nodes if call(driver, "cuGraphNodeGetType", node) == kernel]


def get_node_window(node: Any) -> AccessPolicyWindow | None:
    """The window of a kernel node, or None.

    Args:
        node: of `kernel_nodes`.

    Raises:
        ContractError: not a kernel node, no context. UnsupportedError: no cuda.bindings or driver.
    """
    driver = binding.with_context()
    attribute = driver.CUkernelNodeAttrID.CU_LAUNCH_ATTRIBUTE_ACCESS_POLICY_WINDOW
    return from_driver(call(driver, "cuGraphKernelNodeGetAttribute", node, attribute).accessPolicyWindow)


def set_node_window(node: Any, window: AccessPolicyWindow | None) -> None:
    """Give a kernel node a window, or take it away; graphs instantiated afterwards have it.

    Args:
        node: of `kernel_nodes`.

    Raises:
        As `set_stream_window`.
    """
    driver = binding.with_context()
    attribute = driver.CUkernelNodeAttrID.CU_LAUNCH_ATTRIBUTE_ACCESS_POLICY_WINDOW
    call(driver, "cuGraphKernelNodeSetAttribute", node, attribute, _value(driver, "CUkernelNodeAttrValue", window))


def set_graph_window(
    graph: int | torch.cuda.CUDAGraph,
    window: AccessPolicyWindow | None,
    select: Callable[[Any], bool] | None = None,
) -> int:
    """Give the kernel nodes of a captured graph a window, before it is instantiated.

    Args:
        graph: torch.cuda.CUDAGraph(keep_graph=True), or its raw_cuda_graph().
        select: which of `kernel_nodes`; None is all.

    Returns:
        How many nodes were given it.

    Raises:
        As `set_stream_window`.
    """
    nodes = [node for node in kernel_nodes(graph) if select is None or select(node)]
    for node in nodes:
        set_node_window(node, window)
    return len(nodes)


@contextlib.contextmanager
def _undone(undo: Callable[[], None], what: str) -> Iterator[None]:
    """Undo after the block, whatever happens in it; what happened in it is what the caller hears of."""
    try:
        yield
    except BaseException:
        try:
            undo()
        except Sm120Error as error:  # after a fault of a kernel every call fails; that fault is the news
            logger.warning("%s could not be put back: %s", what, error.found)
        raise
    undo()


def _raw(stream: int | torch.cuda.Stream) -> int:
    return int(getattr(stream, "cuda_stream", stream))  # type: ignore[arg-type]


def _value(driver: Any, kind: str, window: AccessPolicyWindow | None) -> Any:
    if window is not None:
        check_fits(window, _current_limits(driver).window_max_bytes)
    value = getattr(driver, kind)()
    value.accessPolicyWindow = to_driver(driver, window)
    return value


def _get_set_aside(driver: Any) -> int:
    return int(call(driver, "cuCtxGetLimit", driver.CUlimit.CU_LIMIT_PERSISTING_L2_CACHE_SIZE))


def _set_set_aside(driver: Any, num_bytes: int) -> None:
    call(driver, "cuCtxSetLimit", driver.CUlimit.CU_LIMIT_PERSISTING_L2_CACHE_SIZE, num_bytes)


def _current_limits(driver: Any) -> L2Limits:
    return _limits(driver, int(call(driver, "cuCtxGetDevice")))


@functools.cache
def _limits(driver: Any, device: int) -> L2Limits:
    """device: the driver's own number, which is what CUdevice is."""
    attribute = driver.CUdevice_attribute
    names = ("L2_CACHE_SIZE", "MAX_PERSISTING_L2_CACHE_SIZE", "MAX_ACCESS_POLICY_WINDOW_SIZE")
    l2_bytes, persisting_max_bytes, window_max_bytes = (
        int(call(driver, "cuDeviceGetAttribute", getattr(attribute, f"CU_DEVICE_ATTRIBUTE_{name}"), device))
        for name in names
    )
    return L2Limits(l2_bytes, persisting_max_bytes, window_max_bytes)
