"""What each kernel of the fused MoE layer reads from DRAM, by hardware counters: one `ncu` run for all configurations.

    python tools/measure_moe_dram.py --model glm5-tp8 --tokens 16,1000 --backend decode,middle --order column_major,row_major

Needs a CUDA GPU, and `ncu` with the permission to read counters. Prints a Markdown table. The floor of a GEMM is what it
cannot do without: the weights and block scales of the active experts once, and its input once (x of T rows for GEMM1, one
row a slot for GEMM2). ncu empties the caches before every kernel. Its times, at free clocks, are for comparing the rows
of this table: ncu serialises kernels that overlap otherwise.
"""  # noqa: E501

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from ncu_table import MARKER, Kernel, profile

from sglang_sm120.bench.moe_cases import Candidate, random_weights
from sglang_sm120.bench.options import BACKENDS, ORDERS, ModelShape, model_shape
from sglang_sm120.bench.plot import require_matplotlib
from sglang_sm120.bench.routing import bytes_per_expert, random_routing
from sglang_sm120.bench.timing import require_gpu
from sglang_sm120.errors import Sm120Error

_ELEMENT_BYTES = 2  # of bfloat16


def table(configurations: list[dict], groups: list[list[Kernel]]) -> str:
    """Markdown; a row for every kernel of every configuration."""
    columns = (
        "model", "tokens", "backend", "order", "kernel", "MB read", "floor MB", "ratio", "L2 hit %", "us"
    )  # fmt: skip
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    for configuration, kernels in zip(configurations, groups, strict=True):
        floors = list(configuration["floor_bytes"])
        for kernel in kernels:
            floor_bytes = floors.pop(0) if "gemm" in kernel.name and floors else None
            cells = [str(configuration[name]) for name in ("model", "tokens", "backend", "order")]
            cells += [kernel.name.partition("(")[0], f"{kernel.read_bytes / 1e6:.2f}"]
            cells += ["", ""] if floor_bytes is None else [
                f"{floor_bytes / 1e6:.2f}", f"{kernel.read_bytes / floor_bytes:.3f}"
            ]  # fmt: skip
            lines.append("| " + " | ".join([*cells, f"{kernel.l2_hit_percent:.1f}", f"{kernel.time_us:.1f}"]) + " |")
    return "\n".join(lines)


def draw(configurations: list[dict], groups: list[list[Kernel]], title: str, path: str) -> None:
    """A column a backend: bytes of both GEMMs over their floor, L2 hit rate (GEMM1, GEMM2), time; bars are orders."""
    require_matplotlib()
    from matplotlib.figure import Figure

    measured = {}
    for configuration, kernels in zip(configurations, groups, strict=True):
        gemms = [kernel for kernel in kernels if "gemm" in kernel.name]
        key = (configuration["model"], configuration["backend"], configuration["tokens"], configuration["order"])
        measured[key] = (
            sum(gemm.read_bytes for gemm in gemms) / sum(configuration["floor_bytes"]),
            sum(gemm.l2_hit_percent for gemm in gemms) / len(gemms),
            sum(gemm.time_us for gemm in gemms),
        )
    columns = list(dict.fromkeys(key[:2] for key in measured))
    orders = list(dict.fromkeys(key[3] for key in measured))
    figure = Figure(figsize=(1.5 + 3.6 * len(columns), 9), layout="constrained")
    grid = figure.subplots(3, len(columns), squeeze=False)
    names = ("DRAM bytes read / floor", "L2 hit rate, %, mean of the GEMMs", "us under ncu, GEMM1 + GEMM2")
    for number, (model, backend) in enumerate(columns):
        tokens = list(dict.fromkeys(key[2] for key in measured if key[:2] == (model, backend)))
        for row, (axes, name) in enumerate(zip(grid[:, number], names, strict=True)):
            for index, order in enumerate(orders):
                values = [measured.get((model, backend, count, order), (float("nan"),) * 3)[row] for count in tokens]
                places = [place + index * 0.8 / len(orders) for place in range(len(tokens))]
                bars = axes.bar(places, values, 0.75 / len(orders), label=order or "its own order")
                axes.bar_label(bars, fmt="%.2f" if row == 0 else "%.0f", fontsize=7)
            axes.set_xticks([place + 0.4 - 0.4 / len(orders) for place in range(len(tokens))], [str(t) for t in tokens])
            axes.set_title(f"{model}, {backend}" if row == 0 else "", fontsize=10)
            axes.set_xlabel("tokens")
            axes.set_ylabel(name if number == 0 else "", fontsize=9)
        grid[0, number].axhline(1, color="black", linewidth=1)
    grid[0, 0].legend(fontsize=8)
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=130)


