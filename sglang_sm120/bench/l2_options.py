"""The options of `sglang-sm120 bench l2`, and the shapes it knows. Standard library only: `--help` needs them."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from sglang_sm120.bench.options import MODELS, ModelShape, counts, repeats

CACHES = 5
"""Bytes between two uses of a weight, in sizes of the L2 cache: nothing may be left of the last use."""

MIN_LAYERS = 8
BUDGET_SHARE = 4  # of L2: what one prefetch may fetch, as the server's own default


@dataclass(frozen=True)
class Mla:
    """Multi-head latent attention of one rank, with the absorbed projections that decode reads."""

    num_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int

    def projections(self, hidden_size: int) -> dict[str, tuple[int, int]]:
        """(out, in) features of the dense projections, in the order of use."""
        head_dim = self.qk_nope_head_dim + self.qk_rope_head_dim
        return {
            "fused_qkv_a_proj": (self.q_lora_rank + self.kv_lora_rank + self.qk_rope_head_dim, hidden_size),
            "q_b_proj": (self.num_heads * head_dim, self.q_lora_rank),
            "o_proj": (hidden_size, self.num_heads * self.v_head_dim),
        }

    def absorbed(self) -> dict[str, tuple[int, int, int]]:
        """Shapes of w_kc and w_vc."""
        return {
            "w_kc": (self.num_heads, self.qk_nope_head_dim, self.kv_lora_rank),
            "w_vc": (self.num_heads, self.kv_lora_rank, self.v_head_dim),
        }

    def cache_elements(self) -> int:
        """Of one token in the KV cache."""
        return self.kv_lora_rank + self.qk_rope_head_dim


@dataclass(frozen=True)
class Gqa:
    """Grouped-query attention of one rank."""

    num_heads: int
    num_kv_heads: int
    head_dim: int

    def projections(self, hidden_size: int) -> dict[str, tuple[int, int]]:
        """(out, in) features of the dense projections, in the order of use."""
        return {
            "qkv_proj": ((self.num_heads + 2 * self.num_kv_heads) * self.head_dim, hidden_size),
            "o_proj": (hidden_size, self.num_heads * self.head_dim),
        }

    def absorbed(self) -> dict[str, tuple[int, int, int]]:
        """None here."""
        return {}

    def cache_elements(self) -> int:
        """Of one token in the KV cache."""
        return 2 * self.num_kv_heads * self.head_dim


@dataclass(frozen=True)
class StackShape:
    """One decoder layer of one rank: routed experts, attention, and the shared expert's intermediate size (0: none)."""

    experts: ModelShape
    attention: Mla | Gqa
    shared_intermediate_size: int = 0

    @property
    def name(self) -> str:
        return self.experts.name

    def projections(self) -> dict[str, tuple[int, int]]:
        """(out, in) features of every dense projection, in the order of use."""
        hidden, shared = self.experts.hidden_size, self.shared_intermediate_size
        ffn = {"router": (self.experts.num_experts, hidden)}
        if shared:
            ffn |= {"shared_gate_up": (2 * shared, hidden), "shared_down": (hidden, shared)}
        return {**self.attention.projections(hidden), **ffn}

    def dense_bytes(self) -> int:
        """Of all dense weights but the norms, in bfloat16."""
        shapes = (*self.projections().values(), *self.attention.absorbed().values())
        return sum(2 * math.prod(shape) for shape in shapes)

    def expert_bytes(self) -> int:
        """Packed weights and block scales of one routed expert: 9 bytes for 16 elements."""
        return 3 * self.experts.intermediate_size * self.experts.hidden_size * 9 // 16

    def step_bytes(self, layers: int) -> int:
        """Least that one step of so many layers reads: dense weights, and the experts of one token."""
        return layers * (self.dense_bytes() + self.experts.top_k * self.expert_bytes())

    def layers_needed(self, l2_bytes: int) -> int:
        """So many that CACHES times L2 are read between two uses of a weight."""
        return math.ceil(CACHES * l2_bytes / self.step_bytes(1)) + 1


# config.json of zai-org/GLM-5, deepseek-ai/DeepSeek-V3 and Qwen/Qwen3-235B-A22B, divided by the ranks of the name.
STACKS = {
    stack.name: stack
    for stack in (
        StackShape(MODELS["glm5-tp8"], Mla(8, 2048, 512, 192, 64, 256), 256),
        StackShape(MODELS["qwen3-235b-tp4"], Gqa(16, 1, 128)),
        StackShape(MODELS["deepseek-v3-tp8"], Mla(16, 1536, 512, 128, 64, 128), 256),
    )
}


