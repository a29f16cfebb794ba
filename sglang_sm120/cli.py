"""`sglang-sm120`: the command line. Imports the rest inside functions, so `--help` and `doctor` always work."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

from sglang_sm120 import __version__

# Names for `bench --baseline`; imported when asked for, since they may need sglang and a GPU.
_BASELINES = {"marlin": "sglang_sm120.integration.marlin_baseline:prepare"}
_COMM_BASELINES = {"sglang": "sglang_sm120.integration.all_reduce_baseline:prepare"}  # of `tune --comm`


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="sglang-sm120",
        description="Serve mixture-of-experts models with SGLang on PCIe Blackwell workstations (SM120). "
        "The server itself is `sglang serve MODEL --enable-sm120-opts`.",
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    demo = commands.add_parser(
        "demo",
        help="serve the small trained model that comes with the package and check every token",
        description="Starts a real SGLang server on whatever is there, asks it one, two and ten requests at once, and "
        "compares every token with transformers on the same checkpoint, dequantised.",
    )
    demo.add_argument("--new-tokens", type=int, default=48, metavar="N", help="tokens a request (default: 48)")
    demo.add_argument("--log", metavar="FILE", help="keep the server's log in this file")
    _add_doctor(commands)
    commands.add_parser("flags", help="list the flags that `sglang serve` takes from this package")
    _add_plan(commands)
    _add_bench(commands)
    _add_tune(commands)
    _add_status(commands)
    args = parser.parse_args(argv)
    run = {
        "demo": _demo, "doctor": _doctor, "flags": _flags, "plan": _plan, "bench": _bench, "tune": _tune,
        "status": _status,
    }  # fmt: skip
    return run[args.command](args)


def _add_plan(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    from sglang_sm120.plan.options import add_plan_arguments

    plan = commands.add_parser(
        "plan",
        help="what a model needs on these GPUs, which split fits, and the command that serves it",
        description="Counts what each GPU would hold, from the model's config alone, for every way to split it; picks "
        "one for latency and one for throughput and prints the `sglang serve` command. Needs no GPU and no weights. "
        "Exit status 1: nothing fits; 2: options that make no sense. docs/plan.md says what is counted.",
    )
    add_plan_arguments(plan)


def _add_doctor(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    from sglang_sm120.doctor.command import add_doctor_arguments

    doctor = commands.add_parser(
        "doctor",
        help="check this machine and installation, and say how to fix what is wrong",
        description="Reads driver, GPUs, PCI bus, packages and environment; changes nothing. Exit status 1: something "
        "will be refused, or will hang or be wrong; 2: options that make no sense. docs/doctor.md lists the checks.",
    )
    add_doctor_arguments(doctor)


def _add_bench(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    from sglang_sm120.bench.l2_options import add_l2_arguments
    from sglang_sm120.bench.options import add_moe_arguments
    from sglang_sm120.bench.p2p_options import add_p2p_arguments

    bench = commands.add_parser("bench", help="measure this package's kernels on this GPU")
    kinds = bench.add_subparsers(dest="bench", required=True, metavar="WHAT")
    moe = kinds.add_parser(
        "moe",
        help="the fused MoE layer, by each kernel and beside a baseline",
        description="Times the routed experts of one layer over random NVFP4 weights on this GPU. Every candidate is "
        "checked against the reference first; a wrong one is not timed. docs/benchmarking.md says what is measured.",
    )
    add_moe_arguments(moe, _BASELINES)
    p2p = kinds.add_parser(
        "p2p",
        help="whether the GPUs of this host can share memory, how fast, and what is wrong if not",
        description="Writes and reads each GPU's memory from every other one, in processes that are killed when they "
        "hang. Exit status 1: a pair must not share memory as it is; 2: options that make no sense here. "
        "docs/kernels/p2p-probe.md says what is measured.",
    )
    add_p2p_arguments(p2p)
    l2 = kinds.add_parser(
        "l2",
        help="what prefetches into L2, and access policy windows, gain",
        description="Times the step of a stack of decoder layers with and without prefetches of dense weights, and "
        "each dense projection alone. A wait of one thread stands for each all-reduce. Every candidate's output is "
        "compared first; one that differs is not timed. docs/benchmarking.md says what is measured.",
    )
    add_l2_arguments(l2)


def _add_tune(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    from sglang_sm120.tune.comm_options import add_comm_arguments
    from sglang_sm120.tune.options import add_tune_arguments

    tune = commands.add_parser(
        "tune",
        help="measure MoE runners, or the all-reduce, on this machine and write the profile that the server chooses by",
        description="Times one layer of your model by every runner that covers it, at each token count, over random "
        "NVFP4 weights on this GPU. Every candidate is checked against the reference first; a wrong one is not timed. "
        "The result is a profile, by which `sglang serve --enable-sm120-opts` takes the fastest for each batch. "
        "With --comm the same is done for the all-reduce between GPUs. docs/tuning.md says what is measured.",
    )
    add_tune_arguments(tune)
    add_comm_arguments(tune, _COMM_BASELINES)


def _add_status(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    status = commands.add_parser(
        "status",
        help="what a running server does with its MoE layers",
        description="Asks a server that runs with --enable-sm120-opts --enable-metrics. docs/metrics.md says what the "
        "numbers count.",
    )
    status.add_argument("url", metavar="URL", help="the server, as http://HOST:PORT")
    status.add_argument("--json", action="store_true", help="one JSON object instead of tables")
    status.add_argument("--watch", type=float, metavar="S", help="again every S seconds, until Ctrl-C")
    status.add_argument("--api-key", metavar="KEY", help="the server's --api-key, if it has one")


def _demo(args: argparse.Namespace) -> int:
    from sglang_sm120.demo import run

    return run(new_tokens=args.new_tokens, log=args.log)


def _exit_code(call: Callable[[], int], status: int = 1) -> int:
    """The exit code of a command, or `status` where it ends in an error, which says what to do."""
    from sglang_sm120.errors import Sm120Error

    try:
        return call()
    except Sm120Error as error:
        print(error, file=sys.stderr)
        return status


def _doctor(args: argparse.Namespace) -> int:
    from sglang_sm120.doctor.command import run

    return _exit_code(lambda: run(args), status=2)


def _plan(args: argparse.Namespace) -> int:
    from sglang_sm120.plan.options import plan_options
    from sglang_sm120.plan.run import list_all, run

    return _exit_code(lambda: list_all(as_json=args.json) if args.list else run(plan_options(args)), status=2)


def _bench(args: argparse.Namespace) -> int:
    return {"moe": _bench_moe, "p2p": _bench_p2p, "l2": _bench_l2}[args.bench](args)


def _bench_moe(args: argparse.Namespace) -> int:
    from sglang_sm120.bench.moe import run
    from sglang_sm120.bench.options import moe_options

    return _exit_code(lambda: run(moe_options(args)))


def _bench_p2p(args: argparse.Namespace) -> int:
    from sglang_sm120.bench.p2p import run
    from sglang_sm120.bench.p2p_options import p2p_options
    from sglang_sm120.errors import ConfigError, ContractError, Sm120Error

    try:
        return run(p2p_options(args))
    except Sm120Error as error:
        print(error, file=sys.stderr)
        return 2 if isinstance(error, ConfigError | ContractError) else 1


def _bench_l2(args: argparse.Namespace) -> int:
    from sglang_sm120.bench.l2 import run
    from sglang_sm120.bench.l2_options import l2_options

    return _exit_code(lambda: run(l2_options(args)))


def _tune(args: argparse.Namespace) -> int:
    return _exit_code(lambda: _tune_comm(args) if args.comm else _tune_moe(args))


def _tune_moe(args: argparse.Namespace) -> int:
    from sglang_sm120.tune.comm_options import require_no_comm_options
    from sglang_sm120.tune.options import tune_options

    require_no_comm_options(args)
    options = tune_options(args)
    from sglang_sm120.tune.run import run

    return run(options)


def _tune_comm(args: argparse.Namespace) -> int:
    from sglang_sm120.tune.comm_options import comm_options

    options = comm_options(args, _COMM_BASELINES)
    from sglang_sm120.tune.comm import run

    return run(options)


def _status(args: argparse.Namespace) -> int:
    from sglang_sm120.status import run

    return _exit_code(lambda: run(args.url, as_json=args.json, watch_s=args.watch, api_key=args.api_key))


def _flags(args: argparse.Namespace) -> int:
    from sglang_sm120.options import OPTIONS

    for option in OPTIONS:
        values = f" {{{','.join(option.choices)}}}" if option.choices else "".join(f" {v}" for v in option.values)
        print(f"{option.flag}{values}\n    variable {option.env}, default {option.default_text}\n    {option.help}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
