"""--sm120-l2 in a scheduler process: dense weights fetched ahead, or kept, inside decode graphs.

Hangs on torch's own module hooks, at whose calls a phase begins; they do nothing but while a decode graph is captured
(on the CPU, where none is, while a decode batch runs). The addresses are those that the graph's own kernels read: what
makes these invalid makes the graph so.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
from functools import partial
from typing import Any

import torch
from torch import nn

from sglang_sm120.errors import Sm120Error, UnsupportedError
from sglang_sm120.integration import l2_rules
from sglang_sm120.integration.l2_weights import LiveModel, LiveWeight, read_model
from sglang_sm120.integration.metrics import METRICS
from sglang_sm120.kernels.memory.l2_prefetch.api import Prefetcher
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
    most = limits.persisting_max_bytes
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
    return planning.prefetches(layers, budgets, without=(weight.name for weight in pins))


class Warmer:
    """The hooks of one model.

    Args:
        model: its layers. plans: what each layer's phases fetch, or none. pins: what windows keep. device: of both.
    """

    def __init__(
        self,
        model: LiveModel,
        plans: list[planning.Phases[LiveWeight]],
        pins: list[LiveWeight],
        device: torch.device,
    ) -> None:
        self._model, self._plans, self._pins = model, plans, pins
        self._prefetcher = Prefetcher(device) if plans else None
        self._on_cpu = device.type == "cpu"
        self._bytes: dict[int, int] = {}  # tokens of a graph -> what one replay asks for
        self._active = False
        self._asked = 0

    def install(self) -> None:
        """Hang the hooks on the model. Once: they stay as long as it does."""
        self._model.backbone.register_forward_pre_hook(self._begin, with_kwargs=True)
        self._model.backbone.register_forward_hook(self._end)
        for layer, plan in zip(self._model.layers, self._plans, strict=False):
            ranges = {phase: [(part.weight.pointer, part.num_bytes) for part in parts] for phase, parts in plan.items()}
            if planning.ATTENTION in ranges:
                for core in layer.core:
                    core.register_forward_pre_hook(partial(self._fork, ranges[planning.ATTENTION]))
            if planning.FFN in ranges:
                layer.output.register_forward_hook(partial(self._fork, ranges[planning.FFN]))
            if planning.NEXT in ranges:
                layer.ffn.register_forward_hook(partial(self._fork, ranges[planning.NEXT]))
        for weight in self._pins:
            assert weight.module is not None  # `pinned` asked for one
            window = l2_window.AccessPolicyWindow(weight.pointer, weight.num_bytes)
            weight.module.register_forward_pre_hook(partial(self._set_window, window))
            weight.module.register_forward_hook(partial(self._set_window, None))

    def bytes_of(self, num_tokens: int) -> int:
        """What one replay of the graph of so many tokens asks L2 for; 0 where there is none."""
        return self._bytes.get(num_tokens, 0)

    def _begin(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        batch = next((value for value in (*args, *kwargs.values()) if hasattr(value, "forward_mode")), None)
        self._asked = 0
        self._active = (
            batch is not None
            and batch.forward_mode.is_cuda_graph()
            and 0 < len(batch.input_ids) <= planning.MAX_TOKENS
            and (self._on_cpu or torch.cuda.is_current_stream_capturing())
        )
        if batch is not None and self._active:
            self._num_tokens = len(batch.input_ids)

    def _end(self, _module: nn.Module, _args: Any, _output: Any) -> None:
        if self._active:
            self._active = False
            self._bytes[self._num_tokens] = self._asked
            if self._prefetcher is not None:
                self._prefetcher.join()

    def _fork(self, ranges: list[tuple[int, int]], *_call: Any) -> None:
        if self._active and self._prefetcher is not None:
            self._asked += self._prefetcher.fork(ranges)

    def _set_window(self, window: l2_window.AccessPolicyWindow | None, *_call: Any) -> None:
        if self._active:
            l2_window.set_stream_window(torch.cuda.current_stream().cuda_stream, window)