@dataclass(frozen=True)
class L2BenchOptions:
    """What to measure and where to put it.

    layers: of the stack; None: MIN_LAYERS, or more where L2 needs it. budget_bytes: of one prefetch; None: L2 /
    BUDGET_SHARE. blocks: of the prefetch kernel; None: its own. Files: a path or None.
    """

    models: tuple[StackShape, ...] = tuple(STACKS.values())
    tokens: tuple[int, ...] = (1, 2, 10, 64)
    wait_us: tuple[float, ...] = (5.0, 10.0, 20.0)
    layers: int | None = None
    context: int = 4096
    budget_bytes: int | None = None
    blocks: int | None = None
    captures: int = 3
    repeat: int = 9
    seed: int = 0
    json: str | None = None
    from_json: str | None = None
    markdown: str | None = None
    plot: str | None = None


def add_l2_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    default = L2BenchOptions()
    add = parser.add_argument
    add("--model", dest="models", type=_stack, nargs="+", default=list(default.models), metavar="MODEL",
        help=f"one or more of {', '.join(STACKS)} (default: all)")  # fmt: skip
    add("--tokens", type=counts, nargs="+", default=[default.tokens], metavar="N",
        help=f"tokens a step (default: {' '.join(map(str, default.tokens))})")  # fmt: skip
    add("--wait-us", type=_waits, nargs="+", default=[default.wait_us], metavar="US",
        help="how long the wait is that stands for an all-reduce, in microseconds; 0 for none (default: "
        f"{' '.join(f'{wait:g}' for wait in default.wait_us)})")  # fmt: skip
    add("--layers", type=_number(2), metavar="N",
        help=f"layers of the stack, enough to read {CACHES} times L2 between two uses of a weight (default: "
        f"{MIN_LAYERS}, or more where L2 needs it)")  # fmt: skip
    add("--context", type=_number(1), default=default.context, metavar="N",
        help=f"tokens in the KV cache of each sequence (default: {default.context})")  # fmt: skip
    add("--budget-mb", dest="budget_bytes", type=_megabytes, metavar="MB",
        help=f"how much one prefetch may fetch, in MB (2^20 bytes; default: L2 / {BUDGET_SHARE})")  # fmt: skip
    add("--blocks", type=_number(1, 1024), metavar="N", help="blocks of the prefetch kernel (default: its own)")
    add("--captures", type=_number(1), default=default.captures, metavar="N",
        help="graphs of every candidate: one and the same graph differs from capture to capture (default: "
        f"{default.captures})")  # fmt: skip
    add("--repeat", type=repeats, default=default.repeat, metavar="N",
        help=f"samples of every graph (default: {default.repeat})")  # fmt: skip
    add("--seed", type=int, default=default.seed, metavar="N", help="of weights and routings (default: 0)")
    add("--json", metavar="FILE", help="write everything here, raw samples too; after every point")
    add("--from-json", metavar="FILE", help="measure nothing: report what --json wrote")
    add("--markdown", metavar="FILE", help="write the tables here as Markdown")
    add("--plot", metavar="FILE.png", help="draw the results (needs matplotlib: sglang-sm120[bench])")


def l2_options(args: argparse.Namespace) -> L2BenchOptions:
    """The parsed options of `add_l2_arguments`."""
    values = {name: getattr(args, name) for name in L2BenchOptions.__dataclass_fields__}
    values["models"] = tuple({stack.name: stack for stack in args.models}.values())
    return L2BenchOptions(**{**values, "tokens": _flat(args.tokens), "wait_us": _flat(args.wait_us)})


T = TypeVar("T")


def _flat(lists: list[tuple[T, ...]]) -> tuple[T, ...]:
    """Each once, in the order given."""
    return tuple(dict.fromkeys(value for some in lists for value in some))


def _stack(text: str) -> StackShape:
    if text not in STACKS:
        raise argparse.ArgumentTypeError(f"{text!r}: {', '.join(STACKS)}")
    return STACKS[text]


def _waits(text: str) -> tuple[float, ...]:
    """Microseconds with commas between."""
    try:
        values = tuple(float(part) for part in text.split(","))
    except ValueError:
        values = (math.nan,)
    if not all(0 <= value <= 1e4 for value in values):
        raise argparse.ArgumentTypeError(f"{text!r}: microseconds from 0 to 10000, such as 10")
    return values


def _number(least: int, most: int | None = None) -> Callable[[str], int]:
    def number(text: str) -> int:
        if not text.isdecimal() or int(text) < least or (most is not None and int(text) > most):
            bounds = f"{least} or more" if most is None else f"{least} to {most}"
            raise argparse.ArgumentTypeError(f"{text!r}: a number, {bounds}")
        return int(text)

    return number


def _megabytes(text: str) -> int:
    """Bytes of a number of MB above 0."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value <= 4096:  # no GPU has as much L2
        raise argparse.ArgumentTypeError(f"{text!r}: MB, more than 0 and up to 4096")
    return int(value * (1 << 20))
