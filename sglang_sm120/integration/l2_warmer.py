"""What fetches and keeps weights while a decode graph is captured: torch's own module hooks.

At their calls a phase begins, or a window opens and ends. They do nothing but while a decode graph is captured (on the
CPU, where none is, while a decode batch runs). Addresses are read at that moment: they are those that the graph's own
kernels read, and what makes these invalid makes the graph so.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from sglang_sm120.errors import UnsupportedError
from sglang_sm120.integration.l2_weights import LiveModel, LiveWeight
from sglang_sm120.kernels.memory.l2_prefetch.api import Prefetcher
from sglang_sm120.kernels.memory.l2_window import api as l2_window
from sglang_sm120.plan import l2 as planning

logger = logging.getLogger(__name__)

_REPORT = "drop --sm120-l2, and report the model: its calls are not those that this package knows"


class Warmer:
    """The hooks of one model.

    Args:
        model: its layers. plans: what each layer's phases fetch, or none. pins: what windows keep. device: of both.

    Raises (while a graph is captured, so that the server stops): UnsupportedError, if the model never comes by the
    moment of a phase that fetches something, or by any weight that a window is to keep.
    """

    def __init__(
        self,
        model: LiveModel,
        plans: Sequence[planning.Phases[LiveWeight]],
        pins: Sequence[LiveWeight],
        device: torch.device,
    ) -> None:
        self._model, self._plans, self._pins = model, plans, pins
        self._prefetcher = Prefetcher(device) if plans else None
        self._on_cpu = device.type == "cpu"
        self._planned = {phase for plan in plans for phase in plan}
        self._bytes: dict[int, int] = {}  # rows of a graph -> what one replay asks for
        self._active = False
        self._num_tokens = self._asked = 0
        self._begun: set[str] = set()
        self._kept: set[str] = set()
        self._reported: set[str] = set()

    def install(self) -> None:
        """Hang the hooks on the model. Once: they stay as long as it does."""
        self._model.backbone.register_forward_pre_hook(self._begin, with_kwargs=True)
        self._model.backbone.register_forward_hook(self._end, always_call=True)
        for layer, plan in zip(self._model.layers, self._plans, strict=False):
            for phase, parts in plan.items():
                fork = partial(self._fork, phase, parts)
                if phase == planning.ATTENTION:
                    for core in layer.core:
                        core.register_forward_pre_hook(fork)
                else:
                    (layer.output if phase == planning.FFN else layer.ffn).register_forward_hook(fork)
        for weight in self._pins:
            assert weight.module is not None  # `pinned` asked for one
            weight.module.register_forward_pre_hook(partial(self._open_window, weight))
            weight.module.register_forward_hook(self._end_window, always_call=True)

    def bytes_of(self, rows: int) -> int:
        """What one replay of the graph of so many rows of this rank asks L2 for; 0 where there is none."""
        return self._bytes.get(rows, 0)

    def _begin(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        batch = next((value for value in (*args, *kwargs.values()) if hasattr(value, "forward_mode")), None)
        self._asked = 0
        self._begun.clear()
        self._kept.clear()
        self._active = (
            batch is not None
            and batch.forward_mode.is_cuda_graph()
            and 0 < len(batch.input_ids) <= planning.MAX_TOKENS
            and (self._on_cpu or torch.cuda.is_current_stream_capturing())
        )
        if batch is not None and self._active:
            self._num_tokens = len(batch.input_ids)

    def _end(self, _module: nn.Module, _args: Any, output: Any) -> None:
        """output: None if the pass failed, whose error is the one to be seen."""
        if not self._active:
            return
        self._active = False
        if self._prefetcher is not None:
            self._prefetcher.join()
        if output is not None:
            self._bytes[self._num_tokens] = self._asked
            self._require_all()

    def _fork(self, phase: str, parts: tuple[planning.Part[LiveWeight], ...], *_call: Any) -> None:
        if self._active and self._prefetcher is not None:
            self._begun.add(phase)
            self._asked += self._prefetcher.fork([part.weight.range(part.num_bytes) for part in parts])

    def _open_window(self, weight: LiveWeight, *_call: Any) -> None:
        if self._active:
            self._kept.add(weight.name)
            pointer, num_bytes = weight.range(weight.num_bytes)
            self._set_window(l2_window.AccessPolicyWindow(pointer, num_bytes))

    def _end_window(self, *_call: Any) -> None:
        if self._active:
            self._set_window(None)

    def _set_window(self, window: l2_window.AccessPolicyWindow | None) -> None:
        l2_window.set_stream_window(torch.cuda.current_stream().cuda_stream, window)

    def _require_all(self) -> None:
        """Behind a whole pass: what was asked for by name has to be in the graph."""
        missing = [phase for phase in planning.PHASES if phase in self._planned - self._begun]
        if missing:
            name = type(self._model.backbone).__name__
            raise UnsupportedError(
                f"--sm120-l2: a pass of {name} never came by what is fetched {planning.PHASE_TEXT[missing[0]]}",
                "layers that call attention, its output projection and their FFN as modules",
                _REPORT,
            )
        unread = [weight.name for weight in self._pins if weight.name not in self._kept]
        if self._pins and len(unread) == len(self._pins):
            raise UnsupportedError(
                f"--sm120-l2: none of the {len(unread)} weights that L2 is to keep is read by a call of its module, "
                f"{unread[0]} for one",
                "projections that are called as modules",
                _REPORT,
            )
        for name in unread:
            if name not in self._reported:
                self._reported.add(name)
                logger.warning("sglang-sm120: L2: %s is not kept: it is read without a call of its module", name)
