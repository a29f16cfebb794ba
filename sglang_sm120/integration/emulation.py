"""What lets SGLang build NVFP4 layers where there is no Blackwell GPU. Installed with --sm120-emulate only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def pretend_blackwell(original: Callable, *args: Any, **kwargs: Any) -> Any:
    """AROUND a constructor or a selector: it sees a Blackwell platform, and nothing else does."""
    from sglang.srt.runtime_context import override_platform

    with override_platform(is_blackwell=True):
        return original(*args, **kwargs)


def capability_suffices(original: Callable, config: Any, min_capability: int, error: bool = True) -> bool:
    """AROUND CompressedTensorsConfig._check_scheme_supported: SM120's 12.0 passes what it would pass there."""
    return min_capability <= 120


def allow_float32(result: list, _cls: type) -> list:
    """AFTER get_supported_act_dtypes."""
    import torch

    return result if torch.float32 in result else [*result, torch.float32]


def leave_routed_scaling_to_model(original: Callable, quant_method: Any, runner_backend: Any) -> bool:
    """AROUND _fuses_routed_scaling_factor_in_topk: off CUDA the models multiply their MoE output themselves."""
    return False
