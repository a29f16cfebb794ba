"""Whether a kernel.cu is to be used on a device, and its module there."""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from sglang_sm120.errors import UnsupportedError
from sglang_sm120.kernels.cuda.module import HostModule, KernelModule, load

__all__ = ["Modules"]

logger = logging.getLogger(__name__)


class Modules(dict[torch.device, "KernelModule | HostModule | None"]):
    """The modules of one kernel.cu, by device. None: refused by `ready` once, which does not try it again."""

    def __init__(self, source: Path, *, min_capability: tuple[int, int], name: str) -> None:
        """Loads nothing.

        Args:
            source: a kernel.cu that has a plain torch counterpart with the same bits.
            min_capability: the lowest compute capability that its kernels are for.
            name: of the operation, for messages: "NVFP4" gives "there are no NVFP4 kernels for device meta".
        """
        super().__init__()
        self.source = source
        self.min_capability = min_capability
        self.name = name

    def device_reason(self, device: torch.device) -> str | None:
        """One sentence on why the kernels do not run on this device, or None. The CPU runs the host build."""
        if device.type not in ("cpu", "cuda"):
            return f"there are no {self.name} kernels for device {device}"
        if device.type == "cuda":
            capability = torch.cuda.get_device_capability(device)
            if capability < self.min_capability:
                needed = self.min_capability
                return f"{device} has compute capability {capability}: the {self.name} kernels need {needed}"
        return None

    def ready(self, device: torch.device) -> bool:
        """Whether the kernels are to be used when nobody asked for an implementation: on a GPU where they load.

        Loading is not for the middle of a capture, and launching not for a trace; plain torch has the same bits.
        """
        if device.type != "cuda" or torch.compiler.is_compiling():
            return False
        if device not in self:
            if torch.cuda.is_current_stream_capturing():
                return False
            try:
                self[device] = None if self.device_reason(device) else load(self.source, device)
            except UnsupportedError as error:
                logger.warning("%s uses plain torch on %s: %s", self.name, device, error)
                self[device] = None
        return self[device] is not None

    def on(self, device: torch.device) -> KernelModule | HostModule:
        """The module, loaded when it is not yet.

        Raises:
            UnsupportedError, ConfigError: see `module.load`.
        """
        module = self.get(device)
        if module is None:
            module = self[device] = load(self.source, device)
        return module
