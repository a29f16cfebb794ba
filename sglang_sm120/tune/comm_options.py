"""The options of `sglang-sm120 tune --comm`. Standard library only: `--help` needs them."""

from __future__ import annotations

import argparse
import importlib.util
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from sglang_sm120.bench.options import ModelShape, counts
from sglang_sm120.bench.p2p_options import devices, seconds
from sglang_sm120.errors import ConfigError
from sglang_sm120.tune.options import TuneOptions

MESSAGE_BYTES = tuple(4096 << n for n in range(14))
"""4 KB to 32 MB: what decode and prefill reduce."""
DTYPES = ("bfloat16", "float16")
DEFAULT_TIME_LIMIT_S = 600.0

_BASELINE = "sglang"  # the one that is taken where its packages are there
_BASELINE_PACKAGES = ("sglang", "sgl_kernel")
_OWN = ("hidden_size", "world_size", "devices", "rows", "dtype", "baseline", "markdown", "time_limit_s")
_SHARED = ("models", "repeat", "output", "force", "plot", "from_profile")


@dataclass(frozen=True)
class CommOptions:
    """What to measure and where to put it.

    hidden_size: 0 only with from_profile. rows: of a message, ascending; empty: by `default_rows`. world_size: None for
    as many as there are GPUs. devices: CUDA indices, None for the first ones. baseline: "MODULE:FUNCTION" or None;
    no_baseline: why there is none. Files: a path or None.
    """

    hidden_size: int = 0
    world_size: int | None = None
    devices: tuple[int, ...] | None = None
    rows: tuple[int, ...] = ()
    dtype: str = DTYPES[0]
    repeat: int = 9
    baseline: str | None = None
    no_baseline: str = "--baseline none"
    output: str | None = None
    force: bool = False
    plot: str | None = None
    markdown: str | None = None
    from_profile: str | None = None
    time_limit_s: float = DEFAULT_TIME_LIMIT_S


def add_comm_arguments(parser: argparse.ArgumentParser, baselines: Mapping[str, str]) -> None:
    """Add --comm and what goes with it alone; --model, --repeat and the files are `add_tune_arguments`'s.

    Args:
        baselines: names for `--baseline` and the import strings that they stand for.
    """
    group = parser.add_argument_group(
        "all-reduce between GPUs (--comm)",
        "Times every way to reduce a message between the GPUs of this host, with residual add and RMSNorm behind it "
        "and alone, beside SGLang's own. Of the options above, --model FOLDER (for its hidden size), --repeat, "
        "--output, --force, --plot and --from-profile go with it. The profile is written at the end.",
    )
    add = group.add_argument
    add("--comm", action="store_true", help="measure this instead of MoE layers")
    add("--hidden-size", type=_count, metavar="N", help="elements of a token; or --model FOLDER")
    add("--world-size", type=_count, metavar="N",
        help="GPUs that reduce together, the --tp-size that you serve with: 2, 4 or 8 (default: all GPUs)")  # fmt: skip
    add("--devices", type=devices, metavar="N,N,...", help="CUDA indices (default: 0, 1, ...)")
    add("--rows", type=counts, metavar="N,N,...",
        help="tokens of a message (default: what comes to 4 KB, 8 KB, ... 32 MB)")  # fmt: skip
    add("--dtype", choices=DTYPES, help=f"of a message (default: {DTYPES[0]})")
    add("--baseline", metavar=f"none|{'|'.join(baselines)}|MODULE:FUNCTION",
        help="what to choose against: FUNCTION(device) returns a list of baselines and why others are missing "
        f"(default: {_BASELINE}, where {' and '.join(_BASELINE_PACKAGES)} are installed)")  # fmt: skip
    add("--markdown", metavar="FILE.md", help="write the tables here, as Markdown")
    add("--time-limit", dest="time_limit_s", type=seconds, metavar="S",
        help=f"seconds, after which its processes are killed (default: {DEFAULT_TIME_LIMIT_S:.0f})")  # fmt: skip


