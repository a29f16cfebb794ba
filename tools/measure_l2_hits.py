"""L2 hit rates of dense projections, by hardware counters: cold, prefetched, and kept by an access policy window.

    python tools/measure_l2_hits.py

Needs a CUDA GPU, and `ncu` with the permission to read counters. Prints a Markdown table. Before each projection a stream
of five times L2 is read, as the rest of a model is between two uses of a layer's weights. ncu serialises kernels: a
prefetch has arrived when the projection starts, and its times are for comparing the rows of this table.
"""  # noqa: E501

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from ncu_table import Kernel, profile

from sglang_sm120.bench.timing import require_gpu
from sglang_sm120.errors import Sm120Error
from sglang_sm120.kernels.memory.l2_prefetch.api import prefetch
from sglang_sm120.kernels.memory.l2_window import api as l2_window

MB = 1 << 20
PROJECTIONS = {"q_a + kv_a": (2624, 6144), "q_b": (2048, 2048), "o": (6144, 2048), "shared up": (512, 6144)}
"""GLM-5 on one of 8 ranks: rows, columns."""
STREAMED_MB = 40  # behind the prefetch: experts of a few tokens
VARIANTS = (
    "cold",
    "prefetched, evict_last",
    "prefetched, evict_normal",
    f"evict_last, {STREAMED_MB} MB streamed behind",
    f"evict_normal, {STREAMED_MB} MB streamed behind",
    f"evict_last, {STREAMED_MB} MB streamed behind, set-aside",
    "window, hit ratio 1.0",
    "window, hit ratio set-aside / size of all",
    f"window, hit ratio 1.0; evict_last, {STREAMED_MB} MB streamed behind",
    "hot",
)


class Case:
    """One projection of `rows` tokens on weights of its own, and the stream between two uses."""

    def __init__(self, size: tuple[int, int], tokens: int, device: torch.device, junk: Tensor) -> None:
        self.x = torch.randn(tokens, size[1], device=device, dtype=torch.bfloat16)
        self.weight = torch.randn(size, device=device, dtype=torch.bfloat16)
        self.device, self.junk = device, junk

    def project(self) -> None:
        torch.nn.functional.linear(self.x, self.weight)

    def stream(self, num_bytes: int | None = None) -> None:
        self.junk[: None if num_bytes is None else num_bytes // 8].sum()

    def warm(self, keep: bool) -> None:
        prefetch([(self.weight.data_ptr(), self.weight.nbytes)], device=self.device, keep=keep)


def prepare(case: Case, variant: str, working_set: int) -> Iterator[None]:
    """All that comes before the projection; what it opened is closed when this is resumed."""
    limits = l2_window.limits(case.device)
    with ExitStack() as opened:
        if "set-aside" in variant or "window" in variant:
            opened.enter_context(l2_window.set_aside(limits.persisting_max_bytes))
        if "window" in variant:
            ratio = 1.0 if "1.0" in variant else l2_window.hit_ratio(working_set, limits.persisting_max_bytes)
            window = l2_window.AccessPolicyWindow(case.weight.data_ptr(), case.weight.nbytes, ratio)
            opened.enter_context(l2_window.stream_window(torch.cuda.current_stream(), window))
            for _ in range(2):
                case.project()
            opened.enter_context(l2_window.stream_window(torch.cuda.current_stream(), None))
        if variant == "hot":
            case.project()
        else:
            case.stream()
        if "evict_" in variant:
            case.warm("evict_last" in variant)
        if "behind" in variant:
            case.stream(STREAMED_MB * MB)
        yield


def child(tokens: list[int]) -> None:
    """Under ncu: every case, its projection alone between start and stop."""
    device = require_gpu()
    junk = torch.zeros(5 * l2_window.limits(device).l2_bytes // 8, dtype=torch.int64, device=device)
    working_set = sum(2 * rows * columns for rows, columns in PROJECTIONS.values())
    for size in PROJECTIONS.values():
        for count in tokens:
            case = Case(size, count, device, junk)
            case.project()
            for variant in VARIANTS:
                for _ in prepare(case, variant, working_set):
                    torch.cuda.synchronize()
                    torch.cuda.profiler.start()
                    torch.cuda._sleep(1)
                    case.project()
                    torch.cuda.synchronize()
                    torch.cuda.profiler.stop()


def rows_of(groups: list[list[Kernel]], tokens: list[int]) -> list[tuple[str, int, str, float, float, float]]:
    """(projection, tokens, variant, L2 hit %, MB read from DRAM, us): the kernels of a projection together."""
    cases = [(name, count, variant) for name in PROJECTIONS for count in tokens for variant in VARIANTS]
    rows = []
    for case, kernels in zip(cases, groups, strict=True):
        main = max(kernels, key=lambda kernel: kernel.time_us)
        read_mb = sum(kernel.read_bytes for kernel in kernels) / 1e6
        rows.append((*case, main.l2_hit_percent, read_mb, sum(kernel.time_us for kernel in kernels)))
    return rows


def table(rows: list[tuple[str, int, str, float, float, float]]) -> str:
    """Markdown."""
    lines = ["| projection | MB | tokens | before it | L2 hit % | MB from DRAM | us under ncu |", "|" + "---|" * 7]
    for name, tokens, variant, hit, read_mb, time_us in rows:
        rows_, columns = PROJECTIONS[name]
        size = 2 * rows_ * columns / 1e6
        lines.append(f"| {name} | {size:.1f} | {tokens} | {variant} | {hit:.1f} | {read_mb:.2f} | {time_us:.1f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    counts: Callable[[str], list[int]] = lambda text: [int(part) for part in text.split(",")]  # noqa: E731
    parser.add_argument("--tokens", type=counts, default=[1, 2, 10, 64], metavar="N,N")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    try:
        if args.child:
            child(args.tokens)
            return
        device = torch.cuda.get_device_name(require_gpu())
        groups = profile(Path(__file__), [*sys.argv[1:], "--child"], keep_caches=True)
        print(f"{device}; python tools/measure_l2_hits.py {' '.join(sys.argv[1:])}\n")
        print(table(rows_of(groups, args.tokens)))
    except Sm120Error as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
