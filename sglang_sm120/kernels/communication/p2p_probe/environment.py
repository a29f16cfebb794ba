"""What of the machine explains a fault of P2P: IOMMU, ACS, BAR1, the driver's registry. Reads files, changes nothing.

Every fact is optional: files are missing in containers and virtual machines, and some need root.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

_ROOT = Path("/")
_DEVICES = "/sys/bus/pci/devices"
_ACS_CAPABILITY = 0x000D
_ACS_REDIRECT = 0x0C  # request redirect, completion redirect; upstream forwarding alone sends nothing up
_EXTENDED = 0x100  # where extended capabilities start in the configuration space
_REGISTRY = ("RegistryDwords", "RegistryDwordsPerDevice")
_NVIDIA_PARAMETERS = (*_REGISTRY, "EnableResizableBar", "DmaRemapPeerMmio", "GrdmaPciTopoCheckOverride")
_IOMMU_ARGUMENT = re.compile(r"^(?:(?:amd_|intel_)?iommu(?:\.\w+)?|pci|pcie_acs_override)(?:=.*)?$")


class Reader(Protocol):
    """Where files come from: this machine's (`Files`), or a recording of another's. Paths are absolute."""

    def text(self, path: str) -> str:
        """A file's text; empty where it cannot be read."""
        ...

    def data(self, path: str) -> bytes:
        """A file's bytes, as many as this process may read."""
        ...

    def names(self, path: str) -> tuple[str, ...]:
        """What a folder holds, sorted; empty where it cannot be read."""
        ...

    def real(self, path: str) -> str:
        """The path behind links; empty where nothing is there."""
        ...


class Files:
    """The files of this machine, or those under another root. Raises nothing."""

    def __init__(self, root: Path = _ROOT) -> None:
        self._root = root

    def text(self, path: str) -> str:
        return self.data(path).decode(errors="replace")

    def data(self, path: str) -> bytes:
        try:
            return self._at(path).read_bytes()
        except OSError:
            return b""

    def names(self, path: str) -> tuple[str, ...]:
        try:
            return tuple(sorted(entry.name for entry in self._at(path).iterdir()))
        except OSError:
            return ()

    def real(self, path: str) -> str:
        try:
            return "/" + str(self._at(path).resolve(strict=True).relative_to(self._root.resolve()))
        except (OSError, RuntimeError, ValueError):  # missing, a loop of links, one that leaves the root
            return ""

    def _at(self, path: str) -> Path:
        return self._root / path.lstrip("/")


@dataclass(frozen=True)
class Environment:
    """Facts; empty or None where they cannot be read.

    Attributes:
        iommu_arguments: of the kernel's command line, about IOMMU and PCI.
        iommus: that translate on this machine.
        gpu_iommu_types: "PCI bus id: type"; identity is passthrough, DMA and DMA-FQ translate.
        acs_bridges: ports of switches that send traffic between these GPUs up to the root (reading it needs root).
        small_bar1: "PCI bus id: MiB" of GPUs that show less than 1 GiB of their memory on the bus.
        driver_parameters: "name: value" of NVIDIA's kernel module, those that concern P2P.
        force_p2p: its registry has a key that forces P2P, for all GPUs or for one.
        uvm_disable_hmm: of the module nvidia_uvm.
    """

    iommu_arguments: tuple[str, ...] = ()
    iommus: tuple[str, ...] = ()
    gpu_iommu_types: tuple[str, ...] = ()
    acs_bridges: tuple[str, ...] = ()
    small_bar1: tuple[str, ...] = ()
    driver_parameters: tuple[str, ...] = ()
    force_p2p: bool = False
    uvm_disable_hmm: bool | None = None

    @property
    def iommu_translates(self) -> bool | None:
        """Whether the IOMMU translates what these GPUs send; None if that is not known."""
        types = [line.rpartition(": ")[2] for line in self.gpu_iommu_types]
        return any(kind != "identity" for kind in types) if types else None

    def lines(self) -> list[str]:
        """Every fact that is known, in a line each."""
        facts = (
            ("kernel arguments", self.iommu_arguments),
            ("IOMMUs", self.iommus),
            ("IOMMU groups", self.gpu_iommu_types),
            ("bridges with ACS redirection", self.acs_bridges),
            ("small BAR1", self.small_bar1),
            ("NVIDIA driver", self.driver_parameters),
        )
        lines = [f"{name}: {', '.join(values)}" for name, values in facts if values]
        if self.uvm_disable_hmm is not None:
            lines.append(f"nvidia_uvm uvm_disable_hmm: {'Y' if self.uvm_disable_hmm else 'N'}")
        return lines


