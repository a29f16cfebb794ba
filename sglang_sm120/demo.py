"""`sglang-sm120 demo`: a real server on whatever is there, real requests, and every token checked."""

from __future__ import annotations

import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.panel import Panel
from rich.syntax import Syntax
from rich.table import Table

from sglang_sm120.errors import Sm120Error

if TYPE_CHECKING:
    from sglang_sm120.testing.server import SglangServer

MODEL = Path(__file__).parent / "testing" / "models" / "stdlib-moe"
"""The trained model that comes with the package; its README says what it is."""

PROMPTS = (
    'def binary_search(items, target):\n    """',
    "class Stack:\n    def __init__(self):\n",
    "import os\nimport sys\n\ndef main(argv):\n",
    "    def test_empty(self):\n        ",
    "for index, line in enumerate(lines):\n    if ",
    "try:\n    value = int(text)\nexcept ",
    "def read_file(path):\n    with open(path) as f:\n        ",
    "class Node:\n    def __repr__(self):\n        return ",
    "    raise ValueError(",
    'def join_path(*parts):\n    """Join two or more ',
)

NEAR_TIE_NATS = 0.2
"""On a GPU the server computes in float16 and the reference in float32: where the reference holds two tokens closer
than this, either is right; a wrong scale or expert is off by more than 1. On the CPU both compute in float32, agree far
more closely, and the bound does not matter. Evidence: docs/measurements.md#demo."""


@dataclass(frozen=True)
class Round:
    """One batch of requests sent at once: answers in the order of the prompts, and seconds from first to last."""

    prompts: list[list[int]]
    answers: list[dict[str, Any]]
    seconds: float

    @property
    def tokens(self) -> int:
        return sum(len(answer["output_ids"]) for answer in self.answers)


def run(*, new_tokens: int = 48, log: str | None = None) -> int:
    """Run the demonstration; returns 0 if every token is right, else 1."""
    console = Console()
    signal.signal(signal.SIGTERM, _exit_on_signal)
    try:
        return _run(console, new_tokens, log)
    except Sm120Error as error:
        console.print(str(error), style="red", markup=False)
    except KeyboardInterrupt:
        console.print("stopped; the server is gone")
    except RuntimeError as error:  # ServerDied: its text is the server's own last words
        console.print(str(error), style="red", markup=False)
    return 1


def _exit_on_signal(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)


def _run(console: Console, new_tokens: int, log: str | None) -> int:
    from sglang_sm120.device import current_device
    from sglang_sm120.testing.server import SglangServer

    device = current_device()
    console.print(f"machine: {device.describe()}" + ("" if device.is_sm120 else "; SM120 is emulated"), markup=False)
    with console.status("importing transformers and reading the model") as status:
        from transformers import AutoTokenizer
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()

        tokenizer = AutoTokenizer.from_pretrained(MODEL)
        prompts = [tokenizer(text)["input_ids"] for text in PROMPTS]

        def waiting(seconds: float, last_line: str) -> None:
            status.update(f"starting sglang serve: {seconds:.0f} s  [dim]{_plain(last_line)}[/dim]")

        server = SglangServer(MODEL, server_args(device.capability is not None, device.is_sm120), on_wait=waiting)
        console.print("$ " + " ".join(["sglang", "serve", *server.command[4:]]), style="bold", markup=False)
        try:
            server.__enter__()
            console.print(f"server ready after {server.startup_s:.0f} s", highlight=False)
            for line in server.our_lines():
                console.print(line, style="cyan", markup=False)
            rounds = _ask(server, prompts, new_tokens, status)
        finally:
            if log is not None:
                Path(log).write_text(server.log())
            server.stop()
        status.update("checking every token with transformers on the dequantised checkpoint")
        checks = _check(rounds, "cuda" if device.capability is not None else "cpu")
    _show(console, tokenizer, rounds)
    return _verdict(console, rounds, checks)


