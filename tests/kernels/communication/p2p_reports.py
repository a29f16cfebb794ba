"""Reports of probes as they would be of machines that were described: for findings, without a machine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from sglang_sm120.kernels.communication.p2p_probe.environment import Environment
from sglang_sm120.kernels.communication.p2p_probe.report import AllToAll, Gpu, Pair, ProbeReport

GENERATION_5 = 32 * 16 / 8 * 128 / 130
HEALTHY = {
    "status": "ok", "can_access": True, "opened": True, "push_right": True, "pull_right": True, "messages_right": True,
    "push_latency_us": 0.45, "pull_latency_us": 1.1, "message_latency_us": 1.6, "push_gb_s": 54.0, "pull_gb_s": 51.0,
}  # fmt: skip


def report(
    count: int = 2,
    change: Callable[[int, int], dict[str, Any]] | None = None,
    *,
    together: tuple[float, float] | AllToAll | None = (48.0, 44.0),
    environment: Environment | None = None,
    link_gb_s: float | None = GENERATION_5,
    **numbers: Any,
) -> ProbeReport:
    """Healthy GPUs on PCIe 5, less `numbers` for all pairs and what `change` gives for a pair.

    together: GB/s a GPU, pushed and pulled.
    """
    pairs = [
        Pair(source, target, **{**HEALTHY, **numbers, **(change(source, target) if change else {})})
        for source in range(count)
        for target in range(count)
        if source != target
    ]
    if isinstance(together, tuple):
        together = AllToAll("ok", "", (together[0],) * count, (together[1],) * count)
    return ProbeReport(
        gpus=tuple(Gpu(i, "Test GPU", f"0000:{i + 1:02x}:00.0", "12.0", link_gb_s, 16, 16) for i in range(count)),
        pairs=tuple(pairs),
        all_to_all=together or AllToAll(),
        environment=environment or Environment(),
    )


def narrow(of: ProbeReport, index: int, lanes: int) -> ProbeReport:
    """One GPU in a slot with fewer lanes."""
    gpus = tuple(
        replace(gpu, link_lanes=lanes, link_gb_s=GENERATION_5 * lanes / 16) if gpu.index == index else gpu
        for gpu in of.gpus
    )
    return replace(of, gpus=gpus)
