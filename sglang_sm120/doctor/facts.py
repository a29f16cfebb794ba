"""All that doctor knows of a machine, gathered once; the checks are functions of it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from sglang_sm120.doctor import facts_cgroup, facts_pci
from sglang_sm120.doctor.facts_gpus import Driver, Gpu, read_driver
from sglang_sm120.doctor.machine import COMMANDS, Machine
from sglang_sm120.kernels.communication.p2p_probe.environment import Environment, read_environment

_IN_CONTAINERS = ("/.dockerenv", "/run/.containerenv", "/run/systemd/container", "/var/run/secrets/kubernetes.io")
"""With cgroups of version 2 a container no longer shows in /proc/1/cgroup."""


@dataclass(frozen=True)
class Host:
    """The host's own resources, in bytes; None where they are not known.

    memory, available: within the limit of the process's control groups; limit: that, where it is lower than the
    machine's memory. files_hard, locked: hard limits of this process; -1 is none. nodes: NUMA nodes with memory, with
    their bytes. container: this process is in one. virtual: this is a virtual machine, which sees buses of its own.
    """

    memory: int | None = None
    available: int | None = None
    limit: int | None = None
    shared: int | None = None
    shared_free: int | None = None
    files_hard: int | None = None
    locked: int | None = None
    nodes: tuple[tuple[int, int], ...] = ()
    container: bool = False
    virtual: bool = False


@dataclass(frozen=True)
class Torch:
    """What torch said of itself in a process of its own. state: of that process."""

    state: str = "skipped"
    detail: str = ""
    version: str = ""
    cuda: str = ""
    archs: tuple[str, ...] = ()
    gpus: tuple[Mapping[str, Any], ...] | None = None
    cuda_error: str = ""


@dataclass(frozen=True)
class Facts:
    """One machine. quick: gathered without starting a process, so `driver` and `torch` say "skipped"."""

    quick: bool
    environ: Mapping[str, str]
    driver: Driver
    pci_gpus: tuple[facts_pci.PciGpu, ...]
    bus: Environment
    bridges: tuple[facts_pci.Bridge, ...]
    lspci: str
    module: str
    host: Host
    python: Mapping[str, Any]
    torch: Torch
    nvcc: str = ""
    profiles: tuple[Mapping[str, str], ...] = ()

    def version(self, package: str) -> str:
        """Of an installed package; empty where there is none. Of several the one that is imported."""
        versions = self.python.get("packages", {}).get(package) or [""]
        return str(versions[0])

    @property
    def gpus(self) -> tuple[Gpu, ...]:
        """Those that a server would run on: the SM120 ones; all of them where there is none."""
        ours = tuple(gpu for gpu in self.driver.gpus if gpu.is_sm120)
        return ours or self.driver.gpus

    @property
    def sm120_capabilities(self) -> tuple[tuple[int, int], ...]:
        """Of the SM120 GPUs that are here, each once; as torch has them where the driver lists none."""
        if not self.driver.gpus:
            seen = (gpu["capability"] for gpu in self.torch.gpus or ())
            return tuple(sorted({(int(major), int(minor)) for major, minor in seen if major == 12}))
        return tuple(sorted({gpu.sm120_capability for gpu in self.driver.gpus if gpu.sm120_capability is not None}))


def gather(machine: Machine, *, quick: bool = False) -> Facts:
    """Read everything. Raises nothing that the machine can cause: what cannot be read is left out.

    Args:
        machine: this one, or a recording.
        quick: no command is asked for.
    """
    if not quick:  # each waits for its process, so they wait together
        # torch starts CUDA, and nvidia-smi would show that process as a user of the GPUs: so it comes after.
        tools = [name for name in COMMANDS if name != "torch"]
        with ThreadPoolExecutor(len(tools)) as pool:
            list(pool.map(machine.run, tools))
    driver = read_driver(machine)
    on_bus = facts_pci.read_gpus(machine)
    ids = [gpu.bus_id for gpu in driver.gpus] or [gpu.bus_id for gpu in on_bus]
    bus = read_environment(ids, reader=machine)
    lspci = machine.run("lspci")
    bridges = facts_pci.read_bridges(lspci.text, ids) if lspci.ok else ()
    redirecting = facts_pci.redirecting(bridges, ids)
    if redirecting and not bus.acs_bridges:  # lspci as root sees what the files show to root alone
        bus = replace(bus, acs_bridges=redirecting)
    torch = _torch(machine)
    nvcc = re.search(r"release (\d+\.\d+)", machine.run("nvcc").text)
    return Facts(
        quick=quick,
        environ=machine.environ,
        driver=driver,
        pci_gpus=on_bus,
        bus=bus,
        bridges=bridges,
        lspci=facts_pci.access(lspci.text, ids) if lspci.ok else lspci.state,
        module=_module(machine),
        host=_host(machine),
        python=machine.python(),
        torch=torch,
        nvcc=nvcc[1] if nvcc else "",
        profiles=tuple(machine.profiles(torch.gpus, driver.version)) if torch.gpus else (),
    )


def _module(machine: Machine) -> str:
    """The kernel module's first line: "... NVIDIA UNIX Open Kernel Module for x86_64  580.65.06 ..."."""
    lines = machine.text("/proc/driver/nvidia/version").splitlines()
    return " ".join(lines[0].split()) if lines else ""