def server_args(has_cuda: bool, is_sm120: bool) -> list[str]:
    """Arguments of the demonstration's server: our kernels on a GPU, else the reference; W4A16; small pools."""
    runner = "native" if has_cuda else "reference"
    args = ["--enable-sm120-opts", "--sm120-moe-backend", runner, "--sm120-moe-numerics", "w4a16"]
    if not is_sm120:
        args.append("--sm120-emulate")
    if has_cuda:
        args += ["--cuda-graph-max-bs-decode", "16"]
        if not is_sm120:
            args += ["--attention-backend", "triton", "--sampling-backend", "pytorch"]
    args += ["--dtype", "float16" if has_cuda else "float32"]
    return [*args, "--max-total-tokens", "16384", "--max-running-requests", "16", "--mem-fraction-static", "0.3"]


def _ask(server: SglangServer, prompts: list[list[int]], new_tokens: int, status: Any) -> list[Round]:
    """One, two and ten requests at once. The very first is not timed: SGLang compiles some kernels then."""
    status.update("first request")
    server.generate(prompts[0], max_new_tokens=2)
    rounds = []
    for count in (1, 2, 10):
        status.update(f"{count} request{'s' if count > 1 else ''} at once")
        start = time.monotonic()
        with ThreadPoolExecutor(count) as pool:
            futures = [
                pool.submit(server.generate, prompt, max_new_tokens=new_tokens, return_logprob=True)
                for prompt in prompts[:count]
            ]
            answers = [future.result() for future in futures]
        rounds.append(Round(prompts[:count], answers, time.monotonic() - start))
    return rounds


@dataclass(frozen=True)
class Check:
    """How the tokens of a round compare: equal to the reference's, near ties, and wrong ones."""

    equal: int
    near_ties: int
    wrong: int


def _check(rounds: Sequence[Round], device: str) -> list[Check]:
    from sglang_sm120.testing.checkpoints import ReferenceModel, dequantize_checkpoint

    folder = Path(tempfile.mkdtemp(prefix="sglang-sm120-demo-"))
    try:
        reference = ReferenceModel(dequantize_checkpoint(MODEL, folder / "dequantised"), device=device)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return [check_round(one, reference) for one in rounds]


def check_round(one: Round, reference: Any) -> Check:
    """Compare each token with the reference's choice after the same tokens."""
    equal = near = wrong = 0
    for prompt, answer in zip(one.prompts, one.answers, strict=True):
        tokens = answer["output_ids"]
        for token, score in zip(tokens, reference.score(prompt, tokens), strict=True):
            if token == score.argmax:
                equal += 1
            elif score.argmax_logprob - score.logprob <= NEAR_TIE_NATS:
                near += 1
            else:
                wrong += 1
    return Check(equal, near, wrong)


def _show(console: Console, tokenizer: Any, rounds: Sequence[Round]) -> None:
    for prompt, answer in list(zip(rounds[-1].prompts, rounds[-1].answers, strict=True))[:3]:
        text = tokenizer.decode(prompt) + tokenizer.decode(answer["output_ids"])
        console.print(Panel(Syntax(text, "python", word_wrap=True), title="prompt and answer", expand=False))


def _verdict(console: Console, rounds: Sequence[Round], checks: Sequence[Check]) -> int:
    table = Table(
        "requests", "tokens", "seconds", "tokens/s", "equal", "near ties", "wrong", title="every token checked"
    )
    for one, check in zip(rounds, checks, strict=True):
        table.add_row(
            str(len(one.prompts)), str(one.tokens), f"{one.seconds:.2f}", f"{one.tokens / one.seconds:.1f}",
            f"{check.equal} of {one.tokens}", str(check.near_ties), str(check.wrong),
        )  # fmt: skip
    console.print(table)
    wrong = sum(check.wrong for check in checks)
    if wrong:
        console.print(f"{wrong} tokens differ from the reference", style="bold red")
        return 1
    console.print("every token is right", style="bold green")
    console.print("tokens/s are those of a very small model, end to end; they say nothing of a big one or of a kernel")
    return 0


def _plain(line: str) -> str:
    """A log line that fits a status line, without what rich would take for markup."""
    return line[-90:].replace("[", "(").replace("]", ")")
