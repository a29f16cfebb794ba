"""The options of `sglang-sm120 bench p2p`. Standard library only: `--help` needs them."""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass

DEFAULT_TIME_LIMIT_S = 20.0


@dataclass(frozen=True)
class P2pBenchOptions:
    """What to probe and where to put it. devices: CUDA indices, None for all; files: a path or None."""

    devices: tuple[int, ...] | None = None
    time_limit_s: float = DEFAULT_TIME_LIMIT_S
    json: str | None = None
    plot: str | None = None


def add_p2p_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    add = parser.add_argument
    add("--devices", type=devices, metavar="N,N,...", help="CUDA indices, two or more (default: all that are visible)")
    add("--time-limit", dest="time_limit_s", type=seconds, default=DEFAULT_TIME_LIMIT_S, metavar="S",
        help="seconds for a pair, after which its processes are killed and it counts as hung "
        f"(default: {DEFAULT_TIME_LIMIT_S:.0f})")  # fmt: skip
    add("--json", metavar="FILE", help="write everything here: numbers, facts about the machine, findings")
    add("--plot", metavar="FILE.png", help="draw the matrices (needs matplotlib: sglang-sm120[bench])")


def p2p_options(args: argparse.Namespace) -> P2pBenchOptions:
    """The parsed options of `add_p2p_arguments`."""
    return P2pBenchOptions(**{name: getattr(args, name) for name in P2pBenchOptions.__dataclass_fields__})


def devices(text: str) -> tuple[int, ...]:
    """Different indices with commas between, two or more."""
    parts = text.split(",")
    if not all(part.isdecimal() for part in parts) or len(set(map(int, parts))) != len(parts) or len(parts) < 2:
        raise argparse.ArgumentTypeError(f"{text!r}: two or more different indices, with commas between, such as 0,1")
    return tuple(map(int, parts))


def seconds(text: str) -> float:
    """A time above 0."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r}: seconds, more than 0")
    return value
