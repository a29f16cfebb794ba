"""The process of one GPU in a probe: it does what it is told on its standard input, a line of JSON at a time.

Run as `python -m sglang_sm120.kernels.communication.p2p_probe.child DEVICE PARENT SIZES`. It answers each line with one
on what was its standard output; prints of libraries go to standard error. It ends with its input, and with its parent.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TextIO

import torch

from sglang_sm120.errors import Sm120Error
from sglang_sm120.kernels.communication import ipc
from sglang_sm120.kernels.communication.p2p_probe import config, kernel
from sglang_sm120.kernels.communication.p2p_probe.config import VECTOR_BYTES, Sizes
from sglang_sm120.kernels.communication.p2p_probe.environment import read_link
from sglang_sm120.kernels.cuda.module import load

_PR_SET_PDEATHSIG = 1
Launch = Callable[[], None]


class Machine(Protocol):
    """A device and the memory that it shares."""

    kernels: kernel.Kernels
    result: Any  # its words, as the host sees them

    def facts(self) -> dict[str, Any]: ...
    def allocate(self, num_bytes: int) -> int: ...
    def export_handle(self, pointer: int) -> bytes: ...
    def open_handle(self, handle: bytes) -> int: ...
    def close_handle(self, pointer: int) -> None: ...
    def can_access_peer(self, peer: int) -> bool: ...
    def synchronize(self) -> None: ...
    def clear_result(self) -> None: ...
    def times_us(self, steps: Sequence[tuple[Launch | None, Launch]]) -> list[float]:
        """Queue each step's first launch, if there is one, then time its second; all without waiting between."""


class CudaMachine:
    """A GPU, by torch and `ipc`."""

    def __init__(self, device: int) -> None:
        """Raises: Sm120Error, or torch's error, if it does not start."""
        self.device = device
        torch.cuda.set_device(device)
        torch.cuda.synchronize()
        self._words = ipc.HostWords(kernel.RESULT_WORDS)
        self.result = self._words.words
        module = load(kernel.SOURCE, torch.device("cuda", device))
        self.kernels = kernel.Kernels(module, self._words.device_pointer)
        self.allocate, self.synchronize = ipc.allocate, torch.cuda.synchronize
        self.export_handle, self.open_handle, self.close_handle = ipc.export_handle, ipc.open_handle, ipc.close_handle

    def facts(self) -> dict[str, Any]:
        """What `report.Gpu` holds."""
        of = torch.cuda.get_device_properties(self.device)
        bus_id = ipc.pci_bus_id(self.device)
        rate, lanes, most = read_link(bus_id)
        return {
            "name": of.name,
            "pci_bus_id": bus_id,
            "capability": f"{of.major}.{of.minor}",
            "link_gb_s": rate,
            "link_lanes": lanes,
            "max_link_lanes": most,
        }

    def can_access_peer(self, peer: int) -> bool:
        return ipc.can_access_peer(self.device, peer)

    def clear_result(self) -> None:
        self.result[:] = [0] * kernel.RESULT_WORDS

    def times_us(self, steps: Sequence[tuple[Launch | None, Launch]]) -> list[float]:
        events = []
        for before, timed in steps:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            if before is not None:
                before()
            start.record()
            timed()
            end.record()
            events.append((start, end))
        torch.cuda.synchronize()
        return [start.elapsed_time(end) * 1e3 for start, end in events]