def comm_options(args: argparse.Namespace, baselines: Mapping[str, str]) -> CommOptions:
    """The parsed options of a command line with --comm.

    Raises: ConfigError: options that contradict each other, or a model's folder without a hidden size.
    """
    default = TuneOptions()
    for name in (*TuneOptions.__dataclass_fields__, "tp_size", "ep_size"):
        if name not in (*_SHARED, "layers") and getattr(args, name) != getattr(default, name, 1):
            raise _contradiction(name, "with --comm", "it is about MoE layers; without --comm those are tuned")
    if args.from_profile is not None:
        for name in ("models", "hidden_size", "world_size", "devices", "rows", "dtype", "baseline", "output", "force"):
            if getattr(args, name):
                raise _contradiction(name, "with --from-profile", "measure, or report what was measured")
        files = {name: getattr(args, name) for name in ("from_profile", "plot", "markdown")}
        return CommOptions(**files)
    given = {name: getattr(args, name) for name in _OWN if getattr(args, name) is not None}
    if args.devices is not None and args.world_size not in (None, len(args.devices)):
        raise ConfigError(
            f"--world-size {args.world_size} on --devices {','.join(map(str, args.devices))}",
            "a GPU for each rank",
            "leave one of them out",
        )
    baseline, why = _baseline(given.pop("baseline", None), baselines)
    shared = {name: getattr(args, name) for name in ("repeat", "output", "force", "plot")}
    values = {**given, **shared, "hidden_size": _hidden_size(args), "rows": tuple(sorted(args.rows or ()))}
    return CommOptions(**values, baseline=baseline, no_baseline=why)


def require_no_comm_options(args: argparse.Namespace) -> None:
    """Raises ConfigError where an option that means something with --comm alone stands without it."""
    for name in _OWN:
        if getattr(args, name) is not None:
            raise _contradiction(name, "without --comm", "--comm measures the all-reduce between GPUs")


def default_rows(hidden_size: int) -> tuple[int, ...]:
    """The token counts that come nearest to MESSAGE_BYTES, 1 at least."""
    return tuple(dict.fromkeys(max(1, round(size / (2 * hidden_size))) for size in MESSAGE_BYTES))


def _hidden_size(args: argparse.Namespace) -> int:
    if (args.hidden_size is not None) == bool(args.models) or len(args.models) > 1:
        raise ConfigError(
            "--comm with " + ("both --hidden-size and --model" if args.hidden_size else f"{len(args.models)} models"),
            "one hidden size, since how many tokens a message has depends on it",
            "--hidden-size N, or --model FOLDER",
        )
    if args.hidden_size is not None:
        return args.hidden_size
    (model,) = args.models
    return model.hidden_size if isinstance(model, ModelShape) else _folder_hidden_size(model)


def _folder_hidden_size(folder: Path) -> int:
    """Of a model's layers, with experts or without; where it takes more than text, of its language model."""
    file = folder / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
        value = config.get("text_config", config)["hidden_size"]
    except (OSError, ValueError, AttributeError, KeyError, TypeError):
        value = None
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(
            f"{file} has no hidden_size", "the config.json of a language model", "give the number: --hidden-size N"
        )
    return value


def _baseline(given: str | None, baselines: Mapping[str, str]) -> tuple[str | None, str]:
    """What is imported in each rank, or None and why."""
    if given == "none":
        return None, CommOptions.no_baseline
    missing = [package for package in _BASELINE_PACKAGES if importlib.util.find_spec(package) is None]
    if given in (None, _BASELINE) and missing:
        why = f"{' and '.join(missing)} not installed"
        if given is None:
            return None, why
        raise ConfigError(f"--baseline {given}: {why}", "the SGLang that you serve with", "install it, or leave it out")
    given = given or _BASELINE
    name = baselines.get(given, given)
    if name.count(":") != 1 or not all(part.replace(".", "").isidentifier() for part in name.split(":")):
        raise ConfigError(
            f"--baseline {given}", f"none, {', '.join(baselines)} or PYTHON.MODULE:FUNCTION", "correct the name"
        )
    return name, ""


def _contradiction(name: str, where: str, fix: str) -> ConfigError:
    flags = {"models": "--model", "time_limit_s": "--time-limit"}
    flag = flags.get(name, "--" + name.replace("_", "-"))
    return ConfigError(f"{flag} {where}", "options that go together", f"leave {flag} out: {fix}")


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: a number above 0")
    return int(text)
