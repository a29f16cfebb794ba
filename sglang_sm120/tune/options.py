"""The options of `sglang-sm120 tune`, and the layers that they come to. Standard library only: `--help` needs them."""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass
from pathlib import Path

from sglang_sm120.bench.options import MIN_REPEAT, MODELS, NUMERICS, ModelShape, counts, model_shape, repeats
from sglang_sm120.errors import ConfigError
from sglang_sm120.plan.checkpoint import GROUP_SIZE, RoutedExperts, routed_experts

TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
REFERENCE_TOKENS = 64
"""The reference is timed up to here: it is slow, and above no server should come to it."""

_ACTIVATION = "silu"


@dataclass(frozen=True)
class LayerCase:
    """One rank's routed experts. num_global_experts: under expert parallelism, of all ranks, which tokens go to."""

    shape: ModelShape
    num_global_experts: int | None = None


@dataclass(frozen=True)
class TuneOptions:
    """What to measure and where to put it. numerics "auto": both. runners None: all. Files: a path or None."""

    layers: tuple[LayerCase, ...] = ()
    tokens: tuple[int, ...] = TOKENS
    numerics: str = "auto"
    runners: tuple[str, ...] | None = None
    with_reference: bool = False
    repeat: int = 9
    seed: int = 0
    output: str | None = None
    force: bool = False
    dry_run: bool = False
    plot: str | None = None
    from_profile: str | None = None


def add_tune_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options to the command's parser."""
    default = TuneOptions()
    layer = parser.add_argument_group("which layers")
    layer.add_argument("--model", dest="models", type=_model, nargs="+", default=[], metavar="MODEL",
        help="a local checkpoint's folder, of which config.json is read; or one rank's layer as E,k,H,I: experts on "
        f"the rank, top-k, hidden size, intermediate size on the rank; or {', '.join(MODELS)}")  # fmt: skip
    layer.add_argument("--tp-size", type=_count, default=1, metavar="N",
        help="as in `sglang serve`; only with a checkpoint's folder (default: 1)")  # fmt: skip
    layer.add_argument("--ep-size", type=_count, default=1, metavar="N",
        help="likewise: a rank has experts / ep, each of intermediate size / (tp / ep) (default: 1)")  # fmt: skip

    what = parser.add_argument_group("what is measured")
    what.add_argument("--tokens", type=counts, default=default.tokens, metavar="N,N,...",
        help=f"tokens a batch (default: {','.join(map(str, TOKENS))})")  # fmt: skip
    what.add_argument("--numerics", choices=("auto", *NUMERICS), default=default.numerics,
        help="what activations are multiplied as; auto: whatever a runner offers (default: auto)")  # fmt: skip
    what.add_argument("--runners", type=lambda text: tuple(dict.fromkeys(text.split(","))), metavar="NAME,NAME,...",
        help="only these (default: all that the package has)")  # fmt: skip
    what.add_argument("--with-reference", action="store_true",
        help=f"time the reference at every count, not only up to {REFERENCE_TOKENS} tokens or where nothing else "
        "runs; slow")  # fmt: skip
    what.add_argument("--repeat", type=repeats, default=default.repeat, metavar="N",
        help=f"samples of every candidate, {MIN_REPEAT} or more (default: {default.repeat})")  # fmt: skip
    what.add_argument(
        "--seed", type=int, default=default.seed, metavar="N", help="of weights and routings (default: 0)"
    )
    what.add_argument("--dry-run", action="store_true",
        help="time nothing and write nothing: list which runner covers which layer, or why it does not")  # fmt: skip

    where = parser.add_argument_group("where it goes")
    where.add_argument("--output", metavar="FILE",
        help="the profile, written after every point; one of the same machine is added to (default: where `sglang "
        "serve` looks for it, ~/.cache/sglang-sm120/moe-profile-GPU.json)")  # fmt: skip
    where.add_argument("--force", action="store_true",
        help="replace a profile of another machine or of other versions, or a damaged one")  # fmt: skip
    where.add_argument("--plot", metavar="FILE.png",
        help="draw time against tokens (needs matplotlib: sglang-sm120[bench])")  # fmt: skip
    where.add_argument("--from-profile", metavar="FILE",
        help="measure nothing: report this profile; works on any machine")  # fmt: skip


