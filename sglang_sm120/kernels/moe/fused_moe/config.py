"""Which kernel serves a batch: a pure function of shapes."""

from __future__ import annotations

from sglang_sm120.kernels.moe.w4a16 import LayerShape

NATIVE_BACKENDS = ("decode", "middle", "prefill")
BACKENDS = ("reference", *NATIVE_BACKENDS)

# Mean rows an expert up to which decode wins over middle in W4A16. measured_h200.json: on an H200 decode wins at
# 2 and 4, middle at 8; not measured on SM120.
DECODE_MEAN_ROWS = 6


def choose_backend(shape: LayerShape, num_slots: int, numerics: str) -> tuple[str, ...]:
    """Backends in the order in which they are tried; the first that covers the layer serves it.

    W4A4 has one kernel for all sizes: quantised activations cost a pass that few rows do not pay back, and so W4A16
    is what to ask for where decoding matters.
    """
    if numerics == "w4a4":
        return ("prefill", "reference")
    few = num_slots <= DECODE_MEAN_ROWS * shape.num_experts
    return ("decode" if few else "middle", "prefill", "reference")
