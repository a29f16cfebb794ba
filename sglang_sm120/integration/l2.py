"""--sm120-l2 in a scheduler process: which dense weights are fetched ahead, or kept, inside decode graphs."""

from __future__ import annotations

import atexit
import contextlib
import logging
from typing import Any

import torch

from sglang_sm120.errors import Sm120Error, UnsupportedError
from sglang_sm120.integration import l2_rules
from sglang_sm120.integration.l2_warmer import Warmer
from sglang_sm120.integration.l2_weights import LiveWeight, read_model
from sglang_sm120.integration.metrics import METRICS
from sglang_sm120.kernels.memory.l2_window import api as l2_window
from sglang_sm120.options import Sm120Options
from sglang_sm120.plan import l2 as planning

logger = logging.getLogger(__name__)

_CPU_L2_BYTES = 32 << 20  # stands for a GPU's where there is none


def prepare(model_runner: Any, options: Sm120Options) -> None:
    """Plan and hook what was asked for, once the target model is there and before a graph is captured.

    Raises: UnsupportedError, if it cannot be done: it was asked for by name.
    """
    if options.sm120_l2 == "off" or model_runner.is_draft_worker:
        return
    from sglang.srt.runtime_context import get_parallel

    l2_rules.require_decode_graphs(options)
    model = read_model(model_runner.model)
    if model is None:
        raise UnsupportedError(
            f"--sm120-l2 {options.sm120_l2}: {type(model_runner.model).__name__} has no decoder layers of known parts",
            "layers with attention, its output projection and an FFN under the names that SGLang's models give them",
            "drop --sm120-l2",
        )
    device = torch.device(model_runner.device)
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    layers = [layer.weights for layer in model.layers]
    pins = _set_aside(options, layers, device) if options.l2_persists else []
    plans = _plan_prefetches(options, layers, device, pins) if options.l2_prefetches else []
    warmer = Warmer(model, plans, pins, device)
    warmer.install()
    if METRICS.installed:
        METRICS.l2_bytes = warmer.bytes_of
    if get_parallel().tp_rank == 0:
        for line in planning.describe(plans, pins):
            logger.info("sglang-sm120: L2 in decode graphs of up to %d tokens: %s", planning.MAX_TOKENS, line)


def _set_aside(
    options: Sm120Options, layers: list[planning.Layer[LiveWeight]], device: torch.device
) -> list[LiveWeight]:
    """The weights that windows keep; the part of L2 that is theirs is given back when this process ends."""
    limits = l2_window.limits(device)
    most = limits.require_persisting()
    asked = options.l2_persist_bytes()
    if asked is not None and asked > most:
        raise UnsupportedError(
            f"--sm120-l2-persist-mb {options.sm120_l2_persist_mb}",
            f"at most {most >> 20}: what this GPU lets set aside of its {limits.l2_bytes >> 20} MB of L2",
            "lower it, or leave it out for the most",
        )
    restore = contextlib.ExitStack()
    granted = restore.enter_context(l2_window.set_aside(asked or most))
    atexit.register(_give_back, restore)
    pins = planning.pinned(
        layers,
        granted,
        lambda w: w.module is not None and w.tensor.dim() > 1 and w.num_bytes <= limits.window_max_bytes,
    )
    if not pins:
        restore.close()
        raise UnsupportedError(
            f"--sm120-l2 {options.sm120_l2}: no projection fits into the {granted} bytes of L2 that are set aside",
            "room for one",
            "raise --sm120-l2-persist-mb, or use --sm120-l2 prefetch",
        )
    return pins


def _give_back(restore: contextlib.ExitStack) -> None:
    with contextlib.suppress(Sm120Error):  # the device may be gone by then, and the limit with it
        restore.close()


def _plan_prefetches(
    options: Sm120Options,
    layers: list[planning.Layer[LiveWeight]],
    device: torch.device,
    pins: list[LiveWeight],
) -> list[planning.Phases[LiveWeight]]:
    budgets = options.l2_prefetch_bytes()
    if budgets is None:
        l2_bytes = _CPU_L2_BYTES if device.type == "cpu" else l2_window.limits(device).l2_bytes
        budgets = planning.default_prefetch_bytes(l2_bytes)
    plans = planning.prefetches(layers, budgets, without=(weight.name for weight in pins))
    if not any(plans):
        raise UnsupportedError(
            f"--sm120-l2 {options.sm120_l2}: nothing to fetch in the phases that --sm120-l2-prefetch-mb leaves",
            "a size for a phase in which this model reads dense weights, of under attention, behind it, behind the FFN",
            "give one number for all three, or leave it out",
        )
    return plans
