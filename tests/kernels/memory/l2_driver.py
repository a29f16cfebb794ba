"""cuda.bindings' driver module without a driver, as far as L2 windows use it. It records every call, holds it against
the real module's signature, and keeps what was set, a context at a time."""

from __future__ import annotations

import ctypes
import enum
from typing import Any

# Arguments that have to be given, and that may be, of cuda-bindings 13.4.4 and 13.5.0, which agree.
# test_l2_window compares the table with the module where that is installed.
SIGNATURES = {
    "cuInit": (1, 1),
    "cuDeviceGetCount": (0, 0),
    "cuDeviceGet": (1, 1),
    "cuDeviceGetAttribute": (2, 2),
    "cuCtxGetCurrent": (0, 0),
    "cuCtxGetDevice": (0, 0),
    "cuCtxPushCurrent": (1, 1),
    "cuCtxPopCurrent": (0, 0),
    "cuCtxSetLimit": (2, 2),
    "cuCtxGetLimit": (1, 1),
    "cuCtxResetPersistingL2Cache": (0, 0),
    "cuStreamGetAttribute": (2, 2),
    "cuStreamSetAttribute": (3, 3),
    "cuGraphGetNodes": (1, 2),
    "cuGraphNodeGetType": (1, 1),
    "cuGraphKernelNodeGetAttribute": (2, 2),
    "cuGraphKernelNodeSetAttribute": (3, 3),
    "cuLaunchKernel": (11, 11),
    "cuLaunchKernelEx": (4, 4),
}
MB = 1 << 20
L2_BYTES, PERSISTING_MAX_BYTES, WINDOW_MAX_BYTES = 128 * MB, 84 * MB, 96 * MB


class Result(int):
    name = ""

    def __new__(cls, name: str) -> Result:
        result = super().__new__(cls, name != "CUDA_SUCCESS")
        result.name = name
        return result


class CUaccessProperty(enum.IntEnum):
    CU_ACCESS_PROPERTY_NORMAL = 0
    CU_ACCESS_PROPERTY_STREAMING = 1
    CU_ACCESS_PROPERTY_PERSISTING = 2


class CUlimit(enum.IntEnum):
    CU_LIMIT_PERSISTING_L2_CACHE_SIZE = 6


class CUdevice_attribute(enum.IntEnum):
    CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE = 38
    CU_DEVICE_ATTRIBUTE_MAX_PERSISTING_L2_CACHE_SIZE = 108
    CU_DEVICE_ATTRIBUTE_MAX_ACCESS_POLICY_WINDOW_SIZE = 109


class CUstreamAttrID(enum.IntEnum):
    CU_LAUNCH_ATTRIBUTE_ACCESS_POLICY_WINDOW = 1


class CUkernelNodeAttrID(enum.IntEnum):
    CU_LAUNCH_ATTRIBUTE_ACCESS_POLICY_WINDOW = 1


class CUlaunchAttributeID(enum.IntEnum):
    CU_LAUNCH_ATTRIBUTE_ACCESS_POLICY_WINDOW = 1
    CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION = 6


class CUgraphNodeType(enum.IntEnum):
    CU_GRAPH_NODE_TYPE_KERNEL = 0
    CU_GRAPH_NODE_TYPE_MEMCPY = 1


ENUMS = (
    CUaccessProperty, CUlimit, CUdevice_attribute, CUstreamAttrID, CUkernelNodeAttrID, CUlaunchAttributeID,
    CUgraphNodeType,
)  # fmt: skip


class CUaccessPolicyWindow:
    """No other field may be set; the ratio is a float32, as in the real one."""

    __slots__ = ("_ratio", "base_ptr", "hitProp", "missProp", "num_bytes")
    FIELDS = ("base_ptr", "num_bytes", "hitRatio", "hitProp", "missProp")

    def __init__(self) -> None:
        self.base_ptr = self.num_bytes = 0
        self._ratio = 0.0
        self.hitProp = self.missProp = CUaccessProperty.CU_ACCESS_PROPERTY_NORMAL

    @property
    def hitRatio(self) -> float:
        return self._ratio

    @hitRatio.setter
    def hitRatio(self, ratio: float) -> None:
        self._ratio = ctypes.c_float(ratio).value

    def __eq__(self, other: object) -> bool:
        return all(getattr(self, name) == getattr(other, name) for name in self.FIELDS)


class _Value:
    __slots__ = ("accessPolicyWindow", "programmaticStreamSerializationAllowed")

    def __init__(self) -> None:
        self.accessPolicyWindow = CUaccessPolicyWindow()
        self.programmaticStreamSerializationAllowed = 0


class CUstreamAttrValue(_Value):
    pass


class CUkernelNodeAttrValue(_Value):
    pass


class CUlaunchAttribute:
    __slots__ = ("id", "value")

    def __init__(self) -> None:
        self.id: Any = None
        self.value = _Value()


class CUlaunchConfig:
    __slots__ = (
        "attrs", "blockDimX", "blockDimY", "blockDimZ", "gridDimX", "gridDimY", "gridDimZ", "hStream", "numAttrs",
        "sharedMemBytes",
    )  # fmt: skip


