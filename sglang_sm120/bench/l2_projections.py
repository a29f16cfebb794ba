"""The second measurement of `bench l2`: each dense projection alone, by where L2 finds its weight."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sglang_sm120.bench.l2_device import Kernel, L2Device
from sglang_sm120.bench.l2_measure import one_line
from sglang_sm120.bench.l2_options import CACHES
from sglang_sm120.errors import UnsupportedError
from sglang_sm120.kernels.memory.l2_window.api import hit_ratio

PAST_BYTES = 40 << 20
"""What is streamed past a prefetched projection before it is used: of the size of a token's routed experts."""

_PROFILED, _WARM_UP = 20, 3
_BEGIN_US = 1.0
_LEAST_WAIT_US, _LEAST_GB_S = 30.0, 1000.0  # of a wait for a prefetch: no GPU that this is for reads more slowly
_NOT_THE_PROJECTION = ("at::native", "spin_kernel", "l2_prefetch", "Memset", "Memcpy")
_WAIT_KERNEL = "spin_kernel"


@dataclass(frozen=True)
class Case:
    """One way to find a projection's weight. window: None, "one" or "share", its hit ratio."""

    label: str
    prefetched: bool = False
    past: bool = False
    set_aside: bool = False
    window: str | None = None
    hot: bool = False


CASES = (
    Case("cold"),
    Case("prefetched", prefetched=True),
    Case("prefetched, 40 MB past", prefetched=True, past=True),
    Case("set-aside: prefetched, 40 MB past", prefetched=True, past=True, set_aside=True),
    Case("set-aside: window, hit ratio 1", set_aside=True, window="one"),
    Case("set-aside: window, hit ratio set-aside / all", set_aside=True, window="share"),
    Case("set-aside: prefetched, 40 MB past, window", prefetched=True, past=True, set_aside=True, window="one"),
    Case("hot", hot=True),
)


@torch.no_grad()
def measure_projection(
    name: str,
    weight: Tensor,
    hidden: Tensor,
    how: dict[str, object],
    streamed: Tensor,
    working_set_bytes: int,
    on: L2Device,
) -> dict[str, Any]:
    """A dense projection alone, in each of CASES.

    Args:
        name: of the projection.
        weight: bfloat16 [out, in].
        hidden: bfloat16 [T, in].
        how: of `prefetch`; without a bound: the whole weight is fetched.
        streamed: int32, CACHES times L2 or more; read before every use.
        working_set_bytes: of all projections of a step: what a set-aside is shared by if each has a window.
        on: the GPU.

    Returns:
        What the report reads: for each case the times of the projection's kernels, and of the stream before it.
    """
    wait_us = _LEAST_WAIT_US + weight.nbytes / _LEAST_GB_S / 1e3
    rows: list[dict[str, Any]] = []
    expected: Tensor | None = None  # of the cold one
    for case in CASES:
        row: dict[str, Any] = {"case": case.label}
        rows.append(row)
        if case.set_aside and on.windows_reason is not None:
            row["not_covered"] = on.windows_reason
            continue
        last: list[Tensor] = []
        try:
            on.reset_persisting()  # what earlier prefetches kept is in no case's way
            with ExitStack() as restored:
                if case.set_aside:
                    row["set_aside_bytes"] = restored.enter_context(on.set_aside(on.max_set_aside_bytes))
                    restored.callback(on.reset_persisting)
                if case.window is not None:
                    share = hit_ratio(working_set_bytes, row["set_aside_bytes"])
                    row["hit_ratio"] = 1.0 if case.window == "one" else share
                calls = _calls(case, weight, hidden, how, streamed, wait_us, row.get("hit_ratio"), last, on)
                if expected is None:
                    calls()  # kernels are loaded before the first capture
                replay = on.timer.capture(calls)
                for _ in range(_WARM_UP):
                    replay()
                last[0].fill_(float("nan"))
                kernels = on.profile(replay, _PROFILED)
            if expected is None:
                expected = last[0].clone()
            if not torch.equal(last[0], expected):
                row["failure"] = "WRONG, not timed: differs from the cold one, or is not a number"
            else:
                row |= split(kernels, _PROFILED, streams=not case.hot)
        except UnsupportedError as reason:
            row["not_covered"] = reason.found
            on.settle()
        except Exception as error:  # one case that breaks does not cost the others their times
            row["failure"] = f"failed: {one_line(error)}"
            on.settle()
    return {
        "name": name,
        "shape": list(weight.shape),
        "bytes": weight.nbytes,
        "tokens": len(hidden),
        "wait_us": wait_us,
        "rows": rows,
    }


def _calls(
    case: Case,
    weight: Tensor,
    hidden: Tensor,
    how: dict[str, object],
    streamed: Tensor,
    wait_us: float,
    window_ratio: float | None,
    last: list[Tensor],
    on: L2Device,
) -> Callable[[], None]:
    """Two waits, by which `split` knows where it is: one at the start, one before the projection."""

    def calls() -> None:
        on.wait(_BEGIN_US)
        if case.hot:
            F.linear(hidden, weight)
        else:
            streamed.sum()
        if case.prefetched:
            on.prefetcher.fork([(weight.data_ptr(), weight.nbytes)], **how)
        on.wait(wait_us)
        if case.past:
            streamed[: PAST_BYTES // streamed.element_size()].sum()
        with ExitStack() as restored:
            if window_ratio is not None:
                restored.enter_context(on.window(weight, window_ratio))
            last[:] = [F.linear(hidden, weight)]
        on.prefetcher.join()

    return calls


def split(kernels: list[Kernel], replays: int, *, streams: bool) -> dict[str, Any]:
    """Microseconds of the projection's kernels in each replay, and of the stream before it.

    Args:
        kernels: of all replays, in the order of their starts.
        replays: how many.
        streams: whether something is streamed before the projection.

    Returns:
        "samples_us", "stream_us" (empty without streams), "waited_us": the median of the wait before the projection,
        "kernels": the names of the projection's; or "failure".
    """
    parts: list[list[Kernel]] = []  # of what follows each wait
    waits_us: list[float] = []
    for kernel in kernels:
        if _WAIT_KERNEL in kernel.name:
            parts.append([])
            waits_us.append(kernel.duration_us)
        elif parts:
            parts[-1].append(kernel)
    if len(parts) != 2 * replays:
        return {"failure": f"failed: {len(parts)} waits in a profile that has {2 * replays}"}
    used = [[kernel for kernel in part if _is_projection(kernel)] for part in parts[1::2]]
    if not all(used):
        names = sorted({kernel.name[:80] for part in parts for kernel in part})
        return {"failure": f"failed: no kernel of the projection in the profile, but {names}"}
    before = [[kernel for kernel in part if "at::native" in kernel.name] for part in parts[::2]]
    return {
        "samples_us": [sum(kernel.duration_us for kernel in part) for part in used],
        "stream_us": [sum(kernel.duration_us for kernel in part) for part in before] if streams else [],
        "waited_us": statistics.median(waits_us[1::2]),
        "kernels": sorted({kernel.name[:120] for part in used for kernel in part}),
    }


def _is_projection(kernel: Kernel) -> bool:
    return not any(name in kernel.name for name in _NOT_THE_PROJECTION)


def stream_buffer(l2_bytes: int, device: torch.device) -> Tensor:
    """int32 of CACHES times L2, and no less than what is streamed past."""
    return torch.zeros(max(CACHES * l2_bytes, 2 * PAST_BYTES) // 4, dtype=torch.int32, device=device)
