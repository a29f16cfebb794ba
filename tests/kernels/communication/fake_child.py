"""A process of a probe without a GPU, kernels or torch: it answers with numbers, and misbehaves where it is told to.

python fake_child.py DEVICE FOLDER FAULTS; FAULTS: JSON, a list of {"device", "do", "act", and "peer" or other arguments
that have to match}. It writes its number, and that of a process that it starts before it hangs, into FOLDER.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

NUMBERS: dict[str, dict[str, Any]] = {
    "start": {"name": "Fake GPU", "pci_bus_id": "", "capability": "12.0", "handle": "00"},
    "can_access": {"can_access": True},
    "open": {},
    "close": {},
    "fill": {},
    "check": {"wrong": 0},
    "ping_pong": {"status": 1, "wrong": 0, "latency_us": 0.5},
    "chase": {"status": 1, "wrong": 0, "latency_us": 1.25},
    "push": {"gb_s": 50.0, "link": {"link_gb_s": 63.0, "link_lanes": 16, "max_link_lanes": 16}},
    "pull": {"gb_s": 45.0, "link": {}},
    "all_to_all": {"status": 1, "gb_s": 40.0},
}


def main() -> None:
    device, folder, faults = int(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3])
    (folder / f"started.{device}.{os.getpid()}").touch()
    answer(device, folder, faults, {"do": "start"})
    for line in sys.stdin:
        answer(device, folder, faults, json.loads(line))


def answer(device: int, folder: Path, faults: list[dict[str, Any]], command: dict[str, Any]) -> None:
    numbers = dict(NUMBERS[command["do"]])
    for fault in faults:
        asked = {**command, "device": device}
        if any(asked.get(name) != value for name, value in fault.items() if name not in ("act", "numbers")):
            continue
        act = fault["act"]
        if act == "hang":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            started = subprocess.Popen(["sleep", "1000"])
            (folder / f"hung.{device}.{started.pid}").touch()
            time.sleep(1000)
        elif act == "crash":
            print("something broke", file=sys.stderr, flush=True)
            os.kill(os.getpid(), signal.SIGSEGV)
        elif act == "exit":
            sys.exit(3)
        elif act == "garbage":
            print("no json", flush=True)
            return
        elif act == "error":
            numbers = {"error": {"found": "cuIpcOpenMemHandle failed", "needed": "x", "fix": "share namespaces"}}
        else:
            numbers |= fault["numbers"]
    print(json.dumps(numbers), flush=True)


if __name__ == "__main__":
    main()
