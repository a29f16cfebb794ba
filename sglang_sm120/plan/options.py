"""The options of `sglang-sm120 plan`. Standard library only: `--help` needs them."""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass

from sglang_sm120.errors import ConfigError
from sglang_sm120.options import Sm120Options, check_l2
from sglang_sm120.plan.gpus import DETECT, GPUS

MOST_GPUS = 64
MOST_NODES = 64
MOST_CONTEXT = 16 * 1024**2
MOST_REQUESTS = 100_000
MOST_CONCURRENCIES = 16

DEFAULT_CONTEXT = 128 * 1024
DEFAULT_CONCURRENCY = (1, 2, 10, 1000)
KV_DTYPES = ("auto", "bfloat16", "fp8_e4m3")

_TOKENS = re.compile(r"^(?P<number>[0-9]+)(?P<unit>[kKmM]?)$")
_UNITS = {"": 1, "k": 1024, "m": 1024**2}


@dataclass(frozen=True)
class PlanOptions:
    """What to plan for.

    model: folder, config.json or catalogue name. gpus: of one node; None with `detect`: as many as there are.
    l2: the dense weights that --sm120-l2 would fetch or keep, instead of memory; with the sizes of its other two
        flags (None: their defaults).
    context: tokens of a request, prompt and answer; None: 128k, or less where the model has less.
    concurrency: requests at once, ascending. mtp: whether the model's MTP head drafts.
    """

    model: str
    gpus: int | None
    nodes: int
    gpu: str
    context: int | None
    concurrency: tuple[int, ...]
    kv_dtype: str
    mtp: bool
    json: bool
    plot: str | None
    all: bool
    l2: bool = False
    l2_prefetch_bytes: tuple[int, int, int] | None = None
    l2_persist_bytes: int | None = None


