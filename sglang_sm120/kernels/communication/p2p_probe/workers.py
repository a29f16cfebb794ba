"""The processes of a probe, one for each GPU: started, asked with a time limit, killed with all that they started."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sglang_sm120.kernels.communication.p2p_probe import config, report
from sglang_sm120.kernels.communication.p2p_probe.config import Sizes

Command = Callable[[int, Sizes], Sequence[str]]

_DEATH_LIMIT_S = 10.0  # a process in the driver's hands dies when the driver lets go
_ERROR_CHARS = 300
_INSTALLED = ("site-packages", "dist-packages")


class Fault(Exception):
    """What keeps a test from its end. status: of `report`. alive: the processes can be used again."""

    def __init__(self, status: str, detail: str, *, alive: bool = False) -> None:
        super().__init__(detail)
        self.status, self.detail, self.alive = status, detail, alive


def child_command(device: int, sizes: Sizes) -> list[str]:
    """What runs child.py for a GPU."""
    module = f"{__package__}.child"
    return [sys.executable, "-m", module, str(device), str(os.getpid()), json.dumps(asdict(sizes))]


class Worker:
    """One process, in a group of its own that can be killed as a whole."""

    def __init__(self, device: int, command: Sequence[str]) -> None:
        self.device = device
        self.facts: dict[str, Any] = {}  # its first answer
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  (closed by kill)
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            start_new_session=True,
            env=_environment(),
        )
        self._buffer = b""
        self._asked = "start"
        self._killed = False

    def send(self, do: str, **arguments: Any) -> None:
        """Ask; `receive` takes the answer.

        Raises: Fault("crashed").
        """
        self._asked = do
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"do": do, **arguments}).encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            raise self._crash() from None

    def receive(self, deadline: float) -> dict[str, Any]:
        """The answer to what was asked last. deadline: of time.monotonic().

        Raises: Fault: "hung" at the deadline, "crashed" if the process ended, "failed" with the error that it met.
        """
        assert self._process.stdout is not None
        file = self._process.stdout.fileno()
        while b"\n" not in self._buffer:
            left = max(0.0, deadline - time.monotonic())  # at the deadline, what is there is still taken
            if not select.select([file], [], [], left)[0]:
                raise Fault(report.HUNG, f"GPU {self.device} gave no answer to {self._asked!r} in time")
            more = os.read(file, 1 << 16)
            if not more:
                raise self._crash()
            self._buffer += more
        line, _, self._buffer = self._buffer.partition(b"\n")
        try:
            answer = json.loads(line)
        except ValueError:
            raise Fault(report.CRASHED, f"GPU {self.device} answered {line[:80]!r} to {self._asked!r}") from None
        if "error" in answer:
            error = answer["error"]
            detail = f"GPU {self.device}, {self._asked}: {error['found']}"
            raise Fault(report.FAILED, f"{detail}; {error['fix']}" if error.get("fix") else detail)
        return answer

    def ask(self, deadline: float, do: str, **arguments: Any) -> dict[str, Any]:
        """`send` and `receive`."""
        self.send(do, **arguments)
        return self.receive(deadline)

    def kill(self) -> bool:
        """End the process and all that it started, at once. False if it is still there after a while."""
        if self._killed:
            return True
        self._killed = True
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)  # not waited for yet, so the number is still its own
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):
                if pipe is not None:
                    pipe.close()
        try:
            self._process.wait(_DEATH_LIMIT_S)
        except subprocess.TimeoutExpired:
            return False
        finally:
            self._errors.close()
        return True

    def _crash(self) -> Fault:
        code = self._exit_code()
        self._errors.seek(0)
        last = " ".join(self._errors.read()[-4 * _ERROR_CHARS :].split())[-_ERROR_CHARS:]
        detail = f"the process of GPU {self.device} ended with {code} at {self._asked!r}"
        return Fault(report.CRASHED, f"{detail}: {last}" if last else detail)

    def _exit_code(self) -> str:
        """Without reaping it: its group is killed later, by a number that has to stay its own."""
        limit = time.monotonic() + 1.0
        while time.monotonic() < limit:
            ended = os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
            if ended is not None:
                by_signal = ended.si_code != os.CLD_EXITED
                return f"signal {ended.si_status}" if by_signal else f"exit status {ended.si_status}"
            time.sleep(0.01)
        return "its output closed"


class Workers:
    """The workers of a probe; those that are missing are started together."""

    def __init__(self, sizes: Sizes, command: Command = child_command, start_limit_s: float | None = None) -> None:
        self.sizes, self._command = sizes, command
        self._start_limit_s = config.START_LIMIT_S if start_limit_s is None else start_limit_s
        self._workers: dict[int, Worker] = {}
        self._lost: dict[int, Fault] = {}  # devices whose process did not start: they are not tried again
        self._next_flag = 1
        self.facts: dict[int, dict[str, Any]] = {}

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *exception: object) -> None:
        self.kill(list(self._workers))

    def start(self, devices: Iterable[int]) -> None:
        """Have a process for each device, all that can be; those that do not start are told by `get`."""
        devices = [device for device in devices if device not in self._workers and device not in self._lost]
        deadline = time.monotonic() + self._start_limit_s
        for device in devices:
            self._workers[device] = Worker(device, self._command(device, self.sizes))
        for device in devices:
            worker = self._workers[device]
            try:
                worker.facts = worker.receive(deadline)
                self.facts.setdefault(device, {}).update(worker.facts)
            except Fault as fault:
                self._lost[device] = Fault(report.FAILED, f"{fault.detail} (the process did not start)")
                self.kill([device])

    def get(self, devices: Sequence[int]) -> list[Worker]:
        """A worker for each device, started if need be.

        Raises: Fault: one of them does not start.
        """
        self.start(devices)
        for device in devices:
            if device in self._lost:
                lost = self._lost[device]
                raise Fault(lost.status, lost.detail, alive=True)
        return [self._workers[device] for device in devices]

    def kill(self, devices: Iterable[int]) -> None:
        """End these; the next `get` starts them anew, unless one does not die."""
        for device in list(devices):
            worker = self._workers.pop(device, None)
            if worker is not None and not worker.kill() and device not in self._lost:
                detail = f"the process of GPU {device} does not die: its driver call never returned"
                self._lost[device] = Fault(report.HUNG, detail)

    def flags(self, count: int) -> int:
        """The first of so many numbers for flags that were never used."""
        first, self._next_flag = self._next_flag, self._next_flag + count
        return first


def _environment() -> dict[str, str]:
    """So that the child finds this very package, wherever the parent found it."""
    root = Path(__file__).resolve().parents[4]
    if root.name in _INSTALLED:
        return dict(os.environ)
    paths = [str(root), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
