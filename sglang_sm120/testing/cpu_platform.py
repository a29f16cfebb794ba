"""The platform that lets SGLang serve on a machine without a GPU, for --sm120-emulate. Inert unless asked for.

SGLang loads the entry point in every process; `activate` returns None, and so changes nothing, unless emulation was
asked for and torch has no CUDA GPU. This is the one file outside integration/ that imports sglang: a platform has to be
a subclass of SGLang's.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from sglang_sm120.options import flag_given

_CLASS = "sglang_sm120.testing.cpu_platform.CpuEmulationPlatform"


def activate() -> str | None:
    """Entry point: the platform class's path if this process emulates SM120 on the CPU, else None."""
    if not flag_given("sm120_emulate", sys.argv, os.environ):
        return None
    import torch

    return None if torch.cuda.is_available() else _CLASS


def is_active() -> bool:
    """Whether SGLang runs on this platform in this process."""
    from sglang.srt.platforms import current_platform

    return type(current_platform).__name__ == "CpuEmulationPlatform"


def __getattr__(name: str) -> Any:
    """Define the class when SGLang asks for it, so that `activate` costs no import of sglang."""
    if name == "CpuEmulationPlatform":
        cls = _platform_class()
        globals()[name] = cls
        return cls
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _platform_class() -> type:
    from sglang.srt.platforms.cpu import CpuDeviceMixin
    from sglang.srt.platforms.device_mixin import PlatformEnum
    from sglang.srt.platforms.interface import PlatformCapabilities, SRTPlatform

    class CpuEmulationPlatform(CpuDeviceMixin, SRTPlatform):
        """Native torch operations, torch_native attention, gloo between ranks."""

        _enum = PlatformEnum.OOT
        device_name = "cpu"
        device_type = "cpu"
        capabilities = PlatformCapabilities()

        def get_default_attention_backend(self) -> str:
            return "torch_native"

        def get_device(self, device_id: int = 0) -> str:
            return "cpu"  # the base class says str; SGLang splits it at the colon when --device is not given

        def get_dispatch_key_name(self) -> str:
            return "native"

        def is_pin_memory_available(self, device: Any = None) -> bool:
            return False

        def apply_server_args_defaults(self, server_args: Any) -> None:
            if server_args.sampling_backend is None:
                server_args.sampling_backend = "pytorch"
            server_args.disable_cuda_graph = True

        def init_backend(self) -> None:
            _use_absorbed_mla()

    return CpuEmulationPlatform


def _use_absorbed_mla() -> None:
    """torch_native attention serves the absorbed form of MLA only; SGLang has a registry for that choice."""
    from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import AttnForwardMethod

    AttentionBackendRegistry.register("torch_native", lambda attention, forward_batch: AttnForwardMethod.MLA)
