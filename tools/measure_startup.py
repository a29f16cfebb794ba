"""What the plugin costs at start-up, as ratios in one run: interleaved, one fresh process a sample.

    python tools/measure_startup.py [--repeat 7]      # one process: load plugins, parse, resolve; needs no GPU
    python tools/measure_startup.py --serve           # a whole server, until it answers; needs a CUDA GPU

Prints medians, spread and the ratio to the first row of a group. The first round warms the disk cache and is dropped.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from sglang_sm120.demo import MODEL
from sglang_sm120.testing.checkpoints import write_random_model
from sglang_sm120.testing.server import SglangServer

_LOAD = "from sglang.srt.plugins import load_plugins; load_plugins()"
_RESOLVE = (
    _LOAD + "\nimport sys\nfrom sglang.srt.server_args import prepare_server_args\n"
    "prepare_server_args(sys.argv[1:]).resolve_once()\n"
)
_ON = {"SGLANG_SM120_ENABLE": "1", "SGLANG_SM120_EMULATE": "1"}
_SERVE = ["--attention-backend", "triton", "--sampling-backend", "pytorch", "--max-total-tokens", "4096"]


def run_program(program: str, env: dict[str, str]) -> float:
    """Seconds of one fresh process that resolves a server's arguments, or less."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("SGLANG_")}
    arguments = ["--model-path", str(MODEL), "--device", "cpu", "--attention-backend", "torch_native"]
    start = time.perf_counter()
    command = [sys.executable, "-W", "ignore", "-c", program, *arguments]
    subprocess.run(command, env={**environ, **env}, check=True, capture_output=True)
    return time.perf_counter() - start


def start_server(model: Path, args: list[str]) -> float:
    """Seconds from start to the first answer of /health."""
    with SglangServer(model, [*_SERVE, *args]) as server:
        return server.startup_s


def measure(title: str, cases: dict[str, Callable[[], float]], repeat: int) -> None:
    """Time the cases in turn and print a table."""
    times: dict[str, list[float]] = {name: [] for name in cases}
    for round_number in tqdm(range(repeat + 1), desc=title):
        for name, sample in cases.items():
            seconds = sample()
            if round_number:
                times[name].append(seconds)
    base = statistics.median(next(iter(times.values())))
    print(f"\n{title:40} median s     min     max   ratio")
    for name, values in times.items():
        median = statistics.median(values)
        print(f"  {name:38} {median:8.2f} {min(values):7.2f} {max(values):7.2f} {median / base:7.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--serve", action="store_true", help="time whole servers")
    args = parser.parse_args()
    if not args.serve:
        load = {
            "plugin left out": lambda: run_program(_LOAD, {"SGLANG_PLUGINS": "none"}),
            "plugin there, flag off": lambda: run_program(_LOAD, {}),
            "plugin there, flag on": lambda: run_program(_LOAD, _ON),
        }
        resolve = {
            "plugin left out": lambda: run_program(_RESOLVE, {"SGLANG_PLUGINS": "none"}),
            "plugin there, flag off": lambda: run_program(_RESOLVE, {}),
            "plugin there, flag on": lambda: run_program(_RESOLVE, _ON),
        }
        measure("load plugins", load, args.repeat)
        measure("load plugins, parse and resolve", resolve, args.repeat)
        return
    if not torch.cuda.is_available():
        sys.exit(
            "measure_startup: no CUDA GPU found; needed: one (stock SGLang serves nowhere else); fix: drop --serve"
        )
    with tempfile.TemporaryDirectory() as folder:
        model = write_random_model(Path(folder) / "model", "qwen3_moe")
        on = ["--enable-sm120-opts"]
        if torch.cuda.get_device_capability()[0] != 12:
            on.append("--sm120-emulate")
        serve = {"flag off": lambda: start_server(model, []), "flag on": lambda: start_server(model, on)}
        measure("serve a small BF16 model", serve, args.repeat)


if __name__ == "__main__":
    main()
