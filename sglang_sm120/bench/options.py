"""The options of `sglang-sm120 bench moe`. Standard library only: `--help` needs them."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

MIN_REPEAT = 7


@dataclass(frozen=True)
class ModelShape:
    """The routed experts of one layer on one rank: num_experts on it, intermediate_size of one half."""

    name: str
    num_experts: int
    top_k: int
    hidden_size: int
    intermediate_size: int


MODELS = {
    shape.name: shape
    for shape in (
        ModelShape("glm5-tp8", 256, 8, 6144, 256),
        ModelShape("qwen3-235b-tp4", 128, 8, 4096, 384),
        ModelShape("deepseek-v3-tp8", 256, 8, 7168, 256),
    )
}
TOKENS = (1, 2, 4, 10, 16, 64, 256, 1000, 4096)
ROUTINGS = ("uniform", "zipf")
NUMERICS = ("w4a16", "w4a4")
BACKENDS = ("auto", "decode", "middle", "prefill")
ORDERS = ("default", "column_major", "row_major")


@dataclass(frozen=True)
class MoeBenchOptions:
    """What to measure and where to put it. baseline: "none" or "MODULE:FUNCTION"; files: a path or None."""

    models: tuple[ModelShape, ...]
    tokens: tuple[int, ...] = TOKENS
    routings: tuple[str, ...] = ("uniform",)
    numerics: tuple[str, ...] = ("w4a16",)
    backends: tuple[str, ...] = BACKENDS
    orders: tuple[str, ...] = ("default",)
    gemms: bool = False
    baseline: str = "none"
    repeat: int = 9
    seed: int = 0
    json: str | None = None
    plot: str | None = None
    markdown: bool = False
    from_json: str | None = None


def add_moe_arguments(parser: argparse.ArgumentParser, baselines: dict[str, str]) -> None:
    """Add the options; `baselines` are names for `--baseline` and the import strings that they stand for."""

    def baseline(text: str) -> str:
        if text == "none" or text in baselines:
            return baselines.get(text, text)
        if all(part.replace(".", "").isidentifier() for part in text.split(":")) and text.count(":") == 1:
            return text
        raise argparse.ArgumentTypeError(f"{text!r}: none, {', '.join(baselines)} or PYTHON.MODULE:FUNCTION")

    default = MoeBenchOptions(models=())
    add = parser.add_argument
    add("--model", dest="models", type=model_shape, nargs="+", default=list(MODELS.values()), metavar="MODEL",
        help=f"{', '.join(MODELS)}, or E,k,H,I: experts on a rank, top-k, hidden size, intermediate size on a rank "
        "(default: all three)")  # fmt: skip
    add("--tokens", type=counts, default=default.tokens, metavar="N,N,...",
        help=f"tokens a batch (default: {','.join(map(str, TOKENS))})")  # fmt: skip
    for name, dest, allowed, what in (
        ("--routing", "routings", ROUTINGS, "popularity of the experts: equal, or 1 / rank"),
        ("--numerics", "numerics", NUMERICS, "what activations are multiplied as"),
        ("--backends", "backends", BACKENDS, "kernels of fused_moe"),
        (
            "--order",
            "orders",
            ORDERS,
            "order of the tiles, default: the backend's own; auto and the baseline have none to choose",
        ),
    ):
        value = getattr(default, dest)
        add(name, dest=dest, type=_choices(allowed), default=value, metavar=",".join(allowed),
            help=f"{what} (default: {','.join(value)})")  # fmt: skip
    add(
        "--gemms",
        action="store_true",
        help="also time decode and middle without the sum of the slots: both GEMMs and, above 32 slots, the schedule",
    )
    add("--baseline", type=baseline, default="none", metavar=f"none|{'|'.join(baselines)}|MODULE:FUNCTION",
        help="what to compare with: FUNCTION(weights) returns a callable of (hidden_states, topk_weights, topk_ids) "
        "(default: none)")  # fmt: skip
    add("--repeat", type=repeats, default=default.repeat, metavar="N",
        help=f"samples of every candidate, {MIN_REPEAT} or more (default: {default.repeat})")  # fmt: skip
    add("--seed", type=int, default=default.seed, metavar="N", help="of weights and routings (default: 0)")
    add("--json", metavar="FILE", help="write everything here, raw samples too; after every point")
    add("--plot", metavar="FILE.png", help="draw the results (needs matplotlib: sglang-sm120[bench])")
    add("--markdown", action="store_true", help="print the table as Markdown")
    add("--from-json", metavar="FILE", help="measure nothing: report what --json wrote")


def moe_options(args: argparse.Namespace) -> MoeBenchOptions:
    """The parsed options of `add_moe_arguments`."""
    values = {name: getattr(args, name) for name in MoeBenchOptions.__dataclass_fields__}
    return MoeBenchOptions(**{**values, "models": tuple(args.models)})


def model_shape(text: str) -> ModelShape:
    """A name of MODELS, or four numbers E,k,H,I."""
    if text in MODELS:
        return MODELS[text]
    numbers = text.split(",")
    if len(numbers) != 4 or not all(number.isdecimal() and int(number) > 0 for number in numbers):
        raise argparse.ArgumentTypeError(f"{text!r}: {', '.join(MODELS)}, or E,k,H,I such as 256,8,6144,256")
    experts, top_k, hidden, intermediate = map(int, numbers)
    if top_k > experts:
        raise argparse.ArgumentTypeError(f"{text!r}: k = {top_k} distinct experts of {experts} are not there")
    return ModelShape(text, experts, top_k, hidden, intermediate)


def counts(text: str) -> tuple[int, ...]:
    """Numbers above 0 with commas between, each once."""
    if not all(part.isdecimal() and int(part) > 0 for part in text.split(",")):
        raise argparse.ArgumentTypeError(f"{text!r}: numbers above 0, with commas between, such as 1,16,256")
    return tuple(dict.fromkeys(map(int, text.split(","))))


class _choices:
    """Some of the allowed words, with commas between."""

    def __init__(self, allowed: tuple[str, ...]) -> None:
        self.allowed = allowed

    def __call__(self, text: str) -> tuple[str, ...]:
        words = tuple(dict.fromkeys(text.split(",")))
        unknown = [word for word in words if word not in self.allowed]
        if unknown:
            raise argparse.ArgumentTypeError(f"{unknown[0]!r}: one or more of {','.join(self.allowed)}")
        return words


def repeats(text: str) -> int:
    """A number of samples."""
    if not text.isdecimal() or int(text) < MIN_REPEAT:
        raise argparse.ArgumentTypeError(f"{text!r}: a number, {MIN_REPEAT} or more")
    return int(text)
