"""Programs under `ncu`, and its table of launches as groups of kernels; for the scripts beside this one."""

from __future__ import annotations

import csv
import io
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from sglang_sm120.errors import UnsupportedError

METRICS = ("dram__bytes_read.sum", "lts__t_sector_hit_rate.pct", "gpu__time_duration.sum")
MARKER = "spin_kernel"  # of torch.cuda._sleep: launched before every group
_NCU_TIMEOUT_S = 580


@dataclass(frozen=True)
class Kernel:
    """One launch. name as ncu has it; times in microseconds."""

    name: str
    read_bytes: float
    l2_hit_percent: float
    time_us: float


def groups_of_kernels(output: str) -> list[list[Kernel]]:
    """The launches that ncu's CSV lists, split at the markers.

    Raises: UnsupportedError if there is no table in it.
    """
    start = output.find('"ID"')
    if start < 0:
        raise UnsupportedError(
            f"ncu printed no table: {' '.join(output.split())[-400:]}",
            "ncu with the permission to read hardware counters",
            "run as root, or load the driver with NVreg_RestrictProfilingToAdminUsers=0",
        )
    launches: dict[str, dict[str, str]] = {}
    for row in csv.DictReader(io.StringIO(output[start:])):
        if row.get("Metric Name") in METRICS:
            launch = launches.setdefault(row["ID"], {"name": row["Kernel Name"]})
            launch[row["Metric Name"]] = row["Metric Value"].replace(",", "")
    groups: list[list[Kernel]] = []
    for launch in launches.values():
        if MARKER in launch["name"]:
            groups.append([])
        elif groups:
            read_bytes, hit_percent, time_ns = (float(launch.get(metric, "nan")) for metric in METRICS)
            groups[-1].append(Kernel(launch["name"], read_bytes, hit_percent, time_ns / 1e3))
    return groups


def profile(script: Path, arguments: Sequence[str], *, keep_caches: bool = False) -> list[list[Kernel]]:
    """Run a script under ncu; it starts and stops the profiler itself.

    keep_caches: as the program leaves them; then it is run once for each pass over the counters, since repeating a
    kernel would move memory between. Else they are emptied before every kernel.

    Raises: UnsupportedError without ncu, or where it fails.
    """
    program = shutil.which("ncu")
    if program is None:
        raise UnsupportedError(
            "no ncu on PATH", "NVIDIA Nsight Compute, for hardware counters", "install it, or add its folder to PATH"
        )
    caches = ["--cache-control", "none", "--replay-mode", "application"] if keep_caches else []
    command = [
        program, "--csv", "--print-units", "base", "--clock-control", "none", *caches, "--profile-from-start", "off",
        "--target-processes", "all", "--metrics", ",".join(METRICS), sys.executable, str(script.resolve()), *arguments,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_NCU_TIMEOUT_S)
    sys.stderr.write("".join(line for line in done.stderr.splitlines(True) if "not covered" in line))
    if done.returncode:
        raise UnsupportedError(
            f"ncu exited with {done.returncode}: {' '.join((done.stdout + done.stderr).split())[-1500:]}",
            "a run without an error",
            f"look at it: {' '.join(command)}",
        )
    return groups_of_kernels(done.stdout)