def tune_options(args: argparse.Namespace) -> TuneOptions:
    """The parsed options of `add_tune_arguments`, with the layers of the models.

    Raises: ConfigError: options that contradict each other, or a config.json that does not describe such a layer.
    """
    if args.from_profile is not None and (args.models or args.dry_run):
        other = "--model" if args.models else "--dry-run"
        raise ConfigError(f"--from-profile with {other}", "one of them", "measure, or report what was measured")
    if args.from_profile is None and not args.models:
        raise ConfigError(
            "no layer to measure: --model is missing",
            "the model that you serve, since times of one layer say little about another",
            f"--model FOLDER --tp-size N, --model E,k,H,I, or --model {next(iter(MODELS))}",
        )
    if max(args.tp_size, args.ep_size) > 1 and not any(isinstance(model, Path) for model in args.models):
        raise ConfigError(
            f"--tp-size {args.tp_size} and --ep-size {args.ep_size} without a checkpoint's folder",
            "a folder as --model: four numbers and names are one rank's part already",
            "leave them out, or name the folder",
        )
    values = {name: getattr(args, name) for name in TuneOptions.__dataclass_fields__ if name != "layers"}
    layers = [
        rank_layer(routed_experts(model), model.resolve().name, args.tp_size, args.ep_size)
        if isinstance(model, Path)
        else _checked(LayerCase(model))
        for model in args.models
    ]
    values["tokens"] = tuple(sorted(values["tokens"]))
    return TuneOptions(**values, layers=tuple(dict.fromkeys(layers)))


def rank_layer(experts: RoutedExperts, name: str, tp_size: int, ep_size: int) -> LayerCase:
    """One rank's part of a model's layer, as SGLang divides it: experts by ep, each one's intermediate size by tp / ep.

    Raises: ConfigError: it does not divide, or is a layer that is not measured.
    """
    if tp_size % ep_size:
        raise ConfigError(
            f"--tp-size {tp_size} with --ep-size {ep_size}", "an ep size that divides the tp size", "change one"
        )
    for what, value, parts in (
        ("experts", experts.num_experts, ep_size),
        ("of the experts' intermediate size", experts.intermediate_size, tp_size // ep_size),
    ):
        if value % parts:
            raise ConfigError(
                f"{name}: {value} {what} in {parts} parts",
                "equal parts",
                "use the --tp-size and --ep-size that you serve with",
            )
    if experts.activation not in (None, _ACTIVATION):
        raise ConfigError(
            f"{name}: experts with activation {experts.activation}",
            f"gated {_ACTIVATION}, which is all that is measured",
            "serve this model without a profile",
        )
    ranks = f", TP {tp_size}" + (f" EP {ep_size}" if ep_size > 1 else "") if tp_size > 1 else ""
    shape = ModelShape(
        name + ranks,
        experts.num_experts // ep_size,
        experts.top_k,
        experts.hidden_size,
        experts.intermediate_size * ep_size // tp_size,
    )
    return _checked(LayerCase(shape, experts.num_experts if ep_size > 1 else None))


def _checked(layer: LayerCase) -> LayerCase:
    shape = layer.shape
    odd = [size for size in (shape.hidden_size, shape.intermediate_size) if size % GROUP_SIZE]
    experts = layer.num_global_experts or shape.num_experts
    if odd or shape.top_k > experts:
        raise ConfigError(
            f"{shape.name}: {f'size {odd[0]} on a rank' if odd else f'top {shape.top_k} of {experts} experts'}",
            f"multiples of {GROUP_SIZE}, since {GROUP_SIZE} elements share a scale in NVFP4" if odd else "k up to E",
            "use the --tp-size and --ep-size that you serve with, or another layer",
        )
    return layer


def _model(text: str) -> ModelShape | Path:
    """A name of MODELS, four numbers, or the folder of a checkpoint."""
    if text in MODELS or re.fullmatch(r"[\d, ]+", text):
        return model_shape(text)
    folder = Path(text).expanduser()
    if (folder / "config.json").is_file():
        return folder
    raise argparse.ArgumentTypeError(
        f"{text!r}: a local folder with config.json in it, {', '.join(MODELS)}, or E,k,H,I such as 256,8,6144,256"
    )


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: a number above 0")
    return int(text)