def read_environment(pci_bus_ids: Sequence[str] = (), root: Path = _ROOT, reader: Reader | None = None) -> Environment:
    """The facts of this machine and of these GPUs. root: of the files, unless a reader is given. Raises nothing."""
    files = Files(root) if reader is None else reader
    parameters = tuple(_driver_parameters(files.text("/proc/driver/nvidia/params")))
    hmm = files.text("/sys/module/nvidia_uvm/parameters/uvm_disable_hmm").strip()
    chains = {bus_id: _bridges_above(files, bus_id) for bus_id in pci_bus_ids}
    dividing = dividing_ports({bus_id: tuple(chain) for bus_id, chain in chains.items()})
    configs = {bridge: f"{place}/config" for chain in chains.values() for bridge, place in chain.items()}
    types, bars = [], []
    for bus_id in pci_bus_ids:
        if kind := files.text(f"{_DEVICES}/{bus_id}/iommu_group/type").strip():
            types.append(f"{bus_id}: {kind}")
        size = _bar1_bytes(files.text(f"{_DEVICES}/{bus_id}/resource"))
        if size is not None and size < 1 << 30:
            bars.append(f"{bus_id}: {size >> 20} MiB")
    return Environment(
        iommu_arguments=tuple(word for word in files.text("/proc/cmdline").split() if _IOMMU_ARGUMENT.match(word)),
        iommus=files.names("/sys/class/iommu"),
        gpu_iommu_types=tuple(types),
        acs_bridges=tuple(port for port in dividing if acs_control(files.data(configs[port])) & _ACS_REDIRECT),
        small_bar1=tuple(bars),
        driver_parameters=parameters,
        force_p2p=any(map(forces_p2p, parameters)),
        uvm_disable_hmm=None if not hmm else hmm in ("Y", "1"),
    )


def dividing_ports(chains: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    """The downstream ports of switches at which the ways between two of these devices part.

    Only there does ACS redirection send what they exchange up to the root. Devices of different root ports meet at the
    root anyway, and a port above the place where two ways meet sees nothing of it.

    Args:
        chains: device -> the bridges above it, nearest first.
    """
    ports: dict[str, None] = {}
    for chain in chains.values():
        for port, above in itertools.pairwise(chain):
            if any(above in other and port not in other for other in chains.values()):
                ports[port] = None
    return tuple(ports)


def forces_p2p(parameter: str) -> bool:
    """Whether a line of `Environment.driver_parameters` has a key that forces P2P; a value of 0 is off.

    Keys stand as NAME=VALUE between semicolons, after "pci=ADDRESS" in RegistryDwordsPerDevice; the last counts.
    """
    name, _, text = parameter.partition(":")
    if name not in _REGISTRY:
        return False
    for section in re.split(r"pci\s*=[^;]*", text, flags=re.IGNORECASE):
        keys = dict(re.findall(r"(\w*ForceP2P\w*)\s*=\s*([^;\s]*)", section, re.IGNORECASE))
        if any(_is_on(value) for value in keys.values()):
            return True
    return False


def _is_on(value: str) -> bool:
    try:
        return int(value, 0) != 0
    except ValueError:  # in a form that is not known: better named than passed over
        return True


def read_link(pci_bus_id: str, root: Path = _ROOT) -> tuple[float | None, int | None, int | None]:
    """A device's PCIe link as it is now: GB/s (1e9) in one direction, lanes, and the lanes that it could have.

    An idle GPU slows its link down: ask right after it was busy.
    """
    files, folder = Files(root), f"{_DEVICES}/{pci_bus_id}"
    speed = re.match(r"([\d.]+) GT/s", files.text(f"{folder}/current_link_speed"))
    lanes, most = (_number(files.text(f"{folder}/{name}")) for name in ("current_link_width", "max_link_width"))
    if speed is None or not lanes:
        return None, lanes, most
    gt_s = float(speed[1])
    return gt_s * lanes / 8 * (0.8 if gt_s < 8 else 128 / 130), lanes, most


def _number(text: str) -> int | None:
    return int(text) if text.strip().isdecimal() else None


def _driver_parameters(text: str) -> Iterator[str]:
    for line in text.splitlines():
        name, _, value = line.partition(":")
        value = value.strip().strip('"')
        if name.strip() in _NVIDIA_PARAMETERS and value:
            yield f"{name.strip()}: {value}"


def _bar1_bytes(resource: str) -> int | None:
    """The file has a line a resource: first address, last address, flags."""
    lines = resource.splitlines()
    try:
        first, last = (int(word, 16) for word in lines[1].split()[:2])
    except (IndexError, ValueError):
        return None
    return last - first + 1 if last > first else None


def _bridges_above(files: Reader, bus_id: str) -> dict[str, str]:
    """The bridges above a device, nearest first -> their folders; empty where /sys is not there."""
    found = {}
    place = files.real(f"{_DEVICES}/{bus_id}")
    while place := place.rpartition("/")[0]:
        bridge = place.rpartition("/")[2]
        if not re.fullmatch(r"[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]", bridge):
            break
        found[bridge] = place
    return found


def config_with_acs(control: int) -> bytes:
    """A configuration space that has this ACS control register and nothing else, for recordings: no serial number."""
    capability = (_ACS_CAPABILITY | 1 << 16).to_bytes(4, "little") + bytes(2) + control.to_bytes(2, "little")
    return bytes(_EXTENDED) + capability


def acs_control(config: bytes) -> int:
    """The ACS control register of a configuration space; 0 without one, or where root alone may read that far."""
    at, seen = _EXTENDED, set()
    while at >= _EXTENDED and at not in seen and at + 8 <= len(config):
        seen.add(at)
        header = int.from_bytes(config[at : at + 4], "little")
        if header & 0xFFFF == _ACS_CAPABILITY:
            return int.from_bytes(config[at + 6 : at + 8], "little")
        at = header >> 20
    return 0
