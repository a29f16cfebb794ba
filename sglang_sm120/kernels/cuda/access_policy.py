"""An access policy window: what a launch, a stream or a graph node tells L2 about a range of memory."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from sglang_sm120.errors import ContractError, UnsupportedError

__all__ = ["AccessPolicyWindow", "check_fits", "from_driver", "to_driver"]

Hit = Literal["persisting", "streaming", "normal"]
Miss = Literal["streaming", "normal"]  # CUDA allows no persisting miss

_PROPERTIES = {
    "normal": "CU_ACCESS_PROPERTY_NORMAL",
    "streaming": "CU_ACCESS_PROPERTY_STREAMING",
    "persisting": "CU_ACCESS_PROPERTY_PERSISTING",
}
_NAMES = {name: word for word, name in _PROPERTIES.items()}


@dataclass(frozen=True)
class AccessPolicyWindow:
    """A range of global memory and what L2 is to do with its lines.

    Args:
        pointer: device address of the first byte.
        num_bytes: of the range; a device has a maximum.
        hit_ratio: 0 to 1, the part of the range that gets `hit`; the rest gets `miss`. CUDA picks which, and keeps the
            ratio as a float32.
        hit: "persisting" needs L2 that is set aside.
        miss: "streaming" or "normal".

    Raises:
        ContractError: a pointer or size below 1, a ratio outside 0 to 1, an unknown property.
    """

    pointer: int
    num_bytes: int
    hit_ratio: float = 1.0
    hit: Hit = "persisting"
    miss: Miss = "streaming"

    def __post_init__(self) -> None:
        if self.pointer < 1 or self.num_bytes < 1:
            raise ContractError(
                f"an access policy window of {self.num_bytes} bytes at address {self.pointer}",
                "the address of device memory, and 1 byte or more",
                "pass tensor.data_ptr() and tensor.nbytes; where no window is meant, pass None for it",
            )
        if math.isnan(self.hit_ratio) or not 0.0 <= self.hit_ratio <= 1.0:
            raise ContractError(
                f"hit_ratio {self.hit_ratio}", "0 to 1", "hit_ratio(working_set_bytes, set_aside_bytes) computes it"
            )
        if self.hit not in _PROPERTIES or self.miss not in _PROPERTIES or self.miss == "persisting":
            raise ContractError(
                f"hit {self.hit!r}, miss {self.miss!r}",
                "hit persisting, streaming or normal; miss streaming or normal",
                "leave them out for persisting and streaming",
            )


def to_driver(driver: Any, window: AccessPolicyWindow | None) -> Any:
    """The driver's CUaccessPolicyWindow; None is the window of 0 bytes, which is none.

    Args:
        driver: cuda.bindings.driver.
    """
    made = driver.CUaccessPolicyWindow()
    properties = driver.CUaccessProperty
    made.base_ptr = 0 if window is None else window.pointer
    made.num_bytes = 0 if window is None else window.num_bytes
    made.hitRatio = 0.0 if window is None else window.hit_ratio
    made.hitProp = getattr(properties, _PROPERTIES["normal" if window is None else window.hit])
    made.missProp = getattr(properties, _PROPERTIES["normal" if window is None else window.miss])
    return made


def from_driver(window: Any) -> AccessPolicyWindow | None:
    """What a CUaccessPolicyWindow says; None for one of 0 bytes."""
    pointer, num_bytes = int(window.base_ptr or 0), int(window.num_bytes)
    if pointer == 0 or num_bytes == 0:
        return None
    hit, miss = _NAMES[window.hitProp.name], _NAMES[window.missProp.name]
    return AccessPolicyWindow(pointer, num_bytes, float(window.hitRatio), hit, miss)  # type: ignore[arg-type]


def check_fits(window: AccessPolicyWindow, window_max_bytes: int) -> None:
    """Hold a window against what its device takes; the driver may cut a longer one short without a word.

    Args:
        window_max_bytes: CU_DEVICE_ATTRIBUTE_MAX_ACCESS_POLICY_WINDOW_SIZE of the device.

    Raises:
        UnsupportedError: a device without windows. ContractError: a longer window.
    """
    if window_max_bytes == 0:
        raise UnsupportedError(
            "this GPU takes no access policy window (its longest is 0 bytes)",
            "compute capability 8.0 or later, and a GPU that is whole",
            "turn MIG off (nvidia-smi -mig 0), or leave the window out",
        )
    if window.num_bytes > window_max_bytes:
        raise ContractError(
            f"an access policy window of {window.num_bytes} bytes",
            f"{window_max_bytes} bytes at most on this GPU",
            "cover the part of the range that is read most, or set a window for each launch",
        )