def floor_bytes(shape: ModelShape, ids: torch.Tensor) -> tuple[int, int]:
    """Of GEMM1 and GEMM2."""
    weights_bytes = ids.unique().numel() * bytes_per_expert(shape)
    inputs = (ids.shape[0] * shape.hidden_size, ids.numel() * shape.intermediate_size)
    first, second = (elements * _ELEMENT_BYTES for elements in inputs)
    return weights_bytes * 2 // 3 + first, weights_bytes // 3 + second


def child(args: argparse.Namespace) -> None:
    """Under ncu: every configuration once without and once with the profiler; what they are goes to a file."""
    device = require_gpu()
    done = []
    for shape in args.models:
        weights = random_weights(shape, device, torch.Generator(device).manual_seed(0))
        for tokens in args.tokens:
            generator = torch.Generator().manual_seed(tokens)
            ids = random_routing(args.routing, tokens, shape.num_experts, shape.top_k, generator)
            x = torch.randn(tokens, shape.hidden_size, generator=generator).to(device, torch.bfloat16)
            router = torch.full(ids.shape, 1 / shape.top_k, device=device)
            ids = ids.to(device, torch.int32)
            for backend in args.backends:
                for order in ("",) if backend == "auto" else args.orders:
                    candidate = Candidate(backend, order, args.numerics)
                    reason = candidate.unsupported_reason(weights, ids.numel(), x)
                    if reason is not None:
                        print(f"{candidate.label}: not covered: {reason}", file=sys.stderr)
                        continue
                    call = candidate.bind(weights)
                    call(x, router, ids)
                    torch.cuda.synchronize()
                    torch.cuda.profiler.start()
                    torch.cuda._sleep(1)
                    call(x, router, ids)
                    torch.cuda.synchronize()
                    torch.cuda.profiler.stop()
                    done.append(
                        {"model": shape.name, "tokens": tokens, "backend": backend, "order": order,
                         "floor_bytes": floor_bytes(shape, ids)}
                    )  # fmt: skip
        del weights
    Path(args.child).write_text(json.dumps(done))


def profiled(arguments: list[str]) -> tuple[list[dict], list[list[Kernel]]]:
    """This program's child under ncu: what it ran, and its kernels."""
    with tempfile.TemporaryDirectory(prefix="measure-moe-dram-") as folder:
        described = Path(folder) / "configurations.json"
        groups = profile(Path(__file__), [*arguments, "--child", str(described)])
        return json.loads(described.read_text()), groups


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words = lambda text: text.split(",")  # noqa: E731
    parser.add_argument("--model", dest="models", nargs="+", type=model_shape, default=[model_shape("glm5-tp8")])
    parser.add_argument("--tokens", type=lambda text: [int(part) for part in text.split(",")], default=[4, 16, 1000])
    parser.add_argument("--backend", dest="backends", type=words, default=["decode", "middle", "prefill"],
                        help=",".join(BACKENDS))  # fmt: skip
    parser.add_argument("--order", dest="orders", type=words, default=list(ORDERS[1:]), help=",".join(ORDERS))
    parser.add_argument("--numerics", default="w4a16", choices=["w4a16", "w4a4"])
    parser.add_argument("--routing", default="uniform", choices=["uniform", "zipf"])
    parser.add_argument("--plot", metavar="FILE.png", help="draw the orders side by side (needs matplotlib)")
    parser.add_argument("--child", metavar="FILE", help=argparse.SUPPRESS)
    args = parser.parse_args()
    for name, allowed in (("backends", BACKENDS), ("orders", ORDERS)):
        unknown = set(getattr(args, name)) - set(allowed)
        if unknown:
            parser.error(f"{', '.join(unknown)}: {','.join(allowed)} are known")
    try:
        if args.child is not None:
            child(args)
            return
        if args.plot:
            require_matplotlib()
        device = torch.cuda.get_device_name(require_gpu())
        configurations, groups = profiled(sys.argv[1:])
    except Sm120Error as error:
        sys.exit(str(error))
    if len(groups) != len(configurations):
        sys.exit(f"{len(groups)} configurations in ncu's table, {len(configurations)} were run: is {MARKER} in it?")
    print(f"{device}; python tools/measure_moe_dram.py {' '.join(sys.argv[1:])}\n")
    print(table(configurations, groups))
    if args.plot:
        title = f"{device}: tile orders, {args.numerics}, {args.routing} routing; bytes and times by ncu"
        draw(configurations, groups, title, args.plot)


if __name__ == "__main__":
    main()