class L2Driver:
    """Two devices. `contexts`: a stack, the current one last; context 77 is device 0's, 78 device 1's.

    `errors`: function -> the name of its error. `grain`: the set-aside is rounded up to a multiple.
    """

    CUaccessPolicyWindow, CUstreamAttrValue, CUkernelNodeAttrValue = (
        CUaccessPolicyWindow, CUstreamAttrValue, CUkernelNodeAttrValue,
    )  # fmt: skip
    CUlaunchAttribute, CUlaunchConfig = CUlaunchAttribute, CUlaunchConfig

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.errors: dict[str, str] = {}
        self.contexts = [77]
        self.limits = {77: 0, 78: 0}
        self.resets = {77: 0, 78: 0}
        self.most = PERSISTING_MAX_BYTES
        self.longest = WINDOW_MAX_BYTES
        self.grain = 3 * MB
        self.grants = True
        self.streams: dict[int, CUaccessPolicyWindow] = {}
        self.nodes: dict[int, list[tuple[str, CUgraphNodeType]]] = {}  # of a graph
        self.node_windows: dict[str, CUaccessPolicyWindow] = {}

    def __getattr__(self, name: str) -> Any:
        for kind in ENUMS:
            if kind.__name__ == name:
                return kind
        if name not in SIGNATURES:
            raise AttributeError(name)

        def call(*arguments: Any) -> tuple[Any, ...]:
            least, most = SIGNATURES[name]
            assert least <= len(arguments) <= most, f"{name}{arguments}"
            self.calls.append((name, *arguments))
            if name in self.errors:
                results = 2 if name == "cuGraphGetNodes" else int("Get" in name or "Pop" in name)
                return (Result(self.errors[name]), *[None] * results)
            return (Result("CUDA_SUCCESS"), *getattr(self, f"_{name}", lambda *_: ())(*arguments))

        return call

    def called(self, name: str) -> list[tuple[Any, ...]]:
        return [call[1:] for call in self.calls if call[0] == name]

    def _cuDeviceGetCount(self) -> tuple[Any, ...]:
        return (2,)

    def _cuDeviceGet(self, ordinal: int) -> tuple[Any, ...]:
        return (ordinal,)

    def _cuDeviceGetAttribute(self, attribute: CUdevice_attribute, device: int) -> tuple[Any, ...]:
        assert isinstance(attribute, CUdevice_attribute)
        values = {"L2_CACHE_SIZE": L2_BYTES, "MAX_PERSISTING_L2_CACHE_SIZE": self.most}
        values["MAX_ACCESS_POLICY_WINDOW_SIZE"] = self.longest
        return (values[attribute.name.removeprefix("CU_DEVICE_ATTRIBUTE_")] // (device + 1),)

    def _cuCtxGetCurrent(self) -> tuple[Any, ...]:
        return (self.contexts[-1],)

    def _cuCtxGetDevice(self) -> tuple[Any, ...]:
        return (self.contexts[-1] - 77,)

    def _cuCtxPushCurrent(self, context: int) -> tuple[Any, ...]:
        self.contexts.append(context)
        return ()

    def _cuCtxPopCurrent(self) -> tuple[Any, ...]:
        return (self.contexts.pop(),)

    def _cuCtxSetLimit(self, limit: CUlimit, value: int) -> tuple[Any, ...]:
        assert limit is CUlimit.CU_LIMIT_PERSISTING_L2_CACHE_SIZE
        rounded = min(-(-value // self.grain) * self.grain, self.most)
        self.limits[self.contexts[-1]] = rounded if self.grants else 0
        return ()

    def _cuCtxGetLimit(self, limit: CUlimit) -> tuple[Any, ...]:
        assert limit is CUlimit.CU_LIMIT_PERSISTING_L2_CACHE_SIZE
        return (self.limits[self.contexts[-1]],)

    def _cuCtxResetPersistingL2Cache(self) -> tuple[Any, ...]:
        self.resets[self.contexts[-1]] += 1
        return ()

    def _cuStreamGetAttribute(self, stream: int, attribute: CUstreamAttrID) -> tuple[Any, ...]:
        assert isinstance(attribute, CUstreamAttrID) and type(stream) is int
        value = CUstreamAttrValue()
        value.accessPolicyWindow = self.streams.get(stream, CUaccessPolicyWindow())
        return (value,)

    def _cuStreamSetAttribute(self, stream: int, attribute: CUstreamAttrID, value: Any) -> tuple[Any, ...]:
        assert isinstance(attribute, CUstreamAttrID) and type(stream) is int and type(value) is CUstreamAttrValue
        self.streams[stream] = value.accessPolicyWindow
        return ()

    def _cuGraphGetNodes(self, graph: int, count: int = 0) -> tuple[Any, ...]:
        nodes = [node for node, _ in self.nodes[graph]]
        return nodes[:count], count or len(nodes)

    def _cuGraphNodeGetType(self, node: str) -> tuple[Any, ...]:
        return (next(kind for nodes in self.nodes.values() for name, kind in nodes if name == node),)

    def _cuGraphKernelNodeGetAttribute(self, node: str, attribute: CUkernelNodeAttrID) -> tuple[Any, ...]:
        assert isinstance(attribute, CUkernelNodeAttrID)
        value = CUkernelNodeAttrValue()
        value.accessPolicyWindow = self.node_windows.get(node, CUaccessPolicyWindow())
        return (value,)

    def _cuGraphKernelNodeSetAttribute(self, node: str, attribute: CUkernelNodeAttrID, value: Any) -> tuple[Any, ...]:
        assert isinstance(attribute, CUkernelNodeAttrID) and type(value) is CUkernelNodeAttrValue
        self.node_windows[node] = value.accessPolicyWindow
        return ()
