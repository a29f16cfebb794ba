"""The PCI bus: the GPUs that sit on it, whether or not a driver has them, and the bridges above, from lspci."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from sglang_sm120.doctor.machine import Machine
from sglang_sm120.kernels.communication.p2p_probe.environment import dividing_ports

_DEVICES = "/sys/bus/pci/devices"
_NVIDIA = "0x10de"
_DISPLAY = "0x03"  # base class of VGA and 3D controllers
_REDIRECTS = ("ReqRedir+", "CmpltRedir+")  # upstream forwarding alone sends nothing up


@dataclass(frozen=True)
class PciGpu:
    """An NVIDIA display controller on the bus. driver: the kernel's, or empty. node: of NUMA, -1 for none."""

    bus_id: str
    driver: str
    node: int | None = None


@dataclass(frozen=True)
class Bridge:
    """A bridge above at least one of the GPUs, as lspci shows it.

    Attributes:
        kind: "Root Port", "Upstream Port", "Downstream Port" or what else lspci says; "bridge" where it does not.
        redirects: its ACS sends what comes from below up to the root; None where lspci does not show whether.
        secondary: the number of the bus right below it.
    """

    bus_id: str
    kind: str
    redirects: bool | None
    gpus: tuple[str, ...]
    secondary: int = -1


def read_gpus(machine: Machine) -> tuple[PciGpu, ...]:
    """In the order of the bus; empty where /sys is not there."""
    found = []
    for bus_id in machine.names(_DEVICES):
        folder = f"{_DEVICES}/{bus_id}"
        if machine.text(f"{folder}/vendor").strip() != _NVIDIA:
            continue
        if not machine.text(f"{folder}/class").strip().startswith(_DISPLAY):
            continue
        node = machine.text(f"{folder}/numa_node").strip()
        driver = machine.real(f"{folder}/driver").rpartition("/")[2]
        found.append(PciGpu(bus_id, driver, int(node) if re.fullmatch(r"-?\d+", node) else None))
    return tuple(found)


def read_bridges(text: str, gpus: Sequence[str]) -> tuple[Bridge, ...]:
    """The bridges above these GPUs, from `lspci -D -vvv`, nearest first for each GPU.

    A bridge leads to the buses from its secondary to its subordinate number, in its own domain.
    """
    found = []
    for bus_id, block in _blocks(text):
        buses = re.search(r"Bus: primary=\w+, secondary=([0-9a-f]+), subordinate=([0-9a-f]+)", block)
        if buses is None:
            continue
        first, last = int(buses[1], 16), int(buses[2], 16)
        below = tuple(gpu for gpu in gpus if gpu[:4] == bus_id[:4] and first <= _bus(gpu) <= last)
        if below:
            kind = re.search(r"Express \(v\d\) ([\w /-]+?)(?: \(Slot[+-]\))?(?:, |$)", block, re.MULTILINE)
            bridge = Bridge(bus_id, kind[1] if kind else "bridge", _redirects(block), below, first)
            found.append((last - first, bridge))
    return tuple(bridge for _, bridge in sorted(found, key=lambda item: (item[0], item[1].bus_id)))


def _redirects(block: str) -> bool | None:
    """None where the block may lack what would say so: root alone may read it, or it was cut.

    The capability is one of the extended ones; where there are others and not this, the port does not redirect.
    """
    control = re.search(r"ACSCtl:(.*)\n", block)
    if control is not None:
        return any(flag in control[1] for flag in _REDIRECTS)
    whole = block.endswith("\n\n") and "<access denied>" not in block
    known = whole and "Access Control Services" not in block and re.search(r"Capabilities: \[[0-9a-f]{3} v\d", block)
    return False if known else None


def chains(bridges: Sequence[Bridge], gpus: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """GPU -> the bridges above it, nearest first; those only that lead up to a root port without a gap."""
    found = {}
    for gpu in gpus:
        chain, bus, seen = [], _bus(gpu), set()
        while bus not in seen:
            seen.add(bus)
            above = next((each for each in bridges if each.secondary == bus and gpu in each.gpus), None)
            if above is None:
                break
            chain.append(above)
            bus = _bus(above.bus_id)
        if chain and chain[-1].kind == "Root Port":
            found[gpu] = tuple(each.bus_id for each in chain)
    return found


def redirecting(bridges: Sequence[Bridge], gpus: Sequence[str]) -> tuple[str, ...]:
    """The ports of switches that send up to the root what these GPUs send each other."""
    sends_up = {each.bus_id for each in bridges if each.redirects}
    return tuple(port for port in dividing_ports(chains(bridges, gpus)) if port in sends_up)


def access(text: str, gpus: Sequence[str]) -> str:
    """How much of this `lspci -D -vvv` can be relied on: "ok" where all is there that says whether ACS redirects.

    Returns:
        "ok"; "denied" where root alone may read it; "incomplete" where bridges or their capabilities are missing.
    """
    bridges = read_bridges(text, gpus)
    ways = chains(bridges, gpus)
    known = {each.bus_id for each in bridges if each.redirects is not None}
    if ways.keys() == set(gpus) and known.issuperset(dividing_ports(ways)):
        return "ok"
    return "denied" if "<access denied>" in text else "incomplete"


def _bus(bus_id: str) -> int:
    """The number of the bus that a device is on; -2, which is none, where nvidia-smi gave something else."""
    match = re.fullmatch(r"[0-9a-f]{4,8}:([0-9a-f]{2}):[0-9a-f]{2}\.[0-7]", bus_id)
    return int(match[1], 16) if match else -2


def _blocks(text: str) -> Iterator[tuple[str, str]]:
    """Each device's address and text; lspci ends each with an empty line."""
    for block in re.split(r"(?<=\n)(?=[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7] )", text):
        match = re.match(r"([0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]) ", block)
        if match:
            yield match[1], block
