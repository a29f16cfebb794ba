"""FlashInfer's b12x GEMM for dense NVFP4 layers, as `--fp4-gemm-backend flashinfer_b12x`. Not run on SM120.

`flashinfer.mm_fp4` has a backend "b12x" for SM120 and SM121 (its own kernel, not the package `b12x`) that reads weights
and scales as its CUTLASS backend does, so everything that SGLang does for flashinfer_cutlass holds: padding, swizzled
scales, autotuning. Only the name that reaches mm_fp4 differs. `auto` stays SGLang's choice, flashinfer_cutlass: nothing
measured on SM120 says which one is faster.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable
from typing import Any

from sglang_sm120.errors import UnsupportedError

logger = logging.getLogger(__name__)

BACKEND = "flashinfer_b12x"
"""As the patched SGLang calls it too."""

MIN_CUDA = (12, 9)
"""FlashInfer 0.7.2's `_MIN_B12X_CUDA_VERSION`."""


class B12xGemm:
    """Stands for SGLang's Fp4GemmRunnerBackend.FLASHINFER_CUTLASS in all but its name and what mm_fp4 is told.

    SGLang calls methods of the backend and reads `value`; it never looks at its type.
    """

    value = BACKEND

    def __init__(self, cutlass: Any) -> None:
        self._cutlass = cutlass

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cutlass, name)

    def get_flashinfer_backend(self) -> str:
        """`mm_fp4(backend=...)`."""
        return "b12x"


def add_choice() -> None:
    """Let SGLang's parser take the name, once. A patched SGLang has it already."""
    from sglang.srt.arg_groups.choices import FP4_GEMM_RUNNER_BACKEND_CHOICES, add_fp4_gemm_runner_backend_choices

    if BACKEND not in FP4_GEMM_RUNNER_BACKEND_CHOICES:
        add_fp4_gemm_runner_backend_choices([BACKEND])


def initialize(original: Callable[[], None]) -> None:
    """AROUND initialize_fp4_gemm_config, before any weight is read.

    Raises: UnsupportedError if b12x was asked for and cannot be used: a name is never replaced by another one.
    """
    from sglang.srt.layers.quantization import fp4_utils

    if fp4_utils.get_exec().kernel.fp4_gemm_runner_backend != BACKEND:
        original()
        return
    reason = unavailable_reason()
    if reason is not None:
        raise UnsupportedError(
            f"--fp4-gemm-backend {BACKEND}: {reason}",
            "an SM120 or SM121 GPU, CUDA 12.9 or later, and the FlashInfer that SGLang pins",
            "drop --fp4-gemm-backend, which leaves the choice to SGLang (flashinfer_cutlass on SM120)",
        )
    fp4_utils.FP4_GEMM_RUNNER_BACKEND = B12xGemm(fp4_utils.Fp4GemmRunnerBackend.FLASHINFER_CUTLASS)
    logger.info("sglang-sm120: dense NVFP4 GEMMs by FlashInfer's b12x backend, not run on SM120 by us")


def unavailable_reason() -> str | None:
    """Why this machine cannot use it, or None. Heavy: for scheduler processes."""
    import torch
    from sglang.srt.runtime_context import get_platform

    from sglang_sm120.device import current_device
    from sglang_sm120.runners.handover import flashinfer_reason

    if not get_platform().is_sm120:
        return f"this machine has {current_device().describe()}"
    cuda = tuple(int(part) for part in (torch.version.cuda or "0.0").split(".")[:2])
    if cuda < MIN_CUDA:
        return f"torch is built for CUDA {torch.version.cuda}"
    if importlib.util.find_spec("cutlass") is None:
        return "its kernel is written in the CuTe DSL, and nvidia-cutlass-dsl is not installed"
    return flashinfer_reason()