class Child:
    """The commands. Numbers are whole or in microseconds and GB/s (1e9); what went wrong is an exception."""

    def __init__(self, machine: Machine, sizes: Sizes) -> None:
        self.machine, self.sizes = machine, sizes
        self.window = machine.allocate(sizes.window_bytes)
        self.peers: dict[int, int] = {}  # device -> its window here
        machine.kernels.fill_chain(self.window + config.CHAIN)
        self._warm_up()
        machine.synchronize()

    def _warm_up(self) -> None:
        """Every kernel once, on memory here: a kernel is loaded when it is first launched."""
        kernels, sizes, here = self.machine.kernels, self.sizes, self.window
        vectors = sizes.data_bytes // VECTOR_BYTES
        kernels.fill(here + config.SOURCE, vectors, seed=1)
        kernels.copy([here + config.SOURCE], [here + sizes.inbox], vectors)
        kernels.check(here + sizes.inbox, vectors, seed=1)
        kernels.chase(here + config.CHAIN, warmup=0, hops=1, limit_ns=1)
        own_flag = here + config.flag_offset(1 + config.MAX_PEERS + 1)  # nobody's
        kernels.meet([own_flag], [own_flag], flag=1, limit_ns=1)
        kernels.ping_pong(here, here, first_flag=0, message_bytes=0, warmup=0, rounds=1, starts=False, limit_ns=1)

    def ready(self) -> dict[str, Any]:
        """The first line."""
        return {**self.machine.facts(), "handle": self.machine.export_handle(self.window).hex()}

    def can_access(self, peer: int) -> dict[str, Any]:
        return {"can_access": self.machine.can_access_peer(peer)}

    def open(self, peer: int, handle: str) -> dict[str, Any]:
        self.peers[peer] = self.machine.open_handle(bytes.fromhex(handle))
        return {}

    def close(self, peer: int) -> dict[str, Any]:
        self.machine.close_handle(self.peers.pop(peer))
        return {}

    def fill(self, source_seed: int, inbox_seed: int) -> dict[str, Any]:
        vectors = self.sizes.data_bytes // VECTOR_BYTES
        self.machine.kernels.fill(self.window + config.SOURCE, vectors, source_seed)
        self.machine.kernels.fill(self.window + self.sizes.inbox, vectors, inbox_seed)
        self.machine.synchronize()
        return {}

    def check(self, seed: int, at: int = 0, first: int = 0, vectors: int | None = None) -> dict[str, Any]:
        """The inbox from vector `at` on; first: number of that vector in the sender's source."""
        count = self.sizes.data_bytes // VECTOR_BYTES if vectors is None else vectors
        self.machine.clear_result()
        self.machine.kernels.check(self.window + self.sizes.inbox + at * VECTOR_BYTES, count, seed, first)
        self.machine.synchronize()
        return {"wrong": self.machine.result[1] if self.machine.result[0] == kernel.DONE else count}

    def ping_pong(self, peer: int, starts: bool, first_flag: int, message_bytes: int, limit_ns: int) -> dict[str, Any]:
        """latency_us: one way."""
        self.machine.clear_result()
        self.machine.kernels.ping_pong(
            self.window,
            self.peers[peer],
            first_flag=first_flag,
            message_bytes=message_bytes,
            warmup=self.sizes.warmup,
            rounds=self.sizes.rounds,
            starts=starts,
            limit_ns=limit_ns,
        )
        self.machine.synchronize()
        return {**self._result(), "latency_us": self._ns() / self.sizes.rounds / 2e3}

    def chase(self, peer: int, limit_ns: int) -> dict[str, Any]:
        warmup, hops = self.sizes.warmup, self.sizes.hops
        self.machine.clear_result()
        self.machine.kernels.chase(self.peers[peer] + config.CHAIN, warmup=warmup, hops=hops, limit_ns=limit_ns)
        self.machine.synchronize()
        result = self._result()
        result["wrong"] = int(result["wrong"] != config.last_of_chain(warmup + hops))
        return {**result, "latency_us": self._ns() / hops / 1e3}

    def push(self, peer: int) -> dict[str, Any]:
        return self._copy(self.window + config.SOURCE, self.peers[peer] + self.sizes.inbox)

    def pull(self, peer: int) -> dict[str, Any]:
        return self._copy(self.peers[peer] + config.SOURCE, self.window + self.sizes.inbox)

    def _copy(self, source: int, target: int) -> dict[str, Any]:
        size = self.sizes.data_bytes

        def copy() -> None:
            self.machine.kernels.copy([source], [target], size // VECTOR_BYTES)

        self._warm_up_link(copy)
        times = self.machine.times_us([(None, copy)] * (self.sizes.warmup + self.sizes.samples))
        rate, lanes, most = read_link(self.machine.facts()["pci_bus_id"])  # now, while the link is not idle
        link = {"link_gb_s": rate, "link_lanes": lanes, "max_link_lanes": most}
        return {"gb_s": self._gb_s(size, times), "link": link}

    def _warm_up_link(self, copy: Launch) -> None:
        end = time.monotonic() + self.sizes.warmup_s
        while time.monotonic() < end:
            self.machine.times_us([(None, copy)] * 8)

    def all_to_all(self, order: list[int], place: int, pull: bool, first_flag: int, limit_ns: int) -> dict[str, Any]:
        """With the GPUs of `order`, this one at `place`: part j of GPU i's source comes to part i of GPU j's inbox."""
        vectors = config.part_vectors(self.sizes.data_bytes, len(order))
        others = [i for i in range(len(order)) if i != place]
        windows = [self.peers[order[i]] for i in others]

        def part(window: int, start: int, number: int) -> int:
            return window + start + number * vectors * VECTOR_BYTES

        if pull:
            sources = [part(window, config.SOURCE, place) for window in windows]
            targets = [part(self.window, self.sizes.inbox, i) for i in others]
        else:
            sources = [part(self.window, config.SOURCE, i) for i in others]
            targets = [part(window, self.sizes.inbox, place) for window in windows]
        mine = [self.window + config.flag_offset(1 + i) for i in others]
        theirs = [window + config.flag_offset(1 + place) for window in windows]
        kernels = self.machine.kernels

        def meet(flag: int) -> Launch:
            return lambda: kernels.meet(mine, theirs, flag=flag, limit_ns=limit_ns)

        def copy() -> None:
            kernels.copy(sources, targets, vectors)

        self._warm_up_link(copy)
        self.machine.clear_result()
        steps = [(meet(first_flag + i), copy) for i in range(self.sizes.warmup + self.sizes.samples)]
        times = self.machine.times_us(steps)
        status = kernel.TIMED_OUT if self.machine.result[0] == kernel.TIMED_OUT else kernel.DONE
        return {"status": status, "gb_s": self._gb_s(len(others) * vectors * VECTOR_BYTES, times)}

    def _gb_s(self, num_bytes: int, times_us: list[float]) -> float:
        return num_bytes / max(statistics.median(times_us[self.sizes.warmup :]), 1e-3) / 1e3

    def _result(self) -> dict[str, int]:
        return {"status": self.machine.result[0], "wrong": self.machine.result[1]}

    def _ns(self) -> int:
        return self.machine.result[2] | self.machine.result[3] << 32


def serve(child: Child, commands: TextIO, answers: TextIO) -> None:
    """Until the commands end: {"do": name, ...its arguments} gives what it returns, or {"error": ...}."""
    _answer(answers, child.ready())
    for line in commands:
        command = json.loads(line)
        name = command.pop("do")
        try:
            _answer(answers, getattr(child, name)(**command))
        except Exception as error:  # whatever it is: the parent decides
            _answer(answers, {"error": _words(error)})


def _answer(answers: TextIO, answer: dict[str, Any]) -> None:
    answers.write(json.dumps(answer) + "\n")
    answers.flush()


def _words(error: Exception) -> dict[str, str]:
    if isinstance(error, Sm120Error):
        return {"found": error.found, "needed": error.needed, "fix": error.fix}
    return {"found": " ".join(f"{type(error).__name__}: {error}".split())[:500], "needed": "", "fix": ""}


def run(make_machine: Callable[[int], Machine], arguments: Sequence[str]) -> int:
    """The whole life of the process. arguments: device, parent's process id, sizes as JSON."""
    device, parent, sizes = int(arguments[0]), int(arguments[1]), Sizes(**json.loads(arguments[2]))
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        return 1  # it ended before that took effect
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    try:
        child = Child(make_machine(device), sizes)
    except Exception as error:  # the parent has to hear why
        _answer(answers, {"error": _words(error)})
        return 1
    serve(child, sys.stdin, answers)
    return 0


if __name__ == "__main__":
    sys.exit(run(CudaMachine, sys.argv[1:]))
