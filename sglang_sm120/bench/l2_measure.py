"""The first measurement of `bench l2`: the step of a stack of layers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sglang_sm120.bench.l2_cases import CANDIDATES, Batch, Linear, Stack
from sglang_sm120.bench.l2_device import L2Device
from sglang_sm120.bench.l2_options import L2BenchOptions
from sglang_sm120.bench.timing import Replay, interleaved_us
from sglang_sm120.errors import Sm120Error, UnsupportedError


@torch.no_grad()
def measure_step(
    stack: Stack, batch: Batch, wait_us: float, how: dict[str, object], options: L2BenchOptions, on: L2Device
) -> dict[str, Any]:
    """One stack, number of tokens and wait: each candidate in several captures, all in turn, as the report reads them.

    Each capture's output is filled with NaN, replayed, and held against that of the first graph without anything,
    before it is timed and again behind it. One that differs is named and has no time. L2 is set aside while a
    candidate that wants it is captured, checked or timed, and at no other time.
    """
    rows: list[dict[str, Any]] = [{"candidate": name, "captures": []} for name in CANDIDATES]
    outputs: dict[str, Tensor] = {}
    replays: dict[str, Replay] = {}
    expected: Tensor | None = None

    for number in range(options.captures):
        for row in rows:
            if "failure" in rows[0]:
                break  # nothing to compare with
            key = f"{row['candidate']} {number}"
            if not _is_whole(row):
                continue
            if CANDIDATES[row["candidate"]].set_aside and on.windows_reason is not None:
                row["not_covered"] = on.windows_reason
                continue
            try:
                output = torch.empty_like(batch.hidden)
                with _set_aside(key, on) as set_aside_bytes:
                    replay, found = _capture(
                        stack, batch, wait_us, how, row["candidate"], output, set_aside_bytes, on, warm=bool(outputs)
                    )
                    row |= found
                    output.fill_(float("nan"))
                    replay()
                if expected is None:
                    expected = output.clone()
                    if not torch.isfinite(expected).all():
                        row["failure"] = "WRONG, not timed: the output is not finite"
                        continue
                if not torch.equal(output, expected):
                    row["failure"] = f"WRONG, not timed: capture {number} differs from off"
                    continue
                outputs[key], replays[key] = output, replay
            except Exception as error:  # one candidate that breaks does not cost the others their times
                if isinstance(error, UnsupportedError) and CANDIDATES[row["candidate"]].set_aside:
                    row["not_covered"] = error.found
                else:
                    row["failure"] = f"failed: {one_line(error)}"
                on.settle()

    if "failure" in rows[0]:
        replays = {}
    replays = {key: replay for key, replay in replays.items() if _is_whole(rows[_index(key)])}
    for key, samples_us in interleaved_us(on.timer, replays, options.repeat, lambda key: _set_aside(key, on)).items():
        row = rows[_index(key)]
        if expected is None or not torch.equal(outputs[key], expected):
            row["failure"] = "WRONG: the timed replays left something else than off"
            row["captures"] = []
        elif "failure" not in row:
            row["captures"].append([time_us / len(stack.layers) for time_us in samples_us])
    return {
        "model": stack.shape.name,
        "tokens": len(batch.hidden),
        "wait_us": wait_us,
        "layers": len(stack.layers),
        "reuse_bytes": stack.reuse_bytes(batch),
        "rows": rows,
    }


def _capture(
    stack: Stack,
    batch: Batch,
    wait_us: float,
    how: dict[str, object],
    name: str,
    output: Tensor,
    set_aside_bytes: int,
    on: L2Device,
    *,
    warm: bool,
) -> tuple[Replay, dict[str, Any]]:
    """One candidate's graph, which leaves its hidden states in `output`, and what the row says of it."""
    candidate, asked = CANDIDATES[name], 0
    windows = stack.windows(candidate.window, set_aside_bytes)
    linear = _under_windows(windows, on)
    prefetcher = on.prefetcher if candidate.phases else None

    def calls() -> None:
        nonlocal asked
        x, asked = stack.step(
            batch, lambda: on.wait(wait_us), prefetcher, candidate.phases, how, linear, windows.keys()
        )
        output.copy_(x)

    if not warm:
        calls()  # kernels are loaded before the first capture; all candidates launch the same ones
    found: dict[str, Any] = {}
    replay = on.timer.capture(calls)
    found["prefetched_bytes"] = asked / len(stack.layers)
    if candidate.set_aside:
        found["set_aside_bytes"] = set_aside_bytes
    if windows:
        found["windows"] = len(windows)
        found["hit_ratio"] = next(iter(windows.values()))
    return replay, found


def _under_windows(windows: Mapping[int, float], on: L2Device) -> Linear:
    """F.linear, under a window where the weight has one."""

    def linear(x: Tensor, weight: Tensor) -> Tensor:
        ratio = windows.get(weight.data_ptr())
        if ratio is None:
            return F.linear(x, weight)
        with on.window(weight, ratio):
            return F.linear(x, weight)

    return linear


@contextmanager
def _set_aside(key: str, on: L2Device) -> Iterator[int]:
    """As much of L2 as can be, if this candidate wants it; what was granted."""
    if not CANDIDATES[_name(key)].set_aside:
        yield 0
        return
    with on.set_aside(on.max_set_aside_bytes) as granted:
        yield granted
        on.reset_persisting()  # waits: a set-aside ends at once


def _is_whole(row: dict[str, Any]) -> bool:
    return "failure" not in row and "not_covered" not in row


def _name(key: str) -> str:
    return key.split(" ", maxsplit=1)[0]


def _index(key: str) -> int:
    return list(CANDIDATES).index(_name(key))


def one_line(error: BaseException) -> str:
    """One line."""
    text = error.found if isinstance(error, Sm120Error) else str(error)
    return " ".join(f"{type(error).__name__}: {text}".split())[:300]
