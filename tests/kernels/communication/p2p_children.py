"""Children of a probe that misbehave, and whether processes are gone."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sglang_sm120.kernels.communication.p2p_probe.workers import Command

HERE = Path(__file__).parent
Act = dict[str, Any]


def fake_command(folder: Path, *faults: Act) -> Command:
    script = str(HERE / "fake_child.py")
    return lambda device, sizes: [sys.executable, "-S", script, str(device), str(folder), json.dumps(faults)]


def numbers_of(folder: Path, what: str) -> list[int]:
    """Of the processes that fake children noted."""
    return [int(path.name.rpartition(".")[2]) for path in folder.glob(f"{what}.*")]


def is_gone(number: int) -> bool:
    """Ended; perhaps nobody has asked how."""
    try:
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def until(condition: Callable[[], bool], seconds: float = 10.0) -> bool:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    return condition()