def _host(machine: Machine) -> Host:
    memory = _meminfo(machine.text("/proc/meminfo"))
    limits = machine.text("/proc/self/limits")
    shared = machine.space("/dev/shm")
    nodes = []
    for name in machine.names("/sys/devices/system/node"):
        if number := re.fullmatch(r"node(\d+)", name):
            total = re.search(r"MemTotal:\s*(\d+) kB", machine.text(f"/sys/devices/system/node/{name}/meminfo"))
            if total and int(total[1]):
                nodes.append((int(number[1]), int(total[1]) << 10))
    groups = machine.text("/proc/1/cgroup")
    whole, available = memory.get("MemTotal"), memory.get("MemAvailable")
    limited = facts_cgroup.memory_limit(machine, whole) if whole else None
    if limited is not None:
        whole, available = limited[0], min(limited[1], limited[1] if available is None else available)
    return Host(
        memory=whole,
        available=available,
        limit=limited[0] if limited else None,
        shared=shared[0] if shared else None,
        shared_free=shared[1] if shared else None,
        files_hard=_hard_limit(limits, "Max open files"),
        locked=_hard_limit(limits, "Max locked memory"),
        nodes=tuple(sorted(nodes)),
        container=bool(machine.text("/run/.containerenv") or re.search(r"docker|kubepods|containerd|lxc", groups))
        or any(machine.real(path) for path in _IN_CONTAINERS)
        or bool(machine.environ.get("NVIDIA_VISIBLE_DEVICES")),
        # Set by hypervisors on x86 (CPUID leaf 1, ECX bit 31), for their guests alone.
        virtual=bool(re.search(r"^flags\s*:.*\bhypervisor\b", machine.text("/proc/cpuinfo"), re.MULTILINE)),
    )


def _meminfo(text: str) -> dict[str, int]:
    return {name: int(kib) << 10 for name, kib in re.findall(r"^(\w+):\s*(\d+) kB", text, re.MULTILINE)}


def _hard_limit(text: str, name: str) -> int | None:
    """Of a line of /proc/self/limits; -1 for unlimited."""
    match = re.search(rf"^{name}\s+(?:\d+|unlimited)\s+(\d+|unlimited)", text, re.MULTILINE)
    if match is None:
        return None
    return -1 if match[1] == "unlimited" else int(match[1])


def _torch(machine: Machine) -> Torch:
    output = machine.run("torch")
    said: dict[str, Any] = {}
    for line in output.text.splitlines():
        try:
            parsed = json.loads(line)
        except ValueError:
            continue
        if isinstance(parsed, dict):
            said |= parsed
    archs, gpus = said.get("archs"), said.get("gpus")
    return Torch(
        state=output.state,
        detail=output.why(),
        version=str(said.get("version", "")),
        cuda=str(said.get("cuda") or ""),
        archs=tuple(map(str, archs)) if isinstance(archs, list) else (),
        gpus=tuple(gpus) if isinstance(gpus, list) and all(map(_is_gpu, gpus)) else None,
        cuda_error=str(said.get("cuda_error", "")),
    )


def _is_gpu(entry: Any) -> bool:
    """Whether it is one of `_TORCH`'s: a package that torch imports may print JSON of its own."""
    if not isinstance(entry, dict) or not isinstance(entry.get("name"), str):
        return False
    capability = entry.get("capability")
    numbers = [*capability, entry.get("multiprocessors")] if isinstance(capability, list) else []
    return len(numbers) == 3 and all(isinstance(number, int) for number in numbers)