def add_plan_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options. Values are checked in `plan_options`, whose errors say what to do."""
    add = parser.add_argument
    add("model", nargs="?", metavar="MODEL", help="a checkpoint's folder, its config.json, or a name of the catalogue")
    add("--list", action="store_true", help="list the catalogue and the GPUs, and stop")
    add("--gpus", metavar="N", help="GPUs of one node (default: 8, or with --gpu detect all that are there)")
    add("--nodes", default="1", metavar="N", help="machines (default: 1)")
    add("--gpu", default="rtx-pro-6000", metavar="GPU", help="its kind: "
        f"{', '.join(gpu.name for gpu in GPUS)}; a size such as 96GiB; several with commas, of which the smallest "
        f"counts; or {DETECT}, which asks nvidia-smi (default: rtx-pro-6000)")  # fmt: skip
    add("--context", metavar="TOKENS", help="of one request, prompt and answer, such as 128k (default: 128k, or the "
        "model's most where that is less)")  # fmt: skip
    add("--concurrency", default=",".join(map(str, DEFAULT_CONCURRENCY)), metavar="N,N,...",
        help="requests at once (default: 1,2,10,1000)")  # fmt: skip
    add("--kv-dtype", default="auto", metavar="{auto,bfloat16,fp8_e4m3}", help="of the KV cache. auto: what SGLang "
        "takes on these GPUs, fp8_e4m3 for sparse attention (DSA), else bfloat16 (default: auto)")  # fmt: skip
    mtp = parser.add_mutually_exclusive_group()
    mtp.add_argument("--mtp", action="store_true", help="load the model's MTP head and draft with it")
    mtp.add_argument("--no-mtp", action="store_true", help="leave the MTP head out (default)")
    add("--json", action="store_true", help="one JSON object instead of tables")
    add("--plot", metavar="FILE.png", help="draw memory of a GPU by component (needs matplotlib: sglang-sm120[bench])")
    add("--l2", action="store_true", help="instead: which dense weights --sm120-l2 would fetch or keep, with TP over "
        "the GPUs of one node")  # fmt: skip
    add("--sm120-l2-prefetch-mb", default="", metavar="MB[,MB,MB]", help="with --l2: as the server's flag")
    add("--sm120-l2-persist-mb", default="", metavar="MB", help="with --l2: as the server's flag")
    add("--all", action="store_true", help="every split, also those that are impossible, and every component")


def plan_options(args: argparse.Namespace) -> PlanOptions:
    """The parsed options of `add_plan_arguments`, checked.

    Raises:
        ConfigError: a value that makes no sense, or no MODEL.
    """
    if not args.model:
        raise ConfigError(
            "no MODEL", "a checkpoint's folder, a config.json or a name", "`sglang-sm120 plan --list` lists the names"
        )
    if args.kv_dtype not in KV_DTYPES:
        raise ConfigError(f"--kv-dtype {args.kv_dtype}", f"one of {', '.join(KV_DTYPES)}", "take auto if in doubt")
    sizes = Sm120Options(
        sm120_l2="both", sm120_l2_prefetch_mb=args.sm120_l2_prefetch_mb, sm120_l2_persist_mb=args.sm120_l2_persist_mb
    )
    check_l2(sizes)
    if not args.l2 and (args.sm120_l2_prefetch_mb or args.sm120_l2_persist_mb):
        raise ConfigError(
            "--sm120-l2-prefetch-mb or --sm120-l2-persist-mb without --l2", "--l2, which they are sizes of", "add --l2"
        )
    if args.l2 and args.plot is not None:
        raise ConfigError("--plot with --l2", "one of both", "leave out --plot: there is no picture of --l2")
    gpus = None if args.gpus is None else whole("--gpus", args.gpus, MOST_GPUS)
    return PlanOptions(
        model=args.model,
        gpus=gpus if gpus is not None or args.gpu == DETECT else 8,
        nodes=whole("--nodes", args.nodes, MOST_NODES),
        gpu=args.gpu,
        context=None if args.context is None else tokens("--context", args.context),
        concurrency=concurrencies(args.concurrency),
        kv_dtype=args.kv_dtype,
        mtp=args.mtp,
        json=args.json,
        plot=args.plot,
        all=args.all,
        l2=args.l2,
        l2_prefetch_bytes=sizes.l2_prefetch_bytes(),
        l2_persist_bytes=sizes.l2_persist_bytes(),
    )


def whole(flag: str, text: str, most: int) -> int:
    """A number from 1 to `most`.

    Raises:
        ConfigError: anything else.
    """
    value = int(text) if re.fullmatch(r"[0-9]{1,15}", text) else 0
    if not 1 <= value <= most:
        fix = "give the number of GPUs of one machine; more machines with --nodes" if flag == "--gpus" else "change it"
        several = ", or several with commas" if flag == "--concurrency" else ""
        raise ConfigError(f"{flag} {_short(text)}", f"a whole number from 1 to {most:,}{several}", fix)
    return value


def tokens(flag: str, text: str) -> int:
    """A number of tokens: digits, and k for 1024 or m for 1024 x 1024.

    Raises:
        ConfigError: anything else, 0, or more than any model has.
    """
    match = _TOKENS.match(text) if len(text) < 20 else None
    value = int(match["number"]) * _UNITS[match["unit"].lower()] if match else 0
    if not 1 <= value <= MOST_CONTEXT:
        raise ConfigError(
            f"{flag} {_short(text)}", f"tokens, 1 to {MOST_CONTEXT:,}, such as 131072 or 128k", "change it"
        )
    return value


def concurrencies(text: str) -> tuple[int, ...]:
    """Different numbers of requests with commas between, ascending.

    Raises:
        ConfigError: anything else.
    """
    parts = text.split(",")
    if len(parts) > MOST_CONCURRENCIES:
        raise ConfigError(
            f"--concurrency with {len(parts)} numbers", f"{MOST_CONCURRENCIES} at most", "leave some of them out"
        )
    return tuple(sorted({whole("--concurrency", part.strip(), MOST_REQUESTS) for part in parts}))


def _short(text: str) -> str:
    if not text:
        return "with nothing"
    return text if len(text) <= 40 else text[:37] + "..."
