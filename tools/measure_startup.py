"""What the plugin costs at start-up: a process that loads plugins, with the package left out, off, and on.

    python tools/measure_startup.py [--repeat 7]

Interleaved, one fresh process a sample; prints medians, spread and the ratio to the first row. Needs no GPU.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from sglang_sm120.demo import MODEL

# What `sglang serve` does before it spawns: load plugins, parse, resolve. The last row adds our checks of the hooks.
_PROGRAM = """
import sys
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.srt.server_args import prepare_server_args
args = prepare_server_args(sys.argv[1:])
args.resolve_once()
"""
_EMULATE = {"SGLANG_SM120_ENABLE": "1", "SGLANG_SM120_EMULATE": "1"}
_PLUGIN_LOAD = "from sglang.srt.plugins import load_plugins; load_plugins()"

CASES: dict[str, tuple[str, dict[str, str]]] = {
    "load plugins, ours left out": (_PLUGIN_LOAD, {"SGLANG_PLUGINS": "none"}),
    "load plugins, ours off": (_PLUGIN_LOAD, {}),
    "load plugins, ours on": (_PLUGIN_LOAD, _EMULATE),
    "parse and resolve, ours on": (_PROGRAM, _EMULATE),
}


def sample(program: str, env: dict[str, str]) -> float:
    """Seconds of one fresh process."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("SGLANG_")}
    command = [sys.executable, "-W", "ignore", "-c", program, "--model-path", str(MODEL)]
    start = time.perf_counter()
    subprocess.run(command, env={**environ, **env}, check=True, capture_output=True)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=7)
    repeat = parser.parse_args().repeat
    times: dict[str, list[float]] = {name: [] for name in CASES}
    for round_number in tqdm(range(repeat + 1), desc="rounds"):
        for name, (program, env) in CASES.items():
            seconds = sample(program, env)
            if round_number:  # the first round warms the disk cache
                times[name].append(seconds)
    base = statistics.median(next(iter(times.values())))
    print(f"{'case':32} median s   min     max     ratio")
    for name, values in times.items():
        median = statistics.median(values)
        print(f"{name:32} {median:7.2f} {min(values):7.2f} {max(values):7.2f} {median / base:8.3f}")


if __name__ == "__main__":
    main()
