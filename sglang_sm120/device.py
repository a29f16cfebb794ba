"""What this machine's accelerator is. torch is imported only when asked, so this module loads anywhere."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Device:
    """One accelerator, or the CPU. `capability` is (major, minor), None without a CUDA GPU."""

    name: str
    capability: tuple[int, int] | None

    @property
    def is_sm120(self) -> bool:
        """SM120 (RTX PRO 6000 Blackwell, RTX 5090) or SM121 (GB10): compute capability 12.x."""
        return self.capability is not None and self.capability[0] == 12

    def describe(self) -> str:
        if self.capability is None:
            return self.name
        return f"{self.name} (compute capability {self.capability[0]}.{self.capability[1]})"


def current_device() -> Device:
    """The first CUDA device, or the CPU. Initialises CUDA in this process if there is a GPU."""
    import torch

    if torch.version.cuda is None:
        return Device("a CPU build of torch, no CUDA GPU", None)
    if not torch.cuda.is_available():
        return Device("no CUDA GPU that torch can use", None)
    properties = torch.cuda.get_device_properties(0)
    return Device(properties.name, (properties.major, properties.minor))
