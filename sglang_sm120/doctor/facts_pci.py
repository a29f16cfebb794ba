"""The PCI bus: the GPUs that sit on it, whether or not a driver has them, and the bridges above, from lspci."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from sglang_sm120.doctor.machine import Machine

_DEVICES = "/sys/bus/pci/devices"
_NVIDIA = "0x10de"
_DISPLAY = "0x03"  # base class of VGA and 3D controllers
_REDIRECTS = ("ReqRedir+", "CmpltRedir+", "UpstreamFwd+")


@dataclass(frozen=True)
class PciGpu:
    """An NVIDIA display controller on the bus. driver: the kernel's, or empty. node: of NUMA, -1 for none."""

    bus_id: str
    driver: str
    node: int | None = None


@dataclass(frozen=True)
class Bridge:
    """A bridge above at least one of the GPUs. redirects: its ACS sends traffic between GPUs up to the root.

    kind: "Root Port", "Upstream Port", "Downstream Port" or what else lspci says.
    """

    bus_id: str
    kind: str
    redirects: bool
    gpus: tuple[str, ...]


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


def access(text: str) -> str:
    """ "ok" where lspci could read extended capabilities, "denied" where root alone may."""
    return "denied" if "<access denied>" in text else "ok"


def read_bridges(text: str, gpus: Sequence[str]) -> tuple[Bridge, ...]:
    """The bridges above these GPUs, from `lspci -D -vvv`, nearest first for each GPU.

    A bridge leads to the buses from its secondary to its subordinate number, in its own domain.
    """
    blocks = list(_blocks(text))
    found = []
    for bus_id, block in blocks:
        buses = re.search(r"Bus: primary=\w+, secondary=(\w+), subordinate=(\w+)", block)
        if buses is None:
            continue
        first, last = int(buses[1], 16), int(buses[2], 16)
        below = tuple(gpu for gpu in gpus if gpu[:4] == bus_id[:4] and first <= int(gpu.split(":")[1], 16) <= last)
        if below:
            kind = re.search(r"Express \(v\d\) ([\w /-]+?)(?: \(Slot[+-]\))?(?:, |$)", block, re.MULTILINE)
            control = re.search(r"ACSCtl:(.*)", block)
            redirects = control is not None and any(flag in control[1] for flag in _REDIRECTS)
            found.append((last - first, Bridge(bus_id, kind[1] if kind else "bridge", redirects, below)))
    return tuple(bridge for _, bridge in sorted(found, key=lambda item: (item[0], item[1].bus_id)))


def _blocks(text: str) -> Iterator[tuple[str, str]]:
    """Each device's address and text."""
    for block in re.split(r"\n(?=[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7] )", text):
        match = re.match(r"([0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]) ", block)
        if match:
            yield match[1], block
