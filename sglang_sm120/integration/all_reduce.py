"""--sm120-all-reduce in a scheduler process: set up once when the model is built, watched while it serves."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import torch

from sglang_sm120.errors import Sm120Error, UnsupportedError
from sglang_sm120.integration import all_reduce_rules as rules
from sglang_sm120.integration.all_reduce_plane import Plane
from sglang_sm120.integration.all_reduce_setup import connect
from sglang_sm120.integration.all_reduce_slot import Slot, go_first
from sglang_sm120.integration.all_reduce_stock import follow
from sglang_sm120.options import Sm120Options

logger = logging.getLogger(__name__)

WATCH_S = 0.5
"""Between two looks at the kernels' status, a word of host memory."""


class _State:
    """Of this process: what serves, once it was settled whether anything does."""

    def __init__(self) -> None:
        self.settled = False  # a failure is kept too: all ranks would have to try again at the same moment
        self.plane: Plane | None = None
        self.watchdog: Watchdog | None = None


_state = _State()


def plane() -> Plane | None:
    """What serves in this process, or None: SGLang's own path does."""
    return _state.plane


def prepare(model_runner: Any, options: Sm120Options) -> None:
    """Set up what was asked for, once the target model is there and before a graph is captured. A collective.

    A draft model shares it. Raises: UnsupportedError, if a choice by name cannot serve; ConfigError, if a profile that
    was named does not fit; PeerLostError.
    """
    if _state.settled or model_runner.is_draft_worker:
        return
    _state.settled = True
    from sglang.srt.arg_groups.overrides import resolving_view
    from sglang.srt.runtime_context import get_parallel

    view, group = resolving_view(model_runner.server_args), get_parallel().tp_group
    if options.sm120_all_reduce == "stock":
        rules.require_stock_is_on(options, group)
    if not rules.wanted(options, view):
        return
    device = torch.device(model_runner.device)
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
        if not options.sm120_emulate and torch.cuda.get_device_capability(device)[0] != 12:
            logger.debug("sglang-sm120: all-reduce left to SGLang: not an SM120 GPU")
            return
    named = rules.by_name(options)
    try:
        obstacle = rules.uncovered(options, view)
        if obstacle is not None:
            raise obstacle.error(options) if named else UnsupportedError(obstacle.found, obstacle.needed, obstacle.fix)
        ours = connect(
            group,
            options.sm120_all_reduce,
            profile=options.sm120_all_reduce_profile,
            hidden_size=model_runner.model_config.hidden_size,
            dtype=model_runner.dtype,
            device=device,
        )
    except UnsupportedError as error:
        if named:
            raise
        if group.rank_in_group == 0:
            logger.info("sglang-sm120: all-reduce left to SGLang: %s; needed: %s", error.found, error.needed)
        return
    _serve(ours, group, first=options.sm120_all_reduce in rules.NAMED)


def _serve(ours: Plane, group: Any, *, first: bool) -> None:
    """first: before SGLang's other ways, for what was asked for by name; else only what would go to NCCL."""
    _state.plane = ours
    _state.watchdog = Watchdog(ours.check)
    _state.watchdog.start()
    inner = group.pcie_ipc_comm
    if inner is None:  # else the user has told SGLang to make it, and it serves all that it takes
        inner = follow(ours.profile, group)
        if inner is not None and group.ca_comm is not None:
            go_first(inner.should_pcie_ipc_ar, group.ca_comm)
    group.pcie_ipc_comm = Slot(ours, inner, before_close=stop)
    if first and group.ca_comm is not None:
        go_first(ours.takes, group.ca_comm)
    if group.rank_in_group == 0:
        logger.info(
            "sglang-sm120: all-reduce over %d ranks: %s; the rest is SGLang's", group.world_size, ours.describe()
        )


def stop() -> None:
    """Nothing is served from here on; before the memory is given back."""
    if _state.watchdog is not None:
        _state.watchdog.stop()
    _state.plane = _state.watchdog = None


class Watchdog(threading.Thread):
    """Looks whether a kernel has given up on a peer, and then ends the server: there is nothing left to compute with.

    The main thread may be waiting for that kernel without an end, or see an error of CUDA that does not say which.
    """

    def __init__(self, check: Callable[[], None], *, interval_s: float = WATCH_S) -> None:
        super().__init__(name="sglang-sm120-all-reduce", daemon=True)
        self._check, self._interval_s = check, interval_s
        self._parent = os.getppid()
        self._stopped = threading.Event()

    def run(self) -> None:
        while not self._stopped.wait(self._interval_s):
            try:
                self._check()
            except Sm120Error as error:
                logger.error("%s", error)
                self._end_server()
                return

    def stop(self) -> None:
        self._stopped.set()
        if self is not threading.current_thread():
            self.join()

    def _end_server(self) -> None:
        """As SGLang's own watchdog does: its launcher ends every process when a child sends it SIGQUIT."""
        if os.getppid() == self._parent:  # else the launcher is gone, and with it the server
            os.kill(self._parent, signal.SIGQUIT)
