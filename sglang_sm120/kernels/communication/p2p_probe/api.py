"""Peer-to-peer memory of the GPUs of one host, tried out before anything relies on it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from sglang_sm120.errors import ContractError, UnsupportedError
from sglang_sm120.findings import failed
from sglang_sm120.kernels.communication.p2p_probe import config, kernel, pairs, report
from sglang_sm120.kernels.communication.p2p_probe.config import Sizes
from sglang_sm120.kernels.communication.p2p_probe.environment import read_environment
from sglang_sm120.kernels.communication.p2p_probe.findings import find
from sglang_sm120.kernels.communication.p2p_probe.report import AllToAll, Gpu, Pair, ProbeReport
from sglang_sm120.kernels.communication.p2p_probe.workers import Command, Workers, child_command

__all__ = ["SOURCE", "AllToAll", "Gpu", "Pair", "ProbeReport", "Sizes", "failed", "find", "probe"]

SOURCE = kernel.SOURCE
Progress = Callable[[str, int, int], None]


def probe(
    devices: Sequence[int] | None = None,
    *,
    time_limit_s: float = config.DEFAULT_TIME_LIMIT_S,
    sizes: Sizes | None = None,
    progress: Progress | None = None,
    command: Command = child_command,
) -> ProbeReport:
    """Whether these GPUs can share memory, how long it takes and how much of it a second.

    Every test runs in processes of its own, one a GPU. One that does not answer in time is killed with all that it
    started, the pair is reported as hung, and the other pairs are tested all the same; kernels that wait end by
    themselves before that. So a broken machine ends in a report, not in GPUs that spin. This process does not touch
    the GPUs.

    Args:
        devices: CUDA indices as in torch, two or more; all that are visible when None.
        time_limit_s: for each pair, and for all at once; starting the processes is not in it.
        sizes: how much is sent.
        progress: called before each step with what it is, its number and how many there are.
        command: what to run for a GPU, in place of child.py; for tests.

    Returns:
        ProbeReport: numbers, statuses and facts about the machine; `find` says what they mean. What is wrong with the
        machine is in there too, not raised.

    Raises:
        ContractError: a device twice or not there; time_limit_s not above 0. UnsupportedError: fewer than two GPUs.

    Numerics: latencies are of many rounds after a warm-up, by the GPU's clock; GB/s is the median of samples, between
    two events on the stream. What arrived is compared word by word.

    Source: kernel.cu, probe.cuh. Takes a second a pair, and what importing torch takes, once.
    """
    chosen = _devices(devices, command is child_command)
    if not time_limit_s > 0:
        raise ContractError(f"a time limit of {time_limit_s} s", "more than 0", f"{config.DEFAULT_TIME_LIMIT_S:.0f}")
    started = time.monotonic()
    steps = [(one, other) for i, one in enumerate(chosen) for other in chosen[i + 1 :]]
    tell = progress or (lambda what, number, total: None)
    results: list[Pair] = []
    total = len(steps) + 2
    with Workers(sizes or Sizes(), command) as workers:
        tell("starting a process for each GPU", 0, total)
        workers.start(chosen)
        for number, (one, other) in enumerate(steps):
            tell(f"GPUs {one} and {other}", 1 + number, total)
            results += pairs.one_pair(workers, one, other, time_limit_s)
        tell("all at once", total - 1, total)
        together = _together(workers, chosen, results, time_limit_s)
        facts = {device: dict(workers.facts.get(device, {})) for device in chosen}
    for of in facts.values():
        of.pop("handle", None)
    gpus = tuple(Gpu(index=device, **facts[device]) for device in chosen)
    return ProbeReport(
        gpus=gpus,
        pairs=tuple(results),
        all_to_all=together,
        environment=read_environment([gpu.pci_bus_id for gpu in gpus if gpu.pci_bus_id]),
        seconds=time.monotonic() - started,
    )


def _together(workers: Workers, devices: Sequence[int], results: Sequence[Pair], time_limit_s: float) -> AllToAll:
    if any(pair.status != report.OK for pair in results):
        return AllToAll(report.SKIPPED, "a pair had failed")
    if len(devices) > config.MAX_PEERS + 1:
        return AllToAll(report.SKIPPED, f"more than {config.MAX_PEERS + 1} GPUs")
    return pairs.all_at_once(workers, devices, time_limit_s)


def _devices(devices: Sequence[int] | None, real: bool) -> list[int]:
    """Checked against what is visible, without starting a GPU here."""
    count = torch.cuda.device_count() if real else None
    if count is not None and count < 2:
        there = "no CUDA GPU" if count == 0 else "one CUDA GPU"
        raise UnsupportedError(
            f"{there} is visible",
            "two or more on this host: peer-to-peer is between GPUs",
            "run it where they are, with a CUDA build of torch; see CUDA_VISIBLE_DEVICES",
        )
    chosen = list(range(count or 0)) if devices is None else list(devices)
    missing = [device for device in chosen if device < 0 or (count is not None and device >= count)]
    if missing or len(set(chosen)) != len(chosen) or len(chosen) < 2:
        visible = "" if count is None else f" of 0 to {count - 1}"
        raise ContractError(
            f"devices {', '.join(map(str, chosen)) or 'none'}", f"two or more different ones{visible}", "name those"
        )
    return chosen
