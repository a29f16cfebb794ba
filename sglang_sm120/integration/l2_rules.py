"""Which servers --sm120-l2 is for: from settings alone, before weights are read.

It is off unless asked for, so whatever stands in its way stops the server.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

from sglang_sm120.errors import UnsupportedError
from sglang_sm120.integration.settings import in_use
from sglang_sm120.options import Sm120Options
from sglang_sm120.plan.l2 import MAX_TOKENS

_DROP = "drop --sm120-l2"
_PLACE = "weights that stay where they are"
_ONE_BATCH = "one batch at a time: parts of two run side by side with this option"
_NO_LORA = "projections that read their own weights only: adapters lie elsewhere and change"
_FLAGS = {
    "--enable-eplb": _PLACE,
    "--elastic-ep-backend": _PLACE,
    "--cpu-offload-gb": _PLACE,
    "--offload-group-size": _PLACE,
    "--enable-two-batch-overlap": _ONE_BATCH,
    "--enable-single-batch-overlap": _ONE_BATCH,
    "--enable-pdmux": _ONE_BATCH,
    "--enable-lora": _NO_LORA,
    "--lora-paths": _NO_LORA,
    "--enable-torch-compile": "layers that run as they are: compiled ones do not say when attention starts",
}
_DEDUP = "SGLANG_ENABLE_CUDA_GRAPH_DEDUP"


def require(options: Sm120Options, view: Any, environ: Mapping[str, str] | None = None) -> None:
    """Raises UnsupportedError for settings that --sm120-l2 cannot serve. view: SGLang's resolved settings."""
    if options.sm120_l2 == "off":
        return
    for found, needed, fix in _obstacles(options, view, os.environ if environ is None else environ):
        raise UnsupportedError(f"--sm120-l2 {options.sm120_l2}: {found}", needed, f"{fix}, or {_DROP}")


def _obstacles(options: Sm120Options, view: Any, environ: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    for flag, given in in_use(view, _FLAGS):
        yield given, _FLAGS[flag], f"drop {flag}"
    if view.startup_weight_load_mode != "serial":
        mode = view.startup_weight_load_mode
        yield f"--startup-weight-load-mode {mode}", "weights that are there when graphs are captured", "drop it"
    if options.l2_persists and environ.get(_DEDUP, "0").lower() in ("1", "true", "yes", "on"):
        needed = "graphs that are kept apart: the merging does not look at windows"
        yield f"{_DEDUP}={environ[_DEDUP]}", needed, f"unset {_DEDUP}"
    if options.l2_persists and _on_cpu():
        yield "this machine has no CUDA GPU", "a GPU, whose L2 can keep something", "use --sm120-l2 prefetch"


def require_decode_graphs(options: Sm120Options) -> None:
    """Raises UnsupportedError unless decode runs as whole CUDA graphs, one of them small enough.

    On the CPU nothing is captured.
    """
    if options.sm120_l2 == "off" or _on_cpu():
        return
    from sglang.srt.model_executor.cuda_graph_config import Backend
    from sglang.srt.runtime_context import get_exec

    decode = get_exec().graph.cuda_graph_config.decode
    if decode.backend != Backend.FULL:
        raise UnsupportedError(
            f"--sm120-l2 {options.sm120_l2}: CUDA graphs of decode are {decode.backend!r}",
            "decode as whole CUDA graphs (full): what they fetch is captured with them",
            f"leave decode's graphs on, in their default form, or {_DROP}",
        )
    if decode.bs and min(decode.bs) > MAX_TOKENS:
        raise UnsupportedError(
            f"--sm120-l2 {options.sm120_l2}: the smallest decode graph is of {min(decode.bs)} requests",
            f"graphs of at most {MAX_TOKENS} tokens: larger ones fetch and keep nothing",
            f"capture smaller ones too (--cuda-graph-bs-decode), or {_DROP}",
        )


def _on_cpu() -> bool:
    from sglang_sm120.testing.cpu_platform import is_active

    return is_active()
